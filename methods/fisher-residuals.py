"""Fisher-weighted selection: prune the set of experts whose outputs the model's loss would miss least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunebench import (
    Budget,
    Convention,
    LayerShape,
    LayerView,
    Mask,
    Method,
    SlopeProducts,
    Statistic,
    UsageError,
    prune_lowest,
    quadratic_subset,
)


@dataclass(frozen=True)
class FisherResiduals(Method):
    """Minimise Σ_{i,j pruned} F_ij with F_ij = mean over sequences of Σ_t (h_t·ρ_i(t))(h_t·ρ_j(t)), ρ = g·f; per layer.

    Tokens: those routed to both i and j; g is the gate as applied, f the un-weighted output, h_t the gradient of the
    sequence's mean next-token loss at the layer's routed output. It is `residual-products` of deletion with layer error
    measured by the model's Fisher information, E[hhᵀ] under its own labels, in place of its Euclidean length.
    Residuals of other operators are not here. Never-routed experts cost nothing and go first; of equal costs low ids
    are kept. The set is found as for `residual-products` (exactly for E ≤ 16). Routers whose gates multiply the
    experts' input are refused. Alone it reroutes at the trained scale.

    Args:
        labels: `sampled`, from the model's distribution, or `data`, the text's own (the empirical Fisher).
        seed: of the sampled labels.
        interactions: whether pairs count; without, experts are ranked by F_ii.

    Source: 2610.41366 App. E.6, which has it in words; the formula, token by token and for deletion, is ours.
    """

    name = "fisher-residuals"
    reference = "arXiv:2610.41366"

    labels: str = "sampled"
    seed: int = 0
    interactions: bool = True

    def __post_init__(self) -> None:
        if self.labels not in ("data", "sampled"):
            raise UsageError(f"unknown labels {self.labels!r}", where=self.name, expected="data or sampled")

    def select_needs(self) -> tuple[Statistic, ...]:
        return (SlopeProducts(self.seed if self.labels == "sampled" else None),)

    def check_model(self, shapes: Sequence[LayerShape], convention: Convention, budget: Budget) -> None:
        if self.interactions and budget.scope == "global":
            raise UsageError(
                f"{self.name} chooses a set in each layer", expected="a budget per layer or group", where="--scope"
            )

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        if not self.interactions:
            return prune_lowest(
                layers, budget, lambda layer: np.diagonal(layer.stats["slope_products"]), name=self.name
            )
        pruned = {}
        for layer in layers:
            shape = layer.shape
            count = budget.pruned_count(shape)
            most = shape.experts // shape.groups - shape.fewest_per_group()
            found = quadratic_subset(
                layer.stats["slope_products"],
                count,
                protected=budget.must_stay(shape.index),
                group_E=[shape.group_of(expert) for expert in range(shape.experts)],
                per_group=count // shape.groups if budget.scope == "group" else most,
            )
            spared = frozenset() if budget.make_up else budget.protected.get(shape.index, frozenset())
            pruned[shape.index] = [expert for expert in found.chosen if expert not in spared]
        return Mask.for_shapes([layer.shape for layer in layers], pruned)
