"""What can be read off a method's code without running it: imports, names behind things, keys on sizes.

Each function yields (line, what). They see what is written plainly; a name put together at run time is not read here.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping

import prunebench

__all__ = ["ends_processes", "foreign_imports", "keys_on_sizes", "looks_around", "private_names", "waits"]

# Ways to a module that no import statement names.
_FINDERS = {"importlib", "pkgutil", "runpy", "zipimport"}
# What says how prunebench was started, and so on which model; and who reads that for others.
_AROUND = {
    "sys": {"argv", "orig_argv", "modules"},
    "os": {"environ", "environb", "getenv", "getenvb", "uname", "getlogin"},
    "os.path": {"expandvars"},
    "argparse": {"ArgumentParser"},
    "optparse": {"OptionParser"},
    "platform": {"node", "uname"},
    "contextvars": {"copy_context"},
}
# What waits, or ends the process, whoever calls it.
_WAITING = {"time": {"sleep"}, "signal": {"pause", "alarm", "setitimer"}}
_ENDING = {"os": {"_exit", "abort", "kill", "killpg"}, "signal": {"raise_signal"}}
# Names under which text is run as code, which nobody can read here.
_RUNNERS = {"__import__", "__builtins__", "exec", "eval"}
# Attributes that lead behind an object's public face.
_BEHIND = {
    *("__dict__", "__globals__", "__closure__", "__subclasses__", "__code__", "__traceback__", "__getattribute__"),
    *("__getstate__", "__reduce__", "__reduce_ex__"),
}
# Public names of named tuples, in spite of their looks.
_PUBLIC = {"_asdict", "_replace", "_fields", "_make"}
_LIBRARIES = {"torch", "np", "numpy", "self", "cls"}
_SIZES = {"width", "experts", "index", "top_k", "groups", "model_shape", "shape"}
_LARGEST_PLAIN = 4  # whole numbers up to here are no model's


def foreign_imports(tree: ast.Module, own: str = "") -> Iterator[tuple[int, str]]:
    """Each import that content files may not make, and each use of `prunebench.NAME` that is not public.

    Args:
        tree: the file's code.
        own: a package that the file is part of.
    """
    allowed = {"prunebench", "torch", "numpy", *([own] if own else [])} | sys.stdlib_module_names - _FINDERS
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in modules if name.partition(".")[0] not in allowed)
            yield from ((node.lineno, name) for name in modules if name.startswith("prunebench."))
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module.partition(".")[0] not in allowed or module.startswith("prunebench."):
                yield node.lineno, module
            elif module == "prunebench":
                names = [alias.name for alias in node.names if alias.name not in prunebench.__all__]
                yield from ((node.lineno, f"prunebench.{name}") for name in names)
        elif isinstance(node, ast.Name) and node.id in _RUNNERS:
            yield node.lineno, f"by {node.id}"
    aliases = _names_of(tree, "prunebench")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_name(node.value, aliases) and node.attr not in prunebench.__all__:
            yield node.lineno, f"prunebench.{node.attr}"


def looks_around(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each look at the command line, the loaded modules or the environment."""
    yield from _mentions(tree, _AROUND)


def waits(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each mention of a function that waits, called by the method or by others for it."""
    yield from _mentions(tree, _WAITING)


def ends_processes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each mention of a function that ends this process or another."""
    yield from _mentions(tree, _ENDING)


def _mentions(tree: ast.Module, wanted: Mapping[str, set[str]]) -> Iterator[tuple[int, str]]:
    """Each mention of these names of these modules, however the module is reached."""
    for module, attributes in wanted.items():
        names = _names_of(tree, module)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in attributes and _is_module(node.value, module, names):
                yield node.lineno, f"{module}.{node.attr}"
            elif isinstance(node, ast.ImportFrom) and node.module == module and not node.level:
                yield from ((node.lineno, f"{module}.{one.name}") for one in node.names if one.name in attributes)
            elif isinstance(node, ast.Call) and _last_name(node.func) == "getattr" and len(node.args) > 1:
                text = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
                if text in attributes and _is_module(node.args[0], module, names):
                    yield node.lineno, f"{module}.{text}"


def _is_module(node: ast.AST, module: str, names: set[str]) -> bool:
    """Whether a module is meant: by its name, or as another module's `hub.sys`."""
    return _is_name(node, names) or (isinstance(node, ast.Attribute) and f".{ast.unparse(node)}".endswith(f".{module}"))


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each attribute that is read of something it does not belong to, by a name that is not public."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _at_home(node):
            yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.MatchClass):
            yield from ((node.lineno, f".{name}") for name in node.kwd_attrs if _is_private(name))
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, name) for name in _read_by_call(node))


