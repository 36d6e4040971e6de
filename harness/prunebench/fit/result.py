"""What a fit hands to a method: the fill, how good it is, and whether a fallback had to answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prunebench.fit.share import fit_share
from prunebench.replacement import Fill

__all__ = ["Fitted"]


@dataclass(frozen=True)
class Fitted:
    """What became of one expert's fit; a row of a layer's coverage table.

    Args:
        fill: what answers; None if nothing was found that may, so that the expert's slots are refilled.
        tokens: routed calibration tokens that it was fitted on.
        fallback: why something else answers instead of the operator; empty if it does not.
        squared_error: on those tokens; a tilt's without its clip.
        constant_squared_error: the constant's on the same.
        held_out_share: fit share on odd calibration blocks of a fit on even ones, or None if that was not measured.
        outcome: how the operator decided, if it had a choice.
    """

    fill: Fill | None
    tokens: int
    fallback: str = ""
    squared_error: float = 0.0
    constant_squared_error: float = 0.0
    held_out_share: float | None = None
    outcome: str = ""

    @property
    def fit_share(self) -> float:
        """In-sample."""
        return fit_share(self.squared_error, self.constant_squared_error)

    def to_json(self) -> dict[str, Any]:
        """All but the fill."""
        return {
            "tokens": self.tokens,
            "fallback": self.fallback,
            "squared_error": self.squared_error,
            "constant_squared_error": self.constant_squared_error,
            "fit_share": self.fit_share,
            "held_out_share": self.held_out_share,
            "outcome": self.outcome,
        }
