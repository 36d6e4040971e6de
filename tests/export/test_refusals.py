"""Every row of the table of refusals, on a model that has just that; and the nearest one that has not."""

from __future__ import annotations

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from export_material import evaluated, logits, open_base, plan_for, pruned_model
from safetensors.torch import load_file, save_file

from prunebench.calibration import CalibrationSpec, CalibrationTokens
from prunebench.errors import UsageError
from prunebench.export import FORMATS, Scheme, load, verify, write_export
from prunebench.export.pruned import Anatomy, facts_of_plan
from prunebench.export.refusals import REFUSALS, refuse
from prunebench.install import programs_of
from prunebench.loader import content_root
from prunebench.quantize import quantize_model, setting_of
from prunebench.testing import FAMILIES, random_ids
from prunebench.testing.families import policy_of, renorm_plan

# rule -> (family, operator, scale, format, the words that the error must have)
CASES = {
    "fills": ("olmoe", "tilt", None, "hf", "answered by Tilt"),
    "scale": ("olmoe", "reroute", "keep", "hf", "scale keep of this router (softmax, no renorm)"),
    "counts": ("olmoe", "reroute", "renorm", "hf", "different numbers of experts (3, 4)"),
    "refilled": ("olmoe", "half", "renorm", "vllm-mone", "refilled by survivors"),
    "functions": ("olmoe", "neurons", None, "vllm-mone", "answered by SmallExpert"),
    "stacked": ("granitemoe", "constant", None, "vllm-mone", "block_sparse_moe.input_linear.weight"),
    "input gates": ("llama4", "constant", None, "vllm-mone", "gates multiply the experts' input"),
    "identities": ("longcat_flash", "constant", None, "vllm-mone", "6 identity experts"),
    "unreadable": ("bailing_hybrid", "reroute", "renorm", "ct", "bailing_hybrid: transformers joins its convolution"),
    "edits": ("gpt_oss", "edited reroute", "renorm", "hf", "gate_up_proj_bias has no tensor"),
    "unprunable": ("deepseek_v4.hash", "reroute", "renorm", "hf", "layer 0 keeps all its experts"),
    "groups": ("deepseek_v3.groups", "reroute", "renorm", "hf", "the unpruned router chooses the groups"),
}


@pytest.mark.parametrize("rule", CASES)
def test_a_row_refuses_by_name_and_writes_nothing(rule, bases, tmp_path):
    family, operator, scale, form, words = CASES[rule]
    folder = bases(family)
    moe = open_base(folder)
    plan = plan_for(moe, operator, scale, "per layer" if rule == "counts" else "uniform")
    with pytest.raises(UsageError) as caught:
        write_export(pruned_model(folder, plan), form, tmp_path / "out")
    row = next(row for row in REFUSALS if row.rule == rule)
    assert caught.value.what.startswith(f"{form} cannot hold this model: ")
    assert words in caught.value.what
    assert (caught.value.expected, caught.value.fix) == (row.expected, row.fix)
    assert not list(tmp_path.iterdir())


def test_a_bias_on_a_softmax_needs_the_whole_router(bases, tmp_path):
    folder = bases("ernie4_5_moe")
    plan = plan_for(open_base(folder), "reroute", "renorm")
    with pytest.raises(UsageError, match=r"scale renorm of this router .* needs the pruned experts' rows"):
        write_export(pruned_model(folder, plan), "hf", tmp_path / "out")


def copied(folder, out, **config):
    shutil.copytree(folder, out)
    data = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**data, **config}))
    return out


def test_a_quantized_base_is_refused_by_all_that_copy_weights(bases, tmp_path):
    folder = copied(bases("olmoe"), tmp_path / "base", quantization_config={"quant_method": "gptq", "bits": 4})
    moe = open_base(bases("olmoe"))
    for form in ("hf", "vllm-mone", "ct"):
        plan = plan_for(moe, "constant") if form == "vllm-mone" else plan_for(moe, "reroute", "renorm")
        with pytest.raises(UsageError, match=f"{form} .*: the base checkpoint is quantized by gptq"):
            write_export(pruned_model(folder, plan), form, tmp_path / "out")


def test_integers_of_a_run_are_refused_by_all_but_native(bases, tmp_path):
    folder = bases("olmoe")
    moe = open_base(folder)
    plan = plan_for(moe, "edited reroute", "renorm")
    tokens = CalibrationTokens(CalibrationSpec("file:x", 2, 16), random_ids(2, 16), "test")
    found = quantize_model(moe, setting_of("w4(group=16)"), tokens, programs=programs_of(plan))
    pruned = pruned_model(folder, plan, quantized=found)
    for form in ("hf", "vllm-mone", "ct"):
        with pytest.raises(UsageError, match=rf"{form} .*: the run computes with the integers of w4\(group=16\); "):
            write_export(pruned, form, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with found.installed(moe):
        wanted = evaluated(moe, dataclasses.replace(plan, edits={}))
    write_export(pruned, "native", tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), wanted)
    integers = tmp_path / "out" / "prunebench" / "integers.safetensors"
    integers.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"not a packed file; in .*integers\.safetensors"):
        load(tmp_path / "out")
    write_export(pruned_model(folder, plan), "native", tmp_path / "plain")
    (tmp_path / "elsewhere").rename(tmp_path / "plain" / "prunebench" / "integers.safetensors")
    assert torch.equal(logits(load(tmp_path / "plain")), evaluated(moe, plan))


