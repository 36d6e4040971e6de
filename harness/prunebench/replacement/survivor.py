"""Another expert of the layer answers in place of the pruned one (2610.41366 §3, *fill the slot from a survivor*)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.replacement.fill import Fill

__all__ = ["AffineSurvivor", "Survivor"]


class Survivor(Fill):
    """ConMoE's remapped slot: survivor j answers, N_i(x) = f_j(x), at the pruned expert's own gate; stores nothing.

    Where j is selected too, the token gets (g_i + g_j)·f_j(x). The rows that a survivor answers for others are computed
    apart from its own, so that its own outputs keep their bits.

    A fill of this kind is shown f_j(x) in place of x, so a subclass says in `forward` what it makes of it.

    Args:
        survivor: j, which must not be pruned.
    """

    def __init__(self, survivor: int) -> None:
        super().__init__()
        if survivor < 0:
            raise UsageError(f"survivor {survivor} does not exist", expected="an expert's id")
        self.survivor = survivor

    def forward(self, y_SD: Tensor) -> Tensor:
        return y_SD

    def to_json(self) -> dict[str, Any]:
        return {"survivor": self.survivor}


class AffineSurvivor(Survivor):
    """MoRA's proxy: N_i(x) = a ⊙ f_j(x) + b, channel by channel (2610.41366 App. D); stores 2D values.

    Args:
        survivor: j.
        width: D.
    """

    def __init__(self, survivor: int, width: int) -> None:
        super().__init__(survivor)
        self.register_buffer("scale_D", torch.ones(width))
        self.register_buffer("shift_D", torch.zeros(width))
        self.scale_D: Tensor
        self.shift_D: Tensor

    @classmethod
    def of(cls, survivor: int, scale_D: Tensor, shift_D: Tensor) -> AffineSurvivor:
        """A proxy with these a and b, in float32."""
        fill = cls(survivor, scale_D.shape[0])
        fill.scale_D.copy_(scale_D)
        fill.shift_D.copy_(shift_D)
        return fill

    def forward(self, y_SD: Tensor) -> Tensor:
        return torch.addcmul(self.shift_D, y_SD, self.scale_D)

    def to_json(self) -> dict[str, Any]:
        return {"survivor": self.survivor, "width": self.scale_D.shape[0]}
