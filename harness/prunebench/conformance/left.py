"""What a method may leave changed of the process and the model: noted, and put back before the next one runs."""

from __future__ import annotations

import builtins
import gc
import locale
import os
import random
import signal
import sys
import time
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.modules.module as torch_module
from torch import Tensor

from prunebench.moe import MoEModel

if TYPE_CHECKING:
    from prunebench.conformance.subject import Trial

__all__ = ["left_behind", "same"]

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
# Hooks that torch calls for every module, and so in the model.
_HOOKS = [
    name for name, value in vars(torch_module).items() if name.startswith("_global_") and type(value) is OrderedDict
]
_STREAMS = ("stdin", "stdout", "stderr", "excepthook", "displayhook")


def _set_threads(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _set_environment(before: dict[str, str]) -> None:
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _set_hooks(before: dict[str, dict[Any, Any]]) -> None:
    for name, hooks in before.items():
        now = getattr(torch_module, name)
        now.clear()
        now.update(hooks)


def _flags() -> dict[str, Any]:
    backends = torch.backends
    return {
        "cuda.matmul.allow_tf32": backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": backends.cudnn.allow_tf32,
        "cudnn.benchmark": backends.cudnn.benchmark,
        "cudnn.deterministic": backends.cudnn.deterministic,
    }


def _set_flags(before: dict[str, Any]) -> None:
    for path, value in before.items():
        place, _, name = path.rpartition(".")
        owner = torch.backends
        for part in place.split("."):
            owner = getattr(owner, part)
        if getattr(owner, name) != value:
            setattr(owner, name, value)


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in sorted(signal.valid_signals())}


def _set_handlers(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _set_streams(before: dict[str, Any]) -> None:
    for name, value in before.items():
        setattr(sys, name, value)


def _set_filters(before: list[Any]) -> None:
    vars(warnings)["filters"][:] = before


def _set_path(before: list[str]) -> None:
    sys.path[:] = before


def _set_precision(before: str) -> None:
    if torch.get_float32_matmul_precision() != before:
        torch.set_float32_matmul_precision(before)


def _set_gc(before: tuple[bool, tuple[int, int, int]]) -> None:
    enabled, threshold = before
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(*threshold)


_SETTINGS: dict[str, _Setting] = {
    "torch.set_num_threads": (torch.get_num_threads, _set_threads),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch.set_float32_matmul_precision": (torch.get_float32_matmul_precision, _set_precision),
    "torch.backends": (_flags, _set_flags),
    "torch's hooks of all modules": (lambda: {name: dict(getattr(torch_module, name)) for name in _HOOKS}, _set_hooks),
    "numpy.seterr": (np.geterr, lambda before: np.seterr(**before)),
    "numpy.set_printoptions": (np.get_printoptions, lambda before: np.set_printoptions(**before)),
    "warnings.filters": (lambda: list(warnings.filters), _set_filters),
    "sys.setrecursionlimit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "sys.path": (lambda: list(sys.path), _set_path),
    "sys's streams and hooks": (lambda: {name: getattr(sys, name) for name in _STREAMS}, _set_streams),
    "gc": (lambda: (gc.isenabled(), gc.get_threshold()), _set_gc),
    "locale": (lambda: locale.setlocale(locale.LC_ALL), lambda before: locale.setlocale(locale.LC_ALL, before)),
    "signal.signal": (_handlers, _set_handlers),
    "os.umask": (_umask, os.umask),
    "os.environ": (lambda: dict(os.environ), _set_environment),
    "os.chdir": (os.getcwd, os.chdir),
}


# --- functions and classes of prunebench and of what it computes with


def _places() -> Iterator[tuple[str, Any]]:
    """(name, module or class) whose functions a method might replace."""
    outside = (builtins, time, torch, torch.nn.functional, torch.Tensor, torch.nn.Module, np, np.linalg)
    for one in outside:
        yield getattr(one, "__name__", str(one)), one
    for name, module in list(sys.modules.items()):
        if name == "prunebench" or name.startswith("prunebench."):
            yield name, module
            for kind in list(vars(module).values()):
                if isinstance(kind, type) and kind.__module__ == name:
                    yield f"{name}.{kind.__name__}", kind


_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, property, classmethod, staticmethod)


