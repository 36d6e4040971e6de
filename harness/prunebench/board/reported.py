"""Scores that papers print, as data with their source: shown as reported, never mixed with what was run.

[[score]]
model = "OLMoE-1B-7B-0125"
arm = "MoNE mask, constant, 50 %"
metric = "nine-task accuracy, %"
value = 53.61
source = "arXiv 2610.41366, Table 4"
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import tabulate

from prunebench.analysis import PERCENT
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.record import Run

__all__ = ["Held", "HeldAgainst", "ReportedScore", "held_against", "read_reported"]


@dataclass(frozen=True)
class ReportedScore:
    """A printed number.

    Args:
        model: as this project calls it.
        arm: what was done, in words.
        metric: what the number is, with its unit.
        value: as printed.
        source: paper and table or section.
        low: of the printed interval, if any.
        high: see `low`.
        run: the folder of the track's arm that is the same, if there is one.
        suite: whose number it is there.
    """

    model: str
    arm: str
    metric: str
    value: float
    source: str
    low: float | None = None
    high: float | None = None
    run: str = ""
    suite: str = ""


def read_reported(path: Path) -> list[ReportedScore]:
    """Read a file of printed scores.

    Raises:
        UsageError: for a file that cannot be read, or an entry that lacks something or has too much.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError("cannot read the reported scores", where=str(path), fix=str(error)) from error
    known = {field.name: field.type for field in fields(ReportedScore)}
    found = []
    for number, entry in enumerate(data.get("score", []), 1):
        where = f"{path.name}, score {number}"
        if unknown := sorted(set(entry) - set(known)):
            raise UsageError(f"unknown field {unknown[0]!r}", where=where, expected=", ".join(known))
        if missing := [name for name in ("model", "arm", "metric", "value", "source") if name not in entry]:
            raise UsageError(f"no {missing[0]}", where=where, expected="model, arm, metric, value and source")
        for name, value in entry.items():
            number_like = name in ("value", "low", "high")
            fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not (fine if number_like else isinstance(value, str)):
                raise UsageError(f"{name} is {value!r}", where=where, expected="a number" if number_like else "text")
        found.append(ReportedScore(**entry))
    if not found:
        raise UsageError("no score is reported", where=path.name, expected="[[score]] tables")
    return found


@dataclass(frozen=True)
class Held:
    """A printed number beside ours, in the printed unit; `inside` if it is in our 95 % interval."""

    metric: str
    printed: float
    value: float
    low: float
    high: float
    source: str

    @property
    def inside(self) -> bool:
        """Whether the printed number is one that our test items allow."""
        return self.low <= self.printed <= self.high


@dataclass(frozen=True)
class HeldAgainst:
    """All that is printed of one run."""

    run: str
    numbers: tuple[Held, ...]

    @property
    def agrees(self) -> bool:
        """Whether every printed number is inside."""
        return all(one.inside for one in self.numbers)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "run": self.run,
            "agrees": self.agrees,
            "numbers": [{**asdict(n), "inside": n.inside} for n in self.numbers],
        }

    def to_text(self) -> str:
        """For people."""
        head = ["metric", "printed", "here", "95 % CI", "", "source"]
        rows = [
            [
                n.metric,
                n.printed,
                f"{n.value:.2f}",
                f"[{n.low:.2f}, {n.high:.2f}]",
                "inside" if n.inside else "OUTSIDE",
                n.source,
            ]
            for n in self.numbers
        ]
        return tabulate.tabulate(rows, head, tablefmt="plain", disable_numparse=True)


def held_against(run: Run, reported: Sequence[ReportedScore]) -> HeldAgainst:
    """A run's numbers beside what papers print of the same arm.

    Raises:
        PrerequisiteError: if nothing is printed of it.
    """
    name = f"{run.record['arm']['model']}/{run.path.name}"
    found = []
    for one in reported:
        if one.run == name and one.suite in run.record["metrics"]:
            numbers = run.record["metrics"][one.suite]
            last = one.suite.rpartition("/")[2]
            metrics = {last} if "/" in one.suite else {cell[2] for cell in run.record["headline"][one.suite]}
            scale = 100.0 if metrics <= PERCENT else 1.0
            value, low, high = (scale * numbers[key] for key in ("value", "low", "high"))
            found.append(Held(one.metric, one.value, value, low, high, one.source))
    if not found:
        raise PrerequisiteError(
            "no paper's number is stated for this run",
            where=name,
            expected='a [[score]] with run = "MODEL/FOLDER" and suite',
        )
    return HeldAgainst(name, tuple(found))
