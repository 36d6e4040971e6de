"""Selection and gates as pure functions of tensors: the native ones, and those of every rerouting scale.

A gate is c·p_j / Z, and every scale is a choice of Z (2610.41366 §3). With D the unpruned top-k, R the routable experts
and S the top-k of the choice among R:

===========  =================================  ======================================
Z            trained without renormalisation    trained with it
===========  =================================  ======================================
keep         1                                  Σ_{e∈D} p_e
renorm       Σ_{e∈R} p_e / Σ_all p_e            Σ_{e∈S} p_e
interp:α     (1 - α)·Z_keep + α·Z_renorm        the same
ref:k2       1 (as keep)                        Σ over the top-k2 of the choice among R
===========  =================================  ======================================

`interp` is linear in Z (ours: the papers test the ends only); `ref:k2` is 2609.04575's reference set. Independent
sigmoids without renormalisation have no simplex to renormalise over, so there renorm = keep. The epsilon that a router adds to its
sum is added to every Z that replaces that sum. S and the order of its slots never depend on the scale.

T tokens, K slots per token, E experts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.routing.convention import Convention, Groups

__all__ = [
    "RouterCall",
    "Scale",
    "log_normaliser",
    "log_scores",
    "native_gates",
    "native_index",
    "reroute",
    "scores_and_choice",
    "select_survivors",
]

_NEVER = float("-inf")


@dataclass(frozen=True)
class Scale:
    """The gate scale of the survivors: a choice of Z.

    Args:
        kind: `keep`, `renorm`, `interp` or `ref`; `trained` and `other` are resolved against a router's convention.
        alpha: for `interp`, 0 is keep and 1 is renorm.
        k2: for `ref`, the size of the reference set.
    """

    kind: Literal["trained", "other", "keep", "renorm", "interp", "ref"]
    alpha: float = 0.0
    k2: int = 0

    @classmethod
    def parse(cls, text: str) -> Scale:
        """Read `trained`, `other`, `keep`, `renorm`, `interp:α` with α in [0, 1], or `ref:k2` with k2 ≥ 1."""
        if text in ("trained", "other", "keep", "renorm"):
            return cls(text)  # type: ignore[arg-type]  # the tuple above is the Literal
        if match := re.fullmatch(r"interp:([0-9.]+(?:e-?[0-9]+)?)", text):
            try:
                alpha = float(match[1])
            except ValueError:
                alpha = math.nan
            if 0.0 <= alpha <= 1.0:
                return cls("interp", alpha=alpha)
        if (match := re.fullmatch(r"ref:([0-9]+)", text)) and int(match[1]) >= 1:
            return cls("ref", k2=int(match[1]))
        raise UsageError(
            f"unknown scale {text!r}",
            expected="trained, other, keep, renorm, interp:α (0 ≤ α ≤ 1) or ref:k2 (k2 ≥ 1)",
        )

    def resolve(self, convention: Convention) -> Scale:
        """`trained` and `other` as keep or renorm; the rest unchanged."""
        if self.kind == "trained":
            return Scale(convention.trained_scale)
        if self.kind == "other":
            return Scale("keep" if convention.renormalised else "renorm")
        return self

    def __str__(self) -> str:
        if self.kind == "interp":
            # repr is the shortest text that reads back as the same number.
            return f"interp:{self.alpha!r}".removesuffix(".0")
        return f"ref:{self.k2}" if self.kind == "ref" else self.kind


@dataclass(frozen=True)
class RouterCall:
    """One call of a router: what it saw and what it decided.

    Args:
        convention: the router's convention.
        logits_TE: raw logits, in the router's dtype.
        bias_E: selection bias, or None.
        index_TK: the unpruned top-k, D, in the router's slot order.
        gates_TK: the gates as the router returned them.
    """

    convention: Convention
    logits_TE: Tensor
    bias_E: Tensor | None
    index_TK: Tensor
    gates_TK: Tensor


def scores_and_choice(convention: Convention, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores p and choice as the router computes them, in float32 (both [T, E]).

    For `selected_softmax` the choice is the logits themselves; the scores are the softmax over all.
    """
    if convention.score == "sigmoid":
        scores_TE = logits_TE.float().sigmoid()
    else:
        scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    if convention.score == "selected_softmax":
        return scores_TE, logits_TE
    return scores_TE, scores_TE if bias_E is None else scores_TE + bias_E


