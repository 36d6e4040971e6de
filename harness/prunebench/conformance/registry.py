"""The list of checks: functions of a `Subject` that raise a `Fault`, or `NotApplicable` with a reason, or return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from prunebench.conformance.subject import Subject

__all__ = ["CHECKS", "GROUPS", "Check", "Group", "check"]

Group = Literal["interface", "purity", "selection", "metamorphic", "edge", "answers", "limits"]
GROUPS: dict[Group, str] = {
    "interface": "what a method is made of",
    "purity": "what its code does beside computing",
    "selection": "the mask",
    "metamorphic": "what must not change the mask or the answers",
    "edge": "data at the edge",
    "answers": "replace and route",
    "limits": "time and memory",
}


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        name: of its function, without `check_`.
        group: what it is about.
        run: raises if the method breaks the rule.
        after: checks without which this one would say nothing new; if one of them fails, it is not run.
        of: `mask` for criteria only, `answers` for methods that fill or edit, `""` for all.
    """

    name: str
    group: Group
    run: Callable[[Subject], None]
    after: tuple[str, ...] = ()
    of: Literal["", "mask", "answers"] = ""

    @property
    def rule(self) -> str:
        """The rule in a sentence."""
        return (inspect.getdoc(self.run) or "").partition("\n")[0]


_checks: dict[str, Check] = {}
CHECKS: Mapping[str, Check] = MappingProxyType(_checks)


def check(
    group: Group, *, after: tuple[str, ...] = (), of: Literal["", "mask", "answers"] = ""
) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    """Put a function `check_NAME` on the list."""

    def put(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
        name = function.__name__.removeprefix("check_")
        _checks[name] = Check(name, group, function, after, of)
        return function

    return put
