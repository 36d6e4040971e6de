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

`interp` is linear in Z (ours: the papers test the ends only); `ref:k2` is 2609.04575's reference set, within the kept
groups where the router has groups, so that ref:k is renorm. Independent
sigmoids without renormalisation have no simplex to renormalise over, so there renorm = keep. The epsilon that a router
adds to its sum is added to every Z that replaces that sum, and its floor applies to it. S and the order of its slots
never depend on the scale.

Two conventions do not fit: `sparsemixer` has no Z (its renorm is the router's own code run among the survivors, and no
other scale is defined), and a scale per expert multiplies its gate after c, under every scale.

Group-limited routers take one of two policies (`mask.GroupPolicy`). Under `frozen`, the default, the groups are those
that the unpruned router chose. Under `reselect` they are chosen anew among the routable: an unroutable expert counts as
-inf, one that is alone in its group scores it alone, a group without any cannot be chosen, and members of D leave their
slots where their group lost or a new one holds better experts; with equal groups left this is what a router without the
pruned rows computes.

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
from prunebench.mask import GroupPolicy
from prunebench.routing.convention import Convention, Groups

__all__ = [
    "RouterCall",
    "Scale",
    "Selection",
    "gates_of",
    "log_normaliser",
    "mixture_shares",
    "native_gates",
    "native_index",
    "reroute",
    "runner_up",
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
        """`trained` and `other` as keep or renorm; the rest unchanged.

        Raises:
            UsageError: if the router's convention leaves the scale undefined.
        """
        resolved = self
        if self.kind == "trained":
            resolved = Scale(convention.trained_scale)
        elif self.kind == "other":
            resolved = Scale("keep" if convention.trained_scale == "renorm" else "renorm")
        if resolved.kind not in convention.scales:
            raise UsageError(
                f"scale {resolved} is not defined for routers of the kind: {convention.describe()}",
                expected=" or ".join(convention.scales),
            )
        return resolved

    def check_possible(self, routable: int, *, where: str = "") -> None:
        """Raise if the reference set of `ref:k2` is larger than a layer's routable experts."""
        if self.kind == "ref" and self.k2 > routable:
            raise UsageError(
                f"scale {self} needs {self.k2} survivors",
                where=f"{where} with {routable}" if where else "",
                expected=f"ref:k2 with k2 ≤ {routable}",
            )

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
        expert_scale_E: the number that multiplies each expert's gate, or None.

    E counts identity experts too.
    """

    convention: Convention
    logits_TE: Tensor
    bias_E: Tensor | None
    index_TK: Tensor
    gates_TK: Tensor
    expert_scale_E: Tensor | None = None


def scores_and_choice(convention: Convention, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores p and choice as the router computes them, in its own dtype (both [T, E]).

    Where the router ranks logits, the choice is the logits themselves; a selected softmax's scores, and sparsemixer's,
    are the softmax over all.
    """
    x_TE = logits_TE if convention.scores_in == "logits" else logits_TE.float()
    if convention.score in {"sigmoid", "selected_sigmoid"}:
        scores_TE = x_TE.sigmoid()
    elif convention.score == "sqrtsoftplus":
        scores_TE = torch.nn.functional.softplus(x_TE).sqrt()
    else:
        scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    if convention.chosen_by_logits:
        return scores_TE, logits_TE
    return scores_TE, scores_TE if bias_E is None else scores_TE + bias_E


def _eligible(groups: Groups, choice_TE: Tensor, blocked_E: Tensor | None = None) -> Tensor:
    """[T, E] bool: experts inside the kept groups, as the unpruned router chooses them, or among the not blocked."""
    grouped = choice_TE.view(choice_TE.shape[0], groups.count, -1)
    if blocked_E is not None:
        group_score = _score_of_the_rest(groups, grouped, blocked_E.view(groups.count, -1))
    else:
        group_score = grouped.amax(-1) if groups.score == "max" else grouped.topk(2, dim=-1)[0].sum(-1)
    best = torch.topk(group_score, k=groups.kept, dim=-1, sorted=False)[1]
    kept = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, value=True)
    return kept.unsqueeze(-1).expand_as(grouped).reshape(choice_TE.shape)


