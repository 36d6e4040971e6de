"""REAP: prune the experts whose gate-weighted output is smallest on the tokens that they serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunebench import Budget, Count, GateNormSum, LayerView, Mask, Method, Routing, Statistic, prune_lowest


@dataclass(frozen=True)
class Reap(Method):
    """Score mean over routed tokens of g·‖f‖₂; keep high, per layer; a never-routed expert scores 0.

    g is the gate as applied, f the un-weighted output. Six formulas are called REAP in public code; this is the
    paper's. Alone it runs with its published semantics: pruned experts leave the router, and the gates of the survivors
    are those of a router without them (reroute, renorm).

    Source: Lasby et al. 2026 (REAP), saliency criterion; 2610.41366 §3 for the routing semantics.
    """

    name = "reap"
    reference = "Lasby et al. 2026"

    def select_needs(self) -> tuple[Statistic, ...]:
        return (Count(), GateNormSum())

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        return prune_lowest(
            layers,
            budget,
            lambda layer: layer.stats["gate_norm_sum"] / np.maximum(layer.stats["count"], 1),
            name=self.name,
        )

    def route(self, layer: LayerView, pruned: tuple[int, ...]) -> Routing:
        return Routing("renorm")
