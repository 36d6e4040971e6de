"""Choice tasks from stored log-likelihoods: ability to rank apart from a bias between answers (2610.41366 §6.2, A.10).

On a task whose answers are the same strings for every item, an arm can lose accuracy by leaning to one answer or by
ranking items worse. The area under the ROC curve of the answer margin is unmoved by any shift, so it tells them apart;
prior-matched accuracy takes the shift away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prunebench.analysis.bootstrap import RESAMPLES, SEED, Floats, Sampled, item_counts
from prunebench.analysis.metrics import clusters_of, paired_order
from prunebench.errors import UsageError
from prunebench.record import ItemTable

__all__ = [
    "FIXED_ANSWERS",
    "ITEM_ANSWERS",
    "Choices",
    "Flips",
    "accuracy",
    "area",
    "best_threshold",
    "bias_corrected",
    "choices_of",
    "flips",
    "has_fixed_answers",
    "predicted_shares",
    "prior_matched",
]

FIXED_ANSWERS: Final = ("boolq", "mmlu", "rte", "tiny_yes_no")
"""Tasks whose answer strings are the same for every item; subjects of MMLU count as `mmlu`."""

ITEM_ANSWERS: Final = ("arc_challenge", "arc_easy", "copa", "hellaswag", "openbookqa", "piqa", "winogrande")
"""Tasks with options of their own for every item."""

Ints = NDArray[np.int64]
_SPAN: Final = 4_000_000  # numbers held at once


@dataclass(frozen=True, eq=False)
class Choices:
    """A choice task's items in paired order.

    Args:
        loglikelihoods: of each item's options, one tuple per item.
        gold_N: the right option.
        sizes: bytes of each item's options, where they are stored.
        clusters_N: which items are drawn together, as labels.
        suite: with `task`, the key of the random stream.
        task: see `suite`.
    """

    loglikelihoods: tuple[tuple[float, ...], ...]
    gold_N: Ints
    sizes: tuple[tuple[int, ...], ...]
    clusters_N: NDArray[Any]
    suite: str
    task: str

    def __len__(self) -> int:
        return len(self.gold_N)

    @property
    def where(self) -> str:
        """The task, for an error line."""
        return f"{self.suite}/{self.task}"

    @property
    def options_N(self) -> Ints:
        """How many options each item has."""
        return np.array([len(own) for own in self.loglikelihoods])

    @property
    def matrix_NC(self) -> Floats:
        """The log-likelihoods of a task whose items all have C options.

        Raises:
            UsageError: if they have not.
        """
        if len(set(self.options_N.tolist())) != 1:
            raise UsageError("items with different numbers of options", where=self.where, expected="one number")
        return np.array(self.loglikelihoods, dtype=np.float64)

    @property
    def margin_N(self) -> Floats:
        """Log-likelihood of the second answer above the first, of a task with two.

        Raises:
            UsageError: if items have other than two options.
        """
        if (self.options_N != 2).any():
            raise UsageError("a margin between other than two answers", where=self.where, expected="two-choice items")
        matrix_N2 = self.matrix_NC
        return matrix_N2[:, 1] - matrix_N2[:, 0]

    @property
    def predicted_N(self) -> Ints:
        """The option of highest log-likelihood; the first of several."""
        return np.array([int(np.argmax(own)) for own in self.loglikelihoods])


def choices_of(rows: ItemTable) -> Choices:
    """The options of one cell's rows, in paired order.

    Raises:
        UsageError: if a row does not say its options' log-likelihoods and the right one.
    """
    rows = paired_order(rows)
    where = f"{rows.suite[0]}/{rows.task[0]}" if len(rows) else "no items"
    stated = [_stated(str(detail), f"{where}/{item}") for detail, item in zip(rows.detail, rows.item, strict=True)]
    if not stated:
        raise UsageError("no items", where=where, expected="at least one")
    clusters = clusters_of(rows)
    return Choices(
        tuple(own[0] for own in stated),
        np.array([own[1] for own in stated]),
        tuple(own[2] for own in stated),
        np.arange(len(rows)) if clusters is None else clusters,
        str(rows.suite[0]),
        str(rows.task[0]),
    )


def _stated(detail: str, where: str) -> tuple[tuple[float, ...], int, tuple[int, ...]]:
    data = json.loads(detail)
    data = data if isinstance(data, dict) else {}
    scores, gold = data.get("loglikelihoods"), data.get("gold")
    scores = scores if isinstance(scores, list) and all(isinstance(one, int | float) for one in scores) else []
    if not (isinstance(gold, int) and 0 <= gold < len(scores)):
        raise UsageError(
            "an item without the log-likelihoods of its options", where=where, expected="loglikelihoods and gold"
        )
    return tuple(map(float, scores)), gold, tuple(data.get("bytes") or ())


def has_fixed_answers(choices: Choices, fixed: Sequence[str] = FIXED_ANSWERS) -> bool:
    """Whether a task's answers are the same strings for every item.

    Args:
        choices: the task.
        fixed: names of such tasks.

    Raises:
        UsageError: if options of a task said to be fixed have different sizes, or if nothing tells.
    """
    known = any(choices.task == name or (name == "mmlu" and choices.task.startswith("mmlu_")) for name in fixed)
    varies = len(set(choices.sizes)) > 1
    if known and varies:
        raise UsageError(
            "a task of fixed answers has options of different sizes", where=choices.where, expected="the same strings"
        )
    if known or varies or choices.task in ITEM_ANSWERS:
        return known
    raise UsageError(
        "cannot tell whether the answers are the same for every item",
        where=choices.where,
        expected=f"one of {', '.join((*fixed, *ITEM_ANSWERS))}, or options of different sizes",
        fix="name the task as one of fixed answers, or leave it out",
    )


# --- statistics of margins: each takes counts (rows of resamples), so that an interval needs no loop over resamples


def _sampled(choices: Choices, statistic: Callable[[Floats], Floats], seed: int, resamples: int) -> Sampled:
    """A statistic of item counts (R, N) -> (R,), on the items and on the task's resamples."""
    ones = np.ones((1, len(choices)))
    draws = [statistic(block) for block in _blocks(choices, seed, resamples)]
    return Sampled(float(statistic(ones)[0]), np.concatenate(draws), len(choices))


