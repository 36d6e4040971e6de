"""Hypothesis strategies for tests of methods: models, masks, budgets, router calls, token batches.

Each is named after what it draws, in the plural, and takes keyword arguments only; an impossible one is a `UsageError`
of one line. All shrink: towards the first family, the smallest layer, one pruned expert (id 0 of the first layer), one
token, equal logits. Nothing is drawn from a random seed but the weights of models.

What router conventions exist is read from `FAMILIES` and the convention table, never listed here. hypothesis is not a
dependency of prunebench: it comes with the extra `test`, and only this module imports it.

T tokens, K slots per token, E experts, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import accumulate
from math import ceil
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import Budget, LayerShape, Mask
from prunebench.moe import MoELayer, MoEModel, TokenBatch
from prunebench.moe.layer import find_layers
from prunebench.routing import Convention, Groups, RouterCall, Scale, reroute, scores_and_choice
from prunebench.testing.batches import batch_of, router_call, shape_of
from prunebench.testing.models import FAMILIES, random_model
from prunebench.testing.opened import opened_model

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as _error:
    raise PrerequisiteError(
        "hypothesis is not installed",
        where="prunebench.testing.strategies",
        fix="install the extra test: pip install 'prunebench[test]'",
    ) from _error

__all__ = [
    "budgets",
    "conventions",
    "layer_shapes",
    "masks",
    "model_shapes",
    "models",
    "router_calls",
    "token_batches",
]

Shapes: TypeAlias = Sequence[LayerShape] | st.SearchStrategy[Sequence[LayerShape]]
Ints: TypeAlias = npt.NDArray[np.int64]
Conventions: TypeAlias = Convention | st.SearchStrategy[Convention]

# How logits are made of 16-bit numbers: (modulus, steps per unit). Up to ±8; nearly flat, up to ±1; a few whole
# numbers, so that experts tie; up to ±128, where scores underflow to 0 and saturate at 1.
_LOGITS = ((2**16, 2**12), (2**16, 2**15), (2**3, 1), (2**16, 2**8))
_DISTINCT_LOGITS = _LOGITS[:2]


def _numbers(size: int) -> st.SearchStrategy[Ints]:
    """So many 16-bit numbers, as one draw: an example is a few draws, however many tokens it has, and shrinks fast."""
    return st.binary(min_size=2 * size, max_size=2 * size).map(lambda b: np.frombuffer(b, dtype=">u2").astype(np.int64))


def _signed(numbers: Ints, steps: int) -> Tensor:
    """0, 1, -1, 2, -2, … over `steps`: float32 holds these exactly, and their sums with small multiples of a step."""
    return torch.from_numpy(np.where(numbers % 2, (numbers + 1) // 2, -(numbers // 2))).float() / steps


# ---------------------------------------------------------------------------------------------------- layers' shapes


@dataclass(frozen=True)
class _Sizes:
    """Bounds of E and k, and which layers lie within them. Every layer can lose an expert and still fill k slots."""

    where: str
    min_experts: int
    max_experts: int
    min_top_k: int
    max_top_k: int

    def __post_init__(self) -> None:
        _check_span(self.where, "experts", self.min_experts, self.max_experts, least=2)
        _check_span(self.where, "top_k", self.min_top_k, self.max_top_k, least=1)
        if self.min_top_k >= self.max_experts:
            raise UsageError(
                f"min_top_k {self.min_top_k} with max_experts {self.max_experts}",
                where=self.where,
                expected="more experts than slots, so that one can be pruned",
            )

    def of_group(self, groups: int, kept: int) -> range:
        """How many experts each of `groups` groups may have, if a token keeps `kept` of them."""
        fewest = ceil(Fraction(self.min_top_k, kept))
        return range(max(2, fewest + 1, ceil(Fraction(self.min_experts, groups))), self.max_experts // groups + 1)


def _draw_shape(draw: st.DrawFn, sizes: _Sizes, index: int, groups: int, kept: int) -> LayerShape:
    of_group = sizes.of_group(groups, kept)
    size = draw(st.integers(of_group.start, of_group.stop - 1))
    top_k = draw(st.integers(sizes.min_top_k, min(sizes.max_top_k, kept * (size - 1))))
    return LayerShape(index, groups * size, top_k, groups, kept)


@st.composite
def _layer_shapes(draw: st.DrawFn, sizes: _Sizes, group_counts: Sequence[int]) -> LayerShape:
    index = draw(st.integers(0, 3))
    groups = draw(st.sampled_from(group_counts))
    fewest = next(kept for kept in range(1, groups + 1) if sizes.of_group(groups, kept))
    return _draw_shape(draw, sizes, index, groups, draw(st.integers(fewest, groups)))


def layer_shapes(
    *, min_experts: int = 2, max_experts: int = 16, min_top_k: int = 1, max_top_k: int = 4, max_groups: int = 4
) -> st.SearchStrategy[LayerShape]:
    """Shapes of one MoE layer, each with room to prune an expert; shrinks to the fewest experts, ungrouped.

    Args:
        min_experts: least E.
        max_experts: greatest E.
        min_top_k: least k.
        max_top_k: greatest k; a layer has at least one expert more than it needs survivors.
        max_groups: most router groups; 1 draws none.
    """
    where = "strategies.layer_shapes"
    sizes = _Sizes(where, min_experts, max_experts, min_top_k, max_top_k)
    _check_span(where, "groups", 1, max_groups, least=1)
    counts = [groups for groups in range(1, max_groups + 1) if sizes.of_group(groups, groups)]
    return _layer_shapes(sizes, counts)


@st.composite
def _model_shapes(
    draw: st.DrawFn, layers: st.SearchStrategy[LayerShape], min_layers: int, max_layers: int
) -> tuple[LayerShape, ...]:
    first = draw(layers)
    # The distance to the layer before: dense layers may lie between.
    steps = draw(st.lists(st.integers(1, 2), min_size=min_layers - 1, max_size=max_layers - 1))
    return tuple(replace(first, index=index) for index in accumulate(steps, initial=first.index))


def model_shapes(
    *, layers: st.SearchStrategy[LayerShape] | None = None, min_layers: int = 1, max_layers: int = 4
) -> st.SearchStrategy[tuple[LayerShape, ...]]:
    """Shapes of a model's MoE layers: equal but for their increasing indices, which may leave out dense layers.

    To draw a mask and a budget for one model, share them: `shapes = st.shared(model_shapes(), key="model")`, then
    `@given(shapes, masks(shapes=shapes), budgets(shapes=shapes))`.

    Args:
        layers: shapes of a layer; by default `layer_shapes()`.
        min_layers: fewest MoE layers.
        max_layers: most MoE layers.
    """
    _check_span("strategies.model_shapes", "layers", min_layers, max_layers, least=1)
    return _model_shapes(layer_shapes() if layers is None else layers, min_layers, max_layers)


# -------------------------------------------------------------------------------------------------- masks and budgets


@st.composite
def _masks(draw: st.DrawFn, shapes: st.SearchStrategy[Sequence[LayerShape]], *, allow_empty: bool) -> Mask:
    given = _checked(draw(shapes), "strategies.masks")
    if not allow_empty:
        _check_room(given)
    pruned = _draw_by_layer(draw, given, lambda shape: _group_size(shape) - shape.fewest_per_group())
    if not allow_empty and not any(pruned.values()):
        # Completed rather than thrown away: no draw says where, so that no other draw depends on it.
        pruned[next(shape.index for shape in given if _room(shape))].append(0)
    return Mask.for_shapes(given, pruned)


def _check_room(shapes: Sequence[LayerShape]) -> None:
    if not any(map(_room, shapes)):
        raise UsageError(
            "no layer can lose an expert",
            where="strategies.masks",
            expected="more experts than fill k slots, in some layer",
            fix="allow_empty=True",
        )


def masks(*, shapes: Shapes | None = None, allow_empty: bool = False) -> st.SearchStrategy[Mask]:
    """Masks that fit a model: every layer, and every router group, keeps enough survivors to fill k slots.

    Layers may lose nothing, or all they can; shrinks to expert 0 of the first layer.

    Args:
        shapes: the model's layers (`moe.shapes`), or a strategy of such tuples; by default `model_shapes()`.
        allow_empty: also draw the mask that prunes nothing; then shrinks to it.
    """
    if isinstance(shapes, Sequence):
        given = _checked(shapes, "strategies.masks")
        if not allow_empty:
            _check_room(given)
        shapes = st.just(given)
    return _masks(model_shapes() if shapes is None else shapes, allow_empty=allow_empty)


@st.composite
def _budgets(draw: st.DrawFn, shapes: st.SearchStrategy[Sequence[LayerShape]], *, protected: bool) -> Budget:
    given = _checked(draw(shapes), "strategies.budgets")
    keeps, ratios = _possible_amounts(given)
    if draw(st.sampled_from([kind for kind, possible in (("keep", keeps), ("ratio", ratios)) if possible])) == "keep":
        fewer = draw(st.integers(0, len(keeps) - 1))
        budget = Budget(keep=keeps[-1 - fewer])
    else:
        digits, numerators = draw(st.sampled_from(ratios))
        numerator = draw(st.integers(numerators.start, numerators.stop - 1))
        budget = Budget(ratio=Decimal(numerator).scaleb(-digits))
    return replace(budget, protected=_draw_protected(draw, given, budget)) if protected else budget


def budgets(*, shapes: Shapes | None = None, protected: bool = False) -> st.SearchStrategy[Budget]:
    """Budgets that every layer of a model can meet: at least one expert goes, enough to fill k slots stay.

    `keep`, or a `ratio` as an exact decimal of few digits; shrinks to keeping all but one.

    Args:
        shapes: the model's layers (`moe.shapes`), or a strategy of such tuples; by default `model_shapes()`.
        protected: also draw protected experts, never more of a router group than an even spread can spare.
    """
    if isinstance(shapes, Sequence):
        given = _checked(shapes, "strategies.budgets")
        _possible_amounts(given)
        shapes = st.just(given)
    return _budgets(model_shapes() if shapes is None else shapes, protected=protected)


def _possible_amounts(shapes: Sequence[LayerShape]) -> tuple[range, list[tuple[int, range]]]:
    """The numbers of experts that all layers can keep, and the ratios, as (digits, numerators), that all can lose."""
    keeps = range(max(shape.fewest_survivors() for shape in shapes), min(shape.experts for shape in shapes))
    ratios = _possible_ratios(shapes)
    if not keeps and not ratios:
        sizes = sorted({f"{shape.experts} experts of which {shape.fewest_survivors()} must stay" for shape in shapes})
        raise UsageError(
            f"no budget suits layers with {', '.join(sizes)}",
            where="strategies.budgets",
            expected="layers that can lose an expert, and of like sizes",
        )
    return keeps, ratios


def _possible_ratios(shapes: Sequence[LayerShape]) -> list[tuple[int, range]]:
    """(digits, numerators) of possible decimal ratios: the three smallest numbers of digits that have any."""
    low = max(Fraction(1, shape.experts) for shape in shapes)
    # floor(ratio · E) ≤ E - fewest holds below this.
    end = min(Fraction(shape.experts - shape.fewest_survivors() + 1, shape.experts) for shape in shapes)
    found: list[tuple[int, range]] = []
    # The ends are fractions of E: where the interval is not empty, twice E's digits are enough to hit it.
    for digits in range(1, 2 * len(str(max(shape.experts for shape in shapes))) + 3):
        numerators = range(ceil(low * 10**digits), min(ceil(end * 10**digits), 10**digits))
        if numerators and len(found) < 3:
            found.append((digits, numerators))
    return found


def _draw_protected(draw: st.DrawFn, shapes: Sequence[LayerShape], budget: Budget) -> dict[int, frozenset[int]]:
    def spare(shape: LayerShape) -> int:
        return _group_size(shape) - ceil(Fraction(budget.pruned_count(shape), shape.groups))

    return {index: frozenset(ids) for index, ids in _draw_by_layer(draw, shapes, spare).items() if ids}


def _draw_by_layer(
    draw: st.DrawFn, shapes: Sequence[LayerShape], most_of: Callable[[LayerShape], int]
) -> dict[int, list[int]]:
    """Some experts of every layer, at most `most_of(shape)` of each router group.

    Of two examples hypothesis prefers the one whose early draws are lower. So what is drawn first is what comes last: a
    mask shrinks to the first layer and the lowest ids.
    """
    chosen: dict[int, list[int]] = {}
    for shape in reversed(shapes):
        size = _group_size(shape)
        for group in reversed(range(shape.groups)):
            numbers = _draw_subset(draw, size, most_of(shape))
            chosen.setdefault(shape.index, []).extend(group * size + number for number in numbers)
    return chosen


def _draw_subset(draw: st.DrawFn, size: int, most: int) -> list[int]:
    """At most so many of the numbers below `size`: as many as may be, about half of all, or about a tenth.

    A number is in if its byte exceeds the threshold, so each can leave without another, and all zeros is none.
    """
    threshold = draw(st.sampled_from((0, 127, 229)))
    weights = draw(st.binary(min_size=size, max_size=size))[::-1]
    heaviest = sorted(range(size), key=lambda number: -weights[number])[:most]
    return [number for number in heaviest if weights[number] > threshold]


def _group_size(shape: LayerShape) -> int:
    return shape.experts // shape.groups


def _room(shape: LayerShape) -> int:
    """How many experts the layer can lose."""
    return shape.experts - shape.fewest_survivors()


def _checked(shapes: Sequence[Any], where: str) -> tuple[LayerShape, ...]:
    """Shapes that a model can have."""
    if not shapes:
        raise UsageError("no layer shapes", where=where, expected="those of a model's MoE layers, such as moe.shapes")
    for shape in shapes:
        if not isinstance(shape, LayerShape):
            raise UsageError(f"a {type(shape).__name__} among the shapes", where=where, expected="LayerShape")
        if shape.experts % shape.groups or _room(shape) < 0:
            raise UsageError(
                f"{shape.experts} experts in {shape.groups} groups, top-k {shape.top_k}",
                where=f"{where}, layer {shape.index}",
                expected="equal groups, and enough experts in each to fill k slots",
            )
    if [shape.index for shape in shapes] != sorted({shape.index for shape in shapes}):
        raise UsageError(f"layers {[shape.index for shape in shapes]}", where=where, expected="increasing indices")
    return tuple(shapes)


# ----------------------------------------------------------------------------------------- conventions and router calls


@cache
def _layer_of(family: str) -> MoELayer:
    """A layer of a family's random model: what its router computes, and which numbers its configuration sets."""
    return find_layers(random_model(family))[0]


