"""The statistics of experts that every score pass collects, accumulated in float64.

Each is defined over routed rows (t, e), e ∈ top-k(t), padding excluded; g is the gate AS APPLIED (renormalised and
scaled if the router does so), f_e(x_t) the un-weighted expert output. An expert that was never routed to has count 0
and the value 0 in every statistic (ours: papers are silent), never NaN.

T tokens, E experts, D width, S rows.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prunebench.calibration.base import Statistic, sum_by_expert
from prunebench.calibration.residuals import ResidualSums
from prunebench.errors import UsageError
from prunebench.moe import TokenBatch

__all__ = [
    "BUILT_IN",
    "COLLECTED",
    "Count",
    "GateNormSum",
    "GateSquaredNormSquaredSum",
    "GateSum",
    "Moments",
    "NormSquaredSum",
    "NormSum",
    "OutputMax",
    "OutputMoments",
    "ReleasedMoments",
    "ScoreSum",
    "ScoreTotal",
]

Float64 = npt.NDArray[np.float64]


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


class ScoreSum(_Sum):
    """Σ p over routed tokens [E], the router's score before any renormalisation: SEER's soft count (2404.05089)."""

    name = "score_sum"

    def per_row(self, batch: TokenBatch) -> Tensor:
        return batch.scores_TE[batch.token_S, batch.expert_S].double()


class NormSquaredSum(_Sum):
    """Σ ‖f‖₂² over routed tokens [E]; divided by N_e it is MSAN (2606.15716)."""

    name = "norm_squared_sum"

    def per_row(self, batch: TokenBatch) -> Tensor:
        return batch.output_norms_S.square()


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


class OutputMax(Statistic):
    """max |f| over routed tokens and channels [E]: what super experts are found by (2507.23279, Eq. 6)."""

    name = "output_max"

    def start(self, experts: int, width: int, device: torch.device) -> None:
        del width
        self.state = {"max_E": torch.zeros(experts, dtype=torch.float64, device=device)}

    def update(self, batch: TokenBatch) -> None:
        # Two plain reductions: the norm of order ∞ takes nine times as long on a CPU.
        max_S = torch.maximum(batch.outputs_SD.amax(-1), -batch.outputs_SD.amin(-1)).double()
        self.state["max_E"] = self.state["max_E"].scatter_reduce(0, batch.expert_S, max_S, "amax")

    def merge(self, other: Statistic) -> None:
        self.state["max_E"] = torch.maximum(self.state["max_E"], other.state["max_E"].to(self.state["max_E"].device))

    def value(self) -> Float64:
        return self.state["max_E"].numpy()


class ScoreTotal(Statistic):
    """Σ p over ALL tokens [E], routed or not: the other reading of SEER's soft count (ours)."""

    name = "score_total"

    def start(self, experts: int, width: int, device: torch.device) -> None:
        del width
        self.state = {"sum_E": torch.zeros(experts, dtype=torch.float64, device=device)}

    def update(self, batch: TokenBatch) -> None:
        self.state["sum_E"] += batch.scores_TE.sum(0, dtype=torch.float64)

    def value(self) -> Float64:
        return self.state["sum_E"].numpy()


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
        self._add(batch.counts_E, *batch.moments_E)

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


class ReleasedMoments(Statistic):
    """Σ over channels of the variance of f_e(x) as MoNE's released code runs it (zxgx/mode-pd ee6e187); `value` is [E].

    With n tokens seen before and t in this batch: b ← (n·b + Σf)/(n + t), and, only if n > 0,
    v ← v·(n − 1)/(n + t − 1) + Σ(f − b)²/(n + t), about the new b. So the first batch in which an expert has tokens
    adds nothing to v, one that is met in a single batch keeps v = 0, and the numbers depend on how the text is cut: a
    batch is one forward (their runs: 4,096 tokens). Streams cannot be merged. Their code divides by zero where an
    expert has no token in the first batch; here such an expert starts with the first batch that has some (ours).
    """

    name = "released_moments"

    def start(self, experts: int, width: int, device: torch.device) -> None:
        self.state = {
            "count_E": torch.zeros(experts, dtype=torch.int64, device=device),
            "mean_ED": torch.zeros(experts, width, dtype=torch.float64, device=device),
            "variance_ED": torch.zeros(experts, width, dtype=torch.float64, device=device),
        }

    def update(self, batch: TokenBatch) -> None:
        state = self.state
        own_ED, squares_ED = batch.moments_E
        before_E, new_E = state["count_E"][:, None].double(), batch.counts_E[:, None].double()
        total_E = (before_E + new_E).clamp(min=1)
        mean_ED = state["mean_ED"] + (own_ED - state["mean_ED"]) * (new_E / total_E)
        # Σ(f − b)² about the new mean b, from the batch's own moments.
        squares_ED = squares_ED + new_E * (own_ED - mean_ED).square()
        variance_ED = state["variance_ED"] * ((before_E - 1) / (total_E - 1).clamp(min=1)) + squares_ED / total_E
        changed_E = (before_E > 0) & (new_E > 0)
        state["variance_ED"] = torch.where(changed_E, variance_ED, state["variance_ED"])
        state["mean_ED"] = mean_ED
        state["count_E"] = state["count_E"] + batch.counts_E

    def merge(self, other: Statistic) -> None:
        raise UsageError(
            "released_moments of two streams cannot be merged",
            expected="one stream: each batch's deviations are about the mean so far",
            fix="use output_moments",
        )

    def to_host(self) -> None:
        # The stream is over: only the sum is asked for, and a cache need not hold D numbers per expert.
        self.state = {"variance_E": self.state["variance_ED"].sum(1).cpu()}

    def value(self) -> Float64:
        return self.state["variance_E"].numpy()


BUILT_IN: tuple[type[Statistic], ...] = (
    Count,
    GateSum,
    ScoreSum,
    NormSum,
    NormSquaredSum,
    GateNormSum,
    GateSquaredNormSquaredSum,
    OutputMax,
    ResidualSums,
    OutputMoments,
)
"""Of routed rows, one entry per expert, zero for an expert without rows, and mergeable."""

COLLECTED: tuple[type[Statistic], ...] = (*BUILT_IN, ScoreTotal, ReleasedMoments)
"""What every score pass collects, so that one pass serves all criteria that need nothing more."""