def _blocks(choices: Choices, seed: int, resamples: int) -> Iterator[Floats]:
    key: dict[str, Any] = {"suite": choices.suite, "task": choices.task, "seed": seed, "resamples": resamples}
    for counts in item_counts(choices.clusters_N, **key):
        yield counts.astype(np.float64)


@dataclass(frozen=True, eq=False)
class _Ranked:
    """Items by margin: of each group of equal margins, how often its positives and negatives were drawn."""

    order_N: NDArray[np.intp]
    starts_G: NDArray[np.intp]
    positive_N: NDArray[np.bool_]

    @classmethod
    def of(cls, margin_N: Floats, gold_N: Ints) -> _Ranked:
        order_N = np.argsort(margin_N, kind="stable")
        ordered = margin_N[order_N]
        starts_G = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        return cls(order_N, starts_G, (gold_N == 1)[order_N])

    def sums(self, counts_RN: Floats) -> tuple[Floats, Floats]:
        """Positives and negatives per group, (R, G) each, from the lowest margin up."""
        ordered = counts_RN[:, self.order_N]
        positive = np.add.reduceat(ordered * self.positive_N, self.starts_G, axis=1)
        return positive, np.add.reduceat(ordered, self.starts_G, axis=1) - positive


def area(choices: Choices, *, seed: int = SEED, resamples: int = RESAMPLES) -> Sampled:
    """AUC of the margin: the chance that an item with the second answer right has the larger one; ties count half.

    A resample without both answers has no AUC and counts as 0.5.

    Raises:
        UsageError: unless the task has two options, and both answers are right for some item.
    """
    ranked = _Ranked.of(choices.margin_N, choices.gold_N)
    if len(set(choices.gold_N.tolist())) != 2:
        raise UsageError("one answer is never right", where=choices.where, expected="items of both answers")

    def statistic(counts_RN: Floats) -> Floats:
        positive, negative = ranked.sums(counts_RN)
        below = np.cumsum(negative, axis=1) - negative / 2
        pairs = positive.sum(axis=1) * negative.sum(axis=1)
        return np.where(pairs > 0, (positive * below).sum(axis=1) / np.maximum(pairs, 1), 0.5)

    return _sampled(choices, statistic, seed, resamples)


