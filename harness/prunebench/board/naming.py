"""What tells one run from another on the board: the cells of its identifying columns.

Two runs of different identity never read the same. What usually tells them apart has its place (parameters, seed,
dtype, calibration); where rows would still be alike, the identity fields in which they differ are named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from prunebench.board.entries import Entry
from prunebench.mask import canonical_json

__all__ = ["IDENTIFYING", "Cell", "Column", "identifying_cells"]


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

    @property
    def visible(self) -> str:
        """What a reader sees: runs of spaces are one."""
        return " ".join(f"{self.text} {self.detail}".split())

    def with_detail(self, more: str) -> Cell:
        """The cell with more in its second part."""
        return replace(self, detail=", ".join(filter(None, (self.detail, more))))


IDENTIFYING: Final = (
    Column("model", "model"),
    Column("method", "method (mask)"),
    Column("operator", "operator"),
    Column("scale", "scale"),
    Column("convention", "convention"),
    Column("ratio", "ratio pruned", numeric=True),
    Column("calibration", "mask chosen on"),
    Column("fit", "operator fitted on"),
)
_USUAL: Final = {"dtype": "float32", "device": "cpu", "experts_implementation": "eager"}
_PLACE: Final = {
    "mask": "method",
    "seed": "method",
    "budget": "ratio",
    "quantize": "method",
    "operator_layers": "operator",
    "calibration.fit": "fit",
}
_SHORT: Final = 8  # characters of a digest that are shown


def identifying_cells(runs: Sequence[Entry]) -> list[tuple[Cell, ...]]:
    """One tuple of cells per run, in the order of `IDENTIFYING`; different for any two different run ids."""
    shown = {field: _values(runs, field) for field in _USUAL}
    execution = [field for field, usual in _USUAL.items() if shown[field] != {usual}]
    stated = [one for run in runs for one in (run.calibration("mask"), run.calibration("fit")) if one is not None]
    several_sizes = len({_size(one) for one in stated}) > 1
    rows = [_cells(run, execution, several_sizes=several_sizes) for run in runs]
    for differences in (_named_differences, _run_ids):
        alike: dict[tuple[str, ...], list[int]] = {}
        for number, row in enumerate(rows):
            alike.setdefault(tuple(cell.visible for cell in row.values()), []).append(number)
        for numbers in alike.values():
            if len({runs[number].record["run_id"] for number in numbers}) > 1:
                for number, more in zip(numbers, differences([runs[n] for n in numbers]), strict=True):
                    rows[number] |= {key: rows[number][key].with_detail(text) for key, text in more.items()}
    return [tuple(row.values()) for row in rows]


def _values(runs: Sequence[Entry], field: str) -> set[str]:
    return {str(run.record["identity"][field]) for run in runs}


def _size(calibration: Mapping[str, Any]) -> tuple[str, str]:
    return str(calibration.get("blocks")), str(calibration.get("length"))


def _cells(run: Entry, execution: Sequence[str], *, several_sizes: bool) -> dict[str, Cell]:
    arm, identity = run.record["arm"], run.record["identity"]
    dense = bool(arm["dense"])
    resolved = arm["resolved_scale"]
    return {
        "model": Cell(arm["model"], ", ".join(str(identity[field]) for field in execution)),
        "method": Cell("dense" if dense else arm["mask"] or "—", _method_detail(identity), strong=dense),
        "operator": Cell(arm["operator"] or "—", _operator_detail(run)),
        "scale": Cell(arm["scale"] or "—", f"= {resolved}" if resolved and resolved != arm["scale"] else ""),
        "convention": Cell(arm["convention"]),
        "ratio": _ratio(run),
        "calibration": _calibration(run.calibration("mask"), with_size=several_sizes),
        "fit": _calibration(run.calibration("fit"), with_size=several_sizes),
    }


def _method_detail(identity: Mapping[str, Any]) -> str:
    """How the mask was chosen; the parameters of a method that goes with a given mask had no part in that."""
    given = (identity["mask"] or {}).get("source") == "file"
    quantized = [f"quantized {identity['quantize']['name']}"] if "quantize" in identity else []
    seed = [f"seed={identity['seed']}"] if identity["seed"] != 0 else []
    return ", ".join(["given mask"] * given + ([] if given else _parameters(identity["method"])) + seed + quantized)


def _operator_detail(run: Entry) -> str:
    """The file that gives the operator, where the board's word for it is another, and its parameters but the scale."""
    identity = run.record["identity"]
    operator, method = identity["operator"] or {}, identity["method"] or {}
    name = operator.get("name")
    named = [str(name)] if name not in (None, run.record["arm"]["operator"]) else []
    own = [] if name == method.get("name") and _parameters(operator) == _parameters(method) else _parameters(operator)
    layers = (identity.get("operator_layers") or {}).get("only")
    only = [f"only in layers {', '.join(map(str, layers))}"] if layers else []
    return ", ".join(named + [text for text in own if not text.startswith("scale=")] + only)


def _parameters(part: Mapping[str, Any] | None) -> list[str]:
    given = (part or {}).get("parameters") or {}
    return [f"{name}={_text(value)}" for name, value in sorted(given.items()) if value not in (None, "", [], {})]


def _text(value: object) -> str:
    return value if isinstance(value, str) else canonical_json(value)


def _ratio(run: Entry) -> Cell:
    arm = run.record["arm"]
    if arm["dense"]:
        return Cell("0", sort=0.0)
    return Cell(f"{arm['ratio']:.4g}", f"keep {arm['keep']}" if arm["keep"] is not None else "", sort=arm["ratio"])


def _calibration(calibration: Mapping[str, Any] | None, *, with_size: bool) -> Cell:
    if calibration is None:
        return Cell("—")
    blocks, length = _size(calibration)
    words = (calibration.get("text"), calibration.get("draw"))
    return Cell(" ".join(str(word) for word in words if word), f"{blocks} × {length} tokens" if with_size else "")


def _named_differences(runs: Sequence[Entry]) -> list[dict[str, str]]:
    """Per run, by column: the identity fields in which these runs differ, with this run's values."""
    leaves = [dict(_leaves(run.record["identity"])) for run in runs]
    result: list[dict[str, list[str]]] = [{} for _ in runs]
    for path in sorted(set(itertools.chain.from_iterable(leaves))):
        values = [_text(own[path]) if path in own else "none" for own in leaves]
        if len(set(values)) == 1:
            continue
        short = [value if len(value) <= 2 * _SHORT else value[:_SHORT] for value in values]
        distinct = len(set(short)) == len(set(values))
        for texts, value in zip(result, short if distinct else values, strict=True):
            texts.setdefault(_column_of(path), []).append(f"{'.'.join(path)} {value}")
    return [{column: ", ".join(texts) for column, texts in own.items()} for own in result]


def _column_of(path: tuple[str, ...]) -> str:
    """Where a difference in an identity field is named: beside what it is about, else beside the model."""
    column = _PLACE.get(".".join(path[:2])) or _PLACE.get(path[0], path[0])
    return column if column in {known.key for known in IDENTIFYING} else "model"


def _leaves(value: object, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], object]]:
    """Every value of nested objects with its path; an empty object is a value."""
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(below, (*path, str(key)))
    else:
        yield path, value


def _run_ids(runs: Sequence[Entry]) -> list[dict[str, str]]:
    """The last resort, for values that differ but read alike (such as the number 1 and the text "1")."""
    return [{"model": f"run {run.record['run_id']}"} for run in runs]
