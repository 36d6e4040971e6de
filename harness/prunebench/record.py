"""One run on disk: `record.json` (what was run and what came out) beside `items.parquet` (one row per item and metric).

A run folder is written whole or not at all, and the same content gives the same bytes. This module knows the format
only: it computes no metric (that is `analysis`) and imports nothing heavy until a file is touched. The rows, and what a
packed file of them is, are those of `items`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from prunebench.errors import IntegrityError, PrerequisiteError, PruneBenchError, UsageError
from prunebench.items import (
    QUESTIONS,
    STATES,
    Item,
    ItemTable,
    Questions,
    content_hash,
    items_to_table,
    read_items,
    write_items,
)
from prunebench.mask import canonical_json
from prunebench.schema import UNSAFE_LOCAL, run_id, validate
from prunebench.versions import SCHEMA, json_document, migrated

__all__ = [
    "ITEMS_FILE",
    "RECORD_FILE",
    "SCHEMA",
    "STATES",
    "UNSAFE_LOCAL",
    "Item",
    "ItemTable",
    "LeftOut",
    "Run",
    "RunListing",
    "clear_leftovers",
    "comparable",
    "content_hash",
    "is_complete",
    "items_to_table",
    "read_items",
    "read_record",
    "read_run",
    "run_id",
    "runs_under",
    "seal_of",
    "sealed",
    "sync",
    "validate",
    "write_items",
    "write_run",
]

RECORD_FILE: Final = "record.json"
ITEMS_FILE: Final = "items.parquet"


def comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without its volatile fields: equal for any two executions of one identity."""
    return {key: value for key, value in record.items() if key != "volatile"}


def seal_of(record: Mapping[str, Any], table: ItemTable) -> dict[str, str]:
    """Digests of all that a run says but its volatile fields: of the record, and of the items packed or not.

    Two executions that came to the same have equal seals.
    """
    said = {key: value for key, value in comparable(record).items() if key != "seal"}
    return {"record": hashlib.sha256(canonical_json(said).encode()).hexdigest(), "items": table.digest}


def sealed(record: Mapping[str, Any], table: ItemTable) -> dict[str, Any]:
    """The record with its seal."""
    return {**record, "seal": seal_of(record, table)}


@dataclass(frozen=True, eq=False)
class Run:
    """A run as read: its record, its items, and where they were."""

    record: dict[str, Any]
    items: ItemTable
    path: Path

    @property
    def invalid(self) -> int:
        """Questions that the model answered with NaN or infinity."""
        by_suite = self.record.get("evaluation", {}).get("items", {})
        return sum(counts.get("invalid", 0) for counts in by_suite.values())

    def calibration(self, part: Literal["mask", "fit"]) -> Mapping[str, Any] | None:
        """What the mask was chosen on, or the operator fitted on; None if nothing was."""
        stated: Mapping[str, Any] | None = (self.record["identity"]["calibration"] or {}).get(part)
        return stated

    @property
    def name(self) -> str:
        """How messages call the run: its folder and its id."""
        return f"{self.path.name} ({self.record['run_id']})"


