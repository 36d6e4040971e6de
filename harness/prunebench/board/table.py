"""Runs → the board's columns and cells. What a cell says is decided here; how it looks, in `render`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prunebench.analysis import PERCENT, Contrast, compare, headline_cells, is_loss
from prunebench.errors import PruneBenchError
from prunebench.mask import canonical_json
from prunebench.record import Run

__all__ = ["Cell", "Column", "Table", "build_table"]


@dataclass(frozen=True)
class Column:
    """A column: a stable key (used in links), its title, a second line, and whether it sorts as numbers."""

    key: str
    title: str
    detail: str = ""
    numeric: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell: what it says, a smaller second part, its sort key (None: unknown, last), and emphasis."""

    text: str
    detail: str = ""
    sort: float | str | None = None
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """The board: one row of cells per run."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class _Suite:
    """One suite at one version; runs that saw another content get a column of their own."""

    name: str
    content: str
    label: str
    percent: bool
    loss: bool
    n: int | None

    def has(self, run: Run) -> bool:
        return self.name in run.record["headline"] and _content(run, self.name) == self.content


def build_table(runs: Sequence[Run]) -> Table:
    """All runs, the dense one first within its model, then by method, budget, draw, operator and scale."""
    ordered = sorted(runs, key=_order)
    suites = _suites(ordered)
    columns = [
        Column("model", "model"),
        Column("convention", "convention"),
        Column("method", "method (mask)"),
        Column("operator", "operator"),
        Column("scale", "scale"),
        Column("ratio", "ratio pruned", numeric=True),
        Column("draw", "draw"),
        Column("stored", "stored MB", "% of dense", numeric=True),
        *(Column(s.label, s.label, _suite_detail(s), numeric=True) for s in suites),
        *(Column(f"{s.label}-gain", f"{s.label} − constant", _gain_detail(s), numeric=True) for s in suites),
        Column("integrity", "integrity", "checks passed", numeric=True),
        Column("run", "run"),
    ]
    return Table(tuple(columns), tuple(_row(run, ordered, suites) for run in ordered))


def _order(run: Run) -> tuple[Any, ...]:
    arm = run.record["arm"]
    words = (arm["draw"] or "", arm["operator"] or "", arm["scale"] or "", run.record["run_id"])
    return (arm["model"], _weights(run), not arm["dense"], arm["mask"] or "", _share_pruned(run), *words)


def _weights(run: Run) -> str:
    return str(run.record["identity"]["model"]["weights_sha256"])


def _share_pruned(run: Run) -> float:
    layers = (run.record["mask"] or {}).get("layers", [])
    experts = sum(layer["E"] for layer in layers)
    return sum(len(layer["pruned"]) for layer in layers) / experts if experts else 0.0


def _content(run: Run, suite: str) -> str:
    return canonical_json(run.record["identity"]["suites"].get(suite))


def _version(run: Run, suite: str) -> tuple[int, str]:
    stated = run.record["identity"]["suites"].get(suite) or {}
    return int(stated.get("version", 0)), str(stated.get("content", ""))


def _suites(runs: Sequence[Run]) -> list[_Suite]:
    seen = {(suite, _content(run, suite)): run for run in reversed(runs) for suite in run.record["headline"]}
    names = [suite for suite, _ in seen]
    result = []
    for (suite, content), run in sorted(seen.items(), key=lambda entry: (entry[0][0], _version(entry[1], entry[0][0]))):
        version, digest = _version(run, suite)
        several = f" v{version} {digest[:6]}" if names.count(suite) > 1 else ""
        metrics = {cell[2] for cell in headline_cells(run.record["headline"], suite)}
        counts = {r.record["metrics"][suite]["n"] for r in runs if suite in r.record["headline"]}
        result.append(
            _Suite(
                suite,
                content,
                suite + several,
                percent=metrics <= PERCENT,
                loss=all(map(is_loss, metrics)),
                n=counts.pop() if len(counts) == 1 else None,
            )
        )
    return result


def _suite_detail(suite: _Suite) -> str:
    parts = ["%" if suite.percent else "", "↓ lower is better" if suite.loss else "↑"]
    return " ".join(filter(None, parts)) + " [95 % CI]" + (f", n = {suite.n}" if suite.n else "")


def _gain_detail(suite: _Suite) -> str:
    return ("points" if suite.percent else "difference") + ("; below 0 is better" if suite.loss else "") + " [95 % CI]"


def _row(run: Run, runs: Sequence[Run], suites: Sequence[_Suite]) -> tuple[Cell, ...]:
    arm, identifier = run.record["arm"], run.record["run_id"]
    dense = bool(arm["dense"])
    resolved = arm["resolved_scale"]
    constant = _constant_of(run, runs)
    return (
        Cell(arm["model"]),
        Cell(arm["convention"]),
        Cell("dense" if dense else arm["mask"] or "—", strong=dense),
        Cell(arm["operator"] or "—"),
        Cell(arm["scale"] or "—", f"= {resolved}" if resolved and resolved != arm["scale"] else ""),
        _ratio(run),
        Cell(arm["draw"] or "—"),
        _stored(run, runs),
        *(_value(run, suite) for suite in suites),
        *(_gain(run, constant, suite) for suite in suites),
        _integrity(run),
        Cell(identifier),
    )


def _ratio(run: Run) -> Cell:
    arm, share = run.record["arm"], _share_pruned(run)
    if arm["dense"]:
        return Cell("0", sort=0.0)
    if arm["keep"] is not None:
        return Cell(f"{share:.3g}", f"keep {arm['keep']}", sort=share)
    asked = f"{arm['ratio']:g}" if arm["ratio"] is not None else f"{share:.3g}"
    return Cell(asked, sort=share)


def _stored(run: Run, runs: Sequence[Run]) -> Cell:
    total = run.record["storage"]["total"]
    dense = {r.record["storage"]["total"] for r in runs if r.record["arm"]["dense"] and _weights(r) == _weights(run)}
    share = f"{100 * total / dense.pop():.1f} %" if len(dense) == 1 else "no dense run"
    return Cell(f"{total / 1e6:.2f}", share, sort=total)


def _value(run: Run, suite: _Suite) -> Cell:
    if not suite.has(run):
        return Cell("—", "not run")
    number = run.record["metrics"][suite.name]
    value, low, high = (_show(number[key], suite) for key in ("value", "low", "high"))
    count = "" if suite.n else f", n = {number['n']}"
    return Cell(value, f"[{low}, {high}]{count}", sort=number["value"])


def _show(value: float, suite: _Suite, sign: str = "") -> str:
    if suite.percent:
        return f"{100 * value:{sign}.1f}"
    return f"{value:{sign}.3f}" if abs(value) < 1000 else f"{value:{sign}.4g}"


def _arm_key(run: Run) -> str:
    """What an arm shares with the constant it is measured against: weights, mask (so budget) and calibration draw."""
    mask = run.record["identity"]["mask"] or {}
    return canonical_json([_weights(run), mask.get("digest"), run.record["arm"]["draw"]])


def _budget(run: Run) -> object:
    return run.record["identity"]["budget"]


def _constant_of(run: Run, runs: Sequence[Run]) -> Run | str:
    """The constant arm on the same mask, or why there is none to compare with."""
    if run.record["arm"]["dense"]:
        return "dense"
    if run.record["arm"]["operator"] == "constant":
        return "is the constant"
    found = [r for r in runs if r.record["arm"]["operator"] == "constant" and _arm_key(r) == _arm_key(run)]
    # A mask given as a file carries no budget of its own; among several constants the one asked for alike is meant.
    found = [r for r in found if _budget(r) == _budget(run)] or found
    if len(found) == 1:
        return found[0]
    return "several constant arms" if found else "no constant arm"


def _gain(run: Run, constant: Run | str, suite: _Suite) -> Cell:
    if isinstance(constant, str):
        return Cell("—", constant)
    if not (suite.has(run) and suite.has(constant)):
        return Cell("—", "not run")
    try:
        contrast: Contrast = compare(run, constant, suites=[suite.name]).of_suite(suite.name)
    except PruneBenchError as error:
        return Cell("—", error.what)
    d = contrast.difference
    value, low, high = (_show(x, suite, "+z") for x in (d.value, d.low, d.high))
    return Cell(value, f"[{low}, {high}]", sort=d.value, strong=d.low > 0 or d.high < 0)


def _integrity(run: Run) -> Cell:
    checks = [entry for entry in run.record["integrity"] if entry["status"] != "not applicable"]
    failed = [str(entry["check"]) for entry in checks if entry["status"] == "fail"]
    if not checks:
        return Cell("—", "no check applied")
    share = 1 - len(failed) / len(checks)
    if failed:
        return Cell(f"✗ {len(checks) - len(failed)}/{len(checks)}", ", ".join(failed), sort=share, strong=True)
    return Cell(f"✓ {len(checks)}/{len(checks)}", sort=share)
