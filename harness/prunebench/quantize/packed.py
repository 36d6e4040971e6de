"""Quantized matrices in one safetensors file, packed by compressed-tensors: to the byte what `storage` counts.

Every matrix has four tensors, named after the linear that a checkpoint saves:

    NAME.weight_packed      int32, rows of whole words, 32 integers in b of them
    NAME.weight_scale       float16 [R, G]
    NAME.weight_zero_point  float16 [R, G]; or int32, b-bit, packed along the rows
    NAME.weight_shape       int64 [2]

An expert is named as its family saves it: gate and up as matrices of their own, or together. What is not quantized is
not in the file. Packing needs compressed-tensors (the extra `ct`).

R rows (outputs), C columns (inputs), G groups of columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import write_atomically
from prunebench.quantize.grid import Grid, dequantized, groups_of
from prunebench.quantize.model import QuantizedModel
from prunebench.storage import Bits

__all__ = ["Stated", "packed_tensors", "read_packed", "stated_matrices", "write_packed"]

_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
_STACKED = re.compile(r"(?P<at>.+\.experts)\.(?P<tensor>\w+)")


class Stated(NamedTuple):
    """What a file has to hold of one matrix."""

    bits: int
    rows: int
    columns: int


class _Matrix(NamedTuple):
    """One matrix of a checkpoint."""

    name: str
    codes_RC: Tensor
    scale_RG: Tensor
    zero_RG: Tensor
    bits: int


def packed_tensors(model: QuantizedModel, *, apart: bool) -> dict[str, Tensor]:
    """The tensors of a file, by name.

    Args:
        model: the integers.
        apart: whether the family saves an expert's gate and up as two matrices, expert by expert.

    Raises:
        PrerequisiteError: without compressed-tensors.
    """
    pack, _ = _packer()
    tensors: dict[str, Tensor] = {}
    for matrix in _matrices(model, apart=apart):
        signed = _signed(matrix.codes_RC, matrix.bits)
        zeros = matrix.zero_RG.to(torch.float16)
        if model.setting.bits.zeros == "bits":
            zeros = pack(_signed(matrix.zero_RG, matrix.bits), matrix.bits, packed_dim=0)
        values = (
            pack(signed, matrix.bits),
            matrix.scale_RG.to(torch.float16),
            zeros,
            torch.tensor(matrix.codes_RC.shape),
        )
        tensors |= {f"{matrix.name}.{part}": value.cpu() for part, value in zip(_PARTS, values, strict=True)}
    return tensors


def stated_matrices(model: QuantizedModel, *, apart: bool) -> dict[str, Stated]:
    """The matrices of `packed_tensors`' file, by name."""
    return {matrix.name: Stated(matrix.bits, *matrix.codes_RC.shape[:2]) for matrix in _matrices(model, apart=apart)}


def write_packed(path: Path, model: QuantizedModel, *, apart: bool) -> None:
    """Write a file of `packed_tensors`, atomically."""
    tensors = {name: value.contiguous() for name, value in packed_tensors(model, apart=apart).items()}
    write_atomically(path, save(tensors))


def read_packed(path: Path, wanted: Mapping[str, Stated], bits: Bits) -> dict[str, Tensor]:
    """The weights of a file, float32, by the name of their matrix; every tensor is checked.

    Args:
        path: what `write_packed` wrote.
        wanted: a matrix's name -> its bits and shape; all of them, and no other.
        bits: groups, and how zeros are stored.

    Raises:
        UsageError: no such file, a matrix missing or unknown, one with a part missing, or a part of another shape or
            dtype.
        PrerequisiteError: without compressed-tensors.
    """
    _, unpack = _packer()
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError("not a packed file", where=str(path), fix=str(error)) from error
    if unknown := sorted(set(tensors) - {f"{name}.{part}" for name in wanted for part in _PARTS}):
        raise UsageError(f"{unknown[0]} is not of this model", where=str(path), expected=f"{len(wanted)} matrices")
    found: dict[str, Tensor] = {}
    for name, one in wanted.items():
        words, scale, zero = _parts(tensors, name, one, bits, str(path))
        codes = unpack(words, one.bits, torch.Size((one.rows, one.columns))).int() + 2 ** (one.bits - 1)
        if bits.zeros == "bits":
            zero = unpack(zero, one.bits, scale.shape, packed_dim=0).int() + 2 ** (one.bits - 1)
        grid = Grid(scale[None], zero[None], torch.tensor([one.bits]), bits.group)
        found[name] = dequantized(codes[None], grid)[0]
    return found


