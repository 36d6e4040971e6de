"""Cases: a program that a model wrote, the task's own tests, and what became of them.

Each case is run by two boxes that talk over two pipes. The worker's has the program and receives inputs; the judge's
has the tests, the reference and the expected values, and sends us the verdict. Neither can reach the other but by
messages.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Self

from prunebench.errors import IntegrityError, PrerequisiteError
from prunebench.sandbox.box import Box, Process
from prunebench.sandbox.inside.judge import LARGEST_REQUEST
from prunebench.sandbox.inside.wire import Channel

__all__ = [
    "CANARY",
    "CPU_SECONDS",
    "MEMORY_BYTES",
    "WALL_SECONDS",
    "Case",
    "FailureKind",
    "Verdict",
    "failure_kind",
    "run_case",
    "run_cases",
    "usable_cores",
]

CPU_SECONDS = 3
"""Of a program, its tests' calls included: what lm-eval gives it in wall time."""
WALL_SECONDS = 60.0
"""Without CPU time to speak of: for programs that sleep."""
MEMORY_BYTES = 512 * 2**20
FILE_BYTES = 2**20

_JUDGE_CPU_SECONDS = 600
_JUDGE_WALL_SECONDS = 6000.0
_JUDGE_MEMORY_BYTES = 3 * 2**30
_STARTS = 3
# The limit on CPU time sends the first, and a second later the other. A program may send them to itself: it fails
# alike.
_LIMIT_SIGNALS = (-signal.SIGXCPU, -signal.SIGKILL)
_GRACE_SECONDS = 5.0
# Idle is who used less of the time that passed, and no more than a start takes; who dawdles is ended at last.
_IDLE_SHARE, _IDLE_SECONDS, _LONGEST_WAITS = 0.01, 0.05, 100

FailureKind = Literal["syntax error", "undefined name", "type error", "wrong answer", "other error", "timeout"]
_KINDS: Final[Mapping[str, FailureKind]] = {
    "SyntaxError": "syntax error",
    "IndentationError": "syntax error",
    "TabError": "syntax error",
    "NameError": "undefined name",
    "UnboundLocalError": "undefined name",
    "TypeError": "type error",
}


class Verdict(NamedTuple):
    """What became of a program: ok, wrong (an assertion failed), error or timeout; and why, in a few words."""

    state: Literal["ok", "wrong", "error", "timeout"]
    reason: str


def failure_kind(verdict: Verdict) -> FailureKind | None:
    """The kinds of failure of 2610.41366 App. A.7; None for a program that passed."""
    match verdict.state:
        case "ok":
            return None
        case "timeout":
            return "timeout"
        case "wrong":
            return "wrong answer"
        case "error":
            return _KINDS.get(verdict.reason.partition(":")[0], "other error")


@dataclass(frozen=True)
class Case:
    """One program and its tests.

    Args:
        name: for messages.
        program: what the model wrote; the only thing besides inputs that enters the worker's box.
        tests: Python that asserts; it runs in the judge's box.
        names: the tests' names for what they ask of the program, each with the program's own name for it.
        preamble: Python that runs before the tests in their namespace, before `names` take their places: a reference,
            helpers. It must not fail.
        data: more names for the tests, with plain values.
        followed_by: text without expected values that is compiled behind the program, and never run: syntax errors
            are then told as where tests are a program's last lines.
        cpu_seconds: of the program.
        cpu_factor: if above zero, the program may take this many times the preamble's CPU time in addition: that is
            where a reference is asked for the expected values.
        wall_seconds: for which a program may be idle: it sleeps, or has stopped itself.
        memory_bytes: of the program.
    """

    name: str
    program: str
    tests: str
    names: Mapping[str, str]
    preamble: str = ""
    data: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    followed_by: str = ""
    cpu_seconds: int = CPU_SECONDS
    cpu_factor: float = 0.0
    wall_seconds: float = WALL_SECONDS
    memory_bytes: int = MEMORY_BYTES


