"""What two runs must share to be subtracted item by item; what they do not is named.

Same documents under the same prompts, same suites, scored by the same rules and executed alike: another kernel, dtype
or batch composition rounds differently, and what it changes would be taken for the arm's doing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from prunebench.analysis.metrics import headline_cells
from prunebench.errors import UsageError
from prunebench.mask import canonical_json
from prunebench.record import ItemTable

__all__ = [
    "EXECUTION",
    "MINIMUM_ITEMS",
    "Recorded",
    "check_enough",
    "check_rows",
    "check_runs",
    "common_suites",
    "few_items",
]

EXECUTION: Final = ("dtype", "device", "experts_implementation", "batch_tokens")
"""Fields of an identity that change roundings."""

MINIMUM_ITEMS: Final = 30
"""Below so many independent items (clusters) in a task percentile intervals cover too little; nothing is claimed."""

_EVALUATE: Final = "evaluate both anew"


class Recorded(Protocol):
    """A run, with its items or without."""

    @property
    def record(self) -> Mapping[str, Any]:
        """As in record.json."""

    @property
    def name(self) -> str:
        """How messages call it."""


def few_items(counts: Iterable[int]) -> str:
    """Why no claim may rest on tasks of so many independent items; nothing if one may."""
    fewest = min(counts)
    return f"{fewest} items, fewer than {MINIMUM_ITEMS}" if fewest < MINIMUM_ITEMS else ""


def check_enough(counts: Iterable[int], where: str) -> None:
    """Raise a `UsageError` unless every task has enough items for a claim."""
    if reason := few_items(counts):
        raise UsageError(
            f"too few items for a claim: {reason}",
            where=where,
            expected=f"at least {MINIMUM_ITEMS} items in every task",
            fix="evaluate without --limit, or declare no contrast on this task",
        )


def check_runs(run_a: Recorded, run_b: Recorded) -> None:
    """Raise a `UsageError` unless two runs were scored by the same rules and executed alike."""
    where = f"{run_a.name} against {run_b.name}"
    one, other = (run.record["identity"] for run in (run_a, run_b))
    if one["engine"] != other["engine"]:
        raise UsageError(
            f"scored by different rules (engine {one['engine']} and {other['engine']})", where=where, fix=_EVALUATE
        )
    for field in EXECUTION:
        if one[field] != other[field]:
            raise UsageError(
                f"executed with different {field} ({one[field]} and {other[field]})",
                where=where,
                expected="one dtype, device, experts implementation and batch size",
                fix=_EVALUATE,
            )


def common_suites(run_a: Recorded, run_b: Recorded, suites: Sequence[str] | None) -> list[str]:
    """The suites to compare, sorted: those asked for, or all.

    Raises:
        UsageError: if one run lacks a suite, or they saw another version or content of it, or score it otherwise.
    """
    where = f"{run_a.name} against {run_b.name}"
    have_a, have_b = set(run_a.record["headline"]), set(run_b.record["headline"])
    wanted = set(suites) if suites is not None else have_a | have_b
    for run, have in ((run_a, have_a), (run_b, have_b)):
        lacking = sorted(wanted - have)
        if lacking:
            raise UsageError(f"{run.name} has no suite {lacking[0]}", where=where, expected="the same suites in both")
    for suite in sorted(wanted):
        for name, one, other in (
            ("content", *(run.record["identity"]["suites"].get(suite) for run in (run_a, run_b))),
            ("scorer", *((run.record["identity"].get("scorer") or {}).get(suite, "batched") for run in (run_a, run_b))),
            ("headline", *(headline_cells(run.record["headline"], suite) for run in (run_a, run_b))),
        ):
            if canonical_json(one) != canonical_json(other):
                raise UsageError(f"suite {suite} differs in {name} ({one} and {other})", where=where, fix=_EVALUATE)
    return sorted(wanted)


def check_rows(rows_a: ItemTable, rows_b: ItemTable, names: tuple[str, str], where: str) -> None:
    """Raise a `UsageError` unless two runs' rows of one cell, in paired order, are the same items.

    Args:
        rows_a: of the first run.
        rows_b: of the second run.
        names: what messages call the runs.
        where: the cell.
    """
    for rows, name in ((rows_a, names[0]), (rows_b, names[1])):
        ids, counts = np.unique(rows.item, return_counts=True)
        if (counts > 1).any():
            raise UsageError(
                f"{name} answered {ids[counts > 1][0]} twice", where=where, expected="one outcome per item"
            )
    same = (np.array_equal(getattr(rows_a, field), getattr(rows_b, field)) for field in ("doc_hash", "prompt_hash"))
    if all(same):
        return
    _check_prompts(rows_a, rows_b, names, where)
    keys_a, keys_b = (
        {(doc, prompt): str(item) for doc, prompt, item in zip(r.doc_hash, r.prompt_hash, r.item, strict=True)}
        for r in (rows_a, rows_b)
    )
    for mine, theirs, name in ((keys_a, keys_b, names[1]), (keys_b, keys_a, names[0])):
        missing = sorted(mine[key] for key in mine.keys() - theirs.keys())
        if missing:
            raise UsageError(
                f"{name} lacks {len(missing)} of the items: {_few(missing)}",
                where=where,
                expected="the same items and prompts in both runs",
                fix="evaluate both on the same suites without --limit",
            )
    raise UsageError("an item is repeated in one run only", where=where, expected="the same items in both runs")


def _check_prompts(rows_a: ItemTable, rows_b: ItemTable, names: tuple[str, str], where: str) -> None:
    """Name documents that both runs answered, each under prompts of its own."""
    prompts_a, prompts_b = (_prompts(rows) for rows in (rows_a, rows_b))
    docs = prompts_a.keys() & prompts_b.keys()
    other = {doc for doc in docs if not prompts_a[doc] & prompts_b[doc]}
    if other:
        items = sorted(str(item) for doc, item in zip(rows_a.doc_hash, rows_a.item, strict=True) if int(doc) in other)
        raise UsageError(
            f"{names[0]} and {names[1]} asked {len(items)} items under other prompts: {_few(items)}",
            where=where,
            expected="the same prompts in both runs",
            fix="evaluate both with the same task files and examples",
        )


def _prompts(rows: ItemTable) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for doc, prompt in zip(rows.doc_hash.tolist(), rows.prompt_hash.tolist(), strict=True):
        found.setdefault(doc, set()).add(prompt)
    return found


def _few(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' …' * (len(names) > 3)}"
