"""What data can tell apart: the largest difference they do not rule out, and the smallest they would find.

An interval that contains zero is no evidence that two arms are equal; these numbers say how far apart they may be.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Final

import numpy as np

from prunebench.analysis.bootstrap import TINY, Sampled
from prunebench.analysis.multiplicity import ALPHA

__all__ = ["EQUIVALENCE_LEVEL", "POWER", "equivalence_bound", "minimum_detectable"]

EQUIVALENCE_LEVEL: Final = 0.90
POWER: Final = 0.80


def equivalence_bound(difference: Sampled) -> float | None:
    """The smallest δ whose (−δ, δ) holds the 90 % interval: what two one-sided tests at 0.05 would accept as a margin.

    A bound found after the fact, and no test of a margin set before (2610.41366 App. H.2). None where all resamples are
    alike, as when no item differs: resampling them says nothing of what other items would show.
    """
    if _alike(difference):
        return None
    interval = difference.interval(EQUIVALENCE_LEVEL)
    return max(abs(interval.low), abs(interval.high))


def minimum_detectable(difference: Sampled, *, alpha: float = ALPHA, power: float = POWER) -> float | None:
    """The true difference that a two-sided test at α on so many items of this kind finds with the given power.

    (z_{1−α/2} + z_power) · SE, with the standard error from the resamples, so pairing and strata are in it. None where
    all resamples are alike.
    """
    if _alike(difference):
        return None
    normal = NormalDist()
    with np.errstate(invalid="ignore"):  # draws that overflowed give no number, and no warning
        error = float(difference.draws_B.std(ddof=1))
    return (normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(power)) * error


def _alike(difference: Sampled) -> bool:
    """Whether the resamples differ by no more than rounding."""
    return bool(np.ptp(difference.draws_B) < TINY)
