"""What the board says of runs in numbers, each computed from items: scores, paired differences, groups, shares.

Runs on the same weights are scored together, on resamples that are drawn once, and only their suites' means are kept
while they are subtracted from one another. A score that the record states otherwise stops the board. Differences are of
right answers in points, of perplexities as ln perplexity. Where a difference cannot be had there is the reason, and
nothing is averaged over what is not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from prunebench.analysis.batch import sampled_sheets
from prunebench.analysis.bootstrap import Sampled
from prunebench.analysis.metrics import (
    headline_cells,
    in_units,
    lower_is_better,
    metrics_from_samples,
    paired_order,
    published,
    suite_mean,
)
from prunebench.analysis.pairing import EXECUTION, check_rows, check_runs, common_suites, few_items
from prunebench.analysis.scores import Stratum
from prunebench.analysis.shares import Share, recovered
from prunebench.board.entries import Entry
from prunebench.board.partners import budget_key, constant_of, constants, dense_of, scale_partners
from prunebench.errors import IntegrityError, PruneBenchError
from prunebench.record import read_run

__all__ = ["Difference", "Numbers", "ScalePair", "Scored", "check_metrics", "score"]

_TOLD_APART: Final = 0.05


@dataclass(frozen=True)
class Difference:
    """A paired difference with its 95 % interval and two-sided p; marks are those of declared contrasts."""

    value: float
    low: float
    high: float
    p: float
    mark: str = ""

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval does."""
        return self.low > 0 or self.high < 0

    @classmethod
    def of(cls, one: Sampled, other: Sampled) -> Difference:
        """From two arms on the same resamples."""
        difference = one.minus(other)
        interval = difference.interval()
        return cls(interval.value, interval.low, interval.high, difference.p_value())


@dataclass(frozen=True)
class Numbers:
    """A run on one suite.

    Args:
        value: of the suite, as the record has it (shares from 0 to 1).
        low: of the 95 % interval.
        high: see `low`.
        n: items.
        dense: the difference from the dense model, or why there is none.
        constant: the difference from the arm whose operator alone differs, constant; or why there is none.
        against: the folder of that arm.
        group: 1 for the best of its model and budget and all that cannot be told from it, 2 for the best of the others
            and those that cannot be told from that one, …; 0 where too few items carry no claim, and for dense arms.
        recovered: of the constant's damage; None where it cannot be asked.
    """

    value: float
    low: float
    high: float
    n: int
    dense: Difference | str
    constant: Difference | str
    against: str = ""
    group: int = 0
    recovered: Share | None = None


@dataclass(frozen=True)
class ScalePair:
    """Two arms that differ in their gate scale alone: trained minus other, by suite, or why there is no difference."""

    trained: Entry
    other: Entry
    differences: Mapping[str, Difference | str]


@dataclass
class Scored:
    """All numbers of a board: by run id and suite, and the pairs of scales."""

    numbers: dict[str, dict[str, Numbers]] = field(default_factory=dict)
    scales: list[ScalePair] = field(default_factory=list)


def score(entries: Sequence[Entry]) -> Scored:
    """Score runs, and compare those that may be compared.

    Raises:
        IntegrityError: if a record's number is not what its items give.
    """
    result = Scored()
    by_weights: dict[str, list[Entry]] = {}
    for entry in entries:
        by_weights.setdefault(entry.weights, []).append(entry)
    for alike in by_weights.values():
        _Model(alike).score(result)
    return result


def check_metrics(entry: Entry, computed: Mapping[str, Mapping[str, float]]) -> None:
    """Raise an `IntegrityError` unless every number of the record is what its items give, and none is missing."""
    stated = entry.record["metrics"]
    for name in sorted(stated.keys() | computed.keys()):
        for part in ("value", "low", "high", "n"):
            says, gives = (numbers.get(name, {}).get(part) for numbers in (stated, computed))
            if says is None or gives is None or not math.isclose(says, gives, rel_tol=1e-9, abs_tol=1e-9):
                raise IntegrityError(
                    f"metric {name}: the record says {part} {says}, its items give {gives}",
                    where=f"run {entry.name}",
                    fix="run it again; records are not edited",
                )


