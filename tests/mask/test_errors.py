"""An error is one line: what; where; expected; how to fix it; and each family has its exit code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunebench.errors import IntegrityError, PrerequisiteError, PruneBenchError, UsageError


def test_the_parts_come_in_order_and_empty_ones_are_left_out():
    full = UsageError("what", where="layer 3", expected="that", fix="do this")
    assert str(full) == "what; in layer 3; expected that; fix: do this"
    assert str(UsageError("what", fix="do this")) == "what; fix: do this"
    assert str(UsageError("what")) == "what"


@given(st.text(), st.text(), st.text(), st.text())
def test_a_message_is_always_one_line(what, where, expected, fix):
    assert len(str(UsageError(what, where=where, expected=expected, fix=fix)).splitlines()) <= 1


@pytest.mark.parametrize(("family", "code"), [(UsageError, 2), (PrerequisiteError, 3), (IntegrityError, 1)])
def test_families_have_their_exit_codes(family, code):
    assert issubclass(family, PruneBenchError)
    assert family("x").exit_code == code
