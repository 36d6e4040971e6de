"""SEER-MoE: prune the experts to which routers give the least probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunebench import Budget, LayerView, Mask, Method, ScoreSum, ScoreTotal, Statistic, UsageError, prune_lowest


@dataclass(frozen=True)
class Seer(Method):
    """Soft count Σ p over tokens; keep high, per layer or over all layers (`scope`).

    p is the router's score before any renormalisation, selection biases not in it. The actual count is `frequency`.

    Args:
        over: `routed` tokens (ours by default), or `all` tokens, on which the paper's text leaves it open which it is.

    Source: Muzio et al. 2024 (SEER-MoE).
    """

    name = "seer"
    reference = "arXiv:2404.05089"

    over: str = "routed"

    def __post_init__(self) -> None:
        if self.over not in {"routed", "all"}:
            raise UsageError(f"over {self.over!r}", where=self.name, expected="routed or all")

    def select_needs(self) -> tuple[Statistic, ...]:
        return (ScoreSum() if self.over == "routed" else ScoreTotal(),)

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        (wanted,) = self.select_needs()
        return prune_lowest(layers, budget, lambda layer: layer.stats[wanted.name], name=self.name)