@st.composite
def _conventions(draw: st.DrawFn, families: Sequence[str]) -> Convention:
    # Drawn for every family, used or not: so one family is no shorter than another, and shrinking goes to the first.
    family = draw(st.sampled_from(families))
    other_way = draw(st.booleans())
    factor = draw(st.sampled_from((None, 1.0, 2.5, 16.0)))
    groups = draw(st.sampled_from((None, (2, 1), (2, 2), (4, 1), (4, 2), (4, 3), (4, 4))))
    layer = _layer_of(family)
    own, row = layer.convention, layer.row
    changes: dict[str, Any] = {}
    # What the table reads off the router's configuration may be otherwise in another checkpoint.
    if other_way and isinstance(row.renormalised, str):
        changes["renormalised"] = not own.renormalised
    if factor is not None and isinstance(row.factor, str):
        changes["factor"] = factor
    if groups is not None and own.groups is not None:
        changes["groups"] = Groups(*groups, own.groups.score)
    return replace(own, **changes)


def conventions(*, families: Sequence[str] | None = None) -> st.SearchStrategy[Convention]:
    """Conventions of the families' routers, and of checkpoints that set those routers' numbers otherwise.

    Renormalisation, factor and groups vary where the router takes them from its configuration; the rest is the
    family's. Shrinks to the first family's own convention.

    Args:
        families: keys of `FAMILIES`; by default all.
    """
    return _conventions(_checked_families(families, "strategies.conventions"))


