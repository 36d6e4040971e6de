"""A grid checks all arms first, runs the open ones, says what became of each, and ends its workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from prunebench.errors import PrerequisiteError, PruneBenchError, UsageError
from prunebench.loader import content_root
from prunebench.record import comparable, read_run
from prunebench.run import Session, Track, grid
from prunebench.run import grid as grid_function
from prunebench.run.arm import prepare

grid_module = sys.modules[grid_function.__module__]


def track(*arms) -> Track:
    return Track("t", arms)


def records(out: Path) -> dict[str, dict]:
    return {str(p.parent.relative_to(out)): comparable(read_run(p.parent).record) for p in out.rglob("record.json")}


def test_open_arms_are_run_and_finished_ones_are_not(spec, tmp_path):
    arms = (spec(method=None, ratio=None), spec(), spec(operator="constant"))
    lines: list[str] = []
    first = grid(track(*arms[:2]), tmp_path, announce=lines.append)
    assert first.done == (arms[0].folder, arms[1].folder)
    assert (first.reused, first.failed) == ((), ())
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("record.json")}
    second = grid(track(*arms), tmp_path, announce=lines.append)
    assert second.done == (arms[2].folder,)
    assert second.reused == first.done
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert [line.split()[0] for line in lines] == ["done", "done", "have", "have", "done"]


def test_two_names_of_one_run_are_refused_before_anything_runs(spec, tmp_path):
    """Nothing of a random mask that is rerouted is calibrated, whatever the draw."""
    arms = [spec(method="random", operator="reroute", draw=draw) for draw in "AB"]
    with pytest.raises(UsageError, match=r"arm rand/random\S*-B is the same run as rand/random\S*-A"):
        grid(track(*arms), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_one_score_pass_serves_all_arms_on_a_model_text_and_draw(spec, tmp_path, jobs):
    fits = [spec(method="mone", operator="constant", **fit) for fit in ({}, {"fit_draw": "B"}, {"fit_draw": "C"})]
    arms = (
        spec(method=None, ratio=None),
        *fits,
        *(spec(method=name) for name in ("reap", "sge", "frequency", "random")),
    )
    result = grid(track(*arms), tmp_path, jobs=jobs)
    assert len(result.done) == len(arms)
    assert result.score_passes == 3
    assert grid(track(*arms), tmp_path, jobs=jobs).score_passes == 0


def test_one_impossible_arm_stops_a_grid_before_anything_runs(spec, tmp_path):
    for jobs in (1, 2):
        with pytest.raises(UsageError, match=r"prunes nothing; in arm rand/frequency-ratio0\.01"):
            grid(track(spec(), spec(ratio="0.01")), tmp_path / "out", jobs=jobs)
    assert not (tmp_path / "out").exists()


def test_a_grid_that_cannot_write_says_so_once(spec, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", Path("/proc/nope")):
        with pytest.raises(UsageError, match="cannot write there"):
            grid(track(spec(), spec(method="reap")), out, announce=pytest.fail)


def test_an_arm_that_fails_is_named_and_the_others_are_run(spec, material, tmp_path):
    bad = material.write_method(tmp_path, "raise ValueError('never')", name="bad")
    lines: list[str] = []
    result = grid(track(spec(method=bad), spec()), tmp_path / "out", announce=lines.append)
    assert result.done == (spec().folder,)
    ((folder, reason),) = result.failed
    assert folder == spec(method=bad).folder
    assert "ValueError in select: never" in reason
    assert len(lines) == 2
    assert lines[0].startswith(f"FAILED {folder}: ")


def test_an_occupied_folder_fails_its_own_arm_only(spec, tmp_path):
    Session(tmp_path).execute(prepare(spec(batch_tokens=512)))
    result = grid(track(spec(), spec(method="reap")), tmp_path)
    assert [folder for folder, _ in result.failed] == [spec().folder]
    assert "holds another run" in result.failed[0][1]
    assert result.done == (spec(method="reap").folder,)


@pytest.mark.parametrize("jobs", [0, -1])
def test_a_grid_needs_a_job(jobs, spec, tmp_path):
    with pytest.raises(UsageError, match=f"{jobs} jobs"):
        grid(track(spec()), tmp_path, jobs=jobs)


WORKER = """
import json, os, sys, time
how = {how!r}
for line in sys.stdin:
    arm = json.loads(line)
    if how == "dies" and arm["method"] == "reap":
        os._exit(3)
    if how == "hangs":
        time.sleep(600)
    print(json.dumps({{"error": "no"}} if how == "errs" else {{"seconds": "1"}}), flush=True)
