"""The interface of a method: `select` which experts go, `replace` what answers for them, `route` the rest.

A method is one file with one frozen dataclass. It returns data and never touches the model; it sees layers through
`LayerView`, which carries no model name and no path, so it cannot key on the model.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prunebench.calibration import LayerVisit, Statistic, by_pass
from prunebench.errors import UsageError
from prunebench.fit import Fitted
from prunebench.mask import Budget, LayerShape, Mask, survivors_of
from prunebench.moe import MoELayer, TokenBatch
from prunebench.replacement import Fill, GatedWeights
from prunebench.routing import Convention

__all__ = [
    "ExpertRows",
    "LayerView",
    "Method",
    "Replacements",
    "Routing",
    "Statistics",
    "collected_scores",
    "prune_lowest",
]

Float64 = npt.NDArray[np.float64]

# Rows on which a gated expert is told from its formula: sizes at which a clamp of the expert's shows.
_PROBE_SCALES = (1.0, 16.0, 128.0)


class _Additive(Protocol):
    def __add__(self, other: Self, /) -> Self: ...


_Sum = TypeVar("_Sum", bound=_Additive)

_COLLECTED: ContextVar[dict[int, Float64] | None] = ContextVar("_COLLECTED", default=None)


@contextmanager
def collected_scores() -> Iterator[dict[int, Float64]]:
    """While entered, what `prune_lowest` ranks by is put here: layer index -> [E] scores, high is kept.

    So the scores of a criterion can be read without a second interface for them: they are those that its masks are made
    of. A method that ranks by nothing leaves it empty.
    """
    found: dict[int, Float64] = {}
    token = _COLLECTED.set(found)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


class Statistics(Mapping[str, Any]):
    """The values a method declared, by statistic name; reading another one says which line is missing.

    Args:
        values: of a pass that serves many methods; each reader gets a copy.
        declared: names that may be read.
        declared_in: who declared them, for errors.
        own: of a fit pass, for this reader and layer alone; read as they are, as they may be large.
    """

    def __init__(
        self,
        values: Mapping[str, Statistic],
        declared: Sequence[str],
        declared_in: str,
        own: Mapping[str, Statistic] | None = None,
    ) -> None:
        self._values, self._declared, self._declared_in = values, tuple(declared), declared_in
        self._own = own or {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._declared:
            raise UsageError(
                f"statistic {name!r} was not declared",
                where=self._declared_in,
                expected=f"one of {', '.join(self._declared) or 'none'}",
                fix=f"add the statistic named {name!r} to the tuple that {self._declared_in} returns",
            )
        if name in self._own:
            return self._own[name].value()
        if name not in self._values:
            raise UsageError(
                f"statistic {name!r} was not measured", where=self._declared_in, fix="give the scores of a score pass"
            )
        # A pass serves many methods: what one does to its arrays must not reach the next.
        return copy.deepcopy(self._values[name].value())

    def with_own(self, own: Mapping[str, Statistic]) -> Statistics:
        """The same with what a fit pass measured for this reader."""
        return Statistics(self._values, self._declared, self._declared_in, own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)


@dataclass(frozen=True)
class ExpertRows:
    """Some of one expert's routed tokens, as the unpruned model computed them.

    Args:
        expert: its id.
        x_SD: its inputs.
        y_SD: f(x), un-weighted.
        gate_S: gates as applied.
        score_S: the router's scores p of this expert.
        block_S: calibration block of each token.
    """

    expert: int
    x_SD: Tensor
    y_SD: Tensor
    gate_S: Tensor
    score_S: Tensor
    block_S: Tensor


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
    _visit: LayerVisit | None = field(default=None, repr=False)

    def in_fit(self, own: Mapping[str, Statistic], tokens: int, visit: LayerVisit | None) -> LayerView:
        """The view as `replace` has it in a fit pass.

        Args:
            own: statistics that the pass measured on this layer.
            tokens: T, that each visit sees.
            visit: the layer with the text before it, for a method that visits.
        """
        return dataclasses.replace(self, stats=self.stats.with_own(own), tokens=tokens, _visit=visit)

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

    def survivors(self, pruned: Sequence[int]) -> tuple[int, ...]:
        """Ids of the experts that are not pruned, increasing."""
        return survivors_of(pruned, self.experts)

    @property
    def router_rows_ED(self) -> Tensor:
        """A copy of the router's weight."""
        return self._layer.router_rows_ED.clone()

    def weights(self, expert: int) -> dict[str, Tensor]:
        """A copy of one expert's weights, by parameter name."""
        return {name: weight.clone() for name, weight in self._layer.weights(expert).items()}

    def expert(self, expert: int, x_SD: Tensor) -> Tensor:
        """f_e(x) of one expert on given rows ([S, D])."""
        x_SD = x_SD.to(self._layer.device)
        return self._layer.run_experts(x_SD, torch.full((len(x_SD),), expert, device=x_SD.device)).detach()

    def gated(self, expert: int) -> GatedWeights:
        """A copy of one expert's matrices, as the gated MLP that it was seen to be on random rows.

        Raises:
            UsageError: another layout, or the expert computes something else (a clamp, a bias, an unknown activation).
        """
        gated = GatedWeights.of(self.weights(expert), self._layer.activation or "silu")
        generator = torch.Generator().manual_seed(0)
        for scale in _PROBE_SCALES:
            x_SD = scale * torch.randn(4, self.width, generator=generator)
            x_SD = x_SD.to(gated.gate_FD)
            y_SD = self.expert(expert, x_SD)
            error = float((gated(x_SD) - y_SD).norm())
            if not error <= torch.finfo(y_SD.dtype).eps ** 0.5 * float(y_SD.norm()):
                raise UsageError(
                    "the expert is not the gated MLP of its matrices",
                    where=f"layer {self.index}, expert {expert}",
                    expected=f"down·({gated.activation}(gate·x) ⊙ up·x)",
                    fix="use an operator that does not read the matrices, such as constant or tilt",
                )
        return gated

    def measure(self, *statistics: Statistic) -> dict[str, Any]:
        """Bring the text before this layer, as often as the statistics need, and measure them of all its experts.

        Args:
            statistics: fresh instances; `after` is honoured among them.

        Returns:
            Their values, by name.

        Raises:
            UsageError: outside a pass that goes layer by layer.
        """
        if self._visit is None:
            raise UsageError(
                "the text is not at hand",
                where=f"layer {self.index}",
                expected="`select` of a method that is asked layer by layer",
                fix='write schedule = "layerwise" in the method\'s class, and run it by `prunebench run`',
            )
        return {name: one.value() for name, one in self._visit.measure(statistics).items()}

    def accumulate(self, experts: Sequence[int], measure: Callable[[ExpertRows], _Sum]) -> dict[int, _Sum]:
        """Bring the text before this layer once more, and add up what is measured on each expert's rows.

        Args:
            experts: whose rows are shown.
            measure: called with rows of one expert and one batch; its answers are added with `+`, in the text's order.

        Returns:
            By expert; one that no token was routed to is not there.

        Raises:
            UsageError: outside a fit pass, or if the method did not say that it visits.
        """
        if self._visit is None:
            raise UsageError(
                "the text is not at hand",
                where=f"layer {self.index}",
                expected="`replace` of an operator in a fit pass",
                fix="write visits = True in the method's class, and fit it by plan.fit_plan or `prunebench run`",
            )
        total: dict[int, _Sum] = {}

        def see(batch: TokenBatch) -> None:
            for expert, start, end in batch.segments:
                token_S = batch.token_S[start:end]
                one = measure(
                    ExpertRows(
                        expert,
                        batch.x_TD[token_S],
                        batch.outputs_SD[start:end],
                        batch.gates_S[start:end],
                        batch.scores_TE[token_S, expert],
                        batch.block_T[token_S],
                    )
                )
                total[expert] = total[expert] + one if expert in total else one

        self._visit.observe(see, experts=experts)
        return total


