"""Whether a criterion's scores order experts by the damage that deleting each does (2610.41366 App. E.5).

Four rank correlations (Spearman) over the same experts: of the scores with the damage (`test`), of scores from another
calibration draw with the damage on other text (`retest`), of the two scores, and of the two damages. No correlation can
be expected above `ceiling`, the geometric mean of the last two: what noise in either series leaves (the classical
bound for attenuated correlations; for ranks an approximation, ours). Each is given by layer, as the mean over the
layers (2610.41366 App. E.5, 2609.30465 App. C.7.3), and over all experts pooled, whose scores and damages are then
compared across layers as they are. Intervals resample experts within each layer, the same ones for every criterion;
they say how much hangs on which experts were looked at, not on the text.

N experts, B resamples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prunebench.analysis.agreement import midranks, spearman
from prunebench.analysis.bootstrap import LEVEL, SEED, resample_counts
from prunebench.errors import UsageError

__all__ = ["RESAMPLES", "Correlation", "Validity", "ceiling", "resampled_spearman", "validity"]

RESAMPLES: Final = 2_000
_ROWS: Final = 500_000  # numbers held at once while resampling

Floats = NDArray[np.float64]
ByLayer = Mapping[int, Floats]


@dataclass(frozen=True)
class Correlation:
    """Spearman's ρ with its percentile interval over n experts; None where a series is constant."""

    value: float | None
    low: float | None
    high: float | None
    n: int

    def to_json(self) -> dict[str, float | int | None]:
        """Plain numbers."""
        return dict(vars(self))


@dataclass(frozen=True)
class Validity:
    """A criterion against one measure of damage.

    Args:
        layers: layer index -> name of the correlation -> it; names are `test`, `retest`, `scores`, `damage`.
        mean: of the layers that have one.
        pooled: over all experts of all layers.
    """

    layers: Mapping[int, Mapping[str, Correlation]]
    mean: Mapping[str, Correlation]
    pooled: Mapping[str, Correlation]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "layers": {str(index): _json(found) for index, found in self.layers.items()},
            "mean": _json(self.mean),
            "pooled": _json(self.pooled),
        }


def ceiling(found: Mapping[str, Correlation]) -> float | None:
    """sqrt(ρ of the two scores · ρ of the two damages); None where one of them is not positive."""
    scores, damage = found["scores"].value, found["damage"].value
    if scores is None or damage is None or min(scores, damage) <= 0:
        return None
    return math.sqrt(scores * damage)


def _json(found: Mapping[str, Correlation]) -> dict[str, Any]:
    return {**{name: one.to_json() for name, one in found.items()}, "ceiling": ceiling(found)}


def resampled_spearman(x_N: Floats, y_N: Floats, counts_BN: NDArray[np.integer[Any]]) -> Floats:
    """Spearman's ρ of each resample (B,), whose row says how often each expert was drawn; NaN where one is constant."""
    weights_BN = counts_BN.astype(np.float64)
    ranks_x_BN, ranks_y_BN = (_weighted_midranks(series_N, weights_BN) for series_N in (x_N, y_N))
    # The mean of the midranks of n values is (n + 1) / 2, whatever the ties.
    middle_B1 = (weights_BN.sum(axis=1, keepdims=True) + 1) / 2
    x_BN, y_BN = ranks_x_BN - middle_B1, ranks_y_BN - middle_B1
    xx, yy, xy = ((weights_BN * a * b).sum(axis=1) for a, b in ((x_BN, x_BN), (y_BN, y_BN), (x_BN, y_BN)))
    norm_B = np.sqrt(xx * yy)
    rho_B: Floats = np.divide(xy, norm_B, out=np.full(len(norm_B), np.nan), where=norm_B > 0)
    return rho_B


def _weighted_midranks(series_N: Floats, weights_BN: Floats) -> Floats:
    """Each value's midrank in a sample that holds it as often as its weight says (any number if that is zero)."""
    _, group_N = np.unique(series_N, return_inverse=True)
    group_N = group_N.reshape(-1)
    order_N = np.argsort(group_N, kind="stable")
    starts = np.searchsorted(group_N[order_N], np.arange(group_N.max() + 1))
    size_BG = np.add.reduceat(weights_BN[:, order_N], starts, axis=1)
    rank_BG = np.cumsum(size_BG, axis=1) - size_BG / 2 + 0.5
    return rank_BG[:, group_N]


