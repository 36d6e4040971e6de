"""Scores against what guessing gives, and damage that an operator takes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from prunebench.analysis.bootstrap import LEVEL, Sampled
from prunebench.analysis.choices import FIXED_ANSWERS, Choices, has_fixed_answers

__all__ = [
    "BIG_5",
    "NINE_TASKS",
    "Share",
    "above_chance",
    "chance",
    "mean_chance",
    "recovered",
]

NINE_TASKS: Final[Mapping[str, int]] = {
    "arc_challenge": 1172,
    "arc_easy": 2376,
    "boolq": 3270,
    "copa": 100,
    "mmlu": 14042,
    "openbookqa": 500,
    "piqa": 1838,
    "rte": 277,
    "winogrande": 1267,
}
"""Items of the nine zero-shot tasks (2610.41366 §3)."""

BIG_5: Final = ("arc_easy", "arc_challenge", "boolq", "piqa", "winogrande")


@dataclass(frozen=True)
class Share:
    """A ratio of two numbers that both come from items.

    Args:
        value: the ratio; None where the denominator is not told from zero.
        low: of its 95 % interval.
        high: see `low`.
    """

    value: float | None
    low: float | None = None
    high: float | None = None


def chance(choices: Choices, fixed: tuple[str, ...] = FIXED_ANSWERS) -> float:
    """What an arm that knows nothing scores on a task, 0 to 1 (2610.41366 App. H.8).

    With two fixed answers, always giving the commoner one; else one over the number of options, item by item.
    """
    if has_fixed_answers(choices, fixed) and (choices.options_N == 2).all():
        return float(np.bincount(choices.gold_N, minlength=2).max() / len(choices))
    return float(np.mean(1.0 / choices.options_N))


def mean_chance(tasks: Mapping[str, float]) -> float:
    """The unweighted mean over tasks, as for scores."""
    return float(np.mean(list(tasks.values())))


def above_chance(arm: Sampled, dense: Sampled, chance: float) -> Share:
    """The share of the dense model's score above chance that an arm keeps; all in one unit."""
    floor = Sampled(chance, np.full_like(arm.draws_B, chance), arm.n)
    return _ratio(arm.minus(floor), dense.minus(floor))


def recovered(operator: Sampled, constant: Sampled, dense: Sampled) -> Share:
    """The share of the constant's damage that an operator takes back (2610.41366 §4.5).

    (op − const) / (dense − const) of accuracies; of ln perplexities the same, as both signs turn. Without detectable
    damage there is nothing to recover, and no share.
    """
    return _ratio(operator.minus(constant), dense.minus(constant))


def _ratio(part: Sampled, whole: Sampled) -> Share:
    interval = whole.interval(LEVEL)
    if interval.low <= 0 <= interval.high:
        return Share(None)
    value = part.value / whole.value
    # A draw on which the whole changes sign has no share; an interval from the others would be too narrow.
    if (np.sign(whole.draws_B) != np.sign(whole.value)).any():
        return Share(value)
    ends = part.over(whole).interval(LEVEL)
    return Share(value, ends.low, ends.high)
