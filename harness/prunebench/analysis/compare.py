"""Two runs on the same items: paired differences, per suite and per task.

Looked at one by one and corrected for nothing, so exploratory; declared families are `analysis.declared`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import tabulate

from prunebench.analysis.bootstrap import LEVEL, RESAMPLES, SEED, Interval, Sampled
from prunebench.analysis.mcnemar import McNemar, mcnemar
from prunebench.analysis.metrics import (
    PERCENT,
    Cell,
    cell_sampled,
    clusters_of,
    headline_cells,
    is_loss,
    lower_is_better,
    paired_order,
    published,
    suite_mean,
)
from prunebench.analysis.pairing import check_rows, check_runs, common_suites, few_items
from prunebench.analysis.resolution import equivalence_bound, minimum_detectable
from prunebench.record import ItemTable, Run

__all__ = ["EXPLORATORY", "Comparison", "Contrast", "compare", "comparison_table"]

EXPLORATORY: Final = "exploratory, corrected for nothing"


@dataclass(frozen=True)
class Contrast:
    """Run a minus run b on one suite's headline, or on one task of it.

    Args:
        suite: name of the suite.
        task: name of the task; "" for the suite's macro mean.
        filter: answer extraction; "" for the macro mean.
        metric: published metric name (several are joined by "+").
        a: value of run a.
        b: value of run b.
        difference: a − b with its interval.
        p: two-sided bootstrap p of "no difference", at least 2/B.
        a_only: items right in a and wrong in b; None unless items are right or wrong.
        b_only: the reverse.
        mcnemar: of one task's items that are right or wrong, each by itself; else None.
        bound: the largest difference that the 90 % interval does not rule out; None, as the next, if no item differs.
        detectable: the true difference that would be found with power 0.8.
        no_claim: why nothing may be claimed from it, such as too few items; else "".
        ratio: a / b with its interval, for perplexities only.
        lower_is_better: whether a negative difference favours a.
    """

    suite: str
    task: str
    filter: str
    metric: str
    a: float
    b: float
    difference: Interval
    p: float
    a_only: int | None
    b_only: int | None
    mcnemar: McNemar | None
    bound: float | None
    detectable: float | None
    no_claim: str
    ratio: Interval | None
    lower_is_better: bool

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """All contrasts of two runs: for every suite its headline first, then its tasks."""

    a: str
    b: str
    contrasts: tuple[Contrast, ...]
    resamples: int = RESAMPLES
    seed: int = SEED
    level: float = LEVEL

    def of_suite(self, suite: str) -> Contrast:
        """The headline contrast of one suite."""
        return next(x for x in self.contrasts if x.suite == suite and not x.task)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        method = "paired, task-stratified item bootstrap, percentile interval"
        how = {"method": method, "resamples": self.resamples, "seed": self.seed, "level": self.level}
        how |= {"families": None, "status": EXPLORATORY}
        return {"a": self.a, "b": self.b, **how, "contrasts": [contrast.to_json() for contrast in self.contrasts]}


def compare(
    run_a: Run,
    run_b: Run,
    *,
    suites: Sequence[str] | None = None,
    seed: int = SEED,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Run a minus run b, on the same items and the same resamples of them.

    Args:
        run_a: the first run.
        run_b: the second run.
        suites: only these; None for all.
        seed: of the bootstrap.
        resamples: B.

    Raises:
        UsageError: if scoring rules, execution, suites, their versions or contents, prompts or items differ; the first
            differing items are named.
    """
    check_runs(run_a, run_b)
    contrasts = tuple(
        contrast
        for suite in common_suites(run_a, run_b, suites)
        for contrast in _compare_suite(run_a, run_b, suite, seed=seed, resamples=resamples)
    )
    return Comparison(run_a.name, run_b.name, contrasts, resamples=resamples, seed=seed)


@dataclass(frozen=True, eq=False)
class _Pair:
    """One cell of two runs: statistics, discordant counts, independent items, and whether each is alone."""

    a: Sampled
    b: Sampled
    a_only: int
    b_only: int
    independent: int
    alone: bool

    @classmethod
    def of(cls, rows_a: ItemTable, rows_b: ItemTable, *, seed: int, resamples: int) -> _Pair:
        a, b = (cell_sampled(rows, seed=seed, resamples=resamples) for rows in (rows_a, rows_b))
        better, worse = (np.count_nonzero(x) for x in (rows_a.value > rows_b.value, rows_a.value < rows_b.value))
        clusters = clusters_of(rows_a)
        independent = len(rows_a) if clusters is None else len(set(clusters.tolist()))
        return cls(a, b, int(better), int(worse), independent, clusters is None)

    @property
    def test(self) -> McNemar | None:
        """McNemar's, whose items have to be independent."""
        return mcnemar(self.a_only, self.b_only) if self.alone else None


