"""MoNE: prune rarely used, barely varying experts, and answer their slots with their mean output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from prunebench import (
    Budget,
    Constant,
    GateSum,
    LayerView,
    Mask,
    Method,
    OutputMoments,
    Replacements,
    Statistic,
    prune_lowest,
)


@dataclass(frozen=True)
class Mone(Method):
    """Fusion score: (mean gate over ALL tokens) · ‖population standard deviation of f‖₂; keep high, per layer.

    The frequency term averages over all tokens, zero where the expert was not routed, as MoNE's code does and unlike
    its printed formula (2610.41366 §3, G.2); the deviation is the exact population one per channel, not the released
    code's running estimate, which skips each expert's first batch. A never-routed expert scores 0.
    Each pruned expert becomes its mean output over the tokens routed to it; slots and gates are kept.

    Source: Zhang et al. 2026 (MoNE); 2610.41366 §3.
    """

    name = "mone"
    reference = "Zhang et al. 2026"

    def select_needs(self) -> tuple[Statistic, ...]:
        return (GateSum(), OutputMoments())

    def replace_needs(self) -> tuple[Statistic, ...]:
        return (OutputMoments(),)

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        def score(layer: LayerView) -> npt.ArrayLike:
            fluctuation_E = np.sqrt(layer.stats["output_moments"].variance_ED.sum(axis=1))
            scores: npt.NDArray[np.float64] = layer.stats["gate_sum"] / layer.tokens * fluctuation_E
            return scores

        return prune_lowest(layers, budget, score, name=self.name)

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        mean_ED = torch.from_numpy(layer.stats["output_moments"].mean_ED).float()
        return Replacements({expert: Constant.of(mean_ED[expert]) for expert in pruned})
