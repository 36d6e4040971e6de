"""A mask of a model on which operators are compared, and the masks on which the track has them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from leaderboard.findings.evidence import RATIOS, Arm, Evidence, Model, pruned

__all__ = ["HELD", "MASKS", "Setting", "every_setting", "settings_of"]

HELD: Final = "0.5"
"""The ratio at which the paper holds the mask and varies most."""

MASKS: Final = {"mone": "MoNE's mask", "reap": "REAP's mask"}


@dataclass(frozen=True)
class Setting:
    """A mask of general draw A: of which model, how much of it is pruned, by which criterion."""

    model: Model
    ratio: str = HELD
    criterion: str = "mone"

    def arm(self, operator: str) -> Arm:
        """An operator on it, fitted on the draw that chose it."""
        return pruned(self.model.name, self.ratio, operator, criterion=self.criterion)


def settings_of(evidence: Evidence, ratio: str, criterion: str) -> list[Setting]:
    """One per model."""
    return [Setting(model, ratio, criterion) for model in evidence.models]


def every_setting(evidence: Evidence) -> list[Setting]:
    """By mask, ratio, model."""
    return [setting for mask in MASKS for ratio in RATIOS for setting in settings_of(evidence, ratio, mask)]
