"""What a method's code does beside computing: files, sockets, processes, the call stack, sleep, gradients.

Python's audit events and a profile function say what happens; an act is the method's if its file is on the stack and
neither prunebench nor the import system stands between, since those act on its behalf. Nothing is prevented: this
names what honest authors do by mistake and what careless ones try. It is no sandbox.

Covered: what passes through Python's audit events (open, listing and changing folders, sockets, subprocesses, forks,
frames, the garbage collector's lists, ctypes, environment and working directory), and in verbs and statistics threads,
`time.sleep` and torch's backward, however they were imported. Not covered: what native code does by itself, os.stat,
waiting on locks.
"""

from __future__ import annotations

import _thread
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

__all__ = ["Act", "watching"]

_KINDS = {
    "file": ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "glob."),
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
# Calls that raise no audit event in every version of Python; a profile function sees them.
_CALLS: dict[Callable[..., Any], tuple[str, str]] = {
    time.sleep: ("sleep", "time.sleep"),
    _thread.start_new_thread: ("process", "a thread is started"),
}
# Modules through which a person looks at the stack; others look at it for reasons of their own.
_LOOKERS = ("inspect.py", "traceback.py")
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
            name = frame.f_code.co_filename
            if name in self.files:
                return frame.f_lineno
            if name.startswith((_PACKAGE, "<frozen importlib")) or name.endswith("linecache.py"):
                return None
            if kind == "stack" and not name.endswith(_LOOKERS):
                return None
            frame = frame.f_back
        return None

    def note(self, kind: str, what: str, frame: FrameType | None) -> None:
        line = self.own_line(frame, kind)
        if line is not None:
            self.acts.append(Act(kind, what, line))


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
def _backward() -> frozenset[CodeType]:
    import torch

    kinds: tuple[Callable[..., Any], ...] = (torch.autograd.backward, torch.autograd.grad)
    return frozenset(one.__code__ for one in kinds if hasattr(one, "__code__"))


@contextmanager
def watching(files: frozenset[str], *, closely: bool = False) -> Iterator[list[Act]]:
    """Collect what the code of these files does while the context is entered.

    Args:
        files: as in `co_filename`.
        closely: look at every call, which sees sleeping and gradients, and is slow.
    """
    global _watcher  # noqa: PLW0603  an audit hook cannot be given anything
    _hooked()
    backward, watcher, outer = _backward(), _Watcher(files), _watcher

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument in _CALLS:
            watcher.note(*_CALLS[argument], frame)
        elif event == "call" and frame.f_code in backward:
            watcher.note("gradient", f"torch.autograd.{frame.f_code.co_name}", frame)

    _watcher, before = watcher, sys.getprofile()
    if closely:
        sys.setprofile(profile)
    try:
        yield watcher.acts
    finally:
        if closely:
            sys.setprofile(before)
        _watcher = outer
