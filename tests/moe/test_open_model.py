"""A model is trusted only after its routers were replayed; anything else is refused in one clear line."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.moe import load_model, open_model, peek
from prunebench.testing import CORE, random_model


def refused(model: nn.Module) -> str:
    with pytest.raises(UsageError) as info:
        open_model(model)
    assert "\n" not in str(info.value)
    return str(info.value)


@pytest.mark.parametrize("family", CORE)
def test_layers_are_found_with_their_shapes(family):
    moe = open_model(random_model(family, experts=8, top_k=2))
    first = 1 if family.startswith("deepseek") else 0
    assert [layer.index for layer in moe.layers] == list(range(first, moe.model.config.num_hidden_layers))
    assert {(layer.expert_count, layer.top_k, layer.width) for layer in moe.layers} == {(8, 2, 32)}
    assert moe.layer(1).name.startswith("model.layers.1.")
    groups = (4, 2) if family.endswith("groups") else (1, 1)
    assert {(shape.groups, shape.kept_groups) for shape in moe.shapes} == {groups}


def wrong_factor(router, hidden):
    logits, gates, index = type(router).forward(router, hidden)
    return logits, gates * (1 + 2e-7), index


def wrong_selection(router, hidden):
    logits = functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    gates, index = torch.topk(-logits, router.top_k, dim=-1)
    return logits, gates, index


def next_expert(router, hidden):
    logits, gates, index = type(router).forward(router, hidden)
    return logits, gates, (index + 1) % 16


def swapped_slots(router, hidden):
    logits, gates, index = type(router).forward(router, hidden)
    return logits, gates.flip(-1), index.flip(-1)


@pytest.mark.parametrize("family", CORE)
@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (wrong_factor, "replayed gates differ by up to"),
        (next_expert, "replayed selection differs in"),
        (swapped_slots, "selection differs"),
    ],
)
def test_a_router_that_computes_something_else_is_refused(family, forward, reason):
    model = random_model(family)
    router = [m for n, m in model.named_modules() if n.endswith((".gate", ".router"))][-1]
    router.forward = forward.__get__(router)
    text = refused(model)
    assert reason in text
    assert type(router).__name__ in text
    assert "prunebench/routing/convention.py" in text


def test_a_router_that_ranks_otherwise_is_refused():
    model = random_model("olmoe")
    router = model.model.layers[1].mlp.gate
    router.forward = wrong_selection.__get__(router)
    assert "in model.layers.1.mlp" in refused(model)


def test_a_router_that_returns_something_else_is_refused():
    model = random_model("olmoe")
    block = model.model.layers[0].mlp
    forward = type(block.gate).forward
    block.gate.forward = lambda hidden: (*forward(block.gate, hidden), None)
    block.forward = lambda hidden: hidden + 0 * block.gate(hidden)[0].sum()
    assert "OlmoeTopKRouter returns something else; in model.layers.0.mlp; expected (logits, gates, index)" in refused(
        model
    )


def test_a_router_that_is_never_called_is_refused():
    model = random_model("olmoe")
    block = model.model.layers[0].mlp
    block.forward = lambda hidden: hidden
    assert "the router was never called; in model.layers.0.mlp" in refused(model)


def test_an_unknown_router_is_refused():
    model = random_model("olmoe")
    gate = model.model.layers[0].mlp.gate
    gate.__class__ = type("StrangeRouter", (nn.Module,), {"forward": type(gate).forward})
    text = refused(model)
    assert "unknown router StrangeRouter; in model.layers.0.mlp (OlmoeSparseMoeBlock)" in text
    assert "expected one of AXK1TopkRouter" in text


def test_a_dense_model_is_refused():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    assert "LlamaForCausalLM has no MoE layers" in refused(LlamaForCausalLM(config))


def test_layers_of_different_conventions_are_refused():
    model = random_model("olmoe")
    model.model.layers[1].mlp.gate.norm_topk_prob = True
    text = refused(model)
    assert "layer 1 routes by: softmax, renorm" in text
    assert "expected layer 0's convention: softmax, no renorm" in text


def test_opening_leaves_no_hook_and_sets_eval_mode():
    model = random_model("olmoe").train()
    open_model(model)
    assert not model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("family", CORE)
def test_shapes_and_convention_can_be_read_from_the_config_alone(tmp_path, family):
    moe = open_model(random_model(family))
    moe.model.config.save_pretrained(tmp_path)
    assert peek(tmp_path) == (moe.shapes, moe.convention)


def test_a_folder_without_a_model_an_unknown_dtype_or_device_is_refused(tmp_path):
    with pytest.raises(UsageError, match="unknown dtype 'int3'; expected float32, bfloat16, float16"):
        load_model("x", tmp_path, dtype="int3")
    if not torch.cuda.is_available():
        with pytest.raises(PrerequisiteError, match="no CUDA device"):
            load_model("x", tmp_path, device="cuda")
    for content in (None, "{}", "not json"):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(UsageError) as info:
            load_model("x", tmp_path)
        assert "\n" not in str(info.value)
        assert str(tmp_path) in str(info.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.1.mlp.gate.weight", "nan"),
        ("model.layers.1.mlp.experts.down_proj", "nan"),
        ("lm_head.weight", "inf"),
    ],
)
def test_a_weight_that_is_no_number_is_named_and_no_healthy_router_is_blamed(name, value):
    model = random_model("deepseek_v3")
    model.get_parameter(name).data.view(-1)[3] = float(value)
    if name == "lm_head.weight":
        open_model(model)  # no router sees it
        return
    with pytest.raises(UsageError, match=rf"a weight is not finite; in {name.replace('.', '[.]')}"):
        open_model(model)
