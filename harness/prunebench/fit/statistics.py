"""Statistics of a fit pass, by expert and by fold of calibration blocks: moments in float64, and samples of rows.

They are large (moments: 2·D² numbers per expert and fold), so an expert's tensors come into being with its first row:
a pass that shows only the rows of pruned experts pays for those only. They are not in `calibration.BUILT_IN`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prunebench.calibration import Statistic
from prunebench.errors import UsageError
from prunebench.fit.moments import JointMoments
from prunebench.moe import TokenBatch

__all__ = ["ExpertMoments", "InputOutputMoments", "RoutedSamples", "RoutedStates"]

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
    measured_in = "fit"

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


@dataclass(frozen=True)
class RoutedStates:
    """Some of each expert's routed tokens, by fold.

    Args:
        count_GE: routed tokens, by fold and expert, of which the samples are drawn.
        state: the kept rows.
        width: D.
    """

    count_GE: Tensor
    state: Mapping[str, Tensor]
    width: int

    def fold(self, expert: int, fold: int) -> tuple[Tensor, Tensor]:
        """Inputs [S, D] and gates as applied [S] of the expert's sample in one fold; there may be none."""
        if not int(self.count_GE[fold, expert]):
            return torch.zeros(0, self.width), torch.zeros(0)
        return self.state[_key("x_SD", fold, expert)], self.state[_key("gate_S", fold, expert)]


class RoutedSamples(Statistic):
    """A uniform random subset of each expert's routed tokens in each fold; `value` is `RoutedStates`.

    2610.41366 App. H.6 keeps up to 64 in each of two folds, even and odd calibration blocks, with seed 0. A token's
    rank is a hash of the seed, its block, its place in the block, and the expert, and the lowest ranks stay (ours): so
    the sample does not depend on batches, and streams over different blocks merge into the sample of both.

    Args:
        size: tokens kept per expert and fold, at most.
        folds: calibration block b goes to fold b mod `folds`.
        seed: of the hash.
    """

    name = "routed_samples"
    measured_in = "fit"

    def __init__(self, size: int = 64, folds: int = 2, seed: int = 0) -> None:
        super().__init__()
        if size < 1 or folds < 1:
            raise UsageError(f"samples of {size} in {folds} folds", where=self.name, expected="at least 1 of each")
        self.size, self.folds, self.seed = size, folds, seed

    def start(self, experts: int, width: int, device: torch.device) -> None:
        self.state = {
            "count_GE": torch.zeros(self.folds, experts, dtype=torch.int64),
            "width": torch.tensor(width),
        }

    def update(self, batch: TokenBatch) -> None:
        block_T = batch.block_T.cpu().numpy()
        _, first_T = np.unique(block_T, return_index=True)
        place_T = np.arange(len(block_T)) - np.repeat(first_T, np.diff([*first_T, len(block_T)]))
        token_S = batch.token_S.cpu().numpy()
        for expert, start, end in batch.segments:
            tokens = token_S[start:end]
            rank_S = _ranks(self.seed, expert, block_T[tokens], place_T[tokens])
            fold_S = block_T[tokens] % self.folds
            for fold in range(self.folds):
                mine = np.flatnonzero(fold_S == fold)
                best = mine[np.argsort(rank_S[mine], kind="stable")[: self.size]]
                if len(best):
                    rows = torch.from_numpy(best + start).to(batch.token_S.device)
                    x_SD, gate_S = batch.x_TD[batch.token_S[rows]].cpu(), batch.gates_S[rows].cpu()
                    self._take(fold, expert, len(mine), (torch.from_numpy(rank_S[best]), x_SD, gate_S))

    def merge(self, other: Statistic) -> None:
        count_GE = other.state["count_GE"]
        for fold, expert in torch.nonzero(count_GE).tolist():
            rank_S, x_SD, gate_S = (other.state[_key(part, fold, expert)] for part in ("rank_S", "x_SD", "gate_S"))
            self._take(fold, expert, int(count_GE[fold, expert]), (rank_S, x_SD, gate_S))

    def _take(self, fold: int, expert: int, count: int, rows: tuple[Tensor, Tensor, Tensor]) -> None:
        """Count tokens, and keep those of the lowest ranks among the kept ones and these."""
        keys = [_key(part, fold, expert) for part in ("rank_S", "x_SD", "gate_S")]
        both = [
            torch.cat([self.state[key], new]) if key in self.state else new for key, new in zip(keys, rows, strict=True)
        ]
        order = torch.argsort(both[0], stable=True)[: self.size]
        self.state.update({key: part[order] for key, part in zip(keys, both, strict=True)})
        count_GE = self.state["count_GE"].clone()
        count_GE[fold, expert] += count
        self.state["count_GE"] = count_GE

    def value(self) -> RoutedStates:
        return RoutedStates(self.state["count_GE"], self.state, int(self.state["width"]))


def _ranks(
    seed: int, expert: int, block_S: npt.NDArray[np.int64], place_S: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Pseudo-random 63-bit ranks: splitmix64's finaliser (Steele et al. 2014), chained over the four numbers."""
    mixed = np.full(len(block_S), seed % 2**64, dtype=np.uint64)
    for part in (np.full(len(block_S), expert), block_S, place_S):
        mixed = mixed + part.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return (mixed >> np.uint64(1)).astype(np.int64)
