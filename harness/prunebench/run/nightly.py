"""A track's night: run what is missing, hold all records against their evidence, make the board, say what changed.

Every step can be killed or run out of disk, and the next night goes on from there: finished runs stay, files are
replaced whole, and the board's JSON, which the next night compares with, is written last. Nothing hangs on the clock
but the check of dates; a clock that was wrong is reported and stops no board.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunebench.board import Board, build_track_board, write_board
from prunebench.board.changes import Changes, changes, last_board
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.loader import content_root, file_digests
from prunebench.mask import write_atomically
from prunebench.packing import pack
from prunebench.run.grid import Announce, GridResult, grid
from prunebench.run.session import Progress
from prunebench.run.stored import documents_of
from prunebench.run.track import Track
from prunebench.validation import Finding, validate_records

__all__ = ["Night", "alone", "nightly"]

LOCK = ".nightly.lock"


@dataclass(frozen=True)
class Night:
    """What a night came to.

    Args:
        grid: arms that were run, were there, and failed.
        findings: what is wrong with records; the board is not made then, but for dates alone.
        changes: since the last board; None without a new board.
        board: rows of the new board; None without one.
    """

    grid: GridResult
    findings: tuple[Finding, ...]
    changes: Changes | None
    board: Board | None

    @property
    def fine(self) -> bool:
        """Whether every arm ran, no record is in doubt, and no number left its interval."""
        return not (self.grid.failed or self.findings or self.changes is None or self.changes.beyond)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "done": list(self.grid.done),
            "reused": list(self.grid.reused),
            "failed": dict(self.grid.failed),
            "findings": [vars(one) for one in self.findings],
            "changes": None if self.changes is None else self.changes.to_json(),
            "rows": None if self.board is None else len(self.board.table.rows),
        }


def nightly(
    track: Track,
    track_file: Path,
    records: Path,
    out: Path,
    *,
    jobs: int = 1,
    announce: Announce | None = None,
    progress: Progress | None = None,
) -> Night:
    """Spend a track's night.

    Args:
        track: its arms.
        track_file: where it was read from; families and reported scores are beside it.
        records: its records folder.
        out: the board's folder; `changes.md` and `changes.json` go there too.
        jobs: worker processes.
        announce: called with one line per arm that ends.
        progress: called with (what, done, total).

    Raises:
        PrerequisiteError: if another night is at work on these records.
        UsageError: if an arm is impossible, or nothing can be written; what is finished stays.
    """
    with alone(records):
        ran = grid(track, records, jobs=jobs, announce=announce, progress=progress)
        pack(records)
        validation = validate_records(
            [records], methods=file_digests("methods"), documents=documents_of(), progress=progress
        )
        if any(one.rule != "date" for one in validation.findings):
            return Night(ran, validation.findings, None, None)
        board = build_track_board(records, track_file)
        found = changes(last_board(out / "board.json"), json.loads(board.json))
        write_atomically(out / "changes.md", found.markdown().encode(errors="replace"))
        write_atomically(out / "changes.json", (json.dumps(found.to_json(), indent=1) + "\n").encode())
        write_board(board, out, cards=content_root() / "docs" / "methods")
        return Night(ran, validation.findings, found, board)


@contextlib.contextmanager
def alone(records: Path) -> Iterator[None]:
    """Hold the records' lock, which goes with this process however it ends.

    Raises:
        PrerequisiteError: if another process holds it.
    """
    try:
        records.mkdir(parents=True, exist_ok=True)
        handle = os.open(records / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError("cannot write the records", where=str(records), fix=str(error)) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PrerequisiteError(
                "another night is at work on these records", where=str(records), fix="wait for it to end"
            ) from error
        yield
    finally:
        os.close(handle)
