"""Verbs of `prunebench mask` that measure something of criteria, rather than look at masks that are there."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from prunebench.cli.shared import Result, Step
from prunebench.errors import UsageError

if TYPE_CHECKING:
    from fractions import Fraction

    from prunebench.analysis.validity import Correlation
    from prunebench.run.arm import PreparedArm
    from prunebench.run.stability import Spread
    from prunebench.run.validity import ScoreValidity

__all__ = ["STUDIES", "add_calibration", "add_machine", "add_studies"]


class _Verb(Protocol):
    def __call__(self, name: str, summary: str, /) -> argparse.ArgumentParser: ...


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """Options that say on which text."""
    text = "calibration: world:DOMAIN, file:PATH, hub:ID@REV:FIELD"
    parser.add_argument("--text", default="world:general", help=text)
    parser.add_argument("--blocks", type=int, default=256, help="calibration blocks (default %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens per block (default %(default)s)")
    parser.add_argument("--draw", default="A", help="slice of the calibration text: A, B or C")
    parser.add_argument("--seed", type=int, default=0, help="seed of random selections (default %(default)s)")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Options that say how the model runs."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default %(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per forward (default %(default)s)")


def _add_criteria(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help="zoo name, folder with config.json, or hub id org/name[@revision]"
    )
    parser.add_argument(
        "--criteria",
        required=True,
        nargs="+",
        metavar="CRITERION",
        help="criteria by name or path, with parameters as in 'unified(member=msan)'",
    )


def _add_amount(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratio", help="share of each layer's experts to prune, such as 0.5")
    parser.add_argument("--keep", type=int, help="experts to keep in each layer, instead of --ratio")
    parser.add_argument(
        "--scope",
        default="layer",
        choices=["layer", "group", "global"],
        help="what the budget counts over: each layer (default), each router group, or the whole model",
    )


def _add_out(parser: argparse.ArgumentParser, what: str) -> None:
    help_text = f"folder where {what} are kept (default %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("results"), help=help_text)


def add_studies(verb: _Verb) -> None:
    """The verbs, made by `verb`."""
    _add_validity(verb("validity", "whether scores order experts by what deleting each does to the model's answers"))
    agreement = verb("agreement", "how far masks agree by the amount of calibration text, from disjoint shards of it")
    _add_criteria(agreement)
    _add_amount(agreement)
    add_calibration(agreement)
    agreement.add_argument("--shards", type=int, default=16, help="equal parts of the draw (default %(default)s)")
    agreement.add_argument(
        "--orderings", type=int, default=20, help="random orders in which shards are added (default %(default)s)"
    )
    _add_out(agreement, "passes over shards")
    add_machine(agreement)
    drift = verb("drift", "how far masks move with the calibration text's domain, against other draws of one domain")
    _add_criteria(drift)
    _add_amount(drift)
    drift.add_argument("--texts", nargs="+", required=True, metavar="TEXT", help="two or more, written as --text is")
    drift.add_argument(
        "--blocks", type=int, default=256, help="blocks of every draw of every text (default %(default)s)"
    )
    drift.add_argument("--length", type=int, default=128, help="tokens per block (default %(default)s)")
    drift.add_argument("--draws", nargs="+", default=["A", "B", "C"], metavar="DRAW", help="of each (default: A B C)")
    drift.add_argument("--seed", type=int, default=0, help="seed of random selections (default %(default)s)")
    _add_out(drift, "passes")
    add_machine(drift)


def _add_validity(parser: argparse.ArgumentParser) -> None:
    _add_criteria(parser)
    add_calibration(parser)
    parser.add_argument("--retest-draw", default="B", help="draw of the second scores (default %(default)s)")
    parser.add_argument("--held-out", metavar="TEXT", help="text that the damage is measured on (default: --text)")
    parser.add_argument("--held-out-draw", default="C", help="its draw (default %(default)s)")
    parser.add_argument(
        "--held-out-blocks", type=int, default=32, help="blocks of each of its two halves (default %(default)s)"
    )
    parser.add_argument("--experts", type=int, help="experts deleted per layer, chosen by --seed (default: all)")
    parser.add_argument("--layers", type=int, nargs="+", metavar="I", help="only in these layers")
    parser.add_argument("--operator", default="reroute", help="what answers the deleted expert (default %(default)s)")
    parser.add_argument(
        "--operator-param", action="append", default=[], metavar="NAME=VALUE", help="parameter of the operator"
    )
    parser.add_argument("--scale", help="gate scale where slots are refilled (default: the operator's own)")
    parser.add_argument("--resamples", type=int, default=2000, help="of the bootstrap (default %(default)s)")
    _add_out(parser, "passes and finished deletions")
    add_machine(parser)


def _named(criteria: list[str]) -> dict[str, dict[str, Any]]:
    """What each criterion is, as fields of an arm."""
    from prunebench.run.track import read_entry

    found: dict[str, dict[str, Any]] = {}
    for text in criteria:
        method, parameters, scale = read_entry(text)
        if scale is not None:
            raise UsageError(f"criterion {text!r} has a scale", expected="a name, with parameters if it has any")
        if text in found:
            raise UsageError(f"criterion {text!r} is named twice", expected="each once")
        found[text] = {"method": method, "parameters": parameters}
    return found


def _arm(options: argparse.Namespace, **more: Any) -> PreparedArm:
    """An arm of the options; rerouting fits nothing and no suite is run, so neither has a part in a mask."""
    from prunebench.run import ArmSpec
    from prunebench.run.arm import prepare

    names = (
        *("model", "ratio", "keep", "scope", "text", "blocks", "length", "draw", "seed"),
        *("device", "dtype", "batch_tokens"),
    )
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    return prepare(ArmSpec(**{**given, "operator": "reroute", "suites": ("perplexity",), **more}))


def _one_gone(model: str) -> int:
    """Experts to keep in each layer so that the least goes: scores do not depend on how many do."""
    from prunebench.loader import resolve_model
    from prunebench.run.sources import ModelFiles

    shapes, _ = ModelFiles.of(resolve_model(model)).peek()
    return min(shape.experts for shape in shapes) - 1


def _validity(options: argparse.Namespace, step: Step) -> Result:
    from prunebench.calibration import CalibrationSpec
    from prunebench.moe import quiet_libraries
    from prunebench.run import Session
    from prunebench.run.validity import score_validity

    quiet_libraries()
    named = _named(options.criteria)
    if options.resamples < 1:
        raise UsageError(f"{options.resamples} resamples", expected="at least 1")
    draws = [options.draw, options.retest_draw]
    if options.held_out in (None, options.text):
        draws.append(options.held_out_draw)
    if len(set(draws)) < len(draws):
        raise UsageError(
            f"draws {', '.join(draws)} of one text", expected="another one for each of scores, retest and held-out text"
        )
    held_out = CalibrationSpec(options.held_out or options.text, options.blocks, options.length, options.held_out_draw)
    keep = _one_gone(options.model)
    criteria = {
        name: (_arm(options, keep=keep, **given), _arm(options, keep=keep, **given, draw=options.retest_draw))
        for name, given in named.items()
    }
    for name, (first, _) in criteria.items():
        assert first.method is not None
        if first.method.schedule == "sequential":
            raise UsageError(
                f"{name} scores a layer on a model that is pruned already", expected="a criterion of the intact model"
            )
    deletion = _arm(
        options,
        method="random",
        keep=keep,
        operator=options.operator,
        operator_parameters=tuple(options.operator_param),
        scale=options.scale,
    )
    result = score_validity(
        Session(options.out, progress=step),
        criteria,
        deletion,
        held_out,
        blocks=options.held_out_blocks,
        experts=options.experts,
        layers=options.layers,
        resamples=options.resamples,
    )
    return 0, result.to_json(), _validity_text(result)


_WORDS: Final = {"kl": "KL(dense ‖ pruned)", "reverse_kl": "KL(pruned ‖ dense)", "nll": "ΔNLL"}


def _validity_text(result: ScoreValidity) -> str:
    from tabulate import tabulate

    from prunebench.analysis.validity import ceiling

    rows = []
    for name, by_measure in result.found.items():
        for measure, found in by_measure.items():
            parts: list[tuple[str, Mapping[str, Correlation]]] = [
                ("mean of layers", found.mean),
                ("pooled", found.pooled),
            ]
            if measure == "kl":
                parts += [(f"layer {index}", one) for index, one in found.layers.items()]
            for what, one in parts:
                interval = one["test"].low, one["test"].high
                numbers = [one[key].value for key in ("test", "retest", "scores", "damage")]
                rows.append([
                    name, _WORDS[measure], what, _rho(numbers[0]),
                    "" if None in interval else f"[{_rho(interval[0])}, {_rho(interval[1])}]",
                    *map(_rho, numbers[1:]), _rho(ceiling(one)), one["test"].n,
                ])  # fmt: skip
    headers = ["criterion", "damage", "over", "ρ", "95 %", "retest", "of scores", "of damage", "ceiling", "experts"]
    proof = result.damages.proof
    how = "each deletion began at its own layer" if proof.streamed else f"whole forwards: {proof.reason}"
    return "\n".join([
        tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True),
        "ρ: Spearman of scores with the damage of deleting each expert; retest: both anew, on another draw and text",
        "of scores, of damage: each with itself on the other draw or text; ceiling: what their noise leaves for ρ",
        how,
    ])  # fmt: skip


def _rho(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _agreement(options: argparse.Namespace, step: Step) -> Result:
    from tabulate import tabulate

    from prunebench.moe import quiet_libraries
    from prunebench.run import Session
    from prunebench.run.stability import shard_agreement

    quiet_libraries()
    criteria = {name: _arm(options, **given) for name, given in _named(options.criteria).items()}
    found = shard_agreement(
        Session(options.out, progress=step),
        criteria,
        shards=options.shards,
        orderings=options.orderings,
        seed=options.seed,
    )
    rows = [
        [name, one.shards, one.tokens, *_cells(one.with_all), *_cells(one.between)]
        for name, sizes in found.items()
        for one in sizes
    ]
    headers = [
        *("criterion", "shards", "tokens", "pruned, with all", "kept, with all"),
        *("pruned, disjoint", "kept, disjoint"),
    ]
    text = [
        tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True),
        "share (%) of the mask's pruned or kept experts that the other has too, over all layers: with the mask of all",
        f"shards, and with one of as many other shards; mean of {options.orderings} orderings [middle 95 % of them]",
    ]
    data = {
        "model": options.model,
        "text": options.text,
        "draw": options.draw,
        "shards": options.shards,
        "orderings": options.orderings,
        "agreement": {name: [one.to_json() for one in sizes] for name, sizes in found.items()},
    }
    return 0, data, "\n".join(text)


def _cells(found: Mapping[str, Spread] | None) -> list[str]:
    """Pruned and kept, in percent."""
    if found is None:
        return ["", ""]
    return [
        f"{100 * one.mean:.1f} [{100 * one.low:.1f}, {100 * one.high:.1f}]" for one in (found["pruned"], found["kept"])
    ]


def _drift(options: argparse.Namespace, step: Step) -> Result:
    from tabulate import tabulate

    from prunebench.moe import quiet_libraries
    from prunebench.run import Session
    from prunebench.run.stability import text_drift

    quiet_libraries()
    for what, given in (("text", options.texts), ("draw", options.draws)):
        if len(given) < 2:
            raise UsageError(f"one {what} drifts from nothing", expected=f"two or more {what}s")
        if len(set(given)) < len(given):
            raise UsageError(f"a {what} is named twice", expected="each once")
    criteria = {
        name: {text: [_arm(options, **given, text=text, draw=draw) for draw in options.draws] for text in options.texts}
        for name, given in _named(options.criteria).items()
    }
    found = text_drift(Session(options.out, progress=step), criteria)
    rows = [
        [
            *(
                name,
                " → ".join(one.texts),
                *(_range(getattr(one.drifts, key)) for key in ("first", "second", "across")),
            ),
            "–" if one.drifts.times is None else f"{float(one.drifts.times):.1f}",
            "{} of {}".format(*one.splits),
        ]
        for name, pairs in found.items()
        for one in pairs
    ]
    headers = ["criterion", "texts", "draws of the first", "of the second", "across", "÷ first", "splits as far apart"]
    tokens = next(iter(found.values()))[0].tokens
    text = [
        tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True),
        f"share (%) of pruned experts that differ, mean (range) over pairs of draws; every draw has {tokens:,} tokens",
    ]
    data = {
        "model": options.model,
        "draws": options.draws,
        "drift": {name: [one.to_json() for one in pairs] for name, pairs in found.items()},
    }
    return 0, data, "\n".join(text)


def _range(shares: Sequence[Fraction]) -> str:
    from prunebench.analysis.drift import mean_share

    mean, low, high = (f"{100 * float(share):.1f}" for share in (mean_share(shares), min(shares), max(shares)))
    return f"{mean} ({low} to {high})"


STUDIES: Final[Mapping[str, Callable[[argparse.Namespace, Step], Result]]] = {
    "validity": _validity,
    "agreement": _agreement,
    "drift": _drift,
}
