"""Runs that are taken back: `retractions.toml` beside the run folders, which stay where they are.

[[retraction]]
run = "8519f5be529f4271"          # its run_id
date = 2026-12-01
reason = "calibrated on a text that held test items"
"""

from __future__ import annotations

import datetime as dt
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prunebench.errors import UsageError

__all__ = ["RETRACTIONS", "Retraction", "read_retractions"]

RETRACTIONS: Final = "retractions.toml"
_FIELDS: Final[Mapping[str, type]] = {"run": str, "date": dt.date, "reason": str}


@dataclass(frozen=True)
class Retraction:
    """A run that counts no more, since when, and why."""

    run: str
    date: dt.date
    reason: str

    def __str__(self) -> str:
        return f"retracted {self.date.isoformat()}: {self.reason}"


def read_retractions(records: Path) -> dict[str, Retraction]:
    """The retractions of a records folder by run id; none where there is no file.

    Raises:
        UsageError: for an entry without run, date and reason, and for a run that is named twice.
    """
    path = records / RETRACTIONS
    if not path.is_file():
        return {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError("cannot read the retractions", where=str(path), fix=str(error)) from error
    if set(data) != {"retraction"} or not isinstance(data["retraction"], list):
        raise UsageError("not a list of retractions", where=RETRACTIONS, expected="[[retraction]] tables only")
    found: dict[str, Retraction] = {}
    for entry in data["retraction"]:
        fine = isinstance(entry, dict) and set(entry) == set(_FIELDS)
        fine = fine and all(isinstance(entry[name], kind) for name, kind in _FIELDS.items())
        fine = fine and re.fullmatch("[0-9a-f]{16}", entry["run"]) is not None and bool(entry["reason"].strip())
        if not fine:
            raise UsageError(f"retraction {entry!r}", where=RETRACTIONS, expected="run (its id), date and a reason")
        if entry["run"] in found:
            raise UsageError(f"run {entry['run']} is retracted twice", where=RETRACTIONS, expected="one reason")
        found[entry["run"]] = Retraction(**entry)
    return found
