"""`prunebench export` and `prunebench verify`."""

from __future__ import annotations

import argparse
from pathlib import Path

from prunebench.cli.shared import Result, Step, watched

__all__ = ["add_export", "add_verify", "run_export", "run_verify"]

FORMATS = ("native", "hf", "vllm-mone", "ct")


def add_export(parser: argparse.ArgumentParser) -> None:
    """The options of `prunebench export`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a pruned or quantized run")
    parser.add_argument(
        "--format", required=True, choices=FORMATS, help="what to write; docs/export.md says what each holds"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the new folder (default exports/MODEL/ARM-FORMAT)")
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="of a file of weights, such as 500MB (default %(default)s)",
    )
    ct = parser.add_argument_group("for ct (default: experts in 4 bits, groups of 128 columns, attention as it is)")
    ct.add_argument("--bits", type=int, help="of the experts' matrices, 2 to 8")
    ct.add_argument("--attention-bits", type=int, help="of the attention's matrices, 2 to 8")
    ct.add_argument("--group-size", type=int, help="columns that share a scale")
    ct.add_argument(
        "--asymmetric",
        action="store_true",
        help="a zero point per group too; transformers does not load it, other readers are untested",
    )
    parser.add_argument("--model", metavar="FOLDER", help="the base model's folder, if the run's model was a folder")
    parser.add_argument("--operator", metavar="FILE", help="the operator's file, if it is not shipped")


def add_verify(parser: argparse.ArgumentParser) -> None:
    """The options of `prunebench verify`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="an export")
    parser.add_argument("--base", metavar="MODEL", help="the base model, where it is not found under its old name")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: as evaluated)")


@watched
def run_export(options: argparse.Namespace, step: Step) -> Result:
    """Exit code, result as JSON data, and as text.

    Args:
        options: as parsed.
        step: called with (what, done, total).
    """
    from prunebench.export import Scheme, export_run
    from prunebench.moe import quiet_libraries

    quiet_libraries()
    given = {name: getattr(options, name) for name in ("bits", "attention_bits", "group_size")}
    given["symmetric"] = False if options.asymmetric else None
    scheme = Scheme(**{name: value for name, value in given.items() if value is not None})
    done = export_run(
        options.run,
        options.format,
        options.out,
        max_shard_size=options.max_shard_size,
        scheme=scheme if any(value is not None for value in given.values()) else None,
        model=options.model,
        operator=options.operator,
        progress=step,
    )
    return 0, done.to_json(), f"{done.form}, {done.stored['total'] / 1e6:.2f} MB\n{done.folder}"


def run_verify(options: argparse.Namespace) -> Result:
    """As `run_export`; exit code 1 if the files are not their source's."""
    from prunebench.export import verify
    from prunebench.moe import quiet_libraries

    quiet_libraries()
    found = verify(options.folder, base=options.base, device=options.device)
    same = "every bit the same" if found.exact else f"largest difference {found.largest:.2g}"
    text = (
        f"{found.form}: log-probabilities of {found.tokens} tokens, {same}, mean KL {found.divergence:.2g}"
        f" (allowed {found.allowed:g}), likeliest token the same for {100 * found.same_first:.1f} %"
    )
    return (0 if found.passed else 1), found.to_json(), f"{'pass' if found.passed else 'FAIL'}  {text}"
