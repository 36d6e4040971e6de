"""Packing a records folder: what its runs share is written once, in tables of questions beside them.

Each run stays whole at every moment: a table is there before the first run that names it, and a run's folder is
replaced in one step, by one that was read back and found equal. So a killed command loses nothing; give it again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.items import (
    QUESTIONS,
    ItemTable,
    Questions,
    locate_questions,
    questions_bytes,
    questions_named,
    read_questions,
)
from prunebench.mask import write_atomically
from prunebench.record import (
    ITEMS_FILE,
    RECORD_FILE,
    LeftOut,
    Run,
    clear_leftovers,
    read_run,
    runs_under,
    write_run,
)

__all__ = ["PackResult", "pack", "unpack"]


@dataclass(frozen=True)
class PackResult:
    """What became of a records folder.

    Args:
        changed: runs that were packed, or unpacked, now.
        kept: runs that were so already.
        tables: tables of questions in the folder.
        bytes_before: of all runs and tables.
        bytes_after: the same, afterwards.
        left_out: folders that are no whole run, which stay as they are.
    """

    changed: int
    kept: int
    tables: int
    bytes_before: int
    bytes_after: int
    left_out: tuple[LeftOut, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**vars(self), "left_out": [str(one) for one in self.left_out]}


def pack(records: Path) -> PackResult:
    """Pack every run below a folder, those that are packed already excepted.

    Args:
        records: gets the folder of tables.

    Raises:
        UsageError: for no folder, or one that is a run's own or cannot be written.
        PrerequisiteError: for a table that has been damaged.
    """
    if (records / RECORD_FILE).exists():
        raise UsageError(
            "the folder is a run's own",
            where=str(records),
            expected="a folder of run folders",
            fix="give its parent",
        )
    known: dict[str, Questions] = {}

    def change(run: Run) -> bool:
        if questions_named(run.path / ITEMS_FILE) is not None:
            return False
        questions = _questions_of(run.items, records, known)
        locate_questions(run.path / ITEMS_FILE, questions.digest)  # or it is too far below, or elsewhere by a link
        write_run(run.path, run.record, run.items, questions=questions)
        return True

    with _alone(records):
        known |= {table.stem: read_questions(table) for table in _tables(records)}
        return _each_run(records, change)


def unpack(records: Path) -> PackResult:
    """Let every run at or below a folder hold its questions itself, so that it can be copied alone."""

    def change(run: Run) -> bool:
        if questions_named(run.path / ITEMS_FILE) is None:
            return False
        write_run(run.path, run.record, run.items)
        return True

    with _alone(records):
        return _each_run(records, change)


def _each_run(records: Path, change: Callable[[Run], bool]) -> PackResult:
    """Change the runs below a folder one after the other, then remove tables that none of them names."""
    before = _size(records)
    listing = runs_under(records)
    left_out = list(listing.left_out)
    changed = kept = 0
    for path in listing.runs:
        clear_leftovers(path)
        try:
            if change(read_run(path)):
                changed += 1
            else:
                kept += 1
        except PrerequisiteError as error:
            left_out.append(LeftOut(path, error.what))
    tables = _without_unused(records)
    return PackResult(changed, kept, len(tables), before, _size(records), tuple(sorted(left_out)))


def _questions_of(items: ItemTable, records: Path, known: dict[str, Questions]) -> Questions:
    """The table of these items: one that is known, or a new one, which is on disk when this returns."""
    for questions in known.values():
        if questions.asks(items):
            return questions
    data = questions_bytes(items)
    path = records / QUESTIONS / f"{hashlib.sha256(data).hexdigest()}.parquet"
    write_atomically(path, data)
    questions = known[path.stem] = read_questions(path)
    return questions


def _tables(records: Path) -> list[Path]:
    return sorted((records / QUESTIONS).glob("[!.]*.parquet"))


def _without_unused(records: Path) -> list[Path]:
    """Remove the tables that no run below names, and unfinished ones; those that are left."""
    tables = _tables(records)
    folder = records / QUESTIONS
    for unfinished in folder.glob(".*.tmp"):
        unfinished.unlink()
    try:
        named = {questions_named(file) for file in records.rglob(ITEMS_FILE)}
    except PrerequisiteError:  # an unreadable file may name any
        return tables
    for table in tables:
        if table.stem not in named:
            table.unlink()
    left = [table for table in tables if table.stem in named]
    if not left and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return left


def _size(records: Path) -> int:
    files = [*_tables(records), *records.rglob(ITEMS_FILE), *records.rglob(RECORD_FILE)]
    return sum(file.stat().st_size for file in files)


@contextmanager
def _alone(records: Path) -> Iterator[None]:
    """One command at a time: another one could remove a table before the run that names it is there."""
    if not records.is_dir():
        raise UsageError("no such folder", where=str(records), expected="a folder of run folders")
    handle = os.open(records, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
