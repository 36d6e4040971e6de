"""What rerouting did to the gates of a run, over all its layers (2610.41366 §5.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ReroutingSummary", "rerouting_summary"]


@dataclass(frozen=True)
class ReroutingSummary:
    """How often rerouting moved a slot, and how far apart the two gate scales then are, over all layers of a run.

    A call is one token going through one layer; it is displaced if its unpruned top-k held an unroutable expert.

    Args:
        calls: all of them.
        displaced_share: displaced calls, of all calls.
        keep_over_renorm: mean over displaced calls of the gates' total under keep over their total under renorm; 1 if
            there is none.
        above_one_share: calls where that ratio exceeds 1, of all calls. Only displaced ones can: elsewhere the ratio is
            1 for a router trained with renormalization, and below 1 for one trained without.
    """

    calls: int
    displaced_share: float
    keep_over_renorm: float
    above_one_share: float

    @property
    def keep_over_trained(self) -> float:
        """Mean over all calls of keep's mass over the trained mass, of a router trained WITH renormalization.

        There both scales agree on a call that is not displaced. For a router trained without it keep is the trained
        scale, and the two differ on every call, so that the mean over all calls cannot be had from a record.
        """
        return 1.0 + self.displaced_share * (self.keep_over_renorm - 1.0)


def rerouting_summary(routing: Mapping[str, Any]) -> ReroutingSummary | None:
    """Sum up the `routing` of a record, whose layers state their ratio and their share above 1 of displaced calls only.

    Returns:
        None where nothing was rerouted: no call at all, or slots that kept their place and were answered by fills. Also
        for a router that has one scale only, and so no ratio of two.
    """
    layers = list(routing.get("layers", {}).values())
    calls = sum(int(layer["calls"]) for layer in layers)
    displaced = [layer["displaced_share"] * layer["calls"] for layer in layers]
    total = math.fsum(displaced)
    filled = not total and any(layer["filled_share"] for layer in layers)
    if not calls or filled or any("keep_over_renorm" not in layer for layer in layers):
        return None

    def summed(field: str) -> float:
        return math.fsum(count * layer[field] for count, layer in zip(displaced, layers, strict=True))

    mean_ratio = summed("keep_over_renorm") / total if total else 1.0
    return ReroutingSummary(calls, total / calls, mean_ratio, summed("above_one_share") / calls)
