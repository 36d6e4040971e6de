"""What is quantized to how many bits, and by which rules: a setting with a name, as data.

    w4, w3, w2          every decoder linear
    e3a4, e2a4          routed experts at the first number, every other decoder linear at the second
    mc3a4               routed experts at 2, 3 or 4 bits each, 3 on average (`allocation`), the others at 4
    w4(group=64)        with parameters: group, zeros, groups, fewest

Bits, groups and how zeros are stored are `storage.Bits`; what is here is how the integers come about. No torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from prunebench.errors import UsageError
from prunebench.storage import Bits

__all__ = ["NAMES", "Setting", "setting_of"]

NAMES: Final = ("w4", "w3", "w2", "e3a4", "e2a4", "mc3a4")
VERSION: Final = 1  # raised when the same setting gives other integers
_MIXED: Final = re.compile(r"mc(?P<mean>[234])a(?P<linears>\d+)")
_WITH: Final = re.compile(r"(?P<name>[\w]+)\((?P<parameters>[^()]*)\)")
_GROUPS: Final = ("static", "dynamic")


@dataclass(frozen=True)
class Setting:
    """How a model is quantized.

    Args:
        name: as it was asked for, without parameters.
        bits: widths, groups and zeros; where experts differ, `bits.experts` is their mean.
        mixed: whether each expert has a width of its own.
        groups: when a group's grid is fixed (see `kernel.gptq`).
        fewest: a linear that saw fewer tokens is rounded to nearest.
        damping: share of H's mean diagonal that is added to its diagonal.
    """

    name: str
    bits: Bits
    mixed: bool = False
    groups: Literal["static", "dynamic"] = "static"
    fewest: int = 128
    damping: float = 0.01

    @property
    def text(self) -> str:
        """As `setting_of` takes it, with those parameters that are not as usual."""
        usual = Setting(self.name, Bits())
        given = {
            "group": (self.bits.group, usual.bits.group),
            "zeros": (self.bits.zeros, usual.bits.zeros),
            "groups": (self.groups, usual.groups),
            "fewest": (self.fewest, usual.fewest),
        }
        said = [f"{key}={value}" for key, (value, plain) in given.items() if value != plain]
        return f"{self.name}({', '.join(said)})" if said else self.name

    def to_json(self) -> dict[str, Any]:
        """As an identity has it: everything that changes an integer or a stored byte."""
        return {
            "name": self.name,
            "version": VERSION,
            "experts": self.bits.experts,
            "mixed": self.mixed,
            "linears": self.bits.linears,
            "group": self.bits.group,
            "zeros": self.bits.zeros,
            "groups": self.groups,
            "fewest": self.fewest,
            "damping": self.damping,
        }


def setting_of(text: str) -> Setting:
    """The setting of a name, with parameters in parentheses if any.

    Raises:
        UsageError: an unknown name, parameter or value, or one that quantizes nothing.
    """
    found = _WITH.fullmatch(text)
    name, given = (found["name"], found["parameters"]) if found else (text, "")
    parameters = dict(_pair(part, text) for part in given.split(",") if part.strip())
    if unknown := sorted(set(parameters) - {"group", "zeros", "groups", "fewest"}):
        raise UsageError(
            f"unknown parameter {unknown[0]!r}", where=f"quantization {text}", expected="group, zeros, groups or fewest"
        )
    more: dict[str, Any] = {"group": _number(parameters.get("group", "128"), text)}
    if "zeros" in parameters:
        more["zeros"] = parameters["zeros"]
    if (mixed := _MIXED.fullmatch(name)) is not None:
        bits = replace(Bits.named(f"w{mixed['linears']}", **more), experts=int(mixed["mean"]))
    else:
        bits = Bits.named(name, **more)
    groups = parameters.get("groups", "static")
    if groups not in _GROUPS:
        raise UsageError(f"unknown groups {groups!r}", where=f"quantization {text}", expected=" or ".join(_GROUPS))
    if bits.experts is None and bits.linears is None:
        raise UsageError(f"{name} quantizes nothing", expected=", ".join(NAMES), fix="leave the quantization out")
    return Setting(
        name,
        bits,
        mixed=mixed is not None,
        groups="dynamic" if groups == "dynamic" else "static",
        fewest=_number(parameters.get("fewest", "128"), text),
    )


def _pair(part: str, text: str) -> tuple[str, str]:
    key, equals, value = part.partition("=")
    if not equals:
        raise UsageError(f"{part.strip()!r} is no parameter", where=f"quantization {text}", expected="name=value")
    return key.strip(), value.strip()


def _number(text: str, where: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{text!r} is no number", where=f"quantization {where}", expected="a whole number from 0")
    return int(text)