def _compare_suite(run_a: Run, run_b: Run, suite: str, *, seed: int, resamples: int) -> list[Contrast]:
    wanted = headline_cells(run_a.record["headline"], suite)
    cells = {cell[1:] for run in (run_a, run_b) for cell in run.items.cells() if cell[0] == suite}
    pairs: dict[Cell, _Pair] = {}
    for task, filter_name, metric in sorted(cells):
        cell = (task, filter_name, published(metric))
        rows_a, rows_b = (paired_order(run.items.rows(suite, task, filter_name, metric)) for run in (run_a, run_b))
        check_rows(rows_a, rows_b, (run_a.name, run_b.name), f"{suite}/{'/'.join(cell)}")
        pairs[cell] = _Pair.of(rows_a, rows_b, seed=seed, resamples=resamples)
    means = (
        suite_mean({cell: pair.a for cell, pair in pairs.items()}, wanted, suite),
        suite_mean({cell: pair.b for cell, pair in pairs.items()}, wanted, suite),
    )
    metric = "+".join(sorted({cell[2] for cell in wanted}))
    whole = [_contrast((suite, "", "", metric), *means, [pairs[cell] for cell in wanted])]
    return whole + [_contrast((suite, *cell), pair.a, pair.b, [pair]) for cell, pair in pairs.items()]


def _contrast(name: tuple[str, str, str, str], a: Sampled, b: Sampled, pairs: Sequence[_Pair]) -> Contrast:
    difference = a.minus(b)
    metrics = set(name[3].split("+"))
    countable = metrics <= PERCENT
    loss = all(map(is_loss, metrics))
    lower = all(map(lower_is_better, metrics))
    return Contrast(
        *name,
        a=a.value,
        b=b.value,
        difference=difference.interval(),
        p=difference.p_value(),
        a_only=sum(pair.a_only for pair in pairs) if countable else None,
        b_only=sum(pair.b_only for pair in pairs) if countable else None,
        mcnemar=pairs[0].test if countable and len(pairs) == 1 else None,
        bound=equivalence_bound(difference),
        detectable=minimum_detectable(difference),
        no_claim=few_items(pair.independent for pair in pairs),
        ratio=a.over(b).interval() if loss else None,
        lower_is_better=lower,
    )


def comparison_table(comparison: Comparison) -> str:
    """The comparison as a text table; accuracies in percent, their differences in points."""
    head = ["suite", "task", "filter", "metric", "a", "b", "a − b", "95 % CI", "n", "only a", "only b", "p"]
    head += ["McNemar", "bound"]
    body = [_table_row(contrast) for contrast in comparison.contrasts]
    table = tabulate.tabulate(
        body, head, tablefmt="simple", disable_numparse=True, colalign=["left"] * 4 + ["right"] * 10
    )
    notes = [f"p, McNemar (exact) and intervals: {EXPLORATORY}. bound: the largest difference not ruled out (90 %)."]
    notes += sorted({f"no claim: {x.suite}: {x.no_claim}" for x in comparison.contrasts if x.no_claim and not x.task})
    return "\n".join([f"a: {comparison.a}", f"b: {comparison.b}", "", table, "", *notes])


def _table_row(x: Contrast) -> list[str]:
    scale, digits = (100.0, 2) if set(x.metric.split("+")) <= PERCENT else (1.0, 3)
    d = x.difference
    counts = ["" if count is None else str(count) for count in (x.a_only, x.b_only)]
    p = "—" if x.no_claim else f"{x.p:.4f}"
    return [
        *(x.suite, x.task or "(all)", x.filter, x.metric),
        *(f"{scale * value:.{digits}f}" for value in (x.a, x.b)),
        f"{scale * d.value:+.{digits}f}",
        f"[{scale * d.low:+.{digits}f}, {scale * d.high:+.{digits}f}]",
        *(str(d.n), *counts, p),
        "" if x.mcnemar is None else "—" if x.no_claim else f"{x.mcnemar.exact:.4f}",
        "—" if x.bound is None else f"{scale * x.bound:.{digits}f}",
    ]
