"""Random pruning: the control that every criterion has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunebench import Budget, LayerView, Mask, Method, prune_lowest


@dataclass(frozen=True)
class Random(Method):
    """A uniformly random subset of each layer's experts, drawn from the run's seed.

    Token set: none. Score: one uniform number per expert.
    """

    name = "random"
    reference = "control"

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        return prune_lowest(layers, budget, lambda layer: rng.random(layer.experts), name=self.name)
