"""Starting an interpreter in a box, and ending all that is in it.

A box is bubblewrap around a fresh Python: namespaces of its own for users, processes, network, IPC, host name and
cgroups; the system and the interpreter read-only; a small tmpfs and /dev/null; nobody's user id without capabilities;
an environment of three variables; the filter of `seccomp`. It has no /proc: nothing needs it, and there are machines
where it cannot be mounted. `OPEN` is the same without bubblewrap and filter, for `--unsafe-local`.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from prunebench.errors import PrerequisiteError
from prunebench.sandbox.seccomp import filter_program

__all__ = ["OPEN", "Box", "Process", "boxed"]

TMPFS_BYTES = 16 * 2**20
NOBODY = 65534
_INSIDE = ("wire", "worker", "compare", "judge")
# Fixed hashes: the same program gives the same verdict. Nothing is written beside the files that are run.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True)
class Box:
    """A way to start interpreters.

    Args:
        bwrap: the program, or None for no box at all.
    """

    bwrap: str | None

    @property
    def name(self) -> str:
        """What records and summaries call it."""
        return f"{_version(self.bwrap)}, rlimits and seccomp" if self.bwrap else "none (--unsafe-local): rlimits only"

    def start(
        self, call: str, *, keep_open: Sequence[int] = (), stdin: int, stdout: int, stderr: int = subprocess.DEVNULL
    ) -> Process:
        """Run `module.function(arguments)` of `prunebench.sandbox.inside` in a new box.

        Args:
            call: such as `worker.main(2, 1024, 1024)`; written by us, never by a program.
            keep_open: file descriptors that the box inherits besides the first three.
            stdin: its standard input, a file descriptor.
            stdout: its standard output.
            stderr: of bubblewrap; what runs inside has none.

        Raises:
            OSError: if no process can be made.
        """
        command = [_interpreter(), "-P", "-s", "-S", "-B", "-c", f"{_modules()}\n{call}"]
        if self.bwrap is None:
            popen = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=keep_open,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
            return Process(popen, None)
        information, written = os.pipe()
        rules, rules_end = os.pipe()
        try:
            os.write(rules_end, _filter())
            os.close(rules_end)
            popen = subprocess.Popen(
                [*_arguments(self.bwrap), "--seccomp", str(rules), "--info-fd", str(written), *command],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(*keep_open, rules, written),
                env={},
                start_new_session=True,
            )
        except BaseException:
            os.close(information)
            raise
        finally:
            os.close(rules)
            os.close(written)
        return Process(popen, information)


class Process:
    """A box that was started; the caller holds it, then ends it.

    Args:
        popen: bubblewrap, or the interpreter itself where there is no box.
        information: file descriptor on which bubblewrap names the first process inside; None where there is no box.
    """

    def __init__(self, popen: subprocess.Popen[bytes], information: int | None) -> None:
        self._popen, self._information = popen, information
        self._first_inside: int | None = None
        self._parent = popen.pid

    def hold(self) -> None:
        """Take a handle on the box's first process, soon after the start: while it lives, its number is its own."""
        if self._information is None:
            return
        with open(self._information, "rb") as file:  # noqa: PTH123 - a descriptor
            told = file.read()
        with contextlib.suppress(ValueError, ProcessLookupError):  # bubblewrap failed, or all is over
            self._parent = int(json.loads(told)["child-pid"])
            self._first_inside = os.pidfd_open(self._parent)
        self._information = -1

    def cpu_seconds(self) -> float:
        """CPU time so far of the interpreter in the box, as /proc has it; 0 if it is gone."""
        column, ticks = (1 if self._information is not None else None), 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                owner = int(fields[column]) if column is not None else int(folder.name)
                ticks += (int(fields[11]) + int(fields[12])) * (owner == self._parent)
        return ticks / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """End everything in the box. Its first process is killed: the kernel then ends the whole namespace with it."""
        with contextlib.suppress(ProcessLookupError):
            if self._first_inside is not None:
                signal.pidfd_send_signal(self._first_inside, signal.SIGKILL)
            elif self._popen.poll() is None:
                os.killpg(self._popen.pid, signal.SIGKILL)

    def wait_to_end(self, seconds: float) -> None:
        """Give a box that is ending by itself the time to do so, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)

    def wait(self) -> int:
        """Wait for the end of everything inside; returns the exit code (negative: the signal)."""
        if self._first_inside is not None:
            # bubblewrap itself ends as soon as it knows the exit code, which may be before the namespace is gone.
            select.select([self._first_inside], [], [])
            os.close(self._first_inside)
            self._first_inside = None
        code = self._popen.wait()
        return 128 - code if self._information is not None and code > 128 else code


@cache
def _filter() -> bytes:
    return filter_program()


@cache
def _modules() -> str:
    """Python that makes the modules of `inside` without a file; compiled here, as that takes longer than a start."""
    package = "prunebench.sandbox.inside"
    parents = [(name, "") for name in ("prunebench", "prunebench.sandbox", package)]
    files = [(name, Path(__file__).parent / "inside" / f"{name}.py") for name in _INSIDE]
    code = [
        (f"{package}.{name}", compile(path.read_text(encoding="utf-8"), f"{name}.py", "exec")) for name, path in files
    ]
    return (
        "import marshal, sys\n"
        f"for name, code in marshal.loads(bytes.fromhex({marshal.dumps([*parents, *code]).hex()!r})):\n"
        "    module = sys.modules[name] = type(sys)(name)\n"
        "    module.__path__ = []\n"
        "    exec(code, module.__dict__)\n"
        f"worker, judge = (sys.modules['{package}.' + name] for name in ('worker', 'judge'))"
    )


@cache
def _interpreter() -> str:
    """The interpreter below any virtual environment, whose packages are none of a program's business."""
    return str(Path(getattr(sys, "_base_executable", "") or sys.executable).resolve())


