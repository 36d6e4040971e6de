"""Many runs at once: their outcomes by task, and statistics on resamples that are drawn once for all of them.

The numbers are those of `metrics_from_items`, run by run; what is shared is only the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from prunebench.analysis.bootstrap import Floats, Sampled, sampled_columns
from prunebench.analysis.metrics import Cell, as_published, clusters_of, lower_is_better, paired_order, published
from prunebench.items import ItemTable, Outcomes

__all__ = ["Column", "Sheet", "columns_of", "sampled_sheets"]

_TOGETHER: Final = 64  # runs scored at once: 10,000 draws of a dozen tasks each are a megabyte


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a task's rows stand, and what their questions are; shared by all runs of the same questions."""

    index_N: NDArray[np.intp]
    weight_N: Floats
    keys_N2: NDArray[np.uint64]
    clusters_N: NDArray[np.object_] | None
    digest: str


@dataclass(frozen=True, eq=False)
class Column:
    """One run's outcomes on one task under one metric, in paired order."""

    value_N: Floats
    weight_N: Floats
    keys_N2: NDArray[np.uint64]
    clusters_N: NDArray[np.object_] | None
    digest: str

    def same_items(self, other: Column) -> bool:
        """Whether another run answered the same questions, grouped alike."""
        mine, theirs = self.clusters_N, other.clusters_N
        grouped = mine is theirs if mine is None or theirs is None else np.array_equal(mine, theirs)
        return grouped and np.array_equal(self.keys_N2, other.keys_N2)


Sheet = Mapping[tuple[str, Cell], Column]
"""A run's outcomes by suite and cell."""


def columns_of(outcomes: Outcomes) -> Sheet:
    """Outcomes by suite and cell."""
    return {
        key: Column(outcomes.value_N[place.index_N], place.weight_N, place.keys_N2, place.clusters_N, place.digest)
        for key, place in _places(outcomes.asked).items()
    }


_KNOWN: WeakKeyDictionary[ItemTable, dict[tuple[str, Cell], _Place]] = WeakKeyDictionary()


def _places(asked: ItemTable) -> dict[tuple[str, Cell], _Place]:
    if asked not in _KNOWN:
        _KNOWN[asked] = dict(_cells(asked))
    return _KNOWN[asked]


def _cells(asked: ItemTable) -> Iterator[tuple[tuple[str, Cell], _Place]]:
    for suite, task, filter_name, metric in asked.cells():
        chosen = (
            (asked.suite == suite) & (asked.task == task) & (asked.filter == filter_name) & (asked.metric == metric)
        )
        index_N = np.flatnonzero(chosen)
        rows = asked.rows(suite, task, filter_name, metric)
        index_N = index_N[np.lexsort((rows.item, rows.prompt_hash, rows.doc_hash))]
        rows = paired_order(rows)
        clusters_N = clusters_of(rows)
        keys_N2 = np.stack([rows.doc_hash, rows.prompt_hash], axis=1)
        parts = (
            keys_N2,
            rows.weight if lower_is_better(metric) else (),
            () if clusters_N is None else clusters_N.tolist(),
        )
        digest = hashlib.sha256(repr([np.asarray(part).tolist() for part in parts]).encode()).hexdigest()
        yield (suite, (task, filter_name, published(metric))), _Place(index_N, rows.weight, keys_N2, clusters_N, digest)


def sampled_sheets(sheets: Sequence[Sheet]) -> Iterator[dict[str, dict[Cell, Sampled]]]:
    """For each run, in order, the statistic of every cell by suite; a few runs at a time, so use them as they come."""
    for start in range(0, len(sheets), _TOGETHER):
        yield from _sampled(sheets[start : start + _TOGETHER])


def _sampled(sheets: Sequence[Sheet]) -> list[dict[str, dict[Cell, Sampled]]]:
    result: list[dict[str, dict[Cell, Sampled]]] = [{} for _ in sheets]
    alike: dict[tuple[str, Cell, str], list[int]] = {}
    for number, sheet in enumerate(sheets):
        for (suite, cell), column in sheet.items():
            alike.setdefault((suite, cell, column.digest), []).append(number)
    for (suite, cell, _), numbers in alike.items():
        columns = [sheets[number][suite, cell] for number in numbers]
        weights = columns[0].weight_N if lower_is_better(cell[2]) else None
        key: dict[str, Any] = {"suite": suite, "task": cell[0]}
        values_NC = np.stack([one.value_N for one in columns], axis=1)
        every = sampled_columns(values_NC, weights, clusters=columns[0].clusters_N, **key)
        for number, one in zip(numbers, every, strict=True):
            result[number].setdefault(suite, {})[cell] = as_published(cell[2], one)
    return result
