"""Which setting stores as many bytes as another, and by how much it misses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from prunebench.errors import UsageError

__all__ = ["TOLERANCE", "Match", "gap_text", "match"]

TOLERANCE: Final = 0.02

_Setting = TypeVar("_Setting")


@dataclass(frozen=True)
class Match(Generic[_Setting]):
    """The setting that comes nearest.

    Args:
        setting: as it was handed in.
        total: its bytes.
        target: the bytes to be matched.
        tolerance: the share of `target` within which two totals count as matched.
    """

    setting: _Setting
    total: int
    target: int
    tolerance: float

    @property
    def gap(self) -> float:
        """By what share of the target the setting is larger, or smaller if negative."""
        return (self.total - self.target) / self.target

    @property
    def matched(self) -> bool:
        """Whether the gap is within the tolerance."""
        return abs(self.total - self.target) <= self.tolerance * self.target

    def to_json(self) -> dict[str, Any]:
        """Numbers only; the setting is the caller's."""
        return {
            "total": self.total,
            "target": self.target,
            "gap": self.gap,
            "tolerance": self.tolerance,
            "matched": self.matched,
        }

    def text(self) -> str:
        """The gap, and the verdict, in words."""
        verdict = "matched within" if self.matched else "NOT matched within"
        return f"{gap_text(self.gap)}, {verdict} {100 * self.tolerance:g} %"


def gap_text(gap: float) -> str:
    """A gap in percent, with its sign."""
    return f"{100 * gap:+.2f} %"


def match(candidates: Iterable[tuple[_Setting, int]], target: int, *, tolerance: float = TOLERANCE) -> Match[_Setting]:
    """The candidate whose bytes are nearest to the target's; of two as near, the smaller, then the first.

    Args:
        candidates: (setting, total bytes).
        target: total bytes of the arm to be matched.
        tolerance: share of the target; whether the nearest is within it, the result says.

    Raises:
        UsageError: no candidates, a target of no bytes, or a negative tolerance.
    """
    if target <= 0 or not tolerance >= 0:
        raise UsageError(
            f"cannot match {target} bytes within {tolerance}", expected="a target above 0 and a tolerance from 0"
        )
    nearest = min(candidates, key=lambda one: (abs(one[1] - target), one[1]), default=None)
    if nearest is None:
        raise UsageError("nothing to choose from", expected="at least one setting")
    return Match(*nearest, target=target, tolerance=tolerance)
