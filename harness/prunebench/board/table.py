"""Runs → the board's columns and cells. What a cell says is decided here; how it looks, in `render`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prunebench.analysis import PERCENT, Contrast, compare, headline_cells, lower_is_better, rerouting_summary
from prunebench.board.naming import IDENTIFYING, Cell, Column, identifying_cells
from prunebench.errors import PruneBenchError
from prunebench.mask import canonical_json
from prunebench.record import Run

__all__ = ["Cell", "Column", "Table", "build_table"]


_CHOOSES: Final = ("budget", "method", "seed")
_PARTS: Final = ("mask", "fit")


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
    """All runs, the dense one first within its model, then by method, budget, calibration, operator and scale."""
    ordered = sorted(runs, key=_order)
    suites = _suites(ordered)
    constants = _constants(ordered)
    columns = [
        *IDENTIFYING,
        Column("stored", "stored MB", "% of dense", numeric=True),
        Column("rerouted", "calls rerouted", "%", numeric=True),
        *(Column(s.label, s.label, _suite_detail(s), numeric=True) for s in suites),
        *(Column(f"{s.label}-gain", f"{s.label} − constant", _gain_detail(s), numeric=True) for s in suites),
        Column("integrity", "integrity", "checks passed", numeric=True),
        Column("run", "run"),
    ]
    rows = (
        (
            *names,
            _stored(run, ordered),
            _rerouted(run),
            *(_value(run, suite) for suite in suites),
            *(_gain(run, _constant_of(run, suite, constants), suite) for suite in suites),
            _integrity(run),
            Cell(run.record["run_id"]),
        )
        for run, names in zip(ordered, identifying_cells(ordered), strict=True)
    )
    return Table(tuple(columns), tuple(rows))


def _order(run: Run) -> tuple[Any, ...]:
    arm, identity = run.record["arm"], run.record["identity"]
    execution = tuple(str(identity[field]) for field in ("dtype", "device", "experts_implementation"))
    parameters = canonical_json((identity["method"] or {}).get("parameters"))
    chosen = (arm["mask"] or "", parameters, str(identity["seed"]), arm["ratio"] or 0.0)
    chosen_on, fitted_on = (_text_and_draw(run.calibration(part)) for part in _PARTS)
    answered = (arm["operator"] or "", arm["scale"] or "")
    place = (not arm["dense"], *chosen, *chosen_on, *answered, *fitted_on, run.record["run_id"])
    return (arm["model"], _weights(run), *execution, *place)


def _text_and_draw(calibration: Mapping[str, Any] | None) -> tuple[str, str]:
    return str((calibration or {}).get("text")), str((calibration or {}).get("draw"))


def _weights(run: Run) -> str:
    return str(run.record["identity"]["model"]["weights_sha256"])


def _content(run: Run, suite: str) -> str:
    return canonical_json(run.record["identity"]["suites"].get(suite))


def _version(run: Run, suite: str) -> tuple[int, str]:
    stated = run.record["identity"]["suites"].get(suite) or {}
    return int(stated.get("version", 0)), str(stated.get("content", ""))


def _short(version: tuple[int, str]) -> tuple[int, str]:
    return version[0], version[1][:6]


def _suites(runs: Sequence[Run]) -> list[_Suite]:
    seen = {(suite, _content(run, suite)): run for run in reversed(runs) for suite in run.record["headline"]}
    names = [suite for suite, _ in seen]
    shorts = [(suite, *_short(_version(run, suite))) for (suite, _), run in seen.items()]
    result = []
    for (suite, content), run in sorted(seen.items(), key=lambda entry: (entry[0][0], _version(entry[1], entry[0][0]))):
        version, digest = _version(run, suite)
        short = _short((version, digest))
        shown = short if shorts.count((suite, *short)) == 1 else (version, digest)
        several = f" v{shown[0]} {shown[1]}" if names.count(suite) > 1 else ""
        metrics = {cell[2] for cell in headline_cells(run.record["headline"], suite)}
        counts = {r.record["metrics"][suite]["n"] for r in runs if suite in r.record["headline"]}
        result.append(
            _Suite(
                suite,
                content,
                suite + several,
                percent=metrics <= PERCENT,
                loss=all(map(lower_is_better, metrics)),
                n=counts.pop() if len(counts) == 1 else None,
            )
        )
    return result


def _suite_detail(suite: _Suite) -> str:
    parts = ["%" if suite.percent else "", "↓ lower is better" if suite.loss else "↑"]
    return " ".join(filter(None, parts)) + " [95 % CI]" + (f", n = {suite.n}" if suite.n else "")


def _gain_detail(suite: _Suite) -> str:
    unit = "points" if suite.percent else "difference"
    return unit + ("; below 0 is better" if suite.loss else "") + " [95 % CI], exploratory"


def _stored(run: Run, runs: Sequence[Run]) -> Cell:
    total = run.record["storage"]["total"]
    dense = {r.record["storage"]["total"] for r in runs if r.record["arm"]["dense"] and _weights(r) == _weights(run)}
    share = f"{100 * total / dense.pop():.1f} %" if len(dense) == 1 else "no dense run"
    return Cell(f"{total / 1e6:.2f}", share, sort=total)


def _rerouted(run: Run) -> Cell:
    """How often rerouting moved a slot, and how far apart the two gate scales then are (2610.41366 §5.3)."""
    summary = rerouting_summary(run.record["routing"])
    if summary is None or run.record["arm"]["dense"]:
        return Cell("—")
    detail = f"keep ÷ renorm {summary.keep_over_renorm:.2f}, above 1 on {100 * summary.above_one_share:.1f} %"
    return Cell(f"{100 * summary.displaced_share:.1f}", detail, sort=summary.displaced_share)


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


def _arm_key(run: Run, suite: str) -> str:
    """All that a constant arm shares with an arm that differs from it in the operator alone, as far as a suite goes.

    Left out of the identity are the operator; what chose the mask (method, budget, seed, calibration), as the digest
    says which experts are gone; the fit's calibration, which `_fitted_alike` judges; what the weights are called; and
    the other suites, which do not touch this one's items.
    """
    identity = run.record["identity"]
    shared = {key: value for key, value in identity.items() if key not in {"operator", "calibration", *_CHOOSES}}
    shared["model"] = {key: value for key, value in identity["model"].items() if key != "name"}
    shared["mask"] = (identity["mask"] or {}).get("digest")
    shared["suites"] = identity["suites"].get(suite)
    return canonical_json([suite, shared])


def _constants(runs: Sequence[Run]) -> Mapping[str, list[Run]]:
    """The constant arms by their key, under each suite they ran."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.record["arm"]["operator"] == "constant":
            for suite in run.record["headline"]:
                found.setdefault(_arm_key(run, suite), []).append(run)
    return found


