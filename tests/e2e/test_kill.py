"""SIGKILL of a grid at any moment, then again: the records of an uninterrupted grid, and no finished arm repeated."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prunebench import cli
from prunebench.record import comparable, read_run, runs_under

MASKS, OPERATORS = ("mone", "random"), ("constant", "reroute@trained", "reroute@other")
ARMS = 1 + len(MASKS) * len(OPERATORS)


@pytest.fixture(scope="module")
def track(request, tmp_path_factory) -> Path:
    model, suite = request.getfixturevalue("model"), request.getfixturevalue("suite")
    file = tmp_path_factory.mktemp("track") / "t.toml"
    file.write_text(
        f'[track]\nname = "t"\nmodels = ["{model}"]\nratios = ["0.5"]\nmasks = {json.dumps(MASKS)}\n'
        f'operators = {json.dumps(OPERATORS)}\nsuites = ["{suite}"]\ncalibration = {{ blocks = 8, length = 32 }}\n'
    )
    return file


@pytest.fixture(scope="module")
def whole(track, tmp_path_factory) -> dict[str, tuple[dict, bytes]]:
    """What an uninterrupted grid makes, in this process."""
    out = tmp_path_factory.mktemp("whole")
    assert cli.main(["grid", str(track), "--out", str(out)]) == 0
    return contents(out)


def contents(out: Path) -> dict[str, tuple[dict, bytes]]:
    runs = {str(path.relative_to(out)): read_run(path) for path in runs_under(out).runs}
    return {name: (comparable(r.record), (r.path / "items.parquet").read_bytes()) for name, r in runs.items()}


def start(track: Path, out: Path, jobs: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "prunebench.cli", "grid", str(track), "--out", str(out), "--jobs", str(jobs)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def children(process: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process:
            found.append(int(stat.parent.name))
    return found


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_when(process: subprocess.Popen[str], out: Path, finished: int, moment: float) -> None:
    """SIGKILL the grid a moment after so many runs are there; its workers must end soon."""
    while len(list(out.glob("*/*/record.json"))) < finished and process.poll() is None:
        time.sleep(0.005)
    time.sleep(moment)
    workers = children(process.pid)
    process.kill()
    process.communicate()
    ends = time.monotonic() + 30
    while any(map(alive, workers)):
        assert time.monotonic() < ends, "a worker outlived its grid"
        time.sleep(0.05)


def kill_and_go_on(track: Path, out: Path, jobs: int, kills: list[tuple[int, float]]) -> None:
    """Kill a grid again and again, then let it end in this process; each finished run must stay as it was written."""
    written: dict[Path, int] = {}
    for finished, moment in kills:
        kill_when(start(track, out, jobs), out, finished, moment)
        listing = runs_under(out)
        assert not [entry for entry in listing.left_out if entry.path.name != "rand"]
        for path, time_ns in written.items():
            assert path.stat().st_mtime_ns == time_ns, f"{path} was written again"
        written |= {run / "record.json": (run / "record.json").stat().st_mtime_ns for run in listing.runs}
    assert cli.main(["grid", str(track), "--out", str(out), "--jobs", str(jobs)]) == 0
    for path, time_ns in written.items():
        assert path.stat().st_mtime_ns == time_ns, f"{path} was written again"
    assert not [path for path in out.glob("*/.*") if path.suffix in {".tmp", ".old"}]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL") or not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_killed_grid_goes_on_where_it_was(track, whole, tmp_path, capfd):
    kill_and_go_on(track, tmp_path, 1, [(3, random.Random(7).uniform(0, 0.3))])
    assert contents(tmp_path) == whole
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("have ")]) >= 3
    assert len([line for line in lines if line.startswith(("have ", "done "))]) == ARMS


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_a_grid_killed_at_random_moments_ends_as_if_it_had_not_been(jobs, seed, track, whole, tmp_path):
    draw = random.Random(seed)
    kills = [(0, draw.uniform(0, 8)), (draw.randrange(1, 4), draw.uniform(0, 1)), (5, draw.uniform(0, 0.5))]
    kill_and_go_on(track, tmp_path, jobs, kills)
    assert contents(tmp_path) == whole


@pytest.mark.slow
def test_workers_of_a_killed_grid_end_within_seconds_and_block_nothing(track, whole, tmp_path):
    kill_and_go_on(track, tmp_path, 2, [(1, 0.1)])
    assert contents(tmp_path) == whole


def test_an_interrupted_grid_says_so_in_one_line_and_keeps_what_was_finished(track, whole, tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    process = start(track, tmp_path, 1)
    signal.signal(signal.SIGINT, before)
    while len(list(tmp_path.glob("*/*/record.json"))) < 1 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "prunebench grid: interrupted; finished runs are kept"
    assert contents(tmp_path).items() <= whole.items()


@pytest.mark.slow
def test_two_grids_at_once_on_one_folder_end_with_the_same_records(track, whole, tmp_path):
    both = [start(track, tmp_path, 1) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    assert contents(tmp_path) == whole
