"""Subset search: prune the set of experts without which a layer's output moves least, found by trying all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from prunebench import Budget, Convention, LayerShape, LayerView, Mask, Method, SubsetErrors, UsageError


@dataclass(frozen=True)
class SubsetSearch(Method):
    """Minimise Σ over batches of ‖Z − Z_P‖_F over all sets P of pruned experts; per layer, on the intact model.

    Z is the layer's routed output and Z_P that of a router without P, refilled at the trained scale (division by the
    top-k sum for Mixtral, which the paper prunes). The norm is over a batch, unsquared; a batch is one forward. All
    tokens count, and every expert runs on each. This is the layerwise variant: inputs are the unpruned model's. Of
    equal errors low ids are kept (ours; the released code drops the lexicographically first).

    Args:
        most: subsets of a layer that are tried; more are refused, never sampled.

    Source: Lu et al. 2024 (NAEE), released code Lucky-Lance/Expert_Sparsity 16067c0.
    """

    name = "subset-search"
    reference = "arXiv:2402.14800"
    schedule = "layerwise"

    most: int = 5000

    def check_model(self, shapes: Sequence[LayerShape], convention: Convention, budget: Budget) -> None:
        for shape in shapes:
            free, count = shape.experts - len(budget.must_stay(shape.index)), budget.pruned_count(shape)
            if math.comb(free, count) > self.most:
                raise UsageError(
                    f"{math.comb(free, count)} subsets of {count} experts",
                    where=f"layer {shape.index}",
                    expected=f"at most {self.most}",
                    fix="use another criterion, such as residual-products, or give --param most=…",
                )

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        pruned = {}
        for layer in layers:
            count = budget.pruned_count(layer.shape)
            free = [e for e in range(layer.experts) if e not in budget.must_stay(layer.index)]
            self.check_model([layer.shape], layer.convention, budget)
            subsets = list(_subsets(layer, free, count, budget))
            error_B = layer.measure(SubsetErrors(subsets))["subset_errors"]
            if not np.isfinite(error_B).all():
                raise UsageError("an error that is not finite", where=f"layer {layer.index}", expected="numbers")
            spared = frozenset() if budget.make_up else budget.protected.get(layer.index, frozenset())
            pruned[layer.index] = [e for e in subsets[int(error_B.argmin())] if e not in spared]
        return Mask.for_shapes([layer.shape for layer in layers], pruned)


def _subsets(layer: LayerView, free: Sequence[int], count: int, budget: Budget) -> Iterator[tuple[int, ...]]:
    """Every set that leaves each router group enough, high ids first."""
    shape = layer.shape
    size = shape.experts // shape.groups
    most = count // shape.groups if budget.scope == "group" else size - shape.fewest_per_group()
    for chosen in combinations(sorted(free, reverse=True), count):
        if max(Counter(shape.group_of(e) for e in chosen).values()) <= most:
            yield tuple(sorted(chosen))
