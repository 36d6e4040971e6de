"""Stored bytes of saved files, by part and by layer, read from safetensors headers; no tensor is loaded.

What is counted is what a file holds: a tied tensor that is not saved costs nothing, and bytes come from the offsets, so
that every dtype is exact. Parts are told apart by tensor name alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import Mask

__all__ = [
    "PARTS",
    "Tensor",
    "expert_bytes",
    "expert_of",
    "file_bytes",
    "identity_experts",
    "layer_of",
    "measured",
    "part_of",
    "pruned_bytes",
    "read_headers",
    "router_rows",
    "stored_bytes",
]

PARTS: Final = ("experts", "fills", "router", "shared", "attention", "embeddings", "other")

_RULES: Final = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        ("shared", r"shared_expert|shared_mlp"),
        ("experts", r"\.experts\.|block_sparse_moe\.(input|output)_linear"),
        ("router", r"\.gate\.(wg\.)?weight|\.gate\.bias|\.router\.|e_score_correction_bias|\.expert_bias"),
        ("attention", r"self_attn|linear_attn|\.attn\.|\.attention\."),
        ("embeddings", r"embed_tokens|lm_head"),
    )
)
_LAYER: Final = re.compile(r"\blayers\.(\d+)\.")
_EXPERT: Final = re.compile(r"\.experts\.(\d+)\.")
_LONGEST_HEADER: Final = 100_000_000  # the limit of the safetensors format
_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to, one of `PARTS` (never "fills")."""
    return next((part for part, pattern in _RULES if pattern.search(name)), "other")


def layer_of(name: str) -> int | None:
    """The index of the decoder layer that a tensor belongs to, if any."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def expert_of(name: str) -> int | None:
    """The id of the expert that a tensor is of, or None where a tensor holds all experts of a layer, or none."""
    match = _EXPERT.search(name)
    return int(match[1]) if match else None


def read_headers(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, or of a model folder (one file, or shards with their index).

    Raises:
        PrerequisiteError: if a file is missing, cut short or not safetensors.
    """
    if path.is_file():
        return _read_header(path)
    if (path / _INDEX).is_file():
        return _read_shards(path)
    if (path / _SINGLE).is_file():
        return _read_header(path / _SINGLE)
    raise PrerequisiteError("no safetensors weights", where=str(path), expected=f"{_SINGLE} or {_INDEX}")


def file_bytes(path: Path) -> int:
    """Bytes of the safetensors files themselves, headers included; `path` as for `read_headers`."""
    if path.is_file():
        return path.stat().st_size
    shards = set(_weight_map(path).values()) if (path / _INDEX).is_file() else {_SINGLE}
    return sum((path / shard).stat().st_size for shard in shards)


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        shard_of = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in shard_of.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PrerequisiteError("cannot read the index", where=str(folder / _INDEX), expected="a weight_map") from error


def _read_shards(folder: Path) -> dict[str, Tensor]:
    shard_of = _weight_map(folder)
    headers = {shard: _read_header(folder / shard) for shard in sorted(set(shard_of.values()))}
    for name, shard in shard_of.items():
        if name not in headers[shard]:
            raise PrerequisiteError(f"{shard} does not hold {name}", where=str(folder), fix="download the model again")
    return {name: tensor for header in headers.values() for name, tensor in header.items()}


