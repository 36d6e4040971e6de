"""Interaction-aware selection: prune the set of experts that an operator replaces at the least joint error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from prunebench import (
    Budget,
    Constant,
    Fill,
    InputOutputMoments,
    LayerView,
    Mask,
    Method,
    OutputMoments,
    ResidualProducts,
    UsageError,
    fit_tilt,
    prune_lowest,
    quadratic_subset,
)

_OPERATORS = ("deletion", "constant", "tilt")


@dataclass(frozen=True)
class ResidualProductsSelection(Method):
    """Minimise Σ_{i,j pruned} F_ij with F_ij = Σ_t ρ_i(t)·ρ_j(t), ρ_i(t) = g_i(t)·(f_i(x_t) − N_i(x_t)); per layer.

    Tokens: those routed to both i and j; g is the gate as applied. Slots and gates are kept, so the objective is the
    squared error of the layer's output under operator N, exactly: deletion answers nothing, constant the expert's mean,
    tilt its reduced-rank map. Never-routed experts cost nothing and go first. Exact by enumeration up to 20,000 subsets
    (E ≤ 16), else swap descent (ours; `prunebench.quadratic_subset`); of equal costs low ids are kept. Each layer is
    measured on the intact model, in two visits of its text for constant and tilt.

    Args:
        operator: N, `deletion`, `constant` or `tilt`. It scores; what the pruned model runs is --operator.
        interactions: whether pairs count; without, experts are ranked by F_ii.
        rank: of the tilt.

    Source: 2610.41366 App. E.5; the paper's solver is not stated.
    """

    name = "residual-products"
    reference = "arXiv:2610.41366"
    schedule = "layerwise"

    operator: str = "constant"
    interactions: bool = True
    rank: int = 32

    def __post_init__(self) -> None:
        if self.operator not in _OPERATORS:
            raise UsageError(f"operator {self.operator!r}", where=self.name, expected=", ".join(_OPERATORS))

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        products = {layer.index: self._products(layer) for layer in layers}
        if not self.interactions:
            return prune_lowest(layers, budget, lambda layer: np.diagonal(products[layer.index]), name=self.name)
        shapes = [layer.shape for layer in layers]
        pruned = {}
        for shape in shapes:
            size = shape.experts // shape.groups
            count = budget.pruned_count(shape)
            share = count // shape.groups if budget.scope == "group" else size - shape.fewest_per_group()
            found = quadratic_subset(
                products[shape.index],
                count,
                protected=budget.must_stay(shape.index),
                group_E=[shape.group_of(expert) for expert in range(shape.experts)],
                per_group=share,
            )
            spared = frozenset() if budget.make_up else budget.protected.get(shape.index, frozenset())
            pruned[shape.index] = [expert for expert in found.chosen if expert not in spared]
        return Mask.for_shapes(shapes, pruned)

    def _products(self, layer: LayerView) -> npt.NDArray[np.float64]:
        measured = layer.measure(ResidualProducts(self._fills(layer)))
        products: npt.NDArray[np.float64] = measured["residual_products"]
        return products

    def _fills(self, layer: LayerView) -> Mapping[int, Fill]:
        if self.operator == "deletion":
            return {}
        if self.operator == "constant":
            mean_ED = torch.from_numpy(layer.measure(OutputMoments())["output_moments"].mean_ED)
            return {expert: Constant.of(mean_ED[expert]) for expert in range(layer.experts)}
        moments = layer.measure(InputOutputMoments(folds=1))["input_output_moments"]
        fitted = {expert: fit_tilt(moments.all(expert), self.rank).fill for expert in range(layer.experts)}
        return {expert: fill for expert, fill in fitted.items() if fill is not None}