def _checked_families(families: Sequence[str] | None, where: str) -> tuple[str, ...]:
    chosen = tuple(FAMILIES) if families is None else tuple(families)
    if isinstance(families, str) or not chosen:
        raise UsageError(f"families {families!r}", where=where, expected="a list of names, such as ['olmoe']")
    if unknown := [family for family in chosen if family not in FAMILIES]:
        raise UsageError(f"unknown family {unknown[0]!r}", where=where, expected=", ".join(FAMILIES))
    return chosen


@dataclass(frozen=True)
class _Calls:
    """The checked arguments of `router_calls` and `token_batches`."""

    where: str
    conventions: Conventions | None
    sizes: _Sizes
    min_tokens: int
    max_tokens: int
    ties: bool
    dtype: torch.dtype
    observed: bool = False

    def __post_init__(self) -> None:
        _check_span(self.where, "tokens", self.min_tokens, self.max_tokens, least=1)
        if not getattr(self.dtype, "is_floating_point", False):
            raise UsageError(f"dtype {self.dtype}", where=self.where, expected="a floating dtype of torch")
        if isinstance(self.conventions, Convention):
            self.check_possible(self.conventions)

    def possible(self, convention: Convention) -> bool:
        """Whether some layer within the sizes can have the convention's groups."""
        groups, sizes = convention.groups, self.sizes_for(convention)
        if sizes is None or (self.observed and convention.gates_on == "input"):
            return False
        return groups is None or len(sizes.of_group(groups.count, groups.kept)) > 0

    def sizes_for(self, convention: Convention) -> _Sizes | None:
        """The sizes, with the only k that sparsemixer knows; None if that is not among them."""
        if convention.score != "sparsemixer":
            return self.sizes
        sizes = self.sizes
        possible = sizes.min_top_k <= 2 <= sizes.max_top_k and sizes.max_experts > 2
        return replace(sizes, min_top_k=2, max_top_k=2) if possible else None

    def check_possible(self, convention: Convention) -> Convention:
        """The convention, if it is possible."""
        if not self.possible(convention):
            raise UsageError(
                f"{convention.describe()}, with at most {self.sizes.max_experts} experts",
                where=self.where,
                expected="groups of at least two experts, and one more than fills k slots",
                fix="a larger max_experts, or other conventions",
            )
        return convention

    def draw_convention(self, draw: st.DrawFn) -> Convention:
        """One of those asked for, which must be possible, or by default any that is."""
        if self.conventions is None:
            return draw(conventions().filter(self.possible))
        if isinstance(self.conventions, Convention):
            return self.conventions
        return self.check_possible(draw(self.conventions))

    def draw(self, draw: st.DrawFn, more: st.SearchStrategy[Any]) -> tuple[RouterCall, list[Any]]:
        """A call and, per token, what `more` draws: a token is one draw, so that shrinking drops it whole."""
        convention = self.draw_convention(draw)
        groups, sizes = convention.groups, self.sizes_for(convention)
        assert sizes is not None
        shape = _draw_shape(draw, sizes, 0, *((groups.count, groups.kept) if groups else (1, 1)))
        choices = shape.experts + convention.identities
        modulus, steps = draw(st.sampled_from(_LOGITS if self.ties else _DISTINCT_LOGITS))
        dtype = self.dtype if convention.gates_in == "logits" else torch.float32
        # Rows are as long as the widest layer's, and cut: so E shrinks without moving the draws after it.
        rows = _numbers(self.sizes.max_experts + convention.identities)
        bias, scale = (_signed(draw(rows)[:choices], 2**16) for _ in range(2))
        bias_E = bias if convention.biased else None
        expert_scale_E = 1 + scale if convention.expert_scales else None

        def logits_of(row: Ints) -> Tensor:
            return _signed(row[:choices] % modulus, steps).to(dtype)

        def distinct(row: Ints) -> bool:
            choice_TE = scores_and_choice(convention, logits_of(row)[None], bias_E)[1]
            return len(choice_TE.unique()) == choices

        tokens = draw(
            st.lists(
                st.tuples(rows if self.ties else rows.filter(distinct), more),
                min_size=self.min_tokens,
                max_size=self.max_tokens,
            )
        )
        logits_TE = torch.stack([logits_of(row) for row, _ in tokens])
        call = router_call(
            convention, logits_TE, bias_E, top_k=shape.top_k, hidden=self.dtype, expert_scale_E=expert_scale_E
        )
        return call, [extra for _, extra in tokens]


