"""Two runs on the same items: paired differences, per suite and per task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tabulate

from prunebench.analysis.bootstrap import LEVEL, RESAMPLES, SEED, Interval, Sampled
from prunebench.analysis.metrics import (
    PERCENT,
    Cell,
    cell_sampled,
    headline_cells,
    is_loss,
    lower_is_better,
    paired_order,
    published,
    suite_mean,
)
from prunebench.errors import UsageError
from prunebench.record import ItemTable, Run

__all__ = ["Comparison", "Contrast", "compare", "comparison_table"]


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
        UsageError: if suites, their versions or contents, or the items differ; the first differing items are named.
    """
    where = f"{run_a.name} against {run_b.name}"
    contrasts = tuple(
        contrast
        for suite in _common_suites(run_a, run_b, suites, where)
        for contrast in _compare_suite(run_a, run_b, suite, seed=seed, resamples=resamples)
    )
    return Comparison(run_a.name, run_b.name, contrasts, resamples=resamples, seed=seed)


def _common_suites(run_a: Run, run_b: Run, suites: Sequence[str] | None, where: str) -> list[str]:
    have_a, have_b = set(run_a.record["headline"]), set(run_b.record["headline"])
    wanted = set(suites) if suites is not None else have_a | have_b
    for run, have in ((run_a, have_a), (run_b, have_b)):
        lacking = sorted(wanted - have)
        if lacking:
            raise UsageError(f"{run.name} has no suite {lacking[0]}", where=where, expected="the same suites in both")
    engines = [run.record["identity"]["engine"] for run in (run_a, run_b)]
    if engines[0] != engines[1]:
        raise UsageError(
            f"scored by different rules (engine {engines[0]} and {engines[1]})", where=where, fix="evaluate both anew"
        )
    for suite in sorted(wanted):
        for name, one, other in (
            ("content", run_a.record["identity"]["suites"].get(suite), run_b.record["identity"]["suites"].get(suite)),
            ("headline", *(headline_cells(run.record["headline"], suite) for run in (run_a, run_b))),
        ):
            if one != other:
                raise UsageError(
                    f"suite {suite} differs in {name} ({one} and {other})", where=where, fix="evaluate both runs anew"
                )
    return sorted(wanted)


def _compare_suite(run_a: Run, run_b: Run, suite: str, *, seed: int, resamples: int) -> list[Contrast]:
    wanted = headline_cells(run_a.record["headline"], suite)
    cells = {cell[1:] for run in (run_a, run_b) for cell in run.items.cells() if cell[0] == suite}
    sampled_a: dict[Cell, Sampled] = {}
    sampled_b: dict[Cell, Sampled] = {}
    discordant: dict[Cell, tuple[int, int]] = {}
    for task, filter_name, metric in sorted(cells):
        cell = (task, filter_name, published(metric))
        rows_a, rows_b = (paired_order(run.items.rows(suite, task, filter_name, metric)) for run in (run_a, run_b))
        _refuse_unpaired(rows_a, rows_b, (run_a, run_b), f"{suite}/{'/'.join(cell)}")
        sampled_a[cell], sampled_b[cell] = (cell_sampled(r, seed=seed, resamples=resamples) for r in (rows_a, rows_b))
        better, worse = (np.count_nonzero(x) for x in (rows_a.value > rows_b.value, rows_a.value < rows_b.value))
        discordant[cell] = (int(better), int(worse))
    mean_a, mean_b = (suite_mean(sampled, wanted, suite) for sampled in (sampled_a, sampled_b))
    metric = "+".join(sorted({cell[2] for cell in wanted}))
    totals = (sum(discordant[cell][0] for cell in wanted), sum(discordant[cell][1] for cell in wanted))
    rows = [_contrast((suite, "", "", metric), mean_a, mean_b, totals)]
    return rows + [_contrast((suite, *cell), sampled_a[cell], sampled_b[cell], discordant[cell]) for cell in sampled_a]


def _contrast(name: tuple[str, str, str, str], a: Sampled, b: Sampled, discordant: tuple[int, int]) -> Contrast:
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
        a_only=discordant[0] if countable else None,
        b_only=discordant[1] if countable else None,
        ratio=a.over(b).interval() if loss else None,
        lower_is_better=lower,
    )


def _refuse_unpaired(rows_a: ItemTable, rows_b: ItemTable, runs: tuple[Run, Run], where: str) -> None:
    """Raise unless both runs answered the same documents under the same prompts."""
    keys_a, keys_b = (
        {(doc, prompt): str(item) for doc, prompt, item in zip(r.doc_hash, r.prompt_hash, r.item, strict=True)}
        for r in (rows_a, rows_b)
    )
    for mine, theirs, run in ((keys_a, keys_b, runs[1]), (keys_b, keys_a, runs[0])):
        missing = sorted(mine[key] for key in mine.keys() - theirs.keys())
        if missing:
            raise UsageError(
                f"{run.name} lacks {len(missing)} of the items: {', '.join(missing[:3])}{' …' * (len(missing) > 3)}",
                where=where,
                expected="the same items and prompts in both runs",
                fix="evaluate both on the same suites without --limit",
            )
    if not (
        np.array_equal(rows_a.doc_hash, rows_b.doc_hash) and np.array_equal(rows_a.prompt_hash, rows_b.prompt_hash)
    ):
        raise UsageError("an item is repeated in one run only", where=where, expected="the same items in both runs")


def comparison_table(comparison: Comparison) -> str:
    """The comparison as a text table; accuracies in percent, their differences in points."""
    head = ["suite", "task", "filter", "metric", "a", "b", "a − b", "95 % CI", "n", "only a", "only b", "p"]
    body = [_table_row(contrast) for contrast in comparison.contrasts]
    table = tabulate.tabulate(
        body, head, tablefmt="simple", disable_numparse=True, colalign=["left"] * 4 + ["right"] * 8
    )
    return f"a: {comparison.a}\nb: {comparison.b}\n\n{table}"


def _table_row(x: Contrast) -> list[str]:
    scale, digits = (100.0, 2) if set(x.metric.split("+")) <= PERCENT else (1.0, 3)
    d = x.difference
    counts = ["" if count is None else str(count) for count in (x.a_only, x.b_only)]
    return [
        *(x.suite, x.task or "(all)", x.filter, x.metric),
        *(f"{scale * value:.{digits}f}" for value in (x.a, x.b)),
        f"{scale * d.value:+.{digits}f}",
        f"[{scale * d.low:+.{digits}f}, {scale * d.high:+.{digits}f}]",
        *(str(d.n), *counts, f"{x.p:.4f}"),
    ]
