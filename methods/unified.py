"""The unified family of frequency, gate and norm criteria, of which MAN and MSAN are members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prunebench import (
    Budget,
    Count,
    GateNormSum,
    LayerView,
    Mask,
    Method,
    NormSquaredSum,
    NormSum,
    Statistic,
    UsageError,
    prune_lowest,
)

# member -> (b, its sum): those that no other file is the criterion of.
_MEMBERS = {"man": (1, NormSum), "msan": (1, NormSquaredSum), "gated-ean": (0, GateNormSum)}


@dataclass(frozen=True)
class Unified(Method):
    """S(b, α, β) = N_j^(−b) · Σ over routed tokens of g^α·‖f‖₂^β; keep high, per layer; never-routed scores 0.

    g is the gate as applied (our reading), f the un-weighted output. Other members are files of their own: frequency is
    S(0,0,0), ean S(0,0,1), reap S(1,1,1), sge S(0,2,2).

    Args:
        member: `man` = S(1,0,1), the mean norm; `msan` = S(1,0,2), the mean squared norm; `gated-ean` = S(0,1,1).

    Source: Liu et al. 2026b; the paper recommends man and msan for task-agnostic pruning.
    """

    name = "unified"
    reference = "arXiv:2606.15716"

    member: str = "man"

    def __post_init__(self) -> None:
        if self.member not in _MEMBERS:
            raise UsageError(f"member {self.member!r}", where=self.name, expected=", ".join(_MEMBERS))

    def select_needs(self) -> tuple[Statistic, ...]:
        return (Count(), _MEMBERS[self.member][1]())

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        b, summed = _MEMBERS[self.member]

        def score(layer: LayerView) -> npt.ArrayLike:
            scores: npt.ArrayLike = layer.stats[summed.name] / np.maximum(layer.stats["count"], 1) ** b
            return scores

        return prune_lowest(layers, budget, score, name=self.member)
