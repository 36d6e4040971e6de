"""The board: every complete run under a folder, as Markdown, as JSON and as a site that needs no server.

Scores are not taken on trust: each is computed again from the run's items, and a record that says otherwise stops the
board. Stored bytes and integrity are the record's; ratio, model and draw were checked against its mask and identity
when it was read. No torch, no network, no dates: the same records and the same declared files give the same bytes.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prunebench.board.data import to_json_lines
from prunebench.board.declared import Declared, answer_declared, with_marks
from prunebench.board.entries import load_entries
from prunebench.board.legend import TITLE
from prunebench.board.markdown import Links, sections, summary, to_markdown, with_board
from prunebench.board.reported import ReportedScore, read_reported
from prunebench.board.scoring import Scored, score
from prunebench.board.site import Site, write_site
from prunebench.board.table import Table, build_table
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import write_atomically
from prunebench.record import LeftOut

__all__ = ["Board", "BoardResult", "build_board", "build_track_board", "committed", "stale", "write_board"]


@dataclass(frozen=True)
class Board:
    """All that is said of some records.

    Args:
        track: its name, or nothing.
        records: the folder.
        table: a row per run.
        scored: the numbers behind it.
        declared: what the track's families say.
        reported: what papers print of the track's models.
        left_out: folders that are not on it, and why.
    """

    track: str
    records: Path
    table: Table
    scored: Scored
    declared: Declared | None
    reported: tuple[ReportedScore, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def json(self) -> str:
        """As JSON."""
        return to_json_lines(self.track, self.table, self.scored.scales, self.declared, self.shown_left_out)

    @property
    def shown_left_out(self) -> tuple[LeftOut, ...]:
        """What is left out, without paths of this machine."""
        return tuple(replace(one, path=one.path.relative_to(self.records)) for one in self.left_out)

    def markdown(self, file: Path, cards: Path) -> Mapping[str, str]:
        """What goes between the markers of a file, by kind, with links as seen from there."""
        links = Links(*(Path(os.path.relpath(folder, file.parent)).as_posix() for folder in (cards, self.records)))
        return {
            f"{self.track} summary": summary(self.table, links),
            f"{self.track} full": sections(self.table, self.shown_left_out, links),
        }


@dataclass(frozen=True)
class BoardResult:
    """What was written: the files, the table behind them, and what is not on it and why."""

    markdown: Path
    json: Path
    html: Path
    table: Table
    left_out: tuple[LeftOut, ...]

    @property
    def rows(self) -> int:
        """Runs on the board."""
        return len(self.table.rows)


def build_board(
    records: Path, *, track: str = "", families: Path | None = None, reported: Sequence[Path] = ()
) -> Board:
    """Everything that a board says, from records and declared files alone.

    Args:
        records: searched for run folders, at any depth.
        track: its name.
        families: a file of declared contrasts.
        reported: files of printed scores.

    Raises:
        IntegrityError: if a record's number is not what its items give.
        PrerequisiteError: if there is no complete run.
        UsageError: if there is no such folder, or a declared file is broken.
    """
    entries, left_out = load_entries(records)
    if not entries:
        detail = f"left out: {left_out[0]}" if left_out else "make some with prunebench run or prunebench grid"
        raise PrerequisiteError("no complete run to show", where=str(records), fix=detail)
    scored = score(entries)
    declared = None if families is None else answer_declared(records, entries, families)
    if declared is not None:
        scored = with_marks(scored, entries, declared.pairs)
    printed = tuple(one for path in reported for one in read_reported(path))
    return Board(track, records, build_table(entries, scored), scored, declared, printed, left_out)


def build_track_board(records: Path, track_file: Path) -> Board:
    """The board of a track: its name from its file, with `families/NAME.toml` and `reported/NAME.toml` beside it.

    Raises:
        UsageError: for a file without a name; and as `build_board`.
    """
    try:
        name = str(tomllib.loads(track_file.read_text(encoding="utf-8"))["track"]["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "cannot read the track", where=str(track_file), expected="a TOML file with [track] name"
        ) from error
    beside = (track_file.parent.parent / kind / f"{name}.toml" for kind in ("families", "reported"))
    families, reported = (path if path.is_file() else None for path in beside)
    return build_board(records, track=name, families=families, reported=[reported] if reported else [])


def write_board(board: Board | Path, out: Path, *, cards: Path | None = None) -> BoardResult:
    """Write `board.md`, `board.json` and the site, whose first page is `index.html`.

    Args:
        board: a board, or the records to build one from.
        out: folder that gets the files.
        cards: folder of method cards, which become pages.

    Raises:
        PrerequisiteError: without the extra `plots`.
        UsageError: if `out` is not writable; and as `build_board`.
    """
    board = build_board(board) if isinstance(board, Path) else board
    result = BoardResult(out / "board.md", out / "board.json", out / "index.html", board.table, board.left_out)
    title = f"{TITLE}: {board.track}" if board.track else TITLE
    left_out = board.shown_left_out
    write_site(Site(title, board.table, board.scored.scales, board.declared, board.reported, left_out, cards), out)
    write_atomically(result.markdown, to_markdown(board.table, left_out).encode(errors="replace"))
    write_atomically(result.json, board.json.encode(errors="replace"))
    return result


def committed(board: Board, json: Path | None, files: Sequence[Path], cards: Path) -> dict[Path, bytes]:
    """What the committed files have to be: the board's JSON, and files with Markdown between markers.

    Raises:
        PrerequisiteError: if a file with markers is not there.
        UsageError: if it has no markers.
    """
    wanted = {path: with_board(path, board.markdown(path, cards)).encode() for path in files}
    return wanted if json is None else {json: board.json.encode(), **wanted}


def stale(wanted: Mapping[Path, bytes]) -> list[Path]:
    """The files that are not what they have to be."""
    return [path for path, content in wanted.items() if not path.is_file() or path.read_bytes() != content]