def _eligible(groups: Groups, choice_TE: Tensor) -> Tensor:
    """[T, E] bool: experts inside the kept groups, as the unpruned router chooses them."""
    grouped = choice_TE.view(choice_TE.shape[0], groups.count, -1)
    group_score = grouped.amax(-1) if groups.score == "max" else grouped.topk(2, dim=-1)[0].sum(-1)
    best = torch.topk(group_score, k=groups.kept, dim=-1, sorted=False)[1]
    kept = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, value=True)
    return kept.unsqueeze(-1).expand_as(grouped).reshape(choice_TE.shape)


def native_index(convention: Convention, choice_TE: Tensor, top_k: int) -> Tensor:
    """D: the router's own selection, operation by operation ([T, K])."""
    if convention.groups is not None:
        outside = ~_eligible(convention.groups, choice_TE)
        choice_TE = choice_TE.masked_fill(outside, convention.groups.outside)
    return torch.topk(choice_TE, top_k, dim=-1, sorted=convention.sorted_topk)[1]


def native_gates(convention: Convention, logits_TE: Tensor, scores_TE: Tensor, index_TK: Tensor) -> Tensor:
    """The router's own gates of the experts it selected, operation by operation, in float32 ([T, K])."""
    if convention.score == "selected_softmax":
        return torch.softmax(logits_TE.gather(1, index_TK), dim=-1)
    gates_TK = scores_TE.gather(1, index_TK)
    if convention.renormalised:
        total_T1 = gates_TK.sum(dim=-1, keepdim=True)
        gates_TK = gates_TK / (total_T1 + convention.epsilon if convention.epsilon else total_T1)
    return gates_TK if convention.factor == 1.0 else gates_TK * convention.factor


def _ranked(call: RouterCall, choice_TE: Tensor, unavailable_TE: Tensor) -> Tensor:
    """Ids by decreasing choice, the unavailable last ([T, E]).

    A softmax orders experts as their logits do; ranking the logits tells experts apart whose scores underflow to zero.
    """
    by_logits = call.convention.score == "softmax" and call.bias_E is None
    order_TE = call.logits_TE if by_logits else choice_TE
    # A stable descending sort is the one order that is the same on every device; topk's ties are not.
    return order_TE.float().masked_fill(unavailable_TE, _NEVER).sort(dim=-1, descending=True, stable=True)[1]


def select_survivors(call: RouterCall, choice_TE: Tensor, blocked_E: Tensor) -> tuple[Tensor, Tensor]:
    """S: the top-k of the choice among the experts that are not blocked.

    Routable members of D keep their slots; promoted experts fill the holes in slot order, best choice first, ties to the
    lowest id. With groups, the groups are those that the unpruned router chose.

    Every hole can be filled: `Mask.check_fits` has left enough routable experts in every layer and group.

    Returns:
        index_TK of S and hole_TK, True where a slot changed hands.
    """
    index_TK = call.index_TK
    hole_TK = blocked_E[index_TK]
    unavailable_TE = blocked_E.expand_as(choice_TE).scatter(1, index_TK, value=True)
    if call.convention.groups is not None:
        unavailable_TE = unavailable_TE | ~_eligible(call.convention.groups, choice_TE)
    ranked_TE = _ranked(call, choice_TE, unavailable_TE)
    nth_hole_TK = (hole_TK.cumsum(-1) - 1).clamp_(min=0)
    return torch.where(hole_TK, ranked_TE.gather(1, nth_hole_TK), index_TK), hole_TK


