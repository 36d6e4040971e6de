"""The count rule, exactly floor(ratio · E) on decimals, and what a budget refuses before any work."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prunebench.errors import UsageError
from prunebench.mask import Budget, LayerShape

ratios = st.integers(1, 9999).map(lambda n: f"{n / 10_000:.4f}")


@given(ratios, st.integers(2, 600))
def test_a_ratio_removes_its_exact_floor(ratio, experts):
    exact = Fraction(ratio) * experts // 1
    assume(0 < exact)
    assert Budget.of_ratio(ratio).pruned_count(LayerShape(0, experts, 1)) == exact
    assert Budget.of_ratio(float(ratio)).pruned_count(LayerShape(0, experts, 1)) == exact


@pytest.mark.parametrize(
    ("ratio", "experts", "pruned"), [(0.3, 10, 3), (0.29, 100, 29), (0.57, 100, 57), (0.5, 7, 3), (0.7, 10, 7)]
)
def test_decimals_do_not_lose_an_expert_to_binary_rounding(ratio, experts, pruned):
    assert Budget.of_ratio(ratio).pruned_count(LayerShape(0, experts, 1)) == pruned


@given(st.integers(2, 600), st.data())
def test_keep_leaves_exactly_that_many(experts, data):
    keep = data.draw(st.integers(1, experts - 1))
    assert experts - Budget(keep=keep).pruned_count(LayerShape(0, experts, 1)) == keep


@given(ratios, st.integers(2, 64), st.integers(1, 8))
def test_a_budget_never_leaves_fewer_than_top_k(ratio, experts, top_k):
    shape = LayerShape(4, experts, min(top_k, experts))
    exact = Fraction(ratio) * experts // 1
    if 0 < exact <= experts - shape.top_k:
        assert Budget.of_ratio(ratio).pruned_count(shape) == exact
    else:
        with pytest.raises(UsageError, match=f"layer 4 with {experts} experts"):
            Budget.of_ratio(ratio).pruned_count(shape)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Budget.of_ratio(1.5), "ratio 1.5 is impossible; expected a number above 0 and below 1"),
        (lambda: Budget.of_ratio("0"), "ratio 0 is impossible"),
        (lambda: Budget.of_ratio(1), "ratio 1 is impossible"),
        (lambda: Budget.of_ratio("-0.5"), "ratio -0.5 is impossible"),
        (lambda: Budget.of_ratio("nan"), "is impossible"),
        (lambda: Budget.of_ratio("half"), "ratio 'half' is not a number"),
        (lambda: Budget(keep=0), "keep 0 is impossible"),
        (Budget, "exactly one of ratio and keep"),
        (lambda: Budget.of_ratio(0.5, keep=3), "exactly one of ratio and keep"),
        (lambda: Budget.of_ratio(0.1).pruned_count(LayerShape(2, 8, 2)), "ratio 0.1 prunes nothing; in layer 2"),
        (lambda: Budget(keep=8).pruned_count(LayerShape(2, 8, 2)), "keep 8 prunes nothing"),
        (lambda: Budget(keep=9).pruned_count(LayerShape(2, 8, 2)), "keep 9 prunes nothing"),
        (lambda: Budget.of_ratio(0.9).pruned_count(LayerShape(2, 8, 2)), "fix: prune at most 6 of 8"),
        (lambda: Budget(keep=1).pruned_count(LayerShape(2, 8, 2)), "expected at least top-k = 2 survivors"),
        (lambda: Budget(keep=1).check([LayerShape(2, 8, 1), LayerShape(3, 8, 2)]), "in layer 3"),
    ],
    ids=[
        *("above one", "zero", "one", "negative", "nan", "word", "keep zero", "neither", "both"),
        *("nothing", "all kept", "more than all", "below top-k", "keep below top-k", "any layer"),
    ],
)
def test_an_impossible_budget_is_refused_in_one_line(make, message):
    with pytest.raises(UsageError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kept_groups", "fewest"), [(1, 16), (2, 8), (4, 4)])
def test_a_router_with_groups_needs_survivors_in_every_group(kept_groups, fewest):
    shape = LayerShape(0, 32, 4, groups=4, kept_groups=kept_groups)
    assert Budget(keep=fewest).pruned_count(shape) == 32 - fewest
    with pytest.raises(UsageError, match=f"leaves {fewest - 1} experts"):
        Budget(keep=fewest - 1).pruned_count(shape)


def test_protected_experts_must_fit_among_the_survivors():
    shape = LayerShape(0, 8, 2)
    fits = Budget(keep=3, protected={0: frozenset({1, 2, 3}), 9: frozenset(range(8))})
    assert fits.pruned_count(shape) == 5
    with pytest.raises(UsageError, match=r"keep 3 leaves 3 experts; in layer 0 .*expected the 4 protected ones"):
        Budget(keep=3, protected={0: frozenset({1, 2, 3, 4})}).pruned_count(shape)


def test_a_budget_is_recorded_as_it_was_asked_for():
    assert Budget.of_ratio(0.5).to_json() == Budget.of_ratio("0.50").to_json() == {"ratio": "0.5"}
    assert Budget.of_ratio("1e-2").to_json() == {"ratio": "0.01"}
    protected = {2: frozenset({3, 1}), 0: frozenset({5})}
    assert Budget(keep=4, protected=protected).to_json() == {"keep": 4, "protected": {"0": [5], "2": [1, 3]}}


def test_group_routers_are_named_in_the_refusal():
    with pytest.raises(UsageError, match=r"at least 8 survivors \(top-k = 4 from 2 of 4 groups\)"):
        Budget(keep=7).pruned_count(LayerShape(2, 16, 4, groups=4, kept_groups=2))


@pytest.mark.parametrize(
    ("protected", "message"),
    [({9: frozenset({1})}, "layer 9 is no MoE layer"), ({2: frozenset({8})}, "protected expert 8 does not exist")],
)
def test_only_experts_that_exist_can_be_protected(protected, message):
    with pytest.raises(UsageError, match=message):
        Budget(keep=4, protected=protected).check([LayerShape(2, 8, 2)])
