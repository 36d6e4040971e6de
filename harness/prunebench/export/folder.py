"""Writing a folder of files: whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from prunebench.errors import UsageError
from prunebench.record import clear_leftovers, sync

__all__ = ["check_free", "digests", "new_folder"]


def check_free(folder: Path) -> None:
    """Raise unless a new folder can be made there.

    Raises:
        UsageError: if something is there, or nothing can be written.
    """
    if folder.exists():
        raise UsageError("something is there already", where=str(folder), fix="remove it, or give another --out")
    above = folder.resolve().parent
    while not above.exists():
        above = above.parent
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UsageError("cannot write there", where=str(folder), expected="a writable folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder that gets its name when the block ends well: a kill at any moment leaves no half of it.

    What killed writers have left beside it is removed.

    Raises:
        UsageError: as `check_free`; a full disk, or whatever else the system says.
    """
    check_free(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(folder)
        temporary.mkdir()
        yield temporary
        for path in sorted(temporary.rglob("*"), reverse=True):
            path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors writes files for their owner only
            sync(path)
        sync(temporary)
        temporary.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:  # what safetensors writes, it reports in its own words
        raise UsageError(
            "cannot write the export", where=str(folder), expected="a writable folder with room", fix=str(error)
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def digests(folder: Path, *, without: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by its path from there, but for one."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != without):
        with path.open("rb") as file:
            found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