CANARY = Case("canary", "def double(x):\n    return 2 * x\n", "assert double(21) == 42", {"double": "double"})
"""A case that passes, whatever is evaluated."""


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_cases(
    cases: Sequence[Case],
    box: Box,
    *,
    canary: Case = CANARY,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Verdict]:
    """Run every case, and with them one that must pass and one that must not.

    Cases do not see each other, and what limits them is CPU time, so verdicts do not depend on `workers`. A case that
    timed out is run once more when all others are done, with nothing of ours beside it.

    Args:
        cases: in any order; verdicts come in theirs.
        box: where they run.
        canary: a case with a reference solution; run as it is, and with an empty program.
        workers: cases at a time; as many as there are cores by default.
        progress: called with (done, all).

    Raises:
        IntegrityError: if the reference solution fails or an empty program passes: nothing that was run can be
            believed.
        PrerequisiteError: if boxes cannot be started.
    """
    empty = replace(canary, name=f"{canary.name}, empty", program="")
    batch = [canary, empty, *cases]
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(workers or usable_cores(), thread_name_prefix="case") as pool:
        try:
            for done, verdict in enumerate(pool.map(lambda case: _run(case, box), batch), start=-1):
                verdicts.append(verdict)
                if progress is not None and done > 0:
                    progress(done, len(cases))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    verdicts = [_again(case, verdict, box) for case, verdict in zip(batch, verdicts, strict=True)]
    for case, verdict, wanted in ((canary, verdicts[0], True), (empty, verdicts[1], False)):
        if (verdict.state == "ok") is not wanted:
            raise IntegrityError(
                f"{'the reference solution failed' if wanted else 'an empty program passed'}: {verdict.state}",
                where=f"{case.name}, run in {box.name}",
                expected="a reference that passes and an empty program that does not",
                fix=verdict.reason or "look at the task's tests",
            )
    return verdicts[2:]


def run_case(case: Case, box: Box) -> Verdict:
    """Run one case, once more if it timed out. No canary: `run_cases([], box)` is one.

    Raises:
        IntegrityError: if the tests themselves cannot be run.
        PrerequisiteError: if boxes cannot be started.
    """
    return _again(case, _run(case, box), box)


def _again(case: Case, verdict: Verdict, box: Box) -> Verdict:
    """The verdict, or that of another try for a timeout: nothing of ours runs beside it now."""
    return _run(case, box) if verdict.state == "timeout" else verdict


def _run(case: Case, box: Box) -> Verdict:
    """One case in two boxes, both of which are gone when this returns; boxes that did not come up are tried again."""
    for _ in range(_STARTS):
        try:
            verdict = _in_two_boxes(case, box)
        except OSError as error:
            raise PrerequisiteError(
                "cannot start a process", where=f"{case.name}, {box.name}", fix=str(error)
            ) from error
        if verdict is not None:
            return verdict
    raise PrerequisiteError(
        "a program's process did not start", where=f"{case.name}, {box.name}", expected="memory and processes to spare"
    )


def _in_two_boxes(case: Case, box: Box) -> Verdict | None:
    """The verdict; None if the worker did not come up."""
    with _Pipes() as pipes:
        calls, replies, asked, said = pipes.open(), pipes.open(), pipes.open(), pipes.open()
        judge = box.start(
            f"judge.main({_JUDGE_CPU_SECONDS}, {_JUDGE_MEMORY_BYTES}, {calls.writing}, {replies.reading})",
            stdin=asked.reading,
            stdout=said.writing,
            keep_open=(calls.writing, replies.reading),
        )
        boxes = [judge]
        cpu_seconds = case.cpu_seconds
        try:
            judge.hold()
            pipes.close(calls.writing, replies.reading, asked.reading, said.writing)
            host = Channel(said.reading, asked.writing, LARGEST_REQUEST)
            with contextlib.suppress(BrokenPipeError):  # it has ended already: its silence says so
                host.send(_request(case))
            word = _word_from(host, said.reading, _JUDGE_WALL_SECONDS)
            if word.state == "prepared":
                cpu_seconds += math.ceil(case.cpu_factor * float(word.reason))
                limits = f"{cpu_seconds}, {case.memory_bytes}, {FILE_BYTES}"
                worker = box.start(f"worker.main({limits})", stdin=calls.reading, stdout=replies.writing)
                boxes.append(worker)
                worker.hold()
                pipes.close(calls.reading, replies.writing)
                word = _word_or_idle(host, said.reading, case.wall_seconds, boxes)
                if word.state == "died":
                    worker.wait_to_end(_GRACE_SECONDS)
        finally:
            for process in boxes:
                process.kill()
            codes = [process.wait() for process in boxes]
    return _judged(word, codes, cpu_seconds, case)


