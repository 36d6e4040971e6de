"""The tilted novice: the constant plus a clipped map of low rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.replacement.fill import Fill

__all__ = ["Tilt"]


class Tilt(Fill):
    """N(x) = μ + U·clip(V x − φ̄, ±c): a constant that leans with its input (2610.41366 §3 and App. B.1).

    Stores 2rD + D + 2r values (App. B.2): both maps, the mean, the features' mean φ̄ = V x̄ and the clip scale c. The
    input mean x̄ is not stored, as it is folded into φ̄.

    Args:
        width: D.
        rank: r, at least 1.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        if not 1 <= rank <= width:
            raise UsageError(
                f"rank {rank} is no tilt",
                expected=f"1 to the width, {width}",
                fix="for rank 0 use the operator constant" if rank < 1 else "lower the rank",
            )
        self.register_buffer("mean_D", torch.zeros(width))
        self.register_buffer("up_DR", torch.zeros(width, rank))
        self.register_buffer("down_RD", torch.zeros(rank, width))
        self.register_buffer("offset_R", torch.zeros(rank))
        self.register_buffer("clip_R", torch.zeros(rank))
        self.mean_D: Tensor
        self.up_DR: Tensor
        self.down_RD: Tensor
        self.offset_R: Tensor
        self.clip_R: Tensor

    @classmethod
    def of(cls, *, mean_D: Tensor, up_DR: Tensor, down_RD: Tensor, offset_R: Tensor, clip_R: Tensor) -> Tilt:
        """A tilt with these values: μ, U, V, φ̄ and c ≥ 0."""
        fill = cls(*up_DR.shape)
        fill.load_state_dict(
            {"mean_D": mean_D, "up_DR": up_DR, "down_RD": down_RD, "offset_R": offset_R, "clip_R": clip_R}
        )
        return fill

    def features(self, x_SD: Tensor) -> Tensor:
        """V x − φ̄, before the clip ([S, R])."""
        return torch.addmm(-self.offset_R, x_SD, self.down_RD.T)

    def forward(self, x_SD: Tensor) -> Tensor:
        clipped_SR = self.features(x_SD).clamp(-self.clip_R, self.clip_R)
        return torch.addmm(self.mean_D, clipped_SR, self.up_DR.T)

    def to_json(self) -> dict[str, Any]:
        return {"width": self.down_RD.shape[1], "rank": self.down_RD.shape[0]}
