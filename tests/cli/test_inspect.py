"""`prunebench inspect` says what can be pruned, and whether the routers compute what the table says."""

from __future__ import annotations

import json

import pytest

from prunebench import cli
from prunebench.moe import inspect_model
from prunebench.testing import FAMILIES, random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a saved random model of a family."""
    root = tmp_path_factory.mktemp("models")

    def saved(family: str):
        if not (root / family).exists():
            random_model(family).save_pretrained(root / family)
        return root / family

    return saved


def test_a_model_is_described_and_its_routers_are_checked(folder, capsys):
    assert cli.main(["inspect", str(folder("deepseek_v3.groups")), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["convention"] == "sigmoid, renorm, bias, ×2.5, 2 of 4 groups"
    assert data["trained_scale"] == "renorm"
    assert (data["self_check"], data["reason"]) == ("pass", "")
    assert [layer["index"] for layer in data["layers"]] == [1, 2]
    assert data["layers"][0] | {"name": ""} == {
        "index": 1,
        "name": "",
        "router": "DeepseekV3TopkRouter",
        "experts": 16,
        "top_k": 4,
        "groups": 4,
        "kept_groups": 2,
        "fewest_survivors": 8,
        "identity_experts": 0,
        "selection_bias": "e_score_correction_bias of the router",
        "shared": ["mlp.shared_experts"],
        "width": 32,
        "expert_values": 3 * 32 * 16,
    }
    assert cli.main(["inspect", str(folder("deepseek_v3.groups"))]) == 0
    text = capsys.readouterr().out
    assert "layers 1-2  16 experts, top-4, from 2 of 4 groups, 1536 values each, can lose 8, selection bias" in text
    assert "beside them: mlp.shared_experts" in text
    assert text.endswith("self-check  pass\n")


def test_the_config_alone_is_enough_for_everything_but_the_check(folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text((folder("deepseek_v4.hash") / "config.json").read_text())
    assert cli.main(["inspect", str(tmp_path), "--config-only"]) == 0
    text = capsys.readouterr().out
    assert "layer 0     cannot be pruned: experts are looked up in a fixed table by token id" in text
    assert "self-check  not run: the config alone was read" in text
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "self-check  not run: the folder holds no weights" in capsys.readouterr().out


def test_a_failed_self_check_is_said_with_its_reason_and_exit_code_1(folder, capsys, monkeypatch):
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

    forward = OlmoeTopKRouter.forward

    def altered(self, hidden):
        logits, gates, index = forward(self, hidden)
        return logits, gates * (1 + 2e-7), index

    monkeypatch.setattr(OlmoeTopKRouter, "forward", altered)
    assert cli.main(["inspect", str(folder("olmoe")), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["self_check"] == "fail"
    assert "OlmoeTopKRouter: the replayed gates differ" in data["reason"]


def test_a_model_with_nothing_to_prune_is_refused_in_one_line(tmp_path, capsys):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1).save_pretrained(tmp_path)
    assert cli.main(["inspect", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert "LlamaForCausalLM has no MoE layers" in error
    assert len(error.splitlines()) == 1


def test_a_config_that_the_models_own_code_cannot_take_is_one_line(tmp_path, capsys):
    from transformers import DbrxConfig

    DbrxConfig(d_model=32, n_heads=2, n_layers=2, vocab_size=64).save_pretrained(tmp_path)  # no rope_theta
    assert cli.main(["inspect", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert "no model can be built from the config (AttributeError: " in error
    assert len(error.splitlines()) == 1


SHARED = {
    "granitemoeshared": ("shared_mlp",),
    "granitemoehybrid": ("shared_mlp",),
    "hunyuan_v1_moe": ("mlp.shared_mlp",),
    "qwen2_moe": ("mlp.shared_expert", "mlp.shared_expert_gate"),
    "qwen3_next": ("mlp.shared_expert", "mlp.shared_expert_gate"),
    "qwen3_5_moe": ("mlp.shared_expert", "mlp.shared_expert_gate"),
    "gemma4": ("mlp",),
    "llama4": ("feed_forward.shared_expert",),
    "nemotron_h": ("mixer.shared_experts",),
    "nemotron_h.latent": ("mixer.shared_experts",),
}
WITH_SHARED_EXPERTS = (
    *("deepseek_v2", "deepseek_v2.groups", "deepseek_v3", "deepseek_v3.groups", "deepseek_v32", "deepseek_v4"),
    *("deepseek_v4.hash", "glm4_moe", "glm4_moe_lite", "dots1", "dots1.no_renorm", "bailing_hybrid", "hy_v3"),
    *("ernie4_5_moe", "afmoe"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_inspected_from_its_config(family, tmp_path):
    random_model(family).config.save_pretrained(tmp_path)
    report = inspect_model(family, tmp_path, weights=False)
    wanted = SHARED.get(family, ("mlp.shared_experts",) if family in WITH_SHARED_EXPERTS else ())
    assert {layer.shared for layer in report.layers} == {wanted}
    assert {layer.experts for layer in report.layers} == {16}
    assert {layer.identity_experts for layer in report.layers} == {6 if family == "longcat_flash" else 0}
    assert json.loads(json.dumps(report.to_json()))["convention"] == report.convention
    assert report.to_text().count("\n") >= 3
    assert report.self_check == "not run"
