"""The operator `zero`: the slot is kept with its gate, and nothing answers."""

from __future__ import annotations

from dataclasses import dataclass

from prunebench import LayerView, Method, Replacements
from prunebench import Zero as ZeroFill


@dataclass(frozen=True)
class Zero(Method):
    """N_i(x) = 0; router and gates unchanged, so the layer's output loses that slot's share."""

    name = "zero"
    reference = "control"

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        return Replacements({expert: ZeroFill(layer.width) for expert in pruned})
