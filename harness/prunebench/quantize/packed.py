"""Quantized matrices in one safetensors file, packed by compressed-tensors: to the byte what `storage` counts.

Every matrix has four tensors, named after the linear that a checkpoint saves:

    NAME.weight_packed      int32, rows of whole words, 32 integers in b of them
    NAME.weight_scale       float16 [R, G]
    NAME.weight_zero_point  float16 [R, G]; or int32, b-bit, packed along the rows
    NAME.weight_shape       int64 [2]

An expert is named as its family saves it: gate and up as matrices of their own, or together. What is not quantized is
not in the file. The header says the rest of a `QuantizedModel`, so that what is read is what was written. Packing needs
compressed-tensors (the extra `ct`).

R rows (outputs), C columns (inputs), G groups of columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import canonical_json, write_atomically
from prunebench.moe.decoder import Proof
from prunebench.quantize.grid import Grid, groups_of
from prunebench.quantize.kernel import Quantized
from prunebench.quantize.model import QuantizedLinear, QuantizedModel
from prunebench.quantize.setting import setting_of
from prunebench.storage import Bits

__all__ = ["packed_tensors", "read_packed", "write_packed"]

_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
_HEADER: Final = "quantized"
_STACKED = re.compile(r"(?P<at>.+\.experts)\.(?P<tensor>\w+)")


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


def write_packed(path: Path, model: QuantizedModel, *, apart: bool) -> None:
    """Write a file of `packed_tensors`, atomically; its header has what the tensors do not say."""
    tensors = {name: value.contiguous() for name, value in packed_tensors(model, apart=apart).items()}
    write_atomically(path, save(tensors, metadata={_HEADER: canonical_json(_description(model, apart=apart))}))


def read_packed(path: Path) -> QuantizedModel:
    """The model that `write_packed` wrote, integer for integer; every tensor is checked.

    Raises:
        UsageError: no such file, a matrix missing or unknown, one with a part missing, or a part of another shape or
            dtype.
        PrerequisiteError: without compressed-tensors.
    """
    _, unpack = _packer()
    try:
        with safe_open(path, framework="pt") as file:
            data = json.loads((file.metadata() or {})[_HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        setting, described = setting_of(data["setting"]), data["linears"]
        proof, allocation = Proof(**data["proof"]), {int(k): tuple(v) for k, v in data["allocation"].items()}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "not a packed file", where=str(path), expected="a file that write_packed wrote", fix=str(error)
        ) from error

    known: set[str] = set()

    def matrix(name: str, shape: tuple[int, int], width: int) -> tuple[Tensor, Tensor, Tensor]:
        known.update(f"{name}.{part}" for part in _PARTS)
        words, scale_RG, zero = _parts(tensors, name, shape, width, setting.bits, where=str(path))
        half = 1 << (width - 1)
        if setting.bits.zeros == "bits":
            zero = unpack(zero, width, scale_RG.shape, packed_dim=0).int() + half
        codes_RC = (unpack(words, width, torch.Size(shape)).int() + half).to(torch.uint8)
        return codes_RC, scale_RG, zero.to(scale_RG.dtype)

    linears = {}
    for said in described:
        name = said["name"]
        stacked = _STACKED.fullmatch(name)
        rows, columns = said["shape"]
        experts = []
        for expert, width in zip(said["experts"], said["bits"], strict=True):
            pieces = [
                matrix(piece, (len(range(rows)[own]), columns), width)
                for piece, own in _pieces(name, stacked, expert, rows, apart=data["apart"])
            ]
            experts.append([torch.cat(parts) for parts in zip(*pieces, strict=True)])
        codes_ERC, scale_ERG, zero_ERG = (torch.stack(parts) for parts in zip(*experts, strict=True))
        grid = Grid(scale_ERG, zero_ERG, torch.tensor(said["bits"]), setting.bits.group)
        quantized = Quantized(codes_ERC, grid, tuple(said["fallbacks"]), tuple(said["dead"]))
        linears[name] = QuantizedLinear(quantized, *(tuple(said[key]) for key in ("experts", "tokens", "errors")))
    if unknown := sorted(set(tensors) - known):
        raise UsageError(f"{unknown[0]} is of no matrix of the file", where=str(path), expected=f"{len(known)} tensors")
    return QuantizedModel(setting, linears, proof, data["tokens"], allocation)


def _description(model: QuantizedModel, *, apart: bool) -> dict[str, Any]:
    """Everything of a model but integers, scales and zeros."""
    return {
        "setting": model.setting.text,
        "apart": apart,
        "proof": asdict(model.proof),
        "tokens": model.tokens,
        "allocation": {str(index): list(widths) for index, widths in model.allocation.items()},
        "linears": [
            {
                "name": name,
                "shape": list(linear.quantized.codes_ERC.shape[1:]),
                "experts": list(linear.experts),
                "bits": linear.quantized.grid.bits_E.tolist(),
                "tokens": list(linear.tokens_E),
                "errors": list(linear.error_E),
                "fallbacks": list(linear.quantized.fallback_E),
                "dead": list(linear.quantized.dead_E),
            }
            for name, linear in model.linears.items()
        ],
    }


def _parts(
    tensors: Mapping[str, Tensor], name: str, stated: tuple[int, int], width: int, bits: Bits, *, where: str
) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix's words, scales and zeros, of the right shapes."""
    own = {part: tensors[f"{name}.{part}"] for part in _PARTS if f"{name}.{part}" in tensors}
    if missing := [part for part in _PARTS if part not in own]:
        raise UsageError(f"{name}.{missing[0]} is missing", where=where, expected=", ".join(_PARTS))
    rows, columns = stated
    groups = groups_of(columns, bits.group)
    small = bits.zeros == "bits"
    wanted = {
        "weight_packed": ([rows, -(-columns * width // 32)], torch.int32),
        "weight_scale": ([rows, groups], torch.float16),
        "weight_zero_point": (
            [-(-rows * width // 32) if small else rows, groups],
            torch.int32 if small else torch.float16,
        ),
        "weight_shape": ([2], torch.int64),
    }
    for part, (shape, dtype) in wanted.items():
        if list(own[part].shape) != shape or own[part].dtype != dtype:
            raise UsageError(
                f"{name}.{part} is {own[part].dtype} {list(own[part].shape)}", where=where, expected=f"{dtype} {shape}"
            )
    if (said := own["weight_shape"].tolist()) != [rows, columns]:
        raise UsageError(f"{name}.weight_shape says {said}", where=where, expected=f"{[rows, columns]}")
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
