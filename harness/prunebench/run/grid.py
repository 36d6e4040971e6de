"""Running a track: all arms are checked first, and finished ones are never repeated.

A kill at any moment loses at most the arms in progress. With `jobs` > 1 each job is a worker process that holds its own
model and takes one arm after another; workers share score passes through the records folder, and end when this process
does, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import prunebench
from prunebench.errors import PrerequisiteError, PruneBenchError, UsageError
from prunebench.mask import canonical_json
from prunebench.run.arm import PreparedArm, prepare
from prunebench.run.session import Progress, Session, check_writable, finished
from prunebench.run.spec import ArmSpec
from prunebench.run.track import Track

__all__ = ["GridResult", "grid", "prepare_all"]

# With -P and -c instead of -m: the folder that one happens to be in is not on the worker's path. `methods/` has a
# random.py, `suites/` a code.py.
_WORKER = f"""
import sys
sys.path.append({str(Path(prunebench.__file__).parent.parent)!r})
from prunebench.run.worker import main
main()
"""

Announce = Callable[[str], None]


@dataclass(frozen=True)
class GridResult:
    """What a grid did.

    Args:
        done: folders of arms run now.
        reused: folders of arms that were finished before.
        failed: (folder, one-line reason) of arms that could not be run.
        score_passes: calibration passes that were run now, over all workers.
    """

    done: tuple[str, ...]
    reused: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    score_passes: int


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
        UsageError: if any arm is impossible, or nothing can be written; nothing has been run then.
    """
    if jobs < 1:
        raise UsageError(f"{jobs} jobs", expected="at least 1")
    say = announce or (lambda _line: None)
    prepared = prepare_all(track)
    check_writable(out)
    reused = tuple(arm.spec.folder for arm in prepared if finished(arm, out) is not None)
    open_arms = [arm for arm in prepared if arm.spec.folder not in reused]
    for folder in reused:
        say(f"have {folder}")
    runner = _run_here if jobs == 1 else _run_in_workers
    results, score_passes = runner(open_arms, out, min(jobs, max(1, len(open_arms))), say, progress)
    return GridResult(
        tuple(folder for folder, reason in results if reason is None),
        reused,
        tuple((folder, reason) for folder, reason in results if reason is not None),
        score_passes,
    )


def prepare_all(track: Track) -> list[PreparedArm]:
    """Every arm of a track, checked.

    Raises:
        UsageError: if any is impossible, or two are one run.
    """
    prepared = [_prepare(spec) for spec in track.arms]
    _check_distinct(prepared)
    return prepared


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


def _check_distinct(arms: Sequence[PreparedArm]) -> None:
    """Refuse arms of different names that would be one run: a draw, say, that nothing is calibrated on."""
    first: dict[str, str] = {}
    for arm in arms:
        other = first.setdefault(canonical_json(arm.known), arm.spec.folder)
        if other != arm.spec.folder:
            raise UsageError(
                f"arm {arm.spec.folder} is the same run as {other}",
                expected="arms that differ in something that can change a number",
                fix="leave one out",
            )


Results = list[tuple[str, str | None]]


def _run_here(
    arms: Sequence[PreparedArm], out: Path, jobs: int, say: Announce, progress: Progress | None
) -> tuple[Results, int]:
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
    return results, session.score_passes


def _run_in_workers(
    arms: Sequence[PreparedArm], out: Path, jobs: int, say: Announce, progress: Progress | None
) -> tuple[Results, int]:
    del progress
    waiting: queue.SimpleQueue[PreparedArm] = queue.SimpleQueue()
    for arm in arms:
        waiting.put(arm)
    crew, tally = _Crew(out), _Tally(say)

    def serve() -> None:
        worker: subprocess.Popen[str] | None = None
        while not crew.dismissed.is_set():
            try:
                arm = waiting.get_nowait()
            except queue.Empty:
                break
            worker = worker or crew.hire()
            reply = _ask(worker, arm.spec)
            if crew.dismissed.is_set():
                break
            if reply is None:
                reply = {"error": crew.end(worker)}
                worker = None
            tally.take(arm.spec.folder, reply)
        if worker is not None:
            crew.end(worker)

    with ThreadPoolExecutor(jobs, thread_name_prefix="job") as pool:
        try:
            for job in [pool.submit(serve) for _ in range(jobs)]:
                job.result()
        except BaseException:
            crew.dismiss()
            raise
    order = [arm.spec.folder for arm in arms]
    return sorted(tally.results, key=lambda result: order.index(result[0])), tally.score_passes


class _Tally:
    """What workers have replied so far, over all threads."""

    def __init__(self, say: Announce) -> None:
        self.results: Results = []
        self.score_passes = 0
        self._say = say
        self._lock = threading.Lock()

    def take(self, folder: str, reply: Mapping[str, str]) -> None:
        """Count a reply and say it."""
        reason = reply.get("error")
        with self._lock:
            self.results.append((folder, reason))
            self.score_passes += int(reply.get("score_passes", 0))
            self._say(f"FAILED {folder}: {reason}" if reason else f"done {folder} in {float(reply['seconds']):.1f} s")


class _Crew:
    """The workers that are alive, so that an interrupted grid can send all of them home."""

    def __init__(self, out: Path) -> None:
        self.dismissed = threading.Event()
        self._out = out
        self._alive: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()

    def hire(self) -> subprocess.Popen[str]:
        """A process that takes arms from its standard input until that is closed, which it also is if we are killed."""
        with self._lock:
            if self.dismissed.is_set():
                raise UsageError("the grid was interrupted")
            try:
                worker = subprocess.Popen(
                    [sys.executable, "-P", "-c", _WORKER, str(self._out), str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    # A group of its own: Ctrl-C is for us, and we tell the workers.
                    process_group=0,
                )
            except OSError as error:
                raise PrerequisiteError("cannot start a worker", where=sys.executable, fix=str(error)) from error
            self._alive.add(worker)
        return worker

    def end(self, worker: subprocess.Popen[str]) -> str:
        """Close a worker's input, wait for its end and say how it ended."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()
        code = worker.wait()
        worker.stdout.close()
        with self._lock:
            self._alive.discard(worker)
        if code < 0:
            return f"the worker was killed by signal {-code} (9 may mean: out of memory)"
        return f"the worker died with exit code {code}"

    def dismiss(self) -> None:
        """Kill all; what they had not written is lost."""
        with self._lock:
            self.dismissed.set()
            for worker in self._alive:
                worker.kill()


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