def _judged(word: _Word, codes: Sequence[int], cpu_seconds: int, case: Case) -> Verdict | None:
    """What the judge's word, or its silence, and the ends of both boxes (the judge's, the worker's) amount to."""
    match word.state:
        case "ok" | "wrong" | "error":
            # What a program says need be no text, and addresses differ from run to run.
            reason = word.reason.encode(errors="replace").decode()
            return Verdict(word.state, re.sub("0x[0-9a-f]+", "0x…", reason))
        case "unready":
            return None
        case "broken":
            raise IntegrityError("a task's own tests cannot be run", where=case.name, fix=word.reason)
        case "late":
            return Verdict("timeout", f"idle for {case.wall_seconds:g} s")
        case "died" if codes[1] in _LIMIT_SIGNALS:
            return Verdict("timeout", f"used {cpu_seconds} s of CPU time")
        case "died":
            return Verdict("error", f"the process ended with code {codes[1]} before the tests did")
    if len(codes) == 1:
        raise IntegrityError(
            f"the tests' process ended with code {codes[0]} before the program's began",
            where=case.name,
            expected=f"a reference that takes at most {_JUDGE_CPU_SECONDS} s and {_JUDGE_MEMORY_BYTES} bytes",
        )
    return Verdict("error", f"the tests' process ended with code {codes[0]}")


class _Word(NamedTuple):
    """What the judge says: `prepared` (reason: the preamble's CPU seconds), or a verdict or what stands in its way."""

    state: str
    reason: str


def _word_or_idle(host: Channel, number: int, seconds: float, boxes: Sequence[Process]) -> _Word:
    """The judge's next word; `late` if it and the program have been idle for `seconds`.

    A machine may be so busy that a right program takes minutes. As long as it gets any CPU time worth the name, the
    limit on that is what ends it.
    """
    used = 0.0
    for _ in range(_LONGEST_WAITS):
        word = _word_from(host, number, seconds)
        if word.state != "late":
            return word
        before, used = used, sum(process.cpu_seconds() for process in boxes)
        if used - before < max(_IDLE_SHARE * seconds, _IDLE_SECONDS):
            break
    return word


def _word_from(host: Channel, number: int, seconds: float) -> _Word:
    """The judge's next word; `late` if there is none in time, and `silent` if it ended without one."""
    if not select.select([number], [], [], seconds)[0]:
        return _Word("late", "")
    try:
        told = host.receive()
    except EOFError:
        return _Word("silent", "")
    return _Word(str(told["state"]), str(told["reason"]))


def _request(case: Case) -> dict[str, Any]:
    return {
        "program": case.program.encode(errors="replace").decode(),  # a lone surrogate is no source code
        "followed_by": case.followed_by,
        "tests": case.tests,
        "preamble": case.preamble,
        "names": dict(case.names),
        "data": dict(case.data),
    }


class _Pipe(NamedTuple):
    reading: int
    writing: int


class _Pipes:
    """Pipes of one case; whatever is still open is closed at the end."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(*self._open)

    def open(self) -> _Pipe:
        pipe = _Pipe(*os.pipe())
        self._open.update(pipe)
        return pipe

    def close(self, *numbers: int) -> None:
        for number in numbers:
            self._open.remove(number)
            os.close(number)
