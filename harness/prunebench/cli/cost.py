"""`prunebench cost`: stored bytes and eager timings of operators on one mask, relative to the dense model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prunebench.cli.mask_studies import add_calibration
from prunebench.cli.masks import add_selection
from prunebench.cli.shared import Result, Step, watched
from prunebench.errors import UsageError

__all__ = ["add_cost", "run_cost"]

OPERATORS: Final = ("constant", "tilt", "reroute")
_PROMPT: Final = 512  # 2610.41366 App. F.1, or what the model has room for


def add_cost(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_selection(parser)
    parser.add_argument("--mask", metavar="FILE", help="a mask file, or a run's folder, instead of a method's")
    parser.add_argument(
        "--operator",
        action="append",
        metavar="OPERATOR",
        help="name, or name(parameter=value)@scale, as in tracks; may be repeated; the constant is always timed "
        f"(default: {' '.join(OPERATORS)})",
    )
    add_calibration(parser)
    parser.add_argument(
        "--batch", action="append", type=int, help="prefill batch sizes (may be repeated; default: 1 8 32)"
    )
    parser.add_argument(
        "--prompt", type=int, help="tokens per prompt (default: 512, or fewer where the model has no room)"
    )
    parser.add_argument("--decode", type=int, default=64, help="tokens decoded at batch 1 (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them (default %(default)s)")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="wall (default), or cpu: this process's own time, on a CPU that others use too",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default %(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default %(default)s)")
    parser.add_argument(
        "--experts-implementation", help="of transformers: eager (default on cpu), grouped_mm (elsewhere) or batched_mm"
    )
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per calibration forward (default 8192)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the JSON goes")


@watched
def run_cost(options: argparse.Namespace, step: Step) -> Result:
    """Time the arms, write the file, and show the table.

    Args:
        options: as parsed.
        step: called with (what, done, total).
    """
    from prunebench.mask import write_atomically
    from prunebench.moe import context_length, quiet_libraries
    from prunebench.run import ArmSpec, Session
    from prunebench.run.arm import PreparedArm, prepare
    from prunebench.run.cost import CONSTANT, DENSE, CostSettings, measure_cost
    from prunebench.run.session import check_writable
    from prunebench.run.track import read_entry

    quiet_libraries()
    if options.method is None and options.mask is None:
        raise UsageError("nothing says which experts go", fix="give --method, or --mask")
    shared = ("model", "text", "blocks", "length", "draw", "seed", "device", "dtype", "batch_tokens")
    common: dict[str, Any] = {name: getattr(options, name) for name in (*shared, "experts_implementation")}
    common["suites"] = ("perplexity",)  # nothing is evaluated, but an arm has a suite
    choice = {name: getattr(options, name) for name in ("method", "mask", "ratio", "keep", "scope", "protect", "spare")}
    arms: dict[str, PreparedArm] = {DENSE: prepare(ArmSpec(**common))}
    for text in dict.fromkeys([CONSTANT, *(options.operator or OPERATORS)]):
        name, parameters, scale = read_entry(text)
        spec = ArmSpec(
            **common,
            **choice,
            parameters=tuple(options.param),
            operator=name,
            operator_parameters=parameters,
            scale=scale,
        )
        arms[text] = prepare(spec)
    positions = context_length(arms[DENSE].folder)
    settings = CostSettings(
        batches=tuple(dict.fromkeys(options.batch or CostSettings.batches)),
        prompt=options.prompt if options.prompt is not None else max(1, min(_PROMPT, positions - options.decode)),
        decode=options.decode,
        repeats=options.repeats,
        warmup=options.warmup,
        clock=options.clock,
    )
    settings.check(positions=positions, tokens=options.blocks * options.length, device=options.device)
    check_writable(options.out.parent)
    data = measure_cost(Session(options.out.parent, progress=step), arms, settings, progress=step)
    write_atomically(options.out, (json.dumps(data, indent=1) + "\n").encode())
    return 0, {"file": str(options.out), **data}, f"{_table(data)}\n{options.out}"


def _table(data: Mapping[str, Any]) -> str:
    from tabulate import tabulate

    pieces = list(data["rounds"])
    headers = ["arm", "stored MB", "of dense", *pieces]
    rows = [[one["arm"], *_stored(one), *(_time(one["times"][piece]) for piece in pieces)] for one in data["arms"]]
    table = tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True)
    dense = data["arms"][0]["times"]
    settings = data["settings"]
    work = f"prompts of {settings['prompt']} tokens, {settings['decode']} decoded"
    work += f", {settings['repeats']} rounds, {settings['clock']} clock"
    where = f"{data['volatile']['processor']}, {data['volatile']['threads']} threads, {data['experts_implementation']}"
    return "\n".join(
        [
            table,
            data["label"],
            f"{data['model']['name']}, {data['dtype']} on {where}; {work}; median [least, largest]",
            "kept: share of the constant's saving; not stated where the constant did not save in every round",
            "dense: " + ", ".join(f"{piece} {_seconds(dense[piece]['seconds'], piece)}" for piece in pieces),
        ]
    )


def _stored(one: Mapping[str, Any]) -> Sequence[str]:
    return f"{one['stored']['total'] / 1e6:,.2f}", f"{100 * one['stored_of_dense']:.1f} %"


def _time(one: Mapping[str, Any]) -> str:
    text = f"{one['ratio']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
    return text if one["kept"] is None else f"{text} kept {100 * one['kept']:.0f} %"


def _seconds(seconds: float, piece: str) -> str:
    return f"{1e3 * seconds:.1f} ms" + (" per token" if piece == "decode" else "")
