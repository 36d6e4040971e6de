"""Batches are a pure function of lengths and budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prunebench.evaluate.batches import plan_batches

LENGTHS = st.lists(st.integers(1, 300), max_size=60)


@given(LENGTHS, st.integers(1, 1000))
def test_every_request_is_in_exactly_one_batch(lengths, budget):
    batches = plan_batches(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 1000))
def test_a_batch_of_several_stays_within_the_budget_when_padded(lengths, budget):
    for batch in plan_batches(lengths, budget):
        assert batch
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= budget


@given(LENGTHS, st.integers(1, 1000))
def test_longest_first_and_equal_lengths_keep_their_order(lengths, budget):
    order = [index for batch in plan_batches(lengths, budget) for index in batch]
    assert [(-lengths[index], index) for index in order] == sorted((-length, i) for i, length in enumerate(lengths))
