"""A night can be killed, run out of disk or be started twice: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prunebench import cli
from prunebench.record import comparable, read_run, runs_under
from prunebench.run.nightly import LOCK, alone

ARMS = ["rand/dense", "rand/reap-keep8-constant-A", "rand/reap-keep8-zero-A"]


@pytest.fixture(scope="module")
def track(request, tmp_path_factory) -> Path:
    model, suite = request.getfixturevalue("model"), request.getfixturevalue("suite")
    file = tmp_path_factory.mktemp("track") / "tracks" / "t.toml"
    file.parent.mkdir()
    file.write_text(
        f'[track]\nname = "t"\nmodels = ["{model}"]\nkeep = [8]\nmasks = ["reap"]\noperators = ["zero", "constant"]\n'
        f'suites = ["{suite}"]\ncalibration = {{ blocks = 8, length = 32 }}\n'
    )
    return file


def night(track, folder, capsys=None):
    arguments = ["nightly", str(track), "--out", str(folder / "records"), "--board", str(folder / "board"), "--json"]
    if capsys is None:
        return [sys.executable, "-m", "prunebench.cli", *arguments]
    capsys.readouterr()
    code = cli.main(arguments)
    output = capsys.readouterr()
    return code, json.loads(output.out) if output.out else output.err


def contents(folder):
    records = folder / "records"
    runs = {str(path.relative_to(records)): comparable(read_run(path).record) for path in runs_under(records).runs}
    files = {str(path.relative_to(folder / "board")) for path in (folder / "board").rglob("*") if path.is_file()}
    return runs, files, (folder / "board" / "board.json").read_bytes()


@pytest.fixture(scope="module")
def whole(track, tmp_path_factory):
    """What an undisturbed night leaves."""
    folder = tmp_path_factory.mktemp("whole")
    subprocess.run(night(track, folder), check=True, capture_output=True)
    return folder


def test_nights_run_what_is_missing_and_say_what_changed(track, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    code, said = night(track, tmp_path, capsys)
    assert (code, said["done"], sorted(said["reused"]), said["findings"]) == (0, [], ARMS, [])
    assert "Nothing changed." in (tmp_path / "board" / "changes.md").read_text()
    before = contents(tmp_path)

    record = tmp_path / "records" / ARMS[1] / "record.json"
    honest = record.read_text()
    data = json.loads(honest)
    data["integrity"][0]["status"] = "fail"
    record.write_text(json.dumps(data))
    code, said = night(track, tmp_path, capsys)
    assert code == 1
    assert {one["rule"] for one in said["findings"]} == {"seal", "integrity"}
    assert said["rows"] is None
    assert (tmp_path / "board" / "board.json").read_bytes() == before[2], "the last board stays"

    for name in ("record.json", "items.parquet"):
        (tmp_path / "records" / ARMS[1] / name).unlink()
    code, said = night(track, tmp_path, capsys)
    assert (code, said["done"]) == (0, [ARMS[1]])
    assert contents(tmp_path) == before


def test_a_clock_that_was_wrong_is_reported_and_stops_no_board(track, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    record = tmp_path / "records" / ARMS[1] / "record.json"
    data = json.loads(record.read_text())
    data["volatile"]["started"] = "2031-01-01T00:00:00+00:00"
    record.write_text(json.dumps(data))
    code, said = night(track, tmp_path, capsys)
    assert code == 1
    assert [one["rule"] for one in said["findings"]] == ["date"]
    assert said["rows"] == len(ARMS)


def test_two_at_once_are_one(track, tmp_path, capsys):
    with alone(tmp_path / "records"):
        code, said = night(track, tmp_path, capsys)
    assert code == 3
    assert "another night is at work" in said
    assert sorted(path.name for path in (tmp_path / "records").iterdir()) == [LOCK]


def test_a_full_disk_is_one_line_and_the_next_night_goes_on(track, whole, tmp_path):
    """A limit of file sizes fails as a full disk does, at the first page that is too long."""

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, 14_000))

    shutil.copytree(whole / "records", tmp_path / "records")
    done = subprocess.run(night(track, tmp_path), preexec_fn=limited, check=False, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "cannot write" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "board" / "board.json").exists()
    subprocess.run(night(track, tmp_path), check=True, capture_output=True)
    assert contents(tmp_path) == contents(whole)


def kill_at(track, folder, moments):
    for moment in moments:
        process = subprocess.Popen(night(track, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moment)
        process.kill()
        process.wait()
    subprocess.run(night(track, folder), check=True, capture_output=True)


def check_killed(folder, whole):
    assert contents(folder) == contents(whole)


def test_a_killed_night_is_made_up_for_by_the_next(track, whole, tmp_path):
    kill_at(track, tmp_path, [random.Random(1).uniform(2, 6)])
    check_killed(tmp_path, whole)


@pytest.mark.slow
def test_ten_killed_nights_lose_and_double_nothing(track, whole, tmp_path):
    chance = random.Random(0)
    kill_at(track, tmp_path, [chance.uniform(0.5, 12) for _ in range(10)])
    check_killed(tmp_path, whole)
