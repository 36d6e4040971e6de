"""`prunebench board`, `nightly` and `submission`: what becomes of records in public."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from prunebench.cli.arms import dry_run
from prunebench.cli.shared import Progress, Result, add_evaluation, evaluation_of
from prunebench.errors import UsageError
from prunebench.mask import write_atomically

__all__ = ["add_board", "add_nightly", "add_submission", "run_board", "run_nightly", "run_submission"]


def add_board(board: argparse.ArgumentParser) -> None:
    """Options of `prunebench board`."""
    board.add_argument("records", type=Path, metavar="RECORDS", help="folder of run folders")
    board.add_argument("--out", type=Path, help="folder for board.md, board.json and the site (index.html)")
    board.add_argument(
        "--track", help="track by name or file: its families of contrasts and the scores that papers report"
    )
    board.add_argument("--data", type=Path, metavar="FILE", help="write the board's JSON there too")
    board.add_argument(
        "--update",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="put the board's Markdown between its markers in this file (may be repeated)",
    )
    board.add_argument(
        "--check", action="store_true", help="write nothing; fail if --data or --update files are not what they must be"
    )


def add_nightly(nightly: argparse.ArgumentParser) -> None:
    """Options of `prunebench nightly`."""
    nightly.add_argument("track", metavar="TRACK", help="track by name, or a TOML file")
    nightly.add_argument("--out", type=Path, help="records folder (default leaderboard/records/NAME of the checkout)")
    nightly.add_argument("--board", type=Path, help="the board's folder (default results/NAME/board)")
    nightly.add_argument("--jobs", type=int, default=1, help="worker processes, one model each (default %(default)s)")
    add_evaluation(nightly)


def add_submission(submission: argparse.ArgumentParser) -> None:
    """Options of `prunebench submission`."""
    submission.add_argument("base", metavar="BASE", help="commit or branch, such as origin/main")
    submission.add_argument("--reproduce", type=int, default=0, metavar="N", help="make N of the added runs again")
    submission.add_argument("--checkout", type=Path, help="the checkout (default: this one)")


def run_board(options: argparse.Namespace) -> Result:
    """Write the board, or say whether the committed one is stale (exit 1)."""
    from prunebench.board import build_board, build_track_board, committed, stale, write_board
    from prunebench.loader import content_root, resolve_track

    if options.out is None and options.data is None and not options.update:
        raise UsageError("nothing says where the board goes", fix="give --out, --data or --update")
    if options.check and options.data is None and not options.update:
        raise UsageError("nothing to check", fix="give --data or --update with --check")
    board = (
        build_board(options.records)
        if options.track is None
        else build_track_board(options.records, resolve_track(options.track))
    )
    cards = content_root() / "docs" / "methods"
    for one in board.left_out:
        print(f"left out {one}", file=sys.stderr)
    wanted = committed(board, options.data, options.update, cards)
    if options.check:
        old = [str(path) for path in stale(wanted)]
        text = "\n".join([f"stale: {path}" for path in old] or [f"{len(wanted)} files are what the records give"])
        return 1 if old else 0, {"stale": old}, text
    for path, content in wanted.items():
        write_atomically(path, content)
    data = {"rows": len(board.table.rows), "left_out": [str(one) for one in board.left_out]}
    files = [str(path) for path in wanted]
    if options.out is not None:
        result = write_board(board, options.out, cards=cards)
        data |= {"markdown": str(result.markdown), "json": str(result.json), "html": str(result.html)}
        files += [str(result.markdown), str(result.json), str(result.html)]
    return 0, data, "\n".join([f"{len(board.table.rows)} rows", *files])


def run_nightly(options: argparse.Namespace) -> Result:
    """A track's night; exit 1 unless all is well."""
    from prunebench.loader import content_root, resolve_track
    from prunebench.moe import quiet_libraries
    from prunebench.run import prepare_all, read_track
    from prunebench.run.nightly import nightly

    quiet_libraries()
    path = resolve_track(options.track)
    track = read_track(path, **evaluation_of(options))
    records = options.out or content_root() / "leaderboard" / "records" / track.name
    board = options.board or Path("results") / track.name / "board"
    if options.dry_run:
        return dry_run(track.name, prepare_all(track), records)
    with Progress() as progress:
        night = nightly(track, path, records, board, jobs=options.jobs, announce=progress.say, progress=progress.step)
    lines = [f"FAILED {folder}: {reason}" for folder, reason in night.grid.failed]
    lines += [f"finding: {one}" for one in night.findings]
    if night.changes is None:
        lines.append(f"no new board: {len(night.findings)} findings")
    else:
        lines += [night.changes.markdown().rstrip(), str(board / "index.html")]
    return 0 if night.fine else 1, night.to_json(), "\n".join(lines)


def run_submission(options: argparse.Namespace) -> Result:
    """Exit 1 if something keeps what was added from being merged."""
    from prunebench.loader import content_root
    from prunebench.moe import quiet_libraries
    from prunebench.run.submission import check_submission

    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="prunebench-") as out:
        root = options.checkout or content_root()
        found = check_submission(root, options.base, Path(out), sample=options.reproduce)
    return 1 if found.findings else 0, found.to_json(), found.to_text()
