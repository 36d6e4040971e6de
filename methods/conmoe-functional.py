"""The operator `conmoe-functional`: the near survivor whose outputs are closest answers a pruned expert's slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prunebench import (
    Fitted,
    LayerView,
    Method,
    Replacements,
    RoutedSamples,
    RoutedStates,
    Statistic,
    Survivor,
    UsageError,
    functional_remap,
    nearest_survivors,
    parameter_distances,
    slot_cost,
)


@dataclass(frozen=True)
class ConmoeFunctional(Method):
    """Of the nearest survivors the one with the least mean g_i²·‖f_i − f_p‖² over states routed to i.

    It replaces the nearest only if both folds of states (even and odd calibration blocks) choose it and it beats the
    nearest on both; an empty fold leaves the nearest. Router and gates are unchanged, as in `conmoe-nearest`, whose
    distance names the candidates. States are the unpruned model's.

    Args:
        candidates: how many of the nearest survivors are tried.
        states: routed states kept per expert and fold, at most, drawn uniformly.
        seed: of that draw.

    Source: ConMoE (arXiv:2605.29350) §3.2 and App. A.1, as re-implemented in 2610.41366 §3 and App. H.6.
    """

    name = "conmoe-functional"
    reference = "arXiv:2605.29350"

    candidates: int = 4
    states: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise UsageError(f"{self.candidates} candidates", expected="at least 1; with 1 it is conmoe-nearest")

    def replace_needs(self) -> tuple[Statistic, ...]:
        return (RoutedSamples(self.states, folds=2, seed=self.seed),)

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        survivors = layer.survivors(pruned)
        weights = [layer.weights(e) for e in survivors]
        states: RoutedStates = layer.stats["routed_samples"]

        def fitted(expert: int) -> Fitted:
            [distance_R] = parameter_distances([layer.weights(expert)], weights)
            near = nearest_survivors(distance_R, survivors, count=self.candidates)
            tokens = int(states.count_GE[:, expert].sum())
            costs_FC = torch.stack([_costs(layer, expert, near, *states.fold(expert, fold)) for fold in (0, 1)])
            remap = functional_remap(near, costs_FC)
            x_SD = torch.cat([states.fold(expert, fold)[0] for fold in (0, 1)])
            y_SD = layer.expert(expert, x_SD).double()
            missed_SD = y_SD - layer.expert(remap.survivor, x_SD).double()
            return Fitted(
                Survivor(remap.survivor),
                tokens,
                "no states of a fold, nearest" if remap.outcome == "empty fold" else "",
                squared_error=float(missed_SD.square().sum()),
                constant_squared_error=float((y_SD - y_SD.sum(0) / max(len(y_SD), 1)).square().sum()),
                outcome=remap.outcome,
            )

        return Replacements({e: fitted(e) for e in pruned})


def _costs(layer: LayerView, expert: int, near: tuple[int, ...], x_SD: Tensor, gate_S: Tensor) -> Tensor:
    """Each candidate's cost on one fold of states ([C]); NaN if it has none."""
    y_CSD = torch.stack([layer.expert(survivor, x_SD) for survivor in near])
    return slot_cost(gate_S.to(y_CSD.device), layer.expert(expert, x_SD), y_CSD)
