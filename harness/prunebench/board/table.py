"""Numbers → the board's columns and cells. What a cell says is decided here; how it looks, in `render`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prunebench.analysis import PERCENT, headline_cells, is_loss, lower_is_better, rerouting_summary
from prunebench.board.entries import Entry
from prunebench.board.naming import IDENTIFYING, Cell, Column, identifying_cells
from prunebench.board.reporting import ITEMS, Reported, reporting
from prunebench.board.scoring import Difference, Numbers, Scored
from prunebench.mask import canonical_json

__all__ = ["Cell", "Column", "Row", "SuiteColumn", "Table", "build_table", "shown", "shown_difference"]


_AT_THE_END: Final = ("convention", "calibration", "fit")


@dataclass(frozen=True)
class SuiteColumn:
    """One suite at one version; runs that saw another content get a column of their own."""

    name: str
    content: str
    label: str
    percent: bool
    loss: bool
    logarithmic: bool
    n: int | None

    def has(self, entry: Entry) -> bool:
        """Whether a run answered it."""
        return self.name in entry.record["headline"] and entry.content(self.name) == self.content


@dataclass(frozen=True)
class Row:
    """One run: its cells by the keys of the columns, and what they were made from."""

    entry: Entry
    cells: Mapping[str, Cell]
    numbers: Mapping[str, Numbers]
    reported: tuple[Reported, ...]


@dataclass(frozen=True)
class Table:
    """The board: one row per run."""

    columns: tuple[Column, ...]
    suites: tuple[SuiteColumn, ...]
    rows: tuple[Row, ...]


def build_table(entries: Sequence[Entry], scored: Scored) -> Table:
    """All runs, the dense one first within its model, then by method, budget, calibration, operator and scale."""
    ordered = sorted(entries, key=_order)
    suites = _suites(ordered)
    told = reporting(ordered)
    names_first = [column for column in IDENTIFYING if column.key not in _AT_THE_END]
    columns = (
        *names_first,
        Column("stored", "stored MB", "% of dense", numeric=True),
        *(Column(s.label, s.label, _suite_detail(s), numeric=True) for s in suites),
        *(Column(f"{s.label}-loss", f"{s.label} − dense", _unit(s), numeric=True) for s in suites),
        *(Column(f"{s.label}-gain", f"{s.label} − constant", _unit(s), numeric=True) for s in suites),
        *(column for column in IDENTIFYING if column.key in _AT_THE_END),
        Column("rerouted", "calls rerouted", "%", numeric=True),
        Column("reported", "reported", "of 5", numeric=True),
        Column("integrity", "integrity", "checks passed", numeric=True),
        Column("run", "run"),
    )
    dense = _dense_sizes(ordered)
    rows = []
    for entry, names in zip(ordered, identifying_cells(ordered), strict=True):
        numbers, reported = scored.numbers[entry.id], told.get(entry.id, ())
        cells = dict(zip((column.key for column in IDENTIFYING), names, strict=True))
        cells |= {"stored": _stored(entry, dense.get(entry.weights, set())), "rerouted": _rerouted(entry)}
        for suite in suites:
            own = numbers[suite.name] if suite.has(entry) else None
            cells[suite.label] = _value(own, suite)
            for key, asked in (("loss", own and own.dense), ("gain", own and own.constant)):
                cells[f"{suite.label}-{key}"] = _difference(asked or "not run", suite)
        cells |= {"reported": _reported(reported), "integrity": _integrity(entry), "run": Cell(entry.id)}
        rows.append(Row(entry, cells, numbers, reported))
    return Table(columns, suites, tuple(rows))


def _order(entry: Entry) -> tuple[Any, ...]:
    arm, identity = entry.record["arm"], entry.record["identity"]
    execution = tuple(str(identity[field]) for field in ("dtype", "device", "experts_implementation"))
    parameters = canonical_json((identity["method"] or {}).get("parameters"))
    chosen = (arm["mask"] or "", parameters, str(identity["seed"]), arm["ratio"] or 0.0)
    chosen_on, fitted_on = (_text_and_draw(entry.calibration(part)) for part in ("mask", "fit"))
    answered = (arm["operator"] or "", arm["scale"] or "")
    place = (not arm["dense"], *chosen, *chosen_on, *answered, *fitted_on, entry.id)
    return (arm["model"], entry.weights, *execution, *place)


def _text_and_draw(calibration: Mapping[str, Any] | None) -> tuple[str, str]:
    return str((calibration or {}).get("text")), str((calibration or {}).get("draw"))


def _version(entry: Entry, suite: str) -> tuple[int, str]:
    stated = entry.record["identity"]["suites"].get(suite) or {}
    return int(stated.get("version", 0)), str(stated.get("content", ""))


def _short(version: tuple[int, str]) -> tuple[int, str]:
    return version[0], version[1][:6]


def _suites(entries: Sequence[Entry]) -> tuple[SuiteColumn, ...]:
    seen = {(suite, entry.content(suite)): entry for entry in reversed(entries) for suite in entry.record["headline"]}
    names = [suite for suite, _ in seen]
    shorts = [(suite, *_short(_version(entry, suite))) for (suite, _), entry in seen.items()]
    result = []
    order = sorted(seen.items(), key=lambda entry: (entry[0][0], _version(entry[1], entry[0][0])))
    for (suite, content), entry in order:
        version, digest = _version(entry, suite)
        short = _short((version, digest))
        said = short if shorts.count((suite, *short)) == 1 else (version, digest)
        several = f" v{said[0]} {said[1]}" if names.count(suite) > 1 else ""
        metrics = {cell[2] for cell in headline_cells(entry.record["headline"], suite)}
        counts = {one.record["metrics"][suite]["n"] for one in entries if suite in one.record["headline"]}
        result.append(
            SuiteColumn(
                suite,
                content,
                suite + several,
                percent=metrics <= PERCENT,
                loss=all(map(lower_is_better, metrics)),
                logarithmic=all(map(is_loss, metrics)),
                n=counts.pop() if len(counts) == 1 else None,
            )
        )
    return tuple(result)


def _suite_detail(suite: SuiteColumn) -> str:
    parts = ["%" if suite.percent else "", "↓ lower is better" if suite.loss else "↑"]
    return " ".join(filter(None, parts)) + " [95 % CI]" + (f", n = {suite.n}" if suite.n else "")


def _unit(suite: SuiteColumn) -> str:
    unit = "points" if suite.percent else "ln" if suite.logarithmic else "difference"
    return unit + ("; below 0 is better" if suite.loss else "") + " [95 % CI]"


def _dense_sizes(entries: Sequence[Entry]) -> Mapping[str, set[int]]:
    """The stored bytes of the dense runs by weights."""
    found: dict[str, set[int]] = {}
    for entry in entries:
        if entry.dense:
            found.setdefault(entry.weights, set()).add(entry.record["storage"]["total"])
    return found


def _stored(entry: Entry, dense: set[int]) -> Cell:
    total = entry.record["storage"]["total"]
    share = f"{100 * total / min(dense):.1f} %" if len(dense) == 1 else "no dense run"
    return Cell(f"{total / 1e6:.2f}", share, sort=total)


def _rerouted(entry: Entry) -> Cell:
    """How often rerouting moved a slot, and how far apart the two gate scales then are (2610.41366 §5.3)."""
    summary = rerouting_summary(entry.record["routing"])
    if summary is None or entry.dense:
        return Cell("—")
    detail = f"keep ÷ renorm {summary.keep_over_renorm:.2f}, above 1 on {100 * summary.above_one_share:.1f} %"
    return Cell(f"{100 * summary.displaced_share:.1f}", detail, sort=summary.displaced_share)


def shown(value: float, suite: SuiteColumn) -> str:
    """A score of a suite as people read it."""
    if suite.percent:
        return f"{round(100 * value, 9):.1f}"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"


def shown_difference(value: float, suite: SuiteColumn) -> str:
    """A difference, in points where the suite is in percent."""
    return f"{round(value, 9):+z.1f}" if suite.percent else f"{value:+z.3f}"


def _value(numbers: Numbers | None, suite: SuiteColumn) -> Cell:
    if numbers is None:
        return Cell("—", "not run")
    value, low, high = (shown(getattr(numbers, key), suite) for key in ("value", "low", "high"))
    count = "" if suite.n else f", n = {numbers.n}"
    group = f" · group {numbers.group}" if numbers.group else ""
    return Cell(value, f"[{low}, {high}]{count}{group}", sort=numbers.value, strong=numbers.group == 1)


def _difference(difference: Difference | str, suite: SuiteColumn) -> Cell:
    if isinstance(difference, str):
        return Cell("—", difference)
    value, low, high = (shown_difference(getattr(difference, key), suite) for key in ("value", "low", "high"))
    mark = "" if difference.mark == "*" else difference.mark
    return Cell(value + mark, f"[{low}, {high}]", sort=difference.value, strong=difference.excludes_zero)


def _reported(reported: Sequence[Reported]) -> Cell:
    if not reported:
        return Cell("—", "dense")
    missing = [number for number, (one, _) in enumerate(zip(reported, ITEMS, strict=True), 1) if not one.text]
    detail = f"missing: {', '.join(map(str, missing))}" if missing else ""
    return Cell(str(len(ITEMS) - len(missing)), detail, sort=len(ITEMS) - len(missing))


def _integrity(entry: Entry) -> Cell:
    checks = [one for one in entry.record["integrity"] if one["status"] != "not applicable"]
    failed = [str(one["check"]) for one in checks if one["status"] == "fail"]
    if not checks:
        return Cell("—", "no check applied")
    share = 1 - len(failed) / len(checks)
    if failed:
        return Cell(f"✗ {len(checks) - len(failed)}/{len(checks)}", ", ".join(failed), sort=share, strong=True)
    return Cell(f"✓ {len(checks)}/{len(checks)}", sort=share)
