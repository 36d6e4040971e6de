"""Running a track: all arms are checked first, and finished ones are never repeated.

A kill at any moment loses at most the arms in progress. With `jobs` > 1 each job is a worker process that holds its own
model and takes one arm after another; workers share score passes through the records folder, and end when this process
does, however it ends.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prunebench.errors import PrerequisiteError, PruneBenchError, UsageError
from prunebench.run.arm import ArmSpec, PreparedArm, prepare
from prunebench.run.session import Progress, Session, finished
from prunebench.run.track import Track

__all__ = ["GridResult", "grid"]

Announce = Callable[[str], None]


@dataclass(frozen=True)
class GridResult:
    """What a grid did.

    Args:
        done: folders of arms run now.
        reused: folders of arms that were finished before.
        failed: (folder, one-line reason) of arms that could not be run.
    """

    done: tuple[str, ...]
    reused: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]


def grid(
    track: Track,
    out: Path,
    *,
    jobs: int = 1,
    announce: Announce | None = None,
    progress: Progress | None = None,
) -> GridResult:
    """Run every arm of a track that is not finished.

    Args:
        track: the arms.
        out: records folder.
        jobs: worker processes; 1 runs in this process.
        announce: called with one line per arm that ends.
        progress: called with (what, done, total) inside an arm, where jobs is 1.

    Raises:
        UsageError: if any arm is impossible; nothing has been run then.
    """
    if jobs < 1:
        raise UsageError(f"{jobs} jobs", expected="at least 1")
    say = announce or (lambda _line: None)
    prepared = [_prepare(spec) for spec in track.arms]
    reused = tuple(arm.spec.folder for arm in prepared if finished(arm, out) is not None)
    open_arms = [arm for arm in prepared if arm.spec.folder not in reused]
    for folder in reused:
        say(f"have {folder}")
    runner = _run_here if jobs == 1 else _run_in_workers
    results = runner(open_arms, out, min(jobs, max(1, len(open_arms))), say, progress)
    return GridResult(
        tuple(folder for folder, reason in results if reason is None),
        reused,
        tuple((folder, reason) for folder, reason in results if reason is not None),
    )


def _prepare(spec: ArmSpec) -> PreparedArm:
    try:
        return prepare(spec)
    except PruneBenchError as error:
        raise type(error)(
            error.what,
            where=f"arm {spec.folder}" + (f", {error.where}" if error.where else ""),
            expected=error.expected,
            fix=error.fix,
        ) from error


Results = list[tuple[str, str | None]]


def _run_here(arms: Sequence[PreparedArm], out: Path, jobs: int, say: Announce, progress: Progress | None) -> Results:
    del jobs
    session = Session(out, progress=progress)
    results: Results = []
    for arm in arms:
        try:
            outcome = session.execute(arm)
        except PruneBenchError as error:
            results.append((arm.spec.folder, str(error)))
            say(f"FAILED {arm.spec.folder}: {error}")
            continue
        results.append((arm.spec.folder, None))
        say(f"done {arm.spec.folder} in {outcome.run.record['volatile']['seconds']:.1f} s")
    return results


def _run_in_workers(
    arms: Sequence[PreparedArm], out: Path, jobs: int, say: Announce, progress: Progress | None
) -> Results:
    del progress
    waiting: queue.SimpleQueue[PreparedArm] = queue.SimpleQueue()
    for arm in arms:
        waiting.put(arm)
    results: Results = []
    lock = threading.Lock()

    def end(folder: str, reason: str | None, line: str) -> None:
        with lock:
            results.append((folder, reason))
            say(line)

    def serve() -> None:
        worker: subprocess.Popen[str] | None = None
        try:
            while True:
                try:
                    arm = waiting.get_nowait()
                except queue.Empty:
                    return
                if worker is None:
                    worker = _start_worker(out)
                reply = _ask(worker, arm.spec)
                folder = arm.spec.folder
                if reply is None:
                    end(folder, "the worker died", f"FAILED {folder}: the worker died (out of memory?)")
                    worker = None
                elif "error" in reply:
                    end(folder, reply["error"], f"FAILED {folder}: {reply['error']}")
                else:
                    end(folder, None, f"done {folder} in {float(reply['seconds']):.1f} s")
        finally:
            if worker is not None:
                assert worker.stdin is not None
                worker.stdin.close()
                worker.wait()

    threads = [threading.Thread(target=serve, name=f"job {number}") for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(results, key=lambda result: [arm.spec.folder for arm in arms].index(result[0]))


def _start_worker(out: Path) -> subprocess.Popen[str]:
    """A process that takes arms from its standard input until that is closed, which it also is if we are killed."""
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "prunebench.run.worker", str(out)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise PrerequisiteError("cannot start a worker", where=sys.executable, fix=str(error)) from error


def _ask(worker: subprocess.Popen[str], spec: ArmSpec) -> dict[str, str] | None:
    """Send an arm and wait for its end; None if the worker died."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(spec.to_json()) + "\n")
        worker.stdin.flush()
    except BrokenPipeError:
        return None
    line = worker.stdout.readline()
    return json.loads(line) if line.endswith("\n") else None
