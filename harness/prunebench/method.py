"""The interface of a method: `select` which experts go, `replace` what answers for them, `route` the rest.

A method is one file with one frozen dataclass. It returns data and never touches the model; it sees layers through
`LayerView`, which carries no model name and no path, so it cannot key on the model.
"""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from prunebench.calibration import Statistic
from prunebench.errors import UsageError
from prunebench.mask import Budget, LayerShape, Mask
from prunebench.moe import MoELayer
from prunebench.replacement import Fill
from prunebench.routing import Convention

__all__ = ["LayerView", "Method", "Replacements", "Routing", "Statistics", "prune_lowest"]

Float64 = npt.NDArray[np.float64]


class Statistics(Mapping[str, Any]):
    """The values a method declared, by statistic name; reading another one says which line is missing."""

    def __init__(self, values: Mapping[str, Statistic], declared: Sequence[str], declared_in: str) -> None:
        self._values, self._declared, self._declared_in = values, tuple(declared), declared_in

    def __getitem__(self, name: str) -> Any:
        if name not in self._declared:
            raise UsageError(
                f"statistic {name!r} was not declared",
                where=self._declared_in,
                expected=f"one of {', '.join(self._declared) or 'none'}",
                fix=f"add the statistic named {name!r} to the tuple that {self._declared_in} returns",
            )
        if name not in self._values:
            raise UsageError(
                f"statistic {name!r} was not measured", where=self._declared_in, fix="give the scores of a score pass"
            )
        # A pass serves many methods: what one does to its arrays must not reach the next.
        return copy.deepcopy(self._values[name].value())

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)


@dataclass(frozen=True)
class LayerView:
    """One MoE layer as a method sees it.

    Args:
        shape: index, E, k and router groups.
        convention: what the router computes.
        tokens: T, calibration tokens that the statistics are over.
        stats: values of the declared statistics, by name.
    """

    shape: LayerShape
    convention: Convention
    tokens: int
    stats: Statistics
    _layer: MoELayer = field(repr=False)

    @property
    def index(self) -> int:
        """The layer's index in the model."""
        return self.shape.index

    @property
    def experts(self) -> int:
        """E."""
        return self.shape.experts

    @property
    def width(self) -> int:
        """D."""
        return self._layer.width

    @property
    def router_rows_ED(self) -> Tensor:
        """A copy of the router's weight."""
        return self._layer.router_rows_ED.clone()

    def weights(self, expert: int) -> dict[str, Tensor]:
        """A copy of one expert's weights, by parameter name."""
        return {name: weight.clone() for name, weight in self._layer.weights(expert).items()}

    def expert(self, expert: int, x_SD: Tensor) -> Tensor:
        """f_e(x) of one expert on given rows ([S, D])."""
        ids_S = x_SD.new_full((x_SD.shape[0],), expert).long()
        return self._layer.run_experts(x_SD, ids_S).detach()


@dataclass(frozen=True)
class Replacements:
    """What stands for the pruned experts of one layer: a fill per id; an id without one cannot be routed to."""

    fills: Mapping[int, Fill] = field(default_factory=dict)


@dataclass(frozen=True)
class Routing:
    """Gate scale of survivors where slots were refilled: trained, other, keep, renorm, interp:α or ref:k2."""

    scale: str = "trained"


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods; dataclass fields of the subclass are its only parameters and are recorded verbatim.

    A file may define all three verbs or leave some at their defaults: no `select` makes it an operator for other masks,
    no `replace` refills the slots of pruned experts, no `route` does that at the trained scale.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    reference: ClassVar[str] = ""

    def select_needs(self) -> tuple[Statistic, ...]:
        """Statistics that `select` reads, of every expert."""
        return ()

    def replace_needs(self) -> tuple[Statistic, ...]:
        """Statistics that `replace` reads."""
        return ()

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        """Choose the pruned experts of every layer within the budget."""
        raise UsageError(
            f"{self.name} selects no experts",
            expected="a method with select",
            fix="give another --method for the mask and this one as --operator, or give --mask FILE",
        )

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        """Fill the slots of pruned experts; by default none is filled."""
        del layer, pruned
        return Replacements()

    def route(self, layer: LayerView, pruned: tuple[int, ...]) -> Routing:
        """The scale of survivors where slots are refilled; by default as trained."""
        del layer, pruned
        return Routing()

    @classmethod
    def selects(cls) -> bool:
        """Whether the file defines a criterion."""
        return cls.select is not Method.select

    @classmethod
    def keeps_slots(cls) -> bool:
        """Whether the file defines fills."""
        return cls.replace is not Method.replace

    def parameters(self) -> dict[str, Any]:
        """The dataclass fields, as recorded."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def prune_lowest(
    layers: Sequence[LayerView], budget: Budget, score: Callable[[LayerView], npt.ArrayLike], *, name: str = "score"
) -> Mask:
    """Prune the lowest-scoring experts of each layer.

    floor(ratio·E) of them go, evenly over router groups where there are groups, never a protected one. Of equal scores
    the lowest id is kept.

    Args:
        layers: the layers.
        budget: how many go.
        score: layer -> [E] scores, higher is kept.
        name: the score's name, for errors.

    Raises:
        UsageError: a score that is not E finite numbers, or an impossible budget.
    """
    pruned: dict[int, list[int]] = {}
    for layer in layers:
        score_E = np.asarray(score(layer), dtype=np.float64)
        if score_E.shape != (layer.experts,) or not np.isfinite(score_E).all():
            raise UsageError(
                f"{name} gave scores of shape {score_E.shape}, {int((~np.isfinite(score_E)).sum())} not finite",
                where=f"layer {layer.index}",
                expected=f"{layer.experts} finite numbers",
            )
        count = budget.pruned_count(layer.shape)
        guarded = budget.protected.get(layer.index, frozenset())
        order = [int(e) for e in np.lexsort((-np.arange(layer.experts), score_E)) if int(e) not in guarded]
        pruned[layer.index] = _lowest_per_group(order, count, layer.shape)
        if len(pruned[layer.index]) != count:
            raise UsageError(
                f"protected experts leave {len(pruned[layer.index])} to prune",
                where=f"layer {layer.index}",
                expected=f"{count}, spread evenly over {layer.shape.groups} router groups",
                fix="protect fewer experts of one group",
            )
    return Mask.for_shapes([layer.shape for layer in layers], pruned)


def _lowest_per_group(order: Sequence[int], count: int, shape: LayerShape) -> list[int]:
    """The first `count` ids of `order`, spread evenly over router groups (so that every group can still fill slots)."""
    share, extra = divmod(count, shape.groups)
    chosen: list[int] = []
    room = dict.fromkeys(range(shape.groups), share)
    for expert in order:
        group = shape.group_of(expert)
        if room[group] > 0:
            room[group] -= 1
            chosen.append(expert)
        elif room[group] == 0 and extra and share < shape.experts // shape.groups:
            # One more from this group: the remainder goes to the groups with the lowest scores.
            room[group] = -1
            extra -= 1
            chosen.append(expert)
    return chosen