def _functions() -> dict[str, tuple[Any, str, Any]]:
    found = {}
    for name, place in _places():
        for attribute, value in list(vars(place).items()):
            if isinstance(value, _CODE):
                found[f"{name}.{attribute}"] = place, attribute, value
    return found


# What some method has replaced: looked at every time from then on, since looking at everything takes milliseconds.
_suspects: dict[str, tuple[Any, str]] = {}


@contextmanager
def _patched(names: list[str], *, closely: bool) -> Iterator[None]:
    """Note functions, classes and properties that are others afterwards, and put them back."""
    suspects = {name: (place, one, vars(place)[one]) for name, (place, one) in _suspects.items()}
    before = _functions() if closely else suspects
    try:
        yield
    finally:
        for name, (place, attribute, value) in before.items():
            if vars(place).get(attribute) is not value:
                names.append(name)
                _suspects[name] = place, attribute
                setattr(place, attribute, value)


@contextmanager
def left_behind(trial: Trial, moe: MoEModel | None = None, *, closely: bool = True) -> Iterator[None]:
    """Note what is left changed of the process and the model, and put it back; closely: of all functions, too."""
    tensors = {} if moe is None else moe.model.state_dict()
    weights = {name: value.clone() for name, value in tensors.items()}
    states = {name: read() for name, (read, _) in _GENERATORS.items()}
    replaced: list[str] = []
    try:
        with _patched(replaced, closely=closely), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = {name: read() for name, (read, _) in _SETTINGS.items()}
            try:
                yield
            finally:
                changed = [name for name, (read, _) in _SETTINGS.items() if read() != settings[name]]
                for name in changed:
                    _SETTINGS[name][1](settings[name])
                trial.settings += changed
    finally:
        trial.settings += replaced
        for name, (read, write) in _GENERATORS.items():
            if not same(read(), states[name]):
                trial.generators.append(name)
                write(states[name])
        for name, value in tensors.items():
            if not torch.equal(value, weights[name]):
                trial.weights.append(name)
                value.copy_(weights[name])


_GENERATORS: dict[str, _Setting] = {
    "random": (random.getstate, random.setstate),
    "numpy.random": (lambda: np.random.get_state(legacy=False), np.random.set_state),  # noqa: NPY002  watched
    "torch": (torch.get_rng_state, torch.set_rng_state),
}


def same(one: Any, other: Any) -> bool:
    """Whether two values hold the same numbers, whatever they are made of; NaN is the same as NaN."""
    fine: bool
    parts = _parts(one)
    if one is other:
        fine = True
    elif type(one) is not type(other):
        fine = False
    elif isinstance(one, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        fine = alike and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    elif isinstance(one, np.ndarray):
        fine = np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    elif isinstance(one, Mapping):
        fine = list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    elif isinstance(one, list | tuple):
        fine = len(one) == len(other) and all(map(same, one, other))
    elif isinstance(one, float | np.floating):
        fine = bool(one == other or (np.isnan(one) and np.isnan(other)))
    else:
        fine = bool(one == other) if parts is None else same(parts, _parts(other))
    return fine


def _parts(value: Any) -> dict[str, Any] | None:
    """What an object holds by name; None for one that holds nothing by name, such as a number or a set."""
    if isinstance(value, Tensor | type):
        return None
    names = {name for kind in type(value).__mro__ for name in _slots(kind)} | set(getattr(value, "__dict__", ()))
    parts = {name: getattr(value, name) for name in sorted(names) if hasattr(value, name)}
    return parts if parts or hasattr(value, "__dict__") else None


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    named = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in named if name not in {"__dict__", "__weakref__"})
