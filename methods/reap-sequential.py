"""REAP layer by layer: each layer is scored on a model whose earlier layers are pruned already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunebench import Budget, Count, GateNormSum, LayerView, Mask, Method, Routing, Statistic, prune_lowest


@dataclass(frozen=True)
class ReapSequential(Method):
    """Score mean over routed tokens of g·‖f‖₂, as `reap`, but on what reaches a layer through the pruned layers before.

    Layers go in increasing order; those before run without their pruned experts, rerouted at renorm, and the layer
    itself is intact while it is scored. Keep high, per layer; a never-routed expert scores 0.

    Source: llm-compressor's REAP modifier with propagate_error, its default; Lasby et al. 2026 for the score.
    """

    name = "reap-sequential"
    reference = "Lasby et al. 2026"
    schedule = "sequential"

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
