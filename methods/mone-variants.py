"""MoNE's score in its parts, as printed, and as its released code computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from prunebench import (
    Budget,
    Constant,
    Count,
    GateSum,
    LayerView,
    Mask,
    Method,
    OutputMoments,
    ReleasedMoments,
    Replacements,
    Statistic,
    UsageError,
    prune_lowest,
)

_SCORES = ("printed", "routing-score", "fluctuation", "released")


@dataclass(frozen=True)
class MoneVariants(Method):
    """Variants of MoNE's fusion score; keep high, per layer or over the model (`scope`); never-routed scores 0.

    φ_freq = (1/T) Σ over routed tokens of the gate as applied; φ_var = ‖sqrt(v)‖₂ with the unbiased variance v of f by
    channel (N − 1; 0 where N ≤ 1), f un-weighted. `mone` has the same product with the population variance. Each pruned
    expert becomes its mean output; slots and gates are kept.

    Args:
        score: `printed` = φ_var·φ_freq; `routing-score` = φ_freq; `fluctuation` = φ_var; `released` = φ_freq·‖sqrt(v)‖₂
            with the released code's running variance, which skips the first batch that an expert sees, depends on how
            the text is cut into forwards (--batch-tokens; theirs have 4,096 tokens) and cannot be merged. Their strict
            `>` at the cut, which prunes fewer on ties, is not followed: the count rule holds.

    Source: Zhang et al. 2026 (MoNE), released code zxgx/mode-pd ee6e187 for `released`.
    """

    name = "mone-variants"
    reference = "arXiv:2507.00390"

    score: str = "printed"

    def __post_init__(self) -> None:
        if self.score not in _SCORES:
            raise UsageError(f"score {self.score!r}", where=self.name, expected=", ".join(_SCORES))

    def select_needs(self) -> tuple[Statistic, ...]:
        moments = ReleasedMoments() if self.score == "released" else OutputMoments()
        return (Count(), GateSum(), moments)

    def replace_needs(self) -> tuple[Statistic, ...]:
        return (OutputMoments(),)

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        def score(layer: LayerView) -> npt.ArrayLike:
            frequency_E: npt.NDArray[np.float64] = layer.stats["gate_sum"] / layer.tokens
            if self.score == "routing-score":
                return frequency_E
            fluctuation_E: npt.NDArray[np.float64]
            if self.score == "released":
                fluctuation_E = np.sqrt(layer.stats["released_moments"])
                return fluctuation_E * frequency_E
            count_E = layer.stats["count"]
            unbiased_E = count_E / np.maximum(count_E - 1, 1)
            fluctuation_E = np.sqrt(unbiased_E * layer.stats["output_moments"].variance_ED.sum(axis=1))
            return fluctuation_E if self.score == "fluctuation" else fluctuation_E * frequency_E

        return prune_lowest(layers, budget, score, name=f"mone-{self.score}")

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        mean_ED = torch.from_numpy(layer.stats["output_moments"].mean_ED).float()
        return Replacements({expert: Constant.of(mean_ED[expert]) for expert in pruned})
