"""The format ct: pruned experts removed as in hf, the rest packed as integers by compressed-tensors.

    …experts.0.gate_proj.weight_packed [R, ceil(C·b/32)] int32, .weight_scale [R, C/g], .weight_shape [2]
    config.json: "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", …,
        "moe_sparsity_config": {"method": "prune", "num_experts": [null, 16, …]}}

Plain transformers loads it, given the package, and computes with codes·scale. `moe_sparsity_config` says how many
experts each decoder layer keeps; no known reader asks for it. Scales are in the dtype that the model is run in, as
transformers gives experts the dtype of their scales. An asymmetric linear has .weight_zero_point [ceil(R·b/32), G] too,
packed along its rows: transformers 5.24 does not load asymmetric experts, and no other reader was at hand, so that such
files are read here by unpacking them.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.export.pruned import Anatomy, PrunedModel, Settings
from prunebench.export.quantized import Quantized, Quantizer, Scheme, round_to_nearest
from prunebench.export.shards import DEFAULT_SHARD, Entry, TensorFiles, bytes_of, parse_size, write_shards
from prunebench.export.weights import copy_small_files, sliced, write_config
from prunebench.moe.load import DTYPES
from prunebench.storage import expert_of, part_of

__all__ = ["check_scheme", "load", "simulate", "write"]

_WEIGHT: Final = ".weight"
_EXPERTS: Final = "experts.*."


def write(  # noqa: PLR0917  what the other formats take, and how to quantize
    pruned: PrunedModel,
    anatomy: Anatomy,
    folder: Path,
    limit: int,
    scheme: Scheme,
    quantize: Quantizer | None = None,
) -> None:
    """Write config, packed weights and tokenizer; `refuse` and `check_scheme` have been asked.

    Args:
        pruned: what to write.
        anatomy: of its base model.
        folder: where to.
        limit: bytes of tensors per file.
        scheme: bits and group size.
        quantize: makes codes and scales of a linear; round-to-nearest if None.
    """
    kept = len(pruned.plan.mask.layers[0].survivors)
    bits = _bits(anatomy, scheme)
    config = {"quantization_config": _config(pruned, anatomy, scheme, bits)}
    write_config(pruned.folder, folder, config, of_text=anatomy.counts(kept))
    dtype = DTYPES[pruned.settings.dtype]
    quantize = quantize or round_to_nearest(scheme, dtype)
    with TensorFiles(pruned.folder) as files:
        entries = sliced(pruned, anatomy, files)
        packed = (one for entry in entries for one in _packed(entry, bits, anatomy, scheme, dtype, quantize))
        write_shards(folder, packed, limit)
    copy_small_files(pruned.folder, folder)


def simulate(pruned: PrunedModel, anatomy: Anatomy, folder: Path, limit: int, scheme: Scheme) -> None:
    """Write the same model with codes·scale as plain weights: what a packed one has to compute."""
    kept = len(pruned.plan.mask.layers[0].survivors)
    bits, dtype = _bits(anatomy, scheme), DTYPES[pruned.settings.dtype]
    quantize = round_to_nearest(scheme, dtype)
    write_config(pruned.folder, folder, {}, of_text=anatomy.counts(kept))

    def rounded(entry: Entry) -> Tensor:
        return quantize(entry.name, entry.make(), bits[_word(entry.name)]).values()

    with TensorFiles(pruned.folder) as files:
        entries = []
        for entry in sliced(pruned, anatomy, files):
            if _word(entry.name) in bits:
                rows, columns = _shape(entry.name, anatomy)
                entries.append(Entry(entry.name, rows * columns * dtype.itemsize, partial(rounded, entry)))
            else:
                entries.append(entry)
        write_shards(folder, entries, limit)


def load(folder: Path, settings: Settings, scheme: Scheme) -> Any:
    """The packed model, its weights codes·scale: through plain transformers, or if asymmetric unpacked before that."""
    from compressed_tensors.logger import logger

    if not scheme.symmetric:
        with tempfile.TemporaryDirectory() as scratch:
            _unpack(folder, Path(scratch), scheme, DTYPES[settings.dtype])
            return settings.weights(Path(scratch))

    # It says that no module is called as the experts' tensors are, as transformers fuses them; and shows bars.
    logger.disable("compressed_tensors")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return settings.weights(folder)
    finally:
        logger.enable("compressed_tensors")


def _unpack(folder: Path, out: Path, scheme: Scheme, dtype: torch.dtype) -> None:
    """A packed checkpoint as a plain one, by compressed-tensors' own unpacking."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    copy_small_files(folder, out)

    def weight(name: str) -> Tensor:
        bits = scheme.bits if _word(name).startswith(_EXPERTS) else scheme.attention_bits
        assert bits is not None
        scales_RG = files[f"{name}_scale"]
        codes_RC = unpack_from_int32(files[f"{name}_packed"], bits, torch.Size(files[f"{name}_shape"].tolist()))
        zeros_RG = unpack_from_int32(files[f"{name}_zero_point"], bits, scales_RG.shape, packed_dim=0)
        return Quantized(codes_RC, scales_RG, zeros_RG).values()

    with TensorFiles(folder) as files:
        linears = {name.removesuffix("_packed") for name in files.names if name.endswith("_packed")}
        parts = {f"{name}_{part}" for name in linears for part in ("packed", "scale", "shape", "zero_point")}
        entries = [
            Entry(name, math.prod(files[f"{name}_shape"].tolist()) * dtype.itemsize, partial(weight, name))
            for name in sorted(linears)
        ]
        entries += [
            Entry(name, bytes_of(files[name]), partial(files.__getitem__, name))
            for name in files.names
            if name not in parts
        ]
        write_shards(out, entries, parse_size(DEFAULT_SHARD))