def _read_header(path: Path) -> dict[str, Tensor]:
    """Eight bytes of little-endian length, then that much JSON, then the data."""
    expected = "a whole safetensors file"
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise PrerequisiteError("not a safetensors file", where=str(path), expected=expected)
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        spans = {name: entry["data_offsets"] for name, entry in entries.items()}
        tensors = {
            name: Tensor(entry["dtype"], tuple(entry["shape"]), spans[name][1] - spans[name][0])
            for name, entry in entries.items()
        }
    except OSError as error:
        raise PrerequisiteError("cannot read the weights", where=str(path), fix=str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise PrerequisiteError(f"damaged header ({error!r})", where=str(path), expected=expected) from error
    end = 8 + length + max((span[1] for span in spans.values()), default=0)
    if size != end:
        raise PrerequisiteError(f"the file has {size} bytes", where=str(path), expected=f"{end} by its header")
    return tensors


def measured(tensors: Mapping[str, Tensor], *, fills: int = 0) -> dict[str, Any]:
    """Bytes of saved tensors as a record's `storage`: `{total, parts: {part: bytes}}`.

    Args:
        tensors: `read_headers`' result.
        fills: bytes of stored replacement values, kept in files of their own.
    """
    parts = dict.fromkeys(PARTS, 0)
    for name, tensor in tensors.items():
        parts[part_of(name)] += tensor.bytes
    parts["fills"] += fills
    return {"total": sum(parts.values()), "parts": parts}


def stored_bytes(source: Path | Mapping[str, Tensor]) -> dict[str, Any]:
    """Bytes of a saved model, `{total, parts, layers: {index as text: {part: bytes}}}`: plain JSON data.

    Args:
        source: a model folder, a safetensors file, or `read_headers`' result.
    """
    tensors = read_headers(source) if isinstance(source, Path) else source
    layers: dict[str, dict[str, int]] = {}
    for name, tensor in tensors.items():
        index = layer_of(name)
        if index is not None:
            layer = layers.setdefault(str(index), dict.fromkeys(PARTS, 0))
            layer[part_of(name)] += tensor.bytes
    return {**measured(tensors), "layers": dict(sorted(layers.items(), key=lambda layer: int(layer[0])))}


def pruned_bytes(
    stored: Path | Mapping[str, Tensor], mask: Mask, *, fill_values_bytes: int = 0, keep_router_rows: bool = False
) -> dict[str, Any]:
    """Bytes that the model will need once the mask's experts are physically gone: a record's `storage`.

    Args:
        stored: the dense model: its folder or file, or `read_headers`' result.
        mask: what goes. An expert's share of its layer is exact, as all experts of a layer have one size (checked).
        fill_values_bytes: bytes stored by whatever answers in their place.
        keep_router_rows: the router still scores the pruned experts, because their slots are kept.

    Raises:
        UsageError: if the weights have no such layer or another number of experts, or experts of unequal size.
    """
    tensors = read_headers(stored) if isinstance(stored, Path) else stored
    result = measured(tensors, fills=fill_values_bytes)
    parts = result["parts"]
    by_layer: dict[int | None, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        by_layer.setdefault(layer_of(name), {})[name] = tensor
    for layer in mask.layers:
        own = by_layer.get(layer.index, {})
        identities = identity_experts(own, layer.experts)
        sizes = expert_bytes(own, layer.experts, identities, where=f"layer {layer.index}")
        parts["experts"] -= sizes * len(layer.pruned)
        if not keep_router_rows:
            parts["router"] -= sum(router_rows(own, layer.experts + identities)) * len(layer.pruned)
    result["total"] = sum(parts.values())
    return result


def identity_experts(tensors: Mapping[str, Tensor], experts: int) -> int:
    """Identity experts of a layer: LongCat-Flash saves a slice for each that nobody reads, and no down projection."""
    found: dict[int, list[str]] = {}
    for name in tensors:
        if (match := _EXPERT.search(name)) and int(match[1]) >= experts:
            found.setdefault(int(match[1]), []).append(name)
    return sum(not any(".down_proj" in name or ".w2" in name for name in names) for names in found.values())


def expert_bytes(tensors: Mapping[str, Tensor], experts: int, identities: int, *, where: str) -> int:
    """Bytes of one expert of a layer, whichever way the experts are laid out: one by one, or stacked on dimension 0."""
    single = dict.fromkeys(range(experts), 0)
    stacked = 0
    for name, tensor in tensors.items():
        if part_of(name) != "experts":
            continue
        match = _EXPERT.search(name)
        if match is None:
            if not tensor.shape or tensor.shape[0] != experts or tensor.bytes % experts:
                raise UsageError(
                    f"{name} has shape {list(tensor.shape)}", where=where, expected=f"{experts} experts on dimension 0"
                )
            stacked += tensor.bytes // experts
        elif int(match[1]) in single:
            single[int(match[1])] += tensor.bytes
        elif int(match[1]) >= experts + identities:
            raise UsageError(f"the weights hold expert {match[1]}", where=where, expected=f"{experts} experts")
    if len(set(single.values())) > 1:
        raise UsageError("experts of unequal size", where=where, expected=f"{experts} equal experts")
    one = stacked + single[0]
    if not one:
        raise UsageError("no expert weights", where=where, expected="the mask's layers", fix="use this model's mask")
    return one


def router_rows(tensors: Mapping[str, Tensor], experts: int) -> Iterator[int]:
    """Bytes per choice of each router tensor that has one entry for each."""
    for name, tensor in tensors.items():
        # Gemma-4 scales the router's input by `router.scale`, which may happen to be as long.
        if part_of(name) != "router" or name.endswith(".router.scale"):
            continue
        if tensor.shape[:1] == (experts,) or tensor.shape == (1, experts):
            yield tensor.bytes // experts
