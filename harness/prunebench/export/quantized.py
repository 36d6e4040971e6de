"""Quantized linears as numbers: the one place where quantized parameters come in.

A `Quantizer` makes integer codes and scales of one linear's weight. Round-to-nearest is the one that is here; whatever
else finds codes and scales (GPTQ, say) is another function of that type, given to `ct.write` in its place.

R rows (outputs), C columns (inputs), G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from prunebench.errors import PrerequisiteError, UsageError

__all__ = ["Quantized", "Quantizer", "Scheme", "need_compressed_tensors", "round_to_nearest"]


@dataclass(frozen=True)
class Scheme:
    """What is quantized, and how finely, in groups of a row.

    Args:
        bits: of the experts' matrices, 2 to 8.
        attention_bits: of the attention's, or None to leave it as it is.
        group_size: columns that share a scale.
        symmetric: whether codes stand for multiples of the scale, or each group has a zero of its own.
    """

    bits: int = 4
    attention_bits: int | None = None
    group_size: int = 128
    symmetric: bool = True

    def __post_init__(self) -> None:
        for bits in (self.bits, self.attention_bits):
            if bits is not None and not 2 <= bits <= 8:
                raise UsageError(f"{bits} bits", expected="2 to 8")
        if self.group_size < 1:
            raise UsageError(f"group size {self.group_size}", expected="at least 1 column")

    def to_json(self) -> dict[str, Any]:
        """Plain data; a symmetric scheme as it was written before there were others, so that older readers take it."""
        data = asdict(self)
        if self.symmetric:
            del data["symmetric"]
        return data

    def arguments(self, bits: int) -> dict[str, Any]:
        """The scheme in compressed-tensors' words."""
        return {
            "num_bits": bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "group",
            "group_size": self.group_size,
        }


@dataclass(frozen=True)
class Quantized:
    """A linear's weight as (codes − zero)·scale.

    Args:
        codes_RC: int8, from -2^(b-1) to 2^(b-1) - 1.
        scales_RG: in the dtype that they are stored in.
        zeros_RG: int8, in the range of the codes; None for 0.
    """

    codes_RC: Tensor
    scales_RG: Tensor
    zeros_RG: Tensor | None = None

    def values(self) -> Tensor:
        """The weight that is computed with, in the dtype of the scales ([R, C])."""
        codes_RGS = self.codes_RC.unflatten(1, (self.scales_RG.shape[1], -1)).to(self.scales_RG.dtype)
        if self.zeros_RG is not None:
            codes_RGS = codes_RGS - self.zeros_RG.unsqueeze(-1).to(codes_RGS.dtype)
        weight_RC: Tensor = (codes_RGS * self.scales_RG.unsqueeze(-1)).flatten(1)
        return weight_RC


Quantizer: TypeAlias = Callable[[str, Tensor, int], Quantized]
"""(name of the linear in the files, its weight [R, C], bits) -> its codes and scales."""


def need_compressed_tensors() -> None:
    """Raise unless the package is there.

    Raises:
        PrerequisiteError: naming the extra.
    """
    try:
        import compressed_tensors  # noqa: F401  whether it can be
    except ImportError as error:
        raise PrerequisiteError(
            "compressed-tensors is not installed", expected="the extra ct", fix="pip install 'prunebench[ct]'"
        ) from error


def round_to_nearest(scheme: Scheme, dtype: torch.dtype) -> Quantizer:
    """Scales, and zeros if they are asked for, from each group's extremes, by compressed-tensors; codes to the nearest.

    Scales are rounded to `dtype` first, and codes are made with what is stored.

    Args:
        scheme: gives the group size, and whether there are zeros.
        dtype: of the scales.
    """
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    def quantize(_name: str, weight_RC: Tensor, bits: int) -> Quantized:
        groups_RGS = weight_RC.float().unflatten(1, (-1, scheme.group_size))
        arguments = QuantizationArgs(**scheme.arguments(bits))
        scales_RG, zeros_RG = calculate_qparams(groups_RGS.amin(-1), groups_RGS.amax(-1), arguments)
        scales_RG = scales_RG.to(dtype)
        steps_RGS = groups_RGS / scales_RG.float().unsqueeze(-1)
        most = 2 ** (bits - 1)
        if scheme.symmetric:
            return Quantized(steps_RGS.round().clamp(-most, most - 1).to(torch.int8).flatten(1), scales_RG)
        codes_RGS = (steps_RGS + zeros_RG.unsqueeze(-1)).round().clamp(-most, most - 1)
        return Quantized(codes_RGS.to(torch.int8).flatten(1), scales_RG, zeros_RG.to(torch.int8))

    return quantize
