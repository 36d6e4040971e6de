"""`prunebench bytes`: what a model stores, pruned and quantized, and how far two arms are apart."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prunebench.cli.shared import Result
from prunebench.errors import UsageError
from prunebench.mask import Budget, LayerShape
from prunebench.storage import (
    ALL_PARTS,
    TOLERANCE,
    Account,
    Bits,
    Match,
    Survey,
    account,
    config_tensors,
    file_bytes,
    gap_text,
    match,
    read_headers,
    survey,
    tied_names,
)

__all__ = ["add_bytes", "run_bytes"]

ARMS: Final = ("w4", "w3", "w2", "e3a4", "e2a4")
_AS_SAVED: Final = "w16"


def add_bytes(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "source", metavar="SOURCE", help="zoo name, model folder, config.json, hub id, or the folder of a run"
    )
    parser.add_argument(
        "--arm",
        action="append",
        metavar="ARM",
        help="w4: every decoder linear at 4 bits; e3a4: routed experts at 3, the others at 4; may be repeated "
        f"(default: {' '.join(ARMS)})",
    )
    parser.add_argument("--ratio", action="append", default=[], help="also with this share pruned (may be repeated)")
    parser.add_argument(
        "--keep", action="append", default=[], type=int, help="also with so many experts kept per layer (repeatable)"
    )
    parser.add_argument("--operator", help=f"what answers pruned slots (default {_OPERATOR})")
    parser.add_argument("--rank", type=int, help=f"of the tilt, as for params (default {_RANK})")
    parser.add_argument(
        "--slice-router",
        action="store_true",
        help="the router rows of pruned experts go too, as they may when rerouting at renorm",
    )
    parser.add_argument(
        "--zeros", choices=["fp16", "bits"], default="fp16", help="how zeros are stored (default %(default)s)"
    )
    parser.add_argument("--group", type=int, default=128, help="columns per scale and zero (default %(default)s)")
    parser.add_argument("--match", metavar="ARM", help="for every other arm, the experts to keep to store as much")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="share within which totals are matched (default %(default)s)"
    )
    parser.add_argument("--config-only", action="store_true", help="count by the config, even where weights are there")


@dataclass(frozen=True)
class _Source:
    """What is counted: the dense model's survey, and of a run what it prunes and stores."""

    name: str
    model: Survey
    config: Path
    counted: str
    run: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Arm:
    """One row: a way of pruning and a quantization."""

    pruning: str
    bits: Bits
    account: Account

    @property
    def name(self) -> str:
        return f"{self.pruning} + {self.bits.name}" if self.pruning else self.bits.name


@dataclass(frozen=True)
class _Pruning:
    """Arguments of `account` that say what is gone, and a name for them."""

    name: str
    pruned: Mapping[int, int]
    fill_bytes: int
    keep_router_rows: bool

    def arm(self, model: Survey, bits: Bits) -> _Arm:
        found = account(
            model,
            bits,
            pruned=self.pruned,
            fill_bytes=self.fill_bytes,
            keep_router_rows=self.keep_router_rows,
        )
        return _Arm(self.name, bits, found)


_OPERATOR: Final = "constant"
_RANK: Final = 32
_NOTHING: Final = _Pruning("", {}, 0, keep_router_rows=True)


def run_bytes(options: argparse.Namespace) -> Result:
    """Count, compare and, if asked, match."""
    names = list(dict.fromkeys([_AS_SAVED, *(options.arm or ARMS)]))
    settings = {name: Bits.named(name, group=options.group, zeros=options.zeros) for name in names}
    source = _read(options.source, config_only=options.config_only)
    _check_pruning(options, source)
    pruner = _Pruner.of(options, source) if source.run is None and _prunes(options) else None
    prunings = _prunings(options, source, pruner)
    arms = [pruning.arm(source.model, bits) for pruning in (_NOTHING, *prunings) for bits in settings.values()]
    dense, unpruned = arms[0].account.total, [arm for arm in arms[1:] if not arm.pruning]
    gaps = {
        arm.name: {
            other.name: match([("", arm.account.total)], other.account.total, tolerance=options.tolerance)
            for other in unpruned
            if other is not arm
        }
        for arm in arms[1:]
        if arm.bits.name != _AS_SAVED
    }
    matches = _matches(options, source, settings, prunings, pruner) if options.match else {}
    data = {
        "model": source.name,
        "counted": source.counted,
        "group": options.group,
        "zeros": options.zeros,
        "tolerance": options.tolerance,
        "operator": None if source.run is not None else options.operator or _OPERATOR,
        "arms": [{"arm": arm.name, "of_dense": arm.account.total / dense, **arm.account.to_json()} for arm in arms],
        "gaps": {name: {other: one.to_json() for other, one in row.items()} for name, row in gaps.items()},
        **({"match": {"arm": options.match, "nearest": _matches_json(matches)}} if options.match else {}),
    }
    text = [
        _table(arms, dense),
        "MB of 10⁶ bytes, without padding; on disk: in whole words, with each matrix's shape, without file headers",
        f"{source.name}: {source.counted}; groups of {options.group}, zeros in {_zeros(options.zeros)}",
        "",
        f"total of the row over that of the column; = where matched within {100 * options.tolerance:g} %",
        _gap_table(gaps, unpruned),
    ]
    if options.match:
        text += ["", f"nearest to {options.match}:", *(f"  {one.setting}: {one.text()}" for one in matches.values())]
    return 0, data, "\n".join(text)


