"""The operator `compel`: survivors absorb a share of the pruned experts' weights, and slots are rerouted."""

from __future__ import annotations

from dataclasses import dataclass

from prunebench import Fisher, LayerView, Method, Replacements, Routing, Scale, Statistic, UsageError, compensated


@dataclass(frozen=True)
class Compel(Method):
    """θ_j ← θ_j + γ·F_j / (Σ_{k kept} F_k + ε)·Σ_{i pruned} θ_i for each of a survivor's matrices; then rerouting.

    F_e is the mean over calibration sequences of the squared norm of the gradient of the sequence's mean next-token
    loss with respect to expert e. float32 arithmetic, stored in the model's dtype. No values are added. This is
    COMPEL's compensation on any mask, not its layer-adaptive selection; its code is not public.

    Args:
        gamma: γ; 0 changes nothing.
        epsilon: ε, on the scale of F.
        scale: gate scale where slots are refilled.

    Source: Yoon & Choi 2026 (COMPEL), Eq. 5 and 11, as re-implemented in 2610.41366 §3 and App. H.6.
    """

    name = "compel"
    reference = "Yoon & Choi 2026"

    gamma: float = 0.1
    epsilon: float = 1e-12
    scale: str = "trained"

    def __post_init__(self) -> None:
        Scale.parse(self.scale)
        if not self.epsilon > 0:
            raise UsageError(f"epsilon {self.epsilon}", expected="more than 0")

    def replace_needs(self) -> tuple[Statistic, ...]:
        return (Fisher(),)

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        fisher = {expert: float(value) for expert, value in enumerate(layer.stats["fisher"])}
        weights = {expert: layer.weights(expert) for expert in range(layer.experts)}
        return Replacements(edits=compensated(weights, pruned, fisher, gamma=self.gamma, epsilon=self.epsilon))

    def route(self, layer: LayerView, pruned: tuple[int, ...]) -> Routing:
        return Routing(self.scale)
