"""The uniform view: a model's MoE layers, found by structure and trusted only after replaying their routers.

A block is an MoE layer if it has a child module `experts` and a child `gate` or `router`. What the router computes is
looked up in `routing.ROUTERS`; `open_model` then runs the model once and demands that selection and gates replayed from
that row equal the router's own, bit for bit. A model that fails is refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunebench.errors import UsageError
from prunebench.mask import LayerShape
from prunebench.routing import Convention, RouterCall, convention_of, native_gates, native_index, scores_and_choice
from prunebench.routing.convention import RouterRow

__all__ = ["MoELayer", "MoEModel", "find_layers", "open_model"]


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer: where its modules are and what its router computes.

    Args:
        name: module path of the block, e.g. `model.layers.3.mlp`.
        index: the layer's index in the model.
        block: the module that holds router and experts.
        router: `(hidden) -> (logits_TE, gates_TK, index_TK)`.
        experts: `(hidden_TD, index_TK, gates_TK) -> out_TD`.
        row: the router's row of the convention table.
        convention: that row with this router's numbers.
        expert_count: E.
        top_k: K.
    """

    name: str
    index: int
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    row: RouterRow
    convention: Convention
    expert_count: int
    top_k: int

    @property
    def shape(self) -> LayerShape:
        """What masks and budgets need to know."""
        groups = self.convention.groups
        return LayerShape(self.index, self.expert_count, self.top_k, *((groups.count, groups.kept) if groups else ()))

    @property
    def device(self) -> torch.device:
        """Where the layer's router lives."""
        return next(self.router.parameters()).device

    @property
    def width(self) -> int:
        """D, the width of the router's input and of an expert's output."""
        return int(self.router_rows_ED.shape[1])

    @property
    def router_rows_ED(self) -> Tensor:
        """The router's weight, one row per expert."""
        weight = self.router.weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    @property
    def bias_E(self) -> Tensor | None:
        """The selection bias, or None."""
        bias = getattr(self.router, self.row.bias) if self.row.bias else None
        assert bias is None or isinstance(bias, Tensor)
        return bias

    def call_of(self, output: tuple[Tensor, Tensor, Tensor]) -> RouterCall:
        """A router's output as a `RouterCall`."""
        logits_TE, gates_TK, index_TK = output
        return RouterCall(self.convention, logits_TE, self.bias_E, index_TK, gates_TK)

    def run_experts(self, x_SD: Tensor, expert_S: Tensor) -> Tensor:
        """f_e(x) for one expert per row, un-weighted, through the module's own code and past our hooks ([S, D]).

        Weight layout, biases, clamps and activations are the module's business.
        """
        output: Tensor = self.experts.forward(x_SD, expert_S[:, None], x_SD.new_ones(x_SD.shape[0], 1))
        return output

    def weights(self, expert: int) -> dict[str, Tensor]:
        """The expert's own slice of every expert tensor, by parameter name; read-only views."""
        if not 0 <= expert < self.expert_count:
            raise UsageError(
                f"expert {expert} does not exist", where=self.name, expected=f"0 to {self.expert_count - 1}"
            )
        return {name: parameter.detach()[expert] for name, parameter in self.experts.named_parameters()}

    @property
    def reduces_in_expert_order(self) -> bool:
        """Whether the experts module adds slots by increasing expert id (`eager`) or by slot (`grouped_mm`, …)."""
        config = getattr(self.experts, "config", None)
        return getattr(config, "_experts_implementation", "eager") in ("eager", None)


