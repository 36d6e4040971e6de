"""What a streaming statistic is: a small class `{start, update, merge, value}`, accumulated in float64.

E experts, D width, S rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.moe import TokenBatch

__all__ = ["ByPass", "Statistic", "by_pass", "sum_by_expert", "sum_by_index"]


def sum_by_expert(values_S: Tensor, batch: TokenBatch) -> Tensor:
    """Σ over each expert's rows, in float64 ([E] or [E, D]); deterministic on every device."""
    values_S = values_S.double()
    if values_S.device.type == "cpu":
        total = values_S.new_zeros(batch.counts_E.shape[0], *values_S.shape[1:])
        return total.index_add_(0, batch.expert_S, values_S)
    # index_add_ uses atomics on CUDA, in an order that changes from run to run.
    return torch.segment_reduce(values_S, "sum", lengths=batch.counts_E, axis=0, unsafe=True)


def sum_by_index(values_P: Tensor, index_P: Tensor, size: int) -> Tensor:
    """Σ of float64 values by index ([size]); deterministic on every device."""
    if values_P.device.type == "cpu":
        return values_P.new_zeros(size).index_add_(0, index_P, values_P)
    index_P, order_P = index_P.sort(stable=True)
    lengths = torch.zeros(size, dtype=torch.int64, device=index_P.device)
    lengths.scatter_add_(0, index_P, torch.ones_like(index_P))
    return torch.segment_reduce(values_P[order_P], "sum", lengths=lengths, axis=0, unsafe=True)


class Statistic(ABC):
    """One statistic of one layer's experts.

    A method names the statistics that it needs by returning fresh instances; the harness starts one per layer, updates
    it batch by batch, and hands its `value` to the method as `layer.stats[name]`. A method's own file may define more.
    The sufficient numbers live in `state`, float64 or int64 tensors; `merge` of two disjoint streams equals one stream.
    One that needs others of the same layer to be finished names them in `after`: a fit pass then visits the layer once
    more (`calibration.stream`); what `value` needs of theirs belongs into `state`.

    `measured_in` names the pass that measures it: `gradient` sees the gradients of every expert, sequence by sequence
    (`calibration.gradient`), and is kept for other arms. For a method's `replace`, `score` sees every expert of every
    layer at once and is kept too; `fit` sees pruned experts only, one layer after the other, and is right for what is
    large per expert. What `select` needs is of every expert, so of a score or a gradient pass.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    after: ClassVar[tuple[str, ...]] = ()
    measured_in: ClassVar[Literal["score", "fit", "gradient"]] = "score"

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def start(self, experts: int, width: int, device: torch.device) -> None:
        """Set `state` to that of an empty stream."""

    def given(self, earlier: Mapping[str, Statistic]) -> None:
        """Take what is needed of the finished statistics named in `after`; called between `start` and the visit."""
        del earlier

    @abstractmethod
    def update(self, batch: TokenBatch) -> None:
        """Add a batch."""

    def merge(self, other: Statistic) -> None:
        """Add another stream's state; right for plain sums."""
        for key, value in other.state.items():
            self.state[key] = self.state[key] + value.to(self.state[key].device)

    @abstractmethod
    def value(self) -> Any:
        """The statistic, as numpy arrays on the host."""

    def to_host(self) -> None:
        """Move the state off the device; called once, after the pass."""
        self.state = {key: value.cpu() for key, value in self.state.items()}


class ByPass(NamedTuple):
    """Statistics by the pass that measures them."""

    score: tuple[Statistic, ...]
    fit: tuple[Statistic, ...]
    gradient: tuple[Statistic, ...]


def by_pass(statistics: Sequence[Statistic]) -> ByPass:
    """A method's `replace_needs` by the pass that measures each.

    Of a gradient pass are those that say so. Of a fit pass are those that say so, those that come after others, and the
    others, whom they have to follow.

    Raises:
        UsageError: one that comes after another of a gradient pass.
    """
    gradient = tuple(one for one in statistics if one.measured_in == "gradient")
    statistics = tuple(one for one in statistics if one.measured_in != "gradient")
    of_gradients = {one.name for one in gradient}
    for one in statistics:
        if early := sorted(of_gradients & set(one.after)):
            raise UsageError(
                f"statistic {one.name!r} comes after {early[0]}, which is of another pass",
                where=type(one).__name__,
                expected="statistics of the fit pass",
                fix="declare both, and put them together in `replace`",
            )
    fitted = {one.name for one in statistics if one.measured_in == "fit" or one.after}
    while more := {name for one in statistics if one.name in fitted for name in one.after} - fitted:
        fitted |= more
    score = tuple(one for one in statistics if one.name not in fitted)
    return ByPass(score, tuple(one for one in statistics if one.name in fitted), gradient)
