"""What a method is made of: its parameters, its metadata, its signatures, and what stands in its file."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import prunebench
from prunebench.calibration import Statistic
from prunebench.calibration.score import distinct, settings_of
from prunebench.conformance.registry import check
from prunebench.conformance.result import Fault
from prunebench.conformance.subject import Subject
from prunebench.method import Method

__all__: list[str] = []

_VERBS = ("select", "replace", "route", "select_needs", "replace_needs", "check_model")
# Attributes that lead behind an object's public face.
_BEHIND = {"__dict__", "__globals__", "__closure__", "__subclasses__", "__code__", "__traceback__"}
_LIBRARIES = {"torch", "np", "numpy", "self", "cls"}
_SIZES = {"width", "experts", "index", "top_k", "groups", "model_shape", "shape"}


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


def foreign_imports(tree: ast.Module, own: str = "") -> Iterator[tuple[int, str]]:
    """(line, what) of each import that content files may not make.

    Args:
        tree: the file's code.
        own: a package that the file is part of.
    """
    allowed = {"prunebench", "torch", "numpy", *([own] if own else [])} | sys.stdlib_module_names
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in modules if name.partition(".")[0] not in allowed)
            yield from ((node.lineno, name) for name in modules if name.startswith("prunebench."))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or "."
            if module.partition(".")[0] not in allowed or module.startswith("prunebench."):
                yield node.lineno, module
            elif module == "prunebench":
                names = [alias.name for alias in node.names if alias.name not in prunebench.__all__]
                yield from ((node.lineno, f"prunebench.{name}") for name in names)


@check("interface")
def check_imports(subject: Subject) -> None:
    """A method imports prunebench's public names, torch, numpy and the standard library."""
    package = "" if len(subject.files) == 1 else type(subject.method).__module__.partition(".")[0]
    for line, module in foreign_imports(subject.tree, package):
        raise Fault(
            f"it imports {module}",
            where=f"{subject.source.path.name}:{line}",
            expected="`from prunebench import NAME` of public names, torch, numpy, the standard library",
            fix="do without it",
            instead="if others need it too, propose it for the package",
        )


def _is_private(node: ast.Attribute) -> bool:
    root: ast.AST = node.value
    while isinstance(root, ast.Attribute):
        root = root.value
    at_home = isinstance(root, ast.Name) and root.id in _LIBRARIES
    hidden = node.attr.startswith("_") and not node.attr.startswith("__")
    return node.attr in _BEHIND or (hidden and not at_home)


@check("interface")
def check_no_private_names(subject: Subject) -> None:
    """A method uses what it is handed by its public names only."""
    for node in ast.walk(subject.tree):
        if isinstance(node, ast.Attribute) and _is_private(node):
            raise Fault(
                f"it reads .{node.attr} of something that it does not own",
                where=f"{subject.source.path.name}:{node.lineno}",
                expected="public names: a method sees layers, never the model behind them",
                fix="use LayerView's stats, weights, router_rows_ED and expert",
                instead="ask for what is missing in an issue",
            )


@check("interface")
def check_no_key_on_sizes(subject: Subject) -> None:
    """A method does not tell models apart by their sizes."""
    for node in ast.walk(subject.tree):
        if not isinstance(node, ast.Compare | ast.Dict | ast.Subscript | ast.Match):
            continue
        inside = list(ast.walk(node))
        names = {one.attr for one in inside if isinstance(one, ast.Attribute)} & _SIZES
        numbers = [one.value for one in inside if isinstance(one, ast.Constant) and type(one.value) is int]
        if names and any(number > 4 for number in numbers):
            raise Fault(
                f"it looks for {', '.join(sorted(names))} of {max(numbers)}",
                where=f"{subject.source.path.name}:{node.lineno}",
                expected="one rule for models of all sizes",
                fix="score experts by what they compute",
                instead="make the number a parameter, which is recorded",
            )