@dataclass(frozen=True)
class MoEModel:
    """A causal language model and its MoE layers, by increasing index.

    Args:
        model: a transformers `PreTrainedModel`, which is not typed here.
        layers: the MoE layers.
    """

    model: Any
    layers: tuple[MoELayer, ...]

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """The layers as masks and budgets see them."""
        return tuple(layer.shape for layer in self.layers)

    @property
    def convention(self) -> Convention:
        """The router convention, which all layers share (checked at opening)."""
        return self.layers[0].convention

    @property
    def experts_implementation(self) -> str:
        """The dispatch in use: exactness claims hold for one of them at a time."""
        return str(getattr(self.model.config, "_experts_implementation", None) or "eager")

    @property
    def input_device(self) -> torch.device:
        """Where token ids go."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def layer(self, index: int) -> MoELayer:
        """The MoE layer with this model index."""
        return next(layer for layer in self.layers if layer.index == index)


def _blocks(model: nn.Module) -> Iterator[MoELayer]:
    for name, block in model.named_modules():
        experts = getattr(block, "experts", None)
        router = next(
            (r for r in (getattr(block, "router", None), getattr(block, "gate", None)) if _is_module(r)), None
        )
        if not isinstance(experts, nn.Module) or router is None:
            continue
        where = f"{name} ({type(block).__name__})"
        match = re.search(r"layers\.(\d+)\.", name + ".")
        if match is None:
            raise UsageError("an MoE block outside a numbered layer", where=where, expected="a path with layers.N")
        row, convention = convention_of(router, where=where)
        count, top_k = getattr(experts, "num_experts", None), getattr(router, "top_k", None)
        if not isinstance(count, int) or not isinstance(top_k, int):
            raise UsageError(
                "cannot tell the number of experts and top-k", where=where, expected="experts.num_experts, router.top_k"
            )
        yield MoELayer(name, int(match[1]), block, router, experts, row, convention, count, top_k)


def _is_module(value: object) -> bool:
    return isinstance(value, nn.Module)


def find_layers(model: nn.Module, *, where: str = "") -> tuple[MoELayer, ...]:
    """A model's MoE layers by increasing index, not yet proven; the model may be on the meta device.

    Raises:
        UsageError: none at all, an unknown router, or layers of different conventions.
    """
    layers = tuple(sorted(_blocks(model), key=lambda layer: layer.index))
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no MoE layers",
            where=where,
            expected="blocks with experts and a gate or router",
        )
    first = layers[0]
    for layer in layers[1:]:
        if layer.convention != first.convention:
            raise UsageError(
                f"layer {layer.index} routes by: {layer.convention.describe()}",
                where=layer.name,
                expected=f"layer {first.index}'s convention: {first.convention.describe()}",
            )
    return layers


@contextmanager
def _router_calls(layers: tuple[MoELayer, ...]) -> Iterator[dict[int, tuple[Tensor, Tensor, Tensor]]]:
    """Collect each router's output during one forward."""
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def keep(index: int) -> Any:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
            seen[index] = output

        return hook

    handles = [layer.router.register_forward_hook(keep(layer.index)) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _check_replay(layer: MoELayer, output: Any) -> None:
    """Refuse the layer unless the convention row reproduces this router call bit for bit."""
    router = type(layer.router).__name__
    if output is None:
        raise UsageError("the router was never called", where=layer.name, expected=f"{router}.forward to run")
    if not isinstance(output, tuple) or len(output) != 3:
        raise UsageError(f"{router} returns something else", where=layer.name, expected="(logits, gates, index)")
    call = layer.call_of(output)
    scores_TE, choice_TE = scores_and_choice(call.convention, call.logits_TE, call.bias_E)
    index_TK = native_index(call.convention, choice_TE, layer.top_k)
    if not torch.equal(index_TK, call.index_TK):
        share = float((index_TK != call.index_TK).float().mean())
        raise UsageError(
            f"{router}: the replayed selection differs in {share:.2%} of slots",
            where=layer.name,
            expected=f"the selection of: {call.convention.describe()}",
            fix="correct the router's row in prunebench/routing/convention.py",
        )
    gates_TK = native_gates(call.convention, call.logits_TE, scores_TE, index_TK).to(call.gates_TK.dtype)
    if not torch.equal(gates_TK, call.gates_TK):
        worst = float((gates_TK.float() - call.gates_TK.float()).abs().max())
        raise UsageError(
            f"{router}: the replayed gates differ by up to {worst:.3g}",
            where=layer.name,
            expected=f"the gates of: {call.convention.describe()}",
            fix="correct the router's row in prunebench/routing/convention.py",
        )


def open_model(model: Any, *, probe_tokens: int = 256) -> MoEModel:
    """Find a model's MoE layers and prove their conventions on random token ids.

    Args:
        model: a transformers causal LM, in eval mode.
        probe_tokens: tokens of the self-check's forward pass.

    Raises:
        UsageError: no MoE layers, an unknown router, a failed replay, or layers of different conventions.
    """
    layers = find_layers(model.eval())
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(vocabulary, (4, probe_tokens // 4), generator=generator)
    moe = MoEModel(model, layers)
    with torch.inference_mode(), _router_calls(layers) as seen:
        model(input_ids=ids_BL.to(moe.input_device), use_cache=False)
        for layer in layers:
            _check_replay(layer, seen.get(layer.index))
    return moe
