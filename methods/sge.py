"""SGE: prune the experts whose summed squared gated output is smallest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunebench import Budget, GateSquaredNormSquaredSum, LayerView, Mask, Method, Statistic, prune_lowest


@dataclass(frozen=True)
class Sge(Method):
    """Score Σ over routed tokens of g²·‖f‖₂²; keep high, per layer; a never-routed expert scores 0.

    Source: 2610.41366 §3 (Models and masks).
    """

    name = "sge"
    reference = "arXiv:2610.41366"

    def select_needs(self) -> tuple[Statistic, ...]:
        return (GateSquaredNormSquaredSum(),)

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        return prune_lowest(layers, budget, lambda layer: layer.stats["gate_squared_norm_squared_sum"], name=self.name)