def prior_matched(choices: Choices, *, seed: int = SEED, resamples: int = RESAMPLES) -> Sampled:
    """Accuracy when the threshold makes the predicted label shares equal the gold ones.

    Where equal margins straddle the threshold, it is the expectation over which of them get which answer.
    """
    ranked = _Ranked.of(choices.margin_N, choices.gold_N)

    def statistic(counts_RN: Floats) -> Floats:
        positive, negative = ranked.sums(counts_RN)
        size = positive + negative
        # As many as are negative in gold, from the lowest margin up, are predicted negative.
        left = negative.sum(axis=1, keepdims=True) - (np.cumsum(size, axis=1) - size)
        share = np.clip(left, 0, size) / np.maximum(size, 1)
        right = share * negative + (1 - share) * positive
        return np.asarray(right.sum(axis=1) / size.sum(axis=1))

    return _sampled(choices, statistic, seed, resamples)


def best_threshold(choices: Choices, *, seed: int = SEED, resamples: int = RESAMPLES) -> Sampled:
    """Accuracy at the threshold that is best in hindsight, on each resample its own."""
    ranked = _Ranked.of(choices.margin_N, choices.gold_N)

    def statistic(counts_RN: Floats) -> Floats:
        positive, negative = ranked.sums(counts_RN)
        gains = np.cumsum(negative - positive, axis=1)  # of moving the threshold above a group
        best = np.maximum(gains.max(axis=1), 0)
        return np.asarray((positive.sum(axis=1) + best) / (positive + negative).sum(axis=1))

    return _sampled(choices, statistic, seed, resamples)


def accuracy(choices: Choices, *, seed: int = SEED, resamples: int = RESAMPLES) -> Sampled:
    """Accuracy of the option of highest log-likelihood."""
    right_N = (choices.predicted_N == choices.gold_N).astype(np.float64)
    return _sampled(choices, lambda counts: counts @ right_N / counts.sum(axis=1), seed, resamples)


def bias_corrected(choices: Choices, *, seed: int = SEED, resamples: int = RESAMPLES) -> Sampled:
    """Accuracy after each answer's mean preference is taken away (MMLU's letters; 2610.41366 §6.2).

    From every item's log-likelihood of an answer, the mean of that answer's over the items is subtracted; on a
    resample, the mean over its items.
    """
    scores_NC, gold_N = choices.matrix_NC, choices.gold_N
    step = max(1, _SPAN // scores_NC.size)

    def statistic(counts_RN: Floats) -> Floats:
        means_RC = counts_RN @ scores_NC / counts_RN.sum(axis=1, keepdims=True)
        right = np.empty(len(counts_RN))
        for at in range(0, len(counts_RN), step):
            corrected = scores_NC[None] - means_RC[at : at + step, None]
            hit = corrected.argmax(axis=2) == gold_N
            right[at : at + step] = (counts_RN[at : at + step] * hit).sum(axis=1)
        return np.asarray(right / counts_RN.sum(axis=1))

    return _sampled(choices, statistic, seed, resamples)


def predicted_shares(choices: Choices) -> Floats:
    """The share of items for which each answer is chosen, (C,)."""
    answers = choices.matrix_NC.shape[1]
    return np.bincount(choices.predicted_N, minlength=answers) / len(choices)


@dataclass(frozen=True)
class Flips:
    """Items whose prediction differs between two runs of a two-choice task.

    Args:
        to_first: from the second answer to the first.
        to_second: from the first answer to the second.
    """

    to_first: int
    to_second: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.to_first + self.to_second

    @property
    def net(self) -> int:
        """How many more predictions of the first answer there are; a pure shift of a threshold flips no others."""
        return self.to_first - self.to_second


def flips(run: Choices, reference: Choices) -> Flips:
    """What changes from the reference's predictions to the run's; both answered the same items in the same order."""
    if len(run) != len(reference) or not np.array_equal(run.gold_N, reference.gold_N):
        raise UsageError("the runs answered other items", where=run.where, expected="the same items in both")
    before, after = reference.margin_N > 0, run.margin_N > 0
    return Flips(int((before & ~after).sum()), int((~before & after).sum()))