@st.composite
def _router_calls(draw: st.DrawFn, calls: _Calls) -> RouterCall:
    return calls.draw(draw, st.none())[0]


def router_calls(
    *,
    conventions: Conventions | None = None,
    min_experts: int = 2,
    max_experts: int = 12,
    min_top_k: int = 1,
    max_top_k: int = 4,
    min_tokens: int = 1,
    max_tokens: int = 12,
    ties: bool = True,
    dtype: torch.dtype = torch.float32,
) -> st.SearchStrategy[RouterCall]:
    """Calls of a router: logits, bias, and the selection and gates that its convention makes of them.

    Logits are on a grid, up to ±128: nearly flat, peaked, or so far apart that scores underflow and saturate. A mask
    for the call is drawn by `masks(shapes=[shape_of(call)])`. Shrinks to one token with all logits 0.

    Args:
        conventions: a convention or a strategy of them; by default all of `conventions()` that the sizes allow.
        min_experts: least E.
        max_experts: greatest E.
        min_top_k: least k.
        max_top_k: greatest k; some expert can always be pruned.
        min_tokens: least T.
        max_tokens: greatest T.
        ties: also draw experts that the router ranks alike (in float32), among whom it may select any.
        dtype: of the model; what its router computes in float32 stays so.
    """
    where = "strategies.router_calls"
    sizes = _Sizes(where, min_experts, max_experts, min_top_k, max_top_k)
    return _router_calls(_Calls(where, conventions, sizes, min_tokens, max_tokens, ties, dtype))


