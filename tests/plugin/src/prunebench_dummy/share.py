"""Dummy-share: prune the experts with the smallest share of all gates, and answer nothing in their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunebench import Budget, GateSum, LayerView, Mask, Method, Replacements, Statistic, Zero, prune_lowest


@dataclass(frozen=True)
class DummyShare(Method):
    """Score Σ over routed tokens of the gate as applied, keep high; slots keep their gate and nothing answers."""

    name = "dummy-share"
    reference = "an example"
    nested = True
    independent_layers = True

    def select_needs(self) -> tuple[Statistic, ...]:
        return (GateSum(),)

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        return prune_lowest(layers, budget, lambda layer: layer.stats["gate_sum"], name=self.name)

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        return Replacements({expert: Zero(layer.width) for expert in pruned})
