"""What a method's code does beside computing: files, sockets, processes, the call stack, sleep, gradients.

Python's audit events and a profile function say what happens; an act is the method's if its file is on the stack and
neither prunebench nor the import system stands between, since those act on its behalf. Nothing is prevented: this
names what honest authors do by mistake and what careless ones try. It is no sandbox.

Covered: what passes through Python's audit events (open, listing and changing folders, databases, sockets,
subprocesses, forks, frames, the garbage collector's lists, ctypes, changes of environment and working directory), and,
where it looks closely, threads, sleeping, polling, waiting on locks and signals, torch's backward, and files that torch
reads and writes without Python, looks at whether files are there, however they were imported. Not covered: what other
native code does by itself (calling a C function for `map` or `partial`), busy waiting, clocks, anonymous memory, and
whatever a method does to this watch on purpose.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

__all__ = ["Act", "watching"]

_KINDS = {
    "file": (
        *("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link"),
        *(
            "os.symlink",
            "os.truncate",
            "os.chmod",
            "os.chown",
            "os.utime",
            "glob.",
            "shutil.",
            "tempfile.",
            "sqlite3.connect",
        ),
    ),
    "socket": ("socket.", "urllib.", "http.", "ftplib.", "smtplib."),
    "process": (
        *("subprocess.", "os.system", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "pty.", "ctypes."),
        "_thread.start_new_thread",
    ),
    "environment": ("os.putenv", "os.unsetenv", "os.chdir"),
    "stack": (
        *("sys._getframe", "sys._current_frames", "sys._current_exceptions", "sys.settrace", "sys.setprofile"),
        *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
    ),
}
_FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
# Calls that raise no audit event in every version of Python; a profile function sees them. By name, as some of them are
# methods of objects that have yet to be made. `wait` is what starting and joining threads does, too.
_CALLS = {
    **dict.fromkeys(("sleep", "select", "poll.poll", "epoll.poll"), "sleep"),
    **dict.fromkeys(("pause", "sigwait", "sigwaitinfo", "sigtimedwait"), "sleep"),
    **dict.fromkeys(("lock.acquire", "RLock.acquire", "SimpleQueue.get"), "wait"),
    **dict.fromkeys(("start_new_thread", "start_joinable_thread", "fork_exec"), "process"),
    **dict.fromkeys(("_VariableFunctionsClass.from_file", "StorageBase.from_file", "import_ir_module"), "file"),
    **dict.fromkeys(("stat", "lstat", "statvfs", "access", "readlink", "mkfifo", "mknod", "memfd_create"), "look"),
}
_LAST_NAMES = frozenset(name.rpartition(".")[2] for name in _CALLS)
# Modules through which a person looks at the stack; others look at it for reasons of their own.
_LOOKERS = ("inspect.py", "traceback.py")
# And one that does both: only who calls it for the frame itself looks.
_LOGGING = "logging/__init__.py"
_LINES = "linecache.py"
# Modules whose waiting is their caller's; others hold locks for reasons of their own.
_WAITERS = ("threading.py", "queue.py", "selectors.py", "connection.py", "futures/_base.py")
# And whose looking for files is; others look for reasons of their own.
_SEEKERS = ("os.py", "os>", "path.py", "path>", "pathlib.py", "pathlib/_local.py", "pathlib/__init__.py")
_PACKAGE = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Act:
    """Something that a method's code did: of which kind, what, and in which line."""

    kind: str
    what: str
    line: int


class _Watcher:
    def __init__(self, files: frozenset[str]) -> None:
        self.files = files
        self.acts: list[Act] = []
        self.busy = False

    def own_line(self, frame: FrameType | None, kind: str) -> int | None:
        """The line of the method's code that did it; None if it was not the method's."""
        while frame is not None:
            name, caller = frame.f_code.co_filename, frame.f_back
            if name in self.files:
                return frame.f_lineno
            above = "" if caller is None else caller.f_code.co_filename
            direct = above in self.files
            if name.startswith(_PACKAGE) or _is_import(frame):
                return None
            if name.endswith(_LINES) and not direct and above != name:  # for the text of a warning or an error
                return None
            if kind == "stack" and not name.endswith(_LOOKERS) and not (direct and name.endswith(_LOGGING)):
                return None
            if (kind == "wait" and not name.endswith(_WAITERS)) or (kind == "look" and not name.endswith(_SEEKERS)):
                return None
            frame = caller
        return None

    def note(self, kind: str, what: str, frame: FrameType | None) -> None:
        line = self.own_line(frame, kind)
        if line is not None:
            self.acts.append(Act("file" if kind == "look" else kind, what, line))


def _is_import(frame: FrameType) -> bool:
    """Whether an import statement reads what it needs; asked for by hand, the same machinery reads any file."""
    return frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename.startswith("<frozen importlib")


_watcher: _Watcher | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    watcher = _watcher
    if watcher is None or watcher.busy:
        return
    kind = _kind(event, arguments[1] if event == "object.__getattr__" else "")
    if kind is None:
        return
    watcher.busy = True  # looking at the stack is an event, too
    try:
        shown = f"{event}({arguments[0]!r})" if kind in {"file", "socket"} and arguments else event
        watcher.note(kind, shown[:120], sys._getframe(1))  # noqa: SLF001  the one way
    finally:
        watcher.busy = False


@cache
def _kind(event: str, attribute: str) -> str | None:
    if event == "object.__getattr__":
        return "stack" if attribute in _FRAMES else None
    return next((kind for kind, starts in _KINDS.items() if event.startswith(starts)), None)


@cache
def _hooked() -> None:
    """Audit hooks stay for good, so there is one, which does nothing unless somebody watches."""
    sys.addaudithook(_hook)


@cache
def _functions() -> dict[CodeType, tuple[str, str]]:
    """(kind, name) by code of functions of torch's that act where Python does not see it."""
    import torch

    backward: tuple[Callable[..., Any], ...] = (torch.autograd.backward, torch.autograd.grad)
    files: tuple[Callable[..., Any], ...] = (torch.save, torch.load, torch.jit.save, torch.jit.load)
    kinds = {**dict.fromkeys(backward, "gradient"), **dict.fromkeys(files, "file")}
    names = {one: f"{one.__module__.removesuffix('.serialization')}.{one.__name__}" for one in kinds}
    return {one.__code__: (kind, names[one]) for one, kind in kinds.items() if hasattr(one, "__code__")}


@contextmanager
def watching(files: frozenset[str], *, closely: bool = False) -> Iterator[list[Act]]:
    """Collect what the code of these files does while the context is entered.

    Args:
        files: as in `co_filename`.
        closely: look at every call, which sees sleeping and gradients, and is slow.
    """
    global _watcher  # noqa: PLW0603  an audit hook cannot be given anything
    _hooked()
    functions, watcher, outer = _functions(), _Watcher(files), _watcher

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__name__", "") in _LAST_NAMES:
            name = argument.__qualname__
            name = name.rpartition(".")[2] if name.startswith("pybind11_") else name
            if name in _CALLS:
                watcher.note(_CALLS[name], name, frame)
        elif event == "call" and frame.f_code in functions:
            watcher.note(*functions[frame.f_code], frame)

    _watcher, before = watcher, sys.getprofile()
    if closely:
        sys.setprofile(profile)
    try:
        yield watcher.acts
    finally:
        if closely:
            sys.setprofile(before)
        _watcher = outer
