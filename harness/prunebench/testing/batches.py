"""Router calls and token batches without a model: built from their parts, split, relabelled, and measured.

What `moe.Instrument` shows an observer, for tests that want to say what is in it. Split a batch, or renumber its
experts: a statistic must say the same.

T tokens, K slots per token, E experts, S rows (one per slot), D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from prunebench.calibration import Statistic
from prunebench.errors import UsageError
from prunebench.mask import LayerShape
from prunebench.moe import TokenBatch
from prunebench.moe.batch import call_of_tokens
from prunebench.routing import Convention, RouterCall, native_gates, native_index, scores_and_choice

__all__ = ["batch_of", "check_relabelling", "measured", "relabel_batch", "router_call", "shape_of", "split_batch"]


def router_call(
    convention: Convention,
    logits_TE: Tensor,
    bias_E: Tensor | None = None,
    *,
    top_k: int,
    hidden: torch.dtype = torch.float32,
    expert_scale_E: Tensor | None = None,
) -> RouterCall:
    """What a router of this convention decides on these logits.

    Args:
        convention: the router's convention.
        logits_TE: raw logits, in the router's dtype; identity experts' come last.
        bias_E: selection bias, for a biased convention.
        top_k: k.
        hidden: dtype of the model, which some routers return their gates in.
        expert_scale_E: the number that multiplies each expert's gate, for a convention with such scales.
    """
    scores_TE, choice_TE = scores_and_choice(convention, logits_TE, bias_E)
    index_TK = native_index(convention, choice_TE, top_k)
    gates_TK = native_gates(convention, logits_TE, scores_TE, index_TK, expert_scale_E)
    dtype = {"float32": torch.float32, "logits": logits_TE.dtype, "hidden": hidden}[convention.gates_in]
    return RouterCall(convention, logits_TE, bias_E, index_TK, gates_TK.to(dtype), expert_scale_E)


def shape_of(call: RouterCall, *, index: int = 0) -> LayerShape:
    """The layer that a router call is from, as masks and budgets see it."""
    groups = call.convention.groups
    experts, top_k = call.logits_TE.shape[1] - call.convention.identities, call.index_TK.shape[1]
    return LayerShape(index, experts, top_k, *((groups.count, groups.kept) if groups else ()))


def batch_of(
    *,
    x_TD: Tensor,
    scores_TE: Tensor,
    choice_TE: Tensor,
    index_TK: Tensor,
    gates_TK: Tensor,
    outputs_TKD: Tensor,
    block_T: Tensor | None = None,
    slot_major: bool = False,
    call: RouterCall | None = None,
    evaluate: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> TokenBatch:
    """A `TokenBatch` from tensors by token and slot; the rows are derived, so they cannot disagree.

    Args:
        x_TD: the experts' input.
        scores_TE: router scores p.
        choice_TE: what the router ranked.
        index_TK: the expert of each slot; a slot of an identity expert, or an empty one, is E or more and has no row.
        gates_TK: gates as applied.
        outputs_TKD: un-weighted expert outputs.
        block_T: calibration block of each token; by default all are of block 0.
        slot_major: the order of one expert's rows: by slot and then token, as `eager` sends them, else by token.
        call: the router's decision, for statistics that ask how gates were made.
        evaluate: f_e(x) of given rows and experts, for statistics that ask for more outputs.
    """
    tokens, slots = index_TK.shape
    if slot_major:
        expert_S, order_S = index_TK.t().reshape(-1).sort(stable=True)
        slot_S, token_S = order_S.div(max(tokens, 1), rounding_mode="floor"), order_S % max(tokens, 1)
    else:
        expert_S, order_S = index_TK.reshape(-1).sort(stable=True)
        token_S, slot_S = order_S.div(slots, rounding_mode="floor"), order_S % slots
    rows = int((index_TK < scores_TE.shape[1]).sum())
    expert_S, token_S, slot_S = expert_S[:rows], token_S[:rows], slot_S[:rows]
    return TokenBatch(
        x_TD=x_TD,
        scores_TE=scores_TE,
        choice_TE=choice_TE,
        index_TK=index_TK,
        gates_TK=gates_TK,
        outputs_SD=outputs_TKD[token_S, slot_S],
        expert_S=expert_S,
        token_S=token_S,
        slot_S=slot_S,
        counts_E=torch.bincount(expert_S, minlength=scores_TE.shape[1]),
        block_T=torch.zeros(tokens, dtype=torch.int64) if block_T is None else block_T,
        call=call,
        evaluate=evaluate,
    )


def split_batch(batch: TokenBatch, *cuts: int) -> tuple[TokenBatch, ...]:
    """The tokens before the first cut, those from there to the next, and so on; a part may be empty.

    Args:
        batch: T tokens.
        cuts: increasing, from 0 to T.

    Raises:
        UsageError: for cuts out of order or beyond the batch.
    """
    edges = [0, *cuts, batch.tokens]
    if edges != sorted(edges):
        raise UsageError(f"cuts {cuts} of {batch.tokens} tokens", expected=f"increasing, from 0 to {batch.tokens}")
    return tuple(
        batch_of(
            x_TD=batch.x_TD[start:end],
            scores_TE=batch.scores_TE[start:end],
            choice_TE=batch.choice_TE[start:end],
            index_TK=batch.index_TK[start:end],
            gates_TK=batch.gates_TK[start:end],
            outputs_TKD=batch.outputs_TKD[start:end],
            block_T=batch.block_T[start:end],
            call=None if batch.call is None else call_of_tokens(batch.call, slice(start, end)),
            evaluate=batch.evaluate,
        )
        for start, end in pairwise(edges)
    )


def relabel_batch(batch: TokenBatch, old_of_new: Sequence[int]) -> TokenBatch:
    """The same batch with its experts renumbered: expert n of the result is `old_of_new[n]` of `batch`.

    Raises:
        UsageError: if that does not name every expert once.
    """
    order_E = check_relabelling(old_of_new, batch.counts_E.shape[0])
    new_of_old = torch.tensor([*order_E.argsort().tolist(), *range(len(order_E), int(batch.index_TK.max()) + 1)])
    call, evaluate = batch.call, batch.evaluate
    if call is not None:
        # Identity experts' logits follow.
        logits_order = torch.tensor([*order_E.tolist(), *range(len(order_E), call.logits_TE.shape[1])])
        call = RouterCall(
            call.convention,
            call.logits_TE[:, logits_order],
            None if call.bias_E is None else call.bias_E[logits_order],
            logits_order.argsort()[call.index_TK],
            call.gates_TK,
            None if call.expert_scale_E is None else call.expert_scale_E[logits_order],
        )
    return batch_of(
        x_TD=batch.x_TD,
        scores_TE=batch.scores_TE[:, order_E],
        choice_TE=batch.choice_TE[:, order_E],
        index_TK=new_of_old[batch.index_TK],
        gates_TK=batch.gates_TK,
        outputs_TKD=batch.outputs_TKD,
        block_T=batch.block_T,
        call=call,
        evaluate=None if evaluate is None else lambda x_SD, expert_S: evaluate(x_SD, order_E[expert_S]),
    )


def check_relabelling(old_of_new: Sequence[int], experts: int) -> Tensor:
    """The old id of each new expert as a tensor ([E]).

    Raises:
        UsageError: if it does not name each of E experts once.
    """
    order_E = torch.as_tensor(old_of_new, dtype=torch.int64)
    if sorted(order_E.tolist()) != list(range(experts)):
        raise UsageError(f"old_of_new {order_E.tolist()}", expected=f"each id from 0 to {experts - 1} once")
    return order_E


def measured(statistic: Statistic, *batches: TokenBatch) -> Statistic:
    """A copy of a statistic, started, updated with the batches in turn, and ready to be asked for `value()`."""
    if not batches:
        raise UsageError("nothing to measure", where="prunebench.testing.measured", expected="at least one batch")
    fresh = copy.deepcopy(statistic)
    fresh.start(batches[0].counts_E.shape[0], batches[0].x_TD.shape[1], batches[0].x_TD.device)
    for batch in batches:
        fresh.update(batch)
    fresh.to_host()
    return fresh
