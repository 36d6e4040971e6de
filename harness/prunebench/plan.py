"""A plan: everything a pruned model is, as data: the mask, the fills (class, JSON config, state) and the gate scales.

`make_plan`, or in a fit pass `fit_plan`, asks a method's `replace` and `route` once; from then on only the plan
matters. It is saved as one safetensors file with its description in the header, and what is installed is always built
from that data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import fsum, prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from prunebench import replacement
from prunebench.calibration import CalibrationTokens, LayerVisit, ScoreResult, Statistic, by_pass, stream_layers
from prunebench.calibration.score import batches_of
from prunebench.calibration.stream import Buffers, Checkpoint
from prunebench.calibration.stream import Progress as StreamProgress
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.fit import Fitted
from prunebench.loader import load_method_class, source_of
from prunebench.mask import Mask, canonical_json, write_atomically
from prunebench.method import LayerView, Method, Replacements, Routing, Statistics
from prunebench.moe import MoEModel
from prunebench.moe.decoder import Proof
from prunebench.replacement import Fill, Survivor
from prunebench.routing import Scale

_Answer = TypeVar("_Answer")
_Value = TypeVar("_Value")
_COLUMNS = ("squared_error", "constant_squared_error", "gate_square", "held_out_share", "outcome")
_GATED = ("constant_squared_error", "gate_square")
_EDIT = "edit/"  # before the names of edited weights, where they stand beside the tensors of fills

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

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        fills = {str(expert): {**vars(fill), "config": dict(fill.config)} for expert, fill in self.fills.items()}
        return {"index": self.index, "asked": self.asked, "scale": self.scale, "fills": fills}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LayerPlan:
        """Back from plain data."""
        fills = {int(expert): FillPlan(**fill) for expert, fill in data["fills"].items()}
        return cls(data["index"], fills, data["asked"], data["scale"])


@dataclass(frozen=True)
class Plan:
    """A pruned model as data.

    Args:
        mask: the pruned experts.
        layers: by increasing index, one per MoE layer.
        tensors: `layer/expert/name` -> stored tensor of a fill.
        declared: `layer/expert` -> values that the fill says it stores.
        edits: `layer/expert/name` -> new weights of a survivor, stored in place of its own.
    """

    mask: Mask
    layers: tuple[LayerPlan, ...]
    tensors: Mapping[str, Tensor]
    declared: Mapping[str, int]
    edits: Mapping[str, Tensor] = field(default_factory=dict)

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

    def edits_of(self, index: int) -> dict[int, dict[str, Tensor]]:
        """The edited survivors of one layer: id -> parameter name -> weights."""
        edits: dict[int, dict[str, Tensor]] = {}
        for key, tensor in self.edits.items():
            layer, expert, name = key.split("/")
            if int(layer) == index:
                edits.setdefault(int(expert), {})[name] = tensor
        return edits

    def manifest(self) -> dict[str, list[dict[str, Any]]]:
        """The stored tensors, for the record: by layer, its fills that are alike, of one class, with tensors alike.

        An entry has its `experts`, increasing, the name of their `fill` class, shape and dtype of each's `tensors`, and
        one `sha256` over the stored bytes: expert by expert, each one's tensors in the order of their names.
        """
        return _by_layer(
            {
                layer.index: [
                    (e, {"fill": fill.kind}, self.state_of(layer.index, e)) for e, fill in layer.fills.items()
                ]
                for layer in self.layers
            }
        )

    def edit_manifest(self) -> dict[str, list[dict[str, Any]]]:
        """The same of edited survivors, which are of no `fill` class and add nothing to what is stored."""
        return _by_layer(
            {layer.index: [(e, {}, named) for e, named in self.edits_of(layer.index).items()] for layer in self.layers}
        )

    def only_in(self, layers: Collection[int], elsewhere: Plan) -> Plan:
        """This plan in some layers, and another one of the same mask in the others (2610.41366 App. B.4)."""

        def joined(own: Mapping[str, _Value], other: Mapping[str, _Value]) -> dict[str, _Value]:
            inside = {key: value for key, value in own.items() if int(key.partition("/")[0]) in layers}
            return inside | {key: value for key, value in other.items() if int(key.partition("/")[0]) not in layers}

        pairs = zip(self.layers, elsewhere.layers, strict=True)
        return Plan(
            self.mask,
            tuple(own if own.index in layers else other for own, other in pairs),
            joined(self.tensors, elsewhere.tensors),
            joined(self.declared, elsewhere.declared),
            joined(self.edits, elsewhere.edits),
        )

    def to_json(self) -> dict[str, Any]:
        """Everything but the tensors."""
        return {
            "mask": self.mask.to_json(),
            "layers": [layer.to_json() for layer in self.layers],
            "declared": dict(self.declared),
        }

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically."""
        tensors = {**self.tensors, **{f"{_EDIT}{name}": tensor for name, tensor in self.edits.items()}}
        write_atomically(path, save(tensors, metadata={"plan": canonical_json(self.to_json())}))

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a saved plan."""
        try:
            with safe_open(path, framework="pt") as file:
                data = json.loads((file.metadata() or {})["plan"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
            layers = tuple(LayerPlan.from_json(layer) for layer in data["layers"])
            mask, declared = data["mask"], dict(data["declared"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError("not a saved plan", where=str(path), expected="a file that Plan.save wrote") from error
        edits = {name.removeprefix(_EDIT): tensors.pop(name) for name in list(tensors) if name.startswith(_EDIT)}
        return cls(Mask.from_json(mask, where=str(path)), layers, tensors, declared, edits)


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


def _by_layer(
    layers: Mapping[int, Sequence[tuple[int, dict[str, Any], Mapping[str, Tensor]]]],
) -> dict[str, list[dict[str, Any]]]:
    """Experts that are alike in kind and in their tensors' shapes, by layer, with one digest over their bytes."""
    manifest: dict[str, list[dict[str, Any]]] = {}
    for index, members in layers.items():
        alike: dict[str, tuple[dict[str, Any], Any]] = {}
        for expert, kind, state in sorted(members, key=lambda member: member[0]):
            tensors = {
                name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
                for name, tensor in sorted(state.items())
            }
            entry: dict[str, Any] = {"experts": [], **kind, "tensors": tensors}
            entry, digest = alike.setdefault(canonical_json(entry), (entry, sha256()))
            entry["experts"].append(expert)
            for _, tensor in sorted(state.items()):
                digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        entries = [{**entry, "sha256": digest.hexdigest()} for entry, digest in alike.values() if entry["tensors"]]
        if entries:
            manifest[str(index)] = entries
    return manifest


