"""`prunebench mask …`: choosing masks without running them, and looking at them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prunebench.cli.mask_studies import STUDIES, add_calibration, add_machine, add_studies
from prunebench.cli.shared import Result, Step, watched
from prunebench.errors import UsageError
from prunebench.mask import Mask

__all__ = ["add_mask_verbs", "add_selection", "run_mask_verb"]


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Options that say which experts go."""
    parser.add_argument(
        "--model", required=True, help="zoo name, folder with config.json, or hub id org/name[@revision]"
    )
    parser.add_argument("--method", help="criterion by name or path of its file; leave out for the dense model")
    parser.add_argument(
        "--param", action="append", default=[], metavar="NAME=VALUE", help="parameter of the method (may be repeated)"
    )
    parser.add_argument("--ratio", help="share of each layer's experts to prune, such as 0.5")
    parser.add_argument("--keep", type=int, help="experts to keep in each layer, instead of --ratio")
    parser.add_argument(
        "--scope",
        default="layer",
        choices=["layer", "group", "global"],
        help="what the budget counts over: each layer (default), each router group, or the whole model",
    )
    parser.add_argument(
        "--protect",
        metavar="EXPERTS",
        help="experts that stay, others going in their place: LAYER:EXPERT,… or super or super-relative, as found",
    )
    parser.add_argument("--spare", metavar="EXPERTS", help="the same with nobody going in their place: a smaller mask")


def add_mask_verbs(parser: argparse.ArgumentParser) -> None:
    """The verbs below `prunebench mask`."""
    verbs = parser.add_subparsers(dest="mask_verb", required=True, metavar="MASK_VERB", parser_class=type(parser))

    def verb(name: str, summary: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=summary, description=summary)
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        return sub

    compute = verb("compute", "choose a mask and write it to a file; nothing is evaluated")
    add_selection(compute)
    add_calibration(compute)
    compute.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the mask goes")
    add_machine(compute)
    what = "mask file, or folder of a run whose mask is meant"
    show = verb("show", "a map of the experts that each layer keeps; of several masks, how many keep each")
    show.add_argument("masks", nargs="+", metavar="MASK", help=what)
    overlap = verb("overlap", "how far masks of one model agree, over pruned and over kept experts")
    overlap.add_argument("masks", nargs="+", metavar="MASK", help=f"{what}; two or more")
    diff = verb("diff", "the experts that only one of two masks prunes")
    diff.add_argument("one", metavar="A", help=what)
    diff.add_argument("other", metavar="B", help=what)
    validate = verb("validate", "whether a mask is whole, and fits a model")
    validate.add_argument("masks", nargs="+", metavar="MASK", help=what)
    validate.add_argument("--model", help="zoo name, folder or hub id that it has to fit")
    add_studies(verb)


@watched
def run_mask_verb(options: argparse.Namespace, step: Step) -> Result:
    """Exit code, result as JSON data, and as text.

    Args:
        options: as parsed.
        step: called with (what, done, total).
    """
    if options.mask_verb == "compute":
        return _compute(options, step)
    if options.mask_verb in STUDIES:
        return STUDIES[options.mask_verb](options, step)
    return _VERBS[options.mask_verb](options)


def _compute(options: argparse.Namespace, step: Step) -> Result:
    from prunebench.moe import quiet_libraries
    from prunebench.run import ArmSpec, Session
    from prunebench.run.arm import prepare
    from prunebench.run.session import check_writable

    quiet_libraries()
    if options.method is None:
        raise UsageError("nothing says which experts go", fix="give --method")
    names = (
        "model",
        "method",
        "ratio",
        "keep",
        "scope",
        "protect",
        "spare",
        "text",
        "blocks",
        "length",
        "draw",
        "seed",
    )
    machine = ("device", "dtype", "batch_tokens")
    given = {name: getattr(options, name) for name in (*names, *machine)}
    # Rerouting fits nothing, and a suite is not run: neither has a part in the mask.
    arm = prepare(ArmSpec(**given, parameters=tuple(options.param), operator="reroute", suites=("perplexity",)))
    if options.out.is_dir():
        raise UsageError("a folder stands where the mask goes", where=str(options.out), expected="the name of a file")
    check_writable(options.out.parent)
    mask = Session(options.out.parent, progress=step).choose(arm)
    mask.save(options.out)
    report = dict(mask.report or {})
    text = "\n".join([_summary(mask), *_rules(report), str(options.out)])
    return 0, {"file": str(options.out), "mask": mask.to_json(), "selection": report}, text


