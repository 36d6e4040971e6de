"""McNemar's test of two runs that are right or wrong on the same items (2609.04575, evaluation protocol)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from prunebench.errors import UsageError

__all__ = ["McNemar", "mcnemar"]


@dataclass(frozen=True)
class McNemar:
    """Two-sided p-values from the discordant items alone.

    Args:
        a_only: items right in the first run and wrong in the second.
        b_only: the reverse.
        exact: binomial p: twice the smaller tail of Binomial(a_only + b_only, 1/2), at most 1.
        mid_p: outcomes as far from even count half (Fagerland et al. 2013); less conservative. 1 without any.
    """

    a_only: int
    b_only: int
    exact: float
    mid_p: float


def mcnemar(a_only: int, b_only: int) -> McNemar:
    """The test, in exact rational arithmetic.

    Raises:
        UsageError: for a negative count.
    """
    if min(a_only, b_only) < 0:
        raise UsageError(f"discordant counts {a_only} and {b_only}", expected="0 or more")
    n, fewer = a_only + b_only, min(a_only, b_only)
    term = tail = 1  # n choose 0
    for k in range(fewer):
        term = term * (n - k) // (k + 1)
        tail += term
    everything = 2**n
    exact = min(Fraction(1), Fraction(2 * tail, everything))
    # Even counts are one outcome, all others come in pairs that are equally far from even.
    mid_p = Fraction(2 * tail - term, everything) if a_only != b_only else 1 - Fraction(term, 2 * everything)
    if n == 0:
        mid_p = Fraction(1)
    return McNemar(a_only, b_only, float(exact), float(mid_p))
