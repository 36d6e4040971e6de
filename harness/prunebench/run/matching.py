"""How many experts an arm may keep to store as much as another way of compressing the same model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from prunebench.errors import UsageError
from prunebench.fit import OPERATORS, model_size, stored_per_expert
from prunebench.loader import load_method, load_method_class, resolve_model
from prunebench.method import Method
from prunebench.moe.load import empty_model
from prunebench.parameters import parse_parameters
from prunebench.quantize import setting_of
from prunebench.routing import Scale
from prunebench.run.sources import ModelFiles
from prunebench.run.spec import ArmSpec
from prunebench.storage import Bits, Match, Survey, account, match, read_headers, survey, tied_names

__all__ = ["matched"]


def matched(spec: ArmSpec, other: str) -> tuple[ArmSpec, Match[int]]:
    """The arm with as many experts kept in every layer as bring its bytes nearest to another setting's.

    Args:
        spec: an arm without a budget: criterion, operator, and mostly a quantization.
        other: how the unpruned model is quantized that is to be matched: a setting such as `e3a4`.

    Returns:
        The arm with `keep`, and how near it comes; of operators that answer some experts only (MoRA), at most.

    Raises:
        UsageError: an arm with a budget or a mask, or an operator whose stored values are not known beforehand.
    """
    if spec.method is None or spec.mask is not None or spec.ratio is not None or spec.keep is not None:
        raise UsageError("nothing to match with", expected="a method, and no mask, ratio or keep", where="match")
    files = ModelFiles.of(resolve_model(spec.model))
    shapes, convention = files.peek()
    model = _survey(files.folder)
    operator = _operator(spec)
    values = 0
    if operator.replaces():
        if operator.name not in OPERATORS:
            raise UsageError(
                f"what {operator.name} stores for a pruned expert is not known beforehand",
                where="match",
                expected=f"an operator of {', '.join(OPERATORS)}",
                fix="give --operator, or --keep instead",
            )
        parameters = operator.parameters()
        values = stored_per_expert(
            model_size(empty_model(files.folder)),
            operator.name,
            rank=parameters.get("rank") or parameters.get("tilt_rank") or 32,
            times=parameters.get("times", 1),
        )
    matrix = model.layers[0].matrices[0]
    value_bytes = matrix.bytes // (matrix.rows * matrix.columns)
    asked = spec.scale or operator.parameters().get("scale") or "trained"
    # Edited survivors are no fill, and leave the router to lose its rows.
    plain = not operator.keeps_slots() and not values and convention.groups is None
    bits = setting_of(spec.quantize).bits if spec.quantize is not None else Bits()

    def total(keep: int) -> int:
        pruned = {shape.index: shape.experts - keep for shape in shapes}
        rows_go = plain and convention.loses_rows(Scale.parse(asked).resolve(convention).kind, keep)
        fills = sum(pruned.values()) * values * value_bytes
        return account(model, bits, pruned=pruned, fill_bytes=fills, keep_router_rows=not rows_go).total

    fewest = max(shape.fewest_survivors() for shape in shapes)
    keeps = range(fewest, min(shape.experts for shape in shapes))
    target = account(model, setting_of(other).bits).total
    found = match([(keep, total(keep)) for keep in keeps], target)
    return replace(spec, keep=found.setting), found


def _survey(folder: Path) -> Survey:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return survey(read_headers(folder), tied=tied_names(config), where=str(folder))


def _operator(spec: ArmSpec) -> Method:
    name, parameters = (
        (spec.operator, spec.operator_parameters) if spec.operator is not None else (spec.method, spec.parameters)
    )
    assert name is not None
    return load_method(name, parse_parameters(load_method_class(name), parameters))
