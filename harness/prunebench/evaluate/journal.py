"""Finished forward batches of one evaluation, on disk, so that a killed one goes on where it was.

An evaluation asks its batches in an order that its requests alone decide. The journal keeps, batch by batch, a hash of
everything that was asked, what came out, and the counters as they stood; a rerun is given what is there as long as it
asks the same. The journal's own key has to hold everything else that decides a number: weights, plan, dtype, kernel. So
no score of one model is ever served to another, a changed task is asked anew, and a resumed run equals an uninterrupted
one bit for bit.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from prunebench.errors import UsageError

__all__ = ["Counting", "Journal"]


class Counting(Protocol):
    """What counts while batches run."""

    def snapshot(self) -> Any:
        """The counters as JSON data."""

    def restore(self, state: Any) -> None:
        """Set the counters to a snapshot."""


class Journal:
    """The batches of one evaluation.

    Args:
        path: of the file; its folder is made.
        key: whatever decides the numbers besides the requests; a file with another key is begun anew.
        counting: what counts while batches run, if anything does.

    Raises:
        BlockingIOError: if another process has it.
        UsageError: if the file cannot be written.
    """

    def __init__(self, path: Path, key: str, counting: Counting | None = None) -> None:
        self.path, self.counting = path, counting
        self.served = 0
        digest = hashlib.sha256(key.encode()).hexdigest()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._kept, end = _read(self._file, digest)
            self._file.truncate(end)
            if self._kept is None:
                self._kept = []
                self._append({"key": digest})
        except BlockingIOError:
            self._file.close()
            raise
        except OSError as error:
            raise _unwritable(path, error) from error

    def through(self, asked: Any, compute: Callable[[], Any]) -> Any:
        """What was asked before, or what `compute` gives now, as JSON data.

        Args:
            asked: the batch, as JSON data.
            compute: runs it.
        """
        assert self._kept is not None
        digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        if self.served < len(self._kept):
            entry, start = self._kept[self.served]
            if entry["asked"] == digest:
                self.served += 1
                if self.counting is not None:
                    self.counting.restore(entry["counters"])
                return entry["result"]
            # Something else is asked from here on.
            del self._kept[self.served :]
            self._file.truncate(start)
        result = compute()
        counters = self.counting.snapshot() if self.counting is not None else None
        # What is handed out is what a rerun would read.
        entry = json.loads(json.dumps({"asked": digest, "result": result, "counters": counters}))
        self._kept.append((entry, self._append(entry)))
        self.served += 1
        return entry["result"]

    def forget(self) -> None:
        """Remove the file: the run is written."""
        self.path.unlink(missing_ok=True)
        self._file.close()

    def close(self) -> None:
        """Close the file, and keep it."""
        with contextlib.suppress(OSError):  # of what could not be written, which was told when it happened
            self._file.close()

    def _append(self, entry: Any) -> int:
        """Write an entry at the end, and say where that was."""
        try:
            start = self._file.seek(0, os.SEEK_END)
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        return start


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError("cannot write there", where=str(path), expected="a writable folder", fix=str(error))


def _read(file: BinaryIO, key: str) -> tuple[list[tuple[Any, int]] | None, int]:
    """The whole entries of a file with their places, and where they end; None if there is none, or of another key."""
    entries: list[tuple[Any, int]] = []
    end = 0
    file.seek(0)
    for number, line in enumerate(file):
        try:
            entry = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            entry = None
        if entry is None:  # what a killed writer left
            break
        if number == 0:
            if entry != {"key": key}:
                return None, 0
        else:
            entries.append((entry, end))
        end += len(line)
    return (entries, end) if end else (None, 0)
