"""GPTQ and round-to-nearest, of many matrices at once: all experts of a layer advance column by column together.

GPTQ (2210.17323) rounds one column after the other and spreads each column's error over those that follow, through the
inverse of H = Σ x xᵀ, damped. With H = R Rᵀ, R an upper triangle, what it comes to is

    q_c = nearest(w_c + Σ_{j<c} (w_j − q_j) · R_jc / R_cc),

so H is never inverted: R is a Cholesky factor of H turned by 180°. (Its update divides the error of column j by U_jj
and takes it times U_jc, where UᵀU = H⁻¹: so U = R⁻¹, the scaled errors are (W − Ŵ)·R, and the line above is theirs,
solved for the column at hand.) A diagonal H makes it round-to-nearest, exactly, and that is how a matrix without a
usable H is rounded here: with R = I. Matrices are kept with columns first, so that a step reads and writes whole runs
of memory, and a column gathers what the earlier ones owe it, instead of every column visiting all later ones.

Not here: where H comes from (`hessians`), and what is done with the integers.

E matrices, R rows (outputs), C columns (inputs), G groups of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.quantize.grid import Grid, dequantized, grid_of, groups_of

__all__ = ["FEWEST_TOKENS", "Groups", "Quantized", "Reason", "gptq", "output_error", "round_to_nearest"]

FEWEST_TOKENS = 128
DAMPING = 0.01
BLOCK = 32  # columns; wide enough for matrix products, narrow enough for a processor's cache

Groups: TypeAlias = Literal["static", "dynamic"]
Reason: TypeAlias = Literal["", "few tokens", "no factor", "no data asked for"]


@dataclass(frozen=True)
class Quantized:
    """E matrices as integers on their grids, and how they became so.

    Args:
        codes_ERC: q, uint8.
        grid: scales and zeros.
        fallback_E: why a matrix was rounded to nearest: it saw too few tokens, or its H had no Cholesky factor, or
            nobody wanted else; empty where it was not.
        dead_E: columns of each matrix that no input ever used, which are rounded to nearest.
    """

    codes_ERC: Tensor
    grid: Grid
    fallback_E: tuple[Reason, ...]
    dead_E: tuple[int, ...]

    @property
    def weight_ERC(self) -> Tensor:
        """(q − z)·s, float32."""
        return dequantized(self.codes_ERC, self.grid)


def round_to_nearest(
    weight_ERC: Tensor,
    bits: int | Sequence[int],
    *,
    group: int = 128,
    scale_dtype: torch.dtype = torch.float16,
) -> Quantized:
    """Every weight to the nearest integer of its grid; what `gptq` does without data.

    Args:
        weight_ERC: floating.
        bits: of all matrices, or of each.
        group: columns that share a scale.
        scale_dtype: in which scales are stored.
    """
    experts = weight_ERC.shape[0]
    grid = grid_of(weight_ERC, _bits(bits, experts, weight_ERC.device), group, scale_dtype=scale_dtype)
    most_E1 = _most(grid)
    codes_ERC = torch.empty(weight_ERC.shape, dtype=torch.uint8, device=weight_ERC.device)
    for c in range(weight_ERC.shape[2]):
        scale_ER, zero_ER = _of_group(grid, c // group)
        codes_ERC[:, :, c] = _rounded(weight_ERC[:, :, c].float(), scale_ER, zero_ER, most_E1)
    asked: list[Reason] = ["no data asked for"] * experts
    return Quantized(codes_ERC, grid, tuple(asked), (0,) * experts)


def gptq(
    weight_ERC: Tensor,
    hessian_ECC: Tensor,
    tokens_E: Sequence[int],
    bits: int | Sequence[int],
    *,
    group: int = 128,
    groups: Groups = "static",
    damping: float = DAMPING,
    fewest: int = FEWEST_TOKENS,
    scale_dtype: torch.dtype = torch.float16,
) -> Quantized:
    """Quantize E matrices, each with its own inputs; their order and number change no integer.

    Args:
        weight_ERC: floating.
        hessian_ECC: Σ x xᵀ over each matrix's inputs, float64, not damped; left as it is.
        tokens_E: how many inputs each saw.
        bits: of all matrices, or of each; 2 to 8.
        group: columns that share a scale.
        groups: when a group's grid is fixed: `static`, before anything is rounded; `dynamic`, when its first column's
            turn comes, from the weights as they have become.
        damping: share of H's mean diagonal that is added to its diagonal.
        fewest: a matrix that saw fewer inputs is rounded to nearest.
        scale_dtype: in which scales are stored.

    Raises:
        UsageError: shapes that do not fit each other, or weights that are no numbers.
    """
    experts, rows, columns = weight_ERC.shape
    if hessian_ECC.shape != (experts, columns, columns) or len(tokens_E) != experts:
        raise UsageError(
            f"a Hessian {list(hessian_ECC.shape)} and {len(tokens_E)} token counts",
            where=f"weights {[experts, rows, columns]}",
            expected=f"{[experts, columns, columns]} and {experts}",
        )
    if group < 1 or not damping >= 0:
        raise UsageError(f"groups of {group} columns, damping {damping}", expected="at least 1, and 0 or more")
    bits_E = _bits(bits, experts, weight_ERC.device)
    grid = grid_of(weight_ERC, bits_E, group, scale_dtype=scale_dtype)
    factor_ECC, reasons, dead_E = _factors(hessian_ECC, tokens_E, damping, fewest)
    owed_ECR = torch.zeros(experts, columns, rows, device=weight_ERC.device)
    codes_ECR = torch.empty(owed_ECR.shape, dtype=torch.uint8, device=owed_ECR.device)
    most_E1 = _most(grid)
    scales, zeros = list(grid.scale_ERG.unbind(-1)), list(grid.zero_ERG.unbind(-1))
    # Whole groups at a time where a group's grid has to wait for all that the columns before it owe.
    step = group if groups == "dynamic" else BLOCK
    for start in range(0, columns, step):
        end = min(start + step, columns)
        own_ECR = weight_ERC[:, :, start:end].float().transpose(1, 2).contiguous()
        if groups == "dynamic":
            # What the columns of the group would be if nothing more were rounded.
            unit_ECC = factor_ECC[:, start:end, start:end].transpose(1, 2)
            spread_ECR = torch.linalg.solve_triangular(
                unit_ECC, owed_ECR[:, start:end], upper=False, unitriangular=True
            )
            become_ERC = (own_ECR + spread_ECR).transpose(1, 2)
            now = grid_of(become_ERC, bits_E, group, scale_dtype=scale_dtype)
            scales[start // group], zeros[start // group] = now.scale_ERG[:, :, 0], now.zero_ERG[:, :, 0]
        within_ECC = factor_ECC[:, start:end, start:end].transpose(1, 2).contiguous()
        x_ECR = own_ECR + owed_ECR[:, start:end]
        errors_ECR = torch.empty_like(own_ECR)
        for i, c in enumerate(range(start, end)):
            x_E1R = x_ECR[:, i, None]
            if i:
                x_E1R = torch.baddbmm(x_E1R, within_ECC[:, i, None, :i], errors_ECR[:, :i])
            scale_ER, zero_ER = scales[c // group].float(), zeros[c // group].float()
            code_ER = _rounded(x_E1R[:, 0], scale_ER, zero_ER, most_E1)
            codes_ECR[:, c] = code_ER
            torch.addcmul(own_ECR[:, i], code_ER.sub_(zero_ER), scale_ER, value=-1, out=errors_ECR[:, i])
        if end < columns:
            owed_ECR[:, end:].baddbmm_(factor_ECC[:, start:end, end:].transpose(1, 2), errors_ECR)
    grid = Grid(torch.stack(scales, -1), torch.stack(zeros, -1), bits_E, group)
    assert grid.scale_ERG.shape[-1] == groups_of(columns, group)
    return Quantized(codes_ECR.transpose(1, 2).contiguous(), grid, reasons, dead_E)


def output_error(weight_ERC: Tensor, quantized: Quantized, hessian_ECC: Tensor) -> Tensor:
    """Σ ‖(W − Ŵ) x‖² of every matrix over the inputs of its H, which is tr(Δ H Δᵀ); float64 ([E])."""
    delta_ERC = weight_ERC.double() - quantized.weight_ERC.double()
    return (torch.bmm(delta_ERC, hessian_ECC) * delta_ERC).sum((1, 2))


# --- helpers


def _bits(bits: int | Sequence[int], experts: int, device: torch.device) -> Tensor:
    each = [bits] * experts if isinstance(bits, int) else list(bits)
    if len(each) != experts or not all(2 <= b <= 8 for b in each):
        raise UsageError(f"bits {each}", where=f"{experts} matrices", expected="2 to 8 bits, for each matrix")
    return torch.tensor(each, dtype=torch.int64, device=device)


def _most(grid: Grid) -> Tensor:
    return (2**grid.bits_E - 1).float()[:, None]


def _of_group(grid: Grid, g: int) -> tuple[Tensor, Tensor]:
    return grid.scale_ERG[:, :, g].float(), grid.zero_ERG[:, :, g].float()


def _rounded(x_ER: Tensor, scale_ER: Tensor, zero_ER: Tensor, most_E1: Tensor) -> Tensor:
    """round(x / s) + z within 0 … 2^b − 1; ties go to the even integer, as everywhere in torch."""
    return torch.minimum((x_ER / scale_ER).round_().add_(zero_ER).clamp_(min=0.0), most_E1)


def _factors(
    hessian_ECC: Tensor, tokens_E: Sequence[int], damping: float, fewest: int
) -> tuple[Tensor, tuple[Reason, ...], tuple[int, ...]]:
    """R_jc / R_cc of H + λI = R Rᵀ in float32, λ a share of H's mean diagonal; I where a matrix is rounded to nearest.

    A dead column owes nothing and is owed nothing, whatever stands on its diagonal.
    """
    experts, columns, _ = hessian_ECC.shape
    factor_ECC = torch.empty(hessian_ECC.shape, dtype=torch.float32, device=hessian_ECC.device)
    usable_E = torch.empty(experts, dtype=torch.bool, device=hessian_ECC.device)
    dead_EC = hessian_ECC.diagonal(dim1=1, dim2=2) == 0
    # LAPACK takes one matrix after the other anyway; a GPU takes as many as there are.
    each = 1 if hessian_ECC.device.type == "cpu" else experts
    for at in range(0, experts, each):
        part = slice(at, at + each)
        factor_ECC[part], usable_E[part] = _factor(hessian_ECC[part], damping)
    few_E = torch.tensor([count < fewest for count in tokens_E], device=usable_E.device)
    factor_ECC[few_E | ~usable_E] = torch.eye(columns, device=factor_ECC.device)
    reasons: list[Reason] = [
        "few tokens" if few else "" if usable else "no factor"
        for few, usable in zip(few_E.tolist(), usable_E.tolist(), strict=True)
    ]
    return factor_ECC, tuple(reasons), tuple(dead_EC.sum(1).tolist())


def _factor(hessian_ECC: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """R_jc / R_cc, and whether there is one."""
    diagonal_EC = hessian_ECC.diagonal(dim1=1, dim2=2)
    mean_E1 = diagonal_EC.mean(1, keepdim=True)
    raised_EC = diagonal_EC + torch.where(diagonal_EC == 0, torch.where(mean_E1 > 0, mean_E1, 1.0), damping * mean_E1)
    # The damping is far above float32's rounding of all but the worst matrices; what it cannot factor, float64 may.
    for dtype in (torch.float32, torch.float64):
        turned_ECC = hessian_ECC.to(dtype).flip(1, 2)
        turned_ECC.diagonal(dim1=1, dim2=2).copy_(raised_EC.flip(1))
        lower_ECC, info_E = torch.linalg.cholesky_ex(turned_ECC)
        pivots_EC = lower_ECC.diagonal(dim1=1, dim2=2)
        usable_E = (info_E == 0) & torch.isfinite(pivots_EC).all(1)
        if bool(usable_E.all()):
            break
    return lower_ECC.float().flip(1, 2).div_(pivots_EC.float().flip(1)[:, None]), usable_E
