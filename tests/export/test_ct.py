"""The packed format: codes and scales by hand, plain transformers' logits, what it cannot hold, and its extra."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
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


def with_zeros(weight_RC: torch.Tensor, bits: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [R, C], zeros and scales [R, G] of asymmetric round-to-nearest, in float64.

    A group's range, widened to hold 0, is 2^b - 1 steps; codes begin at -2^(b-1), as compressed-tensors counts them.
    """
    groups_RGS = weight_RC.double().numpy().reshape(len(weight_RC), -1, size)
    low_RG, high_RG = groups_RGS.min(-1).clip(max=0), groups_RGS.max(-1).clip(min=0)
    scales_RG = (high_RG - low_RG) / (2**bits - 1)
    zeros_RG = np.rint(-low_RG / scales_RG) - 2 ** (bits - 1)
    codes_RGS = np.rint(groups_RGS / scales_RG[..., None] + zeros_RG[..., None])
    most = 2 ** (bits - 1)
    return codes_RGS.clip(-most, most - 1).reshape(weight_RC.shape), zeros_RG, scales_RG


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{} bits".format)
def with_zero_points(request, base, tmp_path_factory):
    folder, moe = base
    plan = plan_for(moe, "reroute", "renorm")
    out = tmp_path_factory.mktemp("asymmetric") / "out"
    scheme = Scheme(request.param, 4, 16, symmetric=False)
    return out, plan, write_export(pruned_model(folder, plan), "ct", out, limit=8000, scheme=scheme), request.param