def check_scheme(anatomy: Anatomy, scheme: Scheme) -> None:
    """Raise unless every matrix can be cut into groups.

    Raises:
        UsageError: naming the matrix.
    """
    bits = _bits(anatomy, scheme)
    if scheme.attention_bits is not None and all(word.startswith(_EXPERTS) for word in bits):
        raise UsageError(
            "ct cannot hold this model: its attention has no linear that the files call as transformers does",
            fix="leave --attention-bits out",
        )
    for name in anatomy.headers:
        if _word(name) in bits and (columns := _shape(name, anatomy)[1]) % scheme.group_size:
            raise UsageError(
                f"ct cannot hold this model: {name} has {columns} columns",
                expected=f"a multiple of the group size {scheme.group_size}",
                fix="give another --group-size",
            )


def _shape(name: str, anatomy: Anatomy) -> tuple[int, int]:
    """Rows and columns of a linear; all experts of a model have one shape, so renumbering does not matter."""
    rows, columns = anatomy.headers[name].shape
    return rows, columns


def _word(name: str) -> str:
    """What a linear is called in its layer, experts by one name: `experts.*.gate_proj`; nothing if it is no linear."""
    if not name.endswith(_WEIGHT):
        return ""
    module = name.removesuffix(_WEIGHT)
    if part_of(name) == "experts" and expert_of(name) is not None:
        return _EXPERTS + module.rpartition(".")[2]
    if part_of(name) == "attention":
        return ".".join(module.split(".")[-2:])
    return ""


def _bits(anatomy: Anatomy, scheme: Scheme) -> Mapping[str, int]:
    """The linears that are quantized, by their names in a layer, and to how many bits.

    An attention's linear counts only if transformers calls it as the files do, in every layer: readers find it by the
    name of its module.
    """
    found: dict[str, int] = {}
    otherwise: set[str] = set()
    for name, tensor in anatomy.headers.items():
        word = _word(name)
        of_expert = word.startswith(_EXPERTS)
        bits = scheme.bits if of_expert else scheme.attention_bits
        if not word or bits is None:
            continue
        if len(tensor.shape) != 2 or not (of_expert or name.removesuffix(_WEIGHT) in anatomy.linears):
            otherwise.add(word)
        found[word] = bits
    return {word: bits for word, bits in found.items() if word not in otherwise}


def _packed(  # noqa: PLR0917  what a linear is quantized by
    entry: Entry,
    bits: Mapping[str, int],
    anatomy: Anatomy,
    scheme: Scheme,
    dtype: torch.dtype,
    quantize: Quantizer,
) -> Iterator[Entry]:
    """A tensor as it is, or a linear's three, or four."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    width = bits.get(_word(entry.name))
    if width is None:
        yield entry
        return
    rows, columns = _shape(entry.name, anatomy)

    def packed() -> Tensor:
        found = quantize(entry.name, entry.make(), width)
        # A reader takes an absent zero for 0, whatever the codes were made around.
        if (found.zeros_RG is None) != scheme.symmetric:
            has, expected = ("has no zeros", "one") if found.zeros_RG is None else ("has zeros", "none")
            raise UsageError(
                f"what the quantizer makes of {entry.name} {has}",
                expected=f"{expected} per group",
                fix="give a scheme that is symmetric if the quantizer is",
            )
        words: Tensor = pack_to_int32(found.codes_RC, width)
        return words

    def scales() -> Tensor:
        return quantize(entry.name, entry.make(), width).scales_RG

    def zeros() -> Tensor:
        words: Tensor = pack_to_int32(quantize(entry.name, entry.make(), width).zeros_RG, width, packed_dim=0)
        return words

    groups = columns // scheme.group_size
    yield Entry(f"{entry.name}_packed", 4 * rows * -(-columns * width // 32), packed)
    yield Entry(f"{entry.name}_scale", rows * groups * dtype.itemsize, scales)
    if not scheme.symmetric:
        yield Entry(f"{entry.name}_zero_point", 4 * -(-rows * width // 32) * groups, zeros)
    yield Entry(f"{entry.name}_shape", 16, partial(torch.tensor, (rows, columns)))


def _config(pruned: PrunedModel, anatomy: Anatomy, scheme: Scheme, bits: Mapping[str, int]) -> dict[str, Any]:
    """What a reader needs to know, in compressed-tensors' words, and by its own rules."""
    from compressed_tensors.quantization import QuantizationConfig

    groups: dict[str, Any] = {}
    for group, start in (("experts", _EXPERTS), ("attention", "")):
        words = sorted(word.removeprefix(start) for word in bits if word.startswith(_EXPERTS) == bool(start))
        if words:
            escaped = "|".join(re.escape(word) for word in words)
            target = rf"re:.*\.experts\.\d+\.({escaped})$" if start else rf"re:.*\.({escaped})$"
            width = scheme.bits if start else scheme.attention_bits
            assert width is not None
            groups[group] = {"targets": [target], "weights": scheme.arguments(width)}
    kept = {layer.index: len(layer.survivors) for layer in pruned.plan.mask.layers}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "moe_sparsity_config": {
            "method": "prune",
            "num_experts": [kept.get(index) for index in range(anatomy.layer_count)],
        },
    }
    QuantizationConfig(**config)
    return config
