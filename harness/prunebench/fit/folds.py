"""Even and odd calibration blocks: what is fitted on one half is scored on the other (2610.41366 §3, App. B.3, H.6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

__all__ = ["Folds"]


class _Additive(Protocol):
    def __add__(self, other: Self, /) -> Self: ...


_Sum = TypeVar("_Sum", bound=_Additive)


@dataclass(frozen=True)
class Folds(Generic[_Sum]):
    """What was measured on the rows of even calibration blocks, and on those of odd ones; streams add up.

    Args:
        even: of blocks 0, 2, 4, ….
        odd: of the others.
    """

    even: _Sum
    odd: _Sum

    @classmethod
    def of(cls, block_S: Tensor, measure: Callable[[Tensor], _Sum]) -> Folds[_Sum]:
        """Of the rows of each fold.

        Args:
            block_S: calibration block of each row.
            measure: called with the rows of a fold ([S] bool), of which there may be none.
        """
        even_S = block_S % 2 == 0
        return cls(measure(even_S), measure(~even_S))

    def __add__(self, other: Folds[_Sum]) -> Folds[_Sum]:
        """Of both streams together."""
        return Folds(self.even + other.even, self.odd + other.odd)

    @property
    def both(self) -> _Sum:
        """Of all rows."""
        return self.even + self.odd
