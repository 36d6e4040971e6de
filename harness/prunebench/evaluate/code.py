"""Running a generated program with its tests, in a process of its own, with limits. This is NOT a sandbox.

Covered: CPU time, wall time, memory, file size and output are bounded; the program starts in an empty temporary folder,
with an empty input, a fixed environment and the standard library only; leaving early does not count as passing, since
only the runner, after the last test, sends a word drawn for this run.

Not covered: the program runs with the caller's rights. It can read the user's files, write outside its folder, open
sockets, start processes that outlive their group, and a hostile one can find the word and forge a pass. Run only models
that you would let write a script for you.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
from typing import Literal, NamedTuple

__all__ = ["Verdict", "run_program"]

CPU_SECONDS = 2
WALL_SECONDS = 60.0
MEMORY_BYTES = 512 * 2**20
FILE_BYTES = 2**20

# The runner moves its report away from stdout, drops the program's output, and reports the word or what went wrong.
_RUNNER = f"""
import os, resource, sys
for limit, value in (("AS", {MEMORY_BYTES}), ("FSIZE", {FILE_BYTES}), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
seconds = int(sys.argv.pop())
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
word, _, program = sys.stdin.read().partition("\\n")
report, empty = os.dup(1), os.open(os.devnull, os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(empty, number)
try:
    exec(compile(program, "program.py", "exec"), {{"__name__": "program"}})
    result = word
except BaseException as error:
    result = type(error).__name__ + ": " + str(error)[:200]
os.write(report, result.encode(errors="replace"))
os._exit(0)
"""


class Verdict(NamedTuple):
    """What became of a program: ok, wrong (an assertion failed), error or timeout; and why, in a few words."""

    state: Literal["ok", "wrong", "error", "timeout"]
    reason: str


def run_program(program: str, *, cpu_seconds: int = CPU_SECONDS, wall_seconds: float = WALL_SECONDS) -> Verdict:
    """Run `program`, which holds its tests, and say whether it reached its end.

    Args:
        program: Python source.
        cpu_seconds: the limit that binds, so that a verdict does not depend on the machine's load.
        wall_seconds: a generous limit for programs that sleep.

    Raises:
        OSError: if no process or temporary folder can be made.
    """
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="prunebench-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-c", _RUNNER, str(cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            # As -I, but with a fixed hash seed, which -I would ignore: the same program gives the same verdict.
            env={"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
        )
        try:
            said = _exchange(process, f"{word}\n{program}".encode(errors="replace"), wall_seconds)
            code = process.wait(timeout=wall_seconds)
        except subprocess.TimeoutExpired:
            return Verdict("timeout", f"still running after {wall_seconds:g} s")
        finally:
            _end_group(process)
    if code == 0 and said == word:
        return Verdict("ok", "")
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return Verdict("timeout", f"used {cpu_seconds} s of CPU time")
    if code != 0 or not said:
        return Verdict("error", f"the process ended with code {code} before the tests did")
    # Addresses differ from run to run; equal programs shall have equal verdicts.
    reason = re.sub("0x[0-9a-f]+", "0x…", said.replace(word, "…"))
    return Verdict("wrong" if said.startswith("AssertionError") else "error", reason)


def _exchange(process: subprocess.Popen[bytes], message: bytes, seconds: float) -> str:
    """Send the runner its message and wait for its one report ("" if it died), of at most 4,096 bytes."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout as reports:
        with contextlib.suppress(BrokenPipeError), process.stdin as messages:
            messages.write(message)
        # Not communicate(): it reads without bound, and its wait polls with sleeps longer than most programs run.
        if not select.select([reports], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired(process.args, seconds)
        return os.read(reports.fileno(), 4096).decode(errors="replace")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the program's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
