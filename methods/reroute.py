"""The operator `reroute`: survivors refill the slots of pruned experts, at a stated gate scale."""

from __future__ import annotations

from dataclasses import dataclass

from prunebench import LayerView, Method, Routing, Scale


@dataclass(frozen=True)
class Reroute(Method):
    """S is the top-k among the survivors; each gets the gate c·p_j/Z of the scale (2610.41366 §3).

    Args:
        scale: trained, other, keep, renorm, interp:α or ref:k2.
    """

    name = "reroute"
    reference = "arXiv:2610.41366"

    scale: str = "trained"

    def __post_init__(self) -> None:
        """Refuse a scale that does not exist."""
        Scale.parse(self.scale)

    def route(self, layer: LayerView, pruned: tuple[int, ...]) -> Routing:
        return Routing(self.scale)
