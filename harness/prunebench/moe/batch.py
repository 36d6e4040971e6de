"""What an observer is shown: all that one MoE layer computed for one batch, and what can be asked of it besides.

What only some observers want is computed when it is first asked for, by the module's own code past our hooks: a pass
that does not ask pays nothing, and nobody's asking reaches the model's own outputs.

T tokens, K slots per token, E experts, S rows (one per computed slot), D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.routing import RouterCall, mixture_shares, native_index, runner_up, scores_and_choice

__all__ = ["Promoted", "TokenBatch", "call_of_tokens", "rows_per_expert", "segments_of", "without_padding"]


@dataclass(frozen=True)
class Promoted:
    """The expert that takes the place of any one that is deleted: the rank-(k+1) one of the unpruned selection.

    Args:
        expert_T: its id, an identity expert's too; -1 for tokens that have none (router groups may leave nobody).
        share_T: p of it over the sum that the selected gates are divided by, and p itself where a router does not
            divide; float64, 0 where there is none.
        outputs_TD: its un-weighted output f(x), zero where there is none.
    """

    expert_T: Tensor
    share_T: Tensor
    outputs_TD: Tensor


@dataclass(frozen=True)
class TokenBatch:
    """What one MoE layer computed for one batch, padding removed; rows are sorted by expert.

    Slots of identity experts, and empty ones, have no row; their index is E or more.

    Args:
        x_TD: the experts' input.
        scores_TE: router scores p, float32; identity experts, which are left out here, have their share of a softmax.
        choice_TE: what the router ranked (p + b, or logits).
        index_TK: the experts that answered each slot.
        gates_TK: gates as applied.
        outputs_SD: un-weighted expert outputs f_e(x), one row per slot.
        expert_S: expert of each row, non-decreasing.
        token_S: token of each row.
        slot_S: slot of each row.
        counts_E: rows per expert.
        block_T: which calibration block each token is from, counted over the pass.
        call: what the unpruned router decided; None for a batch that was made without a router.
        evaluate: f_e(x) of given rows and experts, by the module's own code; None where the layer is pruned.
    """

    x_TD: Tensor
    scores_TE: Tensor
    choice_TE: Tensor
    index_TK: Tensor
    gates_TK: Tensor
    outputs_SD: Tensor
    expert_S: Tensor
    token_S: Tensor
    slot_S: Tensor
    counts_E: Tensor
    block_T: Tensor
    call: RouterCall | None = None
    evaluate: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def tokens(self) -> int:
        """T."""
        return self.x_TD.shape[0]

    @cached_property
    def gates_S(self) -> Tensor:
        """Gate of each row."""
        return self.gates_TK[self.token_S, self.slot_S]

    @cached_property
    def output_norms_S(self) -> Tensor:
        """‖f_e(x)‖₂ of each row, accumulated in float64."""
        if self.outputs_SD.device.type == "cpu":
            # Norms of cache-sized pieces: one pass over memory, no float64 copy of the whole batch. Pieces are copied
            # where they are float64 already, too: the outputs go on into the model.
            pieces = [piece.to(torch.float64, copy=True).square_().sum(-1) for piece in self.outputs_SD.split(512)]
            return torch.cat(pieces).sqrt_() if pieces else self.outputs_SD.new_zeros(0, dtype=torch.float64)
        norms_S: Tensor = torch.linalg.vector_norm(self.outputs_SD, dim=-1, dtype=torch.float64)
        return norms_S

    @cached_property
    def moments_E(self) -> tuple[Tensor, Tensor]:
        """Mean of each expert's rows and Σ (f − mean)² by channel, in float64; zero without rows ([E, D] each)."""
        mean_ED = self.outputs_SD.new_zeros(self.counts_E.shape[0], self.outputs_SD.shape[-1], dtype=torch.float64)
        squares_ED = torch.zeros_like(mean_ED)
        if mean_ED.device.type == "cpu":
            # Expert by expert, so that each expert's rows stay in cache for both passes.
            for expert, start, end in self.segments:
                rows_SD = self.outputs_SD[start:end].double()
                mean_ED[expert] = rows_SD.mean(0)
                squares_ED[expert] = (rows_SD - mean_ED[expert]).square_().sum(0)
            return mean_ED, squares_ED
        rows_SD = self.outputs_SD.double()
        mean_ED = self._sum(rows_SD) / self.counts_E.clamp(min=1)[:, None]
        return mean_ED, self._sum((rows_SD - mean_ED[self.expert_S]).square_())

    def _sum(self, values_SD: Tensor) -> Tensor:
        """Σ over each expert's rows; index_add_ uses atomics on CUDA, in an order that changes from run to run."""
        return torch.segment_reduce(values_SD, "sum", lengths=self.counts_E, axis=0, unsafe=True)

    @cached_property
    def outputs_TKD(self) -> Tensor:
        """Un-weighted outputs by token and slot; a copy, so prefer the rows."""
        outputs = self.outputs_SD.new_zeros(*self.index_TK.shape, self.outputs_SD.shape[-1])
        outputs[self.token_S, self.slot_S] = self.outputs_SD
        return outputs

    @cached_property
    def row_TK(self) -> Tensor:
        """The row of each slot; S for a slot that has none."""
        rows = len(self.expert_S)
        row_TK = torch.full_like(self.index_TK, rows)
        row_TK[self.token_S, self.slot_S] = torch.arange(rows, device=row_TK.device)
        return row_TK

    @cached_property
    def segments(self) -> tuple[tuple[int, int, int], ...]:
        """(expert, first row, end row) of every expert with rows; reads the counts to the host once."""
        return segments_of(self.counts_E)

    @property
    def whole(self) -> bool:
        """Whether every slot has a row, and it is known how its gate was made."""
        return self.call is not None and len(self.expert_S) == self.index_TK.numel()

    @cached_property
    def is_mixture(self) -> bool:
        """Whether the layer's output is c·Σ w_j f_j with Σ w_j = 1: gates renormalised over the slots as they are."""
        if not self.whole or self.call is None or not self.call.convention.renormalised:
            return False
        if not self.tokens:
            return True
        # Gates are float32 numbers at best, whatever they are stored in; another scale is much further away.
        rounding = max(torch.finfo(self.gates_TK.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
        far_TK = (self.gates_TK.double() - self.shares_TK * self.factor_E[self.index_TK]).abs()
        return bool((far_TK <= self.call.convention.factor * rounding).all())

    @cached_property
    def shares_TK(self) -> Tensor:
        """w: each slot's score over the sum of the slots' scores, float64; the score itself if nothing is divided."""
        assert self.call is not None
        return mixture_shares(dataclasses.replace(self.call, index_TK=self.index_TK))

    @cached_property
    def factor_E(self) -> Tensor:
        """What multiplies an expert's share to make its gate: c, and the expert's own scale ([choices], float64)."""
        assert self.call is not None
        convention, scale_E = self.call.convention, self.call.expert_scale_E
        factor_E = self.x_TD.new_full((self.call.logits_TE.shape[1],), convention.factor, dtype=torch.float64)
        return factor_E if scale_E is None else factor_E * scale_E.double()

    @cached_property
    def promoted(self) -> Promoted:
        """The rank-(k+1) expert of each token and its output, evaluated now, on these tokens only.

        Raises:
            UsageError: of a pruned layer, or of a router whose selection has no rank k + 1.
        """
        if self.call is None or self.evaluate is None or not _is_native(self.call, self.index_TK):
            raise UsageError(
                "the runner-up of a layer that is pruned, or was made without a router", expected="the unpruned layer"
            )
        expert_T, share_T = runner_up(self.call)
        outputs_TD = torch.zeros_like(self.x_TD)
        identity_T = expert_T >= self.counts_E.shape[0]
        outputs_TD[identity_T] = self.x_TD[identity_T]
        some_T = ((expert_T >= 0) & ~identity_T).nonzero()[:, 0]
        if len(some_T):
            own_S, order_S = expert_T[some_T].sort(stable=True)
            some_T = some_T[order_S]
            outputs_TD[some_T] = self.evaluate(self.x_TD[some_T], own_S).to(outputs_TD.dtype)
        return Promoted(expert_T, share_T, outputs_TD)


def _is_native(call: RouterCall, index_TK: Tensor) -> bool:
    """Whether these slots are what the unpruned router selects."""
    _, choice_TE = scores_and_choice(call.convention, call.logits_TE, call.bias_E)
    return torch.equal(native_index(call.convention, choice_TE, index_TK.shape[1]).sort()[0], index_TK.sort()[0])


def segments_of(counts_E: Tensor) -> tuple[tuple[int, int, int], ...]:
    """(expert, first row, end row) of every expert with rows; reads the counts to the host."""
    result, start = [], 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            result.append((expert, start, start + count))
        start += count
    return tuple(result)


def rows_per_expert(expert_S: Tensor, experts: int) -> Tensor:
    """Rows of each expert ([E]); unlike `torch.bincount` it does not wait for a CUDA device."""
    return torch.zeros(experts, dtype=torch.int64, device=expert_S.device).scatter_add_(
        0, expert_S, torch.ones_like(expert_S)
    )


def call_of_tokens(call: RouterCall, tokens: Tensor | slice) -> RouterCall:
    """The call of some of its tokens."""
    return dataclasses.replace(
        call, logits_TE=call.logits_TE[tokens], index_TK=call.index_TK[tokens], gates_TK=call.gates_TK[tokens]
    )


def without_padding(batch: TokenBatch, valid_T: Tensor | None) -> TokenBatch:
    """The batch of the valid tokens only, renumbered."""
    if valid_T is None or bool(valid_T.all()):
        return batch
    new_token_T = valid_T.cumsum(0) - 1
    rows = valid_T[batch.token_S]
    expert_S = batch.expert_S[rows]
    return TokenBatch(
        x_TD=batch.x_TD[valid_T],
        scores_TE=batch.scores_TE[valid_T],
        choice_TE=batch.choice_TE[valid_T],
        index_TK=batch.index_TK[valid_T],
        gates_TK=batch.gates_TK[valid_T],
        outputs_SD=batch.outputs_SD[rows],
        expert_S=expert_S,
        token_S=new_token_T[batch.token_S[rows]],
        slot_S=batch.slot_S[rows],
        counts_E=rows_per_expert(expert_S, batch.counts_E.shape[0]),
        block_T=batch.block_T[valid_T],
        call=None if batch.call is None else call_of_tokens(batch.call, valid_T),
        evaluate=batch.evaluate,
    )
