"""Content by name or by path: methods, suites, models and tracks.

A method or a suite is one Python file outside the package; a method may also be a class that an installed distribution
names under the entry point group `prunebench.methods`. It is compiled from the very bytes that are hashed, under a
private module name made of its path and content, and never from a cached bytecode file; `methods/` and `suites/` are
not on `sys.path`. Names are file stems. This module neither loads model weights nor looks anything up on a network.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.abc
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.parameters import make

if TYPE_CHECKING:
    # For type checkers only: a listing of names must not load torch.
    from prunebench.method import Method
    from prunebench.suite import Suite

__all__ = [
    "MODULE_PREFIX",
    "Kind",
    "ModelSource",
    "Source",
    "available",
    "content_root",
    "file_digests",
    "load_class_of",
    "load_method",
    "load_method_class",
    "load_suite",
    "plugins",
    "resolve_model",
    "resolve_track",
    "source_of",
]

Kind = Literal["methods", "suites", "models", "tracks"]

_FOLDERS: dict[Kind, str] = {
    "methods": "methods",
    "suites": "suites",
    "models": "fixtures/zoo",
    "tracks": "leaderboard/tracks",
}
_PLUGINS = "prunebench.methods"
MODULE_PREFIX = "_prunebench_content_"  # of modules that are loaded by their path
_SOURCE = "__prunebench_source__"
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class Source:
    """The file that a method or suite came from, and the sha256 (hex) of the bytes that were run."""

    path: Path
    sha256: str


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are.

    Args:
        kind: "zoo" (shipped with prunebench), "folder" (on this disk) or "hub".
        name: the name for tables: a folder's own name, or the hub id.
        path: the folder; None for a hub model.
        repo: the hub id `org/name`; None for a folder.
        revision: the hub revision asked for, if any.
    """

    kind: Literal["zoo", "folder", "hub"]
    name: str
    path: Path | None = None
    repo: str | None = None
    revision: str | None = None

    @property
    def location(self) -> str:
        """What `from_pretrained` takes."""
        return str(self.path) if self.path is not None else str(self.repo)


# ------------------------------------------------------------------------------------------------ where things are


def content_root() -> Path:
    """The folder that holds methods/, suites/, fixtures/ and leaderboard/: the checkout, or else the wheel's copy.

    Raises:
        PrerequisiteError: if the installation has neither.
    """
    package = Path(__file__).resolve().parent
    checkout = package.parent.parent
    for folder in (checkout, package / "_shipped"):
        if (folder / "methods").is_dir() and (folder / "suites").is_dir():
            return folder
    raise PrerequisiteError(
        "this installation has no methods and suites",
        where=str(package),
        expected=f"a checkout at {checkout}, or {package / '_shipped'}",
        fix="install prunebench from a wheel, or run it from a checkout",
    )


def available(kind: Kind) -> list[str]:
    """The names of all shipped contents of a kind, sorted. Loads none of them."""
    folder = content_root() / _FOLDERS[kind]
    if kind == "models":
        return sorted(config.parent.name for config in folder.glob("*/config.json"))
    return sorted(file.stem for file in folder.glob(f"*{_suffix(kind)}") if not file.name.startswith(("_", ".")))


def plugins() -> dict[str, importlib.metadata.EntryPoint]:
    """Methods of installed distributions (entry points of the group `prunebench.methods`), by name. Loads none of them.

    A shipped method of the same name hides one.

    Raises:
        UsageError: two distributions claim one name.
    """
    shipped, found = set(available("methods")), dict[str, importlib.metadata.EntryPoint]()
    for one in importlib.metadata.entry_points(group=_PLUGINS):
        other = found.get(one.name)
        if other is not None and other.value != one.value:
            raise UsageError(
                f"two plug-ins are named {one.name!r}",
                where=f"{_distribution(other)} and {_distribution(one)}",
                fix="uninstall one of them",
            )
        if one.name not in shipped:
            found[one.name] = one
    return dict(sorted(found.items()))


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    return "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def _load_plugin(entry: importlib.metadata.EntryPoint) -> type[Method]:
    """The class that an entry point names.

    Raises:
        UsageError: it cannot be loaded, is no method class, or has another name.
    """
    from prunebench.method import Method

    where = f"{_PLUGINS}: {entry.name} = {entry.value}, {_distribution(entry)}"
    try:
        cls = entry.load()
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"the plug-in cannot be loaded: {type(error).__name__}: {error}", where=where, fix="update or uninstall it"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Method)) or inspect.isabstract(cls):
        raise UsageError("the plug-in names no method class", where=where, expected="package.module:Class")
    _check_class(Path(inspect.getfile(cls)), cls)
    if cls.name != entry.name:
        raise UsageError(f"the plug-in's method is named {cls.name!r}", where=where, expected=f"{entry.name!r}")
    return cls


def file_digests(kind: Kind) -> dict[str, str]:
    """The sha256 of every shipped file of a kind, by name, as identities have it."""
    folder = content_root() / _FOLDERS[kind]
    suffix = ".toml" if kind == "tracks" else ".py"
    return {name: hashlib.sha256((folder / f"{name}{suffix}").read_bytes()).hexdigest() for name in available(kind)}