class _Model:
    """The runs on one model's weights, with the draws of their suites while these are compared."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._dense = [entry for entry in entries if entry.dense]
        self._constants = constants(entries)
        self._kinds: dict[tuple[str, str], str] = {}
        self._draws: dict[tuple[str, str], Sampled] = {}

    def score(self, result: Scored) -> None:
        for entry, samples in zip(self._entries, sampled_sheets([one.sheet for one in self._entries]), strict=True):
            headline = entry.record["headline"]
            check_metrics(entry, metrics_from_samples(samples, headline))
            for suite in headline:
                cells = headline_cells(headline, suite)
                mean = in_units(suite_mean(samples[suite], cells, suite), {cell[2] for cell in cells})
                self._draws[entry.id, suite] = mean
        for entry in self._entries:
            own = result.numbers[entry.id] = {}
            for suite in entry.record["headline"]:
                own[suite] = self._numbers(entry, suite)
        self._group(result)
        for trained, other in scale_partners(self._entries):
            suites = sorted({*trained.record["headline"], *other.record["headline"]})
            result.scales.append(
                ScalePair(trained, other, {suite: self._difference(trained, other, suite) for suite in suites})
            )

    def _numbers(self, entry: Entry, suite: str) -> Numbers:
        stated = entry.record["metrics"][suite]
        dense = dense_of(entry, self._dense)
        constant = constant_of(entry, suite, self._constants)
        numbers = Numbers(
            **{key: stated[key] for key in ("value", "low", "high", "n")},
            dense=self._difference(entry, dense, suite),
            constant=self._difference(entry, constant, suite),
            against="" if isinstance(constant, str) else constant.folder,
        )
        if isinstance(numbers.dense, str) or isinstance(numbers.constant, str):
            return numbers
        assert isinstance(dense, Entry)
        assert isinstance(constant, Entry)
        if isinstance(self._difference(constant, dense, suite), str):
            return numbers
        draws = (self._draws[one.id, suite] for one in (entry, constant, dense))
        return replace(numbers, recovered=recovered(*draws))

    def _difference(self, one: Entry, other: Entry | str, suite: str) -> Difference | str:
        """One run minus another, or why it cannot be had."""
        if isinstance(other, str):
            return other
        reason = self._unlike(one, other, suite)
        return reason or Difference.of(self._draws[one.id, suite], self._draws[other.id, suite])

    def _unlike(self, one: Entry, other: Entry, suite: str) -> str:
        """Why two runs cannot be subtracted on a suite; nothing if they can. Most are of one kind, and known to."""
        kinds = [self._kind(entry, suite) for entry in (one, other)]
        return "" if kinds[0] == kinds[1] != "" else _unlike(one, other, suite)

    def _kind(self, entry: Entry, suite: str) -> str:
        """All that runs have to share to be subtracted on a suite, as one text; nothing without the suite."""
        if (entry.id, suite) not in self._kinds:
            cells = _cells(entry, suite) if suite in entry.record["headline"] else []
            digests = [entry.sheet[suite, cell].digest for cell in cells]
            how = [entry.record["identity"][field] for field in ("engine", *EXECUTION)]
            self._kinds[entry.id, suite] = repr([how, entry.content(suite), cells, digests]) if cells else ""
        return self._kinds[entry.id, suite]

    def _group(self, result: Scored) -> None:
        """Put the pruned runs of each budget into groups that cannot be told apart, suite by suite."""
        groups: dict[tuple[str, str, str], list[Entry]] = {}
        for entry in self._entries:
            for suite in entry.record["headline"]:
                if not entry.dense and _enough(entry, suite):
                    groups.setdefault((suite, entry.content(suite), budget_key(entry)), []).append(entry)
        for (suite, _, _), waiting in groups.items():
            sign = -1.0 if _lower_is_better(waiting[0], suite) else 1.0
            order = sorted(waiting, key=lambda one: (-sign * self._draws[one.id, suite].value, one.folder))
            number = 0
            while order:
                number += 1
                first = order[0]
                alike = [first, *(one for one in order[1:] if self._alike(first, one, suite))]
                for entry in alike:
                    own = result.numbers[entry.id]
                    own[suite] = replace(own[suite], group=number)
                chosen = {entry.id for entry in alike}
                order = [one for one in order if one.id not in chosen]

    def _alike(self, first: Entry, other: Entry, suite: str) -> bool:
        if self._unlike(first, other, suite):
            return False
        return self._draws[first.id, suite].minus(self._draws[other.id, suite]).p_value() > _TOLD_APART


def _cells(entry: Entry, suite: str) -> list[tuple[str, str, str]]:
    return headline_cells(entry.record["headline"], suite)


def _lower_is_better(entry: Entry, suite: str) -> bool:
    return all(lower_is_better(cell[2]) for cell in _cells(entry, suite))


def _enough(entry: Entry, suite: str) -> bool:
    """Whether every task has enough independent items for a claim."""
    columns = [entry.sheet[suite, cell] for cell in _cells(entry, suite)]
    return not few_items(Stratum(one.value_N[:, None], None, one.clusters_N).independent for one in columns)


def _unlike(one: Entry, other: Entry, suite: str) -> str:
    """Why two runs cannot be subtracted on a suite; nothing if they can."""
    try:
        check_runs(one, other)
        common_suites(one, other, [suite])
        for cell in _cells(one, suite):
            if one.sheet[suite, cell].digest != other.sheet[suite, cell].digest:
                return _how_unlike(one, other, suite, cell)
    except PruneBenchError as error:
        return error.what
    return ""


def _how_unlike(one: Entry, other: Entry, suite: str, cell: tuple[str, str, str]) -> str:
    """The first items that differ, by name; for this the items themselves are read."""
    rows = []
    for entry in (one, other):
        run = read_run(entry.path)
        metric = next(key[3] for key in run.items.cells() if (key[1], key[2], published(key[3])) == cell)
        rows.append(paired_order(run.items.rows(suite, cell[0], cell[1], metric)))
    check_rows(rows[0], rows[1], (one.name, other.name), f"{suite}/{'/'.join(cell)}")
    return "items are grouped otherwise in the other run"
