"""Values as bytes: every builtin type that a test compares has a tag, and nothing else arrives.

Whatever a program makes of a value, what arrives on the other side is plain data: no class of the program's survives,
so neither does its `__eq__`. A subclass of a builtin type is sent as the builtin value that it holds. Any other
object is sent as a number under which the worker keeps it, and its type's name.

What is too large to send is sent as a digest: whoever knows what it should be can tell whether it is that, exactly.

Written by hand, as every case starts two interpreters and `json` alone would take as long as they do.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes a third of an interpreter's start
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

__all__ = ["DEEPEST", "LARGEST", "NAMED", "BadMessageError", "Channel", "Huge", "Kept", "digest", "pack", "unpack"]

LARGEST = 4 * 2**20
"""Bytes of one message from a program."""

DEEPEST = 100
"""Levels of nested containers."""

NAMED = -1
"""The number of what the program calls by a name of its own."""


class BadMessageError(Exception):
    """What arrived is no message of ours."""


class Kept:
    """An object that stays where it is: its number there, and the name of its type; or `NAMED`, and its own name."""

    __slots__ = ("kind", "number")

    def __init__(self, number: int, kind: str) -> None:
        self.number, self.kind = number, kind


class Huge:
    """What is known of a value that is too large to send. It equals the value that it was made of, type for type."""

    __slots__ = ("_digest",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def __eq__(self, other: object) -> bool:
        try:
            return digest(other) == self._digest
        except ValueError:  # another Huge, or whatever else is no plain value
            return False


def digest(value: Any) -> bytes:
    """sha256 of a value of exact builtin types; 1, 1.0 and True differ, and so do orders of a set or a dictionary.

    Raises:
        ValueError: if there is another type in it.
    """
    import hashlib
    import marshal

    hashed = hashlib.sha256()
    # Version 0 writes every object out, so that bytes depend on values alone. In parts, as all would be another copy.
    if type(value) in (list, tuple) and value:
        hashed.update(b"%s %d" % (type(value).__name__.encode(), len(value)))
        for start in range(0, len(value), 1000):
            hashed.update(marshal.dumps(value[start : start + 1000], 0))
    else:
        hashed.update(marshal.dumps(value, 0))
    return hashed.digest()


class _TooLargeError(Exception):
    """More bytes than wanted."""


def pack(value: Any, keep: Callable[[Any], Kept] | None = None, largest: int | None = None) -> bytes:
    """A value as bytes.

    Args:
        value: anything.
        keep: called with an object that is no plain value; returns what is sent in its place.
        largest: bytes above which the value's digest is packed instead.

    Raises:
        ValueError: if containers are nested too deeply, there is an object and nobody to keep it, or a value that is
            too large has one in it.
    """
    parts: list[bytes] = []
    put: Any = parts.append
    if largest is not None:
        left = largest

        def put(part: bytes) -> None:
            nonlocal left
            left -= len(part)
            if left < 0:
                raise _TooLargeError
            parts.append(part)

    try:
        _pack(value, keep, put, 0)
    except _TooLargeError:
        return b"H32;" + digest(value)
    return b"".join(parts)


def _pack(value: Any, keep: Any, put: Any, depth: int) -> None:  # noqa: C901, PLR0912 - one line per type
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    # Methods of the builtin types themselves: a subclass has no say in what it holds.
    kind = type(value)
    if value is None:
        put(b"N")
    elif kind is bool:
        put(b"T" if value else b"F")
    elif isinstance(value, int):
        put(b"I%s;" % hex(int.__pos__(value)).encode())
    elif isinstance(value, str):
        text = str.encode(value, "utf-8", "surrogatepass")
        put(b"S%d;" % len(text))
        put(text)
    elif isinstance(value, float):
        put(b"G%s;" % float.hex(value).encode())
    elif isinstance(value, list):
        _pack_items(b"L", list.__len__(value), list.__iter__(value), keep, put, depth)
    elif isinstance(value, tuple):
        _pack_items(b"U", tuple.__len__(value), tuple.__iter__(value), keep, put, depth)
    elif isinstance(value, dict):
        pairs = [part for pair in dict.items(value) for part in pair]
        _pack_items(b"D", len(pairs), pairs, keep, put, depth)
    elif isinstance(value, set):
        _pack_items(b"E", set.__len__(value), set.__iter__(value), keep, put, depth)
    elif isinstance(value, frozenset):
        _pack_items(b"Z", frozenset.__len__(value), frozenset.__iter__(value), keep, put, depth)
    elif isinstance(value, complex):
        plain = complex.__pos__(value)
        _pack_items(b"C", 2, (plain.real, plain.imag), keep, put, depth)
    elif isinstance(value, bytes | bytearray):
        content = bytes(memoryview(value))
        put(b"%s%d;" % (b"Y" if isinstance(value, bytes) else b"A", len(content)))
        put(content)
    elif kind.__module__ == "fractions" and kind.__name__ == "Fraction":
        _pack_items(b"Q", 2, (value.numerator, value.denominator), keep, put, depth)
    elif kind.__module__ == "decimal" and kind.__name__ == "Decimal":
        _pack_items(b"M", 1, (str(value),), keep, put, depth)
    else:
        kept = value if kind is Kept else keep(value) if keep is not None else None
        if kept is None:
            raise ValueError(f"a {kind.__name__} is no plain value")
        _pack_items(b"O", 2, (kept.number, kept.kind), keep, put, depth)


def _pack_items(  # noqa: PLR0917
    tag: bytes, count: int, items: Iterable[Any], keep: Any, put: Any, depth: int
) -> None:
    put(b"%s%d;" % (tag, count))
    for item in items:
        _pack(item, keep, put, depth + 1)


def unpack(content: bytes, kept: Callable[[Kept], Any] | None = None) -> Any:
    """The value of `pack`'s bytes.

    Args:
        content: from `pack`, or from somebody who would like to be believed.
        kept: makes a value of a `Kept`; without it there must not be any.

    Raises:
        BadMessageError: if the bytes are not what `pack` makes.
    """
    reader = _Reader(content, kept)
    try:
        value = reader.value(0)
    except (ValueError, TypeError, ArithmeticError, IndexError, KeyError) as error:
        raise BadMessageError(f"no packed value ({type(error).__name__})") from error
    if reader.place != len(content):
        raise BadMessageError("more than a packed value")
    return value


class _Reader:
    """A place in packed bytes."""

    def __init__(self, content: bytes, kept: Any) -> None:
        self.content, self.place, self._kept = content, 0, kept

    def value(self, depth: int) -> Any:  # noqa: C901, PLR0911, PLR0912 - one line per tag
        tag = self.content[self.place : self.place + 1]
        self.place += 1
        if tag == b"I":
            return int(self.head(), 16)
        if tag == b"S":
            return self.run().decode("utf-8", "surrogatepass")
        if tag == b"G":
            return float.fromhex(self.head().decode("ascii"))
        if tag == b"N":
            return None
        if tag in (b"T", b"F"):
            return tag == b"T"
        if tag == b"Y":
            return self.run()
        if tag == b"A":
            return bytearray(self.run())
        if tag == b"H":
            return Huge(self.run())
        if not tag or tag not in b"LUDEZCQMO" or depth > DEEPEST:
            raise ValueError("no tag of ours")
        items = self.items(depth + 1)
        if tag == b"L":
            return list(items)
        if tag == b"U":
            return tuple(items)
        if tag == b"E":
            return set(items)
        if tag == b"Z":
            return frozenset(items)
        given = list(items)
        if tag == b"D":
            return dict(zip(given[::2], given[1::2], strict=True))
        if tag == b"C":
            real, imaginary = given
            return complex(_a(float, real), _a(float, imaginary))
        if tag == b"Q":
            from fractions import Fraction

            above, below = given
            return Fraction(_a(int, above), _a(int, below))
        if tag == b"M":
            from decimal import Decimal

            (text,) = given
            return Decimal(_a(str, text))
        number, kind = given
        if self._kept is None:
            raise ValueError("an object that nobody keeps")
        return self._kept(Kept(_a(int, number), _a(str, kind)[:100]))

    def head(self) -> bytes:
        """The bytes up to the next semicolon."""
        end = self.content.index(b";", self.place)
        head, self.place = self.content[self.place : end], end + 1
        return head

    def run(self) -> bytes:
        """As many bytes as the head says."""
        size = int(self.head())
        run = self.content[self.place : self.place + size]
        if size < 0 or len(run) != size:
            raise ValueError("cut short")
        self.place += size
        return run

    def items(self, depth: int) -> Iterator[Any]:
        """As many values as the head says."""
        for _ in range(int(self.head())):
            yield self.value(depth)


def _a(kind: Any, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"no {kind.__name__}")
    return value


class Channel:
    """Messages over two file descriptors: eight hexadecimal digits of length, and a packed value.

    Args:
        reading: file descriptor that messages come from.
        writing: that they go to.
        largest: bytes of a message.
    """

    def __init__(self, reading: int, writing: int, largest: int = LARGEST) -> None:
        self._reading, self._writing, self._largest = reading, writing, largest
        # Held here, so that a program that replaces them in `os` does not end our conversation by accident.
        self._read, self._write = os.read, os.write

    def send(self, message: Any) -> None:
        """Write one message.

        Raises:
            ValueError: if it is too large, or no plain value; nothing has been written then.
            OSError: if nobody reads.
        """
        content = pack(message)
        if len(content) > self._largest:
            raise ValueError(f"{len(content)} bytes, more than {self._largest}")
        view = memoryview(b"%08x%s" % (len(content), content))
        while view:
            view = view[self._write(self._writing, view) :]

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: if there will be none.
            BadMessageError: if it is too large, or no packed value.
        """
        try:
            size = int(self._exactly(8), 16)
        except ValueError as error:
            raise BadMessageError("no message") from error
        if not 0 <= size <= self._largest:
            raise BadMessageError(f"a message of more than {self._largest} bytes")
        return unpack(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._read(self._reading, min(size, 2**20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
