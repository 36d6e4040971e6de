"""The grid that a weight is rounded to: per row and group of columns a scale and a zero, and the integers between.

A weight is (q − z)·s with integers q and z in 0 … 2^b − 1. The scale is rounded to the dtype in which it is stored
before anything is rounded to it, so that what is computed with is what a file holds. The range of every group includes
0, so that 0 stays 0.

Not here: which integer a weight becomes under GPTQ (`kernel`), and bytes (`storage`).

E matrices, R rows (outputs), C columns (inputs), G groups of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prunebench.errors import UsageError

__all__ = ["Grid", "dequantized", "grid_of", "groups_of"]

SMALLEST_SCALE = 2.0**-24  # the smallest positive fp16 number; a narrower group is all but zero


@dataclass(frozen=True)
class Grid:
    """Scales and zeros of E matrices.

    Args:
        scale_ERG: as stored.
        zero_ERG: integers 0 … 2^b − 1, in the scale's dtype, which holds them exactly.
        bits_E: b of each matrix.
        group: columns that share a scale; the last group of a row may be smaller.
    """

    scale_ERG: Tensor
    zero_ERG: Tensor
    bits_E: Tensor
    group: int


def groups_of(columns: int, group: int) -> int:
    """G = ⌈C / group⌉."""
    return -(-columns // group)


def grid_of(weight_ERC: Tensor, bits_E: Tensor, group: int, *, scale_dtype: torch.dtype = torch.float16) -> Grid:
    """The asymmetric min-max grid of every row and group (2610.41366 App. F.2).

    Args:
        weight_ERC: floating.
        bits_E: b of each matrix, int64.
        group: columns that share a scale.
        scale_dtype: in which scales are stored.

    Raises:
        UsageError: a weight that is no number, or a range that the scale's dtype cannot hold.
    """
    experts, rows, columns = weight_ERC.shape
    groups = groups_of(columns, group)
    low = weight_ERC.new_empty(experts, rows, groups, dtype=torch.float32)
    high = torch.empty_like(low)
    for g in range(groups):
        part = weight_ERC[:, :, g * group : (g + 1) * group].float()
        low[:, :, g] = part.amin(-1).clamp_(max=0.0)
        high[:, :, g] = part.amax(-1).clamp_(min=0.0)
    most_E11 = (2**bits_E - 1).to(low.device)[:, None, None]
    span = high - low
    # A group of zeros: any scale says so.
    scale = torch.where(span == 0, 1.0, span / most_E11).clamp_(min=SMALLEST_SCALE).to(scale_dtype)
    if not bool(torch.isfinite(scale).all()):
        at = int((~torch.isfinite(scale)).flatten(1).any(1).nonzero()[0])
        raise UsageError(
            "a group of weights has no scale",
            where=f"matrix {at}",
            expected=f"finite weights within what {str(scale_dtype).removeprefix('torch.')} scales can span",
        )
    zero = torch.minimum((-low / scale.float()).round_(), most_E11).to(scale_dtype)
    return Grid(scale, zero, bits_E, group)


def dequantized(codes_ERC: Tensor, grid: Grid) -> Tensor:
    """(q − z)·s of every weight, float32.

    Args:
        codes_ERC: q.
        grid: s and z.
    """
    columns = codes_ERC.shape[-1]
    weight_ERC = torch.empty(codes_ERC.shape, dtype=torch.float32, device=codes_ERC.device)
    for g in range(groups_of(columns, grid.group)):
        part = slice(g * grid.group, (g + 1) * grid.group)
        scale, zero = grid.scale_ERG[:, :, g, None].float(), grid.zero_ERG[:, :, g, None].float()
        weight_ERC[:, :, part] = (codes_ERC[:, :, part].float() - zero) * scale
    return weight_ERC