@dataclass(frozen=True)
class FittedPlan:
    """A plan of an operator that was fitted in a fit pass, and how that went.

    Args:
        plan: the plan.
        tokens: T, calibration tokens that each layer saw.
        proof: whether the layers were streamed, and why not.
        coverage: layer -> expert -> its `Fitted` but for the fill.
        checkpoint: where answered layers were saved.
    """

    plan: Plan
    tokens: int
    proof: Proof
    coverage: Mapping[int, Mapping[int, Mapping[str, Any]]]
    checkpoint: Checkpoint | None = None

    def to_json(self) -> dict[str, Any]:
        """How the fit went, as it goes into a record: by layer, in columns over its `experts`, increasing.

        A layer's fit share is that of its squared errors added up over experts, so it weighs them by n·tr Σ; an
        expert's is 1 − squared_error / constant_squared_error of its columns. `weighted_fit_share` and
        `weighted_held_out_share` weigh experts by n·E[G²]·tr Σ (App. B.3). `fallbacks` are the experts for which one
        answers, with the reason. A column of nothing but nothings is left out. Nine digits are kept.
        """
        layers = {}
        for index, rows in self.coverage.items():
            in_order = [row for _, row in sorted(rows.items())]
            columns = {key: [row.get(key) for row in in_order] for key in _COLUMNS}
            said = {key: column for key, column in columns.items() if any(value not in (None, "") for value in column)}
            layers[str(index)] = {
                "fit_share": _share(in_order, ("constant_squared_error",), "fit_share"),
                "weighted_fit_share": _share(in_order, _GATED, "fit_share"),
                "weighted_held_out_share": _share(in_order, _GATED, "held_out_share"),
                "fallbacks": {str(expert): row["fallback"] for expert, row in sorted(rows.items()) if row["fallback"]},
                "experts": sorted(rows),
                "tokens": [row["tokens"] for row in in_order],
                **{key: [_nine_digits(value) for value in column] for key, column in said.items()},
            }
        return {"tokens": self.tokens, "proof": self.proof.to_json(), "layers": layers}


