"""Walks against the definition of a trie, by plain loops over all beginnings."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunebench.evaluate.walks import REPEATED, common_prefix, pieces, plan_walks, sees, trie_of

# Few different tokens, so that beginnings are often common.
inputs = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14)


def beginnings(sequences):
    return {tuple(own[:size]) for own in sequences for size in range(1, len(own) + 1)}


def spelled(trie, node):
    tokens = []
    while node >= 0:
        tokens.append(int(trie.token_N[node]))
        node = int(trie.parent_N[node])
    return tuple(tokens[::-1])


@given(inputs, st.integers(1, 5))
def test_a_trie_has_every_beginning_once_and_says_where_each_input_ends(sequences, wanted):
    sequences = sorted(sequences)
    counts = [min(wanted, len(own)) for own in sequences]
    trie = trie_of(sequences, counts)
    nodes = [spelled(trie, node) for node in range(len(trie.token_N))]
    assert len(nodes) == len(set(nodes))
    assert set(nodes) == beginnings(sequences)
    assert nodes == sorted(nodes)  # preorder
    assert [len(own) - 1 for own in nodes] == trie.depth_N.tolist()
    for own, count, scored in zip(sequences, counts, trie.scored, strict=True):
        assert [nodes[node] for node in scored] == [tuple(own[: len(own) - count + n + 1]) for n in range(count)]


@given(inputs, st.integers(1, 12))
def test_every_node_is_fed_once_behind_all_its_ancestors_and_sees_only_them(sequences, size):
    sequences = sorted(sequences)
    trie = trie_of(sequences, [1] * len(sequences))
    nodes = [spelled(trie, node) for node in range(len(trie.token_N))]
    fed, before = [], set()
    for piece in pieces(trie, size):
        rows = np.arange(piece.first, piece.last)
        assert 1 <= len(rows) <= size
        columns = np.concatenate([piece.ancestors, rows])
        held = {nodes[column] for column in columns}
        for row, own in zip(rows, sees(trie, rows, columns), strict=True):
            seen = [nodes[column] for column in columns[own]]
            assert seen == [nodes[row][:length] for length in range(1, len(nodes[row]) + 1)]
            assert set(seen) <= held
        # No column is there that the first node does not need.
        assert [nodes[column] for column in piece.ancestors] == [
            nodes[piece.first][:length] for length in range(1, len(nodes[piece.first]))
        ]
        # What it needs was in the piece before, or already held then.
        assert set(piece.ancestors.tolist()) <= before
        before = set(columns.tolist())
        fed += rows.tolist()
    assert fed == list(range(len(nodes)))


@given(inputs, st.integers(1, 40), st.booleans())
def test_walks_are_the_sorted_requests_cut_where_little_is_repeated(sequences, tokens, with_own):
    own = [len(sequence) for sequence in sequences] if with_own else None
    walks = plan_walks(sequences, tokens, own)
    order = [index for walk in walks for index in walk]
    assert order == sorted(range(len(sequences)), key=lambda index: (sequences[index], index))
    assert walks == plan_walks(sequences, tokens, own)
    for walk, following in pairwise(walks):
        size = len(beginnings([sequences[index] for index in walk])) + sum(own[index] for index in walk if own)
        shared = common_prefix(sequences[walk[-1]], sequences[following[0]])
        assert size >= tokens
        assert shared * REPEATED <= size
        assert sequences[walk[-1]] != sequences[following[0]]


def test_a_walk_goes_on_where_the_next_one_would_repeat_much():
    shot = list(range(100))
    asked = [[*shot, 200 + number] for number in range(50)]
    assert len(plan_walks(asked, 10)) == 1  # 100 tokens again for 150
    apart = [[300 + number, *range(100)] for number in range(50)]
    assert [len(walk) for walk in plan_walks(apart, 500)] == [5] * 10


def test_nothing_asked_is_no_walk():
    assert plan_walks([], 100) == []


@pytest.mark.parametrize(("one", "other", "length"), [("", "", 0), ("ab", "ab", 2), ("ab", "abc", 2), ("ab", "ac", 1)])
def test_common_prefix(one, other, length):
    assert common_prefix(one.encode(), other.encode()) == length
