"""Rank correlation, and what chance alone would give: for a handful of points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["exact_p", "rank_correlation"]

_MOST: Final = 8  # points: 8! orders are tried out
_DIGITS: Final = 9
_ROUNDING: Final = 1e-9


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks about their mean; values that are equal but for rounding share the mean of theirs."""
    values_N = np.round(np.asarray(values, dtype=np.float64), _DIGITS)
    below_N = np.sum(values_N[:, None] > values_N[None, :], axis=1)
    equal_N = np.sum(values_N[:, None] == values_N[None, :], axis=1)
    ranks_N: NDArray[np.float64] = below_N + equal_N / 2 - len(values_N) / 2
    return ranks_N


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's ρ; 0 where one side has a single value."""
    a, b = _ranks(one), _ranks(other)
    length = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / length if length else 0.0


def exact_p(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p of ρ: the share of all orders of one side whose |ρ| is at least as large.

    Raises:
        ValueError: for more than eight points.
    """
    if len(one) > _MOST:
        raise ValueError(f"{len(one)} points")
    a, b = _ranks(one), _ranks(other)
    products = np.abs(b[np.array(list(permutations(range(len(b)))))] @ a)
    return float(np.mean(products >= abs(a @ b) - _ROUNDING))