def resolve_model(name: str) -> ModelSource:
    """Find a model by zoo name, local folder or hub id `org/name[@revision]`, in this order.

    Raises:
        UsageError: for a folder without config.json, or a name that is none of the three.
    """
    zoo = content_root() / _FOLDERS["models"]
    if name in available("models"):
        return ModelSource("zoo", name, path=zoo / name)
    folder = _as_path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageError(
                "the folder holds no model", where=str(folder), expected="config.json and safetensors files"
            )
        return ModelSource("folder", folder.resolve().name, path=folder)
    looks_like_path = name.startswith(("/", ".", "~")) or folder.exists()
    hub = None if looks_like_path else _HUB_ID.fullmatch(name)
    if hub is not None:
        return ModelSource("hub", hub["repo"], repo=hub["repo"], revision=hub["revision"])
    if looks_like_path:
        raise UsageError("no such model folder", where=name, expected="a folder with config.json")
    raise _unknown("model", name, available("models"), "a folder with config.json, or a hub id org/name[@revision]")


def resolve_track(name_or_path: str) -> Path:
    """The track file of a name, or the path itself.

    Raises:
        UsageError: if there is none.
    """
    return _resolve_file("tracks", name_or_path)


def _as_path(text: str) -> Path:
    """The path that a person typed; `~` of a user who does not exist is left as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _suffix(kind: Kind) -> str:
    return ".toml" if kind == "tracks" else ".py"


def _is_path(kind: Kind, name_or_path: str) -> bool:
    """Whether it is meant as a path: anything with a separator or the suffix."""
    return "/" in name_or_path or name_or_path.endswith(_suffix(kind))


def _resolve_file(kind: Kind, name_or_path: str) -> Path:
    """The file of a content name, or the path itself."""
    suffix = _suffix(kind)
    noun = kind.removesuffix("s")
    if _is_path(kind, name_or_path):
        path = _as_path(name_or_path)
        if not path.is_file():
            raise UsageError(f"no such {noun} file", where=name_or_path, expected=f"a {suffix} file")
        return path.resolve()
    if name_or_path not in available(kind):
        names = [*available(kind), *(plugins() if kind == "methods" else ())]
        raise _unknown(noun, name_or_path, names, f"the path of a {suffix} file")
    return content_root() / _FOLDERS[kind] / f"{name_or_path}{suffix}"


def _unknown(noun: str, name: str, names: Iterable[str], otherwise: str = "") -> UsageError:
    """The error for a name that does not exist: the closest one, and all there are."""
    names = list(names)
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return UsageError(
        f"unknown {noun} {name!r}",
        expected=f"one of {', '.join(names) or '(none here)'}" + (f", or {otherwise}" if otherwise else ""),
        fix=f"did you mean {close[0]}?" if close else "",
    )


# ------------------------------------------------------------------------------------------------- running a file


class _ContentLoader(importlib.abc.SourceLoader):
    """Compiles given bytes: what is hashed is what runs, whatever happens to the file or to a bytecode cache."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str) -> bytes:
        if path != str(self._path):
            raise OSError(f"{path} is not part of {self._path}")
        return self._content