def _share(rows: Sequence[Mapping[str, Any]], weights: Sequence[str], share: str) -> float | None:
    """Mean share of the experts that have it, weighted; 0 if nothing has weight, None if no expert has it."""
    shared = [row for row in rows if row.get(share) is not None and all(row.get(key) is not None for key in weights)]
    if not shared:
        return None
    weight = [prod(row[key] for key in weights) for row in shared]
    total = fsum(weight)
    return _nine_digits(fsum(w * row[share] for w, row in zip(weight, shared, strict=True)) / total) if total else 0.0


def _nine_digits(value: Any) -> Any:
    return float(f"{value:.9g}") if isinstance(value, float) else value


def fit_plan(
    moe: MoEModel,
    mask: Mask,
    operator: Method,
    scores: ScoreResult | None,
    tokens: CalibrationTokens,
    *,
    batch_tokens: int = 8192,
    scale: Scale | None = None,
    layers: Collection[int] | None = None,
    buffers: Buffers = "host",
    checkpoint: Checkpoint | None = None,
    progress: StreamProgress | None = None,
) -> FittedPlan:
    """`make_plan` in a fit pass: `replace` is asked of one layer after the other, with the whole text before it.

    Statistics of the fit pass are measured of pruned experts only, and let go of before the next layer: what is kept of
    a layer is what answers there. Nothing is kept for other plans.

    Args:
        moe: the opened, untouched model.
        mask: the pruned experts; must fit the model.
        operator: gives `replace` and `route`.
        scores: what holds those of `operator.replace_needs()` that a score or gradient pass measures; None if none are.
        tokens: what the operator is fitted on.
        batch_tokens: tokens per forward.
        scale: overrides the operator's scale.
        layers: indices of the layers that are fitted; in others nothing answers, which is for `Plan.only_in`.
        buffers: where hidden states wait, as for `stream_layers`.
        checkpoint: where answered layers are saved, so that a killed fit goes on behind them; its key must say all that
            the answers depend on.
        progress: called with (what, done, total).

    Raises:
        UsageError: as `make_plan` and `stream_layers`.
    """
    mask.check_fits(moe.shapes)
    views = {view.index: view for view in _operator_views(moe, operator, scores)}
    measured = by_pass(operator.replace_needs()).fit

    def work(visit: LayerVisit) -> Mapping[str, Tensor]:
        index = visit.layer.index
        own = visit.measure(measured, experts=mask.pruned_of(index)) if measured else {}
        view = views[index].in_fit(own, visit.tokens, visit if operator.visits else None)
        return _ask(view, mask, operator, scale).weighed(visit.gate_squares_E).to_tensors()

    wanted = [index for index in views if mask.pruned_of(index) and (layers is None or index in layers)]
    result = stream_layers(
        moe,
        [{"input_ids": ids_BL} for ids_BL in batches_of(tokens, batch_tokens)],
        work,
        layers=wanted,
        buffers=buffers,
        checkpoint=checkpoint,
        progress=progress,
    )
    answers = {index: _Answered.of_tensors(kept) for index, kept in result.layers.items()}
    nothing = Mask.for_shapes(moe.shapes, {})
    for index, view in views.items():
        if index not in answers:
            answers[index] = _ask(view, nothing, operator, scale)
    in_order = [answers[index] for index in views]
    plan = _assembled(mask, operator, scale, in_order)
    coverage = {one.layer.index: one.coverage for one in in_order if one.coverage}
    return FittedPlan(plan, result.tokens, result.proof, coverage, checkpoint)


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
    edits: Mapping[str, Tensor]

    def weighed(self, gate_squares_E: Tensor | None) -> _Answered:
        """With the mean squared gate of each covered expert's routed tokens, by which App. B.3 weighs its fit share."""
        if gate_squares_E is None:
            return self
        rows = {
            expert: {**row, "gate_square": float(gate_squares_E[expert]) / max(row["tokens"], 1)}
            for expert, row in self.coverage.items()
        }
        return replace(self, coverage=rows)

    def to_tensors(self) -> dict[str, Tensor]:
        """As tensors, which is what a pass keeps and saves of a layer."""
        rest = {"layer": self.layer.to_json(), "declared": self.declared, "coverage": self.coverage}
        return {
            **{f"fill/{name}": tensor for name, tensor in self.tensors.items()},
            **{f"{_EDIT}{name}": tensor for name, tensor in self.edits.items()},
            "rest": torch.frombuffer(bytearray(canonical_json(rest).encode()), dtype=torch.uint8),
        }

    @classmethod
    def of_tensors(cls, kept: Mapping[str, Tensor]) -> _Answered:
        """Back from tensors."""
        rest = json.loads(kept["rest"].numpy().tobytes())
        named: dict[str, dict[str, Tensor]] = {"fill/": {}, _EDIT: {}}
        for prefix, tensors in named.items():
            tensors.update({key.removeprefix(prefix): kept[key] for key in kept if key.startswith(prefix)})
        coverage = {int(expert): row for expert, row in rest["coverage"].items()}
        return cls(LayerPlan.from_json(rest["layer"]), named["fill/"], rest["declared"], coverage, named[_EDIT])


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
    given = ((expert, one.fill if isinstance(one, Fitted) else one) for expert, one in sorted(answer.fills.items()))
    filled = {expert: fill for expert, fill in given if fill is not None}
    if pruned and operator.keeps_slots() and (missing := sorted(set(pruned) - set(filled))):
        raise UsageError(
            f"no fill for pruned expert {missing[0]}",
            where=where,
            expected=f"one for each of {pruned}",
            fix="return a fill for it, such as Constant or Zero; or define `route` too, to have its slots refilled",
        )
    fills: dict[int, FillPlan] = {}
    tensors: dict[str, Tensor] = {}
    stored: dict[str, int] = {}
    coverage = {expert: one.to_json() for expert, one in sorted(answer.fills.items()) if isinstance(one, Fitted)}
    for expert, fill in filled.items():
        fills[expert] = _describe(fill, operator, f"{where}, expert {expert}")
        if isinstance(fill, Survivor):
            _check_survives(fill.survivor, view, pruned, f"{where}, expert {expert}")
        stored[f"{view.index}/{expert}"] = fill.values_stored()
        for name, tensor in fill.state_dict().items():
            tensors[f"{view.index}/{expert}/{name}"] = _kept(tensor, f"{where}, expert {expert}, {name}")
    edits = {
        f"{view.index}/{expert}/{name}": tensor
        for expert, named in sorted(answer.edits.items())
        for name, tensor in _edit(view, expert, named, pruned, f"{where}, expert {expert}").items()
    }
    wanted = scale or Scale.parse(_expected(operator.route(view, pruned), Routing, f"{operator.name}.route").scale)
    wanted.check_possible(view.experts - len(pruned) + len(fills), where=f"layer {view.index}")
    layer = LayerPlan(view.index, fills, str(wanted), str(wanted.resolve(view.convention)))
    return _Answered(layer, tensors, stored, coverage, edits)