def _matches_json(matches: Mapping[str, Match[str]]) -> dict[str, Any]:
    """Arm -> its nearest setting."""
    return {name: {"setting": one.setting, **one.to_json()} for name, one in matches.items()}


def _zeros(zeros: str) -> str:
    return "16 bits" if zeros == "fp16" else "as many bits as a weight"


def _read(name: str, *, config_only: bool) -> _Source:
    """The source's dense model; a run's is looked up by the name that its record has."""
    path = Path(name)
    if (path / "record.json").is_file():
        from prunebench.record import read_run

        record = read_run(path).record
        dense = _read(record["identity"]["model"]["name"], config_only=config_only)
        model = f"{record['arm']['model']}, run {record['run_id']}"
        return _Source(model, dense.model, dense.config, dense.counted, record)
    config, folder = (path, path.parent) if path.is_file() else (None, _folder(name))
    config = config or folder / "config.json"
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError("the model's config cannot be read", where=str(config), fix=str(error)) from error
    if not isinstance(values, dict):
        raise UsageError("the model's config is no object", where=str(config), expected="a transformers config.json")
    if path.is_file() or config_only or not any(folder.glob("*.safetensors")):
        counted = survey(config_tensors(values, where=str(config)), where=str(config))
        return _Source(name, counted, config, "counted by its config")
    headers = read_headers(folder)
    files = file_bytes(folder)
    inside = sum(tensor.bytes for tensor in headers.values())
    said = f"files of {files:,} bytes, {files - inside:,} of them headers"
    return _Source(name, survey(headers, tied=tied_names(values), where=name), config, said)


def _folder(name: str) -> Path:
    from prunebench.loader import resolve_model

    source = resolve_model(name)
    if source.path is not None:
        return source.path
    from prunebench.run.sources import ModelFiles

    return ModelFiles.of(source).folder


def _prunes(options: argparse.Namespace) -> bool:
    return bool(options.ratio or options.keep or options.match)


def _check_pruning(options: argparse.Namespace, source: _Source) -> None:
    """Raise for options of pruning where there is nothing for them to say."""
    if source.run is not None and (options.ratio or options.keep):
        raise UsageError("a run has its own mask", expected="no --ratio and no --keep", fix="give its model")
    if source.run is None and _prunes(options):
        return
    for name in ("operator", "rank", "slice_router"):
        value = getattr(options, name)
        if value is not None and value is not False:
            raise UsageError(
                f"--{name.replace('_', '-')}{'' if value is True else f' {value}'} has nothing to say",
                expected="a model that is pruned here" if source.run is None else "no such option: a run has its own",
                fix="give --ratio, --keep or --match" if source.run is None else "give its model",
            )


def _prunings(options: argparse.Namespace, source: _Source, pruner: _Pruner | None) -> list[_Pruning]:
    """The ways of pruning that were asked for, or the run's own."""
    if source.run is None:
        budgets = [(f"ratio {ratio}", Budget.of_ratio(ratio)) for ratio in options.ratio]
        budgets += [(f"keep {keep}", Budget(keep=keep)) for keep in options.keep]
        return [] if pruner is None else [pruner.prune(name, budget) for name, budget in budgets]
    return [] if source.run["mask"] is None else [_of_run(source.run, source.model)]


def _of_run(record: Mapping[str, Any], model: Survey) -> _Pruning:
    pruned = {layer["index"]: len(layer["pruned"]) for layer in record["mask"]["layers"]}
    parts = record["storage"]["parts"]
    found = _Pruning("run", pruned, parts["fills"], keep_router_rows=parts["router"] == model.plain["router"])
    counted = found.arm(model, Bits()).account.ideal
    # Weights of the same name may have changed, and a run may be quantized already.
    if wrong := [part for part in parts if part != "metadata" and parts[part] != counted[part]]:
        raise UsageError(
            f"the record states {parts[wrong[0]]:,} bytes of {wrong[0]}",
            where=f"run {record['run_id']}",
            expected=f"{counted[wrong[0]]:,}, by its mask and the weights at hand",
            fix="give the model that it ran on, without --config-only, or a run that is not quantized",
        )
    return found


