from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from prunebench.calibration import CalibrationSpec, CalibrationTokens
from prunebench.errors import IntegrityError, UsageError
from prunebench.integrity import check_quantized
from prunebench.moe import Instrument, LayerProgram
from prunebench.quantize import allocate, gptq, passes, quantize_model, round_to_nearest, setting_of
from prunebench.quantize.hessians import Hessians
from prunebench.quantize.targets import Target
from prunebench.routing import Scale
from prunebench.testing import opened_model, random_ids

FAMILIES = ("olmoe", "granitemoe", "deepseek_v2", "deepseek_v3", "qwen2_moe")
QUICK = setting_of("w3(group=16, fewest=1)")


def tokens(blocks: int = 6, length: int = 24) -> CalibrationTokens:
    ids_BL = random_ids(blocks, length)
    return CalibrationTokens(CalibrationSpec("file:x", blocks, length), ids_BL, "test")


def state(moe):
    return {name: value.clone() for name, value in moe.model.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_decoder_linear_is_quantized_nothing_else_and_the_model_is_left_as_it_was(family):
    moe = opened_model(family)
    before = state(moe)
    found = quantize_model(moe, QUICK, tokens(), batch_tokens=48)
    assert same(before, state(moe))
    plain = {
        f"{name}.weight"
        for name, module in moe.model.named_modules()
        if isinstance(module, nn.Linear)
        and ".layers." in name
        and not name.endswith((".gate", "shared_expert_gate"))
        and ".router." not in name
    }
    experts = {
        f"{layer.name}.{at}.{tensor}"
        for layer in moe.layers
        for at, module in layer.block.named_modules()
        if module is layer.experts
        for tensor in ("gate_up_proj", "down_proj")
    }
    assert set(found.linears) == plain | experts
    with found.installed(moe):
        inside = state(moe)
        assert check_quantized(moe, None, found).status == "pass"
    changed = {name for name in before if not torch.equal(before[name], inside[name])}
    assert changed == set(found.linears)
    assert same(before, state(moe))


def test_each_layer_s_hessians_are_of_what_reaches_it_through_quantized_layers():
    moe, text = opened_model("olmoe"), tokens()
    found = quantize_model(moe, QUICK, text)
    first = {name: one for name, one in found.linears.items() if ".layers.0." in name}
    last = moe.layers[1]
    seen: dict[str, list[torch.Tensor]] = {"q": [], "rows": [], "expert": []}

    def keep(_module, args):
        seen["q"].append(args[0].flatten(0, 1).double())

    def watch(layer, batch):
        if layer.index == 1:
            seen["rows"].append(batch.x_TD[batch.token_S].double())
            seen["expert"].append(batch.expert_S)

    q_proj = moe.model.model.layers[1].self_attn.q_proj
    with dataclasses.replace(found, linears=first).installed(moe), torch.inference_mode():
        handle = q_proj.register_forward_pre_hook(keep)
        with Instrument(moe, {}, observer=watch):
            moe.model(input_ids=text.ids_BL)
        handle.remove()
    x = torch.cat(seen["q"])
    expected = gptq(q_proj.weight[None], (x.T @ x)[None], [len(x)], 3, group=16)
    own = found.linears["model.layers.1.self_attn.q_proj.weight"]
    assert own.tokens_E == (144,)
    assert torch.equal(own.quantized.codes_ERC, expected.codes_ERC)
    rows, expert = torch.cat(seen["rows"]), torch.cat(seen["expert"])
    down = found.linears["model.layers.1.mlp.experts.down_proj"]
    for e in range(16):
        inputs = rows[expert == e]
        weights = last.weights(e)
        hidden = last.experts._apply_gate(nn.functional.linear(inputs.float(), weights["gate_up_proj"])).double()
        assert down.tokens_E[e] == len(inputs)
        if len(inputs):
            one = gptq(weights["down_proj"][None], (hidden.T @ hidden)[None], [len(hidden)], 3, group=16, fewest=1)
            agree = (one.codes_ERC[0] == down.quantized.codes_ERC[e]).float().mean()
            assert agree > 0.995  # sums over the same rows in another order


@pytest.mark.parametrize("scale", ["keep", "renorm"])
def test_a_pruned_layer_is_quantized_under_its_own_routing(scale):
    moe, text = opened_model("olmoe"), tokens()
    programs = {layer.index: LayerProgram((0, 3, 5, 8), scale=Scale(scale)) for layer in moe.layers}
    found = quantize_model(moe, QUICK, text, programs=programs)
    own = found.linears["model.layers.0.mlp.experts.gate_up_proj"]
    assert own.experts == tuple(e for e in range(16) if e not in {0, 3, 5, 8})
    assert sum(own.tokens_E) == 144 * 4  # every slot is refilled by a survivor
    plain = quantize_model(moe, QUICK, text).linears["model.layers.0.mlp.experts.gate_up_proj"]
    assert [plain.tokens_E[e] for e in own.experts] != list(own.tokens_E)


def test_slots_that_a_fill_answers_reach_no_expert():
    class Nothing(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x)

    moe = opened_model("olmoe")
    programs = {0: LayerProgram((1, 2), fills={1: Nothing(), 2: Nothing()})}
    plain = quantize_model(moe, QUICK, tokens()).linears["model.layers.0.mlp.experts.gate_up_proj"]
    filled = quantize_model(moe, QUICK, tokens(), programs=programs)
    own = filled.linears["model.layers.0.mlp.experts.gate_up_proj"]
    assert list(own.tokens_E) == [count for e, count in enumerate(plain.tokens_E) if e not in {1, 2}]


def test_edited_survivors_are_quantized_as_they_are_edited():
    moe = opened_model("olmoe")
    before = state(moe)
    new = torch.randn(32, 16, generator=torch.Generator().manual_seed(3))
    programs = {0: LayerProgram((0,), scale=Scale("keep"), edits={4: {"down_proj": new}})}
    found = quantize_model(moe, QUICK, tokens(), programs=programs)
    own = found.linears["model.layers.0.mlp.experts.down_proj"].quantized
    assert torch.equal(own.grid.scale_ERG[3], round_to_nearest(new[None], 3, group=16).grid.scale_ERG[0])
    assert same(before, state(moe))


def test_an_expert_that_saw_nothing_is_rounded_to_nearest_and_reported():
    moe = opened_model("olmoe")
    found = quantize_model(moe, setting_of("w4(group=16)"), tokens(1, 4))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    unseen = [e for e, count in enumerate(found.linears[name].tokens_E) if count == 0]
    assert unseen
    plain = round_to_nearest(moe.layers[0].experts.gate_up_proj, 4, group=16)
    assert torch.equal(found.linears[name].quantized.codes_ERC, plain.codes_ERC)
    assert (found.linears[name].quantized.weight_ERC[unseen] != 0).any()
    said = found.to_json()
    assert all(said["fallbacks"][name][str(e)] == "few tokens (0)" for e in unseen)
    assert said["parts"]["experts"] == {**said["parts"]["experts"], "linears": 64, "fallbacks": 64}


def test_other_dispatches_are_calibrated_by_the_eager_code_and_kept():
    one, other = opened_model("olmoe"), opened_model("olmoe", experts_implementation="grouped_mm")
    assert quantize_model(one, QUICK, tokens()).digest() == quantize_model(other, QUICK, tokens()).digest()
    assert other.experts_implementation == "grouped_mm"


def test_bits_and_parts_are_the_setting_s():
    moe = opened_model("deepseek_v2")
    found = quantize_model(moe, setting_of("e2a4(group=16)"), tokens())
    for name, linear in found.linears.items():
        assert set(linear.quantized.grid.bits_E.tolist()) == {2 if ".experts." in name else 4}
    only = quantize_model(moe, setting_of("e2a16(group=16)"), tokens())
    assert all(".experts." in name for name in only.linears)


def test_mixed_bits_are_on_average_what_was_asked_for():
    moe = opened_model("olmoe")
    found = quantize_model(moe, setting_of("mc3a4(group=16, fewest=1)"), tokens())
    for layer in moe.layers:
        chosen = found.allocation[layer.index]
        assert sum(chosen) <= 3 * 16
        assert {2, 3, 4} >= set(chosen)
        for tensor in ("gate_up_proj", "down_proj"):
            grid = found.linears[f"{layer.name}.experts.{tensor}"].quantized.grid
            assert tuple(grid.bits_E.tolist()) == chosen


@pytest.mark.parametrize("pruned", [(), (0, 3, 8)])
def test_mixed_bits_are_those_of_the_formula_on_the_deployed_routing(monkeypatch, pruned):
    """φ · w^1.5 · ε² of a layer's experts, one at a time, from their rows and gates."""
    moe, text = opened_model("olmoe"), tokens()
    programs = {layer.index: LayerProgram(pruned, scale=Scale("keep")) for layer in moe.layers} if pruned else {}
    asked = []
    monkeypatch.setattr(passes, "allocate", lambda cost_EW, mean: asked.append(cost_EW) or allocate(cost_EW, mean))
    found = quantize_model(moe, setting_of("mc3a4(group=16, fewest=1)"), text, programs=programs)
    layer, seen = moe.layers[0], []

    def watch(one, batch):
        if one.index == 0:
            seen.append((batch.x_TD[batch.token_S], batch.expert_S, batch.gates_S))

    with torch.inference_mode(), Instrument(moe, programs, observer=watch):
        moe.model(input_ids=text.ids_BL)
    rows, expert, gates = (torch.cat(parts) for parts in zip(*seen, strict=True))
    left = [e for e in range(16) if e not in pruned]
    cost = np.zeros((len(left), 3))
    for place, e in enumerate(left):
        x, weights = rows[expert == e], layer.weights(e)
        inner = layer.experts._apply_gate(x @ weights["gate_up_proj"].T)
        share, gate = len(x) / 144, float(gates[expert == e].double().sum()) / 144
        for width, bits in enumerate((2, 3, 4)):
            lost = 0.0
            for name, inputs in (("gate_up_proj", x.double()), ("down_proj", inner.double())):
                one = gptq(weights[name][None], (inputs.T @ inputs)[None], [len(x)], bits, group=16, fewest=1)
                lost += float((inputs @ (weights[name].double() - one.weight_ERC[0].double()).T).square().sum())
            cost[place, width] = share * gate**1.5 * lost
    assert asked[0] == pytest.approx(cost, rel=0.02)  # integers may differ here and there, by the order of sums
    assert found.allocation[0] == allocate(cost, 3)


def test_groups_are_the_setting_s():
    moe, text, seen = opened_model("olmoe"), tokens(), []
    q_proj = moe.model.model.layers[0].self_attn.q_proj
    handle = q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1).double()))
    with torch.inference_mode():
        moe.model(input_ids=text.ids_BL)
    handle.remove()
    hessian = (seen[0].T @ seen[0])[None]
    codes = {
        groups: gptq(q_proj.weight[None], hessian, [144], 3, group=16, groups=groups)
        for groups in ("static", "dynamic")
    }
    assert not torch.equal(codes["static"].codes_ERC, codes["dynamic"].codes_ERC)
    for groups, expected in codes.items():
        found = quantize_model(moe, setting_of(f"w3(group=16, fewest=1, groups={groups})"), text)
        own = found.linears["model.layers.0.self_attn.q_proj.weight"]
        assert torch.equal(own.quantized.codes_ERC, expected.codes_ERC)
        # The error that a record states is of the linear's outputs.
        missed, whole = (
            (seen[0] @ weight.double().T).square().sum()
            for weight in (q_proj.weight - expected.weight_ERC[0], q_proj.weight)
        )
        assert own.error_E == pytest.approx((float(missed / whole),), rel=1e-4)