def validity(
    scores: tuple[ByLayer, ByLayer],
    damage: tuple[ByLayer, ByLayer],
    *,
    seed: int = SEED,
    resamples: int = RESAMPLES,
) -> Validity:
    """The four correlations of a criterion with a measure of damage.

    Args:
        scores: layer index -> (N,) scores of the experts that were deleted, high is kept; on two calibration draws.
        damage: layer index -> (N,) what deleting each changed, in the same order; on two texts.
        seed: of the bootstrap.
        resamples: B.

    Raises:
        UsageError: layers or experts that do not belong together, fewer than 3 experts in a layer, and scores or
            damages that are not finite.
    """
    layers = sorted(damage[0])
    for series in (*scores, *damage):
        _check(series, damage[0])
    pairs = {
        "test": (scores[0], damage[0]),
        "retest": (scores[1], damage[1]),
        "scores": scores,
        "damage": damage,
    }
    sizes = [len(damage[0][index]) for index in layers]
    draws = {name: np.full((len(layers) + 1, resamples), np.nan) for name in pairs}
    whole = {
        name: tuple(np.concatenate([series[index] for index in layers]) for series in pair)
        for name, pair in pairs.items()
    }
    start = 0
    ends = np.cumsum(sizes)
    for counts_BN in _counts(layers, sizes, seed, resamples):
        rows = slice(start, start + len(counts_BN))
        start += len(counts_BN)
        for name, (x_N, y_N) in whole.items():
            for place, (end, size) in enumerate(zip(ends, sizes, strict=True)):
                own = slice(end - size, end)
                draws[name][place, rows] = resampled_spearman(x_N[own], y_N[own], counts_BN[:, own])
            draws[name][-1, rows] = resampled_spearman(x_N, y_N, counts_BN)
    by_layer: dict[int, dict[str, Correlation]] = {}
    for place, index in enumerate(layers):
        by_layer[index] = {
            name: _correlation(_rho(*(series[index] for series in pair)), draws[name][place], sizes[place])
            for name, pair in pairs.items()
        }
    pooled = {name: _correlation(_rho(*pair), draws[name][-1], sum(sizes)) for name, pair in whole.items()}
    mean = {}
    for name in pairs:
        found = [one[name].value for one in by_layer.values()]
        defined = [value for value in found if value is not None]
        # Over the same layers in every resample.
        kept = draws[name][:-1][[value is not None for value in found]]
        mean[name] = _correlation(
            sum(defined) / len(defined) if defined else None,
            kept.mean(axis=0) if defined else np.empty(0),
            sum(sizes),
        )
    return Validity(by_layer, mean, pooled)


def _check(series: ByLayer, like: ByLayer) -> None:
    for index, values_N in like.items():
        own = series.get(index)
        where = f"layer {index}"
        if set(series) != set(like) or own is None or own.shape != values_N.shape:
            raise UsageError("scores and damages of different experts", where=where)
        if len(own) < 3:
            raise UsageError(f"{len(own)} experts are too few to rank", where=where, expected="at least 3")
        if not np.isfinite(own).all():
            raise UsageError("a score or a damage is not finite", where=where, expected="finite numbers")


def _counts(layers: Sequence[int], sizes: Sequence[int], seed: int, resamples: int) -> Iterator[NDArray[np.uint16]]:
    """How often each expert is drawn, (rows, all experts), in blocks; a layer's do not depend on the others."""
    own = [
        np.concatenate(list(resample_counts(seed, "score validity", f"layer {index}", size, resamples)))
        for index, size in zip(layers, sizes, strict=True)
    ]
    rows = max(1, _ROWS // sum(sizes))
    for start in range(0, resamples, rows):
        yield np.concatenate([counts_BN[start : start + rows] for counts_BN in own], axis=1)


def _rho(x_N: Floats, y_N: Floats) -> float | None:
    if len(np.unique(midranks(x_N))) < 2 or len(np.unique(midranks(y_N))) < 2:
        return None
    return spearman(x_N, y_N)


def _correlation(value: float | None, draws_B: Floats, n: int) -> Correlation:
    # A resample of equal values has no order; it says nothing of how one comes out that has.
    defined_B = draws_B[np.isfinite(draws_B)]
    if value is None or not len(defined_B):
        return Correlation(value, None, None, n)
    low, high = np.quantile(defined_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Correlation(value, float(low), float(high), n)
