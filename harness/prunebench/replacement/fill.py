"""The base of everything that answers a pruned slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

__all__ = ["Fill"]


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