# ------------------------------------------------------------------------------------------------------ token batches


@st.composite
def _token_batches(draw: st.DrawFn, calls: _Calls, *, width: int, unrouted: bool) -> TokenBatch:
    call, tokens = calls.draw(draw, st.tuples(_numbers(width), st.booleans()))
    slot_major = draw(st.booleans())
    # f_e(x) = a_e·x + b_e: equal inputs have equal outputs, and an expert's mean output may dwarf their spread.
    offset = draw(st.sampled_from((0.0, 1000.0)))
    slope_E, shift_E = _signed(draw(_numbers(2 * calls.sizes.max_experts)), 2**13).view(-1, 2).unbind(-1)
    index_TK, gates_TK = call.index_TK, call.gates_TK
    if unrouted:
        blocked_E = torch.zeros(call.logits_TE.shape[1], dtype=torch.bool)
        blocked_E[list(draw(masks(shapes=[shape_of(call)])).pruned_of(0))] = True
        index_TK, gates_TK = reroute(call, blocked_E, Scale(call.convention.trained_scale))
    x_TD = torch.stack([_signed(x, 2**13) for x, _ in tokens])
    experts = shape_of(call).experts
    expert_TK = index_TK.clamp(max=experts - 1)  # slots without a row have no output
    outputs_TKD = slope_E[expert_TK][..., None] * x_TD[:, None] + (shift_E + offset)[expert_TK][..., None]
    scores_TE, choice_TE = scores_and_choice(call.convention, call.logits_TE, call.bias_E)

    def evaluate(x_SD: Tensor, expert_S: Tensor) -> Tensor:
        answers_SD = slope_E[expert_S][:, None] * x_SD.float() + (shift_E + offset)[expert_S][:, None]
        return answers_SD.to(calls.dtype)

    return batch_of(
        x_TD=x_TD.to(calls.dtype),
        scores_TE=scores_TE[:, :experts].float(),
        choice_TE=choice_TE[:, :experts],
        index_TK=index_TK,
        gates_TK=gates_TK,
        outputs_TKD=outputs_TKD.to(calls.dtype),
        block_T=torch.tensor([starts for _, starts in tokens], dtype=torch.int64).cumsum(0),
        slot_major=slot_major,
        call=call,
        evaluate=None if unrouted else evaluate,
    )