def _read_by_call(node: ast.Call) -> Iterator[str]:
    """Names that a call of getattr, vars or attrgetter reads of what the method was handed."""
    name = _last_name(node.func)
    if name in {"getattr", "getattr_static"} and len(node.args) > 1 and not _is_name(node.args[0], _LIBRARIES):
        texts = node.args[1:2]
    elif name in {"attrgetter", "methodcaller"}:
        texts = node.args if name == "attrgetter" else node.args[:1]
    elif name == "vars" and node.args and not _is_name(node.args[0], _LIBRARIES):
        yield "by vars(…)"
        return
    else:
        return
    for one in texts:
        if not isinstance(one, ast.Constant):
            yield f"by {name}(…), under a name that is put together,"
        elif isinstance(one.value, str) and any(map(_is_private, one.value.split("."))):
            yield f".{one.value}"


def _is_private(name: str) -> bool:
    return name in _BEHIND or (name.startswith("_") and not name.startswith("__") and name not in _PUBLIC)


def _at_home(node: ast.Attribute) -> bool:
    root: ast.AST = node.value
    while isinstance(root, ast.Attribute):
        root = root.value
    return node.attr not in _BEHIND and _is_name(root, _LIBRARIES)


def keys_on_sizes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each comparison or look-up of a layer's size with a number that only some model has."""
    sized, numbered = _names_of_sizes(tree), _names_of_numbers(tree)
    for node in ast.walk(tree):
        is_get = isinstance(node, ast.Call) and _last_name(node.func) in {"get", "index", "count"}
        if not (is_get or isinstance(node, ast.Compare | ast.Dict | ast.Subscript | ast.Match)):
            continue
        inside = list(ast.walk(node))
        sizes = {one.attr for one in inside if isinstance(one, ast.Attribute)} & _SIZES
        if is_get or (isinstance(node, ast.Compare) and isinstance(node.ops[0], _EQUAL)) or _is_lookup(node, numbered):
            sizes |= {one.id for one in inside if isinstance(one, ast.Name)} & sized
            sizes |= {"length" for one in inside if _is_measured(one)}
        numbers = [ast.unparse(one) for one in inside if _is_large(one)]
        named = [one.id for one in inside if isinstance(one, ast.Name) and one.id in numbered]
        if sizes and (numbers or named):
            line = next(one.lineno for one in inside if isinstance(one, ast.expr))
            yield line, f"{', '.join(sorted(sizes))} of {(numbers or named)[0]}"


_EQUAL = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def _is_lookup(node: ast.AST, numbered: set[str]) -> bool:
    return isinstance(node, ast.Match) or (isinstance(node, ast.Subscript) and _is_name(node.value, numbered))


def _is_large(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value > _LARGEST_PLAIN


def _is_measured(node: ast.AST) -> bool:
    """`len(x)`, `x.size(d)`, `x.numel()`."""
    return isinstance(node, ast.Call) and _last_name(node.func) in {"len", "size", "numel"}


def _is_size(node: ast.AST) -> bool:
    """A size itself, and nothing computed of it."""
    if isinstance(node, ast.Tuple):
        return any(map(_is_size, node.elts))
    if isinstance(node, ast.Subscript):
        return _is_size(node.value)
    return (isinstance(node, ast.Attribute) and node.attr in _SIZES) or _is_measured(node)


def _names_of_sizes(tree: ast.Module) -> set[str]:
    """Names that hold a size: `w = layer.width`, `E, D = rows_ED.shape`."""
    return {name for targets, value in _assignments(tree) if _is_size(value) for name in targets}


def _names_of_numbers(tree: ast.Module) -> set[str]:
    """Names, at module level, of numbers that only some model has, or of tables of them."""
    return {name for targets, value in _assignments(tree, tree.body) if _is_table(value) for name in targets}


def _is_table(value: ast.expr) -> bool:
    """A large whole number, or a literal with such a number in it."""
    plain = (ast.Constant, ast.Dict, ast.Set, ast.List, ast.Tuple)
    return isinstance(value, plain) and any(map(_is_large, ast.walk(value)))


def _assignments(tree: ast.Module, body: list[ast.stmt] | None = None) -> Iterator[tuple[list[str], ast.expr]]:
    for node in body if body is not None else ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            targets = [node.target]
        else:
            continue
        names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        if node.value is not None:
            yield names, node.value


def _names_of(tree: ast.Module, module: str) -> set[str]:
    """Under which names a module is imported."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    named = {alias.asname or alias.name for alias in aliases if alias.name == module}
    # `import os.path` binds os.
    bound = {module for alias in aliases if alias.asname is None and alias.name.partition(".")[0] == module}
    parent, _, own = module.rpartition(".")
    imported = [
        one
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == parent and own
        for one in node.names
    ]
    return named | bound | {one.asname or own for one in imported if one.name == own}


def _is_name(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
