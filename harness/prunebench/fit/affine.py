"""MoRA's cross-expert proxy as 2610.41366 App. D describes it: a channel-wise affine map of a survivor's output.

f_i(x) ≈ a ⊙ f_j(x) + b by weighted ridge regression, accepted where its R² on held-out tokens exceeds 0.4. MoRA's code
is not released and its paper leaves open the ridge, whether b is penalised, and the baseline of R²: those choices are
ours, are named below, and are parameters.

S rows, R candidate survivors, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from prunebench.errors import UsageError

__all__ = ["PairMoments", "Proxy", "affine_maps", "best_proxy", "held_out_r2"]


@dataclass(frozen=True)
class PairMoments:
    """Weighted moments of one pruned expert's outputs with those of R survivors, channel by channel.

    Args:
        count: rows.
        weight: Σ ω; a tensor without dimensions.
        target_D: weighted mean m_i of f_i.
        source_RD: weighted means m_j of f_j.
        target_square_D: Σ ω (f_i − m_i)².
        source_square_RD: Σ ω (f_j − m_j)².
        cross_RD: Σ ω (f_i − m_i)(f_j − m_j).
    """

    count: int
    weight: Tensor
    target_D: Tensor
    source_RD: Tensor
    target_square_D: Tensor
    source_square_RD: Tensor
    cross_RD: Tensor

    @classmethod
    def of(cls, target_SD: Tensor, source_RSD: Sequence[Tensor] | Tensor, weight_S: Tensor) -> Self:
        """Of these rows.

        Args:
            target_SD: f_i, un-weighted by gates.
            source_RSD: f_j of each survivor on the same tokens.
            weight_S: ω ≥ 0; the pretrained router's probability of i in 2610.41366.
        """
        target_SD, weight_S1 = target_SD.double(), weight_S.double()[:, None]
        total = weight_S1.sum()
        share_S1 = weight_S1 / total if float(total) > 0 else torch.zeros_like(weight_S1)
        target_D = (share_S1 * target_SD).sum(0)
        target_SD = target_SD - target_D
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for one_SD in source_RSD:  # one by one: a float64 copy of all of them would be the largest tensor of a pass
            mean_D = (share_S1 * one_SD.double()).sum(0)
            centred_SD = one_SD.double() - mean_D
            weighted_SD = weight_S1 * centred_SD
            parts.append((mean_D, (weighted_SD * centred_SD).sum(0), (weighted_SD * target_SD).sum(0)))
        source_RD, source_square_RD, cross_RD = (torch.stack(part) for part in zip(*parts, strict=True))
        square_D = (weight_S1 * target_SD.square()).sum(0)
        return cls(len(weight_S1), total, target_D, source_RD, square_D, source_square_RD, cross_RD)

    def __add__(self, other: PairMoments) -> PairMoments:
        """Of both streams together."""
        total = self.weight + other.weight
        part = other.weight / total if float(total) > 0 else torch.zeros_like(total)
        between = self.weight * part
        step_D, step_RD = other.target_D - self.target_D, other.source_RD - self.source_RD
        return PairMoments(
            self.count + other.count,
            total,
            self.target_D + part * step_D,
            self.source_RD + part * step_RD,
            self.target_square_D + other.target_square_D + between * step_D.square(),
            self.source_square_RD + other.source_square_RD + between * step_RD.square(),
            self.cross_RD + other.cross_RD + between * step_D * step_RD,
        )


def affine_maps(moments: PairMoments, *, ridge: float = 1e-6) -> tuple[Tensor, Tensor]:
    """a and b of every survivor ([R, D] each): a = cov_ω(f_j, f_i) / ((1 + λ)·var_ω(f_j)), b = m_i − a·m_j.

    λ is relative to each channel's variance and b is not penalised (ours: MoRA's ridge was not found). A channel of a
    survivor that does not vary gets a = 0.
    """
    scale_RD = (1.0 + ridge) * moments.source_square_RD
    a_RD = torch.where(scale_RD > 0, moments.cross_RD / torch.where(scale_RD > 0, scale_RD, 1.0), 0.0)
    return a_RD, moments.target_D - a_RD * moments.source_RD


def held_out_r2(a_RD: Tensor, b_RD: Tensor, moments: PairMoments) -> Tensor:
    """q = 1 − Σ ω‖f_i − a⊙f_j − b‖² / Σ ω‖f_i − m_i‖² of every survivor, on the rows of `moments` ([R]).

    m_i is the mean on those rows (ours): the held-out variance is the baseline. 0 where it vanishes.
    """
    error_R = _squared_errors(a_RD, b_RD, moments)
    total = moments.target_square_D.sum()
    return 1.0 - error_R / total if float(total) > 0 else torch.zeros_like(error_R)


def _squared_errors(a_RD: Tensor, b_RD: Tensor, moments: PairMoments) -> Tensor:
    """Σ ω‖f_i − a⊙f_j − b‖² of every survivor ([R])."""
    shift_RD = moments.target_D - a_RD * moments.source_RD - b_RD
    error_RD = moments.target_square_D - 2 * a_RD * moments.cross_RD + a_RD.square() * moments.source_square_RD
    return (error_RD + moments.weight * shift_RD.square()).sum(1)


@dataclass(frozen=True)
class Proxy:
    """The best survivor for one pruned expert.

    Args:
        survivor: j, its id.
        a_D: the scale; what answers is a ⊙ f_j(x) + b.
        b_D: the shift.
        r2: its q on held-out tokens.
        accepted: whether q exceeds the threshold; if not, the expert's slots are rerouted (App. D.1).
        squared_error: Σ ω‖f_i − a⊙f_j − b‖² on the rows of the fit.
        constant_squared_error: Σ ω‖f_i − m_i‖² on the same.
    """

    survivor: int
    a_D: Tensor
    b_D: Tensor
    r2: float
    accepted: bool
    squared_error: float
    constant_squared_error: float

    @property
    def values_stored(self) -> int:
        """2D if it is used."""
        return 2 * self.a_D.shape[0] if self.accepted else 0


def best_proxy(
    fitted_on: PairMoments,
    scored_on: PairMoments,
    survivors: Sequence[int],
    *,
    threshold: float = 0.4,
    ridge: float = 1e-6,
) -> Proxy:
    """The survivor with the highest held-out R²; of equal ones the first.

    Args:
        fitted_on: moments of the rows for a and b.
        scored_on: moments of the held-out rows.
        survivors: ids, in the order of the moments' R.
        threshold: q must exceed it, 0.4 in MoRA.
        ridge: as for `affine_maps`.
    """
    if len(survivors) != fitted_on.source_RD.shape[0] or not survivors:
        raise UsageError(f"{len(survivors)} survivors", expected=f"{fitted_on.source_RD.shape[0]}, as in the moments")
    a_RD, b_RD = affine_maps(fitted_on, ridge=ridge)
    r2_R = held_out_r2(a_RD, b_RD, scored_on)
    best = int(torch.argsort(r2_R, descending=True, stable=True)[0])
    r2 = float(r2_R[best])
    error = float(_squared_errors(a_RD, b_RD, fitted_on)[best])
    constant = float(fitted_on.target_square_D.sum())
    return Proxy(survivors[best], a_RD[best], b_RD[best], r2, r2 > threshold, error, constant)
