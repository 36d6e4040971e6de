"""How far the calibration text moves a mask: another domain against another draw of one (2610.41366 §6.4, App. A.9).

Masks of two groups of draws, all of one criterion, model, budget and number of calibration tokens. A share is that of
the pruned experts of one mask that the other keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product
from math import comb
from typing import Any, Self

from prunebench.analysis.agreement import agreement
from prunebench.mask import Mask

__all__ = ["Drifts", "mean_share", "share_differing", "splits_as_far"]


def share_differing(one: Mask, other: Mask, layer: int | None = None) -> Fraction:
    """The share of the pruned experts of one mask that the other keeps; of one layer, or of all together.

    Raises:
        UsageError: for masks of different models or different counts, or that prune nothing there.
    """
    return 1 - agreement(one, other, layer)


def mean_share(shares: Sequence[Fraction]) -> Fraction:
    """The exact mean."""
    return sum(shares, Fraction(0)) / len(shares)


@dataclass(frozen=True)
class Drifts:
    """Shares that differ between the masks of two groups of draws.

    Args:
        first: between two draws of the first group, all pairs.
        second: between two draws of the second.
        across: between a draw of each.
    """

    first: tuple[Fraction, ...]
    second: tuple[Fraction, ...]
    across: tuple[Fraction, ...]

    @classmethod
    def of(cls, first: Sequence[Mask], second: Sequence[Mask], layer: int | None = None) -> Self:
        """All pairs of masks within and across two groups.

        Raises:
            UsageError: as `share_differing`.
        """
        return cls(
            tuple(share_differing(*pair, layer) for pair in combinations(first, 2)),
            tuple(share_differing(*pair, layer) for pair in combinations(second, 2)),
            tuple(share_differing(*pair, layer) for pair in product(first, second)),
        )

    @property
    def excess(self) -> Fraction:
        """Mean across minus mean within."""
        return mean_share(self.across) - mean_share(self.first + self.second)

    @property
    def times(self) -> Fraction | None:
        """Mean across over mean within the first group, as in App. A.9; None where no draw of that moves the mask."""
        usual = mean_share(self.first)
        return mean_share(self.across) / usual if usual else None

    @property
    def apart(self) -> int:
        """1 if every pair across differs more than every pair within, -1 if less than every one, else 0."""
        within = self.first + self.second
        return int(min(self.across) > max(within)) - int(max(self.across) < min(within))

    def to_json(self) -> dict[str, Any]:
        """Plain numbers: every share, and what is made of them."""
        shares = {name: [float(share) for share in getattr(self, name)] for name in ("first", "second", "across")}
        return {
            **shares,
            "excess": float(self.excess),
            "times": None if self.times is None else float(self.times),
            "apart": self.apart,
        }


def splits_as_far(first: Sequence[Mask], second: Sequence[Mask]) -> tuple[int, int]:
    """How many splits of the draws into groups of these sizes have at least this excess, and how many splits there are.

    Their ratio is the p of an exact permutation test of "the draws are exchangeable", one-sided.
    """
    masks = [*first, *second]
    observed = Drifts.of(first, second).excess
    groups = [set(chosen) for chosen in combinations(range(len(masks)), len(first))]
    excesses = [
        Drifts.of([masks[i] for i in group], [masks[i] for i in range(len(masks)) if i not in group]).excess
        for group in groups
    ]
    # With groups of one size every split is met twice, once with the groups' names exchanged.
    repeats = 2 if len(first) == len(second) else 1
    return sum(excess >= observed for excess in excesses) // repeats, comb(len(masks), len(first)) // repeats
