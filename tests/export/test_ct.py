"""The packed format: codes and scales by hand, plain transformers' logits, what it cannot hold, and its extra."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from export_material import PER_LAYER, evaluated, logits, open_base, plan_for, pruned_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm_reader import read_tensors

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.export import Scheme, Settings, load, verify, write_export
from prunebench.export.quantized import Quantized, round_to_nearest
from prunebench.storage import measured, read_headers
from prunebench.testing import random_ids

IDS = random_ids(2, 16)
GROUPS_OF_16 = Scheme(bits=4, attention_bits=None, group_size=16)
MIXED = Scheme(bits=3, attention_bits=4, group_size=16)


def by_hand(weight_RC: list[list[float]], bits: int, size: int) -> tuple[list[list[int]], list[list[float]]]:
    """Codes and scales of symmetric round-to-nearest, one number after the other.

    The largest magnitude of a group is (2^b - 1)/2 steps, as compressed-tensors defines a step.
    """
    codes, scales = [], []
    for row in weight_RC:
        codes.append([])
        scales.append([])
        for start in range(0, len(row), size):
            group = row[start : start + size]
            scale = torch.tensor(max(map(abs, group)) / ((2**bits - 1) / 2), dtype=torch.float32).item()
            scales[-1].append(scale)
            for value in group:
                # The largest of a group is a tie, (2^b - 1)/2, once the quotient is float32; ties go to the even code.
                step = torch.tensor(value / scale, dtype=torch.float32).item()
                codes[-1].append(max(-(2 ** (bits - 1)), min(2 ** (bits - 1) - 1, round(step))))
    return codes, scales


def unpacked(words_RW: torch.Tensor, bits: int, columns: int) -> list[list[int]]:
    """Codes of packed rows, bit by bit: column c is bits [c·b, (c+1)·b) of a row, plus 2^(b-1)."""
    rows = []
    for words in words_RW.tolist():
        stream = sum((word & 0xFFFFFFFF) << (32 * number) for number, word in enumerate(words))
        rows.append([((stream >> (bits * c)) & (2**bits - 1)) - 2 ** (bits - 1) for c in range(columns)])
    return rows


@pytest.fixture(scope="module")
def base(bases):
    folder = bases("olmoe")
    return folder, open_base(folder)


@pytest.fixture(scope="module")
def exported(base, tmp_path_factory):
    folder, moe = base
    plan = plan_for(moe, "reroute", "renorm")
    out = tmp_path_factory.mktemp("ct") / "out"
    done = write_export(pruned_model(folder, plan), "ct", out, limit=8000, scheme=MIXED)
    return out, plan, done


def test_codes_and_scales_are_those_by_hand_of_the_survivors(base, exported):
    folder, _ = base
    out, plan, _ = exported
    source, saved = load_file(folder / "model.safetensors"), read_tensors(out)
    survivors = plan.mask.layers[1].survivors
    checked = {
        f"model.layers.1.mlp.experts.2.{word}": (f"model.layers.1.mlp.experts.{survivors[2]}.{word}", 3)
        for word in ("gate_proj", "up_proj", "down_proj")
    }
    checked["model.layers.0.self_attn.q_proj"] = "model.layers.0.self_attn.q_proj", 4
    for name, (old, bits) in checked.items():
        weight_RC = source[f"{old}.weight"]
        codes, scales = by_hand(weight_RC.tolist(), bits, 16)
        assert unpacked(saved[f"{name}.weight_packed"], bits, weight_RC.shape[1]) == codes
        torch.testing.assert_close(saved[f"{name}.weight_scale"], torch.tensor(scales), rtol=2e-7, atol=0)
        assert saved[f"{name}.weight_shape"].tolist() == list(weight_RC.shape)
        assert f"{name}.weight" not in saved


def test_plain_transformers_computes_with_codes_times_scale(exported, tmp_path):
    """Every weight unpacked by hand and put into a plain checkpoint: the same logits, bit for bit."""
    out, _, _ = exported
    config = json.loads((out / "config.json").read_text())
    stated = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    saved = read_tensors(out)
    plain = {name: tensor for name, tensor in saved.items() if not re.search(r"weight_(packed|scale|shape)$", name)}
    for name in [name for name in saved if name.endswith("_packed")]:
        stem = name.removesuffix("_packed")
        bits = stated["config_groups"]["experts" if ".experts." in name else "attention"]["weights"]["num_bits"]
        rows, columns = saved[f"{stem}_shape"].tolist()
        codes_RC = torch.tensor(unpacked(saved[name], bits, columns), dtype=torch.float32)
        plain[stem] = codes_RC * saved[f"{stem}_scale"].repeat_interleave(columns // saved[f"{stem}_scale"].shape[1], 1)
        assert plain[stem].shape == (rows, columns)
    from safetensors.torch import save_file

    save_file(plain, tmp_path / "model.safetensors", metadata={"format": "pt"})
    simulated = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation="eager")
    model, info = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    assert torch.equal(logits(model), logits(simulated))
    assert torch.equal(logits(load(out)), logits(simulated))
    assert model.config.num_experts == 4
    kept = model.config.quantization_config.to_dict()["moe_sparsity_config"]
    assert kept["num_experts"] == [4, 4]


def test_verify_compares_with_the_base_cut_and_rounded_anew(exported):
    out, _, done = exported
    found = verify(out, ids_BL=IDS)
    assert (found.exact, found.passed, found.allowed) == (True, True, 0.0)
    assert measured(read_headers(out)) == done.stored
    card = (out / "README.md").read_text()
    assert "experts 3 bits, attention 4 bits; round-to-nearest, symmetric, groups of 16 columns" in card


def test_bytes_are_bits_and_scales(base, exported):
    """b + 32/g bits per weight with float32 scales, rows padded to words, and 16 bytes for each linear's shape."""
    _, moe = base
    _, _, done = exported
    width, neurons = 32, 16
    one = 0
    for rows, columns in ((neurons, width), (neurons, width), (width, neurons)):
        words = (columns * 3 + 31) // 32
        one += 4 * rows * words + 4 * rows * columns // 16 + 16
    assert done.stored["parts"]["experts"] == one * 4 * len(moe.layers)


