"""The board: every complete run under a folder as one Markdown table and one sortable page.

Scores are not taken on trust: each is computed again from the run's items, and a record that says otherwise stops the
board. Stored bytes and integrity are the record's; ratio, model and draw were checked against its mask and identity
when it was read. No torch, no network, no dates: the same records give the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from prunebench.analysis import metrics_from_items
from prunebench.board.render import to_html, to_markdown
from prunebench.board.table import Table, build_table
from prunebench.errors import IntegrityError, PrerequisiteError, UsageError
from prunebench.mask import write_atomically
from prunebench.record import UNSAFE_LOCAL, LeftOut, Run, read_run, runs_under
from prunebench.validation import read_retractions

__all__ = ["BoardResult", "check_metrics", "load_runs", "write_board"]


@dataclass(frozen=True)
class BoardResult:
    """What was written: both files, the table behind them, and what is not on it and why."""

    markdown: Path
    html: Path
    table: Table
    left_out: tuple[LeftOut, ...]

    @property
    def rows(self) -> int:
        """Runs on the board."""
        return len(self.table.rows)


def write_board(records: Path, out: Path) -> BoardResult:
    """Write `board.md` and `board.html` for all complete runs under a folder.

    Args:
        records: searched for run folders, at any depth.
        out: folder that gets the two files.

    Raises:
        IntegrityError: if a record's number is not what its items give.
        PrerequisiteError: if there is no complete run.
        UsageError: if there is no such folder, or `out` is not writable.
    """
    runs, left_out = load_runs(records)
    if not runs:
        detail = f"left out: {left_out[0]}" if left_out else "make some with prunebench run or prunebench grid"
        raise PrerequisiteError("no complete run to show", where=str(records), fix=detail)
    for run in runs:
        check_metrics(run)
    table = build_table(runs)
    result = BoardResult(out / "board.md", out / "board.html", table, left_out)
    shown = [replace(one, path=one.path.relative_to(records)) for one in left_out]
    write_atomically(result.markdown, to_markdown(table, shown).encode(errors="replace"))
    write_atomically(result.html, to_html(table, shown).encode(errors="replace"))
    return result


def load_runs(records: Path) -> tuple[list[Run], tuple[LeftOut, ...]]:
    """The complete runs under a folder, and every folder that is not one of them with its reason."""
    listing = runs_under(records)
    retracted = read_retractions(records)
    left_out = list(listing.left_out)
    found: dict[str, Run] = {}
    for path in listing.runs:
        try:
            run = read_run(path)
        except (PrerequisiteError, UsageError) as error:
            left_out.append(LeftOut(path, error.what))
            continue
        identifier = run.record["run_id"]
        if run.record["status"] != "complete":
            left_out.append(LeftOut(path, f"partial: made with a limit of {run.record['identity']['limit']} items"))
        elif run.record["identity"].get("executor") == UNSAFE_LOCAL:
            left_out.append(LeftOut(path, "its programs ran without a sandbox (--unsafe-local)"))
        elif identifier in retracted:
            left_out.append(LeftOut(path, str(retracted[identifier])))
        elif identifier in found:
            left_out.append(LeftOut(path, f"the same run as {found[identifier].path.relative_to(records)}"))
        else:
            found[identifier] = run
    return list(found.values()), tuple(sorted(left_out))


def check_metrics(run: Run) -> None:
    """Raise an `IntegrityError` unless every number of the record is what its items give, and none is missing."""
    stated = run.record["metrics"]
    computed = metrics_from_items(run.items, run.record["headline"])
    for name in sorted(stated.keys() | computed.keys()):
        for field in ("value", "low", "high", "n"):
            says, gives = (numbers.get(name, {}).get(field) for numbers in (stated, computed))
            if says is None or gives is None or not math.isclose(says, gives, rel_tol=1e-9, abs_tol=1e-9):
                raise IntegrityError(
                    f"metric {name}: the record says {field} {says}, its items give {gives}",
                    where=f"run {run.name}",
                    fix="run it again; records are not edited",
                )
