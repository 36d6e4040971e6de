"""AIMER: prune the experts whose weights are spread most evenly, without any data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prunebench import Budget, LayerView, Mask, Method, prune_lowest


@dataclass(frozen=True)
class Aimer(Method):
    """AIMER_j = (‖θ_j‖₁/n) / sqrt(‖θ_j‖₂²/n), θ_j all n entries of the expert's matrices together; keep LOW, per layer.

    Token set: none; gate: none. Matrices only: no bias, no router row, no shared expert. Sums in float64 (the released
    code's are float32). An expert whose weights are all zero has the value 0, as in that code, so it is the last to go;
    the mask's report names it.

    Source: AIMER, with its released code (ZongfangLiu/AIMER fcf8e28).
    """

    name = "aimer"
    reference = "arXiv:2603.18492"

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        return prune_lowest(layers, budget, _minus_aimer, name=self.name)


def _minus_aimer(layer: LayerView) -> npt.ArrayLike:
    """The negated ratio of every expert: of equal numbers and of high ones, the lowest go."""
    scores = []
    for expert in range(layer.experts):
        matrices = [weight.double() for weight in layer.weights(expert).values() if weight.dim() == 2]
        count = sum(weight.numel() for weight in matrices)
        absolute = sum(float(weight.abs().sum()) for weight in matrices)
        squares = sum(float(weight.square().sum()) for weight in matrices)
        scores.append(-absolute / np.sqrt(count * squares) if squares else 0.0)
    return scores
