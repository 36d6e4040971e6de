"""The runs of a board: records without their items, and the folders that are not on it, with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prunebench.analysis.batch import Sheet, columns_of
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.items import read_outcomes
from prunebench.mask import canonical_json
from prunebench.record import ITEMS_FILE, UNSAFE_LOCAL, LeftOut, read_record, runs_under
from prunebench.validation import read_retractions

__all__ = ["Entry", "load_entries"]


@dataclass(frozen=True, eq=False)
class Entry:
    """A run on the board.

    Args:
        record: as of today's schema.
        path: its folder.
        folder: the same, below the records, with slashes.
        sheet: its outcomes by task.
    """

    record: Mapping[str, Any]
    path: Path
    folder: str
    sheet: Sheet

    @property
    def id(self) -> str:
        """The run id."""
        return str(self.record["run_id"])

    @property
    def name(self) -> str:
        """How messages call the run: its folder and its id."""
        return f"{self.path.name} ({self.id})"

    @property
    def weights(self) -> str:
        """Digest of the model's weights."""
        return str(self.record["identity"]["model"]["weights_sha256"])

    @property
    def dense(self) -> bool:
        """Whether nothing is pruned."""
        return bool(self.record["arm"]["dense"])

    def calibration(self, part: Literal["mask", "fit"]) -> Mapping[str, Any] | None:
        """What the mask was chosen on, or the operator fitted on; None if nothing was."""
        stated: Mapping[str, Any] | None = (self.record["identity"]["calibration"] or {}).get(part)
        return stated

    def content(self, suite: str) -> str:
        """A suite's version and content, to be compared."""
        return canonical_json(self.record["identity"]["suites"].get(suite))


def load_entries(records: Path) -> tuple[list[Entry], tuple[LeftOut, ...]]:
    """The complete runs under a folder, and every folder that is not one of them with its reason.

    Raises:
        UsageError: if there is no such folder, or its file of retractions is broken.
    """
    listing = runs_under(records)
    retracted = read_retractions(records)
    left_out = list(listing.left_out)
    found: dict[str, Entry] = {}
    for path in listing.runs:
        try:
            record = read_record(path)
            sheet = columns_of(read_outcomes(path / ITEMS_FILE))
        except (PrerequisiteError, UsageError) as error:
            left_out.append(LeftOut(path, error.what))
            continue
        identifier = record["run_id"]
        reason = _reason(record)
        if identifier in retracted:
            reason = str(retracted[identifier])
        elif not reason and identifier in found:
            reason = f"the same run as {found[identifier].folder}"
        if reason:
            left_out.append(LeftOut(path, reason))
        else:
            found[identifier] = Entry(record, path, path.relative_to(records).as_posix(), sheet)
    return list(found.values()), tuple(sorted(left_out))


def _reason(record: Mapping[str, Any]) -> str:
    """Why a run does not belong on a board; nothing if it does."""
    if record["status"] != "complete":
        return f"partial: made with a limit of {record['identity']['limit']} items"
    if record["identity"].get("executor") == UNSAFE_LOCAL:
        return "its programs ran without a sandbox (--unsafe-local)"
    by_suite = record.get("evaluation", {}).get("items", {})
    if invalid := sum(counts.get("invalid", 0) for counts in by_suite.values()):
        return f"{invalid} questions answered with NaN or infinite logits"
    return ""
