"""Holm against statsmodels and a plain loop; what a verdict, a mark and an established effect are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests

from prunebench.analysis.multiplicity import Verdict, holm, mark, same_sign, verdict, within_families
from prunebench.errors import UsageError

probabilities = st.lists(st.floats(0, 1), min_size=1, max_size=40)


def plain(p):
    """Holm's rule as written: reject the smallest at alpha / m, the next at alpha / (m - 1), until one is not."""
    order = sorted(range(len(p)), key=lambda at: p[at])
    adjusted, largest = [0.0] * len(p), 0.0
    for step, at in enumerate(order):
        largest = max(largest, (len(p) - step) * p[at])
        adjusted[at] = min(1.0, largest)
    return adjusted


@given(probabilities)
def test_holm_is_statsmodels_and_the_plain_loop(p):
    ours = holm(p)
    np.testing.assert_allclose(ours, multipletests(p, method="holm")[1], atol=1e-12)
    np.testing.assert_allclose(ours, plain(p), atol=1e-12)


@given(probabilities, st.randoms(use_true_random=False))
def test_the_order_of_contrasts_changes_nothing(p, random):
    order = list(range(len(p)))
    random.shuffle(order)
    assert holm([p[at] for at in order]).tolist() == [holm(p)[at] for at in order]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1)), min_size=1, max_size=30))
def test_families_are_corrected_apart_and_never_more_than_all_together(named):
    families, p = zip(*named, strict=True)
    own = within_families(p, families)
    for family in set(families):
        at = [number for number, name in enumerate(families) if name == family]
        assert own[at].tolist() == holm([p[number] for number in at]).tolist()
    assert (own <= holm(p) + 1e-15).all()
    assert (own >= np.array(p) - 1e-15).all()


def test_no_contrast_is_no_error():
    assert holm([]).tolist() == []
    assert within_families([], []).tolist() == []


@pytest.mark.parametrize("p", [[-0.1], [1.1], [float("nan")]])
def test_what_is_no_probability_is_refused(p):
    with pytest.raises(UsageError, match="no probability"):
        holm(p)


def test_verdicts_and_marks():
    assert verdict(0.2, 0.01, 0.01) is Verdict.NONE
    assert verdict(0.01, 0.06, 0.3) is Verdict.LOST
    assert verdict(0.01, 0.04, 0.3) is Verdict.TABLE
    assert verdict(0.01, 0.04, 0.04) is Verdict.BOTH
    assert [mark(0.01, one) for one in (*Verdict, None)] == ["‡", "†", "*", "", "*"]
    assert mark(0.2, None) == ""


def test_an_effect_is_established_by_one_sign_on_every_draw():
    assert same_sign([0.5]) is None
    for signs in itertools.product((-1.0, 0.0, 1.0), repeat=3):
        assert same_sign(signs) == (len(set(signs)) == 1 and signs[0] != 0)
    assert same_sign([1e-12, 0.3]) is False, "rounding is no sign"
