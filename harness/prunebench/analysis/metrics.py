"""The published numbers of one run, all from its items."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prunebench.analysis.bootstrap import RESAMPLES, SEED, Sampled, sampled
from prunebench.errors import UsageError
from prunebench.record import ItemTable

__all__ = [
    "PERCENT",
    "Cell",
    "Headline",
    "cell_sampled",
    "clusters_of",
    "headline_cells",
    "in_units",
    "is_loss",
    "metrics_from_items",
    "metrics_from_samples",
    "paired_order",
    "published",
    "suite_mean",
]

PERCENT: Final = frozenset({"acc", "acc_norm", "exact_match", "pass@1"})
"""Metrics whose items are 0 or 1: shown in percent, and the ones with discordant counts."""

Headline = Mapping[str, Sequence[Sequence[str]]]
Cell = tuple[str, str, str]


def published(metric: str) -> str:
    """The name under which a metric of items is published: the mean nll is published as a perplexity."""
    return "perplexity" if metric == "nll" else metric


def is_loss(metric: str) -> bool:
    """Whether lower is better."""
    return published(metric) == "perplexity"


def headline_cells(headline: Headline, suite: str) -> list[Cell]:
    """The (task, filter, published metric) cells whose mean is the suite's number."""
    return [(task, filter_name, published(metric)) for task, filter_name, metric in headline[suite]]


def paired_order(rows: ItemTable) -> ItemTable:
    """The rows of one cell in the order in which two runs are paired: by document, prompt, then item id."""
    order = np.lexsort((rows.item, rows.prompt_hash, rows.doc_hash))
    return ItemTable(*(column[order] for column in vars(rows).values()))


def clusters_of(rows: ItemTable) -> NDArray[np.object_] | None:
    """Which rows of a cell are drawn together, as labels (N,); None if each is alone.

    Rows on one document are (several samples of a problem, a question that is there twice), and rows whose detail names
    the same `cluster`, such as a passage.
    """
    labels = [_cluster(str(detail), doc) for detail, doc in zip(rows.detail, rows.doc_hash.tolist(), strict=True)]
    return np.array(labels, dtype=object) if len(set(labels)) < len(labels) else None


def _cluster(detail: str, doc: int) -> str:
    if '"cluster"' in detail:
        stated = json.loads(detail)
        if isinstance(stated, dict) and isinstance(stated.get("cluster"), str | int):
            return f"cluster {stated['cluster']}"
    return f"document {doc}"


def cell_sampled(rows: ItemTable, *, seed: int = SEED, resamples: int = RESAMPLES) -> Sampled:
    """The statistic of one cell, given its rows in `paired_order`."""
    weights = rows.weight if is_loss(str(rows.metric[0])) else None
    key = {"suite": str(rows.suite[0]), "task": str(rows.task[0])}
    return sampled(rows.value, weights, clusters=clusters_of(rows), **key, seed=seed, resamples=resamples)


def suite_mean(cells: Mapping[Cell, Sampled], wanted: Iterable[Cell], suite: str) -> Sampled:
    """The macro mean over a suite's headline cells."""
    wanted = list(wanted)
    missing = [cell for cell in wanted if cell not in cells]
    if missing:
        raise UsageError("no items for a headline metric", where=f"{suite}/{'/'.join(missing[0])}")
    return Sampled.macro_mean([cells[cell] for cell in wanted])


def in_units(mean: Sampled, metrics: Iterable[str]) -> Sampled:
    """A suite's number as differences of it are shown: right answers in percent, perplexities as ln perplexity.

    Differences of logarithms add up, are the logarithm of a ratio, and do not hang on the worst arm of a mean.
    """
    metrics = set(metrics)
    if all(map(is_loss, metrics)):
        return mean.log()
    return mean.times(100.0) if metrics <= PERCENT else mean


def metrics_from_items(table: ItemTable, headline: Headline, *, seed: int = SEED) -> dict[str, dict[str, Any]]:
    """The `metrics` of a record: one entry per suite/task/filter/metric and one per suite of the headline.

    Raises:
        UsageError: if a headline cell has no items.
    """
    by_suite: dict[str, dict[Cell, Sampled]] = {}
    for suite, task, filter_name, metric in table.cells():
        one = cell_sampled(paired_order(table.rows(suite, task, filter_name, metric)), seed=seed)
        by_suite.setdefault(suite, {})[task, filter_name, published(metric)] = one
    return metrics_from_samples(by_suite, headline)


def metrics_from_samples(by_suite: Mapping[str, Mapping[Cell, Sampled]], headline: Headline) -> dict[str, Any]:
    """The `metrics` of a record from the statistics of all its cells."""
    result = {
        "/".join((suite, *cell)): one.interval().to_json()
        for suite, cells in by_suite.items()
        for cell, one in cells.items()
    }
    for suite in headline:
        mean = suite_mean(by_suite.get(suite, {}), headline_cells(headline, suite), suite)
        result[suite] = mean.interval().to_json()
    return dict(sorted(result.items()))
