"""What is computed once for many requests: their inputs as tries, and the order in which a trie's tokens are fed.

Pure functions of token ids; nothing here knows a model. Inputs are sorted, so that those with a common beginning stand
together, and cut into walks. The distinct beginnings of a walk's inputs are a trie, whose nodes are numbered in
preorder: a subtree is one run of numbers. So any slice [first, last) of nodes can be fed at once behind the ancestors
of `first` alone, as every earlier ancestor of any node in it is one of those; and every node is fed exactly once.

N nodes of a trie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Piece", "Trie", "common_prefix", "pieces", "plan_walks", "sees", "trie_of"]

REPEATED = 32
"""A walk ends as soon as what the next one feeds again is at most this part of it."""

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Trie:
    """The distinct beginnings of some inputs.

    Attributes:
        token_N: the last token of each.
        parent_N: the node of all tokens but the last; -1 where there is one token.
        depth_N: tokens before the last, which is the position of the last.
        end_N: first node behind the subtree.
        scored: for each input, the nodes of its last tokens, as many as were wanted.
    """

    token_N: Numbers
    parent_N: Numbers
    depth_N: Numbers
    end_N: Numbers
    scored: tuple[Numbers, ...]

    def path(self, node: int) -> Numbers:
        """A node's ancestors, from the root down, and the node; none of -1."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parent_N[node])
        return np.array(nodes[::-1], dtype=np.int64)


@dataclass(frozen=True)
class Piece:
    """Nodes [first, last) of a trie, and the ancestors of the first, from the root down."""

    first: int
    last: int
    ancestors: Numbers


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with together."""
    shortest = min(len(one), len(other))
    return next((at for at in range(shortest) if one[at] != other[at]), shortest)


def plan_walks(inputs: Sequence[Sequence[int]], tokens: int, own: Sequence[int] | None = None) -> list[list[int]]:
    """Cut requests into walks of at least `tokens` distinct tokens, in the order of their inputs.

    A walk does not end between equal inputs, nor where the next one would have to feed much of it again.

    Args:
        inputs: tokens of each request.
        tokens: distinct tokens of a walk that may end.
        own: tokens of each request besides, which it shares with none.

    Returns:
        Indices into `inputs`, each exactly once; equal inputs keep their order.
    """
    walks: list[list[int]] = []
    size, previous = 0, None
    for index in sorted(range(len(inputs)), key=lambda index: list(inputs[index])):
        shared = common_prefix(previous, inputs[index]) if previous is not None else 0
        if previous is None or (size >= tokens and shared * REPEATED <= size and previous != inputs[index]):
            walks.append([])
            size, shared = 0, 0
        walks[-1].append(index)
        size += len(inputs[index]) - shared + (own[index] if own is not None else 0)
        previous = inputs[index]
    return walks


def trie_of(inputs: Sequence[Sequence[int]], wanted: Sequence[int]) -> Trie:
    """The trie of sorted inputs, in preorder.

    Args:
        inputs: sorted; none is empty.
        wanted: how many of each input's last tokens are scored.
    """
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    scored: list[Numbers] = []
    path: list[int] = []  # the nodes of the previous input
    previous: Sequence[int] = ()
    for own, count in zip(inputs, wanted, strict=True):
        shared = common_prefix(previous, own)
        for node in path[shared:]:
            ends[node] = len(tokens)
        del path[shared:]
        for depth in range(shared, len(own)):
            parents.append(path[-1] if path else -1)
            path.append(len(tokens))
            tokens.append(own[depth])
            depths.append(depth)
            ends.append(-1)
        scored.append(np.array(path[len(own) - count :], dtype=np.int64))
        previous = own
    for node in path:
        ends[node] = len(tokens)
    columns = (np.array(column, dtype=np.int64) for column in (tokens, parents, depths, ends))
    token_N, parent_N, depth_N, end_N = columns
    return Trie(token_N, parent_N, depth_N, end_N, tuple(scored))


def pieces(trie: Trie, size: int) -> Iterator[Piece]:
    """The trie in slices of `size` nodes, the last with the rest."""
    for first in range(0, len(trie.token_N), size):
        yield Piece(first, min(first + size, len(trie.token_N)), trie.path(int(trie.parent_N[first])))


def sees(trie: Trie, rows: Numbers, columns: Numbers) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of the nodes `columns` each of the nodes `rows` attends to: its ancestors and itself."""
    return (columns <= rows[:, None]) & (rows[:, None] < trie.end_N[columns])
