"""A method's checks in a process of their own: one that ends, kills or hangs its process loses that one only.

`prunebench check` asks here, so that it has something to say of every method; `check_method` runs where it is called.
One process serves all methods until one of them ends it. Run as a module, this is that process: it reads jobs from
standard input, one JSON text a line, and answers each by lines, the last of which says how it ended.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import prunebench
from prunebench.conformance.registry import CHECKS
from prunebench.conformance.result import Fault, Report, Result
from prunebench.conformance.runner import judged, known, report_of, told
from prunebench.errors import PrerequisiteError, PruneBenchError, UsageError
from prunebench.loader import load_method, load_method_class, source_of
from prunebench.method import Method
from prunebench.parameters import parse_parameters

__all__ = ["report_apart", "try_loading"]

# How long a check may take without a word; the slowest of an honest method takes seconds.
_PATIENCE = 300.0


class _Ended(Exception):  # noqa: N818  it is caught here
    """The process is gone; the text says how."""


def try_loading(name: str, parameters: Sequence[str] = (), *, patience: float = _PATIENCE) -> None:
    """Load a method where it can do no harm, before it is loaded here.

    Args:
        name: or path.
        parameters: each NAME=VALUE.
        patience: seconds.

    Raises:
        UsageError: as `load_method`; or its file ends or hangs the process that imports it.
    """
    job = {"method": name, "parameters": list(parameters), "load": True}
    try:
        for _ in _answers(job, patience):
            pass
    except _Ended as how:
        raise UsageError(
            f"the file cannot be loaded: it {how}",
            where=name,
            expected="a file that defines things, and goes on",
            fix="move what it does into the verbs, or leave it out",
        ) from how


def report_apart(
    name: str,
    method: Method,
    parameters: Sequence[str] = (),
    *,
    expected_failures: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    progress: Callable[[str, int, int], None] | None = None,
    patience: float = _PATIENCE,
) -> Report:
    """As `report_of`; a check during which the process ends or hangs has failed, and those behind it are not run.

    Args:
        name: or path.
        method: the same, loaded here, which is asked for its parameters only.
        parameters: each NAME=VALUE.
        expected_failures: check -> why it is right that it fails.
        only: names of checks; by default all.
        progress: called with (check, done, total).
        patience: seconds that a check may take.

    Raises:
        UsageError: as `report_of`.
    """
    expected = dict(expected_failures or {})
    job = {"method": name, "parameters": list(parameters), "expected": expected, "only": list(only)}
    results: list[Result] = []
    names, doing = known(only) or list(CHECKS), ""
    try:
        for line in _answers(job, patience):
            if "result" in line:
                results.append(Result(**line["result"]))
            else:
                doing = line["check"]
                if progress is not None:
                    progress(doing, len(results), len(names))
    except _Ended as how:
        fault = Fault(
            f"it {how}",
            where=f"{doing}, or a check that it builds on",
            expected="verbs, statistics and fills that return, or raise an error",
            fix="leave out what ends, kills, stops or blocks the process; loops need a bound",
        )
        ended = Result(doing, CHECKS[doing].group, "failed", told(method, CHECKS[doing], fault))
        rest = [
            Result(one, CHECKS[one].group, "not run", f"the process ended in {doing}")
            for one in names[len(results) + 1 :]
        ]
        results += [judged(one, expected) for one in (ended, *rest)]
    source = source_of(type(method))
    return Report(str(method.name), source.path.name, source.sha256, method.parameters(), tuple(results))


# --- from outside


_processes: list[subprocess.Popen[bytes]] = []


def _process() -> subprocess.Popen[bytes]:
    if not _processes:
        roots = [str(Path(prunebench.__file__).parents[1]), *filter(None, sys.path)]
        process = subprocess.Popen(
            [sys.executable, "-m", "prunebench.conformance.apart"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(roots))},
            bufsize=0,  # what is read ahead would not be waited for
            start_new_session=True,  # Ctrl-C is for the command, which ends this one
        )
        _processes.append(process)
        atexit.register(_end, process)
    return _processes[0]


def _end(process: subprocess.Popen[bytes]) -> int:
    """End it, if it has not ended; its exit status."""
    atexit.unregister(_end)
    _processes.clear()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    try:
        return process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _answers(job: Mapping[str, Any], patience: float) -> Iterator[dict[str, Any]]:
    """What the process says of a job, but for its last line.

    Raises:
        UsageError: or another of ours, that was raised there.
        _Ended: it is gone.
    """
    process = _process()
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps({**job, "folder": os.getcwd()}).encode() + b"\n")  # noqa: PTH109  as text
    for text in _lines(process, patience):
        line: dict[str, Any] = json.loads(text)
        if "refused" in line:
            raise {2: UsageError, 3: PrerequisiteError}.get(line["code"], PruneBenchError)(line["refused"])
        if "done" in line:
            return
        yield line


def _lines(process: subprocess.Popen[bytes], patience: float) -> Iterator[bytes]:
    """Line by line, until it is gone or says nothing for too long."""
    assert process.stdout is not None
    rest = b""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], patience)
        part = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        if not part:
            status = _end(process)
            raise _Ended(_how(status) if ready else f"has not come back after {patience:g} s")
        *whole, rest = (rest + part).split(b"\n")
        yield from whole


def _how(status: int) -> str:
    if status >= 0:
        return f"ends the process, with exit status {status}"
    return f"kills the process ({signal.Signals(-status).name})"


# --- from inside


def _serve(jobs: IO[str], say: Callable[[Mapping[str, Any]], None]) -> None:
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def receive() -> None:
        for line in jobs:
            waiting.put(line)
        os._exit(0)  # who asked has gone, whatever a method is doing

    threading.Thread(target=receive, daemon=True).start()
    while True:
        job = json.loads(waiting.get())
        os.chdir(job["folder"])
        try:
            _do(job, say)
        except PruneBenchError as error:
            say({"refused": str(error), "code": error.exit_code})
        except BaseException as error:  # noqa: BLE001  Ctrl-C does not come here, so whatever it is, it is the method's
            text = f"the file cannot be loaded: {type(error).__name__}: {error}".rstrip(": ")
            expected = "definitions, or a UsageError of one line"
            refusal = UsageError(text, where=job["method"], expected=expected, fix="raise in the verbs")
            say({"refused": str(refusal), "code": refusal.exit_code})
        else:
            say({"done": True})


def _do(job: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]) -> None:
    kind = load_method_class(job["method"])
    method = load_method(job["method"], parse_parameters(kind, job["parameters"]))
    if "load" in job:
        return
    report_of(
        method,
        expected_failures=job["expected"],
        only=job["only"],
        progress=lambda check, _done, _total: say({"check": check}),
        found=lambda result: say({"result": asdict(result)}),
    )


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What a method prints must not reach the answers, and what it reads not be its jobs.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def say(line: Mapping[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    from prunebench.moe import quiet_libraries

    quiet_libraries()
    _serve(jobs, say)


if __name__ == "__main__":
    _main()
