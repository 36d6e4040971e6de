"""Drift between groups of masks, against sets written out."""

from __future__ import annotations

from fractions import Fraction

import pytest

from prunebench.analysis.drift import Drifts, share_differing, splits_as_far
from prunebench.errors import UsageError
from prunebench.mask import LayerShape, Mask

SHAPES = (LayerShape(index=1, experts=8, top_k=2),)


def mask(*pruned: int) -> Mask:
    return Mask.for_shapes(SHAPES, {1: pruned})


def test_shares_are_of_pruned_experts():
    first, second = (mask(0, 1, 2, 3), mask(0, 1, 2, 4)), (mask(0, 1, 5, 6), mask(0, 1, 5, 7))
    drifts = Drifts.of(first, second)
    assert drifts.first == drifts.second == (Fraction(1, 4),)
    assert drifts.across == (Fraction(1, 2),) * 4
    assert (drifts.excess, drifts.times, drifts.apart) == (Fraction(1, 4), 2, 1)
    # Of three splits into pairs, the domains' own is the furthest apart.
    assert splits_as_far(first, second) == (1, 3)


def test_draws_that_move_nothing_have_no_ratio():
    same = (mask(0, 1), mask(0, 1))
    drifts = Drifts.of(same, (mask(0, 2), mask(1, 2)))
    assert drifts.times is None
    assert drifts.to_json()["times"] is None
    assert drifts.apart == 0
    assert Drifts.of((mask(0, 1), mask(2, 3)), (mask(0, 1), mask(2, 3))).excess == Fraction(-1, 2)


def test_masks_of_different_counts_are_refused():
    with pytest.raises(UsageError, match="the masks prune 1 and 2 experts"):
        share_differing(mask(0), mask(0, 1))
