"""What a model's MoE layers are, what of them can be pruned, and whether its routers compute what the table says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from prunebench.errors import UsageError
from prunebench.moe.layer import MoELayer, Unprunable, find_layers, find_unprunable, open_model
from prunebench.moe.load import empty_model, load_weights, weights_files

__all__ = ["LayerReport", "ModelReport", "inspect_model"]


@dataclass(frozen=True)
class LayerReport:
    """One prunable MoE layer.

    Args:
        index: its index in the model.
        name: module path of its block.
        router: class of its router.
        experts: E.
        top_k: k.
        groups: number of router groups (1: no limit).
        kept_groups: groups that a token may choose from.
        fewest_survivors: fewer than these cannot fill k slots of every token.
        identity_experts: choices that store nothing and are never pruned.
        selection_bias: where the bias is that chooses and does not weigh, or None.
        shared: what every token passes beside the experts, by its path in the decoder layer.
        width: of an expert's input and output.
        expert_values: numbers that one expert stores.
    """

    index: int
    name: str
    router: str
    experts: int
    top_k: int
    groups: int
    kept_groups: int
    fewest_survivors: int
    identity_experts: int
    selection_bias: str | None
    shared: tuple[str, ...]
    width: int
    expert_values: int

    @classmethod
    def of(cls, model: nn.Module, layer: MoELayer) -> LayerReport:
        """Of a model's layer, on any device, the meta device too."""
        shape = layer.shape
        bias = None
        if layer.convention.biased:
            bias = f"{layer.row.bias} of the {layer.row.bias_on}"
        return cls(
            index=layer.index,
            name=layer.name,
            router=type(layer.router).__name__,
            experts=layer.expert_count,
            top_k=layer.top_k,
            groups=shape.groups,
            kept_groups=shape.kept_groups,
            fewest_survivors=shape.fewest_survivors(),
            identity_experts=layer.convention.identities,
            selection_bias=bias,
            shared=tuple(_shared(model, layer)),
            width=layer.width,
            expert_values=sum(weight.numel() for weight in layer.weights(0).values()),
        )


def _shared(model: nn.Module, layer: MoELayer) -> Iterable[str]:
    """Paths in the decoder layer of what every token passes beside the experts: in the block, or next to it."""
    decoder, last, inner = re.fullmatch(r"(.*layers\.\d+)(\.?)(.*)", layer.name).groups()  # type: ignore[union-attr]
    for name, _ in layer.block.named_children():
        # Gemma-4's decoder layer is the block: its dense branch runs beside the experts.
        if "shared" in name or name == "mlp":
            yield f"{inner}{last}{name}"
    if inner:
        yield from (name for name, _ in model.get_submodule(decoder).named_children() if "shared" in name)


@dataclass(frozen=True)
class ModelReport:
    """What `prunebench inspect` says.

    Args:
        model: as asked for.
        architecture: class of the model.
        convention: what its routers compute, in words.
        trained_scale: the gate scale that the router was trained with.
        scales: the kinds of scale that are defined.
        layers: the layers that can be pruned.
        unprunable: the layers that cannot, and why.
        note: what to know about pruning such a model.
        self_check: whether the routers' own selection and gates were replayed bit for bit.
        reason: why not, where they were not.
    """

    model: str
    architecture: str
    convention: str
    trained_scale: str
    scales: tuple[str, ...]
    layers: tuple[LayerReport, ...]
    unprunable: tuple[Unprunable, ...]
    note: str
    self_check: Literal["pass", "fail", "not run"]
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            **vars(self),
            "scales": list(self.scales),
            "layers": [{**vars(layer), "shared": list(layer.shared)} for layer in self.layers],
            "unprunable": [vars(layer) for layer in self.unprunable],
        }

    def to_text(self) -> str:
        """As lines for a person; neighbouring layers that are alike share one."""
        lines = [
            f"{self.model}: {self.architecture}",
            f"router      {self.layers[0].router}: {self.convention}",
            f"scales      trained with {self.trained_scale}; defined: {', '.join(self.scales)}",
        ]
        for first, last in _runs(self.layers):
            lines.append(f"{_span(first, last):11} {_words(first)}")
            lines += [f"{'':11} beside them: {name}" for name in first.shared]
        lines += [f"layer {one.index:<5} cannot be pruned: {one.reason}" for one in self.unprunable]
        if self.note:
            lines.append(f"note        {self.note}")
        lines.append(f"self-check  {self.self_check}" + (f": {self.reason}" if self.reason else ""))
        return "\n".join(lines)


def _alike(one: LayerReport, other: LayerReport) -> bool:
    return (_words(one), one.shared) == (_words(other), other.shared)


def _runs(layers: tuple[LayerReport, ...]) -> Iterable[tuple[LayerReport, LayerReport]]:
    """(first, last) of every stretch of layers that are alike."""
    first = last = layers[0]
    for layer in layers[1:]:
        if not _alike(last, layer):
            yield first, last
            first = layer
        last = layer
    yield first, last


def _span(first: LayerReport, last: LayerReport) -> str:
    return f"layer {first.index}" if first is last else f"layers {first.index}-{last.index}"


def _words(layer: LayerReport) -> str:
    words = [f"{layer.experts} experts, top-{layer.top_k}"]
    if layer.groups > 1:
        words.append(f"from {layer.kept_groups} of {layer.groups} groups")
    if layer.identity_experts:
        words.append(f"{layer.identity_experts} identity experts")
    words.append(f"{layer.expert_values} values each")
    words.append(f"can lose {layer.experts - layer.fewest_survivors}")
    if layer.selection_bias:
        words.append(f"selection bias: {layer.selection_bias}")
    return ", ".join(words)


def inspect_model(name: str, folder: Path, *, weights: bool = True, **options: Any) -> ModelReport:
    """Look at a checkpoint folder.

    Args:
        name: for the report.
        folder: of the model.
        weights: load the weights and check the routers; else the config alone is read.
        options: of `load_weights`.

    Raises:
        UsageError: if there is nothing to prune, with the reason.
    """
    model: nn.Module = empty_model(folder)
    layers = find_layers(model, where=str(folder))
    verdict: Literal["pass", "fail", "not run"] = "not run"
    reason = "the config alone was read"
    if weights and not weights_files(folder):
        reason = "the folder holds no weights"
    elif weights:
        try:
            open_model(load_weights(folder, **options))
        except UsageError as error:
            verdict, reason = "fail", str(error)
        else:
            verdict, reason = "pass", ""
    convention = layers[0].convention
    return ModelReport(
        model=name,
        architecture=type(model).__name__,
        convention=convention.describe(),
        trained_scale=convention.trained_scale,
        scales=convention.scales,
        layers=tuple(LayerReport.of(model, layer) for layer in layers),
        unprunable=find_unprunable(model),
        note=layers[0].row.note,
        self_check=verdict,
        reason=reason,
    )
