"""The setting whose bytes match another's, and the gap that is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunebench.errors import UsageError
from prunebench.storage import gap_text, match


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 1000), st.floats(0, 1))
def test_no_candidate_is_nearer(totals, target, tolerance):
    found = match(list(enumerate(totals)), target, tolerance=tolerance)
    assert totals[found.setting] == found.total
    assert all(abs(found.total - target) <= abs(total - target) for total in totals)
    assert found.matched == (abs(found.total - target) <= tolerance * target)
    assert found.gap == pytest.approx(found.total / target - 1)


def test_of_two_as_near_the_smaller_is_taken_and_the_first_of_equals():
    assert match([("a", 102), ("b", 98), ("c", 98)], 100).setting == "b"


def test_the_gap_is_always_there():
    near, far = match([("a", 98)], 100), match([("a", 103)], 100)
    assert (near.matched, far.matched) == (True, False)
    assert near.text() == "-2.00 %, matched within 2 %"
    assert far.text() == "+3.00 %, NOT matched within 2 %"
    assert far.to_json()["gap"] == pytest.approx(0.03)
    assert gap_text(0) == "+0.00 %"


@pytest.mark.parametrize(
    ("candidates", "target", "tolerance"), [([], 100, 0.02), ([("a", 1)], 0, 0.02), ([("a", 1)], 1, -1.0)]
)
def test_what_cannot_be_matched_is_refused(candidates, target, tolerance):
    with pytest.raises(UsageError):
        match(candidates, target, tolerance=tolerance)