def _score_of_the_rest(groups: Groups, grouped: Tensor, blocked: Tensor) -> Tensor:
    """Group scores over the experts that are not blocked; -inf for a group without any ([T, groups])."""
    best = grouped.masked_fill(blocked, _NEVER).topk(groups.smallest, dim=-1)[0]
    # -inf in a sum would sink the group of a lone survivor, which scores by itself.
    score: Tensor = best.masked_fill(best == _NEVER, 0.0).sum(-1)
    return score.masked_fill(blocked.all(-1), _NEVER)


def _sparsemixer(convention: Convention, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Experts and gates of sparsemixer in evaluation: two argmaxes in turn, operation by operation ([T, 2] each).

    Source: transformers' `phimoe`, after 2409.12136; each gate is a softmax over the logits within the band.
    """
    experts, gates, left_TE = [], [], logits_TE
    for _ in range(2):
        best_T1, expert_T1 = left_TE.max(dim=-1, keepdim=True)
        width_TE = logits_TE.abs().clamp(min=best_T1)
        outside_TE = ((best_T1 - logits_TE) / width_TE) > 2 * convention.band
        within_TE = torch.softmax(left_TE.masked_fill(outside_TE, _NEVER), dim=-1)
        experts.append(expert_T1)
        gates.append(within_TE.gather(-1, expert_T1))
        left_TE = left_TE.scatter(-1, expert_T1, _NEVER)
    return torch.cat(experts, dim=-1), torch.cat(gates, dim=-1)


def native_index(convention: Convention, choice_TE: Tensor, top_k: int) -> Tensor:
    """D: the router's own selection, operation by operation ([T, K])."""
    if convention.score == "sparsemixer":
        return _sparsemixer(convention, choice_TE)[0]
    if convention.groups is not None:
        outside = ~_eligible(convention.groups, choice_TE)
        choice_TE = choice_TE.masked_fill(outside, convention.groups.outside)
    return torch.topk(choice_TE, top_k, dim=-1, sorted=convention.sorted_topk)[1]


def native_gates(
    convention: Convention,
    logits_TE: Tensor,
    scores_TE: Tensor,
    index_TK: Tensor,
    expert_scale_E: Tensor | None = None,
) -> Tensor:
    """The router's own gates of the experts it selected, operation by operation, in its scores' dtype ([T, K])."""
    if convention.score == "selected_softmax":
        return torch.softmax(logits_TE.gather(1, index_TK), dim=-1)
    if convention.score == "sparsemixer":
        return _sparsemixer(convention, logits_TE)[1]
    if convention.groups is not None and convention.groups.score == "max":
        # Such a router (DeepSeek-V2) weighs by the scores that it has written 0 over: where those inside the groups
        # underflow, it may select an expert from outside, at gate 0.
        scores_TE = scores_TE.masked_fill(~_eligible(convention.groups, scores_TE), convention.groups.outside)
    gates_TK = scores_TE.gather(1, index_TK)
    if convention.renormalised:
        total_T1 = gates_TK.sum(dim=-1, keepdim=True)
        if convention.floor:
            total_T1 = total_T1.clamp(min=convention.floor)
        gates_TK = gates_TK / (total_T1 + convention.epsilon if convention.epsilon else total_T1)
    if convention.factor != 1.0:
        gates_TK = gates_TK * convention.factor
    return gates_TK if expert_scale_E is None else gates_TK * expert_scale_E[index_TK]


def _unavailable(call: RouterCall, choice_TE: Tensor, blocked_E: Tensor, policy: GroupPolicy) -> Tensor:
    """[T, E] bool: blocked experts, and those outside the kept groups."""
    groups = call.convention.groups
    if groups is None:
        return blocked_E.expand_as(choice_TE)
    return blocked_E | ~_eligible(groups, choice_TE, blocked_E if policy == "reselect" else None)


def _ranked(call: RouterCall, choice_TE: Tensor, unavailable_TE: Tensor) -> Tensor:
    """Ids by decreasing choice, the unavailable last ([T, E]).

    A softmax orders experts as their logits do; ranking the logits tells experts apart whose scores underflow to zero.
    """
    by_logits = call.convention.score == "softmax" and call.bias_E is None
    order_TE = call.logits_TE if by_logits else choice_TE
    # A stable descending sort is the one order that is the same on every device; topk's ties are not.
    return order_TE.float().masked_fill(unavailable_TE, _NEVER).sort(dim=-1, descending=True, stable=True)[1]


@dataclass(frozen=True)
class Selection:
    """The slots of one router call once some experts cannot be routed to; the same for every scale.

    Args:
        call: the unpruned router's call.
        blocked_E: bool, True where the expert cannot be routed to.
        unavailable_TE: bool, blocked or outside the token's groups.
        index_TK: S, in slot order; E where no expert is left for the slot.
        hole_TK: bool, slots that changed hands.
        empty_TK: bool, slots that nobody fills.
        choice_TE: what the router ranks.
        log_p_TE: log p of every expert in float64, exact where p itself underflows.
    """

    call: RouterCall
    blocked_E: Tensor
    unavailable_TE: Tensor
    index_TK: Tensor
    hole_TK: Tensor
    empty_TK: Tensor
    choice_TE: Tensor
    log_p_TE: Tensor

    def log_p_of_slots(self) -> Tensor:
        """log p of S; -inf in empty slots, and for members of D from outside the groups, whose gate is 0 ([T, K])."""
        index_TK = self.index_TK.clamp(max=self.log_p_TE.shape[1] - 1)
        nothing_TK = self.empty_TK | self.unavailable_TE.gather(1, index_TK)
        return self.log_p_TE.gather(1, index_TK).masked_fill(nothing_TK, _NEVER)


def select_survivors(call: RouterCall, blocked_E: Tensor, policy: GroupPolicy = "frozen") -> Selection:
    """S: the top-k of the choice among the experts that are not blocked.

    Members of D that are in S keep their slots: all that are routable, but for groups chosen anew. Promoted experts
    fill the holes in slot order, best choice first, ties to the lowest id. With groups, the groups are those of the
    policy. `Mask.check_fits` leaves enough routable experts to fill every hole; where a caller went without it, what
    cannot be filled is empty, and no id is repeated.
    """
    _, choice_TE = scores_and_choice(call.convention, call.logits_TE, call.bias_E)
    unavailable_TE = _unavailable(call, choice_TE, blocked_E, policy)
    hole_TK = blocked_E[call.index_TK]
    if policy == "reselect" and call.convention.groups is not None:
        hole_TK = ~_stays(call.index_TK, choice_TE.masked_fill(unavailable_TE, _NEVER))
    taken_TE = unavailable_TE.scatter(1, call.index_TK, value=True)
    ranked_TE = _ranked(call, choice_TE, taken_TE)
    nth_hole_TK = (hole_TK.cumsum(-1) - 1).clamp_(min=0)
    empty_TK = hole_TK & (nth_hole_TK >= (~taken_TE).sum(-1, keepdim=True))
    index_TK = torch.where(hole_TK, ranked_TE.gather(1, nth_hole_TK), call.index_TK)
    index_TK = index_TK.masked_fill(empty_TK, choice_TE.shape[1])
    log_p_TE = _log_scores(call.convention, call.logits_TE)
    return Selection(call, blocked_E, unavailable_TE, index_TK, hole_TK, empty_TK, choice_TE, log_p_TE)


def _stays(index_TK: Tensor, rest_TE: Tensor) -> Tensor:
    """Which members of D are among the k best of what is left, where that may hold better experts ([T, K] bool).

    Of members that tie with the k-th best, as many as there is room for after all that are better, in slot order.
    """
    slots = index_TK.shape[1]
    last_T1 = rest_TE.topk(slots, dim=-1)[0][:, -1:]
    mine_TK = rest_TE.gather(1, index_TK)
    room_T1 = slots - (rest_TE > last_T1).sum(-1, keepdim=True)
    tied_TK = (mine_TK == last_T1) & (mine_TK != _NEVER)
    return (mine_TK > last_T1) | (tied_TK & (tied_TK.cumsum(-1) <= room_T1))


def _log_scores(convention: Convention, logits_TE: Tensor) -> Tensor:
    logits64_TE = logits_TE.double()
    if convention.score in {"sigmoid", "selected_sigmoid"}:
        return torch.nn.functional.logsigmoid(logits64_TE)
    if convention.score == "sqrtsoftplus":
        # softplus(x) is e^x to the last place far below zero, where it would underflow.
        low_TE = logits64_TE < -50.0
        log_softplus_TE = torch.nn.functional.softplus(logits64_TE.clamp(min=-50.0)).log()
        return torch.where(low_TE, logits64_TE, log_softplus_TE) / 2
    return torch.log_softmax(logits64_TE, dim=-1)


def _log_sum(convention: Convention, log_p_TK: Tensor) -> Tensor:
    """log of the sum that a renormalising router divides by, its epsilon and floor included ([T, 1])."""
    total_T1 = log_p_TK.logsumexp(-1, keepdim=True)
    if convention.floor:
        total_T1 = total_T1.clamp(min=math.log(convention.floor))
    if not convention.epsilon:
        return total_T1
    return torch.logaddexp(total_T1, torch.full_like(total_T1, math.log(convention.epsilon)))


def _log_z_keep(selection: Selection) -> Tensor:
    convention, log_p_TE = selection.call.convention, selection.log_p_TE
    if not convention.renormalised:
        return torch.zeros_like(log_p_TE[:, :1])
    return _log_sum(convention, log_p_TE.gather(1, selection.call.index_TK))


def _log_z_renorm(selection: Selection) -> Tensor:
    convention, log_p_TE = selection.call.convention, selection.log_p_TE
    if convention.renormalised:
        return _log_sum(convention, selection.log_p_of_slots())
    if not convention.simplex:
        return _log_z_keep(selection)
    left_T1 = log_p_TE.masked_fill(selection.blocked_E, _NEVER).logsumexp(-1, keepdim=True)
    return left_T1 - log_p_TE.logsumexp(-1, keepdim=True)


def _log_z_interp(selection: Selection, alpha: float) -> Tensor:
    keep_T1, renorm_T1 = _log_z_keep(selection), _log_z_renorm(selection)
    if alpha in {0.0, 1.0}:
        return renorm_T1 if alpha else keep_T1
    # Written so that equal ends give their common value bit for bit, and that no ratio of the ends overflows.
    apart_T1 = renorm_T1 - keep_T1
    above_T1 = apart_T1 + torch.log1p((1 - alpha) * torch.expm1(-apart_T1))
    return keep_T1 + torch.where(apart_T1 > 0, above_T1, torch.log1p(alpha * torch.expm1(apart_T1)))


def _log_z_ref(selection: Selection, k2: int) -> Tensor:
    call = selection.call
    if not call.convention.renormalised:
        return _log_z_keep(selection)
    if k2 == selection.index_TK.shape[1]:
        # The reference set is S itself: summed in slot order it is renorm's Z bit for bit.
        return _log_z_renorm(selection)
    Scale("ref", k2=k2).check_possible(int((~selection.blocked_E).sum()))
    reference_TK = _ranked(call, selection.choice_TE, selection.unavailable_TE)[:, :k2]
    available_TE = selection.log_p_TE.masked_fill(selection.unavailable_TE, _NEVER)
    return _log_sum(call.convention, available_TE.gather(1, reference_TK))


def log_normaliser(selection: Selection, scale: Scale) -> Tensor:
    """log Z of a resolved scale, per token, in float64 ([T, 1]).

    Where nothing is blocked, log Z of every scale but `ref` equals keep's bit for bit; ref:k does too.
    """
    if scale.kind == "keep":
        return _log_z_keep(selection)
    if scale.kind == "renorm":
        return _log_z_renorm(selection)
    if scale.kind == "interp":
        return _log_z_interp(selection, scale.alpha)
    if scale.kind == "ref":
        return _log_z_ref(selection, scale.k2)
    raise UsageError(f"scale {scale} is not resolved", fix="call Scale.resolve first")


def gates_of(selection: Selection, scale: Scale) -> Tensor:
    """The gate of every slot under a resolved scale ([T, K]).

    Computed in float64 logarithms and cast once to the router's gate dtype. Where a token's Z is keep's and the expert
    was in D, the router's own gate is returned bit for bit; with nothing blocked that is every slot.
    """
    call = selection.call
    if call.convention.score == "sparsemixer":
        return _sparsemixer_gates(selection, scale)
    log_z_T1 = log_normaliser(selection, scale)
    gates_TK = (selection.log_p_of_slots() - log_z_T1).exp() * call.convention.factor
    if call.expert_scale_E is not None:
        gates_TK = gates_TK * call.expert_scale_E.double()[selection.index_TK.clamp(max=len(call.expert_scale_E) - 1)]
    # Where nobody is left, Z may be zero too.
    gates_TK = gates_TK.masked_fill(selection.empty_TK, 0.0)
    untouched_TK = ~selection.hole_TK & (log_z_T1 == _log_z_keep(selection))
    return torch.where(untouched_TK, call.gates_TK, gates_TK.to(call.gates_TK.dtype))


def _sparsemixer_gates(selection: Selection, scale: Scale) -> Tensor:
    """The router's own code among the survivors, each gate put where S holds its expert ([T, 2])."""
    scale.resolve(selection.call.convention)
    call = selection.call
    index_TK, gates_TK = _sparsemixer(call.convention, call.logits_TE.masked_fill(selection.blocked_E, _NEVER))
    same_TKK = selection.index_TK.unsqueeze(-1) == index_TK.unsqueeze(1)
    # One match per slot, or none in an empty one: a choice, not a sum.
    own_TK = gates_TK.gather(1, same_TKK.int().argmax(-1))
    return own_TK.masked_fill(~same_TKK.any(-1), 0.0).to(call.gates_TK.dtype)


def reroute(call: RouterCall, blocked_E: Tensor, scale: Scale, policy: GroupPolicy = "frozen") -> tuple[Tensor, Tensor]:
    """S and its gates: refill the slots of blocked experts, and scale every gate as `scale` says ([T, K] each)."""
    selection = select_survivors(call, blocked_E, policy)
    return selection.index_TK, gates_of(selection, scale)


def mixture_shares(call: RouterCall) -> Tensor:
    """p_j / Z of the unpruned top-k, in float64 ([T, K]): a gate without c and the expert's own scale.

    Where the router renormalises they sum to one (less the epsilon that it adds to its sum); elsewhere Z is 1.
    """
    return _shares(call, call.index_TK)


def _shares(call: RouterCall, index_TN: Tensor) -> Tensor:
    """p / Z of any experts, in float64 ([T, N])."""
    log_p_TE = _log_scores(call.convention, call.logits_TE)
    if not call.convention.renormalised:
        return log_p_TE.gather(1, index_TN).exp()
    # A ratio of softmax scores is that of the logits, whatever the other experts' are: no digit is lost in a sum.
    rank_TE = call.logits_TE.double() if call.convention.simplex else log_p_TE
    chosen_TK = rank_TE.gather(1, call.index_TK)
    best_T1 = chosen_TK.amax(-1, keepdim=True)
    total_T1 = (chosen_TK - best_T1).exp().sum(-1, keepdim=True)
    share_TN = (rank_TE.gather(1, index_TN) - best_T1).exp() / total_T1
    if call.convention.epsilon or call.convention.floor:
        log_p_TK = log_p_TE.gather(1, call.index_TK)
        share_TN *= (log_p_TK.logsumexp(-1, keepdim=True) - _log_sum(call.convention, log_p_TK)).exp()
    return share_TN


def runner_up(call: RouterCall) -> tuple[Tensor, Tensor]:
    """The rank-(k+1) expert of the unpruned selection, within its groups, and its p over the unpruned Z ([T] each).

    It is whom `select_survivors` promotes when any single member of the top-k is deleted; ties go to the lowest id.

    Returns:
        Ids, -1 where nobody is left, and shares in float64, 0 there.

    Raises:
        UsageError: for sparsemixer, whose second choice depends on the first.
    """
    if call.convention.score == "sparsemixer":
        raise UsageError(
            "sparsemixer has no rank k + 1",
            expected="a router that ranks its experts once",
            fix="use another criterion",
        )
    _, choice_TE = scores_and_choice(call.convention, call.logits_TE, call.bias_E)
    nobody_E = torch.zeros(choice_TE.shape[1], dtype=torch.bool, device=choice_TE.device)
    taken_TE = _unavailable(call, choice_TE, nobody_E, "frozen").scatter(1, call.index_TK, value=True)
    by_logits = call.convention.score == "softmax" and call.bias_E is None
    order_TE = (call.logits_TE if by_logits else choice_TE).float().masked_fill(taken_TE, _NEVER)
    # The first of equal numbers, as in a stable sort.
    expert_T1 = order_TE.argmax(dim=-1, keepdim=True)
    share_T1 = _shares(call, expert_T1)
    nobody_T1 = taken_TE.all(-1, keepdim=True)
    return expert_T1.masked_fill(nobody_T1, -1)[:, 0], share_T1.masked_fill(nobody_T1, 0.0)[:, 0]
