"""One contrast under several scoring protocols (2610.41366 §4.4, App. C.5 and C.6).

As reported; raw accuracy on every task; the tasks whose options change with every item, where leaning to one answer
cannot raise accuracy; the tasks of fixed answers; and with examples in the prompt. All from the items of two runs, on
the same resamples, so that what examples change is tested too. Exploratory: nothing is corrected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tabulate

from prunebench.analysis.bootstrap import RESAMPLES, SEED, Interval, Sampled, sampled
from prunebench.analysis.choices import FIXED_ANSWERS, choices_of, has_fixed_answers
from prunebench.analysis.compare import EXPLORATORY
from prunebench.analysis.metrics import Cell, clusters_of, headline_cells, lower_is_better, paired_order
from prunebench.analysis.pairing import check_rows, check_runs, common_suites, few_items
from prunebench.errors import UsageError
from prunebench.record import ItemTable, Run

__all__ = ["Protocol", "Robustness", "robustness"]


@dataclass(frozen=True)
class Protocol:
    """The contrast under one protocol, in points.

    Args:
        name: of the protocol.
        tasks: that it scores.
        difference: a − b with its interval; None where it cannot be had.
        p: two-sided bootstrap p.
        note: why it cannot be had, or why nothing may be claimed from it.
    """

    name: str
    tasks: tuple[str, ...] = ()
    difference: Interval | None = None
    p: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Robustness:
    """A contrast of two runs under all protocols; the first is as reported."""

    a: str
    b: str
    suite: str
    protocols: tuple[Protocol, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**asdict(self), "resamples": RESAMPLES, "seed": SEED, "status": EXPLORATORY}

    def text(self) -> str:
        """The table."""
        rows = [
            [
                one.name,
                "—" if one.difference is None else f"{one.difference.value:+z.2f}",
                "" if one.difference is None else f"[{one.difference.low:+z.2f}, {one.difference.high:+z.2f}]",
                "" if one.p is None else f"{one.p:.4f}",
                one.note or ", ".join(one.tasks),
            ]
            for one in self.protocols
        ]
        head = ["protocol", "a − b (points)", "95 % CI", "p", "tasks"]
        align = ["left", "right", "right", "right", "left"]
        table = tabulate.tabulate(rows, head, tablefmt="simple", disable_numparse=True, colalign=align)
        return f"a: {self.a}\nb: {self.b}\nsuite {self.suite}\n\n{table}\n\np and intervals: {EXPLORATORY}."


def robustness(
    run_a: Run,
    run_b: Run,
    suite: str,
    *,
    few_shot: str | None = None,
    fixed: Sequence[str] = (),
    seed: int = SEED,
    resamples: int = RESAMPLES,
) -> Robustness:
    """Run a minus run b under every protocol that their items allow.

    Args:
        run_a: the first run.
        run_b: the second run.
        suite: of choice tasks.
        few_shot: a suite that asks the same questions with examples; None if there is none.
        fixed: tasks of fixed answers beside `choices.FIXED_ANSWERS`.
        seed: of the bootstrap.
        resamples: B.

    Raises:
        UsageError: if the runs cannot be paired, the suite is none of choices, or few_shot asks other questions.
    """
    check_runs(run_a, run_b)
    common_suites(run_a, run_b, [suite] if few_shot is None else [suite, few_shot])
    how: dict[str, Any] = {"seed": seed, "resamples": resamples}
    headline = headline_cells(run_a.record["headline"], suite)
    if any(lower_is_better(cell[2]) for cell in headline):
        raise UsageError(f"suite {suite} is scored by perplexity", expected="a suite of choice tasks")
    rows = {cell: _paired(run_a, run_b, suite, cell) for cell in headline}
    known = (*FIXED_ANSWERS, *fixed)
    lean = {cell: has_fixed_answers(choices_of(own[0]), known) for cell, own in rows.items()}
    reported = {cell: _difference(own, **how) for cell, own in rows.items()}
    counts = {cell: _independent(own[0]) for cell, own in rows.items()}

    def part(name: str, cells: Sequence[Cell]) -> Protocol:
        if not cells:
            return Protocol(name, note="no such task in the suite")
        return _protocol(name, {cell: reported[cell] for cell in cells}, [counts[cell] for cell in cells])

    protocols = [
        part("as reported", headline),
        _raw(run_a, run_b, suite, rows, how),
        part("options of the item", [cell for cell in headline if not lean[cell]]),
        part("fixed answers", [cell for cell in headline if lean[cell]]),
    ]
    if few_shot is None:
        protocols.append(Protocol("with examples", note="no suite with examples was named"))
    else:
        shown = _with_examples(run_a, run_b, few_shot, rows, how)
        sizes = [counts[cell] for cell in headline]
        protocols.append(_protocol(f"with examples ({few_shot})", shown, sizes))
        change = {cell: shown[cell].minus(reported[cell]) for cell in headline}
        protocols.append(_protocol("with examples − as reported", change, sizes))
    return Robustness(run_a.name, run_b.name, suite, tuple(protocols))


def _paired(run_a: Run, run_b: Run, suite: str, cell: Cell) -> tuple[ItemTable, ItemTable]:
    a, b = (paired_order(run.items.rows(suite, *cell)) for run in (run_a, run_b))
    for rows, run in ((a, run_a), (b, run_b)):
        if not len(rows):
            raise UsageError(f"{run.name} has no {cell[2]}", where=f"{suite}/{cell[0]}", fix="evaluate it anew")
    check_rows(a, b, (run_a.name, run_b.name), f"{suite}/{'/'.join(cell)}")
    return a, b


def _independent(rows: ItemTable) -> int:
    clusters = clusters_of(rows)
    return len(rows) if clusters is None else len(set(clusters.tolist()))


def _difference(pair: tuple[ItemTable, ItemTable], **key: Any) -> Sampled:
    """Points, on the resamples of the task as reported unless `key` names others."""
    a, b = pair
    key = {"suite": str(a.suite[0]), "task": str(a.task[0]), **key}
    return sampled(a.value - b.value, clusters=clusters_of(a), **key).times(100.0)


def _protocol(name: str, tasks: Mapping[Cell, Sampled], counts: Sequence[int]) -> Protocol:
    mean = Sampled.macro_mean(list(tasks.values()))
    note = few_items(counts)
    names = tuple(cell[0] for cell in tasks)
    return Protocol(name, names, mean.interval(), None if note else mean.p_value(), f"no claim: {note}" if note else "")


def _raw(
    run_a: Run,
    run_b: Run,
    suite: str,
    rows: Mapping[Cell, tuple[ItemTable, ItemTable]],
    how: Mapping[str, Any],
) -> Protocol:
    name = "raw accuracy"
    raw: dict[Cell, Sampled] = {}
    for cell in rows:
        plain = (cell[0], cell[1], "acc")
        if not len(run_a.items.rows(suite, *plain)):
            return Protocol(name, note=f"no acc of {cell[0]}")
        raw[plain] = _difference(_paired(run_a, run_b, suite, plain), **how)
    return _protocol(name, raw, [_independent(own[0]) for own in rows.values()])


def _with_examples(
    run_a: Run,
    run_b: Run,
    suite: str,
    rows: Mapping[Cell, tuple[ItemTable, ItemTable]],
    how: Mapping[str, Any],
) -> dict[Cell, Sampled]:
    """The differences with examples, by the cell of the same questions without, and on its resamples."""
    shown = {cell: _paired(run_a, run_b, suite, cell) for cell in headline_cells(run_a.record["headline"], suite)}
    found: dict[Cell, Sampled] = {}
    for cell, (own, _) in rows.items():
        same = [pair for pair in shown.values() if np.array_equal(pair[0].doc_hash, own.doc_hash)]
        if len(same) != 1:
            raise UsageError(
                f"{len(same)} tasks of {suite} ask what {cell[0]} asks",
                where=suite,
                expected="one task of the same items",
            )
        key = {"suite": str(own.suite[0]), "task": str(own.task[0]), **how}
        found[cell] = _difference(same[0], **key)
    return found