def log_scores(convention: Convention, logits_TE: Tensor) -> Tensor:
    """log p of every expert in float64 ([T, E]): exact where p itself underflows."""
    logits64_TE = logits_TE.double()
    if convention.score == "sigmoid":
        return torch.nn.functional.logsigmoid(logits64_TE)
    return torch.log_softmax(logits64_TE, dim=-1)


def log_normaliser(
    scale: Scale, call: RouterCall, log_p_TE: Tensor, choice_TE: Tensor, index_TK: Tensor, blocked_E: Tensor
) -> Tensor:
    """log Z of a resolved scale, per token, in float64 ([T, 1]); `index_TK` is S.

    When nothing a token could choose is blocked, log Z of every scale but `ref` equals keep's bit for bit.
    """
    convention = call.convention

    def log_sum(members_TK: Tensor) -> Tensor:
        total_T1 = log_p_TE.gather(1, members_TK).logsumexp(-1, keepdim=True)
        if not convention.epsilon:
            return total_T1
        return torch.logaddexp(total_T1, torch.full_like(total_T1, math.log(convention.epsilon)))

    def keep() -> Tensor:
        return log_sum(call.index_TK) if convention.renormalised else torch.zeros_like(log_p_TE[:, :1])

    def renorm() -> Tensor:
        if convention.renormalised:
            return log_sum(index_TK)
        if convention.score == "sigmoid":
            return keep()
        left_T1 = log_p_TE.masked_fill(blocked_E, _NEVER).logsumexp(-1, keepdim=True)
        return left_T1 - log_p_TE.logsumexp(-1, keepdim=True)

    if scale.kind == "keep":
        return keep()
    if scale.kind == "renorm":
        return renorm()
    if scale.kind == "interp":
        if scale.alpha in (0.0, 1.0):
            return renorm() if scale.alpha else keep()
        # Written so that equal ends give their common value bit for bit.
        return keep() + torch.log1p(scale.alpha * torch.expm1(renorm() - keep()))
    if scale.kind == "ref":
        if not convention.renormalised:
            return keep()
        routable = int((~blocked_E).sum())
        if scale.k2 > routable:
            raise UsageError(f"scale {scale} needs {scale.k2} routable experts", expected=f"k2 ≤ {routable}")
        ranked_TE = _ranked(call, choice_TE, blocked_E)
        return log_sum(ranked_TE[:, : scale.k2])
    raise UsageError(f"scale {scale} is not resolved", fix="call Scale.resolve first")


def reroute(call: RouterCall, blocked_E: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    """Refill the slots of blocked experts, and give every selected expert the gate that `scale` says.

    Gates are computed in float64 logarithms and cast once to the router's gate dtype. Where a token's Z is keep's and
    the expert was in D, the router's own gate is returned bit for bit; with nothing blocked that is every slot.

    Args:
        call: the unpruned router's call.
        blocked_E: bool, True where the expert cannot be routed to.
        scale: a resolved scale.

    Returns:
        index_TK of S and its gates_TK.
    """
    _, choice_TE = scores_and_choice(call.convention, call.logits_TE, call.bias_E)
    index_TK, hole_TK = select_survivors(call, choice_TE, blocked_E)
    log_p_TE = log_scores(call.convention, call.logits_TE)
    log_z_T1 = log_normaliser(scale, call, log_p_TE, choice_TE, index_TK, blocked_E)
    unpruned_z_T1 = log_normaliser(Scale("keep"), call, log_p_TE, choice_TE, index_TK, blocked_E)
    gates_TK = (log_p_TE.gather(1, index_TK) - log_z_T1).exp() * call.convention.factor
    untouched_TK = ~hole_TK & (log_z_T1 == unpruned_z_T1)
    return index_TK, torch.where(untouched_TK, call.gates_TK, gates_TK.to(call.gates_TK.dtype))