def test_asymmetric_linears_as_compressed_tensors_unpacks_them(base, with_zero_points):
    """Every linear: its integers are those of float64, and what the package's own reader computes is what is loaded."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization import QuantizationConfig

    folder, _ = base
    out, plan, _, expert_bits = with_zero_points
    source, saved, model = load_file(folder / "model.safetensors"), read_tensors(out), load(out)
    stated = QuantizationConfig(**json.loads((out / "config.json").read_text())["quantization_config"])
    linears = [name.removesuffix("_packed") for name in saved if name.endswith("_packed")]
    assert len(linears) == 2 * (4 * 3 + 4)
    for name in linears:
        layer, expert = int(name.split(".")[2]), re.search(r"experts\.(\d+)\.", name)
        survivor = plan.mask.layers[layer].survivors[int(expert[1])] if expert else None
        own_RC = source[name if survivor is None else name.replace(expert[0], f"experts.{survivor}.")]
        bits = 4 if expert is None else expert_bits
        codes_RC, zeros_RG, scales_RG = with_zeros(own_RC, bits, 16)
        state = {key.rpartition(".")[2]: tensor for key, tensor in saved.items() if key.startswith(name)}
        assert set(state) == {"weight_packed", "weight_scale", "weight_zero_point", "weight_shape"}
        assert state["weight_zero_point"].dtype == torch.int32
        found_RC = unpack_from_int32(state["weight_packed"], bits, own_RC.shape)
        found_RG = unpack_from_int32(state["weight_zero_point"], bits, torch.Size(zeros_RG.shape), packed_dim=0)
        np.testing.assert_array_equal(found_RC.numpy(), codes_RC)
        np.testing.assert_array_equal(found_RG.numpy(), zeros_RG)
        np.testing.assert_allclose(state["weight_scale"].numpy(), scales_RG, rtol=3e-7)
        group = stated.config_groups["attention" if expert is None else "experts"]
        assert (group.weights.symmetric, group.weights.num_bits) == (False, bits)
        assert re.match(group.targets[0].removeprefix("re:"), name.removesuffix(".weight"))
        read_RC = PackedQuantizationCompressor.decompress(state, group)["weight"]
        assert torch.equal(read_RC, loaded(model, name))


def loaded(model, name: str) -> torch.Tensor:
    """A linear of a file as it is in a loaded OLMoE, which fuses gate and up."""
    if ".experts." not in name:
        return model.get_parameter(name)
    _, _, layer, _, _, expert, word, _ = name.split(".")
    experts = model.model.layers[int(layer)].mlp.experts
    if word == "down_proj":
        return experts.down_proj[int(expert)]
    return experts.gate_up_proj[int(expert)].chunk(2)[word == "up_proj"]


def test_asymmetric_bytes_are_bits_scales_and_zeros(base, with_zero_points):
    """Beside codes, scales and shape, b bits for each group's zero, columns of them padded to words."""
    _, moe = base
    out, _, done, bits = with_zero_points

    def size(rows: int, columns: int, b: int) -> int:
        groups = columns // 16
        return 4 * rows * -(-columns * b // 32) + 4 * rows * groups + 4 * groups * -(-rows * b // 32) + 16

    width, neurons = 32, 16
    one = 2 * size(neurons, width, bits) + size(width, neurons, bits)
    assert done.stored["parts"]["experts"] == one * 4 * len(moe.layers)
    norms = sum(t.bytes for name, t in read_headers(out).items() if re.search(r"self_attn\.._norm", name))
    one = 2 * size(width, width, 4) + 2 * size(width // 2, width, 4)  # half as many heads of keys and values
    assert done.stored["parts"]["attention"] - norms == one * len(moe.layers)


def test_asymmetric_is_verified_and_labelled(with_zero_points):
    """Plain transformers still does not load it: a version that does makes the label wrong, and this test fail."""
    out, _, _, bits = with_zero_points
    assert verify(out, ids_BL=IDS).exact
    card = (out / "README.md").read_text()
    assert f"experts {bits} bits, attention 4 bits; round-to-nearest, asymmetric, groups of 16 columns." in card
    assert "Untested: transformers does not load asymmetric experts, others were not tried." in card
    assert "AutoModelForCausalLM" not in card
    assert "model = prunebench.load(FOLDER)" in card
    assert json.loads((out / "prunebench" / "export.json").read_text())["quantization"]["symmetric"] is False
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, experts_implementation="eager")


def test_groups_on_one_side_of_zero_and_of_zeros():
    """A range always holds 0, so that [5, 6] is rounded in steps of 6/15, and zeros stay zeros."""
    weight_RC = torch.stack([torch.linspace(5, 6, 16), -torch.linspace(5, 6, 16), torch.zeros(16)])
    found = round_to_nearest(Scheme(4, None, 16, symmetric=False), torch.float32)("", weight_RC, 4)
    assert found.zeros_RG is not None
    assert found.zeros_RG[:2].flatten().tolist() == [-8, 7]
    torch.testing.assert_close(found.scales_RG[:2], torch.full((2, 1), 6 / 15))
    assert (found.values() - weight_RC)[:2].abs().max() <= 0.5 * 6 / 15 + 1e-6
    assert not found.values()[2].any()


def test_a_symmetric_export_says_what_it_said_before_there_were_zeros(exported):
    out, _, _ = exported
    stated = json.loads((out / "prunebench" / "export.json").read_text())["quantization"]
    assert stated == {"bits": 3, "attention_bits": 4, "group_size": 16}


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_quantizer_of_the_other_kind_is_refused(symmetric, base, tmp_path):
    from prunebench.export import ct
    from prunebench.export.pruned import Anatomy

    folder, moe = base
    other = round_to_nearest(Scheme(4, None, 16, symmetric=not symmetric), torch.float32)
    asked = Scheme(4, None, 16, symmetric=symmetric)
    words = "has zeros; expected none" if symmetric else "has no zeros; expected one"
    with pytest.raises(UsageError, match=words):
        ct.write(
            pruned_model(folder, plan_for(moe, "reroute", "renorm")), Anatomy.of(folder), tmp_path, 10**9, asked, other
        )


def test_the_command_takes_asymmetric_for_ct_only(tmp_path, capsys):
    from prunebench import cli

    assert cli.main(["export", str(tmp_path), "--format", "hf", "--asymmetric"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "hf quantizes nothing; fix: leave --bits, --attention-bits, --group-size and --asymmetric out" in said


def test_the_command_asks_for_what_its_options_say(tmp_path, monkeypatch):
    from prunebench import cli, export

    asked = []
    done = export.Exported(tmp_path, "ct", {"total": 0})
    monkeypatch.setattr(export, "export_run", lambda *_, scheme, **__: asked.append(scheme) or done)
    for options in ([], ["--asymmetric"], ["--bits", "3", "--group-size", "32"]):
        assert cli.main(["export", str(tmp_path), "--format", "ct", *options]) == 0
    assert asked == [None, Scheme(4, None, 128, symmetric=False), Scheme(3, None, 32, symmetric=True)]