def test_dead_columns_are_counted():
    moe = opened_model("olmoe")
    assert quantize_model(moe, QUICK, tokens()).to_json()["dead_columns"] == 0
    with torch.no_grad():
        moe.model.model.layers[1].input_layernorm.weight[3] = 0.0
    found = quantize_model(moe, QUICK, tokens())
    assert found.to_json()["dead_columns"] == 3  # of q, k and v


def test_experts_whose_matrices_saw_different_rows_are_no_result():
    weight = torch.randn(2, 6, 4)
    hessians = Hessians({"up": Target(weight, (0, 1)), "down": Target(weight.mT.contiguous(), (0, 1))})
    with hessians:
        nn.functional.linear(torch.randn(5, 4), weight[1])
    assert hessians.rows["up"] == [0, 5]
    for together in (["up", "down"], ["down"]):
        with pytest.raises(IntegrityError, match=r"not all seen; in layer 7"):
            hessians.check(together, "layer 7")
    hessians.check(["up"], "layer 7")


def test_experts_that_multiply_otherwise_are_no_result(monkeypatch):
    monkeypatch.setattr(passes, "_eager", lambda _: nullcontext())
    with pytest.raises(IntegrityError, match=r"not all seen; in model\.layers\.0"):
        quantize_model(opened_model("olmoe", experts_implementation="grouped_mm"), QUICK, tokens())


