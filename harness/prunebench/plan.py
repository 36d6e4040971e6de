"""A plan: everything a pruned model is, as data: the mask, the fills (class, JSON config, state) and the gate scales.

`make_plan` asks a method's `replace` and `route` once; from then on only the plan matters. It is saved as one
safetensors file with its description in the header, and what is installed is always built from that data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from prunebench import replacement
from prunebench.calibration import ScoreResult
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.loader import load_method_class, source_of
from prunebench.mask import Mask, canonical_json, write_atomically
from prunebench.method import LayerView, Method, Replacements, Routing, Statistics
from prunebench.moe import MoEModel
from prunebench.replacement import Fill
from prunebench.routing import Scale

_Answer = TypeVar("_Answer")

__all__ = ["FillPlan", "LayerPlan", "Plan", "layer_views", "make_plan"]


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
    declared = tuple(statistic.name for statistic in operator.replace_needs())
    layers: list[LayerPlan] = []
    tensors: dict[str, Tensor] = {}
    stored: dict[str, int] = {}
    for view in layer_views(moe, scores, declared, f"{operator.name}.replace_needs"):
        pruned = mask.pruned_of(view.index)
        answer = Replacements()
        if pruned:
            answer = _expected(operator.replace(view, pruned), Replacements, f"{operator.name}.replace")
        where = f"{operator.name}.replace, layer {view.index}"
        if stray := sorted(set(answer.fills) - set(pruned)):
            raise UsageError(f"a fill for expert {stray[0]}, which is not pruned", where=where, expected=f"{pruned}")
        fills: dict[int, FillPlan] = {}
        for expert, fill in sorted(answer.fills.items()):
            fills[expert] = _describe(fill, operator, f"{where}, expert {expert}")
            stored[f"{view.index}/{expert}"] = fill.values_stored()
            for name, tensor in fill.state_dict().items():
                tensors[f"{view.index}/{expert}/{name}"] = tensor.detach().cpu().clone().contiguous()
        wanted = scale or Scale.parse(_expected(operator.route(view, pruned), Routing, f"{operator.name}.route").scale)
        wanted.check_possible(view.experts - len(pruned) + len(fills), where=f"layer {view.index}")
        layers.append(LayerPlan(view.index, fills, str(wanted), str(wanted.resolve(view.convention))))
    plan = Plan(mask, tuple(layers), tensors, stored)
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