def token_batches(
    *,
    conventions: Conventions | None = None,
    min_experts: int = 2,
    max_experts: int = 8,
    min_top_k: int = 1,
    max_top_k: int = 3,
    min_tokens: int = 1,
    max_tokens: int = 8,
    width: int = 3,
    ties: bool = True,
    unrouted: bool = False,
    dtype: torch.dtype = torch.float32,
) -> st.SearchStrategy[TokenBatch]:
    """What one MoE layer computed for one batch, as an observer and a statistic see it.

    Consistent by construction: selection and gates are the router's (as `router_calls` draws them), rows are sorted by
    expert in the order of one kernel or the other, an expert answers equal inputs equally, blocks follow each other.
    Few tokens leave experts without a row. Shrinks to one token, all of whose numbers are 0.

    Args:
        conventions: a convention or a strategy of them; by default all of `conventions()` that the sizes allow, and
            whose statistics can be taken (gates on the output).
        min_experts: least E.
        max_experts: greatest E.
        min_top_k: least k.
        max_top_k: greatest k; some expert can always be pruned.
        min_tokens: least T.
        max_tokens: greatest T.
        width: D.
        ties: also draw experts that the router ranks alike (in float32).
        unrouted: the layer is masked and rerouted at its trained scale: at least one expert has no row.
        dtype: of the model; what its router computes in float32 stays so.
    """
    where = "strategies.token_batches"
    if type(width) is not int or width < 1:
        raise UsageError(f"width {width!r}", where=where, expected="at least 1")
    sizes = _Sizes(where, min_experts, max_experts, min_top_k, max_top_k)
    calls = _Calls(where, conventions, sizes, min_tokens, max_tokens, ties, dtype, observed=True)
    return _token_batches(calls, width=width, unrouted=unrouted)


# ------------------------------------------------------------------------------------------------------------- models


