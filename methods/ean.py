"""EAN: prune the experts whose outputs are smallest, summed over the tokens that they serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunebench import Budget, LayerView, Mask, Method, NormSum, Statistic, prune_lowest


@dataclass(frozen=True)
class Ean(Method):
    """Score Σ over routed tokens of ‖f‖₂; keep high, per layer; a never-routed expert scores 0.

    f is un-weighted, no gate. Whether the source sums or averages is not settled: the sum is called EAN here (ours),
    the mean `unified` with member=man. The paper prunes in rounds and measures anew; this is one shot.

    Source: Jaiswal et al. 2025 (MC-Suite).
    """

    name = "ean"
    reference = "arXiv:2504.05586"

    def select_needs(self) -> tuple[Statistic, ...]:
        return (NormSum(),)

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        return prune_lowest(layers, budget, lambda layer: layer.stats["norm_sum"], name=self.name)
