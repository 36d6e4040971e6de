"""A plan: everything a pruned model is, as data: the mask, the fills (class, JSON config, state) and the gate scales.

`make_plan`, or in a fit pass `fit_plan`, asks a method's `replace` and `route` once; from then on only the plan
matters. It is saved as one safetensors file with its description in the header, and what is installed is always built
from that data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import fsum
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from prunebench import replacement
from prunebench.calibration import CalibrationTokens, LayerVisit, ScoreResult, Statistic, by_pass, stream_layers
from prunebench.calibration.score import batches_of
from prunebench.calibration.stream import Buffers
from prunebench.calibration.stream import Progress as StreamProgress
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.fit import Fitted, fit_share
from prunebench.loader import load_method_class, source_of
from prunebench.mask import Mask, canonical_json, write_atomically
from prunebench.method import LayerView, Method, Replacements, Routing, Statistics
from prunebench.moe import MoEModel
from prunebench.moe.decoder import Proof
from prunebench.replacement import Fill
from prunebench.routing import Scale

_Answer = TypeVar("_Answer")
_ERRORS = ("squared_error", "constant_squared_error")

__all__ = ["FillPlan", "FittedPlan", "LayerPlan", "Plan", "fit_plan", "layer_views", "make_plan", "plan_layer"]


@dataclass(frozen=True)
class FillPlan:
    """How to rebuild one fill.

    Args:
        kind: class name.
        config: constructor arguments.
        file: the method file that defines the class, or None for prunebench's own.
        file_sha256: of that file.
    """

    kind: str
    config: Mapping[str, Any]
    file: str | None = None
    file_sha256: str | None = None

    def build(self, state: Mapping[str, Tensor], *, where: str) -> Fill:
        """A fresh module with this state."""
        module = replacement if self.file is None else self._module(where)
        kind = getattr(module, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, Fill)):
            raise UsageError(f"no fill class {self.kind!r}", where=where, expected="a subclass of prunebench.Fill")
        try:
            fill = kind(**self.config)
            fill.load_state_dict(state, strict=True)
        except (RuntimeError, TypeError) as error:
            text = " ".join(str(error).split())
            raise UsageError(f"{self.kind} cannot be rebuilt from its saved form: {text}", where=where) from error
        return fill

    def _module(self, where: str) -> Any:
        assert self.file is not None
        kind = load_method_class(self.file)
        if source_of(kind).sha256 != self.file_sha256:
            raise PrerequisiteError(
                "the method file has changed since the plan was made", where=f"{where}, {self.file}", fix="run it anew"
            )
        return sys.modules[kind.__module__]


@dataclass(frozen=True)
class LayerPlan:
    """One layer: which pruned experts are filled and how, and the scale for slots that are refilled.

    Args:
        index: of the layer in the model.
        fills: expert id -> fill.
        asked: the scale as the operator, or the caller, asked for it.
        scale: what that resolves to for this router.
    """

    index: int
    fills: Mapping[int, FillPlan]
    asked: str
    scale: str


@dataclass(frozen=True)
class Plan:
    """A pruned model as data.

    Args:
        mask: the pruned experts.
        layers: by increasing index, one per MoE layer.
        tensors: `layer/expert/name` -> stored tensor of a fill.
        declared: `layer/expert` -> values that the fill says it stores.
    """

    mask: Mask
    layers: tuple[LayerPlan, ...]
    tensors: Mapping[str, Tensor]
    declared: Mapping[str, int]

    @property
    def values_stored(self) -> int:
        """Numbers that all fills store together, as measured."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def keeps_slots(self) -> bool:
        """Whether every pruned expert is answered by a fill, so that no slot is refilled."""
        return all(set(layer.fills) == set(self.mask.pruned_of(layer.index)) for layer in self.layers)

    @property
    def fills_nothing(self) -> bool:
        """Whether no pruned expert is answered, so that every slot is refilled."""
        return not any(layer.fills for layer in self.layers)

    @property
    def scales(self) -> tuple[str, ...]:
        """The distinct scales in use, none if no slot is refilled."""
        return () if self.keeps_slots else tuple(sorted({layer.scale for layer in self.layers}))

    def state_of(self, index: int, expert: int) -> dict[str, Tensor]:
        """The state dict of one fill."""
        prefix = f"{index}/{expert}/"
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def manifest(self) -> dict[str, dict[str, Any]]:
        """sha256, shape and dtype of every stored tensor, for the record."""
        return {
            name: {
                "sha256": sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            for name, tensor in sorted(self.tensors.items())
        }

    def to_json(self) -> dict[str, Any]:
        """Everything but the tensors."""
        return {
            "mask": self.mask.to_json(),
            "layers": [
                {
                    "index": layer.index,
                    "asked": layer.asked,
                    "scale": layer.scale,
                    "fills": {str(e): {**vars(fill), "config": dict(fill.config)} for e, fill in layer.fills.items()},
                }
                for layer in self.layers
            ],
            "declared": dict(self.declared),
        }

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically."""
        write_atomically(path, save(dict(self.tensors), metadata={"plan": canonical_json(self.to_json())}))

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a saved plan."""
        try:
            with safe_open(path, framework="pt") as file:
                data = json.loads((file.metadata() or {})["plan"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
            layers = tuple(
                LayerPlan(
                    x["index"], {int(e): FillPlan(**fill) for e, fill in x["fills"].items()}, x["asked"], x["scale"]
                )
                for x in data["layers"]
            )
            mask, declared = data["mask"], dict(data["declared"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError("not a saved plan", where=str(path), expected="a file that Plan.save wrote") from error
        return cls(Mask.from_json(mask, where=str(path)), layers, tensors, declared)


def layer_views(moe: MoEModel, scores: ScoreResult | None, declared: tuple[str, ...], where: str) -> list[LayerView]:
    """The layers as a method may see them, with the statistics it declared."""
    views = []
    for layer in moe.layers:
        values = {} if scores is None else scores.layers[layer.index]
        tokens = 0 if scores is None else scores.tokens
        views.append(LayerView(layer.shape, layer.convention, tokens, Statistics(values, declared, where), layer))
    return views


def make_plan(
    moe: MoEModel, mask: Mask, operator: Method, scores: ScoreResult | None, *, scale: Scale | None = None
) -> Plan:
    """Ask the operator what answers the pruned slots, and turn the answer into data.

    Args:
        moe: the opened, untouched model.
        mask: the pruned experts; must fit the model.
        operator: gives `replace` and `route`.
        scores: the pass that holds `operator.replace_needs()`.
        scale: overrides the operator's scale.

    Raises:
        UsageError: a scale on an operator that keeps its slots, a fill for a survivor, a mask for another model.
    """
    mask.check_fits(moe.shapes)
    views = _operator_views(moe, operator, scores)
    return _assembled(mask, operator, scale, [_ask(view, mask, operator, scale) for view in views])


@dataclass(frozen=True)
class FittedPlan:
    """A plan of an operator that was fitted in a fit pass, and how that went.

    Args:
        plan: the plan.
        tokens: T, calibration tokens that each layer saw.
        proof: whether the layers were streamed, and why not.
        coverage: layer -> expert -> its `Fitted` but for the fill.
    """

    plan: Plan
    tokens: int
    proof: Proof
    coverage: Mapping[int, Mapping[int, Mapping[str, Any]]]

    def to_json(self) -> dict[str, Any]:
        """How the fit went, as it goes into a record: by layer its coverage, and by expert.

        A layer's fit share is that of its squared errors added up over experts, so it weighs them by n·tr Σ.
        """
        layers = {}
        for index, rows in self.coverage.items():
            errors, constants = ([row[key] for row in rows.values()] for key in _ERRORS)
            layers[str(index)] = {
                "tokens": sum(row["tokens"] for row in rows.values()),
                "fallbacks": sum(bool(row["fallback"]) for row in rows.values()),
                "fit_share": fit_share(fsum(errors), fsum(constants)),
                "experts": {str(expert): dict(row) for expert, row in rows.items()},
            }
        return {"tokens": self.tokens, "proof": self.proof.to_json(), "layers": layers}


def fit_plan(
    moe: MoEModel,
    mask: Mask,
    operator: Method,
    scores: ScoreResult | None,
    tokens: CalibrationTokens,
    *,
    batch_tokens: int = 8192,
    scale: Scale | None = None,
    buffers: Buffers = "host",
    progress: StreamProgress | None = None,
) -> FittedPlan:
    """`make_plan` in a fit pass: `replace` is asked of one layer after the other, with the whole text before it.

    Statistics of the fit pass are measured of pruned experts only, and let go of before the next layer: what is kept of
    a layer are its fills. Nothing is kept for other plans.

    Args:
        moe: the opened, untouched model.
        mask: the pruned experts; must fit the model.
        operator: gives `replace` and `route`.
        scores: the pass that holds those of `operator.replace_needs()` that a score pass measures; None if none are.
        tokens: what the operator is fitted on.
        batch_tokens: tokens per forward.
        scale: overrides the operator's scale.
        buffers: where hidden states wait, as for `stream_layers`.
        progress: called with (what, done, total).

    Raises:
        UsageError: as `make_plan` and `stream_layers`.
    """
    mask.check_fits(moe.shapes)
    views = {view.index: view for view in _operator_views(moe, operator, scores)}
    _, measured = by_pass(operator.replace_needs())
    answers: dict[int, _Answered] = {}
    seen = 0

    def work(visit: LayerVisit) -> Mapping[str, Tensor]:
        nonlocal seen
        seen = visit.tokens
        index = visit.layer.index
        own = visit.measure(measured, experts=mask.pruned_of(index)) if measured else {}
        view = views[index].in_fit(own, visit.tokens, visit if operator.visits else None)
        answers[index] = _ask(view, mask, operator, scale)
        return {}

    result = stream_layers(
        moe,
        [{"input_ids": ids_BL} for ids_BL in batches_of(tokens, batch_tokens)],
        work,
        layers=[index for index in views if mask.pruned_of(index)],
        buffers=buffers,
        progress=progress,
    )
    for index, view in views.items():
        if index not in answers:
            answers[index] = _ask(view, mask, operator, scale)
    in_order = [answers[index] for index in views]
    plan = _assembled(mask, operator, scale, in_order)
    return FittedPlan(plan, seen, result.proof, {one.layer.index: one.coverage for one in in_order if one.coverage})


def plan_layer(moe: MoEModel, mask: Mask, operator: Method, visit: LayerVisit, own: Mapping[str, Statistic]) -> Plan:
    """The plan of one layer, fitted while the whole text stands before it; the plan has no other.

    Args:
        moe: the opened model.
        mask: prunes experts of this layer only.
        operator: gives `replace` and `route`.
        visit: the layer with the text before it.
        own: what `operator.replace_needs()` names, measured of this layer.
    """
    views = {view.index: view for view in _operator_views(moe, operator, None)}
    view = views[visit.layer.index].in_fit(own, visit.tokens, visit if operator.visits else None)
    return _assembled(mask, operator, None, [_ask(view, mask, operator, None)])


@dataclass(frozen=True)
class _Answered:
    """What an operator answered for one layer."""

    layer: LayerPlan
    tensors: Mapping[str, Tensor]
    declared: Mapping[str, int]
    coverage: Mapping[int, Mapping[str, Any]]


def _operator_views(moe: MoEModel, operator: Method, scores: ScoreResult | None) -> list[LayerView]:
    declared = tuple(statistic.name for statistic in operator.replace_needs())
    return layer_views(moe, scores, declared, f"{operator.name}.replace_needs")


def _ask(view: LayerView, mask: Mask, operator: Method, scale: Scale | None) -> _Answered:
    """Ask the operator about one layer, and turn its answer into data."""
    pruned = mask.pruned_of(view.index)
    answer = Replacements()
    if pruned:
        answer = _expected(operator.replace(view, pruned), Replacements, f"{operator.name}.replace")
    where = f"{operator.name}.replace, layer {view.index}"
    if stray := sorted(set(answer.fills) - set(pruned)):
        raise UsageError(f"a fill for expert {stray[0]}, which is not pruned", where=where, expected=f"{pruned}")
    fills: dict[int, FillPlan] = {}
    tensors: dict[str, Tensor] = {}
    stored: dict[str, int] = {}
    coverage: dict[int, dict[str, Any]] = {}
    for expert, answered in sorted(answer.fills.items()):
        fill = answered.fill if isinstance(answered, Fitted) else answered
        if isinstance(answered, Fitted):
            coverage[expert] = answered.to_json()
        fills[expert] = _describe(fill, operator, f"{where}, expert {expert}")
        stored[f"{view.index}/{expert}"] = fill.values_stored()
        for name, tensor in fill.state_dict().items():
            tensors[f"{view.index}/{expert}/{name}"] = tensor.detach().cpu().clone().contiguous()
    wanted = scale or Scale.parse(_expected(operator.route(view, pruned), Routing, f"{operator.name}.route").scale)
    wanted.check_possible(view.experts - len(pruned) + len(fills), where=f"layer {view.index}")
    layer = LayerPlan(view.index, fills, str(wanted), str(wanted.resolve(view.convention)))
    return _Answered(layer, tensors, stored, coverage)


def _assembled(mask: Mask, operator: Method, scale: Scale | None, answers: Sequence[_Answered]) -> Plan:
    """The plan of all layers' answers."""
    tensors = {name: tensor for one in answers for name, tensor in one.tensors.items()}
    stored = {name: values for one in answers for name, values in one.declared.items()}
    plan = Plan(mask, tuple(one.layer for one in answers), tensors, stored)
    if scale is not None and plan.keeps_slots:
        raise UsageError(
            f"scale {scale} has no meaning for {operator.name}",
            expected="an operator that refills slots, such as reroute",
            fix="leave --scale out: this operator keeps every slot and its gate",
        )
    return plan


def _expected(answer: object, kind: type[_Answer], where: str) -> _Answer:
    """A method's answer, if it is of the right kind."""
    if not isinstance(answer, kind):
        raise UsageError(f"it returned a {type(answer).__name__}", where=where, expected=f"prunebench.{kind.__name__}")
    return answer


def _describe(fill: Fill, operator: Method, where: str) -> FillPlan:
    """How to rebuild a fill: its class must be prunebench's own or stand in the operator's file."""
    if not isinstance(fill, Fill):
        raise UsageError(f"the fill is a {type(fill).__name__}", where=where, expected="a prunebench.Fill")
    kind = type(fill)
    try:
        config = json.loads(canonical_json(fill.to_json()))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{kind.__name__}.to_json gives what JSON cannot hold: {error}",
            where=where,
            expected="constructor arguments; tensors belong into the state",
        ) from error
    if f"{kind.__module__}.".startswith(f"{replacement.__name__}."):
        return FillPlan(kind.__name__, config)
    if kind.__module__ != type(operator).__module__:
        raise UsageError(
            f"fill class {kind.__name__} is from {kind.__module__}",
            where=where,
            expected="a class of prunebench or of the method's own file",
        )
    source = source_of(type(operator))
    return FillPlan(kind.__name__, config, str(source.path), source.sha256)