def test_more_bits_are_nearer(base, tmp_path):
    folder, moe = base
    plan = plan_for(moe, "reroute", "renorm")
    wanted, worst = evaluated(moe, plan), []
    for bits in (2, 4, 8):
        write_export(pruned_model(folder, plan), "ct", tmp_path / str(bits), scheme=Scheme(bits, bits, 16))
        worst.append(float((logits(load(tmp_path / str(bits))) - wanted).abs().max()))
    assert worst[0] > 2 * worst[1] > 8 * worst[2] > 0


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_other_families_and_edited_survivors(family, bases, tmp_path):
    """Shared experts and dense layers stay as they are."""
    folder = bases(family)
    plan = plan_for(open_base(folder), "edited reroute", "renorm")
    write_export(pruned_model(folder, plan), "ct", tmp_path / "out", scheme=GROUPS_OF_16)
    assert verify(tmp_path / "out", ids_BL=IDS).exact
    assert not [name for name in read_headers(tmp_path / "out") if "shared" in name and "packed" in name]


def test_scales_take_the_dtype_that_the_model_is_run_in(bases, tmp_path):
    folder = bases("olmoe", dtype=torch.bfloat16)
    plan = plan_for(open_base(folder, "bfloat16"), "reroute", "renorm")
    for dtype, stored in (("bfloat16", "BF16"), ("float32", "F32")):
        pruned = pruned_model(folder, plan, settings=Settings(dtype))
        write_export(pruned, "ct", tmp_path / dtype, scheme=GROUPS_OF_16)
        headers = read_headers(tmp_path / dtype)
        assert {tensor.dtype for name, tensor in headers.items() if name.endswith("_scale")} == {stored}
        assert verify(tmp_path / dtype, ids_BL=IDS).exact