@dataclass(frozen=True)
class _Pruner:
    """Budgets on a model's layers, with an operator whose fills are counted from the configuration."""

    shapes: tuple[LayerShape, ...]
    per_expert_bytes: int
    keep_router_rows: bool

    @classmethod
    def of(cls, options: argparse.Namespace, source: _Source) -> _Pruner:
        from prunebench.fit import model_size, stored_per_expert
        from prunebench.moe import quiet_libraries
        from prunebench.moe.layer import find_layers
        from prunebench.moe.load import empty_model

        quiet_libraries()
        model = empty_model(source.config.parent if source.config.name == "config.json" else source.config)
        operator, rank = options.operator or _OPERATOR, _RANK if options.rank is None else options.rank
        values = stored_per_expert(model_size(model), operator, rank=rank)
        matrix = source.model.layers[0].matrices[0]
        if values and options.slice_router:
            raise UsageError(
                f"{operator} keeps the slots of pruned experts, so their router rows stay",
                fix="leave out --slice-router, or give --operator reroute",
            )
        return cls(
            tuple(layer.shape for layer in find_layers(model)),
            values * matrix.bytes // (matrix.rows * matrix.columns),
            keep_router_rows=not options.slice_router,
        )

    def prune(self, name: str, budget: Budget) -> _Pruning:
        pruned = {shape.index: budget.pruned_count(shape) for shape in self.shapes}
        return _Pruning(name, pruned, sum(pruned.values()) * self.per_expert_bytes, self.keep_router_rows)

    def all(self) -> list[_Pruning]:
        """Every number of experts that all layers can keep, but all of them."""
        fewest = max(shape.fewest_survivors() for shape in self.shapes)
        most = min(shape.experts for shape in self.shapes)
        return [self.prune(f"keep {keep}", Budget(keep=keep)) for keep in range(fewest, most)]


def _matches(
    options: argparse.Namespace,
    source: _Source,
    settings: Mapping[str, Bits],
    prunings: Sequence[_Pruning],
    pruner: _Pruner | None,
) -> dict[str, Match[str]]:
    """For each quantization the pruning that comes nearest to `--match`; of a run, whose mask is given, the nearest."""
    wanted = Bits.named(options.match, group=options.group, zeros=options.zeros)
    target = account(source.model, wanted).total

    def nearest(arms: list[_Arm]) -> Match[str]:
        return match([(arm.name, arm.account.total) for arm in arms], target, tolerance=options.tolerance)

    if pruner is None:
        if not prunings:
            raise UsageError("a dense run has no mask to be matched", fix="give the model instead of the run")
        return {"run": nearest([prunings[0].arm(source.model, bits) for bits in settings.values()])}
    choices = [_NOTHING, *pruner.all()]
    others = {name: bits for name, bits in settings.items() if bits != wanted}
    return {name: nearest([one.arm(source.model, bits) for one in choices]) for name, bits in others.items()}


def _table(arms: Sequence[_Arm], dense: int) -> str:
    from tabulate import tabulate

    headers = ["arm", *ALL_PARTS, "total", "of dense", "on disk", "router rows of pruned"]
    sizes = [[arm.account.ideal[part] for part in ALL_PARTS] + [arm.account.total] for arm in arms]
    rows = [
        [
            arm.name,
            *(_megabytes(size) for size in own),
            f"{100 * arm.account.total / dense:.2f} %",
            _megabytes(arm.account.total_on_disk),
            _megabytes(arm.account.pruned_rows),
        ]
        for arm, own in zip(arms, sizes, strict=True)
    ]
    return tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True, colalign=_align(len(headers)))


def _gap_table(gaps: Mapping[str, Mapping[str, Match[str]]], columns: Sequence[_Arm]) -> str:
    from tabulate import tabulate

    rows = [[name, *(_gap(row.get(arm.name)) for arm in columns)] for name, row in gaps.items()]
    headers = ["", *(arm.name for arm in columns)]
    return tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True, colalign=_align(len(headers)))


def _align(columns: int) -> tuple[str, ...]:
    return ("left", *("right",) * (columns - 1))


def _gap(one: Match[str] | None) -> str:
    return "" if one is None else gap_text(one.gap) + (" =" if one.matched else "  ")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f}"
