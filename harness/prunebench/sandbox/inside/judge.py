"""The tests' side: runs a task's own tests, in which the program's names are stand-ins that ask the worker.

Expected values live here and leave only as the verdict. Values that come back are plain, so `==` here is that of the
builtin types. An object that is no plain value can be called, read, changed, indexed and iterated (which gives plain
values in the end), but never compared, tested for truth or hashed: that fails the case.
"""

from __future__ import annotations

import os
import time

from prunebench.sandbox.inside.compare import agree
from prunebench.sandbox.inside.wire import NAMED, BadMessageError, Channel, Kept, pack, unpack
from prunebench.sandbox.inside.worker import set_limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

__all__ = ["LARGEST_REQUEST", "judge", "main", "prepare"]

LARGEST_REQUEST = 2**30
"""Bytes of a case: the inputs of a task can be many."""


class ProgramFailedError(BaseException):
    """The program did not answer a call. No `Exception`: tests do not get to swallow it.

    A StopIteration of the program's, raised as such, would end a test's loop early and make it pass.
    """

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state, self.reason = state, reason


class _Program:
    """The worker as seen from the tests; remembers the first failure, whatever the tests make of it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.failure: ProgramFailedError | None = None
        self.calls = 0

    def wait_until_ready(self) -> bool:
        """Whether the worker has come up."""
        try:
            return bool(self._channel.receive() == "ready")
        except (EOFError, BadMessageError):
            return False

    def load(self, program: str, followed_by: str) -> None:
        """Run the program."""
        self._ask("load", program, followed_by)

    def ask(self, verb: str, *values: Any) -> Any:
        """What the worker answers; counted as a question of the tests."""
        self.calls += 1
        return self._ask(verb, *values)

    def fail(self, state: str, reason: str) -> NoReturn:
        """Give the case up."""
        failure = ProgramFailedError(state, reason)
        self.failure = self.failure or failure
        raise failure

    def _ask(self, verb: str, *values: Any) -> Any:
        number = self.calls
        message = (number, verb, pack(values, _number_of))
        try:
            self._channel.send(message)
            reply = self._channel.receive()
            if type(reply) is not tuple or len(reply) != 3 or reply[0] != number or type(reply[2]) is not bytes:
                raise BadMessageError("no reply to what was asked")
            _, outcome, content = reply
            value = unpack(content, lambda kept: StandIn(self, kept))
        except (EOFError, OSError):
            self.fail("died", "")
        except BadMessageError as error:
            self.fail("error", f"the program's process sent {error}")
        if outcome != "ok":
            self._raised(*value)
        return value

    def _raised(self, kind: object, text: object) -> NoReturn:
        kind, text = str(kind), str(text)
        self.fail("wrong" if kind == "AssertionError" else "error", f"{kind[:100]}: {text[:200]}")


class StandIn:
    """An object of the program's that is no plain value."""

    __slots__ = ("_kept", "_program")
    _kept: Kept
    _program: _Program

    def __init__(self, program: _Program, kept: Kept) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_kept", kept)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._program.ask("call", self._kept, list(arguments), keywords)

    def __getattr__(self, name: str) -> Any:
        return self._program.ask("get", self._kept, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask("set", self._kept, name, value)

    def __getitem__(self, index: Any) -> Any:
        return self._program.ask("item", self._kept, index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._program.ask("list", self._kept))

    def _refuse(self, *_: Any) -> NoReturn:
        # As told where both are in one process: no object of the program's is what was expected.
        self._program.fail("wrong", "AssertionError: ")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _refuse


def _number_of(value: Any) -> Kept:
    """What is sent of a stand-in; anything else that is no plain value cannot be an argument."""
    if type(value) is StandIn:
        kept: Kept = object.__getattribute__(value, "_kept")
        return kept
    raise TypeError(f"the tests pass a {type(value).__name__}, which is no plain value")


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    """The tests' namespace after the preamble.

    Raises:
        Exception: whatever the preamble raises.
    """
    names: dict[str, Any] = {"__name__": "tests", "_agree": agree, **request["data"]}
    exec(compile(request["preamble"], "preamble.py", "exec"), names)  # noqa: S102 - the task's own code
    return names


def judge(request: dict[str, Any], names: dict[str, Any], channel: Channel) -> dict[str, str]:
    """Run the tests of one case.

    Args:
        request: program, followed_by, names (name in the tests: name in the program) and tests.
        names: the tests' namespace.
        channel: to the worker.

    Returns:
        state and reason. `died`: the worker ended; `unready`: it never came up; `broken`: the tests themselves failed.
    """
    program = _Program(channel)
    if not program.wait_until_ready():
        return {"state": "unready", "reason": ""}
    try:
        tests = compile(request["tests"], "tests.py", "exec")
    except (SyntaxError, ValueError) as error:
        return {"state": "broken", "reason": _said(error)}
    names.update({name: StandIn(program, Kept(NAMED, target)) for name, target in request["names"].items()})
    state, reason = "ok", ""
    try:
        program.load(request["program"], request["followed_by"])
        exec(tests, names)  # noqa: S102 - the task's own code
        if not program.calls:
            return {"state": "broken", "reason": "the tests asked nothing of the program"}
    except ProgramFailedError as failure:
        state, reason = failure.state, failure.reason
    except AssertionError as error:
        state, reason = "wrong", _said(error)
    except BaseException as error:  # noqa: BLE001 - such as None < 1, on what the program returned
        state, reason = "error", _said(error)
    if program.failure is not None:
        state, reason = program.failure.state, program.failure.reason
    return {"state": state, "reason": reason}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def main(cpu_seconds: int, memory_bytes: int, calls: int, replies: int) -> None:
    """Read a request from standard input; write how long the preamble took, and the verdict, to standard output."""
    set_limits(cpu_seconds, memory_bytes, 0)
    host = Channel(os.dup(0), os.dup(1), LARGEST_REQUEST)
    empty = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(empty, number)
    request = host.receive()
    started = time.process_time()
    try:
        names = prepare(request)
    except Exception as error:  # noqa: BLE001 - a task that cannot be used, whatever its fault
        host.send({"state": "broken", "reason": _said(error)})
        os._exit(0)
    host.send({"state": "prepared", "reason": str(time.process_time() - started)})
    host.send(judge(request, names, Channel(replies, calls)))
    os._exit(0)
