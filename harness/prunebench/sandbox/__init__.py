"""Running what a model wrote, so that it can neither harm nor cheat.

    run_cases(cases, boxed())

Each case is two boxes (`box`): the program is in one, the task's tests and expected values in the other. Only code and
inputs go to the program; only tagged, bounded, plain values come back (`inside.wire`), so that a verdict depends on
what a function returned and on nothing else that a program does.

Covered, and tested with programs that try it:

- Cheating: objects that equal everything, subclasses of builtin types, walks through frames to expected values or to
  the verdict, patched builtins and modules, forged, early, doubled or malformed replies, leaving early with exit code
  0, an exception that would end a test's loop, files planted for a later program. A program that sees no expected
  value can still guess one; a prompt that shows its tests gives them away by itself.
- Harm: reading the user's files and environment, writing anywhere but a 16 MB tmpfs that vanishes with the case,
  network, other processes, new processes (threads are allowed), signals to anybody outside, mounts and namespaces,
  tracing, keys, System V IPC, BPF, io_uring. All that a program leaves behind ends with the case.
- Exhaustion: CPU time (also with signal handlers and bare excepts), idle time, memory, file size, open files, messages,
  output (which goes to /dev/null), stack overflows and crashes of the interpreter.
- Load: limits are CPU time, and a generous one on being idle; a timeout is its own state, and is tried again, alone.

Not covered:

- A fault of the kernel: a box is no virtual machine. Run untrusted models on a machine without secrets.
- /usr and the interpreter's own folder can be read, and with them what is installed; the time, the kernel's version and
  the number of cores can be seen.
- Memory that the kernel keeps for a process (inodes of empty files, page tables) is bounded by the CPU limit only.
  There is no limit on the memory of all cases together but that of each, times the number at a time.
- Machines that are neither x86-64 nor arm64 Linux are refused. Without bubblewrap nothing runs unless asked for by
  `--unsafe-local` (`OPEN`): the judge still is apart, but a program then has the caller's rights, and can reach the
  judge.

No torch here, nor anything else but the standard library.
"""

from __future__ import annotations

from prunebench.sandbox.box import OPEN, Box, boxed
from prunebench.sandbox.cases import CANARY, Case, FailureKind, Verdict, failure_kind, run_case, run_cases, usable_cores

__all__ = [
    "CANARY",
    "OPEN",
    "Box",
    "Case",
    "FailureKind",
    "Verdict",
    "boxed",
    "failure_kind",
    "run_case",
    "run_cases",
    "usable_cores",
]
