"""Answers that do not look at the input: the mean output, and nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prunebench.replacement.fill import Fill

__all__ = ["Constant", "Zero"]


class Constant(Fill):
    """MoNE's novice: the pruned expert's mean output μ, whatever the input (2610.41366 §3); stores D values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean_D", torch.zeros(width))
        self.mean_D: Tensor

    @classmethod
    def of(cls, mean_D: Tensor) -> Constant:
        """A constant with this mean."""
        fill = cls(mean_D.shape[0])
        fill.mean_D.copy_(mean_D)
        return fill

    def forward(self, x_SD: Tensor) -> Tensor:
        return self.mean_D.expand(x_SD.shape[0], -1)

    def to_json(self) -> dict[str, Any]:
        return {"width": self.mean_D.shape[0]}


class Zero(Fill):
    """The slot is kept, with its gate, and nothing answers; stores nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x_SD: Tensor) -> Tensor:
        return x_SD.new_zeros(x_SD.shape[0], self.width)

    def to_json(self) -> dict[str, Any]:
        return {"width": self.width}
