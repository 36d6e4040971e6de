"""REAP's token quantity under other aggregations: what other public code calls REAP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prunebench import (
    Budget,
    Count,
    GateNormSum,
    GateSquaredNormSquaredSum,
    LayerView,
    Mask,
    Method,
    Routing,
    Statistic,
    UsageError,
    prune_lowest,
)


@dataclass(frozen=True)
class ReapVariants(Method):
    """g·‖f‖₂ over routed tokens, not averaged as REAP does; keep high, per layer; never-routed scores 0.

    g is the gate as applied, f the un-weighted output; rerouted at renorm, as REAP is. The mean is `reap`, the mean on
    an already pruned model `reap-sequential`.

    Args:
        aggregate: `rms`, sqrt(Σ (g‖f‖)² / N), Razor's default for REAP and 2609.30465's REAP-RMS; `sum`, Σ g‖f‖, what
            moe-pruning-reliability calls REAP.

    Source: 2609.30465 App. C.1 and C.5 (rms); Lasby et al. 2026 for the quantity.
    """

    name = "reap-variants"
    reference = "arXiv:2609.30465"

    aggregate: str = "rms"

    def __post_init__(self) -> None:
        if self.aggregate not in {"rms", "sum"}:
            raise UsageError(f"aggregate {self.aggregate!r}", where=self.name, expected="rms or sum")

    def select_needs(self) -> tuple[Statistic, ...]:
        return (Count(), GateSquaredNormSquaredSum() if self.aggregate == "rms" else GateNormSum())

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        def score(layer: LayerView) -> npt.ArrayLike:
            if self.aggregate == "rms":
                mean_E = layer.stats["gate_squared_norm_squared_sum"] / np.maximum(layer.stats["count"], 1)
                return np.asarray(np.sqrt(mean_E))
            return np.asarray(layer.stats["gate_norm_sum"])

        return prune_lowest(layers, budget, score, name=f"reap-{self.aggregate}")

    def route(self, layer: LayerView, pruned: tuple[int, ...]) -> Routing:
        return Routing("renorm")
