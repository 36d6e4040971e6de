"""The board as JSON: one line per run, numbers to six digits, the same bytes from the same records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prunebench.board.declared import Declared
from prunebench.board.scoring import Difference, Numbers, ScalePair
from prunebench.board.table import Row, Table
from prunebench.mask import canonical_json
from prunebench.record import LeftOut

__all__ = ["SCHEMA", "to_json_lines"]

SCHEMA = 1
_DIGITS = 6


def to_json_lines(
    track: str, table: Table, scales: Sequence[ScalePair], declared: Declared | None, left_out: Sequence[LeftOut]
) -> str:
    """One JSON document, a run per line."""
    suites = [
        {"name": s.name, "label": s.label, "percent": s.percent, "lower_is_better": s.loss, "content": s.content}
        for s in table.suites
    ]
    parts: dict[str, list[Any]] = {
        "rows": [_row(row) for row in table.rows],
        "scales": [_pair(pair) for pair in scales],
        "declared": [] if declared is None else [_answer(one.to_json()) for one in declared.answers],
        "gaps": []
        if declared is None
        else [[gap.question.family, gap.question.label, gap.reason] for gap in declared.gaps],
        "left_out": [str(one) for one in left_out],
    }
    head = {"schema": SCHEMA, "track": track, "suites": suites}
    lines = [f"{canonical_json(key)}:{canonical_json(value)}" for key, value in head.items()]
    for key, values in parts.items():
        body = ",\n".join(canonical_json(_rounded(value)) for value in values)
        lines.append(f"{canonical_json(key)}:[\n{body}\n]" if values else f"{canonical_json(key)}:[]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _row(row: Row) -> dict[str, Any]:
    record = row.entry.record
    arm, identity = record["arm"], record["identity"]
    names = {key: arm[key] for key in ("model", "convention", "mask", "operator", "scale", "resolved_scale", "ratio")}
    return {
        "run": row.entry.id,
        "folder": row.entry.folder,
        **{key: value for key, value in names.items() if value is not None},
        "files": {key: identity[key]["name"] for key in ("method", "operator") if identity[key]},
        "shown": {key: row.cells[key].visible for key in ("method", "operator", "calibration", "fit")},
        "stored": record["storage"]["total"],
        "suites": {suite: _numbers(numbers) for suite, numbers in sorted(row.numbers.items())},
        "reported": [one.text or None for one in row.reported],
        "integrity": {
            status: sum(entry["status"] == status for entry in record["integrity"]) for status in ("pass", "fail")
        },
    }


def _numbers(numbers: Numbers) -> dict[str, Any]:
    share = numbers.recovered
    known = None if share is None or share.value is None else [share.value, share.low, share.high]
    return {
        "value": [numbers.value, numbers.low, numbers.high, numbers.n],
        "dense": _difference(numbers.dense),
        "constant": _difference(numbers.constant),
        **({"group": numbers.group} if numbers.group else {}),
        **({"recovered": known} if known else {}),
    }


def _difference(difference: Difference | str) -> list[Any] | str:
    if isinstance(difference, str):
        return difference
    numbers: list[Any] = [difference.value, difference.low, difference.high, difference.p]
    return [*numbers, difference.mark] if difference.mark else numbers


def _pair(pair: ScalePair) -> dict[str, Any]:
    differences = {suite: _difference(one) for suite, one in pair.differences.items()}
    return {"trained": pair.trained.folder, "other": pair.other.folder, "differences": differences}


def _answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("family", "label", "suite", "difference", "p", "holm_family", "holm_all", "verdict", "mark", "established")
    return {key: answer[key] for key in kept}


def _rounded(value: Any) -> Any:
    """Numbers to six digits: what differs behind them may be another machine's rounding."""
    if isinstance(value, float):
        short = float(f"{value:.{_DIGITS}g}")
        return 0.0 if short == 0 or abs(short) < 1e-12 else short
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value
