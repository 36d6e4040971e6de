"""The operator `svd-whitened`: a factorisation of a pruned expert that is best on its routed tokens, and a bias."""

from __future__ import annotations

from dataclasses import dataclass

from prunebench import (
    CopyPair,
    Folds,
    GatedWeights,
    LayerView,
    LowRankExpert,
    Method,
    Replacements,
    RoutedGrams,
    UsageError,
    check_copy_budget,
    copy_errors,
    copy_size,
    whitened_svd,
    with_residual_bias,
)


@dataclass(frozen=True)
class SvdWhitened(Method):
    """Activation-whitened, truncation-aware SVD of gate, up and down at one rank, and a bias.

    Per matrix the least E‖(W − W′)x‖²: SVD of WS with S Sᵀ = E[x xᵀ] over the expert's routed tokens, x the expert's
    input for gate and up and its original intermediate activation for down; the factors are U_k Σ_k and V_kᵀ S⁻¹.

    The bias is the mean of what the copy misses on the expert's routed tokens. A never-routed expert answers with zero,
    as its constant does. Router and gates are unchanged.

    Args:
        tilt_rank: r of the tilt whose 2rD values the copy's factors must fit under.
        times: that many times its budget; 1 or 4 in the paper.
        damping: of E[x xᵀ], relative to its mean diagonal; ours, it decides where inputs never went.

    Source: 2610.41366 App. C.1.
    """

    name = "svd-whitened"
    reference = "arXiv:2610.41366"
    visits = True

    tilt_rank: int = 32
    times: int = 1
    damping: float = 1e-6

    def __post_init__(self) -> None:
        check_copy_budget(self.tilt_rank, self.times)
        if not self.damping >= 0:
            raise UsageError(f"damping {self.damping}", expected="0 or more")

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        experts = {e: layer.gated(e) for e in pruned}
        grams = layer.accumulate(
            pruned,
            lambda rows: Folds.of(rows.block_S, lambda fold_S: RoutedGrams.of(experts[rows.expert], rows.x_SD[fold_S])),
        )
        copies = {}
        for e, expert in experts.items():
            # Without a routed token nothing answers but the constant: any copy will do.
            never = RoutedGrams.of(expert, expert.gate_FD[:0])
            moments = grams.get(e, Folds(never, never))
            copies[e] = CopyPair(self._copy(expert, moments.both), self._copy(expert, moments.even))
        errors = layer.accumulate(
            pruned, lambda rows: copy_errors(copies[rows.expert], rows.x_SD, rows.y_SD, rows.block_S)
        )
        return Replacements({e: with_residual_bias(copies[e], errors.get(e)) for e in pruned})

    def _copy(self, expert: GatedWeights, moments: RoutedGrams) -> LowRankExpert:
        rank = copy_size(
            "svd-whitened",
            width=expert.width,
            neurons=expert.neurons,
            tilt_rank=self.tilt_rank,
            times=self.times,
        )
        return whitened_svd(
            expert, rank, input_DD=moments.inputs.mean_FF, hidden_FF=moments.hidden.mean_FF, damping=self.damping
        )