def _rules(report: Mapping[str, Any]) -> list[str]:
    """What a rule decided instead of a score, a line per layer; and which super experts were looked for and found."""
    words = {
        "never_routed": "no token reached {}",
        "kept_by_id": "kept by id over equal scores {}",
        "kept_by_protection": "kept by protection {}",
    }
    lines = []
    for index, layer in report.get("layers", {}).items():
        parts = [said.format(_ids(layer[name])) for name, said in words.items() if layer.get(name)]
        zeros = sorted(set(layer.get("zero_scores", ())) - set(layer.get("never_routed", ())))
        if zeros:
            parts.append(f"scores of zero {_ids(zeros)}")
        if parts:
            lines.append(f"layer {index}: {'; '.join(parts)}")
    if (looked := report.get("super_experts")) is not None:
        found = ", ".join(f"{index}:{expert}" for index, expert, _ in looked["found"]) or "none"
        lines.append(f"super experts ({looked['rule']}): {found}")
    return lines


def _summary(mask: Mask) -> str:
    total = sum(layer.experts for layer in mask.layers)
    return f"{mask.pruned_count} of {total} experts pruned in {len(mask.layers)} layers, digest {mask.digest}"


def _named(paths: list[str]) -> dict[str, Mask]:
    """Masks by what tells their files or folders apart: the last parts of the paths."""
    from prunebench.run.arm import read_mask

    masks = {text: read_mask(text)[0] for text in paths}
    if len(masks) != len(paths):
        raise UsageError("a mask is named twice", expected="each once")
    return masks


def _show(options: argparse.Namespace) -> Result:
    from prunebench.analysis.masks import heat_map

    masks = _named(options.masks)
    summaries = [f"{name}: {_summary(mask)}" for name, mask in masks.items()]
    text = "\n".join([*summaries, "layer", heat_map(list(masks.values()))])
    return 0, {name: mask.to_json() for name, mask in masks.items()}, text


def _overlap(options: argparse.Namespace) -> Result:
    from tabulate import tabulate

    from prunebench.analysis.masks import overlaps

    masks = _named(options.masks)
    if len(masks) < 2:
        raise UsageError("one mask agrees with nothing", expected="two or more masks")
    pairs = overlaps(masks)
    data = [{"one": one, "other": other, **found.to_json()} for one, other, found in pairs]
    rows = [
        [one, other, *(f"{100 * float(share):.1f} %" for share in (found.pruned, found.kept, found.by_chance))]
        for one, other, found in pairs
    ]
    headers = ["mask", "other", "pruned in both", "kept in both", "pruned in both by chance"]
    return 0, data, tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True)


def _diff(options: argparse.Namespace) -> Result:
    from prunebench.analysis.masks import difference

    masks = _named([options.one, options.other])
    found = difference(*masks.values())
    data = {str(index): {"only_a": list(a), "only_b": list(b)} for index, (a, b) in found.items()}
    lines = [f"layer {index}: only A prunes {_ids(a)}; only B prunes {_ids(b)}" for index, (a, b) in found.items()] or [
        "the masks prune the same experts"
    ]
    return 0, data, "\n".join(lines)


def _ids(experts: Sequence[int]) -> str:
    return ", ".join(map(str, experts)) or "none"


def _validate(options: argparse.Namespace) -> Result:
    masks = _named(options.masks)
    shapes = None
    if options.model is not None:
        from prunebench.loader import resolve_model
        from prunebench.run.sources import ModelFiles

        shapes, _ = ModelFiles.of(resolve_model(options.model)).peek()
    for name, mask in masks.items():
        if shapes is not None:
            mask.check_fits(shapes, where=name)
    fits = f", fits {options.model}" if shapes is not None else ""
    data = {name: {"digest": mask.digest, "pruned": mask.pruned_count} for name, mask in masks.items()}
    return 0, data, "\n".join(f"{name}: {_summary(mask)}{fits}" for name, mask in masks.items())


_VERBS: Final[Mapping[str, Callable[[Any], Result]]] = {
    "show": _show,
    "overlap": _overlap,
    "diff": _diff,
    "validate": _validate,
}
