"""The item bootstrap: resample a task's items with replacement, recompute, take percentiles.

Every task is its own stratum with its own random stream, keyed by (seed, suite, task): runs on the same items share
their resamples, so a paired contrast is a subtraction, and which other tasks are present changes nothing. The stream is
the raw output of PCG64, which numpy promises to keep, so that a published interval can be recomputed years later.

Items that belong together (samples of one problem, questions on one passage) are a cluster and are drawn together.

Intervals cover the noise of the test items only, not of the calibration text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prunebench.errors import UsageError

__all__ = [
    "LEVEL",
    "RESAMPLES",
    "SEED",
    "Interval",
    "Sampled",
    "confidence_interval",
    "item_counts",
    "resample_counts",
    "sampled",
    "sampled_columns",
]

RESAMPLES: Final = 10_000
SEED: Final = 0
LEVEL: Final = 0.95
TINY: Final = 1e-12  # differences below this are rounding, not evidence: they count as zero

_CHUNK = 2_000_000  # resampled items held at once: about 50 MB while counting
_CACHED = 4_000_000  # counts of small strata are kept between runs: at most 16 x 8 MB

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A number with its percentile interval; n items stand behind it."""

    value: float
    low: float
    high: float
    n: int

    def to_json(self) -> dict[str, float | int]:
        """The form of `metrics` in a record."""
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.n}


@dataclass(frozen=True, eq=False)
class Sampled:
    """A statistic: its value on the items, on each of B resamples, and the number n of items."""

    value: float
    draws_B: Floats
    n: int

    def interval(self, level: float = LEVEL) -> Interval:
        """The percentile interval (linear interpolation between order statistics)."""
        tail = 50.0 * (1.0 - level)
        low, high = np.percentile(self.draws_B, [tail, 100.0 - tail])
        return Interval(self.value, float(low), float(high), self.n)

    def p_value(self) -> float:
        """Two-sided bootstrap p for "this is zero": twice the smaller tail, ties in both, never below 2/B."""
        smaller = min(int(np.count_nonzero(self.draws_B < TINY)), int(np.count_nonzero(self.draws_B > -TINY)))
        return min(1.0, 2 * max(smaller, 1) / len(self.draws_B))

    def minus(self, other: Sampled) -> Sampled:
        """The paired difference: both were computed on the same resamples."""
        return Sampled(self.value - other.value, self.draws_B - other.draws_B, self.n)

    def over(self, other: Sampled) -> Sampled:
        """The paired ratio."""
        return Sampled(self.value / other.value, self.draws_B / other.draws_B, self.n)

    def times(self, factor: float) -> Sampled:
        """A multiple, such as 100 for percent."""
        return Sampled(factor * self.value, factor * self.draws_B, self.n)

    def log(self) -> Sampled:
        """The natural logarithm; a difference of two is the logarithm of their ratio."""
        return Sampled(float(np.log(self.value)), np.log(self.draws_B), self.n)

    @classmethod
    def macro_mean(cls, parts: Sequence[Sampled]) -> Sampled:
        """The unweighted mean over tasks, masks or draws; n is the total."""
        return cls(
            float(np.mean([part.value for part in parts])),
            np.mean([part.draws_B for part in parts], axis=0),
            sum(part.n for part in parts),
        )


def _stream(seed: int, suite: str, task: str) -> np.random.PCG64:
    key = hashlib.blake2b(f"{seed}\0{suite}\0{task}".encode(), digest_size=16).digest()
    return np.random.PCG64(int.from_bytes(key, "big"))