@cache
def _arguments(bwrap: str) -> tuple[str, ...]:
    prefix = str(Path(sys.base_prefix).resolve())
    folders = [arguments for name in ("lib", "lib64", "lib32", "bin") for arguments in _system_folder(Path("/", name))]
    prefixes = [] if Path(prefix).is_relative_to("/usr") else ["--ro-bind", prefix, prefix]
    return (
        bwrap,
        *("--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"),
        *("--die-with-parent", "--new-session", "--hostname", "box", "--clearenv"),
        *(part for name, value in _ENVIRONMENT.items() for part in ("--setenv", name, value)),
        *("--ro-bind", "/usr", "/usr", *folders, *prefixes),
        *("--dev-bind", os.devnull, os.devnull),
        *("--size", str(TMPFS_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"),  # noqa: S108 - the box's own
        *("--remount-ro", "/"),
    )


def _system_folder(folder: Path) -> list[str]:
    """A folder beside /usr as it is here: the same link into /usr, or bound read-only."""
    if folder.is_symlink():
        return ["--symlink", str(folder.readlink()), str(folder)]
    return ["--ro-bind", str(folder), str(folder)] if folder.is_dir() else []


@cache
def _version(bwrap: str) -> str:
    return subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False).stdout.strip()


@cache
def boxed() -> Box:
    """The way to run programs: bubblewrap, tried once in this process.

    Raises:
        PrerequisiteError: if it is not installed, or cannot make a box on this machine.
    """
    refuge = "or give --unsafe-local, for models that you would let write a script for you; it never reaches the board"
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise PrerequisiteError(
            "generated programs run in bubblewrap, which is not installed", fix=f"apt-get install bubblewrap, {refuge}"
        )
    _filter()
    tried = subprocess.run([*_arguments(bwrap), _interpreter(), "-S", "-c", ""], capture_output=True, check=False)
    if tried.returncode:
        said = tried.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {tried.returncode}"]
        raise PrerequisiteError(
            "bubblewrap cannot make a box here",
            where=bwrap,
            expected="unprivileged user namespaces",
            fix=f"allow them ({said[-1]}), {refuge}",
        )
    return Box(bwrap)


OPEN = Box(None)
"""No box: the same protocol and limits, with the caller's rights."""
