"""Smaller copies of a pruned expert at a given budget (2610.41366 App. C.1).

A copy is made from the expert's matrices and from second moments of its routed tokens; then its residual on those
tokens is measured, and the mean becomes the bias. So a pass that fits copies meets the tokens twice.

D width, F neurons, K rank, S rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.fit.folds import Folds
from prunebench.fit.moments import Gram, Spread
from prunebench.fit.result import Fitted
from prunebench.fit.share import fit_share
from prunebench.replacement import Constant, GatedCopy, GatedWeights, LowRankExpert, SmallExpert

__all__ = [
    "CopyErrors",
    "CopyKind",
    "CopyPair",
    "RoutedGrams",
    "check_copy_budget",
    "copy_errors",
    "copy_size",
    "low_rank_factors",
    "neuron_energy",
    "plain_svd",
    "top_neurons",
    "whitened_factors",
    "whitened_svd",
    "with_residual_bias",
]

CopyKind = Literal["neurons", "svd", "svd-whitened"]


def check_copy_budget(tilt_rank: int, times: int) -> None:
    """Raise unless there is a budget: `times` that of a tilt of rank `tilt_rank`."""
    if tilt_rank < 1 or times < 1:
        raise UsageError(
            f"a budget of {times} times a tilt of rank {tilt_rank}",
            expected="at least 1 of each",
            fix="for no budget use the operator constant",
        )


def copy_size(kind: CopyKind, *, width: int, neurons: int, tilt_rank: int, times: int = 1) -> int:
    """The largest rank, or number of neurons, whose factors fit under `times` the tilt's 2rD values (App. C.1).

    Never more than the expert itself has: its F neurons, or the full rank min(D, F) of its matrices (ours; matters on
    tiny experts only).

    Args:
        kind: which copy.
        width: D.
        neurons: F.
        tilt_rank: r of the tilt whose maps are the budget.
        times: 1 or, as in the paper's larger copies, 4.

    Raises:
        UsageError: not even one fits, or an unknown kind.
    """
    if kind not in ("neurons", "svd", "svd-whitened"):
        raise UsageError(f"unknown copy {kind!r}", expected="neurons, svd or svd-whitened")
    budget = times * 2 * tilt_rank * width
    each, most = (3 * width, neurons) if kind == "neurons" else (3 * (width + neurons), min(width, neurons))
    size = min(budget // each, most)
    if size < 1:
        raise UsageError(
            f"a {kind} copy of rank 0",
            where=f"a budget of {budget} values",
            expected=f"at least {each}",
            fix="raise the tilt's rank that sets the budget, or use the operator constant",
        )
    return size


def low_rank_factors(weight_OI: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The rank-k truncated SVD as (U_k Σ_k, V_kᵀ): [O, K] and [K, I], float64."""
    left_OM, singular_M, right_MI = torch.linalg.svd(weight_OI.double(), full_matrices=False)
    return left_OM[:, :rank] * singular_M[:rank], right_MI[:rank]


