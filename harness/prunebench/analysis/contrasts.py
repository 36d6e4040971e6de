"""Answers to declared contrasts: all on the same resamples of the same items, then corrected together.

Every arm is scored once; a contrast, an interaction or a mean over masks is a weighted sum of arms' draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunebench.analysis.arms import Found, Shelf, UnfoundError
from prunebench.analysis.bootstrap import RESAMPLES, SEED, Floats, Interval, Sampled, sampled_columns
from prunebench.analysis.declared import Question, Sum
from prunebench.analysis.mcnemar import McNemar, mcnemar
from prunebench.analysis.metrics import (
    PERCENT,
    Cell,
    clusters_of,
    headline_cells,
    in_units,
    is_loss,
    paired_order,
    published,
    suite_mean,
)
from prunebench.analysis.multiplicity import Verdict, holm, mark, same_sign, verdict, within_families
from prunebench.analysis.pairing import check_enough, check_rows, check_runs, common_suites
from prunebench.analysis.resolution import EQUIVALENCE_LEVEL, equivalence_bound, minimum_detectable
from prunebench.errors import UsageError
from prunebench.record import ItemTable, Run

__all__ = ["Answer", "Gap", "Scores", "Stratum", "answers", "corrected", "runs_of", "suite_scores"]


@dataclass(frozen=True, eq=False)
class Stratum:
    """One task of many runs.

    Args:
        values_NC: an outcome per item and run.
        weights_N: scored tokens, where outcomes are summed losses; else None.
        clusters_N: which items are drawn together; None if each is alone.
    """

    values_NC: Floats
    weights_N: Floats | None = None
    clusters_N: np.ndarray[Any, Any] | None = None

    @property
    def independent(self) -> int:
        """Items, or clusters of them."""
        return len(self.values_NC) if self.clusters_N is None else len(set(self.clusters_N.tolist()))


def suite_scores(
    strata: Mapping[Cell, Stratum], suite: str, *, seed: int = SEED, resamples: int = RESAMPLES
) -> list[Sampled]:
    """The macro mean over tasks of every run, in the units of `metrics.in_units`; the resamples are drawn once.

    Args:
        strata: the tasks, all of the same runs in the same order.
        suite: the stream's key beside the task.
        seed: of the bootstrap.
        resamples: B.
    """
    tasks: dict[Cell, list[Sampled]] = {}
    for cell, own in strata.items():
        key: dict[str, Any] = {"suite": suite, "task": cell[0], "seed": seed, "resamples": resamples}
        tasks[cell] = sampled_columns(own.values_NC, own.weights_N, clusters=own.clusters_N, **key)
    metrics = {cell[2] for cell in strata}
    runs = range(len(next(iter(tasks.values()))))
    means = (suite_mean({cell: own[at] for cell, own in tasks.items()}, strata, suite) for at in runs)
    return [in_units(mean, metrics) for mean in means]


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


@dataclass(frozen=True, eq=False)
class _Column:
    """One run's outcomes on one cell, in paired order."""

    value_N: Floats
    weight_N: Floats
    keys_N2: np.ndarray[Any, Any]
    clusters_N: np.ndarray[Any, Any] | None

    @classmethod
    def of(cls, rows: ItemTable) -> _Column:
        return cls(rows.value, rows.weight, np.stack([rows.doc_hash, rows.prompt_hash], axis=1), clusters_of(rows))

    def same_items(self, other: _Column) -> bool:
        mine, theirs = self.clusters_N, other.clusters_N
        grouped = mine is theirs if mine is None or theirs is None else np.array_equal(mine, theirs)
        return grouped and np.array_equal(self.keys_N2, other.keys_N2)


