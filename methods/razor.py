"""RAZOR: prune the experts whose deletion changes their layer's output least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prunebench import (
    Budget,
    Convention,
    Count,
    FrozenRefillSums,
    LayerShape,
    LayerView,
    Mask,
    Method,
    RefillSums,
    ResidualSums,
    Routing,
    Statistic,
    UsageError,
    prune_lowest,
)

_QUANTITIES = {
    "rcs": ResidualSums,
    "rcs-loo": ResidualSums,
    "refill": RefillSums,
    "frozen-refill": FrozenRefillSums,
}
_AGGREGATES = ("rms", "mean", "sum-squares")


@dataclass(frozen=True)
class Razor(Method):
    """Local damage of deleting one expert, over the tokens routed to it; keep high, per layer; never-routed scores 0.

    With c = Σ w_j f_j the routed mixture (Σ w = 1), r_j = f_j − c, and r the rank-(k+1) expert of the router's own
    selection with w_r = p_r / Σ_selected p: RCS is λ·w_i‖r_i‖; RCS-LOO divides it by 1 − w_i (survivors renormalised);
    refill is λ·‖w_i r_i − w_r r_r‖ / (1 − w_i + w_r) (r promoted as well). Denominators are at least 1e-6, λ is the
    router's factor, shares never contain the selection bias. Razor is refill under RMS. Pruned experts leave the
    router, at the trained scale.

    Routers that do not renormalise are outside the paper: rcs, rcs-loo and refill refuse them. There Razor's released
    code freezes the other gates, which makes RCS and RCS-LOO those of `reap-variants` with aggregate=rms, and refill
    ‖g_i f_i − g_r f_r‖: that is `frozen-refill`, under this name only, for any router.

    Args:
        quantity: `rcs`, `rcs-loo`, `refill`, or `frozen-refill`.
        aggregate: `rms`, `mean`, or `sum-squares` (Σ d², the corpus sum).

    Source: 2609.30465 §2, App. A.4 and C.3; released code for `frozen-refill`.
    """

    name = "razor"
    reference = "arXiv:2609.30465"

    quantity: str = "refill"
    aggregate: str = "rms"

    def __post_init__(self) -> None:
        if self.quantity not in _QUANTITIES:
            raise UsageError(f"quantity {self.quantity!r}", where=self.name, expected=", ".join(_QUANTITIES))
        if self.aggregate not in _AGGREGATES:
            raise UsageError(f"aggregate {self.aggregate!r}", where=self.name, expected=", ".join(_AGGREGATES))

    def select_needs(self) -> tuple[Statistic, ...]:
        return (Count(), _QUANTITIES[self.quantity]())

    def check_model(self, shapes: Sequence[LayerShape], convention: Convention, budget: Budget) -> None:
        if self.quantity != "frozen-refill" and not convention.renormalised:
            raise UsageError(
                f"razor's {self.quantity} is defined for routers that renormalise",
                where=f"a router of the kind: {convention.describe()}",
                expected="a mixture whose weights sum to one",
                fix="give quantity=frozen-refill, or reap-variants, which is what Razor's released code scores here",
            )

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        for layer in layers:
            self.check_model([layer.shape], layer.convention, budget)
        return prune_lowest(layers, budget, self._score, name=f"{self.quantity}-{self.aggregate}")

    def _score(self, layer: LayerView) -> npt.ArrayLike:
        damage = layer.stats[_QUANTITIES[self.quantity].name][self.quantity]
        count_E = np.maximum(layer.stats["count"], 1)
        if self.aggregate == "sum-squares":
            return np.asarray(damage.squares_E)
        if self.aggregate == "rms":
            return np.asarray(np.sqrt(damage.squares_E / count_E))
        return np.asarray(damage.sum_E / count_E)

    def route(self, layer: LayerView, pruned: tuple[int, ...]) -> Routing:
        return Routing("trained")