def _kept(tensor: Tensor, where: str) -> Tensor:
    """A method's tensor as a plan keeps it: a copy on the host, of numbers."""
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise UsageError("a tensor holds NaN or infinity", where=where, expected="numbers")
    return tensor.detach().cpu().clone().contiguous()


def _check_survives(expert: int, view: LayerView, pruned: Sequence[int], where: str) -> None:
    """Raise unless this expert is there to answer for another, or to be edited."""
    if not 0 <= expert < view.experts or expert in pruned:
        word = "is pruned" if expert in pruned else "does not exist"
        raise UsageError(f"expert {expert} {word}", where=where, expected="one of the layer's survivors")


def _edit(
    view: LayerView, expert: int, named: Mapping[str, Tensor], pruned: Sequence[int], where: str
) -> dict[str, Tensor]:
    """A survivor's new weights, in the dtype of its own."""
    _check_survives(expert, view, pruned, where)
    own = view.weights(expert)
    edits = {}
    for name, tensor in named.items():
        if name not in own or tensor.shape != own[name].shape:
            raise UsageError(
                f"an edit of {name} with shape {list(tensor.shape)}",
                where=where,
                expected=", ".join(f"{known} {list(weight.shape)}" for known, weight in own.items()),
            )
        edits[name] = _kept(tensor, f"{where}, {name}").to(own[name].dtype)
    return edits


def _assembled(mask: Mask, operator: Method, scale: Scale | None, answers: Sequence[_Answered]) -> Plan:
    """The plan of all layers' answers."""
    tensors = {name: tensor for one in answers for name, tensor in one.tensors.items()}
    stored = {name: values for one in answers for name, values in one.declared.items()}
    edits = {name: tensor for one in answers for name, tensor in one.edits.items()}
    plan = Plan(mask, tuple(one.layer for one in answers), tensors, stored, edits)
    if scale is not None and plan.keeps_slots and operator.keeps_slots():
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
