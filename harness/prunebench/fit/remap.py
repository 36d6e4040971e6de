"""ConMoE's slot remapping: which survivor answers a pruned expert's slots (2610.41366 §3 and App. H.6).

ConMoE has released no code, and the exact form of its parameter distance (Eq. 13) was not found: the Frobenius distance
over gate, up and down is our choice. It is not invariant to a reordering of an expert's neurons.

P pruned experts, R survivors, C candidates, S rows, D width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from prunebench.errors import UsageError

__all__ = [
    "Remap",
    "RemapSummary",
    "functional_remap",
    "nearest_survivors",
    "parameter_distances",
    "remap_summary",
    "slot_cost",
]

Outcome = Literal["functional", "nearest already best", "folds disagree", "empty fold"]


def parameter_distances(pruned: Sequence[Mapping[str, Tensor]], retained: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Σ over all matrices of ‖W_i − W_p‖_F², accumulated in float64 ([P, R]).

    Args:
        pruned: weights of each pruned expert, by parameter name; gate and up may be fused.
        retained: weights of each survivor, same names.
    """
    rows = [[_distance(one, other) for other in retained] for one in pruned]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(pruned), len(retained))


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    if set(one) != set(other):
        raise UsageError("two experts with different weights", expected=", ".join(sorted(one)))
    return float(sum((one[name].double() - other[name].double()).square().sum() for name in sorted(one)))


def nearest_survivors(distance_R: Tensor, survivors: Sequence[int], *, count: int = 1) -> tuple[int, ...]:
    """Ids of the survivors nearest to one pruned expert, nearest first; of equal ones the lowest id (ours).

    Args:
        distance_R: its distances.
        survivors: ids, in the order of R.
        count: how many; 4 for the functional rule.
    """
    if not survivors or len(survivors) != distance_R.shape[0]:
        raise UsageError(f"{len(survivors)} survivors", expected=f"one per distance, {distance_R.shape[0]}")
    order = sorted(range(len(survivors)), key=lambda r: (float(distance_R[r]), survivors[r]))
    return tuple(survivors[r] for r in order[:count])


def slot_cost(gates_S: Tensor, target_SD: Tensor, candidate_CSD: Tensor) -> Tensor:
    """mean over states of g_i²·‖E_i − E_p‖² of each candidate ([C], float64); NaN marks a fold without states.

    Args:
        gates_S: g_i, as applied, of the states routed to i.
        target_SD: E_i on them.
        candidate_CSD: E_p on them, for each candidate.
    """
    error_CS = (candidate_CSD.double() - target_SD.double()).square().sum(-1)
    return (gates_S.double().square() * error_CS).mean(-1)


@dataclass(frozen=True)
class Remap:
    """Where one pruned expert's slots go.

    Args:
        survivor: π(i).
        nearest: the nearest survivor.
        outcome: how the functional rule decided.
    """

    survivor: int
    nearest: int
    outcome: Outcome

    @property
    def changed(self) -> bool:
        """Whether the functional choice differs from the nearest."""
        return self.survivor != self.nearest


def functional_remap(candidates: Sequence[int], cost_FC: Tensor) -> Remap:
    """ConMoE's functional choice, accepted only if both folds pick it and it beats the nearest on both (App. H.6).

    Args:
        candidates: the nearest survivors, nearest first; four in the paper.
        cost_FC: cost of each candidate on each fold of states, `slot_cost`; a fold without states is NaN, and the
            nearest then stays.
    """
    first = candidates[0]
    if bool(cost_FC.isnan().any()):
        return Remap(first, first, "empty fold")
    choices = {int(torch.argsort(cost_C, stable=True)[0]) for cost_C in cost_FC}
    if len(choices) > 1:
        return Remap(first, first, "folds disagree")
    [choice] = choices
    if choice == 0:
        return Remap(first, first, "nearest already best")
    # The stable order puts the nearest first among equals, so a later choice is strictly better on both folds.
    return Remap(candidates[choice], first, "functional")


@dataclass(frozen=True)
class RemapSummary:
    """A model's assignments at a glance (Table H.8).

    Args:
        slots: pruned experts that a survivor answers for.
        targets: distinct survivors that answer, counted within each layer.
        most: the largest number of pruned experts on one survivor.
        outcomes: how often each outcome occurred, if the rule had a choice.
    """

    slots: int
    targets: int
    most: int
    outcomes: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """For records."""
        return {**vars(self), "outcomes": dict(self.outcomes)}


def remap_summary(targets: Mapping[int, Mapping[int, int]], outcomes: Iterable[str] = ()) -> RemapSummary:
    """Sum up assignments.

    Args:
        targets: layer -> pruned expert -> the survivor that answers for it.
        outcomes: of every expert; empty ones are left out.
    """
    loads = Counter((index, survivor) for index, layer in targets.items() for survivor in layer.values())
    counted = Counter(outcome for outcome in outcomes if outcome)
    return RemapSummary(sum(loads.values()), len(loads), max(loads.values(), default=0), dict(sorted(counted.items())))
