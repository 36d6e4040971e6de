"""GPTQ from its definition, in float64: one matrix, one column after the other, the Hessian inverted anew each time."""

from __future__ import annotations

import torch
from torch import Tensor


def grid_by_hand(weight_RC: Tensor, bits: int, group: int) -> tuple[list[list[float]], list[list[int]]]:
    """fp16 scale and integer zero of every row and group, number by number."""
    scales, zeros = [], []
    for row in weight_RC.double().tolist():
        parts = [row[at : at + group] for at in range(0, len(row), group)]
        spans = [
            (min(0.0, *part), max(0.0, *part)) if len(part) > 1 else (min(0.0, part[0]), max(0.0, part[0]))
            for part in parts
        ]
        scale = [float(torch.tensor((high - low) / (2**bits - 1) if high > low else 1.0).half()) for low, high in spans]
        scales.append(scale)
        zeros.append([min(2**bits - 1, round(-low / s)) for (low, _), s in zip(spans, scale, strict=True)])
    return scales, zeros


def nearest(x: float, scale: float, zero: int, bits: int) -> int:
    """The integer whose value is nearest; ties to even before the zero is added."""
    return max(0, min(2**bits - 1, round(x / scale) + zero))


def gptq_by_hand(weight_RC: Tensor, hessian_CC: Tensor, bits: int, group: int, damping: float = 0.01) -> Tensor:
    """Algorithm 1 of 2210.17323 without its blocks: round a column, and move the rest to where that hurts least.

    With F the columns that are not rounded yet, the rest moves by −(w_c − q_c) / [H_F⁻¹]_cc · [H_F⁻¹]_c,F (Eq. 2).
    """
    rows, columns = weight_RC.shape
    scales, zeros = grid_by_hand(weight_RC, bits, group)
    damped = hessian_CC.double() + damping * hessian_CC.double().diagonal().mean() * torch.eye(columns).double()
    left = weight_RC.double().clone()
    codes = torch.zeros(rows, columns, dtype=torch.int64)
    for c in range(columns):
        inverse = torch.linalg.inv(damped[c:, c:])
        for r in range(rows):
            scale, zero = scales[r][c // group], zeros[r][c // group]
            codes[r, c] = nearest(float(left[r, c]), scale, zero, bits)
            error = (left[r, c] - (int(codes[r, c]) - zero) * scale) / inverse[0, 0]
            left[r, c:] -= error * inverse[0]
    return codes
