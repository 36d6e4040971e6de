"""Parameters of a method: the fields of its dataclass, from a command line or from Python, typed and made uniform.

Equal parameters are recorded equally, however they were written; every defect of them is one line.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Literal

from prunebench.errors import PruneBenchError, UsageError

if TYPE_CHECKING:
    # For type checkers only: a listing of names must not load torch.
    from prunebench.method import Method

__all__ = ["make", "parse_parameters"]


def parse_parameters(cls: type[Method], texts: Sequence[str]) -> dict[str, object]:
    """Parameters as typed on a command line, each `name=value`, converted to the types of the method's fields.

    Booleans are true or false, tuples comma-separated, and `none` is None where a field may be None.

    Raises:
        UsageError: for a text without `=`, an unknown or repeated name, or a value of the wrong type.
    """
    hints = _hints(cls)
    values: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"parameter {text!r} has no value", where=f"method {cls.name}", expected="name=value")
        _check_known(cls, name, hints)
        if name in values:
            raise UsageError(f"parameter {name} is given twice", where=f"method {cls.name}")
        values[name] = _convert(cls, name, hints[name], value, text=True)
    return values


def make(cls: type[Method], parameters: Mapping[str, object]) -> Method:
    """A method of a class, with these parameters as Python values; the other fields keep their defaults.

    Raises:
        UsageError: for an unknown, missing or wrong parameter.
    """
    hints = _hints(cls)
    for name in parameters:
        _check_known(cls, name, hints)
    needed = {
        field.name
        for field in _given_fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    missing = sorted(needed - set(parameters))
    if missing:
        raise UsageError(
            f"parameter {', '.join(missing)} is not given",
            where=f"method {cls.name}",
            fix=f"give --param {missing[0]}=…",
        )
    values = {name: _convert(cls, name, hints[name], value, text=False) for name, value in parameters.items()}
    try:
        return cls(**values)
    except PruneBenchError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(f"the method refuses its parameters: {error}", where=f"method {cls.name}") from error


def _hints(cls: type[Method]) -> dict[str, Any]:
    """Parameter name -> type, of the fields that may be given.

    Raises:
        UsageError: for an annotation that means nothing at run time: a value could not be checked against it.
    """
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise UsageError(
            f"an annotation cannot be read: {error}",
            where=f"method {cls.name}, class {cls.__name__}",
            fix="import the name outside of `if TYPE_CHECKING:`",
        ) from error
    return {field.name: hints[field.name] for field in _given_fields(cls)}


def _given_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a method class (a dataclass, as `_check_class` has seen) that its constructor takes."""
    return [field for field in dataclasses.fields(cls) if field.init]


def _check_known(cls: type[Method], name: str, hints: Mapping[str, Any]) -> None:
    if name in hints:
        return
    where = f"method {cls.name}"
    if not hints:
        raise UsageError(f"unknown parameter {name!r}", where=where, expected="no parameters: the method has none")
    listed = ", ".join(f"{field} ({_type_name(hint)})" for field, hint in hints.items())
    close = difflib.get_close_matches(name, list(hints), n=1)
    raise UsageError(
        f"unknown parameter {name!r}",
        where=where,
        expected=f"one of {listed}",
        fix=f"did you mean {close[0]}?" if close else "",
    )


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _convert(cls: type[Method], name: str, hint: Any, value: object, *, text: bool) -> object:
    """`_as_type`, or one line that names the parameter, its type and the value."""
    try:
        return _as_type(hint, value, text=text)
    except ValueError as error:
        raise UsageError(
            f"parameter {name} = {value!r} is no {_type_name(hint)}", where=f"method {cls.name}", expected=str(error)
        ) from error


def _as_type(hint: Any, value: Any, *, text: bool) -> object:
    """`value` as type `hint`, from text or from a Python value; ValueError says what was expected.

    Values are made uniform (int to float, list to tuple), so that equal parameters are recorded equally.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return _as_first_that_fits(arguments, value, text=text)
    if origin is tuple:
        parts = _split(value) if text else value
        if not isinstance(parts, list | tuple):
            raise ValueError("a list")
        pairs = zip(_element_types(arguments, len(parts)), parts, strict=True)
        return tuple(_as_type(element, part, text=text) for element, part in pairs)
    if origin is Literal:
        for choice in arguments:
            if str(choice) == value if text else (type(choice), choice) == (type(value), value):
                return choice
        raise ValueError(f"one of {', '.join(map(str, arguments))}")
    if hint is Any:
        return value
    reader = (_FROM_TEXT if text else _FROM_VALUE).get(hint)
    if reader is not None:
        return reader(value)
    if text:
        raise ValueError("a type that a command line can give; set this one from Python")
    return value


def _as_first_that_fits(members: Sequence[Any], value: Any, *, text: bool) -> object:
    """The value as the first member of a union that takes it: None is asked first, and `str`, which takes all, last."""
    reasons = []
    for member in sorted(members, key=lambda member: (member is not type(None), member is str)):
        try:
            return _as_type(member, value, text=text)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(" or ".join(dict.fromkeys(reasons)))


def _element_types(arguments: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The types of a tuple's elements: `tuple[T, ...]` takes any number, else there is one each."""
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return (arguments[0],) * count
    if len(arguments) != count:
        raise ValueError(f"{len(arguments)} values")
    return arguments


def _split(text: str) -> list[str]:
    """The parts of a comma-separated text, without the spaces around them."""
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _none_from_text(text: str) -> None:
    if text.lower() != "none":
        raise ValueError("none")


def _bool_from_text(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise ValueError("true or false")
    return text.lower() == "true"


def _int_from_text(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError("a whole number")
    return int(text)


def _decimal_from_text(text: str) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise ValueError("a number") from None
    if not (number.is_finite() and math.isfinite(float(number))):
        raise ValueError("a finite number")
    return number


def _float_from_text(text: str) -> float:
    return float(_decimal_from_text(text))


def _exactly(kind: type, expected: str) -> Callable[[object], object]:
    """A reader that takes values of this very type (True is no int) and changes nothing."""

    def read(value: object) -> object:
        if type(value) is not kind:
            raise ValueError(expected)
        return value

    return read


def _from_number(kind: type[float | Decimal]) -> Callable[[object], object]:
    """A reader that makes any finite number one of this type, on decimals."""

    def read(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            raise ValueError("a number")  # noqa: TRY004 - all readers refuse with ValueError
        return kind(_decimal_from_text(str(value)))

    return read


_FROM_TEXT: dict[Any, Callable[[str], object]] = {
    bool: _bool_from_text,
    int: _int_from_text,
    float: _float_from_text,
    Decimal: _decimal_from_text,
    str: str,
    type(None): _none_from_text,
}
_FROM_VALUE: dict[Any, Callable[[object], object]] = {
    bool: _exactly(bool, "true or false"),
    int: _exactly(int, "a whole number"),
    float: _from_number(float),
    Decimal: _from_number(Decimal),
    str: _exactly(str, "a text"),
    type(None): _exactly(type(None), "none"),
}