def whitened_factors(
    weight_OI: Tensor, moment_II: Tensor, rank: int, *, damping: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """The factors of rank k with the least E‖(W − W′)x‖²: SVD of WS with S Sᵀ = E[x xᵀ], then (U_k Σ_k, V_kᵀ S⁻¹).

    S is the symmetric root (the paper does not say which; the product is the same for every S). Where inputs never
    went, S has no inverse and the copy is free: `damping` times the mean diagonal is added to all of E[x xᵀ], so that
    the copy is nearest to W there (ours); at 0 those directions get weight 0.

    Args:
        weight_OI: W.
        moment_II: E[x xᵀ] of W's inputs over the expert's routed tokens, not centred.
        rank: k.
        damping: relative to the mean diagonal.
    """
    moment_II = moment_II.double()
    size = moment_II.shape[0]
    values_I, vectors_II = torch.linalg.eigh(moment_II)
    values_I = values_I.clamp(min=0.0) + damping * float(moment_II.diagonal().mean())
    root_I = values_I.sqrt()
    usable_I = values_I > values_I.max() * size * torch.finfo(torch.float64).eps
    inverse_I = torch.where(usable_I, 1.0 / root_I.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    # S = E·diag(root)·Eᵀ; the trailing rotation Eᵀ would leave singular values and product as they are.
    left_OM, singular_M, right_MI = torch.linalg.svd((weight_OI.double() @ vectors_II) * root_I, full_matrices=False)
    return left_OM[:, :rank] * singular_M[:rank], (right_MI[:rank] * inverse_I) @ vectors_II.T


def plain_svd(weights: GatedWeights, rank: int) -> LowRankExpert:
    """Rank-k truncated SVD of gate, up and down; bias still zero."""
    _check_size(rank, min(weights.width, weights.neurons), "rank")
    factors = {name: low_rank_factors(weight_OI, rank) for name, weight_OI in weights.matrices().items()}
    return LowRankExpert.of(factors, weights.activation)


def whitened_svd(
    weights: GatedWeights, rank: int, *, input_DD: Tensor, hidden_FF: Tensor, damping: float = 1e-6
) -> LowRankExpert:
    """Truncation-aware, activation-whitened SVD of gate, up and down; bias still zero.

    Args:
        weights: the expert.
        rank: k.
        input_DD: E[x xᵀ] of the expert's routed inputs, for gate and up.
        hidden_FF: E[h hᵀ] of the ORIGINAL intermediate activation, for down.
        damping: as for `whitened_factors`.
    """
    _check_size(rank, min(weights.width, weights.neurons), "rank")
    moments = {"gate": input_DD, "up": input_DD, "down": hidden_FF}
    factors = {
        name: whitened_factors(weight_OI, moments[name], rank, damping=damping)
        for name, weight_OI in weights.matrices().items()
    }
    return LowRankExpert.of(factors, weights.activation)


def neuron_energy(weights: GatedWeights, hidden_square_F: Tensor) -> Tensor:
    """E[h_j²]·‖W_down[:, j]‖² of every neuron ([F], float64)."""
    return hidden_square_F.double() * weights.down_DF.double().square().sum(0)


def top_neurons(weights: GatedWeights, count: int, hidden_square_F: Tensor) -> SmallExpert:
    """The neurons of the highest energy, kept exactly and in their order; of equal ones the lowest (ours).

    Args:
        weights: the expert.
        count: k, neurons to keep.
        hidden_square_F: E[h_j²] over the expert's routed tokens.
    """
    _check_size(count, weights.neurons, "neurons")
    order_F = torch.argsort(neuron_energy(weights, hidden_square_F), descending=True, stable=True)
    kept_H = order_F[:count].sort().values
    return SmallExpert.of(
        GatedWeights(weights.gate_FD[kept_H], weights.up_FD[kept_H], weights.down_DF[:, kept_H], weights.activation)
    )


@dataclass(frozen=True)
class RoutedGrams:
    """E[x xᵀ] and E[h hᵀ] of an expert's routed tokens, which whitening needs; streams add up.

    Args:
        inputs: of x.
        hidden: of the original intermediate activation h.
    """

    inputs: Gram
    hidden: Gram

    @classmethod
    def of(cls, weights: GatedWeights, x_SD: Tensor) -> Self:
        """Of these rows, in float64 from the matrices on."""
        x_SD = x_SD.double()
        return cls(Gram.of(x_SD), Gram.of(weights.double().hidden(x_SD)))

    def __add__(self, other: RoutedGrams) -> RoutedGrams:
        """Of both streams together."""
        return RoutedGrams(self.inputs + other.inputs, self.hidden + other.hidden)


def _check_size(size: int, most: int, what: str) -> None:
    if not 1 <= size <= most:
        raise UsageError(f"a copy of {what} {size}", expected=f"1 to {most}")


@dataclass(frozen=True)
class CopyPair:
    """A copy, and its twin of half the text, by which a held-out share is measured.

    Args:
        copy: fitted on all of the expert's routed tokens; what answers.
        half: the same fitted on even calibration blocks only; the copy itself, if it is of the weights alone.
    """

    copy: GatedCopy
    half: GatedCopy


@dataclass(frozen=True)
class CopyErrors:
    """What copies miss of an expert's outputs, their bias apart, and those outputs; streams add up.

    Args:
        missed: of E(x) − E′(x): its mean is the bias, its `squares` then the copy's squared error on these rows.
        half_missed: the same of the twin, by fold.
        outputs: of E(x), by fold: the constant's squared error.
    """

    missed: Spread
    half_missed: Folds[Spread]
    outputs: Folds[Spread]

    def __add__(self, other: CopyErrors) -> CopyErrors:
        """Of both streams together."""
        return CopyErrors(
            self.missed + other.missed, self.half_missed + other.half_missed, self.outputs + other.outputs
        )

    @property
    def held_out_share(self) -> float | None:
        """Fit share on odd blocks: twin, bias and constant are of even ones; None if a fold has no rows."""
        if not (self.outputs.even.count and self.outputs.odd.count):
            return None
        error = self.half_missed.odd.about(self.half_missed.even.mean_D)
        return fit_share(float(error), float(self.outputs.odd.about(self.outputs.even.mean_D)))


def copy_errors(pair: CopyPair, x_SD: Tensor, y_SD: Tensor, block_S: Tensor) -> CopyErrors:
    """Of one expert's routed rows, and the calibration block of each."""
    y_SD = y_SD.double()
    missed_SD = y_SD - pair.copy.copied(x_SD.to(pair.copy.bias_D.dtype)).double()
    half_SD = missed_SD
    if pair.half is not pair.copy:
        half_SD = y_SD - pair.half.copied(x_SD.to(pair.half.bias_D.dtype)).double()
    return CopyErrors(
        Spread.of(missed_SD),
        Folds.of(block_S, lambda fold_S: Spread.of(half_SD[fold_S])),
        Folds.of(block_S, lambda fold_S: Spread.of(y_SD[fold_S])),
    )


def with_residual_bias(pair: CopyPair, errors: CopyErrors | None) -> Fitted:
    """The copy with b = E[E(x) − E′(x)]; of no routed tokens the constant zero (ours), as μ is then."""
    copy = pair.copy
    if errors is None or not errors.missed.count:
        return Fitted(Constant.of(torch.zeros_like(copy.bias_D)), 0, "no routed tokens")
    copy.bias_D = errors.missed.mean_D.to(copy.bias_D)
    return Fitted(
        copy,
        errors.missed.count,
        squared_error=float(errors.missed.squares),
        constant_squared_error=float(errors.outputs.both.squares),
        held_out_share=errors.held_out_share,
    )