def _load_file(kind: Kind, path: Path) -> types.ModuleType:
    """Run a content file as a private module; the same file with the same content is run once.

    Raises:
        UsageError: with file and line, if it cannot be read, compiled or run.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError("cannot read the file", where=str(path), fix=str(error)) from error
    digest = hashlib.sha256(content).hexdigest()
    place = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    stem = re.sub(r"\W", "_", path.stem)
    name = f"{MODULE_PREFIX}{kind}_{stem}_{digest[:16]}_{place}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _ContentLoader(path, content)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    setattr(module, _SOURCE, Source(path, digest))
    # Before it runs: dataclasses look their module up to read annotations that are strings.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise _file_error(path, error) from error
        raise
    return module


def _file_error(path: Path, error: BaseException) -> UsageError:
    """One line for whatever a content file raised while it was compiled or run."""
    if isinstance(error, SyntaxError):
        return UsageError(f"syntax error: {error.msg}", where=f"{error.filename or path}:{error.lineno or 1}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    fix = ""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        fix = f"install {error.name.partition('.')[0]}, or do without it"
    return UsageError(
        f"the file cannot be loaded: {type(error).__name__}: {error}",
        where=f"{path}:{lines[-1]}" if lines else str(path),
        fix=fix,
    )


def source_of(thing: object) -> Source:
    """The file that defines a method, a suite or a class, and the sha256 of what ran.

    Raises:
        UsageError: for something typed into a prompt or notebook, which has no file.
    """
    for module in [module for name, module in list(sys.modules.items()) if name.startswith(MODULE_PREFIX)]:
        if vars(module).get("SUITE") is thing:
            return _stored_source(module)
    cls = thing if isinstance(thing, type) else type(thing)
    defining = sys.modules.get(cls.__module__)
    if defining is not None and hasattr(defining, _SOURCE):
        return _stored_source(defining)
    try:
        path = Path(inspect.getfile(cls))
        return Source(path, hashlib.sha256(path.read_bytes()).hexdigest())
    except (TypeError, OSError) as error:
        raise UsageError(
            f"{cls.__name__} has no source file",
            expected="a class in a .py file, so that its record can name what ran",
            fix="write it to a file and load it by path",
        ) from error


def _stored_source(module: types.ModuleType) -> Source:
    source = getattr(module, _SOURCE)
    assert isinstance(source, Source)
    return source


# ---------------------------------------------------------------------------------------------- methods and suites


def load_method_class(name_or_path: str) -> type[Method]:
    """The one method class of a file, or the class that a plug-in names.

    Raises:
        UsageError: for an unknown name, or a file that does not define exactly one concrete frozen-dataclass method.
    """
    from prunebench.method import Method  # loads torch

    named = not _is_path("methods", name_or_path) and name_or_path not in available("methods")
    if named and (entry := plugins().get(name_or_path)) is not None:
        return _load_plugin(entry)
    path = _resolve_file("methods", name_or_path)
    module = _load_file("methods", path)
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__
    ]
    own = list(dict.fromkeys(own))  # an alias is not a second class
    concrete = [cls for cls in own if not inspect.isabstract(cls)]
    if len(concrete) > 1:
        raise UsageError(
            f"the file defines {len(concrete)} methods",
            where=", ".join(_place(path, cls) for cls in concrete),
            expected="one method per file",
            fix="move the others to files of their own",
        )
    if not concrete and own:
        missing = sorted(getattr(own[-1], "__abstractmethods__", ()))
        raise UsageError(
            f"{own[-1].__name__} leaves {', '.join(missing)} open",
            where=_place(path, own[-1]),
            expected="a method with every abstract part filled",
            fix=f"define {', '.join(missing)}",
        )
    if not concrete:
        raise UsageError(
            "the file defines no method",
            where=str(path),
            expected="one subclass of prunebench.Method",
            fix="write `class Name(Method):`",
        )
    _check_class(path, concrete[0])
    return concrete[0]


def _place(path: Path, cls: type) -> str:
    """`file:line Name` of a class."""
    try:
        return f"{path}:{inspect.getsourcelines(cls)[1]} {cls.__name__}"
    except OSError:
        return f"{path} {cls.__name__}"


def _check_class(path: Path, cls: type[Method]) -> None:
    """Raise unless the class has a name and is itself a frozen dataclass: nothing but its fields can then change it."""
    if not isinstance(getattr(cls, "name", None), str):
        raise UsageError(
            f"{cls.__name__} has no name",
            where=_place(path, cls),
            expected="the name that records and tables show",
            fix=f'write name = "{path.stem}" in the class',
        )
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise UsageError(
            f"{cls.__name__} is not a frozen dataclass",
            where=_place(path, cls),
            expected="its fields as its only parameters, so that the record holds them all",
            fix="write @dataclass(frozen=True) above the class",
        )


def load_method(name_or_path: str, parameters: Mapping[str, object] | None = None) -> Method:
    """Load a method by name or by the path of its file.

    Args:
        name_or_path: a file stem of methods/, a path, or a plug-in's name.
        parameters: values of the method's fields, of the fields' types; the others keep their defaults.

    Raises:
        UsageError: as `load_method_class`; for an unknown, missing or wrong parameter.
    """
    return make(load_method_class(name_or_path), parameters or {})


def load_class_of(path: Path, name: str) -> type[Method]:
    """A method class by its name in a file that may define several, such as a test's.

    Raises:
        UsageError: as `load_method_class`; no such class.
    """
    from prunebench.method import Method

    found = vars(_load_file("methods", path)).get(name)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UsageError(f"no method class {name!r}", where=str(path), expected="a class at module level")
    _check_class(path, found)
    return found


def load_suite(name_or_path: str) -> Suite:
    """Load a suite by name or by the path of its file; `name=source` says where data come from that are not shipped.

    Raises:
        UsageError: for an unknown name, a file whose `SUITE` is missing or no `prunebench.Suite`, or a source for a
            suite that has its data with it.
    """
    from prunebench.suite import Suite

    if "=" in name_or_path and not _as_path(name_or_path).is_file():
        name, _, source = name_or_path.partition("=")
        named = load_suite(name)
        if not source.strip():
            raise UsageError(
                f"suite {name} is given no source",
                where=f"--suite {name_or_path}",
                expected=f"{name}=SOURCE: a folder, a file, hub: or hub:ID[@REV]",
                fix=f"give --suite {name} for its usual data",
            )
        return named.with_source(source)
    path = _resolve_file("suites", name_or_path)
    suite = vars(_load_file("suites", path)).get("SUITE")
    if not isinstance(suite, Suite):
        found = "no SUITE" if suite is None else f"a SUITE of type {type(suite).__name__}"
        raise UsageError(
            f"the file has {found}",
            where=str(path),
            expected="SUITE = an instance of prunebench.Suite, at module level",
        )
    return suite