@cache
def _cells(
    families: tuple[str, ...] | None, experts: tuple[int, ...], top_k: tuple[int, ...], *, observed: bool
) -> dict[str, list[tuple[int, int]]]:
    """(E, k) of the models of each family that can be made and can lose an expert, simplest first."""
    where = "strategies.models"
    found: dict[str, list[tuple[int, int]]] = {}
    for family in families or FAMILIES:
        layer = _layer_of(family)
        if observed and families is None and layer.convention.gates_on == "input":
            continue
        own, known = layer.shape, FAMILIES[family].top_k
        least = 2 if layer.layout.takes == "two slots" else 1
        slots = [k for k in sorted(top_k) if k >= least and known in {None, k}]
        possible = [
            (shape.experts, shape.top_k)
            for shape in (replace(own, experts=e, top_k=k) for e in sorted(experts) for k in slots)
            if shape.experts % shape.groups == 0 and _room(shape) > 0
        ]
        if possible:
            found[family] = possible
        elif families is not None:
            raise UsageError(
                f"{family} with {own.groups} groups has none of the sizes",
                where=where,
                expected=f"experts {experts} and top_k {top_k} that leave an expert to prune",
            )
    if not found:
        raise UsageError(f"experts {experts} with top_k {top_k}", where=where, expected="an expert that can be pruned")
    return found


@st.composite
def _models(
    draw: st.DrawFn,
    *,
    families: tuple[str, ...] | None,
    experts: tuple[int, ...],
    top_k: tuple[int, ...],
    implementations: tuple[str, ...],
    seeds: int,
    observed: bool,
) -> MoEModel:
    # The family first: those with router groups have fewer sizes, and are no rarer for it.
    cells = _cells(families, experts, top_k, observed=observed)
    family = draw(st.sampled_from(list(cells)))
    count, k = draw(st.sampled_from(cells[family]))
    # builds() makes a failing test show the call that opens the same model, not the model.
    opened = st.builds(
        opened_model,
        st.just(family),
        experts=st.just(count),
        top_k=st.just(k),
        seed=st.integers(0, seeds - 1),
        experts_implementation=st.sampled_from(implementations),
    )
    return draw(opened)


def models(
    *,
    families: Sequence[str] | None = None,
    experts: Sequence[int] = (8, 12, 16),
    top_k: Sequence[int] = (1, 2, 4),
    implementations: Sequence[str] = ("eager", "grouped_mm"),
    seeds: int = 4,
    observed: bool = True,
) -> st.SearchStrategy[MoEModel]:
    """Opened random models (`opened_model`): family, E, k, kernel and weights vary.

    Cheap, because models are kept and copied; what a test does to one reaches no other. Shrinks to the first family,
    the smallest sizes, the first kernel and seed 0.

    Args:
        families: keys of `FAMILIES`; by default all that can have one of the sizes.
        experts: possible E; a family with router groups needs a multiple of their number.
        top_k: possible k; only sizes that leave an expert to prune are drawn.
        implementations: experts implementations, simplest first.
        seeds: how many weights of one size there are.
        observed: leave out families of which no statistics can be taken, unless named: those whose gates multiply the
            experts' input.
    """
    where = "strategies.models"
    chosen = None if families is None else _checked_families(families, where)
    for name, sizes, least in (("experts", experts, 2), ("top_k", top_k, 1)):
        if not sizes or any(type(size) is not int or size < least for size in sizes):
            raise UsageError(f"{name} {sizes!r}", where=where, expected=f"numbers of at least {least}")
    if isinstance(implementations, str) or not implementations:
        raise UsageError(f"implementations {implementations!r}", where=where, expected="a list, such as ['eager']")
    if type(seeds) is not int or seeds < 1:
        raise UsageError(f"seeds {seeds!r}", where=where, expected="at least 1")
    return _models(
        families=chosen,
        experts=tuple(experts),
        top_k=tuple(top_k),
        implementations=tuple(implementations),
        seeds=seeds,
        observed=observed,
    )


def _check_span(where: str, name: str, low: Any, high: Any, *, least: int) -> None:
    """Raise unless both are whole numbers and least ≤ low ≤ high."""
    if type(low) is not int or type(high) is not int or not least <= low <= high:
        raise UsageError(
            f"min_{name} {low!r} and max_{name} {high!r}", where=where, expected=f"{least} ≤ min_{name} ≤ max_{name}"
        )
