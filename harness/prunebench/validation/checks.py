"""What is looked at in one run. Every fault is a finding with the name of its rule; a run may have several."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np

from prunebench.analysis.metrics import PERCENT, metrics_from_items
from prunebench.analysis.recompute import recompute
from prunebench.errors import PruneBenchError, UsageError
from prunebench.record import RECORD_FILE, Run, read_run, seal_of, validate
from prunebench.validation.arms import said_otherwise
from prunebench.versions import json_document, migrated

__all__ = ["CHECKS", "Finding", "check_run", "first_fault", "record_schema", "stored_values"]

CHECKS: Final = {
    "dense": ("empty mask is bit-exact", "repeated items are equal"),
    "pruned": (
        "empty mask is bit-exact",
        "every slot has an answer",
        "keep and renorm differ by one scalar",
        "masked equals physically removed",
        "stored values as declared",
        "repeated items are equal",
        "no token reaches a pruned expert",
        "every asked fill answered",
        "k slots per token",
    ),
}
"""The integrity checks that a run's record has to name (`prunebench.integrity`)."""

_BUSY: Final[Mapping[str, Callable[[Mapping[str, Any]], object]]] = {
    "keep and renorm differ by one scalar": lambda record: record["arm"]["resolved_scale"],
    "every asked fill answered": lambda record: record["tensors"],
}
"""The only checks that some arms have nothing for, and what an arm has that does: refilled slots, and fills."""
_DTYPES: Final = frozenset(("float64", "float32", "bfloat16", "float16", "int8", "uint8"))
_FIRST_RUN: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
_CLOCKS_DIFFER: Final = dt.timedelta(hours=26)  # other time zones, and a little


Documents = Mapping[tuple[str, str, str], Mapping[str, Any]]
"""(suite, task, item) -> the document."""


@dataclass(frozen=True, order=True)
class Finding:
    """A fault: the run's folder below what was looked at, the rule that it breaks, and how."""

    path: str
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.rule}: {self.what}"