@dataclass(frozen=True, order=True)
class LeftOut:
    """A folder that was not used, and why, in one line without paths of this machine."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class RunListing:
    """What `runs_under` found: whole runs and half-written ones, each sorted by path."""

    runs: tuple[Path, ...]
    left_out: tuple[LeftOut, ...]


def read_record(folder: Path) -> dict[str, Any]:
    """The validated record of a folder, as one of today's schema.

    Raises:
        PrerequisiteError: if the folder is half-written or damaged.
    """
    again = "run it again; the folder will be replaced"
    missing = [name for name in (RECORD_FILE, ITEMS_FILE) if not (folder / name).is_file()]
    if missing:
        raise PrerequisiteError(f"half-written run folder: no {' and no '.join(missing)}", where=str(folder), fix=again)
    try:
        record = json_document((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PrerequisiteError(
            f"half-written run folder: {RECORD_FILE} is damaged", where=str(folder), fix=f"{again} ({error})"
        ) from error
    try:
        record = migrated(record, where=RECORD_FILE)
        validate(record, where=RECORD_FILE)
    except UsageError as error:
        raise PrerequisiteError(f"half-written or altered run folder: {error}", where=str(folder), fix=again) from error
    return record


def read_run(folder: Path) -> Run:
    """Read and validate one run folder.

    Raises:
        UsageError: if there is no such folder, or it holds folders and no run.
        PrerequisiteError: if the folder is half-written or damaged.
    """
    if not folder.is_dir():
        raise UsageError("no such run folder", where=str(folder), expected=f"a folder with {RECORD_FILE}")
    files = any((folder / name).exists() for name in (RECORD_FILE, ITEMS_FILE))
    if not files and any(path.is_dir() for path in folder.iterdir()):
        raise UsageError("the folder is no run's", where=str(folder), expected=f"one run's folder, with {RECORD_FILE}")
    record = read_record(folder)
    return Run(record, read_items(folder / ITEMS_FILE), folder)


def is_complete(folder: Path, run_id: str) -> bool:
    """Whether a whole run of this identity stands here, so that it need not be run again.

    True also for a finished run with a limit: the limit is part of the identity.
    """
    try:
        run = read_run(folder)
    except PruneBenchError:
        return False
    return bool(run.record["run_id"] == run_id)


def runs_under(folder: Path) -> RunListing:
    """Find the run folders at or below `folder`. Hidden folders (unfinished writes) are not looked into.

    A folder is half-written if it holds a part of a run, or holds nothing to descend into and no run. Tables of
    questions are passed over.
    """
    runs: list[Path] = []
    left_out: list[LeftOut] = []
    if not folder.is_dir():
        raise UsageError("no such folder", where=str(folder), expected="a folder of run folders")
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        below = [path for path in here.iterdir() if path.is_dir() and not path.name.startswith(".")]
        has_part = (here / RECORD_FILE).exists() or (here / ITEMS_FILE).exists()
        if here.name == QUESTIONS and not has_part and not below:
            continue
        if not has_part and (below or here == folder):
            waiting += below
            continue
        try:
            read_record(here)
            runs.append(here)
        except PrerequisiteError as error:
            left_out.append(LeftOut(here, error.what))
    return RunListing(tuple(sorted(runs)), tuple(sorted(left_out)))


def write_run(
    folder: Path,
    record: Mapping[str, Any],
    items: Iterable[Item] | ItemTable,
    *,
    replace: bool = False,
    questions: Questions | None = None,
) -> None:
    """Write one run folder, all or nothing: a kill at any moment leaves no run, the old run, or the whole new one.

    Args:
        folder: where the run goes; a half-written run there is replaced.
        record: the content of record.json; validated first.
        items: all outcomes, in any order.
        replace: allow a whole run of another identity to be replaced.
        questions: pack the items: their table, which must stand in a folder above already.

    Raises:
        UsageError: for an invalid record or item, an occupied or an unwritable folder.
        IntegrityError: packed items that do not read as the same again.
    """
    validate(record)
    table = items if isinstance(items, ItemTable) else items_to_table(items)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(folder)
        _check_replaceable(folder, str(record["run_id"]), replace=replace)
        temporary.mkdir()
        write_items(temporary / ITEMS_FILE, table, questions)
        if questions is not None and not read_items(temporary / ITEMS_FILE).equals(table):
            raise IntegrityError("packed items read as other ones", where=str(folder))
        (temporary / RECORD_FILE).write_text(_text(record), encoding="utf-8")
        for path in (temporary / ITEMS_FILE, temporary / RECORD_FILE, temporary):
            sync(path)
        _put_in_place(temporary, folder)
        sync(folder.parent)
    except OSError as error:
        raise UsageError(
            "cannot write the run", where=str(folder), expected="a writable folder", fix=str(error)
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _text(record: Mapping[str, Any]) -> str:
    """A record as JSON, each field in a line of its own."""
    lines = [f"{canonical_json(key)}: {canonical_json(value)}" for key, value in sorted(record.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _check_replaceable(folder: Path, new_id: str, *, replace: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError("the run folder is a file", where=str(folder), fix="choose another folder")
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in {RECORD_FILE, ITEMS_FILE})
    if foreign:
        raise UsageError(f"the run folder holds other things ({foreign[0]})", where=str(folder), fix="choose another")
    try:
        old = str(read_record(folder)["run_id"])
    except PrerequisiteError:
        return
    if old != new_id and not replace:
        raise UsageError(
            f"the folder holds another run ({old})", where=str(folder), expected=new_id, fix="choose another folder"
        )


def sync(path: Path) -> None:
    """Have a file's or a folder's content on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Move a finished folder to its name; an old one there ends up under the temporary name."""
    if not folder.exists():
        temporary.rename(folder)
    elif not _exchange(temporary, folder):
        # Without an atomic exchange there is a moment with no folder; `clear_leftovers` then brings the old one back.
        old = temporary.with_suffix(".old")
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old)


def _exchange(left: Path, right: Path) -> bool:
    """Swap two folders in one step; False where the system cannot."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
    return rename is not None and rename(here, os.fsencode(left), here, os.fsencode(right), exchange) == 0


def clear_leftovers(folder: Path) -> None:
    """Remove what killed writers left beside `folder`; bring back an old run that lost its place."""
    leftover = re.compile(rf"\.{re.escape(folder.name)}\.(\d+)\.(?:tmp|old)")
    for path in sorted(folder.parent.iterdir()):
        match = leftover.fullmatch(path.name)
        if match is None or _alive(int(match[1])):
            continue
        if path.suffix == ".old" and not folder.exists():
            path.rename(folder)
        else:
            shutil.rmtree(path)


def _alive(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