class Scores:
    """The runs that some questions need, scored suite by suite; items are read once and let go.

    Args:
        shelf: where the runs are.
        wanted: by suite, the runs.
        seed: of the bootstrap.
        resamples: B.
    """

    def __init__(
        self, shelf: Shelf, wanted: Mapping[str, Iterable[Found]], *, seed: int = SEED, resamples: int = RESAMPLES
    ) -> None:
        self._shelf = shelf
        self._how: dict[str, Any] = {"seed": seed, "resamples": resamples}
        self._columns: dict[tuple[str, str], dict[Cell, _Column]] = {}
        self._scores: dict[tuple[str, str, tuple[str, ...]], Sampled] = {}
        self._runs: dict[str, dict[str, Found]] = {}
        folders: dict[str, Found] = {}
        for suite, runs in wanted.items():
            self._runs[suite] = {run.folder: run for run in runs}
            folders |= self._runs[suite]
        for folder in sorted(folders):
            run = shelf.read(folders[folder])
            for suite, runs_of in self._runs.items():
                if folder in runs_of:
                    self._columns[suite, folder] = _columns(run, suite)

    def score(self, run: Found, suite: str, tasks: tuple[str, ...] = ()) -> Sampled:
        """A run's number on a suite or some of its tasks, in units; all runs of the suite are scored at once."""
        key = (suite, run.folder, tasks)
        if key not in self._scores:
            self._score_all(suite, tasks)
        return self._scores[key]

    def cells(self, run: Found, suite: str, tasks: tuple[str, ...] = ()) -> list[Cell]:
        """The headline cells that a number is the mean of."""
        cells = [cell for cell in headline_cells(run.record["headline"], suite) if not tasks or cell[0] in tasks]
        missing = sorted(set(tasks) - {cell[0] for cell in cells})
        if missing:
            raise UsageError(f"no task {missing[0]}", where=f"{suite} of {run.name}", expected="tasks of the headline")
        return cells

    def check_pair(self, one: Found, other: Found, suite: str, tasks: tuple[str, ...] = ()) -> None:
        """Raise a `UsageError` unless two runs can be subtracted on a suite."""
        check_runs(one, other)
        common_suites(one, other, [suite])
        for cell in self.cells(one, suite, tasks):
            columns = [self._columns[suite, run.folder][cell] for run in (one, other)]
            where = f"{suite}/{'/'.join(cell)}"
            if not columns[0].same_items(columns[1]):
                a, b = (_rows(self._shelf.read(run), suite)[cell] for run in (one, other))
                check_rows(a, b, (one.name, other.name), where)
                raise UsageError("items are grouped otherwise in the other run", where=where, expected="one grouping")
            if is_loss(cell[2]) and not np.array_equal(columns[0].weight_N, columns[1].weight_N):
                raise UsageError(
                    f"{one.name} and {other.name} scored other numbers of tokens", where=where, expected="one tokenizer"
                )

    def independent(self, run: Found, suite: str, tasks: tuple[str, ...] = ()) -> list[int]:
        """Independent items of each task."""
        columns = (self._columns[suite, run.folder][cell] for cell in self.cells(run, suite, tasks))
        return [Stratum(one.value_N[:, None], None, one.clusters_N).independent for one in columns]

    def discordant(
        self, one: Found, other: Found, suite: str, tasks: tuple[str, ...] = ()
    ) -> tuple[int, int, bool] | None:
        """Items right in one run only, in the other only, and whether McNemar's test may be made of them."""
        cells = self.cells(one, suite, tasks)
        if not {cell[2] for cell in cells} <= PERCENT:
            return None
        pairs = [[self._columns[suite, run.folder][cell] for run in (one, other)] for cell in cells]
        counts = [(np.count_nonzero(a.value_N > b.value_N), np.count_nonzero(a.value_N < b.value_N)) for a, b in pairs]
        testable = len(cells) == 1 and pairs[0][0].clusters_N is None
        return int(sum(n for n, _ in counts)), int(sum(n for _, n in counts)), testable

    def _score_all(self, suite: str, tasks: tuple[str, ...]) -> None:
        """Score every run of a suite, those on the same items together."""
        waiting = list(self._runs[suite].values())
        while waiting:
            cells = self.cells(waiting[0], suite, tasks)
            alike = [run for run in waiting if self._alike(waiting[0], run, suite, tasks)]
            strata = {cell: self._stratum(suite, cell, alike) for cell in cells}
            for run, score in zip(alike, suite_scores(strata, suite, **self._how), strict=True):
                self._scores[suite, run.folder, tasks] = score
            done = {run.folder for run in alike}
            waiting = [run for run in waiting if run.folder not in done]

    def _alike(self, one: Found, other: Found, suite: str, tasks: tuple[str, ...]) -> bool:
        """Whether two runs answered the same items, so that they can be scored together."""
        cells = self.cells(one, suite, tasks)
        if self.cells(other, suite, tasks) != cells:
            return False
        pairs = [[self._columns[suite, run.folder][cell] for run in (one, other)] for cell in cells]
        weighed = [is_loss(cell[2]) for cell in cells]
        return all(
            a.same_items(b) and (not loss or np.array_equal(a.weight_N, b.weight_N))
            for (a, b), loss in zip(pairs, weighed, strict=True)
        )

    def _stratum(self, suite: str, cell: Cell, runs: Sequence[Found]) -> Stratum:
        columns = [self._columns[suite, run.folder][cell] for run in runs]
        weights = columns[0].weight_N if is_loss(cell[2]) else None
        return Stratum(np.stack([one.value_N for one in columns], axis=1), weights, columns[0].clusters_N)


def _columns(run: Run, suite: str) -> dict[Cell, _Column]:
    return {cell: _Column.of(rows) for cell, rows in _rows(run, suite).items()}


def _rows(run: Run, suite: str) -> dict[Cell, ItemTable]:
    """The rows of a suite's headline, in paired order."""
    wanted = headline_cells(run.record["headline"], suite)
    found = {}
    for name, task, filter_name, metric in run.items.cells():
        cell = (task, filter_name, published(metric))
        if name == suite and cell in wanted:
            found[cell] = paired_order(run.items.rows(name, task, filter_name, metric))
    missing = [cell for cell in wanted if cell not in found]
    if missing:
        raise UsageError("no items for a headline metric", where=f"{run.name}, {suite}/{'/'.join(missing[0])}")
    return found


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
        lower_is_better=all(is_loss(cell[2]) for cell in scores.cells(first, suite, tasks)),
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
