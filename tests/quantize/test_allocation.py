from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunebench.errors import UsageError
from prunebench.quantize import allocate, costs


@given(
    cost=st.integers(3, 6).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=n, max_size=n)
    ),
    mean=st.sampled_from([2, 3, 4]),
)
def test_no_other_allocation_costs_less(cost, mean):
    cost_EW = np.asarray(cost, dtype=np.float64)
    experts = len(cost)
    possible = [chosen for chosen in itertools.product((2, 3, 4), repeat=experts) if sum(chosen) <= mean * experts]
    # One at 3 and one at 4 bits need 3 more than the fewest.
    if experts * (mean - 2) >= 3:
        possible = [chosen for chosen in possible if {3, 4} <= set(chosen)]
    least = min(sum(cost_EW[e, bits - 2] for e, bits in enumerate(chosen)) for chosen in possible)
    found = allocate(cost_EW, mean)
    assert found in possible
    assert sum(cost_EW[e, bits - 2] for e, bits in enumerate(found)) == least


def test_who_is_asked_more_and_loses_more_gets_more_bits():
    share, gate = np.array([0.4, 0.3, 0.2, 0.05, 0.05]), np.array([0.4, 0.3, 0.1, 0.01, 0.01])
    error = np.outer([1.0, 1.0, 1.0, 1.0, 1.0], [4.0, 2.0, 1.0])
    assert allocate(costs(share, gate, error), 3) == (4, 4, 3, 2, 2)


def test_a_cost_is_the_formula_s():
    found = costs(np.array([0.25]), np.array([0.16]), np.array([[3.0, 2.0, 1.0]]))
    assert found == pytest.approx(np.array([[0.25 * 0.064 * 9, 0.25 * 0.064 * 4, 0.25 * 0.064]]))


@pytest.mark.parametrize(("mean", "value"), [(1, 1.0), (5, 1.0), (3, np.nan)])
def test_impossible_allocations_are_refused(mean, value):
    with pytest.raises(UsageError, match="no allocation"):
        allocate(np.full((4, 3), value), mean)
