"""Budgets over router groups and over the whole model, and what protected experts do to the count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunebench.errors import UsageError
from prunebench.mask import Budget, LayerShape, Mask
from prunebench.method import LayerView, Statistics, prune_lowest
from prunebench.testing import strategies

PLAIN = (LayerShape(1, 8, 2), LayerShape(3, 8, 2), LayerShape(4, 6, 3))
GROUPED = (LayerShape(0, 12, 4, 3, 2), LayerShape(2, 12, 4, 3, 2))


def pruned(shapes, scores, budget: Budget) -> Mask:
    views = [LayerView(shape, None, 1, Statistics({}, (), "x"), None) for shape in shapes]
    return prune_lowest(views, budget, lambda layer: scores[layer.index])


def test_a_global_budget_takes_the_lowest_scores_of_the_model():
    scores = {1: np.arange(8.0), 3: np.arange(8.0) + 2.5, 4: np.arange(6.0) + 100}
    mask = pruned(PLAIN, scores, Budget.of_ratio("0.3", scope="global"))
    # floor(0.3 · 22) = 6 lowest: 0, 1, 2, 2.5, 3 and 3.5.
    assert [layer.pruned for layer in mask.layers] == [(0, 1, 2, 3), (0, 1), ()]


def test_every_layer_keeps_its_top_k_under_a_global_budget():
    scores = {1: np.zeros(8), 3: np.ones(8), 4: np.full(6, 2.0)}
    mask = pruned(PLAIN, scores, Budget(keep=3, scope="global"))
    # 22 − 3·3 = 13 go: all that layers 1 and 3 can spare, and one of layer 4.
    assert [len(layer.survivors) for layer in mask.layers] == [2, 2, 5]
    # Ties: low ids stay.
    assert mask.pruned_of(1) == (2, 3, 4, 5, 6, 7)
    mask.check_fits(PLAIN)


def test_of_equal_scores_in_two_layers_the_lower_layer_keeps_its_expert():
    shapes = (LayerShape(0, 4, 1), LayerShape(7, 4, 1))
    mask = pruned(shapes, {0: np.ones(4), 7: np.ones(4)}, Budget.of_ratio("0.125", scope="global"))
    assert [layer.pruned for layer in mask.layers] == [(), (3,)]


def test_a_global_budget_leaves_every_router_group_its_share():
    scores = {0: np.arange(12.0), 2: np.arange(12.0) + 50}
    mask = pruned(GROUPED, scores, Budget.of_ratio("0.5", scope="global"))
    assert mask.pruned_count == 12
    # Two of each group of four stay at least: six of layer 0 go, and then those of layer 2.
    assert mask.pruned_of(0) == (0, 1, 4, 5, 8, 9)
    mask.check_fits(GROUPED)


def test_a_group_budget_takes_equally_many_of_every_group():
    scores = {0: np.arange(12.0), 2: np.arange(12.0)[::-1]}
    mask = pruned(GROUPED, scores, Budget.of_ratio("0.3", scope="group"))
    # floor(0.3 · 4) = 1 of each group, where floor(0.3 · 12) = 3 would be the same here; at 0.45 it is not.
    assert [layer.pruned for layer in mask.layers] == [(0, 4, 8), (3, 7, 11)]
    assert Budget.of_ratio("0.45", scope="group").pruned_count(GROUPED[0]) == 3
    assert Budget.of_ratio("0.45").pruned_count(GROUPED[0]) == 5
    assert Budget(keep=9, scope="group").pruned_count(GROUPED[0]) == 3
    # A layer without groups is one group.
    assert Budget.of_ratio("0.45", scope="group").pruned_count(PLAIN[0]) == 3


@pytest.mark.parametrize("scope", ["layer", "group", "global"])
def test_protected_experts_are_made_up_for_or_make_the_mask_smaller(scope):
    scores = {shape.index: np.arange(float(shape.experts)) for shape in GROUPED}
    protected = {0: frozenset({0, 11}), 2: frozenset({1})}
    free = pruned(GROUPED, scores, Budget(keep=9, scope=scope))
    made_up = pruned(GROUPED, scores, Budget(keep=9, scope=scope, protected=protected))
    spared = pruned(GROUPED, scores, Budget(keep=9, scope=scope, protected=protected, make_up=False))
    assert free.pruned_count == made_up.pruned_count == 6
    assert not any(set(protected[layer.index]) & set(layer.pruned) for layer in (*made_up.layers, *spared.layers))
    for layer in spared.layers:
        assert layer.pruned == tuple(e for e in free.pruned_of(layer.index) if e not in protected[layer.index])
    assert spared.pruned_count < 6
    assert spared.report["layers"]["0"]["kept_by_protection"] == [0]


@pytest.mark.parametrize("make_up", [True, False])
@pytest.mark.parametrize(
    ("scope", "scores", "protected", "kept"),
    [
        # Two of eight go: 0 and 1. Of the protected, 1 would have; it has the highest score of those that go.
        ("layer", {1: [0, 1, 2, 3, 4, 5, 6, 7]}, {1: {1, 2}}, {1: [1]}),
        # Everything that would have gone is protected.
        ("layer", {1: [0, 1, 2, 3, 4, 5, 6, 7]}, {1: {0, 1}}, {1: [0, 1]}),
        # Of equal scores the higher ids go, protected or not.
        ("layer", {1: [0, 0, 0, 3, 4, 5, 6, 7]}, {1: {0, 2}}, {1: [2]}),
        # The cut is the model's: layer 3 loses nobody but the protected.
        ("global", {1: [0, 1, 2, 6, 7, 8, 9, 10], 3: [3, 11, 12, 13, 14, 15, 16, 17]}, {3: {0, 1}}, {3: [0]}),
        # Each group has a cut of its own: 4 goes of the second, which is above the first group's.
        ("group", {0: [0, 1, 2, 3, 10, 11, 12, 13]}, {0: {1, 4}}, {0: [4]}),
    ],
)
def test_the_report_names_the_protected_that_would_have_gone_and_no_others(scope, scores, protected, kept, make_up):
    groups = 2 if scope == "group" else 1
    shapes = [LayerShape(index, 8, 2, groups, groups) for index in scores]
    stay = {index: frozenset(ids) for index, ids in protected.items()}
    budget = Budget.of_ratio("0.25", scope=scope, make_up=make_up, protected=stay)
    report = pruned(shapes, {index: np.array(row, dtype=float) for index, row in scores.items()}, budget).report
    found = {index: layer.get("kept_by_protection") for index, layer in report["layers"].items()}
    assert {int(index): ids for index, ids in found.items() if ids} == kept


def test_the_report_names_a_tie_with_another_layer_where_the_cut_is_the_models():
    shapes = (LayerShape(0, 4, 1), LayerShape(7, 4, 1))
    scores = {0: np.array([1.0, 2, 3, 4]), 7: np.array([5.0, 6, 1, 7])}
    report = pruned(shapes, scores, Budget.of_ratio("0.125", scope="global")).report
    assert report["layers"] == {"0": {"kept_by_id": [0]}}
    # A layer's own cut is no other's.
    report = pruned(shapes, scores, Budget.of_ratio("0.25")).report
    assert report["layers"] == {}


def test_the_papers_protected_mask_prunes_831_of_832():
    """DeepSeek-V2-Lite: 26 layers of 64 experts at 50 %; one super expert stays, and nobody goes in its place."""
    shapes = tuple(LayerShape(index, 64, 6) for index in range(1, 27))
    rng = np.random.default_rng(0)
    scores = {shape.index: rng.permutation(64).astype(float) for shape in shapes}
    scores[3][54] = -1.0  # frequency prunes L3E54
    assert pruned(shapes, scores, Budget.of_ratio("0.5")).pruned_count == 832
    protected = {3: frozenset({54})}
    mask = pruned(shapes, scores, Budget.of_ratio("0.5", protected=protected, make_up=False))
    assert mask.pruned_count == 831
    assert len(mask.pruned_of(3)) == 31
    assert pruned(shapes, scores, Budget.of_ratio("0.5", protected=protected)).pruned_count == 832


@given(st.data())
def test_a_budget_accepts_the_masks_of_prune_lowest_and_no_other_count(data):
    shapes = data.draw(strategies.model_shapes())
    budget = data.draw(strategies.budgets(shapes=shapes, protected=True))
    budget = Budget(budget.ratio, budget.keep, budget.protected, "layer", data.draw(st.booleans()))
    scores = {
        s.index: np.array(data.draw(st.lists(st.integers(0, 3), min_size=s.experts, max_size=s.experts)), dtype=float)
        for s in shapes
    }
    mask = pruned(shapes, scores, budget)
    budget.check_mask(mask, shapes)
    more = Mask.for_shapes(shapes, {shape.index: range(shape.experts) for shape in shapes})
    with pytest.raises(UsageError):
        budget.check_mask(more, shapes)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Budget(keep=3, scope="model"), "unknown budget scope 'model'; expected layer, group, global"),
        (lambda: Budget(keep=10, scope="group").check(GROUPED), "keep 10 is not the same for each of 3 router groups"),
        (lambda: Budget.of_ratio("0.2", scope="group").check(GROUPED), r"prunes nothing.*ratio ≥ 3/12"),
        (lambda: Budget(keep=2, scope="global").check(PLAIN), "keep 2 prunes 16 experts.*expected at most 15"),
        (
            lambda: Budget.of_ratio("0.01", scope="global").check(PLAIN),
            "prunes nothing; in 3 layers with 22 experts",
        ),
        (lambda: Budget(keep=4, scope="global").pruned_count(PLAIN[0]), "a global budget has no count per layer"),
        (
            lambda: Budget(keep=3, scope="global", protected={1: frozenset(range(8))}).check(PLAIN),
            "expected at most 9",
        ),
        (
            lambda: Budget(keep=6, protected={1: frozenset({0})}).check_mask(
                Mask.for_shapes(PLAIN[:1], {1: [0, 1]}), PLAIN[:1]
            ),
            "select pruned expert 0, which is protected; in mask, layer 1",
        ),
        (
            lambda: Budget.of_ratio("0.2", scope="global").check_mask(Mask.for_shapes(PLAIN, {1: [0]}), PLAIN),
            "select pruned 1 experts; in mask; expected 4, as the budget says",
        ),
    ],
)
def test_what_cannot_be_spent_is_refused_in_a_line(act, message):
    with pytest.raises(UsageError, match=message) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_only_what_is_not_usual_goes_into_a_record():
    assert Budget.of_ratio("0.50").to_json() == {"ratio": "0.5"}
    budget = Budget(keep=4, scope="global", protected={3: frozenset({5})}, make_up=False)
    assert budget.to_json() == {"keep": 4, "protected": {"3": [5]}, "make_up": False, "scope": "global"}


def test_the_report_of_a_mask_is_no_part_of_it():
    mask = pruned(PLAIN[:1], {1: np.zeros(8)}, Budget(keep=4))
    assert mask.report == {
        "score": "score",
        "layers": {"1": {"zero_scores": list(range(8)), "kept_by_id": [0, 1, 2, 3]}},
    }
    assert mask == Mask.for_shapes(PLAIN[:1], {1: [4, 5, 6, 7]})
    assert "report" not in mask.to_json()
