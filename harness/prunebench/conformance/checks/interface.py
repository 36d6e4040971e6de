"""What a method is made of: its parameters, its metadata, its signatures, and what stands in its file."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from prunebench.calibration import Statistic
from prunebench.calibration.score import distinct, settings_of
from prunebench.conformance.code import foreign_imports, keys_on_sizes, private_names
from prunebench.conformance.registry import check
from prunebench.conformance.result import Fault
from prunebench.conformance.subject import Subject
from prunebench.method import Method

__all__: list[str] = []

_VERBS = ("select", "replace", "route", "select_needs", "replace_needs", "check_model")


@check("interface")
def check_metadata(subject: Subject) -> None:
    """A method has a name, a version, a reference, and a docstring that defines it."""
    kind: Any = type(subject.method)
    wanted = {
        "name": (isinstance(kind.name, str) and re.fullmatch(r"[a-z0-9][a-z0-9-]*", kind.name), 'name = "my-method"'),
        "version": (type(kind.version) is int and kind.version >= 1, "version = 1, and one more for each change"),
        "reference": (isinstance(kind.reference, str) and kind.reference.strip(), 'reference = "arXiv:…" or "ours"'),
        "docstring": (len((kind.__dict__.get("__doc__") or "").split()) >= 5, "formula, tokens, direction, source"),
    }
    for what, (fine, example) in wanted.items():
        if not fine:
            raise Fault(
                f"{what} {getattr(kind, what, kind.__dict__.get('__doc__'))!r}",
                where=f"class {kind.__name__}",
                expected=example,
                fix=f"write it into the class; tables and cards show the {what}",
            )


@check("interface")
def check_parameters(subject: Subject) -> None:
    """Parameters are the fields of a frozen dataclass; JSON holds them, and gives the same method back."""
    method, kind = subject.method, type(subject.method)
    parameters = method.parameters()
    try:
        back = kind(**json.loads(json.dumps(parameters, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise Fault(
            f"parameters {parameters!r} do not survive JSON ({error})",
            where=f"class {kind.__name__}",
            expected="numbers, texts, booleans, None, and tuples of them",
            fix="make fields of these types; compute everything else in the verbs",
        ) from error
    listed = {name: list(v) if isinstance(v, tuple) else v for name, v in parameters.items()}
    again = {name: list(v) if isinstance(v, tuple) else v for name, v in back.parameters().items()}
    if listed != again or set(vars(method)) - set(parameters):
        raise Fault(
            f"it has more than its parameters: {again}, {sorted(set(vars(method)) - set(parameters))}",
            where=f"class {kind.__name__}",
            expected="a method that its parameters say all of",
            fix="drop __init__ and __post_init__ that change or add fields; raise there, but set nothing",
        )


@check("interface")
def check_frozen(subject: Subject) -> None:
    """A method cannot be changed once it is made: its record says all of it."""
    method = subject.method
    for name in [*method.parameters(), "another"]:
        try:
            setattr(method, name, getattr(method, name, None))
        except (dataclasses.FrozenInstanceError, AttributeError, TypeError):
            continue
        raise Fault(
            f"{name} can be set",
            where=f"class {type(method).__name__}",
            expected="@dataclass(frozen=True), without a __setattr__ of its own",
            fix="keep nothing in self; hand values from function to function",
        )


@check("interface")
def check_signatures(subject: Subject) -> None:
    """The verbs take what the interface hands them, and nothing else."""
    kind = type(subject.method)
    for name in _VERBS:
        own = [(p.name, p.kind) for p in inspect.signature(getattr(kind, name)).parameters.values()]
        wanted = [(p.name, p.kind) for p in inspect.signature(getattr(Method, name)).parameters.values()]
        if own != wanted:
            raise Fault(
                f"{name} takes ({', '.join(part for part, _ in own)})",
                where=f"class {kind.__name__}",
                expected=f"({', '.join(part for part, _ in wanted)}), with rng as a keyword",
                fix="make what else it takes a field of the class, so that it is recorded",
            )


@check("interface")
def check_needs(subject: Subject) -> None:
    """select_needs and replace_needs name statistics: tuples of fresh ones, the same each time."""
    for name in ("select_needs", "replace_needs"):
        ask = getattr(subject.method, name)
        first, second = ask(), ask()
        tuples = isinstance(first, tuple) and all(isinstance(one, Statistic) for one in first)
        fresh = tuples and not {id(one) for one in first} & {id(one) for one in second}
        if not fresh or [(type(o), settings_of(o)) for o in first] != [(type(o), settings_of(o)) for o in second]:
            raise Fault(
                f"{name} returns {first!r}, and then {second!r}"[:200],
                expected="a tuple of new Statistic instances, the same ones on each call",
                fix=f"write `return (Count(), …)` in {name}; what varies must be a parameter",
            )
        distinct(first)


@check("interface")
def check_imports(subject: Subject) -> None:
    """A method imports prunebench's public names, torch, numpy and the standard library."""
    package = "" if len(subject.files) == 1 else type(subject.method).__module__.partition(".")[0]
    for path, line, module in _read(subject, partial(foreign_imports, own=package)):
        raise Fault(
            f"it imports {module}",
            where=f"{path.name}:{line}",
            expected="`from prunebench import NAME` of public names, torch, numpy, the standard library",
            fix="do without it",
            instead="if others need it too, propose it for the package",
        )


@check("interface")
def check_no_private_names(subject: Subject) -> None:
    """A method uses what it is handed by its public names only."""
    for path, line, name in _read(subject, private_names):
        raise Fault(
            f"it reads {name} of something that it does not own",
            where=f"{path.name}:{line}",
            expected="public names: a method sees layers, never the model behind them",
            fix="use LayerView's stats, weights, router_rows_ED and expert",
            instead="ask for what is missing in an issue",
        )


@check("interface")
def check_no_key_on_sizes(subject: Subject) -> None:
    """A method does not tell models apart by their sizes."""
    for path, line, what in _read(subject, keys_on_sizes):
        raise Fault(
            f"it looks for {what}",
            where=f"{path.name}:{line}",
            expected="one rule for models of all sizes",
            fix="score experts by what they compute",
            instead="make the number a parameter, which is recorded",
        )


def _read(
    subject: Subject, reader: Callable[[ast.Module], Iterator[tuple[int, str]]]
) -> Iterator[tuple[Path, int, str]]:
    """(file, line, what) of what a reader finds in the method's files."""
    for path, tree in subject.trees.items():
        yield from ((path, line, what) for line, what in reader(tree))