@cache
def record_schema() -> dict[str, Any]:
    """The JSON Schema of `record.json`, as it is shipped."""
    text = resources.files("prunebench.validation").joinpath("record.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


@cache
def _validator() -> Any:
    import jsonschema

    cls = jsonschema.Draft202012Validator
    cls.check_schema(record_schema())
    return cls(record_schema())


def first_fault(record: Mapping[str, Any]) -> str:
    """What the JSON Schema says against a record, nearest to the top first; nothing if it fits."""
    faults = sorted(_validator().iter_errors(record), key=lambda fault: (len(fault.path), fault.json_path))
    if not faults:
        return ""
    text = faults[0].message
    return f"{faults[0].json_path}: {text if len(text) < 200 else text[:200] + ' …'}"


def check_run(
    folder: Path,
    path: str,
    *,
    methods: Mapping[str, str],
    now: dt.datetime,
    documents: Callable[[Run], Documents] | None = None,
) -> tuple[Run | None, list[Finding]]:
    """Everything that one run's two files can be held against.

    Args:
        folder: the run.
        path: what findings call it.
        methods: sha256 of the method files that are known, by name.
        documents: of suites that ship them, for decisions that items alone do not hold.
        now: dates after it (and a day for other time zones) are of the future.

    Returns:
        The run, unless it could not be read at all, and what is wrong with it.
    """
    try:
        record = migrated(json_document((folder / RECORD_FILE).read_text(encoding="utf-8")), where=RECORD_FILE)
    except (OSError, ValueError) as error:
        return None, [Finding(path, "json", str(error))]
    except UsageError as error:
        return None, [Finding(path, "schema", str(error))]
    found = []
    if fault := first_fault(record):
        found.append(Finding(path, "schema", fault))
    try:
        validate(record, where=RECORD_FILE)
    except UsageError as error:
        found.append(Finding(path, "record", str(error)))
    if found:
        return None, found
    try:
        run = read_run(folder)
    except PruneBenchError as error:
        return None, [Finding(path, "items", str(error))]
    known = {} if documents is None else documents(run)
    rules: Sequence[tuple[str, Callable[[], Iterator[str]]]] = (
        ("seal", lambda: _seal(run)),
        ("arm", lambda: said_otherwise(record)),
        ("items", lambda: _items(run)),
        ("count", lambda: _counts(run, known)),
        ("metrics", lambda: _metrics(run)),
        ("decision", lambda: _decisions(run, known)),
        ("bytes", lambda: _bytes(record)),
        ("method", lambda: _methods(record, methods)),
        ("integrity", lambda: _integrity(record)),
        ("date", lambda: _dates(record["volatile"], now)),
    )
    return run, [Finding(path, rule, what) for rule, faults in rules for what in faults()]


def _seal(run: Run) -> Iterator[str]:
    stated = run.record["seal"]
    if stated is None:
        return
    wanted = seal_of(run.record, run.items)
    for part, words in (
        ("items", "the items are not those that were sealed"),
        ("record", "edited after it was sealed"),
    ):
        if stated[part] != wanted[part]:
            yield f"{words}: sha256 {wanted[part][:16]}…, sealed {stated[part][:16]}…"


def _items(run: Run) -> Iterator[str]:
    """Outcomes are in the range of their metric, and agree with their state."""
    table = run.items
    shares = np.isin(table.metric, list(PERCENT))
    for wrong, words in (
        (shares & ~((table.value >= 0) & (table.value <= 1)), "is no share"),
        (~shares & (table.metric == "nll") & (table.value < 0), "is no loss"),
        (shares & (table.value == 1) & (table.state != "ok"), "is right, and its state says otherwise"),
        (shares & (table.value == 0) & (table.state == "ok"), "is wrong, and its state says ok"),
    ):
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            name = "/".join(str(getattr(table, key)[at]) for key in ("suite", "task", "filter", "item", "metric"))
            yield f"{name}: {table.value[at]} {words} ({table.state[at]})"


def _counts(run: Run, documents: Documents) -> Iterator[str]:
    """All metrics of a task are of the same questions, and of all that its suite ships: none was dropped."""
    by_task: dict[tuple[str, str], dict[str, set[str]]] = {}
    for suite, task, filter_name, metric in run.items.cells():
        rows = run.items.rows(suite, task, filter_name, metric)
        by_task.setdefault((suite, task), {})[f"{filter_name}/{metric}"] = set(rows.item.tolist())
    for (suite, task), cells in by_task.items():
        every = set.union(*cells.values())
        for cell, items in cells.items():
            if items != every:
                missing = min(every - items)
                yield f"{suite}/{task}/{cell} has {len(items)} of {len(every)} items ({missing} is missing)"
    shipped: dict[tuple[str, str], set[str]] = {}
    for suite, task, name in documents:
        shipped.setdefault((suite, task), set()).add(name)
    for (suite, task), all_of_it in shipped.items() if run.record["status"] == "complete" else ():
        answered = {item.partition("#")[0] for items in by_task.get((suite, task), {}).values() for item in items}
        if short := all_of_it - answered:
            yield f"{suite}/{task}: items are short, {len(answered)} of {len(all_of_it)} ({min(short)} is missing)"
    there = set(run.items.cells())
    for suite, cells in run.record["headline"].items():
        for task, filter_name, metric in cells:
            if (suite, task, filter_name, metric) not in there:
                yield f"no items for {suite}/{task}/{filter_name}/{metric}, a part of the headline"


def _metrics(run: Run) -> Iterator[str]:
    """Every number is what the items give, and none is missing."""
    stated = run.record["metrics"]
    try:
        computed = metrics_from_items(run.items, run.record["headline"])
    except PruneBenchError:
        return  # `count` has said which items are missing
    for name in sorted(stated.keys() | computed.keys()):
        for field in ("value", "low", "high", "n"):
            says, gives = (numbers.get(name, {}).get(field) for numbers in (stated, computed))
            if says is None or gives is None or not math.isclose(says, gives, rel_tol=1e-9, abs_tol=1e-9):
                yield f"{name}: the record says {field} {says}, its items give {gives}"
                break


def _decisions(run: Run, documents: Documents) -> Iterator[str]:
    """Every item is decided as it says, from what it stores."""
    for cell in recompute(run, documents).cells:
        if cell.first:
            yield f"{cell.cell}: {cell.first}"


def _bytes(record: Mapping[str, Any]) -> Iterator[str]:
    """Stored fills are so many values of one width as their tensors' shapes say; which, other runs tell (`peers`)."""
    for layer, groups in record["tensors"].items():
        for group in groups:
            for name, tensor in group["tensors"].items():
                if tensor["dtype"] not in _DTYPES:
                    yield f"tensors.{layer}: {name} has the unknown dtype {tensor['dtype']}"
                    return
    values = stored_values(record["tensors"])
    stated = record["storage"]["parts"].get("fills", 0)
    if stated not in {values * width for width in (1, 2, 4, 8)} | ({0} if not values else set()):
        yield f"fills of {stated} bytes, for {values} values in the tensor manifest"


def stored_values(tensors: Mapping[str, Any]) -> int:
    """How many values the fills of a record's tensor manifest are."""
    groups = [group for layer in tensors.values() for group in layer]
    return sum(len(one["experts"]) * math.prod(t["shape"]) for one in groups for t in one["tensors"].values())


def _methods(record: Mapping[str, Any], methods: Mapping[str, str]) -> Iterator[str]:
    """Files that are known are the ones that ran."""
    identity = record["identity"]
    parts = {key: identity[key] for key in ("method", "operator")}
    parts["operator elsewhere"] = (identity.get("operator_layers") or {}).get("elsewhere")
    for role, part in parts.items():
        known = methods.get((part or {}).get("name", ""))
        if part and known is not None and known != part["file_sha256"]:
            ran, here = part["file_sha256"][:12], known[:12]
            yield f"the file of {role} {part['name']} has changed since: {ran}… ran, {here}… is here"


def _integrity(record: Mapping[str, Any]) -> Iterator[str]:
    """All checks are named, none failed, and none is passed over."""
    marks = [(str(entry["check"]), entry["status"]) for entry in record["integrity"]]
    names = [name for name, _ in marks]
    idle = {name for name, busy in _BUSY.items() if not busy(record)}
    for name in CHECKS["dense" if record["arm"]["dense"] else "pruned"]:
        if name not in names:
            yield f"no mark for {name!r}"
    for name, status in marks:
        if status == "fail":
            yield f"{name!r} failed"
        if status == "not applicable" and name not in idle:
            yield f"{name!r} is marked not applicable, and this arm has it"
    if len(set(names)) < len(names):
        yield f"{next(name for name in names if names.count(name) > 1)!r} is marked twice"


def _dates(volatile: Mapping[str, Any], now: dt.datetime) -> Iterator[str]:
    started = volatile.get("started")
    if started is None:
        yield "no date"
        return
    try:
        date = dt.datetime.fromisoformat(str(started))
    except ValueError:
        yield f"{started!r} is no date"
        return
    date = date if date.tzinfo else date.replace(tzinfo=dt.UTC)
    if date > now + _CLOCKS_DIFFER:
        yield f"{started} is in the future"
    if date < _FIRST_RUN:
        yield f"{started} is before there was a prunebench"
