"""2609.04575: paired McNemar tests of flips; 2,000 MMLU questions, 99 and 92 discordant, p = 0.66."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar

from prunebench.analysis.mcnemar import mcnemar
from prunebench.errors import UsageError

counts = st.integers(0, 300)


def outcomes(a, b):
    """Probability and distance from even of every split of the discordant items, by a plain loop."""
    n = a + b
    return [(math.comb(n, k) / 2**n, abs(2 * k - n)) for k in range(n + 1)]


def test_the_flips_of_table_5_give_the_printed_p():
    test = mcnemar(99, 92)
    assert f"{test.exact:.2f}" == "0.66"
    assert (test.a_only, test.b_only) == (99, 92)
    assert 100 * (test.a_only - test.b_only) / 2000 == pytest.approx(0.35)


@given(counts, counts)
def test_exact_is_statsmodels(a, b):
    theirs = statsmodels_mcnemar(np.array([[500, a], [b, 500]]), exact=True).pvalue
    assert mcnemar(a, b).exact == pytest.approx(min(1.0, theirs), abs=1e-12)


@given(counts, counts)
def test_both_p_by_adding_up_all_splits(a, b):
    test, own = mcnemar(a, b), abs(a - b)
    further = math.fsum(p for p, distance in outcomes(a, b) if distance > own)
    as_far = math.fsum(p for p, distance in outcomes(a, b) if distance == own)
    assert test.exact == pytest.approx(further + as_far, abs=1e-12)
    assert test.mid_p == pytest.approx(further + as_far / 2 if a + b else 1.0, abs=1e-12)


@given(counts, counts)
def test_swapping_the_runs_changes_nothing_but_the_counts(a, b):
    one, other = mcnemar(a, b), mcnemar(b, a)
    assert (one.exact, one.mid_p) == (other.exact, other.mid_p)
    assert one.mid_p <= one.exact <= 1


def test_no_discordant_item_says_nothing():
    assert (mcnemar(0, 0).exact, mcnemar(0, 0).mid_p) == (1.0, 1.0)


def test_many_flips_are_no_trouble():
    assert 0 < mcnemar(7100, 6942).exact < 1
    assert mcnemar(14_042, 0).exact == 0.0  # 2^-14041 is below the smallest float


def test_negative_counts_are_refused():
    with pytest.raises(UsageError, match="discordant counts -1 and 2"):
        mcnemar(-1, 2)