@dataclass(frozen=True)
class Replacements:
    """What stands for the pruned experts of one layer.

    Args:
        fills: pruned expert -> what answers its slots; an id without one cannot be routed to. A `Survivor` lets another
            expert answer. A `Fitted` says what its fill was fitted on.
        edits: survivor -> parameter name (as in `LayerView.weights`) -> its new weights, whole and of the same shape.
    """

    fills: Mapping[int, Fill | Fitted] = field(default_factory=dict)
    edits: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Routing:
    """Gate scale of survivors where slots were refilled: trained, other, keep, renorm, interp:α or ref:k2."""

    scale: str = "trained"


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods; dataclass fields of the subclass are its only parameters and are recorded verbatim.

    A file may define all three verbs or leave some at their defaults: no `select` makes it an operator for other masks,
    no `replace` refills the slots of pruned experts, no `route` does that at the trained scale. An operator that
    defines both `replace` and `route` refills the slots that its `replace` leaves open.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    reference: ClassVar[str] = ""
    visits: ClassVar[bool] = False
    """Whether `replace` reads routed tokens by `LayerView.accumulate`."""
    nested: ClassVar[bool] = False
    """A claim, which is checked: a larger budget prunes the same experts and more."""
    independent_layers: ClassVar[bool] = False
    """A claim, which is checked: what a layer loses does not depend on other layers."""
    schedule: ClassVar[Literal["one_shot", "layerwise", "sequential"]] = "one_shot"
    """When `select` is asked. `one_shot`: once, for all layers, with the statistics of one pass over the intact model.
    `layerwise`: of one layer after the other (`layers` has one entry), while the whole text stands before it, so that
    it may `LayerView.measure`. `sequential`: the same, on a model whose earlier layers are pruned already, and answered
    as the method's own `replace` and `route` say."""

    def select_needs(self) -> tuple[Statistic, ...]:
        """Statistics that `select` reads, of every expert."""
        return ()

    def replace_needs(self) -> tuple[Statistic, ...]:
        """Statistics that `replace` reads."""
        return ()

    def check_model(self, shapes: Sequence[LayerShape], convention: Convention, budget: Budget) -> None:
        """Raise a `UsageError` for a model that `select` is not defined for; asked before any weight is read."""
        del shapes, convention, budget

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        """Choose the pruned experts of every layer within the budget."""
        raise UsageError(
            f"{self.name} selects no experts",
            expected="a method with select",
            fix="give another --method for the mask and this one as --operator, or give --mask FILE",
        )

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        """Fill the slots of pruned experts, and edit survivors; by default none is."""
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
    def replaces(cls) -> bool:
        """Whether the file defines fills or edits."""
        return cls.replace is not Method.replace

    @classmethod
    def keeps_slots(cls) -> bool:
        """Whether every slot is meant to be answered by a fill, so that a gate scale has no meaning."""
        return cls.replaces() and cls.route is Method.route

    def in_fit_pass(self) -> bool:
        """Whether `replace` has to be asked layer by layer, in a fit pass."""
        return self.visits or bool(by_pass(self.replace_needs()).fit)

    def parameters(self) -> dict[str, Any]:
        """The dataclass fields, as recorded."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def prune_lowest(
    layers: Sequence[LayerView], budget: Budget, score: Callable[[LayerView], npt.ArrayLike], *, name: str = "score"
) -> Mask:
    """Prune the lowest-scoring experts, of each layer, router group or the whole model as the budget's scope says.

    Never a protected one. Of equal scores the lowest id is kept; over the whole model, where scores are compared as
    they are, the lowest layer's. The mask's report names experts whose score is zero, ties that the id decided, and
    protected experts that would have gone if none were protected.

    Args:
        layers: the layers.
        budget: how many go.
        score: layer -> [E] scores, higher is kept.
        name: the score's name, for errors.

    Raises:
        UsageError: a score that is not E finite numbers, statistics of no tokens, or an impossible budget.
    """
    scores = {layer.index: _checked_scores(layer, score, name) for layer in layers}
    if (collected := _COLLECTED.get()) is not None:
        collected.update(scores)
    shapes = [layer.shape for layer in layers]
    pruned = _lowest(shapes, scores, budget)
    if not budget.make_up:
        pruned = {i: [e for e in ids if e not in budget.protected.get(i, frozenset())] for i, ids in pruned.items()}
    mask = Mask.for_shapes(shapes, pruned)
    return dataclasses.replace(mask, report={"score": name, "layers": _report(shapes, scores, budget, pruned)})


def _checked_scores(layer: LayerView, score: Callable[[LayerView], npt.ArrayLike], name: str) -> Float64:
    if len(layer.stats) and not layer.tokens:
        raise UsageError(
            f"{name} has no calibration tokens", where=f"layer {layer.index}", expected="statistics of at least one"
        )
    score_E = np.asarray(score(layer), dtype=np.float64)
    if score_E.shape != (layer.experts,) or not np.isfinite(score_E).all():
        raise UsageError(
            f"{name} gave scores of shape {score_E.shape}, {int((~np.isfinite(score_E)).sum())} not finite",
            where=f"layer {layer.index}",
            expected=f"{layer.experts} finite numbers",
        )
    return score_E


def _lowest(shapes: Sequence[LayerShape], scores: Mapping[int, Float64], budget: Budget) -> dict[int, list[int]]:
    """The experts of each layer that go, before those are taken out in whose place nobody goes."""
    if budget.scope == "global":
        return _lowest_of_all(shapes, scores, budget)
    return {shape.index: _lowest_of_layer(shape, scores[shape.index], budget) for shape in shapes}


def _lowest_of_layer(shape: LayerShape, score_E: Float64, budget: Budget) -> list[int]:
    count, guarded = budget.pruned_count(shape), budget.must_stay(shape.index)
    order = [int(e) for e in np.lexsort((-np.arange(shape.experts), score_E)) if int(e) not in guarded]
    pruned = _lowest_per_group(order, count, shape)
    if len(pruned) != count:
        raise UsageError(
            f"protected experts leave {len(pruned)} to prune",
            where=f"layer {shape.index}",
            expected=f"{count}, spread evenly over {shape.groups} router groups",
            fix="protect fewer experts of one group",
        )
    return pruned


def _lowest_of_all(shapes: Sequence[LayerShape], scores: Mapping[int, Float64], budget: Budget) -> dict[int, list[int]]:
    """The lowest scores of the model that leave every router group of every layer what its tokens need."""
    left = budget.total(shapes)
    by_index = {shape.index: shape for shape in shapes}
    every = [(float(s), -i, -e) for i, score_E in scores.items() for e, s in enumerate(score_E)]
    room = {
        (shape.index, group): shape.experts // shape.groups - shape.fewest_per_group()
        for shape in shapes
        for group in range(shape.groups)
    }
    pruned: dict[int, list[int]] = {shape.index: [] for shape in shapes}
    for _, minus_index, minus_expert in sorted(every):
        index, expert = -minus_index, -minus_expert
        place = index, by_index[index].group_of(expert)
        if left and room[place] and expert not in budget.must_stay(index):
            pruned[index].append(expert)
            room[place] -= 1
            left -= 1
    return pruned


def _report(
    shapes: Sequence[LayerShape], scores: Mapping[int, Float64], budget: Budget, pruned: Mapping[int, Sequence[int]]
) -> dict[str, dict[str, list[int]]]:
    """What scores left to a rule: by layer, ids by what it was."""
    cuts = {index: set(scores[index][list(ids)].tolist()) for index, ids in pruned.items()}
    of_all = set().union(*cuts.values())
    free = _lowest(shapes, scores, dataclasses.replace(budget, protected={})) if budget.protected else pruned
    report = {}
    for index, score_E in scores.items():
        protected = budget.protected.get(index, frozenset())
        equal = of_all if budget.scope == "global" else cuts[index]
        decided = protected | set(pruned[index])
        found = {
            "zero_scores": np.flatnonzero(score_E == 0).tolist(),
            "kept_by_id": [e for e, s in enumerate(score_E.tolist()) if s in equal and e not in decided],
            "kept_by_protection": sorted(protected & set(free[index])),
        }
        if found := {name: ids for name, ids in found.items() if ids}:
            report[str(index)] = found
    return report


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
