"""Answers to declared contrasts: all on the same resamples of the same items, then corrected together.

Every arm is scored once; a contrast, an interaction or a mean over masks is a weighted sum of arms' draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunebench.analysis.arms import Found, Shelf, UnfoundError
from prunebench.analysis.bootstrap import RESAMPLES, SEED, Interval, Sampled
from prunebench.analysis.declared import Question, Sum
from prunebench.analysis.mcnemar import McNemar, mcnemar
from prunebench.analysis.metrics import lower_is_better
from prunebench.analysis.multiplicity import Verdict, holm, mark, same_sign, verdict, within_families
from prunebench.analysis.pairing import check_enough
from prunebench.analysis.resolution import EQUIVALENCE_LEVEL, equivalence_bound, minimum_detectable
from prunebench.analysis.scores import Scores

__all__ = ["Answer", "Gap", "answers", "corrected", "runs_of"]


@dataclass(frozen=True)
class Gap:
    """A contrast that these records cannot answer, and why."""

    question: Question
    reason: str


@dataclass(frozen=True)
class Answer:
    """A contrast with what can be said of it.

    Args:
        question: what was asked.
        difference: the estimate with its 95 % interval, in points or in ln perplexity.
        interval90: low and high of the 90 % interval.
        bound: the largest difference that it does not rule out; None, as the next, where no item differs.
        detectable: the true difference that would be found with power 0.8.
        p: two-sided bootstrap p, at least 2/B.
        lower_is_better: whether a negative difference favours the first arms.
        replicates: the estimates on other calibration draws.
        missing: why draws that were asked for are not among them.
        mcnemar: of a plain difference of two arms on one task of right or wrong answers; else None.
        discordant: items right in the first arm only and in the second only, of a plain difference; else None.
        holm_family: p after Holm within the family; None for an exploratory contrast, as the next two.
        holm_all: p after Holm over all declared contrasts.
        verdict: what is left of the significance.
    """

    question: Question
    difference: Interval
    interval90: tuple[float, float]
    bound: float | None
    detectable: float | None
    p: float
    lower_is_better: bool
    replicates: tuple[float, ...] = ()
    missing: tuple[str, ...] = ()
    mcnemar: McNemar | None = None
    discordant: tuple[int, int] | None = None
    holm_family: float | None = None
    holm_all: float | None = None
    verdict: Verdict | None = None

    @property
    def excludes_zero(self) -> bool:
        """Whether the 95 % interval does."""
        return self.difference.low > 0 or self.difference.high < 0

    @property
    def mark(self) -> str:
        """‡, †, * or nothing."""
        return mark(self.p, self.verdict)

    @property
    def established(self) -> bool | None:
        """Whether the effect has one sign on every draw; None with one draw only, or with one missing."""
        return None if self.missing else same_sign([self.difference.value, *self.replicates])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        test = self.mcnemar
        return {
            "family": self.question.family,
            "label": self.question.label,
            "suite": self.question.suite,
            "tasks": list(self.question.tasks) or None,
            "status": "exploratory" if self.question.exploratory else "declared",
            "arms": [[weight, str(arm)] for weight, arm in self.question.terms],
            "difference": self.difference.to_json(),
            "interval90": list(self.interval90),
            "bound": self.bound,
            "detectable": self.detectable,
            "p": self.p,
            "holm_family": self.holm_family,
            "holm_all": self.holm_all,
            "verdict": self.verdict,
            "mark": self.mark,
            "replicates": list(self.replicates),
            "missing_draws": list(self.missing),
            "established": self.established,
            "discordant": None if self.discordant is None else list(self.discordant),
            "mcnemar": None if test is None else {"exact": test.exact, "mid_p": test.mid_p},
            "lower_is_better": self.lower_is_better,
        }


def answers(
    shelf: Shelf,
    questions: Sequence[Question],
    *,
    scores: Scores | None = None,
    seed: int = SEED,
    resamples: int = RESAMPLES,
) -> tuple[tuple[Answer, ...], tuple[Gap, ...]]:
    """Every contrast that the records can answer, corrected, and those that they cannot.

    A contrast without one of its arms is a gap, and does not count in a correction.

    Args:
        shelf: the records.
        questions: the contrasts.
        scores: of at least the runs of `runs_of`, where they are at hand; else they are made.
        seed: of the bootstrap.
        resamples: B.

    Raises:
        UsageError: for arms that answered other items, or were scored or executed otherwise, and for a declared
            contrast on too few items.
    """
    asked, gaps = _asked(shelf, questions)
    scores = scores or Scores(shelf, _wanted(asked), seed=seed, resamples=resamples)
    return corrected([_answer(scores, one) for one in asked]), gaps


def runs_of(shelf: Shelf, questions: Sequence[Question]) -> dict[str, list[Found]]:
    """By suite, the runs that some questions need, as far as they are there."""
    return _wanted(_asked(shelf, questions)[0])


def _asked(shelf: Shelf, questions: Sequence[Question]) -> tuple[list[_Asked], tuple[Gap, ...]]:
    asked: list[_Asked] = []
    gaps: list[Gap] = []
    for question in questions:
        try:
            asked.append(_Asked.of(shelf, question))
        except UnfoundError as reason:
            gaps.append(Gap(question, str(reason)))
    return asked, tuple(gaps)


def _wanted(asked: Sequence[_Asked]) -> dict[str, list[Found]]:
    wanted: dict[str, list[Found]] = {}
    for one in asked:
        wanted.setdefault(one.question.suite, []).extend(one.runs)
    return wanted


Weighed = tuple[tuple[float, Found], ...]


@dataclass(frozen=True)
class _Asked:
    """A question with its runs; draws that are not there are named."""

    question: Question
    terms: Weighed
    replicates: tuple[Weighed, ...]
    missing: tuple[str, ...]

    @classmethod
    def of(cls, shelf: Shelf, question: Question) -> _Asked:
        terms = _found(shelf, question.terms, question.suite)
        replicates: list[Weighed] = []
        missing: list[str] = []
        for one in question.replicates:
            try:
                replicates.append(_found(shelf, one, question.suite))
            except UnfoundError as reason:
                missing.append(str(reason))
        return cls(question, terms, tuple(replicates), tuple(missing))

    @property
    def runs(self) -> list[Found]:
        return [run for terms in (self.terms, *self.replicates) for _, run in terms]


def _found(shelf: Shelf, terms: Sum, suite: str) -> Weighed:
    found = tuple((weight, shelf.find(selector)) for weight, selector in terms)
    for _, run in found:
        if suite not in run.record["headline"]:
            raise UnfoundError(f"no {suite} in {run.folder}")
    return found


def _answer(scores: Scores, asked: _Asked) -> Answer:
    question, terms = asked.question, asked.terms
    suite, tasks, first = question.suite, question.tasks, terms[0][1]
    for run in asked.runs:
        scores.check_pair(first, run, suite, tasks)
    if not question.exploratory:
        check_enough(scores.independent(first, suite, tasks), f"{question.family}: {question.label}")
    difference = _summed(scores, terms, question)
    low90, high90 = (getattr(difference.interval(EQUIVALENCE_LEVEL), end) for end in ("low", "high"))
    plain = [weight for weight, _ in terms] == [1.0, -1.0]
    counts = scores.discordant(terms[0][1], terms[1][1], suite, tasks) if plain else None
    return Answer(
        question=question,
        difference=difference.interval(),
        interval90=(low90, high90),
        bound=equivalence_bound(difference),
        detectable=minimum_detectable(difference),
        p=difference.p_value(),
        lower_is_better=all(lower_is_better(cell[2]) for cell in scores.cells(first, suite, tasks)),
        replicates=tuple(_summed(scores, one, question).value for one in asked.replicates),
        missing=asked.missing,
        mcnemar=mcnemar(*counts[:2]) if counts is not None and counts[2] else None,
        discordant=None if counts is None else counts[:2],
    )


def _summed(scores: Scores, terms: Weighed, question: Question) -> Sampled:
    parts = [(weight, scores.score(run, question.suite, question.tasks)) for weight, run in terms]
    value = sum(weight * part.value for weight, part in parts)
    draws_B = np.sum([weight * part.draws_B for weight, part in parts], axis=0)
    return Sampled(float(value), draws_B, parts[0][1].n)


def corrected(found: Sequence[Answer]) -> tuple[Answer, ...]:
    """Answers with Holm's p within their family and over all that were declared; exploratory ones as they are."""
    declared = [one for one in found if not one.question.exploratory]
    p = [one.p for one in declared]
    adjusted = zip(within_families(p, [one.question.family for one in declared]), holm(p), strict=True)
    return tuple(one if one.question.exploratory else _judged(one, *next(adjusted)) for one in found)


def _judged(answer: Answer, in_family: float, over_all: float) -> Answer:
    own, every = float(in_family), float(over_all)
    return replace(answer, holm_family=own, holm_all=every, verdict=verdict(answer.p, own, every))
