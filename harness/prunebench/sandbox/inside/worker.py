"""The program's side: runs what a model wrote, and answers calls with plain data.

Nothing that is expected, and no verdict, ever comes into this process. Whatever the program does to it, all that it can
achieve is a reply, and the judge takes replies for what they are: claims about what a function returned.
"""

from __future__ import annotations

import os
import resource

from prunebench.sandbox.inside.wire import LARGEST, NAMED, Channel, Kept, pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["main", "set_limits"]

MESSAGE_HEAD = 1000
"""Bytes of a message besides its value, at most."""


def set_limits(cpu_seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Limit this process for good: a soft limit on CPU time, one more second until the hard one, and no core file."""
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1),
        (resource.RLIMIT_AS, memory_bytes, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes, file_bytes),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(limit, (soft, hard))


def main(cpu_seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Say that we are there, run the program, answer calls until there are no more."""
    set_limits(cpu_seconds, memory_bytes, file_bytes)
    channel = Channel(os.dup(0), os.dup(1))
    empty = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(empty, number)
    os.close(empty)
    channel.send("ready")
    _Answers(channel).serve()


class _Answers:
    """The program's names, and the objects that were sent as numbers."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._names: dict[str, Any] = {"__name__": "program"}
        self._objects: list[Any] = []

    def serve(self) -> None:
        """Answer until nobody asks any more."""
        while True:
            try:
                number, verb, given = self._channel.receive()
            except EOFError:
                os._exit(0)
            try:
                outcome, content = "ok", pack(self._do(verb, given), self._keep, LARGEST - MESSAGE_HEAD)
            except BaseException as error:  # noqa: BLE001 - SystemExit and all else is what the program did
                outcome, content = "raised", pack((type(error).__name__[:100], _text_of(error)))
            try:
                self._channel.send((number, outcome, content))
            except OSError:
                os._exit(0)

    def _do(self, verb: str, given: bytes) -> Any:
        target, *rest = unpack(given, self._object)
        if verb == "load":
            compile(target + rest[0], "program.py", "exec")
            exec(compile(target, "program.py", "exec"), self._names)  # noqa: S102 - what this process is for
            return None
        if verb == "call":
            arguments, keywords = rest
            return target(*arguments, **keywords)
        if verb == "get":
            return getattr(target, rest[0])
        if verb == "set":
            setattr(target, *rest)
            return None
        if verb == "item":
            return target[rest[0]]
        return list(target)

    def _keep(self, value: Any) -> Kept:
        self._objects.append(value)
        return Kept(len(self._objects) - 1, type(value).__name__)

    def _object(self, kept: Kept) -> Any:
        if kept.number == NAMED:
            # Looked up as the program itself would, so that a missing name is a NameError.
            return eval(kept.kind, self._names)  # noqa: S307 - a name, from the judge
        return self._objects[kept.number]


def _text_of(error: BaseException) -> str:
    """What an exception says, at most 200 characters; an exception of the program's may refuse to say anything."""
    try:
        return str.__str__(str(error))[:200]
    except BaseException:  # noqa: BLE001
        return ""