def test_experts_of_layers_that_no_mask_names_are_refused(bases, tmp_path):
    folder = copied(bases("olmoe"), tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.7.mlp.experts.0.up_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plan = plan_for(open_base(bases("olmoe")), "reroute", "renorm")
    with pytest.raises(UsageError, match="layer 7 has experts that the mask does not name"):
        write_export(pruned_model(folder, plan), "hf", tmp_path / "out")


def test_a_config_without_a_count_is_refused(bases):
    folder = bases("olmoe")
    anatomy = Anatomy.of(folder)
    silent = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=8))
    pruned = pruned_model(folder, plan_for(open_base(folder), "reroute", "renorm"))
    facts = facts_of_plan(pruned, anatomy)
    refuse(facts, "hf")
    with pytest.raises(UsageError, match="does not say how many experts"):
        refuse(dataclasses.replace(facts, anatomy=dataclasses.replace(anatomy, config=silent)), "hf")


def test_every_row_has_a_case_here():
    elsewhere = {"quantized", "stray", "uncounted", "integers"}
    assert {row.rule for row in REFUSALS} == set(CASES) | elsewhere
    assert {form for row in REFUSALS for form in row.formats} == set(FORMATS) - {"native"}


def test_an_unknown_format_is_one_line(bases, tmp_path):
    folder = bases("olmoe")
    with pytest.raises(UsageError, match="unknown format 'gguf'; expected native, hf, vllm-mone, ct"):
        write_export(pruned_model(folder, plan_for(open_base(folder), "constant")), "gguf", tmp_path / "out")


# Their routers must stay whole, or their layers differ.
IMPOSSIBLE = {"ernie4_5_moe", "longcat_flash", "deepseek_v4.hash"}
QUICK = ("mixtral", "gpt_oss", "gemma4", "deepseek_v3.groups", "minimax_m2")


def check_family(family, bases, out) -> None:
    """Half of the experts of any family, cut out of its files: the model is there, and computes what was evaluated."""
    folder = bases(family, experts=16, top_k=4)
    moe = open_base(folder)
    plan, policy = renorm_plan(moe), policy_of(moe)
    wanted = evaluated(moe, plan, policy)
    write_export(pruned_model(folder, plan, policy=policy), "hf", out)
    torch.testing.assert_close(logits(load(out)), wanted, rtol=0, atol=2e-5)


# Stacked experts, besides.
PACKED = sorted(
    set(FAMILIES)
    - IMPOSSIBLE
    - {"granitemoe", "granitemoeshared", "granitemoehybrid", "gpt_oss", "gemma4", "llama4", "bailing_hybrid"}
)

NO_ATTENTION = {"deepseek_v4", "nemotron_h", "nemotron_h.latent"}


@pytest.mark.slow
@pytest.mark.parametrize("attention", [None, 4])
@pytest.mark.parametrize("family", PACKED)
def test_packed_weights_of_every_family_load_in_plain_transformers(family, attention, bases, tmp_path):
    folder = bases(family, experts=16, top_k=4)
    moe = open_base(folder)
    pruned = pruned_model(folder, renorm_plan(moe), policy=policy_of(moe))
    scheme = Scheme(4, attention, 8)
    if attention and family in NO_ATTENTION:
        with pytest.raises(UsageError, match="its attention has no linear that the files call as transformers does"):
            write_export(pruned, "ct", tmp_path / "out", scheme=scheme)
        return
    write_export(pruned, "ct", tmp_path / "out", scheme=scheme)
    assert verify(tmp_path / "out", ids_BL=random_ids(2, 16)).exact


@pytest.mark.parametrize("family", QUICK)
def test_files_of_many_namings_are_cut_right(family, bases, tmp_path):
    check_family(family, bases, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - IMPOSSIBLE - set(QUICK)))
def test_files_of_every_family_are_cut_right(family, bases, tmp_path):
    check_family(family, bases, tmp_path / "out")


def test_the_manual_has_the_table():
    text = (content_root() / "docs" / "export.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    stated = [(cells[0].removeprefix("| "), tuple(cells[1].split(", "))) for cells in rows]
    table = [(row.rule, row.formats) for row in REFUSALS]
    assert [row for row in stated if row[0] in dict(table)] == table
