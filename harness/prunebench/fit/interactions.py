"""What pruned experts cost together: inner products of gated replacement residuals, and the subset that costs least.

With ρ_i(t) = g_i(t)·(f_i(x_t) − N_i(x_t)) for the tokens that are routed to i, and F_ij = Σ_t ρ_i(t)·ρ_j(t) over the
tokens routed to both, a layer whose experts P are answered by N has the squared error Σ_t ‖Σ_{i∈P} ρ_i(t)‖² =
Σ_{i,j∈P} F_ij exactly: slots and gates are kept (2610.41366 App. E.5). The operator is N: nothing (deletion, the slot
kept), the expert's mean (constant), or its tilt.

T tokens, K slots per token, E experts, D width, S rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from prunebench.calibration import Statistic
from prunebench.calibration.base import sum_by_index
from prunebench.errors import UsageError
from prunebench.moe import TokenBatch

__all__ = ["ResidualProducts", "Subset", "quadratic_subset", "subset_cost"]

Float64 = npt.NDArray[np.float64]

EXACT_UP_TO = 20_000


class ResidualProducts(Statistic):
    """F of one operator; `value` is [E, E], symmetric and positive semidefinite, zero for never-routed experts.

    Args:
        fills: expert -> what answers for it, any function of its inputs [S, D]; one without answers with zero, so that
            none at all is deletion.
    """

    name = "residual_products"

    def __init__(self, fills: Mapping[int, nn.Module] | None = None) -> None:
        super().__init__()
        self.fills = dict(fills or {})

    def start(self, experts: int, width: int, device: torch.device) -> None:
        del width
        self.experts = experts
        self.state = {"products_EE": torch.zeros(experts, experts, dtype=torch.float64, device=device)}

    def update(self, batch: TokenBatch) -> None:
        answers_SD = self._answers(batch)
        tokens, slots = batch.index_TK.shape
        size = 64 if batch.outputs_SD.device.type == "cpu" else 2048
        absent = len(batch.expert_S)
        # Slots without a row (identity experts, or experts that are not shown) belong to a further expert.
        expert_TK = batch.index_TK.masked_fill(batch.row_TK == absent, self.experts)
        products_TKK = batch.gates_TK.new_zeros(tokens, slots, slots, dtype=torch.float64)
        for start in range(0, tokens if absent else 0, size):
            part = slice(start, start + size)
            row_CK = batch.row_TK[part].clamp(max=absent - 1)
            residual_CKD = batch.outputs_SD[row_CK].double()
            if answers_SD is not None:
                residual_CKD -= answers_SD[row_CK]
            residual_CKD *= batch.gates_TK[part].double()[..., None]
            torch.bmm(residual_CKD, residual_CKD.transpose(1, 2), out=products_TKK[part])
        pair_TKK = expert_TK[:, :, None] * (self.experts + 1) + expert_TK[:, None, :]
        found = sum_by_index(products_TKK.flatten(), pair_TKK.flatten(), (self.experts + 1) ** 2)
        self.state["products_EE"] += found.view(self.experts + 1, -1)[:-1, :-1]

    def _answers(self, batch: TokenBatch) -> Tensor | None:
        """N(x) of every row in float64, or None if nothing answers."""
        if not self.fills:
            return None
        answers_SD = torch.zeros(batch.outputs_SD.shape, dtype=torch.float64, device=batch.outputs_SD.device)
        for expert, start, end in batch.segments:
            if expert in self.fills:
                fill = self.fills[expert].to(batch.x_TD.device, torch.float64)
                answers_SD[start:end] = fill(batch.x_TD[batch.token_S[start:end]].double())
        return answers_SD

    def value(self) -> Float64:
        products_EE: Float64 = self.state["products_EE"].numpy()
        # Both orders of a pair are the same sum, rounded apart.
        return (products_EE + products_EE.T) / 2


@dataclass(frozen=True)
class Subset:
    """A choice of experts, its cost, and whether it is proven to be the least one."""

    chosen: tuple[int, ...]
    cost: float
    exact: bool


def subset_cost(products_EE: Float64, chosen: Sequence[int]) -> float:
    """Σ_{i,j∈chosen} F_ij."""
    index = list(chosen)
    return float(products_EE[np.ix_(index, index)].sum())


def quadratic_subset(
    products_EE: npt.ArrayLike,
    count: int,
    *,
    protected: frozenset[int] = frozenset(),
    group_E: Sequence[int] | None = None,
    per_group: int | None = None,
    exact_up_to: int = EXACT_UP_TO,
) -> Subset:
    """The `count` experts with the least Σ F_ij over pairs of them: minimise bᵀFb, b ∈ {0,1}^E, Σ b = count.

    Exact by enumeration where there are at most `exact_up_to` subsets (E ≤ 16 always), in lexicographic order, so that
    of equal costs the one with the highest ids is pruned and low ids are kept. Otherwise swap descent (ours): from the
    `count` smallest F_ii, and from greedy choices that begin with each expert in turn and add the one of the least
    added cost, exchange the pair of one chosen and one other that lowers the cost most, until none does; the best of
    the ends is returned. That is a local optimum: no single exchange improves it.

    Args:
        products_EE: F, symmetric.
        count: experts to choose.
        protected: experts that may not be chosen.
        group_E: router group of each expert, where a layer has groups.
        per_group: at most that many of each group.
        exact_up_to: subsets that are tried one by one.

    Raises:
        UsageError: an F that is no finite square matrix, or a count that cannot be met.
    """
    f_EE = np.asarray(products_EE, dtype=np.float64)
    if f_EE.ndim != 2 or f_EE.shape[0] != f_EE.shape[1] or not np.isfinite(f_EE).all():
        raise UsageError(
            f"interactions of shape {f_EE.shape}, {int((~np.isfinite(f_EE)).sum())} not finite",
            expected="finite numbers, [E, E]",
        )
    experts = f_EE.shape[0]
    groups = np.asarray(group_E if group_E is not None else np.zeros(experts), dtype=np.int64)
    most = count if per_group is None else per_group
    free = [e for e in range(experts) if e not in protected]
    room = sum(min(most, sum(int(groups[e] == g) for e in free)) for g in set(groups.tolist()))
    if not 0 < count <= room:
        raise UsageError(f"{count} of {experts} experts cannot be chosen", expected=f"1 to {room}")
    if math.comb(len(free), count) <= exact_up_to:
        return _enumerated(f_EE, free, count, groups, most)
    ends = [_descended(f_EE, start, free, groups, most) for start in _starts(f_EE, free, count, groups, most)]
    return min(ends, key=lambda end: end.cost)


def _enumerated(f_EE: Float64, free: Sequence[int], count: int, groups: npt.NDArray[np.int64], most: int) -> Subset:
    """Every subset, a block at a time."""
    # From the highest ids down: the first of equal costs keeps the lowest ids.
    every = combinations(sorted(free, reverse=True), count)
    best: Subset | None = None
    while block := list(islice(every, 4096)):
        chosen_BM = np.array(block)
        costs_B = f_EE[chosen_BM[:, :, None], chosen_BM[:, None, :]].sum(axis=(1, 2))
        fits_B = np.ones(len(block), dtype=bool)
        for group in set(groups.tolist()):
            fits_B &= (groups[chosen_BM] == group).sum(axis=1) <= most
        costs_B[~fits_B] = np.inf
        first = int(costs_B.argmin())
        if np.isfinite(costs_B[first]) and (best is None or costs_B[first] < best.cost):
            best = Subset(tuple(sorted(block[first])), float(costs_B[first]), exact=True)
    assert best is not None
    return best


def _starts(
    f_EE: Float64, free: Sequence[int], count: int, groups: npt.NDArray[np.int64], most: int
) -> Iterator[list[int]]:
    """The smallest F_ii, and a greedy choice from each expert on; ties take the highest id."""
    diagonal_E = np.diagonal(f_EE)

    def grown(chosen: list[int], *, together: bool) -> list[int]:
        open_E = np.zeros(len(f_EE), dtype=bool)
        open_E[list(free)] = True
        room_G = np.full(int(groups.max()) + 1, most)
        added_E = diagonal_E.copy()
        for number in range(count):
            if number < len(chosen):
                pick = chosen[number]
            else:
                waiting = np.flatnonzero(open_E & (room_G[groups] > 0))
                pick = int(waiting[::-1][int(added_E[waiting][::-1].argmin())])
                chosen.append(pick)
            open_E[pick] = False
            room_G[groups[pick]] -= 1
            if together:
                added_E += 2 * f_EE[pick]
        return chosen

    yield grown([], together=False)
    for first in free:
        yield grown([first], together=True)


def _descended(
    f_EE: Float64, start: Sequence[int], free: Sequence[int], groups: npt.NDArray[np.int64], most: int
) -> Subset:
    """Best-improvement exchanges until none lowers the cost."""
    inside = np.zeros(f_EE.shape[0], dtype=bool)
    inside[list(start)] = True
    usable = np.zeros_like(inside)
    usable[list(free)] = True
    diagonal_E = np.diagonal(f_EE)
    scale = float(np.abs(f_EE).max()) * np.finfo(np.float64).eps * f_EE.shape[0]
    while True:
        pull_E = f_EE @ inside.astype(np.float64)
        out, into = np.flatnonzero(inside), np.flatnonzero(usable & ~inside)
        if not len(into):
            break
        change = (
            (diagonal_E[out] - 2 * pull_E[out])[:, None]
            + (diagonal_E[into] + 2 * pull_E[into])[None, :]
            - 2 * f_EE[np.ix_(out, into)]
        )
        full = np.array([int((groups[inside] == g).sum()) >= most for g in groups[into]])
        change[full[None, :] & (groups[out][:, None] != groups[into][None, :])] = np.inf
        a, b = np.unravel_index(int(change.argmin()), change.shape)
        # Below rounding there is no improvement, only a circle.
        if not change[a, b] < -scale:
            break
        inside[out[a]], inside[into[b]] = False, True
    chosen = tuple(np.flatnonzero(inside).tolist())
    return Subset(chosen, subset_cost(f_EE, chosen), exact=False)