def _parts(
    tensors: Mapping[str, Tensor], name: str, one: Stated, bits: Bits, where: str
) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix's words, scales and zeros, of the right shapes."""
    own = {part: tensors[f"{name}.{part}"] for part in _PARTS if f"{name}.{part}" in tensors}
    if missing := [part for part in _PARTS if part not in own]:
        raise UsageError(f"{name}.{missing[0]} is missing", where=where, expected=", ".join(_PARTS))
    groups = groups_of(one.columns, bits.group)
    small = bits.zeros == "bits"
    wanted = {
        "weight_packed": ([one.rows, -(-one.columns * one.bits // 32)], torch.int32),
        "weight_scale": ([one.rows, groups], torch.float16),
        "weight_zero_point": (
            [-(-one.rows * one.bits // 32) if small else one.rows, groups],
            torch.int32 if small else torch.float16,
        ),
        "weight_shape": ([2], torch.int64),
    }
    for part, (shape, dtype) in wanted.items():
        if list(own[part].shape) != shape or own[part].dtype != dtype:
            raise UsageError(
                f"{name}.{part} is {own[part].dtype} {list(own[part].shape)}", where=where, expected=f"{dtype} {shape}"
            )
    if (said := own["weight_shape"].tolist()) != [one.rows, one.columns]:
        raise UsageError(f"{name}.weight_shape says {said}", where=where, expected=f"{[one.rows, one.columns]}")
    return own["weight_packed"], own["weight_scale"], own["weight_zero_point"]


def _matrices(model: QuantizedModel, *, apart: bool) -> Iterator[_Matrix]:
    for name, linear in model.linears.items():
        stacked = _STACKED.fullmatch(name)
        codes, grid = linear.quantized.codes_ERC, linear.quantized.grid
        for place, expert in enumerate(linear.experts):
            for piece, rows in _pieces(name, stacked, expert, codes.shape[1], apart=apart):
                yield _Matrix(
                    piece,
                    codes[place, rows],
                    grid.scale_ERG[place, rows],
                    grid.zero_ERG[place, rows],
                    int(grid.bits_E[place]),
                )


def _pieces(
    name: str, stacked: re.Match[str] | None, expert: int, rows: int, *, apart: bool
) -> Iterator[tuple[str, slice]]:
    """What a checkpoint calls the matrices that one matrix of the model is made of, and their rows."""
    if stacked is None:
        yield name.removesuffix(".weight"), slice(rows)
    elif apart and stacked["tensor"] == "gate_up_proj":
        yield f"{stacked['at']}.{expert}.gate_proj", slice(rows // 2)
        yield f"{stacked['at']}.{expert}.up_proj", slice(rows // 2, rows)
    else:
        yield f"{stacked['at']}.{expert}.{stacked['tensor']}", slice(rows)


def _signed(codes: Tensor, bits: int) -> Tensor:
    """compressed-tensors' integers are around zero."""
    return (codes.int() - (1 << (bits - 1))).to(torch.int8)


def _packer() -> tuple[Any, Any]:
    try:
        from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
    except ImportError as error:
        raise PrerequisiteError(
            "compressed-tensors is not installed", expected="0.20 or later", fix="pip install 'prunebench[ct]'"
        ) from error
    return pack_to_int32, unpack_from_int32
