"""The uniform view: a model's MoE layers, found by structure and trusted only after replaying their routers.

A block is an MoE layer if it has a child module `experts` and a child `gate` or `router`. What the router computes is
looked up in `routing.ROUTERS`, how expert weights lie in `moe.experts`; `open_model` then runs the model once and
demands that selection and gates replayed from that row equal the router's own, bit for bit. A model that fails is
refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prunebench.errors import UsageError
from prunebench.mask import LayerShape
from prunebench.moe.experts import ExpertsRow, experts_row
from prunebench.routing import Convention, RouterCall, convention_of, native_gates, native_index, scores_and_choice
from prunebench.routing.convention import REFUSED, UNPRUNABLE, RouterRow, reach

__all__ = ["MoELayer", "MoEModel", "Unprunable", "find_layers", "find_unprunable", "open_model"]


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer: where its modules are and what its router computes.

    Args:
        name: module path of the block, e.g. `model.layers.3.mlp`.
        index: the layer's index in the model.
        block: the module that holds router and experts.
        router: `(hidden, …) -> (logits_TE, gates_TK, index_TK)`, or as its row says.
        experts: `(hidden_TD, index_TK, gates_TK) -> out_TD`, or as its layout says.
        row: the router's row of the convention table.
        convention: that row with this router's numbers.
        layout: how the experts' weights lie.
        expert_count: E, without identity experts.
        top_k: K.
    """

    name: str
    index: int
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    row: RouterRow
    convention: Convention
    layout: ExpertsRow
    expert_count: int
    top_k: int

    @property
    def shape(self) -> LayerShape:
        """What masks and budgets need to know."""
        groups = self.convention.groups
        return LayerShape(self.index, self.expert_count, self.top_k, *((groups.count, groups.kept) if groups else ()))

    @property
    def choices(self) -> int:
        """Experts and identity experts, whose ids follow theirs: what the router chooses among."""
        return self.expert_count + self.convention.identities

    @property
    def device(self) -> torch.device:
        """Where the layer's router lives."""
        return next(self.router.parameters()).device

    @property
    def width(self) -> int:
        """D, the width of an expert's input and output; narrower than the model's where experts work in a latent."""
        weight = self.experts.down_proj
        assert isinstance(weight, Tensor)
        return int(weight.shape[self.layout.width_axis])

    @property
    def router_rows_ED(self) -> Tensor:
        """The router's weight, one row per expert."""
        weight: Tensor = reach(self.router, self.row.rows[0])
        return weight.detach()[: self.expert_count]

    @property
    def bias_owner(self) -> nn.Module:
        """The module that holds the selection bias, where there is one."""
        return self.router if self.row.bias_on == "router" else self.block

    @property
    def bias_E(self) -> Tensor | None:
        """The selection bias, one number per choice, or None."""
        if self.row.bias is None or not self.convention.biased:
            return None
        bias: Tensor = reach(self.bias_owner, self.row.bias)
        return bias.reshape(-1)

    @property
    def bias_axis(self) -> int:
        """The axis of the selection bias that the choices are on: some routers keep it as [1, E]."""
        assert self.row.bias is not None
        return int(reach(self.bias_owner, self.row.bias).dim()) - 1

    @property
    def expert_scale_E(self) -> Tensor | None:
        """The number that multiplies each expert's gate, or None."""
        scale: Tensor | None = reach(self.router, self.row.scale) if self.row.scale else None
        return scale

    def call_of(self, output: Any, logits_TE: Tensor | None = None) -> RouterCall:
        """A router's output as a `RouterCall`.

        Args:
            output: what the router returned.
            logits_TE: the logits, where the router does not return them.
        """
        kind = type(self.router).__name__
        if self.row.returns == "dense":
            if not isinstance(output, tuple) or len(output) != 2:
                raise UsageError(f"{kind} returns something else", where=self.name, expected="(scores, logits)")
            scores_TE, logits_TE = output
            index_TK = torch.topk(logits_TE, self.top_k, dim=1)[1]
            gates_TK = scores_TE.gather(1, index_TK)
        else:
            if not isinstance(output, tuple) or len(output) != 3:
                raise UsageError(f"{kind} returns something else", where=self.name, expected="(logits, gates, index)")
            first_TE, gates_TK, index_TK = output
            logits_TE = first_TE if logits_TE is None else logits_TE
        assert logits_TE is not None
        return RouterCall(self.convention, logits_TE, self.bias_E, index_TK, gates_TK, self.expert_scale_E)

    def as_returned(self, output: tuple[Tensor, ...], gates_TK: Tensor, index_TK: Tensor) -> tuple[Tensor, ...]:
        """Other gates and experts in the form in which the router returned `output`; its logits stay."""
        if self.row.returns == "triple":
            return output[0], gates_TK, index_TK
        # One more column takes the empty slots.
        scores_TE = gates_TK.new_zeros(output[1].shape[0], output[1].shape[1] + 1).scatter_(1, index_TK, gates_TK)
        return scores_TE[:, :-1].contiguous(), output[1]

    def watch_router(
        self, see: Callable[[RouterCall, torch.dtype], tuple[Tensor, Tensor] | None]
    ) -> list[RemovableHandle]:
        """Show every call of the router, and its input's dtype, to `see`; its (gates, index) take the router's place.

        Returns:
            The hooks, to be removed.
        """
        seen: list[Tensor] = []

        def keep_logits(_module: nn.Module, _args: Any, logits_TE: Tensor) -> None:
            seen[:] = [logits_TE.reshape(-1, logits_TE.shape[-1])]

        def after(_router: nn.Module, args: Any, output: Any) -> Any:
            answer = see(self.call_of(output, seen.pop() if seen else None), args[0].dtype)
            return None if answer is None else self.as_returned(output, *answer)

        handles = [self.router.register_forward_hook(after)]
        if self.row.logits_from is not None:
            handles.append(self.router.get_submodule(self.row.logits_from).register_forward_hook(keep_logits))
        return handles

    def one_each(self, x_SD: Tensor, expert_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments that ask the experts module for one expert per row, with gate 1."""
        ones_S1 = x_SD.new_ones(x_SD.shape[0], 1)
        if self.layout.takes == "slots":
            return x_SD, expert_S[:, None], ones_S1
        # The second slot weighs nothing: an identity expert if there is one, else the same expert, as another one could
        # bring in infinities of its own.
        other_S = expert_S
        if self.convention.identities:
            other_S = torch.full_like(expert_S, getattr(self.experts, self.layout.count))
        return x_SD, torch.stack([expert_S, other_S], dim=1), torch.cat([ones_S1, torch.zeros_like(ones_S1)], dim=1)

    def run_experts(self, x_SD: Tensor, expert_S: Tensor) -> Tensor:
        """f_e(x) for one expert per row, un-weighted, through the module's own code and past our hooks ([S, D]).

        Weight layout, biases, clamps and activations are the module's business.
        """
        if self.layout.takes == "all":
            count = int(getattr(self.experts, self.layout.count))  # fewer than E where experts were removed
            everything: Tensor = self.experts.forward(x_SD.repeat(count, 1))
            return everything.view(count, *x_SD.shape)[expert_S, torch.arange(len(x_SD))]
        output: Tensor = self.experts.forward(*self.one_each(x_SD, expert_S))
        return output

    def weights(self, expert: int) -> dict[str, Tensor]:
        """The expert's own slice of every expert tensor, by parameter name; read-only views."""
        if not 0 <= expert < self.expert_count:
            raise UsageError(
                f"expert {expert} does not exist", where=self.name, expected=f"0 to {self.expert_count - 1}"
            )
        return {name: reach(self.experts, name).detach()[expert] for name in self.layout.tensors}

    @property
    def activation(self) -> str | None:
        """The experts' activation by the name that the config gives it, or None if it gives none."""
        config = getattr(self.experts, "config", None)
        names = (getattr(config, key, None) for key in ("hidden_act", "hidden_activation"))
        return next((name for name in names if isinstance(name, str)), None)

    @property
    def reduces_in_expert_order(self) -> bool:
        """Whether the experts module adds slots by increasing expert id (`eager`) or by slot (`grouped_mm`, …)."""
        config = getattr(self.experts, "config", None)
        return getattr(config, "_experts_implementation", "eager") in ("eager", None)


@dataclass(frozen=True)
class Unprunable:
    """An MoE layer that stays as it is, and why."""

    name: str
    index: int
    reason: str


@dataclass(frozen=True)
class MoEModel:
    """A causal language model and its MoE layers, by increasing index.

    Args:
        model: a transformers `PreTrainedModel`, which is not typed here.
        layers: the MoE layers that can be pruned.
        unprunable: those that cannot.
    """

    model: Any
    layers: tuple[MoELayer, ...]
    unprunable: tuple[Unprunable, ...] = ()

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


def _candidates(model: nn.Module) -> Iterator[tuple[str, int, nn.Module, nn.Module, nn.Module]]:
    """(name, layer index, block, router, experts) of every block with both, whatever they are."""
    for name, block in model.named_modules():
        experts = getattr(block, "experts", None)
        router = next(
            (r for r in (getattr(block, "router", None), getattr(block, "gate", None)) if _is_module(r)), None
        )
        if not isinstance(experts, nn.Module) or router is None:
            continue
        match = re.search(r"layers\.(\d+)\.", name + ".")
        if match is None:
            where = f"{name} ({type(block).__name__})"
            raise UsageError("an MoE block outside a numbered layer", where=where, expected="a path with layers.N")
        yield name, int(match[1]), block, router, experts


def _is_module(value: object) -> bool:
    return isinstance(value, nn.Module)


def _blocks(model: nn.Module) -> Iterator[MoELayer]:
    for name, index, block, router, experts in _candidates(model):
        if type(router).__name__ in UNPRUNABLE:
            continue
        where = f"{name} ({type(block).__name__})"
        row, convention = convention_of(router, where=where)
        layout = experts_row(experts, where=where)
        try:
            top_k = reach(router, row.top_k)
        except AttributeError:
            top_k = None
        if not isinstance(top_k, int):
            raise UsageError("cannot tell top-k", where=where, expected=f"router.{row.top_k}")
        count = int(getattr(experts, layout.count))
        if layout.takes == "two slots" and top_k < 2:
            raise UsageError(f"{type(experts).__name__} cannot run top-{top_k}", where=where, expected="top-2 or more")
        layer = MoELayer(name, index, block, router, experts, row, convention, layout, count, top_k)
        _check_lengths(layer, where)
        if convention.groups is not None:
            convention.groups.check(count, top_k, where=where)
        yield layer


def _check_lengths(layer: MoELayer, where: str) -> None:
    """Refuse a router whose tensors do not have one entry per choice, e.g. a bias left at its old length."""
    tensors = {name: reach(layer.router, name).shape[0] for name in layer.row.rows}
    if layer.row.scale is not None:
        tensors[layer.row.scale] = reach(layer.router, layer.row.scale).shape[0]
    if layer.row.bias is not None and layer.convention.biased:
        tensors[layer.row.bias] = reach(layer.bias_owner, layer.row.bias).numel()
    for name, length in tensors.items():
        if length != layer.choices:
            raise UsageError(
                f"{name} of {type(layer.router).__name__} has {length} entries",
                where=where,
                expected=f"{layer.choices}, one per expert",
                fix="slice it with the experts",
            )


def find_unprunable(model: nn.Module) -> tuple[Unprunable, ...]:
    """The MoE layers that are left as they are, by increasing index."""
    found = (
        Unprunable(name, index, UNPRUNABLE[type(router).__name__])
        for name, index, _, router, _ in _candidates(model)
        if type(router).__name__ in UNPRUNABLE
    )
    return tuple(sorted(found, key=lambda layer: layer.index))


def find_layers(model: nn.Module, *, where: str = "") -> tuple[MoELayer, ...]:
    """A model's prunable MoE layers by increasing index, not yet proven; the model may be on the meta device.

    Raises:
        UsageError: none at all, an unknown router or layout, tensors of other lengths, or layers of different
            conventions.
    """
    for name, module in model.named_modules():
        if (kind := type(module).__name__) in REFUSED:
            raise UsageError(f"{kind} cannot be pruned: {REFUSED[kind]}", where=name)
    layers = tuple(sorted(_blocks(model), key=lambda layer: layer.index))
    if not layers:
        unprunable = find_unprunable(model)
        raise UsageError(
            f"{type(model).__name__} has no MoE layers" + (" that can be pruned" if unprunable else ""),
            where=where or (unprunable[0].name if unprunable else ""),
            expected="blocks with experts and a gate or router",
            fix=unprunable[0].reason if unprunable else "",
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
def _router_calls(layers: tuple[MoELayer, ...]) -> Iterator[dict[int, tuple[RouterCall, torch.dtype]]]:
    """Collect each router's call and its input's dtype during one forward."""
    seen: dict[int, tuple[RouterCall, torch.dtype]] = {}

    def keep(index: int) -> Callable[[RouterCall, torch.dtype], None]:
        def see(call: RouterCall, hidden: torch.dtype) -> None:
            seen[index] = call, hidden

        return see

    handles = [handle for layer in layers for handle in layer.watch_router(keep(layer.index))]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _check_replay(layer: MoELayer, seen: tuple[RouterCall, torch.dtype] | None) -> None:
    """Refuse the layer unless the convention row reproduces this router call bit for bit."""
    router = type(layer.router).__name__
    fix = "correct the router's row in prunebench/routing/convention.py"
    if seen is None:
        raise UsageError("the router was never called", where=layer.name, expected=f"{router}.forward to run")
    call, hidden = seen
    if call.logits_TE.isnan().any():
        raise UsageError(f"{router}'s logits are not numbers", where=layer.name, expected="weights without NaN")
    scores_TE, choice_TE = scores_and_choice(call.convention, call.logits_TE, call.bias_E)
    index_TK = native_index(call.convention, choice_TE, layer.top_k)
    if index_TK.shape != call.index_TK.shape:
        raise UsageError(
            f"{router} fills {call.index_TK.shape[-1]} slots per token", where=layer.name, expected=f"{layer.top_k}"
        )
    if not torch.equal(index_TK, call.index_TK):
        share = float((index_TK != call.index_TK).float().mean())
        raise UsageError(
            f"{router}: the replayed selection differs in {share:.2%} of slots",
            where=layer.name,
            expected=f"the selection of: {call.convention.describe()}",
            fix=fix,
        )
    wanted = {"logits": call.logits_TE.dtype, "hidden": hidden, "float32": torch.float32}[call.convention.gates_in]
    if call.gates_TK.dtype != wanted:
        raise UsageError(
            f"{router} returns {call.gates_TK.dtype} gates", where=layer.name, expected=f"{wanted}", fix=fix
        )
    gates_TK = native_gates(call.convention, call.logits_TE, scores_TE, index_TK, call.expert_scale_E).to(wanted)
    if not torch.equal(gates_TK, call.gates_TK):
        worst = float((gates_TK.float() - call.gates_TK.float()).abs().max())
        raise UsageError(
            f"{router}: the replayed gates differ by up to {worst:.3g}",
            where=layer.name,
            expected=f"the gates of: {call.convention.describe()}",
            fix=fix,
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
    moe = MoEModel(model, layers, find_unprunable(model))
    with torch.inference_mode(), _router_calls(layers) as seen:
        model(input_ids=ids_BL.to(moe.input_device), use_cache=False)
        for layer in layers:
            try:
                _check_replay(layer, seen.get(layer.index))
            except UsageError as error:
                if (name := _not_finite(model)) is not None:
                    raise UsageError(
                        "a weight is not finite", where=name, expected="numbers", fix="get the checkpoint again"
                    ) from error
                raise
    return moe


def _not_finite(model: nn.Module) -> str | None:
    """The first tensor of a model that holds NaN or infinity; it would be blamed on a router further on."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, value in tensors if value.is_floating_point() and not value.isfinite().all()), None)
