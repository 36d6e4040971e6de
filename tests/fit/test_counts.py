"""The paper's printed counts, from configurations alone (2610.41366 §3, §4.3, App. B.2, C.1, C.2, H.4)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from prunebench import Budget
from prunebench.errors import UsageError
from prunebench.fit import ModelSize, copy_size, cost, extra_experts, model_size, stored_per_expert
from prunebench.fit.counts import OPERATORS
from prunebench.testing import FAMILIES, random_model

CONFIGS = Path(__file__).parents[1] / "configs"
OLMOE, LITE, MOONLIGHT = (
    json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("olmoe", "deepseek-v2-lite", "moonlight")
)

HALF = Budget.of_ratio("0.5")


def on_meta(config: dict) -> ModelSize:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    return model_size(model)


@pytest.fixture(scope="module")
def sizes() -> tuple[ModelSize, ModelSize, ModelSize]:
    return on_meta(OLMOE), on_meta(LITE), on_meta(MOONLIGHT)


def millions(values: int) -> float:
    return round(values / 1e6, 1)


def percent(share: float) -> float:
    return round(100 * share, 2)


def test_the_models_are_as_large_as_their_cards_say(sizes):
    olmoe, lite, moonlight = sizes
    assert olmoe == ModelSize.gated(total=6_919_161_856, layers=16, experts=64, top_k=8, width=2048, neurons=1024)
    assert lite == ModelSize.gated(total=15_706_484_224, layers=26, experts=64, top_k=6, width=2048, neurons=1408)
    assert (moonlight.layers, moonlight.expert) == (26, 3 * 2048 * 1408)
    assert round(moonlight.total / 1e9, 2) == 15.96


def test_the_tilt_of_rank_32_at_half(sizes):
    costs = [cost(size, HALF, "tilt", rank=32) for size in sizes]
    assert [one.pruned for one in costs] == [512, 832, 832]
    assert [millions(one.added) for one in costs] == [67.1, 109.1, 109.1]
    assert [percent(one.added_share) for one in costs] == [1.82, 1.28, 1.24]
    assert {one.per_expert for one in costs} == {133_184}
    assert [millions(one.stored) for one in costs] == [68.2, 110.8, 110.8]


def test_the_tilt_of_other_ranks_and_of_one_layer(sizes):
    olmoe = sizes[0]
    assert [millions(cost(olmoe, HALF, "tilt", rank=r).added) for r in (8, 32, 128)] == [16.8, 67.1, 268.6]
    assert millions(cost(olmoe, HALF, "tilt").added // olmoe.layers) == 4.2  # layer 15 alone, App. B.4


def test_the_tilts_share_grows_with_the_ratio(sizes):
    shares = {
        ratio: [percent(cost(size, Budget.of_ratio(ratio), "tilt").added_share) for size in sizes]
        for ratio in ("0.25", "0.5", "0.75")
    }
    low = shares["0.25"] + shares["0.5"]
    assert (min(low), max(low)) == (0.44, 1.82)
    assert (round(min(shares["0.75"]), 1), round(max(shares["0.75"]), 1)) == (3.2, 4.8)


def test_one_extra_expert_per_layer(sizes):
    assert [millions(extra_experts(size)) for size in sizes] == [100.7, 224.9, 224.9]
    assert millions(extra_experts(sizes[0], 2)) == 201.3
    olmoe = sizes[0]
    kept = [cost(olmoe, Budget(keep=keep), "constant").total for keep in (32, 33)]
    assert kept[1] - kept[0] == extra_experts(olmoe, gross=False) == extra_experts(olmoe) - 16 * 2048


@pytest.mark.parametrize(
    ("kind", "times", "wanted"),
    [
        ("svd", 1, (14, 12, 12)),
        ("svd", 4, (56, 50, 50)),
        ("svd-whitened", 1, (14, 12, 12)),
        ("svd-whitened", 4, (56, 50, 50)),
        ("neurons", 1, (21, 21, 21)),
        ("neurons", 4, (85, 85, 85)),
    ],
)
def test_the_ranks_of_copies(sizes, kind, times, wanted):
    found = tuple(copy_size(kind, width=size.width, neurons=size.neurons, tilt_rank=32, times=times) for size in sizes)
    assert found == wanted


def test_the_neuron_copy_at_four_times_the_budget(sizes):
    large = cost(sizes[0], HALF, "neurons", rank=32, times=4)
    assert millions(large.added) == 267.4
    assert large.stored - large.added == 512 * 2048  # its bias stands for the constant's mean (Table C.1)


def test_totals_are_the_dense_model_less_the_experts_plus_what_is_stored(sizes):
    olmoe = sizes[0]
    for operator in OPERATORS:
        one = cost(olmoe, HALF, operator)
        assert one.total == 6_919_161_856 - 512 * 3 * 2048 * 1024 + one.stored
        assert one.total - one.constant_model == one.added
        assert one.to_json()["added_share"] == one.added_share
    assert cost(olmoe, HALF, "constant").added == 0
    assert cost(olmoe, HALF, "reroute").stored == cost(olmoe, HALF, "conmoe-functional").stored == 0
    assert stored_per_expert(olmoe, "mora") == 2 * 2048


@pytest.mark.parametrize("rank", [0, 2049])
def test_rank_zero_is_refused_by_name(sizes, rank):
    with pytest.raises(UsageError, match=f"rank {rank} is no tilt"):
        cost(sizes[0], HALF, "tilt", rank=rank)
    with pytest.raises(UsageError, match=r"unknown operator 'tilted'; expected constant, tilt"):
        cost(sizes[0], HALF, "tilted")


NOT_GATED = ("gpt_oss", "llama4", "nemotron_h", "nemotron_h.latent")
"""Biases or transposed matrices, or no gate."""


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_GATED])
def test_a_tiny_model_is_measured_from_its_tensors(family):
    model = random_model(family)
    size = model_size(model)
    assert (size.experts, size.top_k, size.width, size.neurons) == (16, FAMILIES[family].top_k or 4, 32, 16)
    assert size.expert == 3 * 32 * 16
    assert size.total == sum({id(p): p.numel() for p in model.parameters()}.values())
    assert size.pruned(Budget.of_ratio("0.3")) == 4 * size.layers
    assert [stored_per_expert(size, "tilt", rank=r) for r in (4, 8)] == [2 * r * 32 + 32 + 2 * r for r in (4, 8)]


@pytest.mark.parametrize("family", NOT_GATED)
def test_experts_that_are_no_gated_mlp_are_refused(family):
    with pytest.raises(UsageError, match="an expert"):
        model_size(random_model(family))


def test_layers_that_are_not_alike_have_no_one_count():
    model = random_model()
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj[:, :, :8], requires_grad=False)
    experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj[:, :16], requires_grad=False)
    with pytest.raises(UsageError, match="MoE layers of different shapes"):
        model_size(model)
