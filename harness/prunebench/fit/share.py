"""How much of the constant's squared error an operator removes on an expert's routed tokens (2610.41366 §3)."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

__all__ = ["fit_share", "weighted_fit_share"]


def fit_share(squared_error: float, constant_squared_error: float) -> float:
    """1 − SSE_op / SSE_const; below 0 where the operator is worse than the constant.

    In-sample both errors are those of the fit on its own rows. Held out, both the operator and the constant are fitted
    on one fold and both errors are taken on the other: the paper does not name the baseline's fold, and that the
    constant is an operator like any other is our choice. Where the constant makes no error there is nothing to remove,
    and the share is 0 (ours), never NaN.
    """
    return 1.0 - squared_error / constant_squared_error if constant_squared_error > 0 else 0.0


def weighted_fit_share(
    squared_errors: Sequence[float], constant_squared_errors: Sequence[float], gate_squares: Sequence[float]
) -> float:
    """Several experts' fit share, weighted by n·E[G²]·tr Σ as in App. B.3.

    n·tr Σ is the constant's squared error, so the weighted mean of the shares is 1 minus a ratio of sums of squared
    errors, each times its expert's E[G²].

    Args:
        squared_errors: SSE_op of each expert.
        constant_squared_errors: SSE_const of each, on the same rows.
        gate_squares: E[G²] of each, over its routed tokens; all 1 weighs by n·tr Σ alone.
    """
    pairs = list(zip(squared_errors, constant_squared_errors, gate_squares, strict=True))
    return fit_share(fsum(error * gate for error, _, gate in pairs), fsum(error * gate for _, error, gate in pairs))
