"""What answers a pruned slot: small modules that say how many values they store.

A fill is installed from its saved form, (class, JSON config, state dict), never from the object a method returned, so
what is counted is what runs. A new functional form is one class here or in a method's own file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Constant", "Fill", "Zero"]


class Fill(nn.Module, ABC):
    """Stands for one pruned expert: maps its inputs [S, D] to outputs [S, D], un-weighted by the gate.

    Everything that is stored must be in `state_dict`; everything else in `to_json`, which rebuilds the module as
    `cls(**to_json())` before the state is loaded.
    """

    @abstractmethod
    def forward(self, x_SD: Tensor) -> Tensor:
        """Answer the rows that were routed to the pruned expert."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Constructor arguments, JSON only."""

    def values_stored(self) -> int:
        """How many numbers this fill adds to a checkpoint (2610.41366 App. B.2 counts the same way)."""
        return sum(tensor.numel() for tensor in self.state_dict().values())


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
