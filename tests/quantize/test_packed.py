"""Packed files: to the byte what is counted by formula, and what compressed-tensors reads out of them."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prunebench.calibration import CalibrationSpec, CalibrationTokens
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.moe import LayerProgram
from prunebench.quantize import (
    packed,
    quantize_model,
    read_packed,
    round_to_nearest,
    setting_of,
    write_packed,
)
from prunebench.quantize.grid import grid_of
from prunebench.routing import Scale
from prunebench.storage import account, part_of, read_headers, survey, tied_names
from prunebench.testing import opened_model, random_ids

# How each family saves an expert's gate and up: as two matrices, or as one.
APART = {"olmoe": True, "deepseek_v2": True, "granitemoe": False}


def quantized(moe, text, pruned=()):
    ids_BL = random_ids(4, 24)
    programs = {layer.index: LayerProgram(pruned, scale=Scale("keep")) for layer in moe.layers} if pruned else None
    tokens = CalibrationTokens(CalibrationSpec("file:x", 4, 24), ids_BL, "test")
    return quantize_model(moe, setting_of(text), tokens, programs=programs)


@pytest.mark.parametrize("family", list(APART))
@pytest.mark.parametrize(
    "text", ["w4(group=16)", "e3a4(group=16, zeros=bits)", "mc3a2(group=24, zeros=bits, fewest=1)"]
)
@pytest.mark.parametrize("pruned", [(), (1, 6, 7)])
def test_files_are_the_formula_s_to_the_byte(tmp_path, family, text, pruned):
    moe = opened_model(family)
    moe.model.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    model = survey(read_headers(tmp_path / "model"), tied=tied_names(config))
    found = quantized(moe, text, pruned)
    write_packed(tmp_path / "packed.safetensors", found, apart=APART[family])
    sizes: Counter[str] = Counter()
    for name, tensor in read_headers(tmp_path / "packed.safetensors").items():
        sizes["metadata" if name.endswith("weight_shape") else part_of(name)] += tensor.bytes
    counted = account(
        model,
        found.setting.bits,
        pruned={layer.index: len(pruned) for layer in moe.layers},
        keep_router_rows=False,
        allocation=found.allocation,
    ).on_disk
    for part in ("experts", "shared", "attention", "other", "metadata"):
        assert sizes[part] == counted[part] - model.plain[part]


@pytest.mark.parametrize("family", list(APART))
@pytest.mark.parametrize("zeros", ["fp16", "bits"])
def test_what_is_read_back_is_what_was_written(tmp_path, family, zeros):
    for setting, pruned in ((f"e3a4(group=16, zeros={zeros})", ()), (f"mc3a4(group=24, zeros={zeros})", (1, 6, 7))):
        found = quantized(opened_model(family), setting, pruned)
        write_packed(tmp_path / "packed.safetensors", found, apart=APART[family])
        again = read_packed(tmp_path / "packed.safetensors")
        # A zero of -0.0 is 0 in b bits.
        assert again.digest() == found.digest() or zeros == "bits"
        assert {**again.to_json(), "sha256": ""} == {**found.to_json(), "sha256": ""}
        assert list(again.linears) == list(found.linears)
        for name, linear in found.linears.items():
            own, read = linear.quantized, again.linears[name].quantized
            assert torch.equal(read.codes_ERC, own.codes_ERC)
            assert torch.equal(read.weight_ERC, own.weight_ERC)
            for part in ("scale_ERG", "zero_ERG", "bits_E"):
                assert torch.equal(getattr(read.grid, part), getattr(own.grid, part))
            assert again.linears[name].experts == linear.experts


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_compressed_tensors_reads_the_same_weights_and_makes_the_same_grid(tmp_path, bits):
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=bits, type="int", symmetric=False, strategy="group", group_size=16)
    moe = opened_model("olmoe")
    found = quantized(moe, f"w{bits}(group=16, zeros=bits)")
    write_packed(tmp_path / "packed.safetensors", found, apart=True)
    name = "model.layers.0.self_attn.q_proj"
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in load_file(tmp_path / "packed.safetensors").items()
        if key.startswith(f"{name}.")
    }
    own["weight_scale"] = own["weight_scale"].float()  # their arithmetic is in the scale's dtype
    theirs = PackedQuantizationCompressor.decompress(own, QuantizationScheme(targets=["Linear"], weights=args))
    assert torch.equal(theirs["weight"], found.linears[f"{name}.weight"].quantized.weight_ERC[0])
    weight = moe.model.get_parameter(f"{name}.weight")
    grouped = weight.unflatten(-1, (-1, 16))
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    grid = grid_of(weight[None], torch.tensor([bits]), 16)
    assert torch.equal(grid.scale_ERG[0], scale.half())
    assert torch.equal(grid.zero_ERG[0].int(), zero.int() + 2 ** (bits - 1))
    plain = round_to_nearest(weight[None], bits, group=16)
    assert plain.weight_ERC.shape == (1, *weight.shape)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors, name: tensors.pop(f"{name}.weight_scale"), "weight_scale is missing"),
        (lambda tensors, name: tensors.update({f"{name}.weight_packed": torch.zeros(3, 3)}), "weight_packed is"),
        (
            lambda tensors, name: tensors.update({f"{name}.weight_zero_point": torch.zeros(2, 2)}),
            "weight_zero_point is",
        ),
        (
            lambda tensors, name: [tensors.pop(key) for key in list(tensors) if key.startswith(f"{name}.")],
            r"q_proj\.weight_packed is missing",
        ),
        (
            lambda tensors, name: tensors.update({f"{name}.bias": torch.zeros(2)}),
            r"q_proj\.bias is of no matrix of the file; in .*; expected 416 tensors",
        ),
        (lambda tensors, name: tensors[f"{name}.weight_shape"].sub_(1), r"weight_shape says \[31, 31\]"),
    ],
)
def test_a_file_with_something_missing_or_wrong_is_refused(tmp_path, change, said):
    found = quantized(opened_model("olmoe"), "w4(group=16)")
    path = tmp_path / "packed.safetensors"
    write_packed(path, found, apart=True)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    change(tensors, "model.layers.0.self_attn.q_proj")
    save_file(tensors, path, metadata=header)
    with pytest.raises(UsageError, match=said):
        read_packed(path)


def test_no_file_is_refused_in_one_line(tmp_path):
    with pytest.raises(UsageError, match="not a packed file"):
        read_packed(tmp_path / "none.safetensors")


def test_without_compressed_tensors_the_extra_is_named(monkeypatch):
    found = quantized(opened_model("olmoe"), "w4(group=16)")
    monkeypatch.setitem(__import__("sys").modules, "compressed_tensors.compressors.pack_quantized", None)
    with pytest.raises(PrerequisiteError, match=r"prunebench\[ct\]"):
        packed.packed_tensors(found, apart=True)