def test_a_weight_that_is_not_its_integers_and_a_linear_left_out_fail_the_check():
    moe = opened_model("olmoe")
    found = quantize_model(moe, QUICK, tokens())
    name = "model.layers.1.self_attn.o_proj.weight"
    entered = found.installed(moe)
    entered.__enter__()
    moe.model.get_parameter(name).data[0, 0] += 1.0
    assert check_quantized(moe, None, found).status == "fail"
    with pytest.raises(IntegrityError, match="o_proj"):
        entered.__exit__(None, None, None)
    short = dataclasses.replace(found, linears={key: one for key, one in found.linears.items() if key != name})
    with short.installed(moe):
        check = check_quantized(moe, None, short)
    assert check.status == "fail"
    assert name in check.detail


@pytest.mark.parametrize(("family", "name"), [("jamba", "dt_proj"), ("deepseek_v4", "o_a_proj")])
def test_a_linear_that_is_called_otherwise_is_rounded_and_named(family, name):
    moe = opened_model(family)
    found = quantize_model(moe, QUICK, tokens(2))
    named = {key: said for key, said in found.to_json()["fallbacks"].items() if key.endswith(f"{name}.weight")}
    assert named
    for key, said in named.items():
        assert said == {"0": "few tokens (0)"}
        plain = round_to_nearest(moe.model.get_parameter(key)[None], 3, group=16)
        assert torch.equal(found.linears[key].quantized.codes_ERC, plain.codes_ERC)


def test_layouts_that_do_not_multiply_by_linear_are_refused_by_name():
    with pytest.raises(UsageError, match="GptOssExperts cannot be quantized"):
        quantize_model(opened_model("gpt_oss"), QUICK, tokens())


def test_a_quantized_model_is_not_another_one():
    found = quantize_model(opened_model("olmoe"), QUICK, tokens())
    with pytest.raises(UsageError, match=r"has no model\.layers"), found.installed(opened_model("granitemoe")):
        pass
