"""The operator `conmoe-nearest`: a pruned expert's slots are answered by the survivor with the nearest weights."""

from __future__ import annotations

from dataclasses import dataclass

from prunebench import LayerView, Method, Replacements, Survivor, nearest_survivors, parameter_distances


@dataclass(frozen=True)
class ConmoeNearest(Method):
    """π(i) = argmin over survivors p of Σ_m ‖W_i^m − W_p^m‖_F², m over gate, up and down; of equal ones the lowest id.

    Router and gates are unchanged: the slot adds g_i·f_π(i)(x), so that a token with both selected gets g_i + g_π(i).
    Nothing is fitted. The exact form of ConMoE's parameter distance (its Eq. 13) was not found: the Frobenius distance
    is our choice, and is not invariant to the order of an expert's neurons.

    Source: ConMoE (arXiv:2605.29350) as re-implemented in 2610.41366 §3 and App. H.6.
    """

    name = "conmoe-nearest"
    reference = "arXiv:2605.29350"

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        survivors = layer.survivors(pruned)
        weights = [layer.weights(e) for e in survivors]

        def nearest(expert: int) -> int:
            [distance_R] = parameter_distances([layer.weights(expert)], weights)
            return nearest_survivors(distance_R, survivors)[0]

        return Replacements({e: Survivor(nearest(e)) for e in pruned})