def test_the_quantizer_is_one_function_that_can_be_another(base, tmp_path):
    """Whatever makes codes and scales can take the place of round-to-nearest; its codes are packed as they are."""
    from prunebench.export import ct
    from prunebench.export.pruned import Anatomy

    folder, moe = base
    plan = plan_for(moe, "reroute", "renorm")
    nearest, asked = round_to_nearest(GROUPS_OF_16, torch.float32), []

    def shifted(name: str, weight_RC: torch.Tensor, bits: int) -> Quantized:
        asked.append(name)
        found = nearest(name, weight_RC, bits)
        return Quantized((found.codes_RC - 1).clamp_min(-8), found.scales_RG)

    ct.write(pruned_model(folder, plan), Anatomy.of(folder), tmp_path, 10**9, GROUPS_OF_16, shifted)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    survivor = plan.mask.layers[0].survivors[0]
    weight_RC = load_file(folder / "model.safetensors")[name.replace("experts.0", f"experts.{survivor}")]
    codes, _ = by_hand(weight_RC.tolist(), 4, 16)
    packed = read_tensors(tmp_path)[f"{name}_packed"]
    assert unpacked(packed, 4, weight_RC.shape[1]) == [[max(-8, code - 1) for code in row] for row in codes]
    assert name in asked


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (("constant", None, "uniform"), "answered by Constant"),
        (("survivor", None, "uniform"), "answered by Survivor"),
        (("half", "renorm", "uniform"), "answered by Constant"),
        (("reroute", "keep", "uniform"), "scale keep of this router"),
        (("reroute", "interp:0.5", "uniform"), "scale interp:0.5"),
        (("reroute", "renorm", PER_LAYER), "different numbers of experts"),
    ],
)
def test_what_it_cannot_hold(cell, words, base, tmp_path):
    folder, moe = base
    with pytest.raises(UsageError, match=f"ct cannot hold this model: .*{words}"):
        write_export(pruned_model(folder, plan_for(moe, *cell)), "ct", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_stacked_files_and_groups_that_do_not_fit(base, bases, tmp_path):
    folder, moe = base
    pruned = pruned_model(folder, plan_for(moe, "reroute", "renorm"))
    with pytest.raises(UsageError, match=r"experts\.0\.down_proj\.weight has 16 columns; .*128; fix: give another"):
        write_export(pruned, "ct", tmp_path / "out")
    with pytest.raises(UsageError, match="hf quantizes nothing"):
        write_export(pruned, "hf", tmp_path / "out", scheme=GROUPS_OF_16)
    with pytest.raises(UsageError, match="9 bits; expected 2 to 8"):
        Scheme(bits=9)
    stacked = bases("granitemoe")
    pruned = pruned_model(stacked, plan_for(open_base(stacked), "reroute", "renorm"))
    with pytest.raises(UsageError, match="the files stack the experts"):
        write_export(pruned, "ct", tmp_path / "out", scheme=GROUPS_OF_16)
    assert not list(tmp_path.iterdir())


def test_without_the_package_the_extra_is_named(base, tmp_path, monkeypatch):
    folder, moe = base
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(
        PrerequisiteError, match=r"compressed-tensors is not installed; .*pip install 'prunebench\[ct\]'"
    ):
        write_export(pruned_model(folder, plan_for(moe, "reroute", "renorm")), "ct", tmp_path / "out")


def by_hand_with_zeros(weight_RC: list[list[float]], bits: int, size: int) -> list[list[float]]:
    """The weights that asymmetric round-to-nearest leaves, one number after the other: (code - zero)·scale.

    A group's range, widened to hold 0, is 2^b - 1 steps.
    """
    single = lambda number: torch.tensor(number, dtype=torch.float32).item()  # noqa: E731
    most = 2 ** (bits - 1)
    rows = []
    for row in weight_RC:
        rows.append([])
        for start in range(0, len(row), size):
            group = row[start : start + size]
            low, high = min(0.0, *group), max(0.0, *group)
            scale = single(single(high - low) / (2**bits - 1))
            zero = max(-most, min(most - 1, round(-most - single(low / scale))))
            for value in group:
                code = max(-most, min(most - 1, round(single(single(value / scale) + zero))))
                rows[-1].append(single((code - zero) * scale))
    return rows


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_asymmetric_weights_have_zeros_and_are_labelled_untested(bits, base, tmp_path):
    from compressed_tensors.quantization import QuantizationConfig

    folder, moe = base
    plan = plan_for(moe, "reroute", "renorm")
    scheme = Scheme(bits, 4, 16, symmetric=False)
    done = write_export(pruned_model(folder, plan), "ct", tmp_path / "out", limit=8000, scheme=scheme)
    source, saved = load_file(folder / "model.safetensors"), read_tensors(tmp_path / "out")
    survivor = plan.mask.layers[1].survivors[2]
    model = load(tmp_path / "out")
    experts = model.model.layers[1].mlp.experts
    read = {"up_proj": experts.gate_up_proj[2, 16:], "down_proj": experts.down_proj[2]}
    for word, weight_RC in read.items():
        own = source[f"model.layers.1.mlp.experts.{survivor}.{word}.weight"]
        assert weight_RC.tolist() == by_hand_with_zeros(own.tolist(), bits, 16)
        words = saved[f"model.layers.1.mlp.experts.2.{word}.weight_zero_point"]
        assert (words.dtype, list(words.shape)) == (torch.int32, [-(-own.shape[0] * bits // 32), own.shape[1] // 16])
    attention = "model.layers.0.self_attn.q_proj.weight"
    assert model.get_parameter(attention).tolist() == by_hand_with_zeros(source[attention].tolist(), 4, 16)
    assert verify(tmp_path / "out", ids_BL=IDS).exact
    assert measured(read_headers(tmp_path / "out")) == done.stored
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig(**stated).config_groups
    assert [group.weights.symmetric for group in groups.values()] == [False, False]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "round-to-nearest, asymmetric, groups of 16 columns. Untested: transformers does not load" in card


def test_the_command_takes_asymmetric_for_ct_only(tmp_path, capsys):
    from prunebench import cli

    assert cli.main(["export", str(tmp_path), "--format", "hf", "--asymmetric"]) == 2
    assert "hf quantizes nothing" in capsys.readouterr().err