"""


@pytest.fixture
def workers(monkeypatch, tmp_path):
    """Replaces worker processes by small scripts; the list of those started."""
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def use(how: str) -> list[subprocess.Popen[str]]:
        script = tmp_path / "worker.py"
        script.write_text(WORKER.format(how=how))

        def start(command, **options):
            process = popen([command[0], "-S", str(script)], **options)
            started.append(process)
            return process

        monkeypatch.setattr(grid_module.subprocess, "Popen", start)
        return started

    yield use
    for process in started:
        process.kill()
        process.wait()


def test_replies_of_workers_are_results_in_the_tracks_order(spec, tmp_path, workers):
    started = workers("works")
    arms = [spec(method=name) for name in ("reap", "sge", "mone", "random", "frequency")]
    result = grid(track(*arms), tmp_path / "out", jobs=2)
    assert result.done == tuple(arm.folder for arm in arms)
    assert len(started) == 2
    assert all(process.poll() == 0 for process in started)


def test_errors_of_workers_are_failures_of_their_arms(spec, tmp_path, workers):
    workers("errs")
    result = grid(track(spec(), spec(method="reap")), tmp_path / "out", jobs=2)
    assert dict(result.failed) == {spec().folder: "no", spec(method="reap").folder: "no"}


def test_a_worker_that_dies_loses_one_arm(spec, tmp_path, workers):
    started = workers("dies")
    arms = [spec(method=name) for name in ("sge", "reap", "mone", "frequency")]
    result = grid(track(*arms), tmp_path / "out", jobs=2)
    assert set(result.done) == {arm.folder for arm in arms if arm.method != "reap"}
    ((folder, reason),) = result.failed
    assert folder == spec(method="reap").folder
    assert reason == "the worker died with exit code 3"
    assert all(process.poll() is not None for process in started)


def test_a_worker_that_cannot_start_stops_the_grid(spec, tmp_path, monkeypatch):
    def start(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(grid_module.subprocess, "Popen", start)
    with pytest.raises(PrerequisiteError, match=r"cannot start a worker.*no more processes"):
        grid(track(spec(), spec(method="reap")), tmp_path / "out", jobs=2)


def test_an_interrupted_grid_ends_its_workers_at_once(spec, tmp_path, workers):
    started = workers("hangs")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background

    def interrupt() -> None:
        while len(started) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        grid(track(*(spec(method=name) for name in ("reap", "sge", "mone", "frequency"))), tmp_path / "out", jobs=2)
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 60
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_workers_and_one_process_give_the_same_records(spec, tmp_path, monkeypatch):
    # In a folder whose files have the names of standard modules: a worker must not see them.
    monkeypatch.chdir(content_root() / "methods")
    arms = (spec(method=None, ratio=None), spec(), spec(method="reap", operator="constant"))
    assert grid(track(*arms), tmp_path / "one").failed == ()
    two = grid(track(*arms), tmp_path / "two", jobs=2)
    assert two.failed == ()
    assert two.done == tuple(arm.folder for arm in arms)
    assert records(tmp_path / "one") == records(tmp_path / "two")
    for path in (tmp_path / "one").rglob("items.parquet"):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()


def test_a_worker_without_its_grid_ends(tmp_path):
    from prunebench.run import worker

    command = [sys.executable, "-m", worker.__name__, str(tmp_path), "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(timeout=300) != 0


def test_errors_keep_their_kind_when_an_arm_is_named(spec, tmp_path):
    with pytest.raises(PruneBenchError) as caught:
        grid(track(spec(model=str(tmp_path))), tmp_path / "out")
    assert type(caught.value) is UsageError
    assert caught.value.where.startswith("arm ")
