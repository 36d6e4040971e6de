"""Statistics of a fit pass: float64, by expert and by fold of calibration blocks.

They are large (2·D² numbers per expert and fold), so an expert's tensors come into being with its first row: a pass
that shows only the rows of pruned experts pays for those only. They are not in `calibration.BUILT_IN`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from prunebench.calibration import Statistic
from prunebench.errors import UsageError
from prunebench.fit.moments import JointMoments
from prunebench.moe import TokenBatch

__all__ = ["ExpertMoments", "InputOutputMoments"]

_PARTS = ("mean_x_D", "mean_y_O", "xx_DD", "xy_DO", "yy")


def _key(part: str, fold: int, expert: int) -> str:
    return f"{part}_{fold}_{expert}"


@dataclass(frozen=True)
class ExpertMoments:
    """Moments of (x, f_e(x)) of every expert of one layer, by fold.

    Args:
        count_GE: rows, by fold and expert.
        state: the accumulated tensors; views, not copies.
        width: D.
    """

    count_GE: Tensor
    state: Mapping[str, Tensor]
    width: int

    @property
    def folds(self) -> int:
        """G."""
        return self.count_GE.shape[0]

    def fold(self, expert: int, fold: int) -> JointMoments:
        """Of the expert's rows in blocks b with b mod G = `fold`."""
        count = int(self.count_GE[fold, expert])
        if not count:
            return JointMoments.none(self.width, self.width, self.count_GE.device)
        return JointMoments(count, *(self.state[_key(part, fold, expert)] for part in _PARTS))

    def all(self, expert: int) -> JointMoments:
        """Of all the expert's rows."""
        total = self.fold(expert, 0)
        for fold in range(1, self.folds):
            total = total + self.fold(expert, fold)
        return total


class InputOutputMoments(Statistic):
    """Count, means and centred second moments C_xx, C_xy of (x, f_e(x)) over routed tokens (2610.41366 App. B.1).

    `value` is `ExpertMoments`. Tokens are unweighted; x is whatever the observed forward gave the expert, the unpruned
    model's in the paper.

    Args:
        folds: calibration block b goes to fold b mod `folds`; 2 gives the even and odd blocks of App. B.3.
    """

    name = "input_output_moments"

    def __init__(self, folds: int = 2) -> None:
        super().__init__()
        if folds < 1:
            raise UsageError(f"{folds} folds", where=self.name, expected="at least 1")
        self.folds = folds

    def start(self, experts: int, width: int, device: torch.device) -> None:
        self.state = {
            "count_GE": torch.zeros(self.folds, experts, dtype=torch.int64, device=device),
            "width": torch.tensor(width),
        }

    def update(self, batch: TokenBatch) -> None:
        fold_S = batch.block_T[batch.token_S] % self.folds
        for expert, start, end in batch.segments:
            for fold in range(self.folds):
                rows = torch.nonzero(fold_S[start:end] == fold).flatten() + start
                if len(rows):
                    x_SD, y_SO = batch.x_TD[batch.token_S[rows]], batch.outputs_SD[rows]
                    self._set(fold, expert, self.value().fold(expert, fold).including(x_SD, y_SO))

    def merge(self, other: Statistic) -> None:
        device = self.state["count_GE"].device
        theirs = ExpertMoments(other.state["count_GE"], other.state, int(other.state["width"]))
        for fold, expert in torch.nonzero(theirs.count_GE).tolist():
            moments = theirs.fold(expert, fold)
            parts = (getattr(moments, part).to(device) for part in _PARTS)
            self._set(fold, expert, self.value().fold(expert, fold) + JointMoments(moments.count, *parts))

    def _set(self, fold: int, expert: int, total: JointMoments) -> None:
        for part in _PARTS:
            self.state[_key(part, fold, expert)] = getattr(total, part)
        count_GE = self.state["count_GE"].clone()
        count_GE[fold, expert] = total.count
        self.state["count_GE"] = count_GE

    def value(self) -> ExpertMoments:
        return ExpertMoments(self.state["count_GE"], self.state, int(self.state["width"]))
