"""Running code that is not ours: a method's, an operator's or a suite's file.

It may set what torch keeps for the whole process, and it may raise anything; neither must reach the next arm.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import prunebench
from prunebench.errors import PruneBenchError, UsageError

__all__ = ["naming_the_file", "same_torch"]


@contextmanager
def same_torch() -> Iterator[None]:
    """Put back what a method's file may have set for the whole process; other arms must not depend on it."""
    threads, dtype, gradients = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)


@contextmanager
def naming_the_file(methods: frozenset[str], suites: frozenset[str]) -> Iterator[None]:
    """Whatever a method, operator or suite raises becomes one line with its file and line number.

    An error that passed through a method's or an operator's code is theirs; one that passed through a suite is the
    suite's unless it came up in prunebench itself, which then shows its traceback: a bug of ours.

    Args:
        methods: paths of method and operator files.
        suites: paths of suite files.
    """
    try:
        yield
    except PruneBenchError:
        raise
    except (Exception, SystemExit) as error:
        package = str(Path(prunebench.__file__).parent)
        frames = traceback.extract_tb(error.__traceback__)
        places = [frame for frame in frames if frame.filename in methods]
        if not places:
            known = [frame for frame in frames if frame.filename in suites or frame.filename.startswith(package)]
            places = [frame for frame in known[-1:] if frame.filename in suites]
        if not places:
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(
            f"{type(error).__name__} in {places[-1].name}: {reason}", where=f"{places[-1].filename}:{places[-1].lineno}"
        ) from error
