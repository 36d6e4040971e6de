"""How alike two selections are: experts pruned by both masks, and rank correlation of scores."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prunebench.errors import UsageError
from prunebench.mask import Mask

__all__ = ["agreement", "expected_agreement", "midranks", "spearman"]


def agreement(one: Mask, other: Mask, layer: int | None = None) -> Fraction:
    """The share of the experts pruned by one mask that the other prunes too, over all layers or in one.

    Raises:
        UsageError: for masks of different models, or that prune different numbers of experts.
    """
    if one.model_shape != other.model_shape:
        raise UsageError(f"masks of different shapes ({one.model_shape} and {other.model_shape})")
    sets = [
        {(own.index, expert) for own in mask.layers if layer in (None, own.index) for expert in own.pruned}
        for mask in (one, other)
    ]
    if len(sets[0]) != len(sets[1]) or not sets[0]:
        raise UsageError(f"the masks prune {len(sets[0])} and {len(sets[1])} experts", expected="as many, above zero")
    return Fraction(len(sets[0] & sets[1]), len(sets[0]))


def expected_agreement(mask: Mask) -> Fraction:
    """The agreement of a mask with random ones that prune as many experts of each layer."""
    pruned = sum(len(layer.pruned) for layer in mask.layers)
    return sum((Fraction(len(layer.pruned) ** 2, layer.experts) for layer in mask.layers), Fraction(0)) / pruned


def midranks(values: ArrayLike) -> NDArray[np.float64]:
    """Ranks from 1, ties sharing the mean of theirs."""
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray(((last - counts + 1 + last) / 2)[inverse.reshape(-1)])


def spearman(one: ArrayLike, other: ArrayLike) -> float:
    """Spearman's ρ: Pearson's correlation of the midranks.

    Raises:
        UsageError: for series of different lengths, of fewer than two values, or that are constant.
    """
    x, y = midranks(one), midranks(other)
    if len(x) != len(y) or len(x) < 2:
        raise UsageError(f"ranks of {len(x)} and {len(y)} values", expected="two series of one length, at least 2")
    x, y = x - x.mean(), y - y.mean()
    norm = math.sqrt(float(x @ x) * float(y @ y))
    if not norm:
        raise UsageError("a series that is constant has no ranks to correlate", expected="different values")
    return float(x @ y) / norm
