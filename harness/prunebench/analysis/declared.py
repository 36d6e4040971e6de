"""Families of contrasts, declared in a TOML file before they are looked at.

    name = "demo"
    date = 2026-11-30
    note = "declared before the tilt was run"

    [[family]]
    name = "gate scale"
    suite = "multiple_choice"
    each = { model = ["tiny-olmoe", "tiny-granite"], ratio = ["0.25", "0.5"] }   # every combination
    label = "{model} {ratio}: trained - other"
    arm = { model = "{model}", mask = "mone", ratio = "{ratio}", draw = "A" }      # what all arms of it share
    a = { operator = "reroute@trained" }
    b = { operator = "reroute@other" }

A field of an arm may be a list: the contrast is then of the mean over masks, draws, or whatever is listed. `less`
(a table with `a` and `b`) makes it an interaction: (a − b) − (less.a − less.b). `replicates` lists what changes from
one calibration draw to another, as tables with `a` and `b`; an effect is established if its sign never changes. An arm
may also be `{ run = "FOLDER" }`. Blocks of one name are one family. `tasks` narrows a suite to some of its tasks.
`exploratory = true` shows a family without correcting for it: what was not declared before it was seen is exploratory.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prunebench.analysis.arms import Selector
from prunebench.errors import UsageError

__all__ = ["Declaration", "Question", "Sum", "read_declaration"]

_TOP: Final = {"name": str, "date": dt.date, "note": str, "family": list}
_FAMILY: Final = {
    "name": str,
    "suite": str,
    "tasks": list,
    "each": dict,
    "label": str,
    "arm": dict,
    "a": (dict, str),
    "b": (dict, str),
    "less": dict,
    "replicates": list,
    "exploratory": bool,
}
_NEEDED: Final = ("name", "suite", "label", "a", "b")


Sum = tuple[tuple[float, Selector], ...]
"""A weighted sum of arms."""


@dataclass(frozen=True)
class Question:
    """A contrast: a weighted sum of arms on a suite.

    Args:
        label: what it is called.
        suite: whose headline it is about.
        terms: the weights are +1 and −1 for a plain difference.
        family: what it is shown, and unless it is exploratory, corrected together with.
        tasks: only these of the suite; empty for all.
        replicates: the same on other calibration draws.
        exploratory: whether it was not declared before it was seen; then nothing is corrected for it.
    """

    label: str
    suite: str
    terms: Sum
    family: str
    tasks: tuple[str, ...] = ()
    replicates: tuple[Sum, ...] = ()
    exploratory: bool = False


@dataclass(frozen=True)
class Declaration:
    """What a file declares: its name, date, note and content hash, and the contrasts."""

    name: str
    date: dt.date
    note: str
    sha256: str
    questions: tuple[Question, ...]

    def to_json(self) -> dict[str, str]:
        """All but the contrasts."""
        return {"name": self.name, "date": self.date.isoformat(), "sha256": self.sha256, "note": self.note}


def read_declaration(path: Path) -> Declaration:
    """Read a file of families.

    Raises:
        UsageError: for a file that cannot be read, lacks something, or declares a contrast twice.
    """
    try:
        content = path.read_bytes()
        data = tomllib.loads(content.decode())
    except (OSError, ValueError) as error:
        raise UsageError("cannot read the families", where=str(path), expected="a TOML file", fix=str(error)) from error
    where = path.name
    _check(data, _TOP, ("name", "date", "family"), where)
    questions = tuple(q for family in data["family"] for q in _questions(family, where))
    names = [(q.family, q.label) for q in questions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"contrast {twice[0][1]!r} is declared twice", where=where, expected="every label once")
    mixed = {q.family for q in questions if q.exploratory} & {q.family for q in questions if not q.exploratory}
    if mixed:
        raise UsageError(f"family {min(mixed)!r} is exploratory in part", where=where, expected="two families")
    if not questions:
        raise UsageError("no contrast is declared", where=where, expected="a [[family]] with contrasts")
    digest = hashlib.sha256(content).hexdigest()
    return Declaration(data["name"], data["date"], str(data.get("note", "")), digest, questions)


def _check(data: object, known: Mapping[str, Any], needed: Sequence[str], where: str) -> None:
    if not isinstance(data, dict):
        raise UsageError(f"{data!r} is no table", where=where, expected="a table")
    for key, value in data.items():
        if key not in known:
            raise UsageError(f"unknown field {key!r}", where=where, expected=", ".join(known))
        if not isinstance(value, known[key]):
            raise UsageError(f"{key} is {value!r}", where=where, expected=f"another type than {type(value).__name__}")
    for key in needed:
        if key not in data:
            raise UsageError(f"no {key}", where=where, expected=", ".join(needed))


def _questions(family: Mapping[str, Any], where: str) -> Iterator[Question]:
    _check(family, _FAMILY, _NEEDED, f"{where}, a family")
    here = f"{where}, family {family['name']}"
    each = family.get("each", {})
    for name, values in each.items():
        if not (isinstance(values, list) and values and all(isinstance(value, str) for value in values)):
            raise UsageError(f"each.{name} is {values!r}", where=here, expected="a list of texts")
    for combination in itertools.product(*each.values()):
        filled = _filled(dict(family), dict(zip(each, combination, strict=True)), here)
        yield Question(
            label=filled["label"],
            suite=filled["suite"],
            terms=_terms(filled, {}, here),
            family=filled["name"],
            tasks=tuple(filled.get("tasks", ())),
            replicates=tuple(_terms(filled, change, here) for change in filled.get("replicates", ())),
            exploratory=filled.get("exploratory", False),
        )


def _filled(value: Any, names: Mapping[str, str], where: str) -> Any:
    """A declaration with its {names} filled in, all the way down."""
    if isinstance(value, str):
        try:
            return value.format(**names)
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(
                f"{value!r} names {error}", where=where, expected=f"names of each: {list(names)}"
            ) from error
    if isinstance(value, list):
        return [_filled(one, names, where) for one in value]
    if isinstance(value, dict):
        return {key: one if key == "each" else _filled(one, names, where) for key, one in value.items()}
    return value


def _terms(family: Mapping[str, Any], change: Mapping[str, Any], where: str) -> Sum:
    _check(change, {"a": dict, "b": dict}, (), f"{where}, replicates")
    terms = _difference(family, family, change, 1.0, where)
    if "less" in family:
        _check(family["less"], {"a": (dict, str), "b": (dict, str)}, ("a", "b"), f"{where}, less")
        terms += _difference(family["less"], family, change, -1.0, where)
    return tuple(terms)


def _difference(
    sides: Mapping[str, Any], family: Mapping[str, Any], change: Mapping[str, Any], sign: float, where: str
) -> list[tuple[float, Selector]]:
    terms = []
    for side, weight in (("a", sign), ("b", -sign)):
        stated = sides[side]
        if isinstance(stated, str):
            arms: list[Any] = [stated]
        else:
            arms = list(_product({**family.get("arm", {}), **stated, **change.get(side, {})}))
        terms += [(weight / len(arms), Selector.of(arm, f"{where}, {side}")) for arm in arms]
    return terms


def _product(arm: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An arm for every combination of its fields that are lists."""
    listed = {name: value for name, value in arm.items() if isinstance(value, list)}
    for combination in itertools.product(*listed.values()):
        yield {**arm, **dict(zip(listed, combination, strict=True))}
