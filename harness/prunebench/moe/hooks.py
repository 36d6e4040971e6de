"""The only hooks that touch a model: they carry out a layer's program and show observers what was computed.

Per MoE layer there are three: a forward hook on the router (new slots and gates), and a pre- and a post-hook on the
experts module. Where slots are answered by fills, or somebody watches, the pre-hook turns the call into "one expert per
row, gate 1" without the pruned rows, and the post-hook answers the holes, weighs by the gates in the router's dtype and
adds up in the module's own order. So execution knows no weight layout, and with an empty mask the logits are the
untouched model's, bit for bit. Rows go to each expert in the order in which the native code sends them: a GEMM may
round differently when its rows are permuted. A slot that no expert is left for is empty: its id is E, it sends no row
and adds nothing. Where gates multiply the experts' input (Llama-4), all experts run on every token; there the hooks
zero what pruned experts say, or let fills answer the scaled input.

T tokens, K slots per token, E experts, S rows (one per computed slot), D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prunebench.errors import IntegrityError, UsageError
from prunebench.mask import GroupPolicy
from prunebench.moe.batch import TokenBatch, rows_per_expert, segments_of, without_padding
from prunebench.moe.layer import MoELayer, MoEModel
from prunebench.routing import (
    RouterCall,
    Scale,
    Selection,
    gates_of,
    log_normaliser,
    scores_and_choice,
    select_survivors,
)

__all__ = ["Instrument", "LayerCounters", "LayerProgram"]

_ENDS: tuple[Literal["keep"], Literal["renorm"]] = ("keep", "renorm")

Observer = Callable[[MoELayer, TokenBatch], None]


@dataclass(frozen=True)
class LayerProgram:
    """What one masked layer computes.

    Args:
        pruned: original ids of the pruned experts.
        fills: a module per pruned expert that keeps its slots; a pruned expert without one cannot be routed to.
        scale: resolved gate scale of the survivors, used if some pruned expert has no fill.
        policy: who chooses the groups of a group-limited router, used as the scale is.
        positions: where physically removed, original id of each survivor in the smaller experts module, in order.
        sources: filled expert -> the survivor whose output its fill is shown, in place of the expert's input.
        edits: survivor -> parameter name -> its weights while the program runs.
    """

    pruned: tuple[int, ...]
    fills: Mapping[int, nn.Module] = field(default_factory=dict)
    scale: Scale = field(default_factory=lambda: Scale("keep"))
    policy: GroupPolicy = "frozen"
    positions: tuple[int, ...] | None = None
    sources: Mapping[int, int] = field(default_factory=dict)
    edits: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def blocked(self) -> tuple[int, ...]:
        """Pruned experts that no slot may ask for."""
        return tuple(expert for expert in self.pruned if expert not in self.fills)


@dataclass
class LayerCounters:
    """Slots counted over everything a masked layer has run, padding excluded; device tensors, read once at the end.

    Args:
        calls: token-layer calls.
        slots: slots, filled or empty (calls · K).
        empty: slots that no expert was left for.
        reached_pruned: slots that asked for a pruned expert that nothing answers; zero or the run is void.
        asked: slots that asked for a filled expert.
        answered: rows that fills computed.
        displaced: calls whose unpruned top-k held an unroutable expert.
        ratio_sum: sum over displaced calls of the gates' total under keep over the total under renorm; zero where the
            router leaves keep undefined.
        ratio_above_one: displaced calls where that ratio exceeds 1.
    """

    calls: Tensor
    slots: Tensor
    empty: Tensor
    reached_pruned: Tensor
    asked: Tensor
    answered: Tensor
    displaced: Tensor
    ratio_sum: Tensor
    ratio_above_one: Tensor

    @classmethod
    def zero(cls, device: torch.device) -> LayerCounters:
        """All counters at zero."""
        zeros = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(9)]
        counters = cls(*zeros)
        counters.ratio_sum = torch.zeros((), dtype=torch.float64, device=device)
        return counters

    def read(self) -> dict[str, float]:
        """The counters as numbers."""
        return {name: value.item() for name, value in vars(self).items()}


@dataclass
class _Call:
    """What the hooks of one layer hand to each other during one forward."""

    router: RouterCall
    x_TD: Tensor = field(init=False)
    index_TK: Tensor = field(init=False)
    gates_TK: Tensor = field(init=False)
    token_S: Tensor = field(init=False)
    slot_S: Tensor = field(init=False)
    expert_S: Tensor = field(init=False)
    own_S: Tensor = field(init=False)


class Instrument:
    """Context manager: while it is entered, layers run their programs and observers see every batch.

    Args:
        moe: the opened model.
        programs: layer index -> program; layers not named run untouched.
        observer: called as `observer(layer, batch)` after each MoE layer.
        force: run the rewriting code in every layer, even where a program has nothing to do (integrity checks).

    Leaving it restores the model: nothing is patched, and only hooks of this object are removed.
    """

    def __init__(
        self,
        moe: MoEModel,
        programs: Mapping[int, LayerProgram] | None = None,
        *,
        observer: Observer | None = None,
        force: bool = False,
    ) -> None:
        self.moe = moe
        self.programs = dict(programs or {})
        if unknown := sorted(set(self.programs) - {layer.index for layer in moe.layers}):
            raise UsageError(
                f"a program for layer {unknown[0]}, which is no MoE layer",
                expected=", ".join(str(layer.index) for layer in moe.layers),
            )
        self.observer = observer
        self.force = force
        self.counters: dict[int, LayerCounters] = {}
        self.blocks_seen = 0
        self._handles: list[RemovableHandle] = []
        self.calls: dict[int, _Call] = {}
        self.fired: set[int] = set()
        self._unedited: list[tuple[Tensor, Tensor]] = []
        self._watched: tuple[MoELayer, ...] = ()
        self._valid_BL: Tensor | None = None
        self._lengths: tuple[int, int] = (0, 0)
        self._going_on: dict[int, LayerCounters] = {}

    def __enter__(self) -> Self:
        everything = self.force or self.observer is not None
        self._watched = tuple(
            layer for layer in self.moe.layers if everything or self.programs.get(layer.index, LayerProgram(())).pruned
        )
        try:
            for layer in self._watched:
                self._attach(layer)
            self._handles.append(self.moe.model.register_forward_pre_hook(self._before_model, with_kwargs=True))
            self._handles.append(self.moe.model.register_forward_hook(self._after_model))
            for layer in self._watched:
                self._edit(layer, self.programs.get(layer.index, LayerProgram(())).edits)
        except BaseException:
            self._detach()
            raise
        return self

    def _attach(self, layer: MoELayer) -> None:
        for hook in layer.experts._forward_hooks.values():  # noqa: SLF001  torch has no public list of hooks
            other = getattr(hook, "__self__", None)
            if isinstance(other, _LayerHooks) and other.by_row:
                raise UsageError(
                    "the layer's slots are already answered or watched by another Instrument",
                    where=layer.name,
                    expected="one Instrument that does both",
                    fix="give the observer to `installed(moe, plan, observer=…)`",
                )
        hooks = _LayerHooks if layer.convention.gates_on == "output" else _InputGateHooks
        runner = hooks(self, layer, self.programs.get(layer.index, LayerProgram(())))
        runner.counters = self._going_on.get(layer.index, runner.counters)
        self.counters[layer.index] = runner.counters
        self._handles += [
            *layer.watch_router(runner.after_router),
            layer.experts.register_forward_pre_hook(runner.before_experts),
            layer.experts.register_forward_hook(runner.after_experts),
        ]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the model is the untouched one; afterwards programs run again, and counters go on where they were."""
        self._detach()
        try:
            yield
        finally:
            self._going_on = dict(self.counters)
            try:
                self.__enter__()
            finally:
                self._going_on = {}

    def snapshot(self) -> dict[str, dict[str, float]]:
        """The counters as JSON data."""
        return {str(index): counters.read() for index, counters in self.counters.items()}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Set the counters to a snapshot."""
        for index, numbers in state.items():
            for name, number in numbers.items():
                getattr(self.counters[int(index)], name).fill_(number)

    @torch.no_grad()
    def _edit(self, layer: MoELayer, edits: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Write the survivors' weights, and remember what was there."""
        for expert, named in edits.items():
            own = layer.weights(expert)
            for name, value in named.items():
                self._unedited.append((own[name], own[name].clone()))
                own[name].copy_(value)

    @torch.no_grad()
    def _detach(self) -> None:
        for weight, value in reversed(self._unedited):
            weight.copy_(value)
        self._unedited.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.calls.clear()

    def _before_model(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (kwargs.get("input_ids"), *args, kwargs.get("inputs_embeds"))
        ids = next(value for value in given if isinstance(value, Tensor))
        self._lengths = (int(ids.shape[0]), int(ids.shape[1]))
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        # With a cache the mask also covers past tokens: the last columns are this call's.
        self._valid_BL = None
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self._valid_BL = mask[:, -self._lengths[1] :].bool()
        self.fired.clear()

    def _after_model(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        silent = [layer.name for layer in self._watched if layer.index not in self.fired]
        if silent:
            raise IntegrityError(
                f"the hooks of {len(silent)} masked layers did not run",
                where=silent[0],
                expected="router and experts to be called as modules",
                fix="load the model without fused or quantised MoE kernels",
            )
        self.blocks_seen += self._lengths[0]

    def valid_T(self, device: torch.device) -> Tensor | None:
        """Which tokens of the current call are not padding; None if all are."""
        return None if self._valid_BL is None else self._valid_BL.reshape(-1).to(device)

    def block_T(self, device: torch.device) -> Tensor:
        """Block number of each token of the current call."""
        rows, length = self._lengths
        return (torch.arange(rows, device=device) + self.blocks_seen).repeat_interleave(length)


class _LayerHooks:
    """The three hooks of one layer and the tensors they need, made once."""

    def __init__(self, instrument: Instrument, layer: MoELayer, program: LayerProgram) -> None:
        self.instrument, self.layer, self.program = instrument, layer, program
        device = layer.device

        def flags(ids: tuple[int, ...]) -> Tensor:
            # The last one is that of empty slots.
            result = torch.zeros(layer.choices + 1, dtype=torch.bool)
            result[list(ids)] = True
            return result.to(device)

        self.blocked_E = flags(program.blocked)
        self.filled_E = flags(tuple(program.fills))
        self.fills = {expert: fill.to(device).eval() for expert, fill in sorted(program.fills.items())}
        # A fill computes in the dtype that it stores, whatever the model's is.
        self.fill_dtypes = {expert: _stored_dtype(fill) for expert, fill in self.fills.items()}
        self.position_E: Tensor | None = None
        if program.positions is not None:
            # Identity experts follow the survivors.
            stay = [*program.positions, *range(layer.expert_count, layer.choices)]
            self.position_E = torch.zeros(layer.choices, dtype=torch.int64, device=device)
            self.position_E[stay] = torch.arange(len(stay), device=device)
        self.reroutes = bool(program.blocked) or instrument.force
        self.by_row = (
            bool(self.fills) or instrument.force or instrument.observer is not None or _may_leave_empty(layer, program)
        )
        self.counters = LayerCounters.zero(device)

    def after_router(self, call: RouterCall, _hidden: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Refill the slots of unroutable experts."""
        self.instrument.calls[self.layer.index] = _Call(call)
        if not self.reroutes:
            return None
        selection = select_survivors(call, self.blocked_E[:-1], self.program.policy)
        if self.program.blocked:
            self._count_displaced(selection)
        return gates_of(selection, self.program.scale), selection.index_TK

    def _count_displaced(self, selection: Selection) -> None:
        """How often a slot changed hands, and how far apart the two scales are then (2610.41366 §5.3)."""
        displaced_T = selection.hole_TK.any(-1)
        if (valid_T := self.instrument.valid_T(displaced_T.device)) is not None:
            displaced_T = displaced_T & valid_T
        self.counters.displaced += displaced_T.sum()
        if "keep" not in self.layer.convention.scales:
            return
        # Gates are c·p/Z, so keep's total over renorm's is Z_renorm / Z_keep.
        log_z_T = {kind: log_normaliser(selection, Scale(kind))[:, 0] for kind in _ENDS}
        ratio_T = torch.where(displaced_T, (log_z_T["renorm"] - log_z_T["keep"]).exp(), 0.0)
        self.counters.ratio_sum += ratio_T.sum()
        self.counters.ratio_above_one += (ratio_T > 1).sum()

    def before_experts(self, _experts: nn.Module, args: tuple[Any, ...]) -> Any:
        """Count the slots; where somebody answers or watches, ask for one expert per row without the filled ones."""
        x_TD, index_TK, gates_TK = args
        call = self._call()
        self._count_slots(index_TK)
        if not self.by_row:
            return None if self.position_E is None else (x_TD, self.position_E[index_TK], gates_TK)
        tokens, slots = index_TK.shape
        if self.layer.reduces_in_expert_order:
            expert_S, order_S = index_TK.t().reshape(-1).sort(stable=True)
            call.token_S, call.slot_S = order_S % tokens, order_S.div(tokens, rounding_mode="floor")
        else:
            expert_S, order_S = index_TK.reshape(-1).sort(stable=True)
            call.token_S, call.slot_S = order_S.div(slots, rounding_mode="floor"), order_S % slots
        if _may_leave_empty(self.layer, self.program):
            # Empty slots have the largest id: their rows come last.
            rows = int((index_TK < self.layer.choices).sum())
            expert_S, call.token_S, call.slot_S = expert_S[:rows], call.token_S[:rows], call.slot_S[:rows]
        call.x_TD, call.index_TK, call.gates_TK, call.expert_S = x_TD, index_TK, gates_TK, expert_S
        own_token_S, own_expert_S = call.token_S, expert_S
        if self.fills:
            call.own_S = (~self.filled_E[expert_S]).nonzero()[:, 0]
            own_token_S, own_expert_S = own_token_S[call.own_S], expert_S[call.own_S]
        if self.position_E is not None:
            own_expert_S = self.position_E[own_expert_S]
        if not own_token_S.numel():
            # Fused kernels do not take an empty batch: send one row and drop its answer.
            own_token_S, own_expert_S = own_token_S.new_zeros(1), own_expert_S.new_zeros(1)
        return self.layer.one_each(x_TD[own_token_S], own_expert_S)

    def _call(self) -> _Call:
        """What the router's hook left."""
        call = self.instrument.calls.get(self.layer.index)
        if call is None:
            raise IntegrityError(
                "the experts ran, but the hook of their router did not",
                where=self.layer.name,
                expected="router and experts to be called as modules",
                fix="load the model without fused or quantised MoE kernels",
            )
        return call

    def after_experts(self, _experts: nn.Module, _args: Any, output: Tensor) -> Any:
        """Answer the holes, show the observer, weigh and add up."""
        self.instrument.fired.add(self.layer.index)
        call = self.instrument.calls.pop(self.layer.index)
        if not self.by_row:
            return None
        counts_E = rows_per_expert(call.expert_S, self.layer.choices)
        outputs_SD = self._answer(call, output, counts_E)
        if self.instrument.observer is not None:
            batch = self._batch(call, outputs_SD, counts_E)
            self.instrument.observer(self.layer, without_padding(batch, self.instrument.valid_T(outputs_SD.device)))
        return self._reduce(call, outputs_SD, counts_E)

    def _batch(self, call: _Call, outputs_SD: Tensor, counts_E: Tensor) -> TokenBatch:
        """What an observer sees of this call."""
        scores_TE, choice_TE = scores_and_choice(call.router.convention, call.router.logits_TE, call.router.bias_E)
        experts, rows = self.layer.expert_count, call.expert_S.shape[0]
        if self.layer.convention.identities:
            # Their rows come last.
            counts_E = counts_E[:experts]
            rows = int(counts_E.sum())
        return TokenBatch(
            x_TD=call.x_TD,
            scores_TE=scores_TE[:, :experts].float(),
            choice_TE=choice_TE[:, :experts],
            index_TK=call.index_TK,
            gates_TK=call.gates_TK,
            outputs_SD=outputs_SD[:rows],
            expert_S=call.expert_S[:rows],
            token_S=call.token_S[:rows],
            slot_S=call.slot_S[:rows],
            counts_E=counts_E,
            block_T=self.instrument.block_T(outputs_SD.device),
            call=call.router,
            evaluate=self.layer.run_experts if not self.program.pruned else None,
        )

    def _answer(self, call: _Call, output: Tensor, counts_E: Tensor) -> Tensor:
        """Outputs of every row: the experts' own, and the fills' in the holes ([S, D])."""
        if not self.fills:
            return output
        outputs_SD = output.new_zeros(call.expert_S.shape[0], output.shape[-1])
        outputs_SD[call.own_S] = output[: call.own_S.shape[0]]
        valid_T = self.instrument.valid_T(output.device)
        for expert, start, end in segments_of(counts_E):
            if expert not in self.fills:
                continue
            token_S = call.token_S[start:end]
            answer_SD = self._filled(expert, call.x_TD[token_S])
            if answer_SD.shape != (end - start, output.shape[-1]):
                raise UsageError(
                    f"the fill of expert {expert} answers with shape {tuple(answer_SD.shape)}",
                    where=self.layer.name,
                    expected=f"{(end - start, output.shape[-1])}, one output per row",
                )
            outputs_SD[start:end] = answer_SD.to(output.dtype)
            self.counters.answered += end - start if valid_T is None else valid_T[token_S].sum()
        return outputs_SD

    def _filled(self, expert: int, x_SD: Tensor) -> Tensor:
        """What answers for a filled expert on its rows.

        A survivor's rows are sent apart from those that it has of its own, whose bits could change in a larger GEMM.
        """
        given_SD = x_SD
        if (source := self.program.sources.get(expert)) is not None:
            given_SD = self.layer.run_experts(
                x_SD, torch.full((len(x_SD),), self._position(source), device=x_SD.device)
            )
        answer_SD: Tensor = self.fills[expert](given_SD.to(self.fill_dtypes[expert]))
        return answer_SD

    def _position(self, expert: int) -> int:
        """Where a survivor is in the experts module."""
        positions = self.program.positions
        return expert if positions is None else positions.index(expert)

    def _reduce(self, call: _Call, outputs_SD: Tensor, counts_E: Tensor) -> Tensor:
        """Σ_k g·f in the order and dtype of the module's own code ([T, D]).

        `eager` adds by increasing expert id, rounding to the hidden dtype after every addition (or, as its layout says,
        to the gates' and once more at the end); the fused implementations weigh, sum over slots at once, and round
        once.
        """
        if self.layer.reduces_in_expert_order:
            adds_in = call.gates_TK.dtype if self.layer.layout.adds_in == "gates" else call.x_TD.dtype
            total_TD = torch.zeros_like(call.x_TD, dtype=adds_in)
            for _, start, end in segments_of(counts_E):
                token_S, slot_S = call.token_S[start:end], call.slot_S[start:end]
                weighted_SD = outputs_SD[start:end] * call.gates_TK[token_S, slot_S, None]
                total_TD.index_add_(0, token_S, weighted_SD.to(total_TD.dtype))
            return total_TD.to(call.x_TD.dtype)
        weighted_SD = outputs_SD * call.gates_TK[call.token_S, call.slot_S, None]
        # Every slot is written, but for the empty ones.
        fresh = weighted_SD.new_zeros if len(call.expert_S) < call.index_TK.numel() else weighted_SD.new_empty
        weighted_TKD = fresh(*call.index_TK.shape, weighted_SD.shape[-1])
        weighted_TKD[call.token_S, call.slot_S] = weighted_SD
        return weighted_TKD.sum(dim=1).to(call.x_TD.dtype)

    def _count_slots(self, index_TK: Tensor) -> None:
        counters, valid_T = self.counters, self.instrument.valid_T(index_TK.device)
        if valid_T is not None:
            index_TK = index_TK[valid_T]
        counters.calls += index_TK.shape[0]
        counters.slots += index_TK.numel()
        counters.empty += (index_TK == self.layer.choices).sum()
        counters.reached_pruned += self.blocked_E[index_TK].sum()
        counters.asked += self.filled_E[index_TK].sum()


class _InputGateHooks(_LayerHooks):
    """The hooks of a layer whose gates multiply the experts' input (Llama-4).

    All experts run on every token, scaled by a gate that is zero unless selected; so rerouting is the router's hook
    alone. f_e(g·x) is not g·f_e(x): observers, whose outputs are un-weighted, are refused, and a fill answers the very
    input that its expert would have had.
    """

    def __init__(self, instrument: Instrument, layer: MoELayer, program: LayerProgram) -> None:
        if instrument.observer is not None:
            raise UsageError(
                f"{type(layer.router).__name__} multiplies gates into the experts' input",
                where=layer.name,
                expected="an arm without calibration statistics: they are of un-weighted outputs",
            )
        super().__init__(instrument, layer, program)
        self.by_row = False
        self.silent = [expert for expert in program.pruned if expert not in self.fills]
        self.at = list(program.positions) if program.positions is not None else list(range(layer.expert_count))

    def after_router(self, call: RouterCall, hidden: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Refill the slots of unroutable experts, and note who answers."""
        answer = super().after_router(call, hidden)
        noted = self.instrument.calls[self.layer.index]
        noted.index_TK = call.index_TK if answer is None else answer[1]
        return answer

    def before_experts(self, _experts: nn.Module, args: tuple[Any, ...]) -> Any:
        """Count the slots; where experts were removed, leave their inputs out."""
        call = self._call()
        self._count_slots(call.index_TK)
        call.x_TD = args[0]
        if self.program.positions is None:
            return None
        return (self._by_expert(args[0])[self.at].flatten(0, 1),)

    def after_experts(self, _experts: nn.Module, _args: Any, output: Tensor) -> Any:
        """Silence the pruned experts, and let fills answer."""
        self.instrument.fired.add(self.layer.index)
        call = self.instrument.calls.pop(self.layer.index)
        if not self.program.pruned:
            return None
        inputs_ETD = self._by_expert(call.x_TD)
        answers_ETD = output.new_zeros(self.layer.expert_count, call.index_TK.shape[0], output.shape[-1])
        answers_ETD[self.at] = output.view(len(self.at), -1, output.shape[-1])
        # Their input is zero, but zero times an infinity is none.
        answers_ETD[self.silent] = 0.0
        valid_T = self.instrument.valid_T(output.device)
        for expert in self.fills:
            asked_T = (call.index_TK == expert).any(-1)
            answers_ETD[expert] = 0.0
            answers_ETD[expert, asked_T] = self._filled(expert, inputs_ETD[expert, asked_T]).to(output.dtype)
            self.counters.answered += (asked_T if valid_T is None else asked_T & valid_T).sum()
        return answers_ETD.flatten(0, 1)

    def _by_expert(self, x_SD: Tensor) -> Tensor:
        return x_SD.view(self.layer.expert_count, -1, x_SD.shape[-1])


def _may_leave_empty(layer: MoELayer, program: LayerProgram) -> bool:
    """Whether some token may find fewer than k routable experts; never where `Mask.check_fits` was asked."""
    routable = sorted(set(range(layer.choices)) - set(program.blocked))
    if layer.convention.groups is None:
        return len(routable) < layer.top_k
    per_group = [sum(layer.shape.group_of(e) == g for e in routable) for g in range(layer.shape.groups)]
    if program.policy == "reselect":
        per_group = [count for count in per_group if count]
    return sum(sorted(per_group)[: layer.shape.kept_groups]) < layer.top_k


def _stored_dtype(fill: nn.Module) -> torch.dtype | None:
    """The dtype of a fill's first floating tensor; None (leave as it is) if it stores none."""
    return next((t.dtype for t in fill.state_dict().values() if t.is_floating_point()), None)
