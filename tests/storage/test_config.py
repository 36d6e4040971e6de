"""Bytes from configurations alone: as files and transformers have them, and as the paper prints them."""

from __future__ import annotations

import json
from functools import cache
from math import prod
from pathlib import Path

import pytest

from prunebench.errors import UsageError
from prunebench.storage import Bits, account, config_tensors, part_of, read_headers, survey, tied_names

ZOO = Path(__file__).parents[2] / "fixtures" / "zoo"

CONFIGS = Path(__file__).parents[1] / "configs"
OLMOE, LITE, MOONLIGHT = (
    json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("olmoe", "deepseek-v2-lite", "moonlight")
)
MODELS = {"OLMoE": OLMOE, "DeepSeek-V2-Lite": LITE, "Moonlight": MOONLIGHT}

# Values stored per pruned expert: nothing, MoNE's mean, the tilt of rank 32 (App. B.2).
FILLS = {"reroute": 0, "constant": 2048, "tilt": 133_184}


@cache
def surveyed(model):
    return survey(config_tensors(MODELS[model]))


def total(name, bits, ratio=0.0, operator="constant"):
    model = surveyed(name)
    pruned = {layer.index: int(ratio * layer.experts) for layer in model.layers if ratio}
    fills = 2 * FILLS[operator] * sum(pruned.values())
    return account(model, Bits.named(bits), pruned=pruned, fill_bytes=fills).total


@pytest.mark.parametrize("folder", sorted(ZOO.iterdir()), ids=lambda folder: folder.name)
def test_a_configuration_tells_every_tensor_of_the_zoos_files(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config_tensors(config, router_dtype="F32") == read_headers(folder)
    assert tied_names(config) == ("lm_head.weight",)


VARIANTS = {
    "OLMoE, shared keys, biases": OLMOE | {"num_key_value_heads": 4, "attention_bias": True},
    "DeepSeek, narrow queries, biases": LITE | {"q_lora_rank": 96, "attention_bias": True},
    "DeepSeek-V3, no shared expert, tied": MOONLIGHT | {"n_shared_experts": 1, "tie_word_embeddings": True},
    "Granite": {
        "model_type": "granitemoe",
        "vocab_size": 49155,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 40,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("name", [*MODELS, *VARIANTS])
def test_a_configuration_counts_the_values_of_transformers_model(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**MODELS, **VARIANTS}[name] | {"num_hidden_layers": 3}
    given = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **given))
    wanted, found = {}, {}
    buffers = ((n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    for key, value in (*model.named_parameters(), *buffers):
        wanted[part_of(key)] = wanted.get(part_of(key), 0) + value.numel()
    for key, tensor in config_tensors(config).items():
        found[part_of(key)] = found.get(part_of(key), 0) + prod(tensor.shape)
    assert found == wanted


def test_dense_models_are_as_large_as_the_paper_says():
    assert total("OLMoE", "w16") == 2 * 6_919_161_856
    assert round(total("DeepSeek-V2-Lite", "w16") / 1e9, 2) == 31.41  # Table 16, F.5
    assert round(total("Moonlight", "w16") / 1e9, 2) == 31.92


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("operator", FILLS)
def test_a_quarter_pruned_at_4_bits_is_within_1_6_percent_of_experts_at_3(model, operator):
    ratio = total(model, "w4", 0.25, operator) / total(model, "e3a4")
    assert abs(ratio - 1) <= 0.016


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("operator", FILLS)
def test_a_half_pruned_at_4_bits_is_at_most_5_percent_above_everything_at_2(model, operator):
    assert total(model, "w4", 0.5, operator) / total(model, "w2") <= 1.05


def test_task_calibrated_arms_store_about_7_gb_and_23_to_24_percent_of_16_bit():
    """2610.41366 §6.5 and App. F.5: the tilt on DeepSeek, rerouting on Moonlight."""
    lite, moonlight = total("DeepSeek-V2-Lite", "w4", 0.25, "tilt"), total("Moonlight", "w4", 0.25, "reroute")
    shares = (lite / total("DeepSeek-V2-Lite", "w16"), moonlight / total("Moonlight", "w16"))
    assert [round(100 * share) for share in shares] == [23, 24]
    assert round(lite / 1e9) == 7


def test_experts_of_large_models_take_the_formulas_bits():
    for zeros, bits in (("fp16", 3.25), ("bits", 3.1484375)):
        found = account(surveyed("DeepSeek-V2-Lite"), Bits(3, 4, zeros=zeros))
        assert found.ideal["experts"] == found.on_disk["experts"] == 26 * 64 * 3 * 2048 * 1408 * bits / 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mixtral"}, "no formula for model_type 'mixtral'"),
        ({"model_type": None}, "no formula for model_type 'None'"),
        ({"num_experts": None}, "num_experts is None; in here; expected a whole number"),
        ({"hidden_size": "2048"}, "hidden_size is '2048'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"mlp_bias": True}, "mlp_bias True is not counted here; in here"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not counted here"),
        ({"num_experts": 0}, "num_experts is 0; in here; expected a whole number from 1"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads is '8'"),
        ({"head_dim": "128"}, "head_dim is '128'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; in here; expected true or false"),
        (LITE | {"n_shared_experts": "2"}, "n_shared_experts is '2'"),
        (LITE | {"n_shared_experts": -2}, "n_shared_experts is -2; in here; expected a whole number from 0"),
        (LITE | {"moe_layer_freq": 2}, "moe_layer_freq 2 is not counted here"),
    ],
)
def test_a_configuration_that_cannot_be_counted_is_one_line(change, says):
    with pytest.raises(UsageError) as caught:
        config_tensors(OLMOE | change, where="here")
    message = str(caught.value)
    assert "\n" not in message
    assert says.split(";")[0] in message
