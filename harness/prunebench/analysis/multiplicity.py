"""Many comparisons at once: Holm's correction within families and over all, and what may then be said.

2610.41366 §3 and App. H.1. Holm controls the chance of any false positive whatever the dependence of the tests; it
treats the noise of test items, not that of calibration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prunebench.errors import UsageError

__all__ = ["ALPHA", "MARKS", "Verdict", "holm", "mark", "same_sign", "verdict", "within_families"]

ALPHA: Final = 0.05

Floats = NDArray[np.float64]


class Verdict(StrEnum):
    """What is left of a contrast's significance; the words of 2610.41366 Table H.1."""

    BOTH = "both"
    TABLE = "table"
    LOST = "lost"
    NONE = "n.s."


MARKS: Final[Mapping[Verdict, str]] = {Verdict.BOTH: "‡", Verdict.TABLE: "†", Verdict.LOST: "*", Verdict.NONE: ""}
"""‡ survives Holm over all, † within the family only, * is significant by itself only."""


def holm(p: ArrayLike) -> Floats:
    """Holm's step-down adjusted p-values, capped at 1 (Holm 1979), in the order given.

    The i-th smallest of m values becomes the largest of (m − j + 1) · p_(j) over j ≤ i.

    Raises:
        UsageError: for a p outside [0, 1].
    """
    p_M = np.asarray(p, dtype=np.float64)
    if not ((p_M >= 0) & (p_M <= 1)).all():
        raise UsageError("a p-value is no probability", expected="numbers from 0 to 1")
    order = np.argsort(p_M, kind="stable")
    stepped = np.maximum.accumulate(p_M[order] * np.arange(len(p_M), 0, -1))
    adjusted = np.empty_like(p_M)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def within_families(p: ArrayLike, families: Sequence[str]) -> Floats:
    """Holm's adjusted p-values, each family corrected by itself."""
    p_M, names = np.asarray(p, dtype=np.float64), np.asarray(families)
    adjusted = np.empty_like(p_M)
    for name in np.unique(names):
        adjusted[names == name] = holm(p_M[names == name])
    return adjusted


def verdict(p: float, in_family: float, over_all: float, alpha: float = ALPHA) -> Verdict:
    """both: survives both corrections; table: its family's only; lost: neither, though p is below α; n.s.: p is not.

    A contrast that survives over all but not in its family cannot be: the family is a part of all.
    """
    if p >= alpha:
        return Verdict.NONE
    if in_family >= alpha:
        return Verdict.LOST
    return Verdict.BOTH if over_all < alpha else Verdict.TABLE


def mark(p: float, verdict: Verdict | None, alpha: float = ALPHA) -> str:
    """The mark behind a difference; an exploratory one (no verdict) gets no more than *."""
    if verdict is None:
        return "*" if p < alpha else ""
    return MARKS[verdict]


def same_sign(estimates: Sequence[float], tolerance: float = 1e-9) -> bool | None:
    """Whether an effect is established: one sign, and not zero, on every draw; None for fewer than two draws."""
    if len(estimates) < 2:
        return None
    return all(one > tolerance for one in estimates) or all(one < -tolerance for one in estimates)
