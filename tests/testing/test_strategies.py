"""What each strategy promises: every example is valid, the odd ones are drawn, and failures shrink to the plainest."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from prunebench.calibration.statistics import BUILT_IN
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import Budget, LayerShape
from prunebench.method import LayerView, Statistics, prune_lowest
from prunebench.moe.layer import find_layers
from prunebench.routing import Convention, Groups, scores_and_choice
from prunebench.testing import FAMILIES, measured, random_ids, random_model, shape_of, split_batch, strategies

SHAPES = st.shared(strategies.model_shapes(), key="one model")
GROUPED = (LayerShape(1, 12, 4, 4, 2), LayerShape(3, 12, 4, 4, 2))
PLAIN = (LayerShape(0, 8, 2), LayerShape(1, 8, 2))
GROUPS_ONLY = st.just(Convention("softmax", renormalised=False, groups=Groups(2, 1, "max")))

# Derandomised: whether an odd example is found must not depend on the day. Nothing is explained, which takes long.
PLAINEST = settings(database=None, deadline=None, derandomize=True, phases=[Phase.generate, Phase.shrink])

few = settings(max_examples=max(4, settings().max_examples // 5))


def minimal(strategy, condition=lambda _: True):
    """What a failing test would show."""
    return find(strategy, condition, settings=settings(PLAINEST, max_examples=1000))


def drawn(strategy, condition):
    """Some example that is like that; `find` raises if there is none."""
    return find(strategy, condition, settings=settings(PLAINEST, max_examples=1000, phases=[Phase.generate]))


def views(shapes) -> list[LayerView]:
    """Layers without a model."""
    return [LayerView(shape, None, 1, Statistics({}, (), "x"), None) for shape in shapes]


# ------------------------------------------------------------------------------------------------------------ shapes


@given(strategies.layer_shapes(min_experts=5, max_experts=20, min_top_k=2, max_top_k=3))
def test_a_layer_is_within_bounds_and_can_lose_an_expert(shape):
    assert 5 <= shape.experts <= 20
    assert 2 <= shape.top_k <= 3
    assert shape.experts % shape.groups == 0
    assert 1 <= shape.kept_groups <= shape.groups <= 4
    assert shape.fewest_per_group() < shape.experts // shape.groups
    Budget(keep=shape.experts - 1).check([shape])


def test_every_number_of_groups_is_drawn():
    for groups in (1, 2, 3, 4):
        assert drawn(strategies.layer_shapes(), lambda shape, n=groups: shape.groups == n)
    assert drawn(strategies.layer_shapes(), lambda shape: 1 < shape.kept_groups < shape.groups)


def test_a_layer_shrinks_to_two_experts_and_one_slot():
    assert minimal(strategies.layer_shapes()) == LayerShape(0, 2, 1)
    assert minimal(strategies.layer_shapes(), lambda shape: shape.groups > 1) == LayerShape(0, 4, 1, 2, 1)
    assert minimal(strategies.layer_shapes(), lambda shape: shape.top_k > 2) == LayerShape(0, 4, 3)


@given(strategies.model_shapes(layers=strategies.layer_shapes(max_groups=1), min_layers=2, max_layers=3))
def test_a_model_has_equal_layers_of_increasing_index(shapes):
    assert 2 <= len(shapes) <= 3
    indices = [shape.index for shape in shapes]
    assert indices == sorted(set(indices))
    assert len({(shape.experts, shape.top_k, shape.groups, shape.kept_groups) for shape in shapes}) == 1
    assert {shape.groups for shape in shapes} == {1}


def test_a_model_shrinks_to_one_layer_and_dense_layers_lie_between_some():
    assert minimal(strategies.model_shapes()) == (LayerShape(0, 2, 1),)
    gap = minimal(strategies.model_shapes(), lambda shapes: shapes[-1].index - shapes[0].index > len(shapes) - 1)
    assert gap == (LayerShape(0, 2, 1), LayerShape(2, 2, 1))


# ------------------------------------------------------------------------------------------------------------- masks


@given(SHAPES, strategies.masks(shapes=SHAPES))
def test_a_mask_fits_its_model_and_is_never_empty(shapes, mask):
    mask.check_fits(shapes)
    assert mask.pruned_count > 0


@given(strategies.masks(shapes=GROUPED))
def test_a_mask_leaves_every_router_group_enough(mask):
    mask.check_fits(GROUPED)
    for layer in mask.layers:
        left = Counter(expert // 3 for expert in layer.survivors)
        assert all(left[group] >= 2 for group in range(4))


def test_a_mask_shrinks_to_the_first_expert_of_the_first_layer():
    for shapes in (PLAIN, GROUPED):
        mask = minimal(strategies.masks(shapes=shapes))
        assert [layer.pruned for layer in mask.layers] == [(0,), ()]
    assert minimal(strategies.masks(shapes=PLAIN, allow_empty=True)).pruned_count == 0


def test_a_mask_shrinks_to_the_guilty_experts_alone():
    guilty = minimal(strategies.masks(shapes=PLAIN), lambda mask: 5 in mask.pruned_of(1))
    assert [layer.pruned for layer in guilty.layers] == [(), (5,)]
    pair = minimal(strategies.masks(shapes=PLAIN), lambda mask: {3, 6} <= set(mask.pruned_of(0)))
    assert [layer.pruned for layer in pair.layers] == [(3, 6), ()]
    count = minimal(strategies.masks(shapes=PLAIN), lambda mask: mask.pruned_count > 2)
    assert [layer.pruned for layer in count.layers] == [(0, 1, 2), ()]


def test_layers_lose_nothing_some_or_all_that_they_can():
    large = (LayerShape(0, 64, 4), LayerShape(1, 64, 4))
    for wanted in (0, 1, 60):
        assert drawn(strategies.masks(shapes=large), lambda mask, n=wanted: len(mask.pruned_of(1)) == n)
    full = minimal(strategies.masks(shapes=GROUPED), lambda mask: mask.pruned_count == 8)
    assert [layer.pruned for layer in full.layers] == [(0, 3, 6, 9), (0, 3, 6, 9)]


def test_a_layer_without_room_loses_nothing():
    tight = (LayerShape(0, 2, 2), LayerShape(1, 3, 2))
    assert [layer.pruned for layer in minimal(strategies.masks(shapes=tight)).layers] == [(), (0,)]
    assert not minimal(strategies.masks(shapes=tight[:1], allow_empty=True)).pruned_count


# ----------------------------------------------------------------------------------------------------------- budgets


@given(SHAPES, strategies.budgets(shapes=SHAPES))
def test_a_budget_takes_at_least_one_expert_and_leaves_enough_to_fill_k_slots(shapes, budget):
    budget.check(shapes)
    for shape in shapes:
        exact = shape.experts - budget.keep if budget.keep else math.floor(Fraction(budget.ratio) * shape.experts)
        assert budget.pruned_count(shape) == exact
        assert 1 <= exact <= shape.experts - shape.top_k


@given(SHAPES, strategies.budgets(shapes=SHAPES, protected=True), st.randoms(use_true_random=False))
def test_whatever_is_protected_the_budget_can_be_spent(shapes, budget, random):
    budget.check(shapes)
    mask = prune_lowest(views(shapes), budget, lambda layer: [random.random() for _ in range(layer.experts)])
    mask.check_fits(shapes)
    for layer, shape in zip(mask.layers, shapes, strict=True):
        assert len(layer.pruned) == budget.pruned_count(shape)
        assert not budget.protected.get(layer.index, frozenset()) & set(layer.pruned)


def test_both_ends_of_a_budget_are_drawn_and_it_shrinks_to_one_expert():
    assert minimal(strategies.budgets(shapes=PLAIN)) == Budget(keep=7)
    assert minimal(strategies.budgets(shapes=PLAIN), lambda budget: budget.keep == 2) == Budget(keep=2)
    assert minimal(strategies.budgets(shapes=PLAIN), lambda budget: budget.ratio) == Budget.of_ratio("0.2")
    assert minimal(strategies.budgets(shapes=PLAIN), lambda b: b.ratio and b.pruned_count(PLAIN[0]) == 6)
    exact = minimal(strategies.budgets(shapes=PLAIN), lambda b: b.ratio and Fraction(b.ratio) * 8 == 5)
    assert exact == Budget.of_ratio("0.625")
    guarded = minimal(strategies.budgets(shapes=PLAIN, protected=True), lambda budget: budget.protected)
    assert guarded == Budget(keep=7, protected={0: frozenset({0})})
    full = minimal(strategies.budgets(shapes=PLAIN, protected=True), lambda b: len(b.protected.get(1, ())) == 7)
    assert full == Budget(keep=7, protected={1: frozenset(range(7))})


def test_a_budget_suits_layers_of_different_sizes():
    shapes = (LayerShape(0, 8, 2), LayerShape(1, 100, 6))
    for kind in ("keep", "ratio"):
        minimal(strategies.budgets(shapes=shapes), lambda b, kind=kind: getattr(b, kind) is not None).check(shapes)
    # No number of experts is left by both.
    apart = (LayerShape(0, 4, 2), LayerShape(1, 100, 6))
    assert minimal(strategies.budgets(shapes=apart)).keep is None
    # Nor would a ratio that takes one of 2 leave 15 of 16.
    with pytest.raises(UsageError, match=r"no budget suits layers with 16 experts of which 15 must stay, 2 experts"):
        strategies.budgets(shapes=(LayerShape(0, 2, 1), LayerShape(1, 16, 15)))


# ----------------------------------------------------------------------------------------- conventions and router calls


@pytest.mark.parametrize("family", FAMILIES)
def test_a_convention_shrinks_to_the_familys_own(family):
    own = find_layers(random_model(family))[0].convention
    assert minimal(strategies.conventions(families=[family])) == own


def test_other_settings_of_a_routers_configuration_are_drawn():
    own = minimal(strategies.conventions())
    # OLMoE's norm_topk_prob; its router has no factor.
    other = minimal(strategies.conventions(families=["olmoe"]), lambda convention: convention != own)
    assert other == Convention("softmax", renormalised=True, gates_in="logits")
    scaled = minimal(strategies.conventions(families=["deepseek_v2"]), lambda convention: convention.factor == 16.0)
    assert scaled.renormalised is False
    grouped = minimal(strategies.conventions(families=["deepseek_v3.groups"]), lambda c: c.groups.count == 2)
    assert grouped.groups == Groups(2, 1, "top2sum")


@given(strategies.router_calls(min_experts=3, max_experts=9, min_top_k=2, max_top_k=3, min_tokens=2, max_tokens=5))
def test_a_call_is_within_bounds_and_a_mask_can_be_drawn_for_it(call):
    tokens, choices = call.logits_TE.shape
    experts = shape_of(call).experts
    assert choices == experts + call.convention.identities
    assert 2 <= tokens <= 5
    assert 3 <= experts <= 9
    assert 2 <= call.index_TK.shape[1] <= 3
    assert call.index_TK.shape == call.gates_TK.shape
    assert all(len(set(row)) == len(row) for row in call.index_TK.tolist())
    assert torch.isfinite(call.gates_TK).all()
    assert (call.bias_E is not None) == call.convention.biased
    assert call.bias_E is None or call.bias_E.shape == (choices,)
    assert shape_of(call).fewest_survivors() < experts


@given(strategies.router_calls(ties=False))
def test_without_ties_the_selection_is_the_one_best(call):
    _, choice_TE = scores_and_choice(call.convention, call.logits_TE, call.bias_E)
    assert all(len(set(row)) == len(row) for row in choice_TE.tolist())
    if call.convention.groups is None:
        for row, choice_E in zip(call.index_TK.tolist(), choice_TE.tolist(), strict=True):
            assert set(row) == set(sorted(range(len(choice_E)), key=lambda e: -choice_E[e])[: len(row)])


@given(strategies.router_calls(dtype=torch.bfloat16))
def test_a_bfloat16_model_has_what_its_router_keeps_in_float32(call):
    in_model = torch.bfloat16
    assert call.logits_TE.dtype == (in_model if call.convention.gates_in == "logits" else torch.float32)
    assert call.gates_TK.dtype == (torch.float32 if call.convention.gates_in == "float32" else in_model)


def test_ties_underflow_and_saturation_are_drawn():
    def scores(call):
        return scores_and_choice(call.convention, call.logits_TE, call.bias_E)[0]

    def ties_some(row):
        return 1 < len(set(row)) < len(row)

    softmax, sigmoid = Convention("softmax", renormalised=False), Convention("sigmoid", renormalised=True)
    assert drawn(strategies.router_calls(conventions=softmax), lambda call: (scores(call) == 0).any())
    assert drawn(strategies.router_calls(conventions=sigmoid), lambda call: (scores(call) == 1).any())
    calls = strategies.router_calls(conventions=softmax, min_experts=4, min_tokens=3)
    assert drawn(calls, lambda call: all(map(ties_some, call.logits_TE.tolist())))
    assert drawn(calls, lambda call: not any(map(ties_some, call.logits_TE.tolist())) and call.logits_TE.any())


def test_a_call_shrinks_to_one_token_of_equal_logits():
    call = minimal(strategies.router_calls())
    assert call.convention == minimal(strategies.conventions())
    assert call.logits_TE.tolist() == [[0, 0]]
    # Which draws make a token are one draw: two tokens are needed here, and two are left.
    pair = minimal(strategies.router_calls(), lambda call: (call.logits_TE > 0).any(-1).sum() == 2)
    assert pair.logits_TE.shape == (2, 2)


# ------------------------------------------------------------------------------------------------------ token batches


def by_hand(batch) -> dict[str, np.ndarray]:
    """Every built-in statistic, in Python floats, from the slots of one token after the other."""
    experts, width = len(batch.counts_E), batch.x_TD.shape[1]
    outputs = [[[] for _ in range(experts)] for _ in range(3)]
    for index_K, gates_K, outputs_KD, scores_E in zip(
        batch.index_TK.tolist(),
        batch.gates_TK.tolist(),
        batch.outputs_TKD.tolist(),
        batch.scores_TE.tolist(),
        strict=True,
    ):
        for e, g, f_D in zip(index_K, gates_K, outputs_KD, strict=True):
            if e < experts:  # else an identity expert's
                outputs[0][e].append(g)
                outputs[1][e].append(f_D)
                outputs[2][e].append(scores_E[e])
    norms = [[math.sqrt(math.fsum(f * f for f in f_D)) for f_D in rows] for rows in outputs[1]]
    gated = [[g * n for g, n in zip(gates, found, strict=True)] for gates, found in zip(outputs[0], norms, strict=True)]
    mean_ED, variance_ED = np.zeros((experts, width)), np.zeros((experts, width))
    for e, rows in enumerate(outputs[1]):
        for d in range(width if rows else 0):
            mean_ED[e, d] = math.fsum(f_D[d] for f_D in rows) / len(rows)
            variance_ED[e, d] = math.fsum((f_D[d] - mean_ED[e, d]) ** 2 for f_D in rows) / len(rows)
    return {
        "count": np.array([len(rows) for rows in outputs[1]]),
        "gate_sum": np.array([math.fsum(gates) for gates in outputs[0]]),
        "score_sum": np.array([math.fsum(scores) for scores in outputs[2]]),
        "norm_sum": np.array([math.fsum(found) for found in norms]),
        "norm_squared_sum": np.array([math.fsum(x * x for x in found) for found in norms]),
        "output_max": np.array([max((abs(f) for f_D in rows for f in f_D), default=0.0) for rows in outputs[1]]),
        "gate_norm_sum": np.array([math.fsum(found) for found in gated]),
        "gate_squared_norm_squared_sum": np.array([math.fsum(x * x for x in found) for found in gated]),
        "mean": mean_ED,
        "variance": variance_ED,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unrouted", [False, True])
def test_every_built_in_statistic_of_a_batch_is_that_of_a_loop_over_its_tokens(dtype, unrouted):
    @given(strategies.token_batches(dtype=dtype, unrouted=unrouted))
    def check(batch):
        wanted = by_hand(batch)
        got = {kind.name: measured(kind(), batch).value() for kind in BUILT_IN}
        del got["residual_sums"]  # tests/calibration/test_residuals.py
        moments = got.pop("output_moments")
        got |= {"mean": moments.mean_ED, "variance": moments.variance_ED}
        np.testing.assert_array_equal(moments.count_E, wanted["count"])
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            # A variance is a difference of numbers of up to 1000.
            np.testing.assert_allclose(got[name], value, rtol=1e-12, atol=1e-9 if name == "variance" else 1e-15)

    check()


@given(strategies.token_batches(width=2))
def test_a_batch_is_consistent(batch):
    tokens, slots = batch.index_TK.shape
    assert batch.x_TD.shape == (tokens, 2)
    # Slots of identity experts have no row.
    answered = [e for e in batch.index_TK.reshape(-1).tolist() if e < len(batch.counts_E)]
    assert batch.index_TK.numel() == tokens * slots
    assert batch.expert_S.tolist() == sorted(answered)
    assert torch.equal(batch.index_TK[batch.token_S, batch.slot_S], batch.expert_S)
    assert len(set(zip(batch.token_S.tolist(), batch.slot_S.tolist(), strict=True))) == len(answered)
    assert batch.counts_E.tolist() == [batch.expert_S.tolist().count(e) for e in range(len(batch.counts_E))]
    assert batch.scores_TE.shape == batch.choice_TE.shape == (tokens, len(batch.counts_E))
    assert (batch.block_T.diff() >= 0).all()
    # One expert, one input: one output.
    said: dict[tuple, list[float]] = {}
    for e, t, f_D in zip(batch.expert_S.tolist(), batch.token_S.tolist(), batch.outputs_SD.tolist(), strict=True):
        assert said.setdefault((e, *batch.x_TD[t].tolist()), f_D) == f_D


@given(strategies.token_batches(unrouted=True))
def test_an_unrouted_expert_has_no_row_and_every_token_still_fills_its_slots(batch):
    assert (batch.counts_E == 0).any()
    assert all(len(set(row)) == len(row) for row in batch.index_TK.tolist())
    unrouted_E = batch.counts_E == 0
    for kind in BUILT_IN:
        for value in measured(kind(), batch).state.values():
            assert not value[unrouted_E].any()


@pytest.mark.parametrize(
    "odd",
    [
        lambda batch: (batch.counts_E == 0).any(),
        lambda batch: (batch.counts_E > 0).all() and batch.tokens > 1,
        lambda batch: batch.block_T[-1] > 1,
        # The two kernels' orders differ where an expert stands in several slots.
        lambda batch: (batch.token_S.diff()[batch.expert_S.diff() == 0] < 0).any(),
        lambda batch: (batch.outputs_SD > 900).all() and (batch.outputs_SD.diff(dim=0) != 0).any(),
        lambda batch: (batch.gates_TK == 0).any(),
        lambda batch: (batch.scores_TE[:, 0] == batch.scores_TE[:, 1]).all() and batch.x_TD.any() and batch.tokens > 1,
    ],
    ids=["unrouted", "all routed", "blocks", "slot order", "far mean", "no gate", "ties"],
)
def test_the_odd_batches_are_drawn(odd):
    assert drawn(strategies.token_batches(), odd)


def test_a_batch_shrinks_to_one_token_all_zero():
    batch = minimal(strategies.token_batches())
    assert batch.index_TK.shape == (1, 1)
    assert not batch.x_TD.any()
    assert not batch.outputs_SD.any()
    assert batch.scores_TE.tolist() == [[0.5, 0.5]]
    shared = minimal(strategies.token_batches(), lambda batch: (batch.counts_E > 1).any())
    assert shared.scores_TE.shape == (2, 2)
    assert not shared.outputs_SD.any()


def test_a_statistic_that_averages_averages_is_caught_by_three_tokens_of_which_one_differs():
    def averaged(*parts):
        return torch.stack([part.outputs_SD.double().mean(0) for part in parts]).mean(0)

    batch = minimal(
        strategies.token_batches(min_tokens=3),
        lambda batch: not torch.allclose(averaged(*split_batch(batch, 1)), averaged(batch)),
    )
    assert batch.tokens == 3
    assert batch.x_TD.count_nonzero() <= 1


# ------------------------------------------------------------------------------------------------------------- models


@few
@given(strategies.models())
def test_a_model_is_open_has_a_size_that_was_asked_for_and_can_lose_an_expert(moe):
    for shape in moe.shapes:
        assert shape.experts in (8, 12, 16)
        assert shape.top_k in (1, 2, 4)
        assert shape.experts % shape.groups == 0
        Budget(keep=shape.experts - 1).check([shape])
    with torch.inference_mode():
        assert torch.isfinite(moe.model(input_ids=random_ids(1, 4)).logits).all()
    assert moe.experts_implementation in {"eager", "grouped_mm"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_drawn(family):
    moe = drawn(strategies.models(families=[family], experts=[16, 8], top_k=[2]), lambda _: True)
    assert moe.convention == find_layers(random_model(family))[0].convention
    assert {(shape.experts, shape.top_k) for shape in moe.shapes} == {(8, 2)}


def test_the_kernels_are_those_that_were_asked_for():
    for kernel in ("eager", "grouped_mm", "batched_mm"):
        moe = drawn(strategies.models(families=["olmoe"], implementations=[kernel]), lambda _: True)
        assert moe.experts_implementation == kernel


def test_a_model_shrinks_to_the_first_family_and_the_smallest_sizes():
    moe = minimal(strategies.models())
    assert moe.convention == minimal(strategies.conventions())
    assert {(shape.experts, shape.top_k) for shape in moe.shapes} == {(8, 1)}
    assert torch.equal(moe.layers[0].router.weight, random_model(experts=8, top_k=1).model.layers[0].mlp.gate.weight)


def test_families_that_cannot_have_a_size_are_left_out_unless_named():
    grouped = [family for family in FAMILIES if find_layers(random_model(family))[0].shape.groups == 4]
    assert grouped
    assert minimal(strategies.models(experts=[6], top_k=[2])).shapes[0].experts == 6
    for family in grouped:
        with pytest.raises(UsageError, match=f"{family} with 4 groups has none of the sizes"):
            minimal(strategies.models(families=["olmoe", family], experts=[6], top_k=[2]))


def test_a_failing_test_shows_the_call_that_opens_its_model():
    @PLAINEST
    @given(strategies.models(), st.data())
    def fails(moe, data):
        data.draw(strategies.models(families=["olmoe"], experts=[12]))
        assert moe.shapes[0].top_k < 2

    with pytest.raises(AssertionError) as info:
        fails()
    shown = "".join("\n".join(info.value.__notes__).split())
    assert "moe=opened_model('olmoe',experts=8,top_k=2,seed=0,experts_implementation='eager'" in shown
    assert "Draw1:opened_model('olmoe',experts=12,top_k=1,seed=0,experts_implementation='eager'" in shown


# ------------------------------------------------------------------------------------------------ impossible arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: strategies.layer_shapes(min_experts=9, max_experts=8),
            "min_experts 9 and max_experts 8; in strategies.layer_shapes; expected 2 ≤ min_experts ≤ max_experts",
        ),
        (
            lambda: strategies.layer_shapes(min_experts=1),
            "min_experts 1 and max_experts 16; in strategies.layer_shapes; expected 2 ≤ min_experts ≤ max_experts",
        ),
        (
            lambda: strategies.layer_shapes(max_top_k=2.0),
            "min_top_k 1 and max_top_k 2.0; in strategies.layer_shapes; expected 1 ≤ min_top_k ≤ max_top_k",
        ),
        (
            lambda: strategies.layer_shapes(max_experts=4, min_top_k=4),
            (
                "min_top_k 4 with max_experts 4; in strategies.layer_shapes; "
                "expected more experts than slots, so that one can be pruned"
            ),
        ),
        (
            lambda: strategies.layer_shapes(max_groups=0),
            "min_groups 1 and max_groups 0; in strategies.layer_shapes; expected 1 ≤ min_groups ≤ max_groups",
        ),
        (
            lambda: strategies.model_shapes(min_layers=0),
            "min_layers 0 and max_layers 4; in strategies.model_shapes; expected 1 ≤ min_layers ≤ max_layers",
        ),
        (
            lambda: strategies.masks(shapes=[]),
            "no layer shapes; in strategies.masks; expected those of a model's MoE layers, such as moe.shapes",
        ),
        (
            lambda: strategies.masks(shapes=[8]),
            "a int among the shapes; in strategies.masks; expected LayerShape",
        ),
        (
            lambda: strategies.masks(shapes=[LayerShape(2, 3, 4)]),
            (
                "3 experts in 1 groups, top-k 4; in strategies.masks, layer 2; "
                "expected equal groups, and enough experts in each to fill k slots"
            ),
        ),
        (
            lambda: strategies.budgets(shapes=[LayerShape(2, 10, 1, 4, 1)]),
            (
                "10 experts in 4 groups, top-k 1; in strategies.budgets, layer 2; "
                "expected equal groups, and enough experts in each to fill k slots"
            ),
        ),
        (
            lambda: strategies.budgets(shapes=[PLAIN[1], PLAIN[0]]),
            "layers [1, 0]; in strategies.budgets; expected increasing indices",
        ),
        (
            lambda: strategies.masks(shapes=[LayerShape(0, 4, 4)]),
            (
                "no layer can lose an expert; in strategies.masks; "
                "expected more experts than fill k slots, in some layer; fix: allow_empty=True"
            ),
        ),
        (
            lambda: minimal(strategies.masks(shapes=st.just([LayerShape(0, 4, 4)]))),
            (
                "no layer can lose an expert; in strategies.masks; "
                "expected more experts than fill k slots, in some layer; fix: allow_empty=True"
            ),
        ),
        (
            lambda: strategies.budgets(shapes=[LayerShape(0, 4, 4)]),
            (
                "no budget suits layers with 4 experts of which 4 must stay; in strategies.budgets; "
                "expected layers that can lose an expert, and of like sizes"
            ),
        ),
        (
            lambda: strategies.conventions(families=["gpt-2"]),
            f"unknown family 'gpt-2'; in strategies.conventions; expected {', '.join(FAMILIES)}",
        ),
        (
            lambda: strategies.conventions(families="olmoe"),
            "families 'olmoe'; in strategies.conventions; expected a list of names, such as ['olmoe']",
        ),
        (
            lambda: strategies.models(families=[]),
            "families []; in strategies.models; expected a list of names, such as ['olmoe']",
        ),
        (
            lambda: strategies.router_calls(min_tokens=0),
            "min_tokens 0 and max_tokens 12; in strategies.router_calls; expected 1 ≤ min_tokens ≤ max_tokens",
        ),
        (
            lambda: strategies.router_calls(dtype=torch.int64),
            "dtype torch.int64; in strategies.router_calls; expected a floating dtype of torch",
        ),
        (
            lambda: strategies.token_batches(
                conventions=Convention("softmax", renormalised=False, groups=Groups(8, 2, "max"))
            ),
            (
                "softmax, no renorm, 2 of 8 groups, with at most 8 experts; in strategies.token_batches; "
                "expected groups of at least two experts, and one more than fills k slots; "
                "fix: a larger max_experts, or other conventions"
            ),
        ),
        (
            lambda: minimal(strategies.router_calls(max_experts=3, conventions=GROUPS_ONLY)),
            (
                "softmax, no renorm, 1 of 2 groups, with at most 3 experts; in strategies.router_calls; "
                "expected groups of at least two experts, and one more than fills k slots; "
                "fix: a larger max_experts, or other conventions"
            ),
        ),
        (
            lambda: strategies.token_batches(width=0),
            "width 0; in strategies.token_batches; expected at least 1",
        ),
        (
            lambda: strategies.models(experts=[8, 1]),
            "experts [8, 1]; in strategies.models; expected numbers of at least 2",
        ),
        (
            lambda: strategies.models(top_k=[]),
            "top_k []; in strategies.models; expected numbers of at least 1",
        ),
        (
            lambda: strategies.models(implementations="eager"),
            "implementations 'eager'; in strategies.models; expected a list, such as ['eager']",
        ),
        (
            lambda: strategies.models(seeds=0),
            "seeds 0; in strategies.models; expected at least 1",
        ),
        (
            lambda: minimal(strategies.models(experts=[4], top_k=[4])),
            "experts (4,) with top_k (4,); in strategies.models; expected an expert that can be pruned",
        ),
    ],
)
def test_an_impossible_argument_is_one_line(make, message):
    with pytest.raises(UsageError) as info:
        make()
    assert str(info.value) == message


@pytest.mark.parametrize("name", strategies.__all__)
def test_all_arguments_are_keywords(name):
    with pytest.raises(TypeError, match="positional argument"):
        getattr(strategies, name)(object())


def test_without_hypothesis_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "prunebench.testing.strategies")
    with pytest.raises(PrerequisiteError) as info:
        importlib.import_module("prunebench.testing.strategies")
    assert str(info.value) == (
        "hypothesis is not installed; in prunebench.testing.strategies; "
        "fix: install the extra test: pip install 'prunebench[test]'"
    )


def test_the_rest_of_testing_does_without_hypothesis():
    code = "import prunebench.testing, sys; sys.exit('hypothesis' in sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"], check=True)
