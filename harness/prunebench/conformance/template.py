"""Template: in a line, what goes, or what answers for it; lines with → are for you to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prunebench import (
    Budget,
    Constant,
    Count,
    GateNormSum,
    LayerView,
    Mask,
    Method,
    OutputMoments,
    Replacements,
    Statistic,
    prune_lowest,
)


@dataclass(frozen=True)
class Template(Method):
    """Score the mean over routed tokens of g·‖f‖₂; keep high, per layer; a never-routed expert scores 0.

    → The definition: formula, which tokens, which gate, how it is aggregated, which direction, and what a never-routed
    expert gets. g is the gate as applied, f the un-weighted output of the expert. Pruned slots are answered by the
    expert's mean output.

    Args:
        power: of the token count; 1 is the mean, 0 the sum.

    Source: → the paper and its equation, or "ours".
    """

    name = "template"
    reference = "→ arXiv:…"

    # Claims, which are checked. → Drop those that do not hold.
    nested = True  # a larger budget prunes the same experts and more
    independent_layers = True  # what a layer loses does not depend on other layers

    # Fields are the only parameters; they are recorded. `--param power=0.5` sets this one.
    power: float = 1.0

    # 1. Which experts go. → Drop both functions if this is an operator, for masks of others.

    def select_needs(self) -> tuple[Statistic, ...]:
        # What is measured of every expert. Built-in ones are listed in docs/add-a-method.md; a class of your own works
        # as well.
        return (Count(), GateNormSum())

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        # `prune_lowest` keeps the budget, protected experts and router groups. Draw from `rng` only, if at all.
        return prune_lowest(layers, budget, self.score, name=self.name)

    def score(self, layer: LayerView) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """[E] scores; the lowest go."""
        count_E = np.maximum(layer.stats["count"], 1)  # never divide by the tokens of an expert that had none
        score_E: np.ndarray[tuple[int], np.dtype[np.float64]] = layer.stats["gate_norm_sum"] / count_E**self.power
        return score_E

    # 2. What answers in their slots. → Drop both functions to have the slots refilled by survivors.

    def replace_needs(self) -> tuple[Statistic, ...]:
        return (OutputMoments(),)

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        # One fill per pruned expert: Constant, Zero, Survivor(j), …, or a subclass of Fill in this file.
        mean_ED = torch.from_numpy(layer.stats["output_moments"].mean_ED).float()
        return Replacements({expert: Constant.of(mean_ED[expert]) for expert in pruned})

    # 3. At which gate scale slots are refilled: `route` returns a Routing("trained"), as without it, or another scale.
    # → Define it if you dropped `replace`, or if `replace` leaves slots open.
