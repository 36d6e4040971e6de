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
    "MEANS",
    "PERCENT",
    "RATIOS",
    "Cell",
    "Headline",
    "as_published",
    "cell_sampled",
    "clusters_of",
    "headline_cells",
    "in_units",
    "is_loss",
    "lower_is_better",
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

_PERPLEXITY_OF: Final = {"nll": "perplexity", "word_nll": "word_perplexity", "byte_nll": "byte_perplexity"}
"""Metrics of items, nats with the tokens, words or bytes to divide them by, and what exp of the quotient is called."""

RATIOS: Final = frozenset({"nats", "nats_per_byte", "reverse_kl", "delta_nll", "excess_ppl"})
"""Metrics of items whose quotient Σ values / Σ weights is published as it is; of excess_ppl, exp of it less 1."""

_BIG_5 = ("arc_challenge", "arc_easy", "boolq", "piqa", "winogrande")
_MORA_9 = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "mmlu", "openbookqa", "piqa", "rte", "winogrande")
_NORMALIZED = ("arc_challenge", "arc_easy", "hellaswag", "openbookqa", "piqa")


def _choice_cells(suite: str, tasks: Sequence[str]) -> tuple[tuple[str, Cell], ...]:
    return tuple(
        (task if task == "hellaswag" else suite, (task, "none", "acc_norm" if task in _NORMALIZED else "acc"))
        for task in tasks
    )


MEANS: Final[Mapping[str, tuple[tuple[str, Cell], ...]]] = {
    "nine_tasks/big5/acc": _choice_cells("nine_tasks", _BIG_5),
    "nine_tasks_5shot/big5/acc": _choice_cells("nine_tasks_5shot", _BIG_5),
    "mora9/acc": _choice_cells("nine_tasks", _MORA_9),
}
"""Unweighted means over (suite, cell)s that are published where all of them are there (2610.41366 §3, App. D)."""


def published(metric: str) -> str:
    """The name under which a metric of items is published: the mean nll is published as a perplexity."""
    return _PERPLEXITY_OF.get(metric, metric)


def is_loss(metric: str) -> bool:
    """Whether it is a perplexity: exp of nats per unit, where lower is better and ratios are of interest."""
    return published(metric) in _PERPLEXITY_OF.values()


def lower_is_better(metric: str) -> bool:
    """Whether lower is better."""
    return is_loss(metric) or metric in RATIOS


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


def as_published(metric: str, one: Sampled) -> Sampled:
    """The published statistic of one that was sampled as exp(Σ values / Σ weights), or as a mean.

    Logarithms are taken again rather than not exponentiated first, so that all metrics are resampled by one function.
    """
    if metric not in RATIOS:
        return one
    return Sampled(one.value - 1, one.draws_B - 1, one.n) if metric == "excess_ppl" else one.log()


def cell_sampled(rows: ItemTable, *, seed: int = SEED, resamples: int = RESAMPLES) -> Sampled:
    """The statistic of one cell, given its rows in `paired_order`."""
    metric = str(rows.metric[0])
    weights = rows.weight if lower_is_better(metric) else None
    key = {"suite": str(rows.suite[0]), "task": str(rows.task[0])}
    one = sampled(rows.value, weights, clusters=clusters_of(rows), **key, seed=seed, resamples=resamples)
    return as_published(metric, one)


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
    for name, cells in _means(by_suite).items():
        result[name] = Sampled.macro_mean(cells).interval().to_json()
    return dict(sorted(result.items()))


def _means(by_suite: Mapping[str, Mapping[Cell, Sampled]]) -> dict[str, list[Sampled]]:
    """What is published besides the suites' own numbers: `MEANS`, and of fidelity every metric over axes of a kind."""
    found = {
        name: [by_suite[suite][cell] for suite, cell in cells]
        for name, cells in MEANS.items()
        if all(cell in by_suite.get(suite, {}) for suite, cell in cells)
    }
    for (_, covered, metric), one in by_suite.get("fidelity", {}).items():
        for part in (covered, "all-axes"):
            found.setdefault(f"fidelity/{part}/{metric}", []).append(one)
    return found
