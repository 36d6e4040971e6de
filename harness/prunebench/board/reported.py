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
from dataclasses import dataclass, fields
from pathlib import Path

from prunebench.errors import UsageError

__all__ = ["ReportedScore", "read_reported"]


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
