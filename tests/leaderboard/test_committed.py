"""The committed records are whole, are those of the tiny track, and are what docs/results.md says."""

from __future__ import annotations

import pytest

from prunebench.board import build_board, committed, stale
from prunebench.board.reported import read_reported
from prunebench.loader import content_root, resolve_track
from prunebench.record import runs_under
from prunebench.run import read_track
from prunebench.run.arm import prepare
from prunebench.run.session import finished

ROOT = content_root()
RECORDS = ROOT / "leaderboard" / "records" / "tiny"


@pytest.fixture(scope="module")
def track():
    return read_track(resolve_track("tiny"))


def test_every_arm_of_the_track_has_its_run_and_no_other_run_is_there(track):
    folders = {str(path.relative_to(RECORDS)) for path in runs_under(RECORDS).runs}
    assert folders == {arm.folder for arm in track.arms}


def test_the_runs_are_those_that_the_track_asks_for_today(track):
    """A method, suite, model or calibration text that was changed asks for another run."""
    stale = [arm.folder for arm in track.arms if finished(prepare(arm), RECORDS) is None]
    assert stale == []


def test_the_records_leave_room_in_the_repository():
    assert sum(file.stat().st_size for file in RECORDS.rglob("*") if file.is_file()) < 20_000_000


def test_the_page_is_what_the_records_give(findings, tmp_path):
    findings.page.write_results(RECORDS, tmp_path / "results.md")
    assert (tmp_path / "results.md").read_text() == (ROOT / "docs" / "results.md").read_text()


def test_the_committed_board_is_what_the_records_give_byte_for_byte():
    board = build_board(RECORDS, track="tiny", families=ROOT / "leaderboard" / "families" / "tiny.toml")
    assert (len(board.table.rows), board.left_out) == (len(read_track(resolve_track("tiny")).arms), ())
    files = [ROOT / "README.md", ROOT / "leaderboard" / "README.md"]
    wanted = committed(board, ROOT / "leaderboard" / "boards" / "tiny.json", files, ROOT / "docs" / "methods")
    assert stale(wanted) == []


def test_the_full_track_and_what_papers_print_of_it_are_readable():
    track = read_track(resolve_track("full"))
    printed = read_reported(ROOT / "leaderboard" / "reported" / "full.toml")
    assert {arm.calibration.text for arm in track.arms} == {"hub:Zyphra/Zyda-2@main:text"}, (
        "a text that can be asked for"
    )
    assert {one.model for one in printed} <= {arm.model for arm in track.arms}
    names = {f"{arm.model}/{arm.folder.rpartition('/')[2]}" for arm in track.arms}
    assert {one.run for one in printed if one.run} <= names, "or nothing could be held against them"
    assert {one.suite for one in printed if one.run} <= {suite for arm in track.arms for suite in arm.suites}
    assert all(one.source for one in printed)
