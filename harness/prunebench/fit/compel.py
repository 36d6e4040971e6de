"""COMPEL's weight compensation: survivors absorb the removed experts' weights (2610.41366 §3 and App. H.6).

Eq. 11 of Yoon & Choi (2026), whose code is not public, in the form that 2610.41366 prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from prunebench.errors import UsageError

__all__ = ["absorbed_shares", "compensated"]


def absorbed_shares(
    fisher: Mapping[int, float], kept: Sequence[int], *, gamma: float = 0.1, epsilon: float = 1e-12
) -> dict[int, float]:
    """γ·F_j / (Σ_{k kept} F_k + ε) of each survivor; zero for all if no survivor has Fisher, never NaN.

    Args:
        fisher: F_e of the layer's experts.
        kept: ids of the survivors.
        gamma: γ.
        epsilon: ε, on the scale of F: within-layer ratios are free of it only where ΣF ≫ ε.
    """
    if epsilon <= 0:
        raise UsageError(f"epsilon {epsilon}", expected="more than 0")
    if bad := [expert for expert in kept if not 0 <= fisher[expert] < float("inf")]:
        raise UsageError(f"Fisher {fisher[bad[0]]}", where=f"expert {bad[0]}", expected="a finite number, 0 or more")
    total = sum(fisher[expert] for expert in kept) + epsilon
    return {expert: gamma * (fisher[expert] / total) for expert in kept}


def compensated(
    weights: Mapping[int, Mapping[str, Tensor]],
    pruned: Sequence[int],
    fisher: Mapping[int, float],
    *,
    gamma: float = 0.1,
    epsilon: float = 1e-12,
) -> dict[int, dict[str, Tensor]]:
    """Survivors' new weights: θ_j ← θ_j + γ·F_j/(Σ F + ε)·Σ_{i pruned} θ_i, per matrix.

    float32 arithmetic, stored in each matrix's own dtype, as in App. H.6. A survivor whose share is 0 (γ = 0, or no
    Fisher) keeps its bits.

    Args:
        weights: one layer's experts: id -> parameter name -> matrix. Not changed.
        pruned: ids that go.
        fisher: F_e of the experts.
        gamma: γ.
        epsilon: ε.

    Returns:
        id -> name -> matrix for every survivor.
    """
    gone = set(pruned)
    if stray := sorted(gone - set(weights)):
        raise UsageError(f"expert {stray[0]} does not exist", expected=f"ids of {sorted(weights)}")
    kept = [expert for expert in weights if expert not in gone]
    shares = absorbed_shares(fisher, kept, gamma=gamma, epsilon=epsilon)
    removed = {
        name: torch.stack([weights[expert][name].float() for expert in sorted(gone)]).sum(0)
        for name in (weights[kept[0]] if kept and gone else ())
    }

    def updated(expert: int, name: str, weight: Tensor) -> Tensor:
        if not gone or shares[expert] == 0:
            return weight.clone()
        return (weight.float() + shares[expert] * removed[name]).to(weight.dtype)

    return {e: {name: updated(e, name, weight) for name, weight in weights[e].items()} for e in kept}
