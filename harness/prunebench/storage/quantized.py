"""What a quantized matrix stores, by formula: packed integers, a scale and a zero per row and group of columns.

Packed is meant as compressed-tensors' `pack-quantized` files are: rows of whole 32-bit words, b-bit zeros packed along
the rows, `weight_shape` beside them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal, TypeAlias, get_args

from prunebench.errors import UsageError

__all__ = ["Bits", "Packed", "Zeros", "bits_per_weight", "packed"]

Zeros: TypeAlias = Literal["fp16", "bits"]

_WORD: Final = 32
_FP16: Final = 16
_SHAPE_BYTES: Final = 16  # `weight_shape`, two 64-bit integers
_WIDTHS: Final = range(2, 9)
_NAME: Final = re.compile(r"w(?P<both>\d+)|e(?P<experts>\d+)a(?P<linears>\d+)")


def _width(text: str) -> int | None:
    """16 bits are how a weight is saved."""
    return None if int(text) == _FP16 else int(text)


@dataclass(frozen=True)
class Bits:
    """How a model's decoder linears are quantized (2610.41366 App. F.2); all else stays as it is saved.

    Args:
        experts: bits of routed experts' weights, 2 to 8; None leaves them as they are.
        linears: bits of every other decoder linear: attention, shared experts, dense MLPs.
        group: columns that share a scale and a zero; the last group of a row may be smaller.
        zeros: how a zero is stored: in 16 bits, as the paper has it, or in as many as a weight.
    """

    experts: int | None = None
    linears: int | None = None
    group: int = 128
    zeros: Zeros = "fp16"

    def __post_init__(self) -> None:
        for what, bits in (("experts", self.experts), ("linears", self.linears)):
            if bits is not None and bits not in _WIDTHS:
                raise UsageError(f"{bits} bits", where=what, expected="2 to 8, or 16: as it is saved")
        if self.group < 1:
            raise UsageError(f"groups of {self.group}", expected="at least 1 column")
        if self.zeros not in get_args(Zeros):
            raise UsageError(f"unknown zeros {self.zeros!r}", expected=" or ".join(get_args(Zeros)))

    @classmethod
    def named(cls, name: str, *, group: int = 128, zeros: Zeros = "fp16") -> Bits:
        """From its name: `w4` (everything at 4 bits), `e3a4` (experts at 3, the others at 4), `w16` (nothing)."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise UsageError(f"unknown quantization {name!r}", expected="such as w4, w3, w2, e3a4, e2a4 or w16")
        experts, linears = (_width(found["both"] or found[key]) for key in ("experts", "linears"))
        return cls(experts, linears, group, zeros)

    @property
    def name(self) -> str:
        """As `named` takes it."""
        experts, linears = (_FP16 if bits is None else bits for bits in (self.experts, self.linears))
        return f"w{experts}" if experts == linears else f"e{experts}a{linears}"


@dataclass(frozen=True)
class Packed:
    """Bytes of one quantized matrix.

    Args:
        weights: packed integers, every row in whole 32-bit words.
        scales: fp16.
        zeros: fp16, or b-bit, packed along the rows in whole 32-bit words.
        ideal: weights, scales and zeros without any padding, rounded up to a byte.
    """

    weights: int
    scales: int
    zeros: int
    ideal: int

    @property
    def on_disk(self) -> int:
        """Weights, scales and zeros as they are packed; `weight_shape` is metadata."""
        return self.weights + self.scales + self.zeros

    @property
    def metadata(self) -> int:
        """`weight_shape`, which only a file needs."""
        return _SHAPE_BYTES


def packed(rows: int, columns: int, bits: int, *, group: int = 128, zeros: Zeros = "fp16") -> Packed:
    """Bytes of a quantized matrix of `rows` outputs and `columns` inputs, with groups along the inputs.

    weights = 4 · rows · ⌈columns · b / 32⌉; scales = 2 · rows · G with G = ⌈columns / group⌉; zeros = 2 · rows · G, or
    4 · G · ⌈rows · b / 32⌉.
    """
    groups = -(-columns // group)
    zero_bits = _FP16 if zeros == "fp16" else bits
    return Packed(
        weights=4 * rows * -(-columns * bits // _WORD),
        scales=2 * rows * groups,
        zeros=2 * rows * groups if zeros == "fp16" else 4 * groups * -(-rows * bits // _WORD),
        ideal=-(-(rows * columns * bits + rows * groups * (_FP16 + zero_bits)) // 8),
    )


def bits_per_weight(bits: int, *, group: int = 128, zeros: Zeros = "fp16") -> float:
    """b + (16 + bits of a zero) / group, for a matrix of whole groups and whole words."""
    return float(bits + Fraction(_FP16 + (_FP16 if zeros == "fp16" else bits), group))
