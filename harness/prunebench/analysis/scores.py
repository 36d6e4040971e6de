"""Arms scored on suites: every run once, those on the same items together, on resamples drawn once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunebench.analysis.arms import Found, Shelf
from prunebench.analysis.batch import Column, Sheet, columns_of
from prunebench.analysis.bootstrap import RESAMPLES, SEED, Floats, Sampled, sampled_columns
from prunebench.analysis.metrics import (
    PERCENT,
    Cell,
    as_published,
    headline_cells,
    in_units,
    lower_is_better,
    paired_order,
    published,
    suite_mean,
)
from prunebench.analysis.pairing import check_rows, check_runs, common_suites
from prunebench.errors import UsageError
from prunebench.record import ItemTable, Run

__all__ = ["Scores", "Stratum", "suite_scores"]


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
        columns = sampled_columns(own.values_NC, own.weights_N, clusters=own.clusters_N, **key)
        tasks[cell] = [as_published(cell[2], one) for one in columns]
    metrics = {cell[2] for cell in strata}
    runs = range(len(next(iter(tasks.values()))))
    means = (suite_mean({cell: own[at] for cell, own in tasks.items()}, strata, suite) for at in runs)
    return [in_units(mean, metrics) for mean in means]


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
        self._columns: dict[tuple[str, str], dict[Cell, Column]] = {}
        self._scores: dict[tuple[str, str, tuple[str, ...]], Sampled] = {}
        self._runs: dict[str, dict[str, Found]] = {}
        folders: dict[str, Found] = {}
        for suite, runs in wanted.items():
            self._runs[suite] = {run.folder: run for run in runs}
            folders |= self._runs[suite]
        for folder in sorted(folders):
            sheet = columns_of(shelf.outcomes(folders[folder]))
            for suite, runs_of in self._runs.items():
                if folder in runs_of:
                    self._columns[suite, folder] = _columns(folders[folder], sheet, suite)

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
            if lower_is_better(cell[2]) and not np.array_equal(columns[0].weight_N, columns[1].weight_N):
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
        weighed = [lower_is_better(cell[2]) for cell in cells]
        return all(
            a.same_items(b) and (not loss or np.array_equal(a.weight_N, b.weight_N))
            for (a, b), loss in zip(pairs, weighed, strict=True)
        )

    def _stratum(self, suite: str, cell: Cell, runs: Sequence[Found]) -> Stratum:
        columns = [self._columns[suite, run.folder][cell] for run in runs]
        weights = columns[0].weight_N if lower_is_better(cell[2]) else None
        return Stratum(np.stack([one.value_N for one in columns], axis=1), weights, columns[0].clusters_N)


def _columns(run: Found, sheet: Sheet, suite: str) -> dict[Cell, Column]:
    """A run's outcomes on a suite's headline."""
    wanted = headline_cells(run.record["headline"], suite)
    missing = [cell for cell in wanted if (suite, cell) not in sheet]
    if missing:
        raise UsageError("no items for a headline metric", where=f"{run.name}, {suite}/{'/'.join(missing[0])}")
    return {cell: sheet[suite, cell] for cell in wanted}


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
