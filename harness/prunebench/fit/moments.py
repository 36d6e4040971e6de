"""Moments of an expert's routed rows, in float64: what fits read instead of the rows.

Means and second moments about the mean, never sums of squares: those cancel where the mean dwarfs the spread. Two
streams are added by Chan, Golub & LeVeque (1979), eq. 2.1, so any split of the rows gives the same moments.

S rows, D width of the input, O width of the output (equal to D in a model), F neurons of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from prunebench.errors import UsageError

__all__ = ["Gram", "JointMoments", "Spread", "pooled"]


@dataclass(frozen=True)
class JointMoments:
    """First and second moments of (input, output) rows; tokens unweighted, no gates (2610.41366 App. B.1).

    Args:
        count: N, rows.
        mean_x_D: x̄, zero if there are no rows.
        mean_y_O: ȳ, the constant's μ.
        xx_DD: Σ (x − x̄)(x − x̄)ᵀ, that is N·C_xx.
        xy_DO: Σ (x − x̄)(y − ȳ)ᵀ, that is N·C_xy.
        yy: Σ ‖y − ȳ‖², the constant's squared error on these rows; a tensor without dimensions.
    """

    count: int
    mean_x_D: Tensor
    mean_y_O: Tensor
    xx_DD: Tensor
    xy_DO: Tensor
    yy: Tensor

    @classmethod
    def none(cls, width: int, outputs: int, device: torch.device | None = None) -> Self:
        """Of no rows."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(0, zeros(width), zeros(outputs), zeros(width, width), zeros(width, outputs), zeros())

    @classmethod
    def of(cls, x_SD: Tensor, y_SO: Tensor) -> Self:
        """Of these rows, in any dtype; at least one."""
        x_SD, y_SO, mean_x_D, mean_y_O = _centred(x_SD, y_SO)
        return cls(x_SD.shape[0], mean_x_D, mean_y_O, x_SD.T @ x_SD, x_SD.T @ y_SO, y_SO.square().sum())

    def including(self, x_SD: Tensor, y_SO: Tensor) -> JointMoments:
        """Of these rows too; as `self + JointMoments.of(x_SD, y_SO)`, with fewer passes over memory."""
        if not self.count:
            return JointMoments.of(x_SD, y_SO)
        x_SD, y_SO, mean_x_D, mean_y_O = _centred(x_SD, y_SO)
        within = (
            torch.addmm(self.xx_DD, x_SD.T, x_SD),
            torch.addmm(self.xy_DO, x_SD.T, y_SO),
            self.yy + y_SO.square().sum(),
        )
        return self._joined(x_SD.shape[0], mean_x_D, mean_y_O, within)

    def __add__(self, other: JointMoments) -> JointMoments:
        """Of both streams together."""
        if not self.count or not other.count:
            return self if self.count else other
        within = (self.xx_DD + other.xx_DD, self.xy_DO + other.xy_DO, self.yy + other.yy)
        return self._joined(other.count, other.mean_x_D, other.mean_y_O, within)

    def _joined(
        self, more: int, mean_x_D: Tensor, mean_y_O: Tensor, within: tuple[Tensor, Tensor, Tensor]
    ) -> JointMoments:
        """With `more` rows of these means, given both streams' moments, each about its own means, added up."""
        xx_DD, xy_DO, yy = within
        count = self.count + more
        step_x_D, step_y_O = mean_x_D - self.mean_x_D, mean_y_O - self.mean_y_O
        between = self.count * (more / count)
        return JointMoments(
            count,
            self.mean_x_D + step_x_D * (more / count),
            self.mean_y_O + step_y_O * (more / count),
            torch.addr(xx_DD, step_x_D, step_x_D, alpha=between),
            torch.addr(xy_DO, step_x_D, step_y_O, alpha=between),
            yy + between * step_y_O.square().sum(),
        )

    @property
    def second_moment_DD(self) -> Tensor:
        """E[x xᵀ], not centred: what whitening needs (App. C.1)."""
        return self.xx_DD / max(self.count, 1) + torch.outer(self.mean_x_D, self.mean_x_D)


def _centred(x_SD: Tensor, y_SO: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows about their means, in float64, and those means."""
    x_SD, y_SO = x_SD.double(), y_SO.double()
    mean_x_D, mean_y_O = x_SD.mean(0), y_SO.mean(0)
    return x_SD - mean_x_D, y_SO - mean_y_O, mean_x_D, mean_y_O


def pooled(moments: Sequence[JointMoments]) -> JointMoments:
    """Moments within each expert, added over experts: a fit on them is one map that the experts share (App. B.3).

    Each expert keeps its own means, so what is pooled is about them; the means of the result are averages over rows
    and belong to no expert. Of one expert it is that expert's moments.
    """
    if not moments:
        raise UsageError("no moments to pool", expected="those of at least one expert")
    count = sum(one.count for one in moments)
    share = [one.count / max(count, 1) for one in moments]
    return JointMoments(
        count,
        torch.stack([part * one.mean_x_D for part, one in zip(share, moments, strict=True)]).sum(0),
        torch.stack([part * one.mean_y_O for part, one in zip(share, moments, strict=True)]).sum(0),
        torch.stack([one.xx_DD for one in moments]).sum(0),
        torch.stack([one.xy_DO for one in moments]).sum(0),
        torch.stack([one.yy for one in moments]).sum(),
    )


@dataclass(frozen=True)
class Spread:
    """Mean and squared spread of rows, such as a copy's residuals: its bias and its squared error at once.

    Args:
        count: N.
        mean_D: their mean; zero if there are no rows.
        squares: Σ ‖v − mean‖²; a tensor without dimensions.
    """

    count: int
    mean_D: Tensor
    squares: Tensor

    @classmethod
    def of(cls, rows_SD: Tensor) -> Self:
        """Of these rows, in any dtype; there may be none."""
        rows_SD = rows_SD.double()
        mean_D = rows_SD.sum(0) / max(rows_SD.shape[0], 1)
        return cls(rows_SD.shape[0], mean_D, (rows_SD - mean_D).square().sum())

    def __add__(self, other: Spread) -> Spread:
        """Of both streams together."""
        count = self.count + other.count
        step_D = other.mean_D - self.mean_D
        part = other.count / max(count, 1)
        return Spread(
            count,
            self.mean_D + step_D * part,
            self.squares + other.squares + self.count * part * step_D.square().sum(),
        )

    def about(self, centre_D: Tensor) -> Tensor:
        """Σ ‖v − centre‖² over the rows."""
        return self.squares + self.count * (self.mean_D - centre_D).square().sum()


@dataclass(frozen=True)
class Gram:
    """E[v vᵀ] of rows, not centred, such as intermediate activations; a plain sum, as nothing is subtracted.

    Args:
        count: N.
        sum_FF: Σ v vᵀ.
    """

    count: int
    sum_FF: Tensor

    @classmethod
    def of(cls, rows_SF: Tensor) -> Self:
        """Of these rows, in any dtype; there may be none."""
        rows_SF = rows_SF.double()
        return cls(rows_SF.shape[0], rows_SF.T @ rows_SF)

    def __add__(self, other: Gram) -> Gram:
        """Of both streams together."""
        return Gram(self.count + other.count, self.sum_FF + other.sum_FF)

    @property
    def mean_FF(self) -> Tensor:
        """E[v vᵀ], zero if there are no rows."""
        return self.sum_FF / max(self.count, 1)
