"""What a fit hands to a method: the fill, and whether a fallback had to answer."""

from __future__ import annotations

from dataclasses import dataclass

from prunebench.replacement import Fill

__all__ = ["Fitted"]


@dataclass(frozen=True)
class Fitted:
    """One expert's fill; a row of a layer's coverage table.

    Args:
        fill: what answers.
        tokens: routed calibration tokens that it was fitted on.
        fallback: why the constant answers instead of the operator; empty if it does not.
    """

    fill: Fill
    tokens: int
    fallback: str = ""
