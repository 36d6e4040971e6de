"""Activation frequency: prune the experts that the router picks least often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunebench import Budget, Count, LayerView, Mask, Method, Statistic, prune_lowest


@dataclass(frozen=True)
class Frequency(Method):
    """Score N_e, the number of calibration tokens routed to the expert; keep high, per layer.

    Source: the baseline of Muzio et al. 2024 (SEER-MoE, actual counts); 2610.41366 §3.
    """

    name = "frequency"
    reference = "arXiv:2404.05089"

    def select_needs(self) -> tuple[Statistic, ...]:
        return (Count(),)

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        return prune_lowest(layers, budget, lambda layer: layer.stats["count"], name=self.name)
