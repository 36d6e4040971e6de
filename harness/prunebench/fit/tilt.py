"""The tilt's fit: reduced-rank ridge regression of an expert's output on its input (2610.41366 App. B.1).

Written for sums over rows (N·C_xx and so on): the ridge is relative, so nothing changes with the scale.

D width of the input, O of the output, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.fit.moments import JointMoments
from prunebench.fit.result import Fitted
from prunebench.fit.share import fit_share
from prunebench.replacement import Constant, Tilt

__all__ = ["LinearMap", "Solver", "constant_error", "fit_tilt", "held_out_share", "reduced_rank", "squared_error"]

Solver = Literal["svd", "gram"]

# A channel whose spread is below this share of its mean is a constant plus rounding: bfloat16 and float32 inputs that
# differ at all differ by more, even if only one token in millions does.
_ROUNDING = 2.0**-48


@dataclass(frozen=True)
class LinearMap:
    """y ≈ μ + U·(V x − φ̄): the tilt without its clip.

    Args:
        mean_O: μ.
        up_OR: U = W_r, orthonormal columns.
        down_RD: V = Σ_r Q_rᵀ L⁻¹.
        offset_R: φ̄ = V x̄.
        sigma_R: standard deviation of the features V x over the fitted rows (divisor N, ours: App. B.1 says "their
            standard deviation").
    """

    mean_O: Tensor
    up_OR: Tensor
    down_RD: Tensor
    offset_R: Tensor
    sigma_R: Tensor

    @property
    def rank(self) -> int:
        """R."""
        return self.down_RD.shape[0]

    def truncated(self, rank: int) -> LinearMap:
        """The optimal map of a lower rank: directions are in order of what they explain."""
        if not 0 <= rank <= self.rank:
            raise UsageError(f"rank {rank} of a map of rank {self.rank}", expected=f"0 to {self.rank}")
        return LinearMap(
            self.mean_O, self.up_OR[:, :rank], self.down_RD[:rank], self.offset_R[:rank], self.sigma_R[:rank]
        )

    def tilt(self, clip: float = 4.0) -> Tilt:
        """The fill, in float32, with its features clipped at `clip` standard deviations."""
        return Tilt.of(
            mean_D=self.mean_O,
            up_DR=self.up_OR,
            down_RD=self.down_RD,
            offset_R=self.offset_R,
            clip_R=clip * self.sigma_R,
        )


def _ridged(xx_DD: Tensor, mean_x_D: Tensor, count: int, ridge: float) -> tuple[Tensor, Tensor]:
    """G = C_xx + λ·diag(C_xx), and which channels vary at all; a channel that does not gets the unit row (ours)."""
    variance_D = xx_DD.diagonal()
    alive_D = variance_D > count * (_ROUNDING * mean_x_D).square()
    both_DD = alive_D[:, None] & alive_D[None, :]
    gram_DD = torch.where(both_DD, xx_DD, 0.0) + torch.diag(torch.where(alive_D, ridge * variance_D, 1.0))
    return gram_DD, alive_D


def reduced_rank(moments: JointMoments, rank: int, *, ridge: float = 1e-2, solver: Solver = "svd") -> LinearMap:
    """Rank-r ridge regression that is optimal in the ridged metric (App. B.1).

    With L the Cholesky factor of G = C_xx + λ·diag(C_xx), A = G⁻¹C_xy and Lᵀ A = L⁻¹C_xy = QΣWᵀ: V = Σ_r Q_rᵀ L⁻¹ and
    U = W_r. An input channel that is constant over the rows has no weight (ours; Cholesky would fail).

    Args:
        moments: of the rows; at least one.
        rank: 0 to min(D, O); 0 gives the constant, the limit of the formula.
        ridge: λ ≥ 0, relative to each channel's variance.
        solver: `svd` is App. B.1's decomposition. `gram` takes W from the eigenvectors of (LᵀA)ᵀ(LᵀA) and V = WᵀAᵀ: the
            same map in exact arithmetic, several times faster at D = 2048, with half the digits in directions that
            explain nearly nothing.

    Raises:
        UsageError: a rank out of range, no rows, or C_xx singular at λ = 0.
    """
    width, outputs = moments.xy_DO.shape
    if not 0 <= rank <= min(width, outputs):
        raise UsageError(f"rank {rank} of a map {width} → {outputs}", expected=f"0 to {min(width, outputs)}")
    if ridge < 0:
        raise UsageError(f"ridge {ridge}", expected="0 or more")
    if not moments.count:
        raise UsageError("a regression on no rows", expected="at least one", fix="use the constant's fallback")
    gram_DD, alive_D = _ridged(moments.xx_DD, moments.mean_x_D, moments.count, ridge)
    lower_DD, failed = torch.linalg.cholesky_ex(gram_DD)
    if int(failed):
        raise UsageError(
            f"the inputs' covariance of {moments.count} rows is singular at ridge {ridge}",
            expected=f"a positive ridge, or more than {width} rows that span the inputs",
        )
    whitened_DO = torch.linalg.solve_triangular(lower_DD, moments.xy_DO * alive_D[:, None], upper=False)
    up_OR, projected_RD = _top_directions(whitened_DO, rank, solver)
    down_RD = torch.linalg.solve_triangular(lower_DD, projected_RD, upper=False, left=False) * alive_D
    variance_R = ((down_RD @ moments.xx_DD) * down_RD).sum(1) / moments.count
    return LinearMap(moments.mean_y_O, up_OR, down_RD, down_RD @ moments.mean_x_D, variance_R.clamp(min=0.0).sqrt())


def _top_directions(whitened_DO: Tensor, rank: int, solver: Solver) -> tuple[Tensor, Tensor]:
    """W_r ([O, R]) and Σ_r Q_rᵀ ([R, D]) of LᵀA."""
    if solver == "svd":
        left_DM, singular_M, right_MO = torch.linalg.svd(whitened_DO, full_matrices=False)
        return right_MO[:rank].T, singular_M[:rank, None] * left_DM[:, :rank].T
    if solver != "gram":
        raise UsageError(f"unknown solver {solver!r}", expected="svd or gram")
    vectors_OO = torch.linalg.eigh(whitened_DO.T @ whitened_DO).eigenvectors
    up_OR = vectors_OO[:, vectors_OO.shape[1] - rank :].flip(1)
    return up_OR, (whitened_DO @ up_OR).T


def squared_error(linear: LinearMap, moments: JointMoments) -> float:
    """Σ ‖y − μ − U(Vx − φ̄)‖² over rows of which only moments are known, the fit's own or held-out ones.

    About the rows' own means: tr C_yy − 2·tr(BᵀC_xy) + tr(BᵀC_xxB) + N‖(ȳ − μ) − U(V x̄ − φ̄)‖² with B = VᵀUᵀ. The clip
    is left out; the fill's own error follows from `Spread` of its residuals.
    """
    down_RD, up_OR = linear.down_RD, linear.up_OR
    cross = ((down_RD @ moments.xy_DO) * up_OR.T).sum()
    own = ((down_RD @ moments.xx_DD @ down_RD.T) * (up_OR.T @ up_OR)).sum()
    shift_O = moments.mean_y_O - linear.mean_O - up_OR @ (down_RD @ moments.mean_x_D - linear.offset_R)
    return float(moments.yy - 2 * cross + own + moments.count * shift_O.square().sum())


def constant_error(mean_O: Tensor, moments: JointMoments) -> float:
    """Σ ‖y − μ‖² over rows of which only moments are known."""
    return float(moments.yy + moments.count * (moments.mean_y_O - mean_O).square().sum())


def _enough(moments: JointMoments, rank: int) -> bool:
    """App. B.1: at most 4·r routed tokens leave the expert with the constant."""
    return moments.count > 4 * rank


def fit_tilt(
    moments: JointMoments, rank: int = 32, *, ridge: float = 1e-2, clip: float = 4.0, solver: Solver = "svd"
) -> Fitted:
    """The tilt of one expert (App. B.1), or the constant at ≤ 4·r routed tokens, as stated there.

    Args:
        moments: of (x, E(x)) over the expert's routed tokens.
        rank: r, 1 to D.
        ridge: λ.
        clip: c in standard deviations of the projected features.
        solver: as for `reduced_rank`.
    """
    _refuse_rank(rank, moments)
    if not _enough(moments, rank):
        reason = f"{moments.count} routed tokens, at most 4·{rank}"
        constant = float(moments.yy)
        return Fitted(Constant.of(moments.mean_y_O), moments.count, reason, constant, constant)
    linear = reduced_rank(moments, rank, ridge=ridge, solver=solver)
    return Fitted(
        linear.tilt(clip),
        moments.count,
        squared_error=squared_error(linear, moments),
        constant_squared_error=float(moments.yy),
    )


def held_out_share(
    fitted_on: JointMoments, scored_on: JointMoments, rank: int = 32, *, ridge: float = 1e-2, solver: Solver = "svd"
) -> float:
    """Fit share of a tilt (unclipped) that was fitted on one fold, on the other fold (§3, App. B.3).

    0 where the fit falls back to the constant.
    """
    _refuse_rank(rank, fitted_on)
    if not _enough(fitted_on, rank):
        return 0.0
    linear = reduced_rank(fitted_on, rank, ridge=ridge, solver=solver)
    return fit_share(squared_error(linear, scored_on), constant_error(linear.mean_O, scored_on))


def _refuse_rank(rank: int, moments: JointMoments) -> None:
    width = min(moments.xy_DO.shape)
    if not 1 <= rank <= width:
        raise UsageError(
            f"rank {rank} is no tilt",
            expected=f"1 to the width, {width}",
            fix="for rank 0 use the operator constant" if rank < 1 else "lower the rank",
        )
