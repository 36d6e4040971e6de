"""What a pull request may do to the records: add runs, whole and honest, or a method file that asks for one.

Nothing that is there is changed or removed, a run lies where its identity puts it, and its method's file is in the
repository as it ran. A sample of the added runs is made again by whoever merges (`--reproduce`).
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.loader import file_digests
from prunebench.record import RECORD_FILE, Run, read_record
from prunebench.run.reproduce import reproduce, request_of
from prunebench.run.stored import documents_of
from prunebench.validation import RETRACTIONS, validate_records

__all__ = ["Submission", "check_submission"]

_RECORDS: Final = "leaderboard/records/"
_METHODS: Final = "methods/"


@dataclass(frozen=True)
class Submission:
    """What was looked at.

    Args:
        runs: folders of added runs.
        methods: added method files; they ask for a run.
        findings: what may not be merged, in one line each.
        reproduced: by folder, what making it again came to.
    """

    runs: tuple[str, ...]
    methods: tuple[str, ...]
    findings: tuple[str, ...]
    reproduced: dict[str, bool]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**vars(self)}

    def to_text(self) -> str:
        """For people."""
        lines = [f"run {one}" for one in self.runs] + [f"method {one}" for one in self.methods]
        lines += [f"{'reproduced' if same else 'NOT reproduced'}: {one}" for one, same in self.reproduced.items()]
        return "\n".join([*lines, *(f"refused: {one}" for one in self.findings), f"{len(self.findings)} findings"])


def check_submission(root: Path, base: str, out: Path, *, sample: int = 0) -> Submission:
    """Look at what the checkout adds to a base.

    Args:
        root: the checkout.
        base: a commit or branch to compare with.
        out: records folder for runs that are made again.
        sample: how many of the added runs are made again.

    Raises:
        PrerequisiteError: without git, or without the base.
    """
    changed = _changed(root, base)
    findings = [f"{path}: records are only added, and this was {what}" for what, path in changed if _alters(what, path)]
    runs = sorted(
        {str(Path(path).parent) for what, path in changed if what == "added" and path.endswith(f"/{RECORD_FILE}")}
    )
    runs = [run for run in runs if run.startswith(_RECORDS)]
    methods = sorted(path for what, path in changed if what == "added" and path.startswith(_METHODS))
    loose = [path for what, path in changed if what == "added" and path.startswith(_RECORDS)]
    findings += [f"{path}: not a part of an added run" for path in loose if not _belongs(path, runs)]
    if not runs and not methods and not findings:
        findings.append("nothing is submitted: no run and no method file")
    findings += [fault for run in runs for fault in _faults(root, run)]
    reproduced = {}
    for run in [] if findings else _sample(runs, sample):
        reproduced[run] = reproduce(root / run, out).agrees
        if not reproduced[run]:
            findings.append(f"{run}: made again, it came out otherwise")
    return Submission(tuple(runs), tuple(methods), tuple(findings), reproduced)


def _alters(what: str, path: str) -> bool:
    """Whether a change touches what is there; retractions and tables of questions are files of their own kind."""
    return path.startswith(_RECORDS) and what != "added" and not path.endswith(f"/{RETRACTIONS}")


def _belongs(path: str, runs: Sequence[str]) -> bool:
    inside = any(path in (f"{run}/{RECORD_FILE}", f"{run}/items.parquet") for run in runs)
    return inside or "/questions/" in path or path.endswith(f"/{RETRACTIONS}")


def _changed(root: Path, base: str) -> list[tuple[str, str]]:
    """(added, modified or deleted; path) of every file that differs from the base, renames as both."""
    command = ["git", "-C", str(root), "diff", "--name-status", "--no-renames", "-z", f"{base}...HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise PrerequisiteError("cannot compare with the base", where=base, fix=detail) from error
    parts = done.stdout.split("\0")[:-1]
    words = {"A": "added", "M": "modified", "D": "deleted"}
    return [(words.get(kind[0], "changed"), path) for kind, path in zip(parts[::2], parts[1::2], strict=True)]


def _faults(root: Path, run: str) -> list[str]:
    """What is wrong with an added run: by validation, by its place, or by what a board would leave out."""
    folder = root / run
    result = validate_records([folder], methods=file_digests("methods"), documents=documents_of())
    found = [f"{run}: {one.rule}: {one.what}" for one in result.findings]
    if found:
        return found
    record = read_record(folder)
    if record["status"] != "complete":
        found.append(f"{run}: a run with a limit is no submission")
    if record["seal"] is None:
        found.append(f"{run}: the record has no seal; run it with this prunebench")
    if "executor" in record["identity"]:
        found.append(f"{run}: its programs ran without a sandbox")
    known = file_digests("methods")
    for role in ("method", "operator"):
        part = record["identity"][role]
        if part and part["name"] not in known:
            found.append(f"{run}: the file of {role} {part['name']} is not in methods/; add it")
    return found + _misplaced(run, record, folder)


def _misplaced(run: str, record: dict[str, Any], folder: Path) -> list[str]:
    """A run lies in records/TRACK/MODEL/NAME, under its model, with what its identity asks for in its name."""
    parts = run.removeprefix(_RECORDS).split("/")
    if len(parts) != 3:
        return [f"{run}: not in {_RECORDS}TRACK/MODEL/NAME"]
    model, name = parts[1:]
    wanted = str(record["arm"]["model"]).replace("/", "_")
    if model != wanted:
        return [f"{run}: its model is {wanted}, and it lies under {model}"]
    try:
        asked = request_of(Run(record, None, folder))  # type: ignore[arg-type]
    except UsageError as error:
        return [f"{run}: {error}"]
    words = _words(record)
    missing = [word for word in words if word not in name]
    if missing and name not in (asked.folder.rpartition("/")[2], record["run_id"]):
        return [f"{run}: the folder's name says nothing of {missing[0]}, which its identity names"]
    return []


def _words(record: dict[str, Any]) -> list[str]:
    """What a folder's name has to hold of an identity."""
    identity = record["identity"]
    if record["arm"]["dense"]:
        return ["dense"]
    budget = identity["budget"] or {}
    amount = f"ratio{budget['ratio']}" if "ratio" in budget else f"keep{budget['keep']}" if "keep" in budget else ""
    mask = "" if identity["mask"]["source"] == "file" else str(identity["mask"]["source"])
    return [word for word in (mask, amount, str(identity["operator"].get("scale") or "")) if word]


def _sample(runs: Sequence[str], count: int) -> list[str]:
    """The same few for everybody: those whose names hash lowest."""
    return sorted(runs, key=lambda run: hashlib.sha256(run.encode()).hexdigest())[:count]
