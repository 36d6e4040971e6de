"""What changed from one board to the next, from their JSON: runs that came and went, and numbers that moved.

A number that moved further than its interval reached is flagged: the same identity gave another outcome than its test
items can explain, so something changed that the identity does not name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prunebench.board.markdown import escaped
from prunebench.errors import PrerequisiteError

__all__ = ["Changes", "Moved", "changes", "last_board"]

_ROUNDING = 2e-6  # numbers of a board's JSON have six digits


@dataclass(frozen=True)
class Moved:
    """A suite's number of one folder, before and after; `beyond` if it left its former interval."""

    folder: str
    suite: str
    before: float
    low: float
    high: float
    after: float

    @property
    def beyond(self) -> bool:
        """Whether the new number is outside the old interval."""
        return not self.low <= self.after <= self.high


@dataclass(frozen=True)
class Changes:
    """Folders that came and went, folders that hold another run, and numbers that moved."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    other_run: tuple[str, ...]
    moved: tuple[Moved, ...]
    first: bool = False

    @property
    def beyond(self) -> tuple[Moved, ...]:
        """The numbers that moved further than their interval."""
        return tuple(one for one in self.moved if one.beyond)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**asdict(self), "moved": [{**asdict(one), "beyond": one.beyond} for one in self.moved]}

    def markdown(self) -> str:
        """For people."""
        if self.first:
            return f"# Changes\n\nThe first board: {len(self.added)} runs.\n"
        parts = ["# Changes", ""]
        for title, folders in (("New", self.added), ("Gone", self.removed), ("Another run", self.other_run)):
            parts += (
                [f"## {title} ({len(folders)})", "", *(f"- {escaped(one)}" for one in folders), ""] if folders else []
            )
        if self.moved:
            parts += [f"## Numbers that moved ({len(self.moved)}, {len(self.beyond)} beyond their interval)", ""]
            for one in sorted(self.moved, key=lambda one: (not one.beyond, one.folder, one.suite)):
                mark = "**beyond its interval** " if one.beyond else ""
                interval = f"[{one.low:.4g}, {one.high:.4g}]"
                parts.append(
                    f"- {mark}{escaped(f'{one.folder}, {one.suite}')}: {one.before:.4g} {interval} → {one.after:.4g}"
                )
            parts.append("")
        return "\n".join(parts if len(parts) > 2 else [*parts, "Nothing changed.", ""])


def last_board(path: Path) -> Mapping[str, Any] | None:
    """The JSON of an earlier board; None where there is none yet.

    Raises:
        PrerequisiteError: if it is damaged.
    """
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows: Sequence[Mapping[str, Any]] = data["rows"]
        [(row["folder"], row["run"], row["suites"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrerequisiteError(
            "cannot read the last board", where=str(path), fix=f"remove it, and all is new ({error})"
        ) from error
    return dict(data)


def changes(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> Changes:
    """What changed, folder by folder."""
    old = {} if before is None else {row["folder"]: row for row in before["rows"]}
    new = {row["folder"]: row for row in after["rows"]}
    both = sorted(old.keys() & new.keys())
    moved = []
    for folder in both:
        for suite, numbers in new[folder]["suites"].items():
            was = old[folder]["suites"].get(suite)
            if was is None:
                continue
            value, low, high = was["value"][:3]
            now = numbers["value"][0]
            if abs(now - value) > _ROUNDING * max(1.0, abs(value)):
                moved.append(Moved(folder, suite, value, low, high, now))
    return Changes(
        tuple(sorted(new.keys() - old.keys())),
        tuple(sorted(old.keys() - new.keys())),
        tuple(folder for folder in both if old[folder]["run"] != new[folder]["run"]),
        tuple(moved),
        first=before is None,
    )