def resample_counts(
    seed: int, suite: str, task: str, n: int, resamples: int = RESAMPLES
) -> Iterator[NDArray[np.uint16]]:
    """How often each of n items was drawn, in blocks of rows that together are (B, n); memory is bounded by the block.

    An index is the high half of a 32-bit draw times n: its bias is below n / 2^32.
    """
    stream = _stream(seed, suite, task)
    rows = max(1, _CHUNK // n)
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        raw = stream.random_raw((size * n + 1) // 2).astype("<u8").view("<u4")[: size * n].astype(np.uint64)
        index = ((raw * np.uint64(n)) >> np.uint64(32)).astype(np.intp)
        index += np.repeat(np.arange(size, dtype=np.intp) * n, n)
        yield np.bincount(index, minlength=size * n).reshape(size, n).astype(np.uint16)


@lru_cache(maxsize=16)
def _kept_counts(seed: int, suite: str, task: str, n: int, resamples: int) -> tuple[NDArray[np.uint16], ...]:
    return tuple(resample_counts(seed, suite, task, n, resamples))


def item_counts(
    clusters: ArrayLike, *, suite: str = "", task: str = "", seed: int = SEED, resamples: int = RESAMPLES
) -> Iterator[NDArray[np.uint16]]:
    """How often each of N items is in each resample of a task, in blocks of rows that together are (B, N).

    For statistics that are no ratio of sums, such as a rank or a best threshold.

    Args:
        clusters: the cluster of each item, (N,), any labels; items of one are drawn together.
        suite: with `task` and `seed`, the key of the random stream.
        task: see `suite`.
        seed: see `suite`.
        resamples: B.
    """
    place_N, groups = _places(clusters)
    for counts in resample_counts(seed, suite, task, groups, resamples):
        yield counts if groups == len(place_N) else counts[:, place_N]


def _places(clusters: ArrayLike) -> tuple[NDArray[np.intp], int]:
    """The number of each item's cluster, counted by first appearance, and how many clusters there are."""
    _, first, inverse = np.unique(np.asarray(clusters), return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.intp)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)], len(first)


def _weighted_sums(columns_NC: Floats, seed: int, suite: str, task: str, resamples: int) -> Floats:
    """Sum of each column over each resample, (B, C)."""
    n = len(columns_NC)
    source = _kept_counts if n * resamples <= _CACHED else resample_counts
    blocks = source(seed, suite, task, n, resamples)
    return np.concatenate([counts.astype(np.float64) @ columns_NC for counts in blocks])


def sampled_columns(
    values_NC: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    clusters: ArrayLike | None = None,
    suite: str = "",
    task: str = "",
    seed: int = SEED,
    resamples: int = RESAMPLES,
) -> list[Sampled]:
    """A task's statistic for many runs on the same items, with the resamples drawn once.

    Args:
        values_NC: one number per item and run. The order of items is part of the meaning: runs to be paired must agree
            on it.
        weights: None for means of values; the scored tokens per item, (N,), for exp(Σ values / Σ weights).
        clusters: which items are drawn together, (N,), any labels; None if each is alone. With clusters of different
            sizes a mean is a ratio of two sums that both vary.
        suite: with `task` and `seed`, the key of the random stream.
        task: see `suite`.
        seed: see `suite`.
        resamples: B.

    Raises:
        UsageError: without items.
    """
    values_NC = np.asarray(values_NC, dtype=np.float64)
    if values_NC.ndim != 2 or not len(values_NC):
        raise UsageError("no items to resample", where=f"{suite}/{task}", expected="at least one item")
    n = len(values_NC)
    own_N = np.ones(n) if weights is None else np.asarray(weights, dtype=np.float64)
    place_N, groups = (np.arange(n), n) if clusters is None else _places(clusters)
    columns = np.concatenate([values_NC, own_N[:, None]], axis=1)
    if groups < n:
        own = columns
        columns = np.zeros((groups, own.shape[1]))
        np.add.at(columns, place_N, own)
    # Without weights and clusters every resample has n items, and one column less is summed.
    plain = weights is None and groups == n
    sums_BC = _weighted_sums(columns[:, :-1] if plain else columns, seed, suite, task, resamples)
    draws_BC = sums_BC / n if plain else sums_BC[:, :-1] / sums_BC[:, -1:]
    values_C = np.array([column.sum() for column in values_NC.T]) / own_N.sum()
    if weights is not None:
        with np.errstate(over="ignore"):
            draws_BC, values_C = np.exp(draws_BC), np.exp(values_C)
    # Copies, so that keeping one run's draws does not keep all.
    return [Sampled(float(value), draws_BC[:, at].copy(), n) for at, value in enumerate(values_C)]


def sampled(
    values: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    clusters: ArrayLike | None = None,
    suite: str = "",
    task: str = "",
    seed: int = SEED,
    resamples: int = RESAMPLES,
) -> Sampled:
    """A task's statistic for one run: `values` is (N,), the rest is as for `sampled_columns`."""
    column = np.asarray(values, dtype=np.float64).reshape(-1, 1)
    key: dict[str, Any] = {"suite": suite, "task": task, "seed": seed, "resamples": resamples}
    return sampled_columns(column, weights, clusters=clusters, **key)[0]


def confidence_interval(
    values: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    suite: str = "",
    task: str = "",
    seed: int = SEED,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> Interval:
    """The value of one metric of one run with its interval; arguments as for `sampled`."""
    return sampled(values, weights, suite=suite, task=task, seed=seed, resamples=resamples).interval(level)