def _constant_of(run: Run, suite: _Suite, constants: Mapping[str, list[Run]]) -> Run | str:
    """The arm that differs in nothing but its constant operator, or why there is none to compare with."""
    if run.record["arm"]["dense"]:
        return "dense"
    if run.record["arm"]["operator"] == "constant":
        return "is the constant"
    if not suite.has(run):
        return "not run"
    found = [other for other in constants.get(_arm_key(run, suite.name), []) if _fitted_alike(run, other)]
    # A given mask carries no budget or method of its own; among several constants, the one asked for alike is meant.
    found = [other for other in found if other.calibration("mask") == run.calibration("mask")] or found
    for field in (*_CHOOSES, "suites"):
        wanted = run.record["identity"][field]
        found = [other for other in found if other.record["identity"][field] == wanted] or found
    # A criterion of its own operator may be constant too (such as mone); the house's own file is the reference.
    found = [other for other in found if other.record["identity"]["operator"]["name"] == "constant"] or found
    if len(found) == 1:
        return found[0]
    return "several constant arms" if found else "no constant arm"


def _fitted_alike(run: Run, constant: Run) -> bool:
    """Whether a constant was fitted on what the arm was fitted on, or else on what the mask was chosen on."""
    wanted = run.calibration("fit") or run.calibration("mask") or constant.calibration("mask")
    return wanted is None or constant.calibration("fit") == wanted


def _gain(run: Run, constant: Run | str, suite: _Suite) -> Cell:
    if isinstance(constant, str):
        return Cell("—", constant)
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
