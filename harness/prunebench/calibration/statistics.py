"""Streaming statistics of experts: small classes `{update, merge, value}`, accumulated in float64.

Each is defined over routed rows (t, e), e ∈ top-k(t), padding excluded; g is the gate AS APPLIED (renormalised and
scaled if the router does so), f_e(x_t) the un-weighted expert output. An expert that was never routed to has count 0
and the value 0 in every statistic (ours: papers are silent), never NaN.

T tokens, E experts, D width, S rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.moe import TokenBatch

__all__ = [
    "BUILT_IN",
    "ByPass",
    "Count",
    "GateNormSum",
    "GateSquaredNormSquaredSum",
    "GateSum",
    "Moments",
    "NormSum",
    "OutputMoments",
    "Statistic",
    "by_pass",
    "sum_by_expert",
]

Float64 = npt.NDArray[np.float64]


def sum_by_expert(values_S: Tensor, batch: TokenBatch) -> Tensor:
    """Σ over each expert's rows, in float64 ([E] or [E, D]); deterministic on every device."""
    values_S = values_S.double()
    if values_S.device.type == "cpu":
        total = values_S.new_zeros(batch.counts_E.shape[0], *values_S.shape[1:])
        return total.index_add_(0, batch.expert_S, values_S)
    # index_add_ uses atomics on CUDA, in an order that changes from run to run.
    return torch.segment_reduce(values_S, "sum", lengths=batch.counts_E, axis=0, unsafe=True)


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


class _Sum(Statistic):
    """Σ over an expert's rows of one number per row."""

    def start(self, experts: int, width: int, device: torch.device) -> None:
        del width
        self.state = {"sum_E": torch.zeros(experts, dtype=torch.float64, device=device)}

    @abstractmethod
    def per_row(self, batch: TokenBatch) -> Tensor:
        """The number of each row ([S], float64)."""

    def update(self, batch: TokenBatch) -> None:
        self.state["sum_E"] += sum_by_expert(self.per_row(batch), batch)

    def value(self) -> Float64:
        return self.state["sum_E"].numpy()


class Count(Statistic):
    """N_e: tokens routed to each expert; `value` is int64 [E]."""

    name = "count"

    def start(self, experts: int, width: int, device: torch.device) -> None:
        del width
        self.state = {"count_E": torch.zeros(experts, dtype=torch.int64, device=device)}

    def update(self, batch: TokenBatch) -> None:
        self.state["count_E"] += batch.counts_E

    def value(self) -> npt.NDArray[np.int64]:
        return self.state["count_E"].numpy()


class GateSum(_Sum):
    """Σ g over routed tokens [E]; divided by all T tokens it is MoNE's frequency term (2610.41366 §3)."""

    name = "gate_sum"

    def per_row(self, batch: TokenBatch) -> Tensor:
        return batch.gates_S.double()


class NormSum(_Sum):
    """Σ ‖f‖₂ over routed tokens [E]."""

    name = "norm_sum"

    def per_row(self, batch: TokenBatch) -> Tensor:
        return batch.output_norms_S


class GateNormSum(_Sum):
    """Σ g·‖f‖₂ over routed tokens [E]; divided by N_e it is REAP (Lasby et al. 2026)."""

    name = "gate_norm_sum"

    def per_row(self, batch: TokenBatch) -> Tensor:
        return batch.gates_S.double() * batch.output_norms_S


class GateSquaredNormSquaredSum(_Sum):
    """Σ g²·‖f‖₂² over routed tokens [E]: SGE (2610.41366 §3)."""

    name = "gate_squared_norm_squared_sum"

    def per_row(self, batch: TokenBatch) -> Tensor:
        return (batch.gates_S.double() * batch.output_norms_S).square()


@dataclass(frozen=True)
class Moments:
    """Mean and population variance of expert outputs.

    Args:
        count_E: N_e.
        mean_ED: μ_e, zero where N_e = 0.
        variance_ED: population variance per channel, zero where N_e = 0.
    """

    count_E: npt.NDArray[np.int64]
    mean_ED: Float64
    variance_ED: Float64


class OutputMoments(Statistic):
    """Mean and population variance of f_e(x) over routed tokens; `value` is `Moments`.

    Kept as (N, mean, Σ(f - mean)²) and merged by Chan, Golub & LeVeque (1979), eq. 2.1: sums of squares would cancel
    where the mean dwarfs the spread.
    """

    name = "output_moments"

    def start(self, experts: int, width: int, device: torch.device) -> None:
        self.state = {
            "count_E": torch.zeros(experts, dtype=torch.int64, device=device),
            "mean_ED": torch.zeros(experts, width, dtype=torch.float64, device=device),
            "squares_ED": torch.zeros(experts, width, dtype=torch.float64, device=device),
        }

    def update(self, batch: TokenBatch) -> None:
        mean_ED = torch.zeros_like(self.state["mean_ED"])
        squares_ED = torch.zeros_like(mean_ED)
        if mean_ED.device.type == "cpu":
            # Expert by expert, so that each expert's rows stay in cache for both passes.
            for expert, start, end in batch.segments:
                rows_SD = batch.outputs_SD[start:end].double()
                mean_ED[expert] = rows_SD.mean(0)
                squares_ED[expert] = (rows_SD - mean_ED[expert]).square_().sum(0)
        else:
            rows_SD = batch.outputs_SD.double()
            mean_ED = sum_by_expert(rows_SD, batch) / batch.counts_E.clamp(min=1)[:, None]
            squares_ED = sum_by_expert((rows_SD - mean_ED[batch.expert_S]).square_(), batch)
        self._add(batch.counts_E, mean_ED, squares_ED)

    def merge(self, other: Statistic) -> None:
        self._add(other.state["count_E"], other.state["mean_ED"], other.state["squares_ED"])

    def _add(self, count_E: Tensor, mean_ED: Tensor, squares_ED: Tensor) -> None:
        state = self.state
        total_E1 = (state["count_E"] + count_E).clamp(min=1).double()[:, None]
        delta_ED = mean_ED - state["mean_ED"]
        own_E1, new_E1 = state["count_E"].double()[:, None], count_E.double()[:, None]
        state["mean_ED"] = state["mean_ED"] + delta_ED * (new_E1 / total_E1)
        state["squares_ED"] = state["squares_ED"] + squares_ED + delta_ED.square() * (own_E1 * new_E1 / total_E1)
        state["count_E"] = state["count_E"] + count_E

    def value(self) -> Moments:
        count_E = self.state["count_E"]
        variance_ED = self.state["squares_ED"] / count_E.clamp(min=1)[:, None]
        return Moments(count_E.numpy(), self.state["mean_ED"].numpy(), variance_ED.numpy())


BUILT_IN: tuple[type[Statistic], ...] = (
    Count,
    GateSum,
    NormSum,
    GateNormSum,
    GateSquaredNormSquaredSum,
    OutputMoments,
)
