"""Survivors that answer for pruned experts, and survivors whose weights are edited, against models written by hand."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch

from prunebench import AffineSurvivor, Constant, Mask, Method, Replacements, Routing, Survivor
from prunebench.errors import UsageError
from prunebench.install import installed, remove_experts
from prunebench.moe import Instrument, open_model
from prunebench.plan import Plan, make_plan
from prunebench.testing import opened_model, random_ids, random_model

PRUNED = (0, 3, 5, 6, 8, 9, 14)
TARGET = {0: 1, 3: 1, 5: 4, 6: 15, 8: 1, 9: 4, 14: 2}
FAMILIES = ["olmoe", "deepseek_v2", "deepseek_v3", "granitemoe", "qwen3_moe", "gpt_oss", "nemotron_h"]


@dataclass(frozen=True)
class Answers(Method):
    """Fills and edits that a test made, the same for every layer."""

    name = "answers"

    fills: dict
    edits: dict
    scale: str = "keep"

    def replace(self, layer, pruned):
        return Replacements(self.fills, {e: edit(layer.weights(e)) for e, edit in self.edits.items()})

    def route(self, layer, pruned):
        return Routing(self.scale)


def plan_of(moe, fills=None, edits=None, pruned=PRUNED, scale="keep"):
    mask = Mask.for_shapes(moe.shapes, {layer.index: pruned for layer in moe.layers})
    return make_plan(moe, mask, Answers(fills or {}, edits or {}, scale), None)


def remapped(moe):
    return plan_of(moe, {e: Survivor(TARGET[e]) for e in PRUNED})


@torch.inference_mode()
def logits(model, **more):
    return model(input_ids=random_ids(), use_cache=False, **more).logits


@torch.no_grad()
def with_weights(moe, change):
    """A copy of the model whose experts' tensors `change` has written into: called with (layer, name, tensor)."""
    twin = open_model(copy.deepcopy(moe.model))
    for layer in twin.layers:
        for name in layer.layout.tensors:
            change(layer, name, layer.experts.get_parameter(name))
    return twin


def overwrite(_layer, _name, tensor_E):
    for expert, survivor in TARGET.items():
        tensor_E[expert] = tensor_E[survivor].clone()


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_remapped_slot_computes_what_a_model_with_the_survivors_weights_there_does(family, kernel):
    moe = open_model(random_model(family, experts_implementation=kernel))
    wanted = logits(with_weights(moe, overwrite).model)
    with installed(moe, remapped(moe)) as instrument:
        found = logits(moe.model)
    if kernel == "eager":
        assert torch.equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(found, logits(moe.model), atol=1e-4)
    for counted in instrument.counters.values():
        assert int(counted.asked) == int(counted.answered) > 0


def test_gates_on_the_input_reach_the_survivor_too():
    moe = opened_model("llama4")
    wanted = logits(with_weights(moe, overwrite).model)
    plan = remapped(moe)
    with installed(moe, plan):
        found = logits(moe.model)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)

    with Instrument(moe, remove_experts(moe, plan)):
        torch.testing.assert_close(logits(moe.model), found, rtol=0, atol=2e-6)


def test_where_the_target_is_selected_too_the_token_gets_both_gates():
    moe = opened_model("olmoe")
    layer = moe.layers[0]
    seen = {}

    def see(of, batch):
        if of is layer:
            seen["batch"] = batch

    with installed(moe, remapped(moe), observer=see):
        logits(moe.model)
    batch = seen["batch"]
    both = 0
    for t, (chosen, gates) in enumerate(zip(batch.index_TK.tolist(), batch.gates_TK.tolist(), strict=True)):
        gate = dict(zip(chosen, gates, strict=True))
        for expert, survivor in TARGET.items():
            if expert in gate and survivor in gate:
                both += 1
                rows = (batch.token_S == t) & ((batch.expert_S == expert) | (batch.expert_S == survivor))
                sent = (batch.outputs_SD[rows] * batch.gates_S[rows, None]).sum(0)
                alone = layer.run_experts(batch.x_TD[t : t + 1], torch.tensor([survivor]))[0]
                torch.testing.assert_close(sent, (gate[expert] + gate[survivor]) * alone, rtol=1e-5, atol=1e-7)
    assert both > 10


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm"])
def test_the_survivors_own_outputs_keep_their_bits(kernel):
    moe = open_model(random_model("deepseek_v3", experts_implementation=kernel))
    first = moe.layers[0].index
    outputs = []
    for plan in (plan_of(moe, {e: Constant(32) for e in PRUNED}), remapped(moe)):
        rows = []
        with installed(moe, plan, observer=lambda of, batch, rows=rows: rows.append((of.index, batch))):
            logits(moe.model)
        [batch] = [batch for index, batch in rows if index == first]
        own = ~torch.isin(batch.expert_S, torch.tensor(PRUNED))
        outputs.append(batch.outputs_SD[own])
    assert torch.equal(*outputs)


def test_a_proxy_scales_and_shifts_the_survivors_output():
    moe = opened_model("olmoe")
    scale_D, shift_D = torch.linspace(0.5, 2, 32), torch.linspace(-0.1, 0.1, 32)
    fill = AffineSurvivor.of(1, scale_D, shift_D)
    assert fill.values_stored() == 64
    seen = []
    with installed(moe, plan_of(moe, dict.fromkeys(PRUNED, fill)), observer=lambda _, batch: seen.append(batch)):
        logits(moe.model)
    batch = seen[0]
    rows = batch.expert_S == PRUNED[1]
    x_SD = batch.x_TD[batch.token_S[rows]]
    alone_SD = moe.layers[0].run_experts(x_SD, torch.ones(len(x_SD), dtype=torch.long))
    torch.testing.assert_close(batch.outputs_SD[rows], scale_D * alone_SD + shift_D, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "granitemoe"])
def test_fills_survivors_and_refilled_slots_share_a_layer_and_the_removed_model_equals_it(family, tmp_path):
    moe = opened_model(family)
    fills = {0: Survivor(1), 3: AffineSurvivor.of(4, torch.full((32,), 0.5), torch.ones(32)), 5: Constant(32)}
    plan = plan_of(moe, fills)
    assert (plan.keeps_slots, plan.fills_nothing, plan.values_stored) == (False, False, len(moe.layers) * 96)
    plan.save(tmp_path / "plan")
    loaded = Plan.load(tmp_path / "plan")
    with installed(moe, loaded) as instrument:
        masked = logits(moe.model)
    for counted in instrument.counters.values():
        assert int(counted.reached_pruned) == 0
        assert int(counted.asked) == int(counted.answered) > 0
        assert int(counted.displaced) > 0

    programs = remove_experts(moe, loaded)
    assert all(layer.experts.down_proj.shape[0] == 16 - len(PRUNED) for layer in moe.layers)
    with Instrument(moe, programs):
        torch.testing.assert_close(logits(moe.model), masked, rtol=0, atol=2e-6)


def test_survivors_answer_while_generating_with_a_cache_and_padding_is_not_counted():
    moe = opened_model("olmoe")
    ids_BL, real_BL = random_ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    real_BL[0, :3] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    twin = with_weights(moe, overwrite)
    wanted = twin.model.generate(ids_BL, attention_mask=real_BL, **options)
    with installed(moe, remapped(moe)) as instrument:
        found = moe.model.generate(ids_BL, attention_mask=real_BL, **options)
    assert torch.equal(found, wanted)
    for counted in instrument.counters.values():
        assert int(counted.calls) == 16 - 3 + 2 * 5
        assert int(counted.asked) == int(counted.answered) > 0


# ----------------------------------------------------------------------------------------------------------- edits


def plus_tenth(weights):
    return {name: weight + 0.1 * weight.flip(0) for name, weight in weights.items()}


def edited(moe, scale="keep"):
    return plan_of(moe, edits=dict.fromkeys((1, 2, 15), plus_tenth), scale=scale)


def edit_by_hand(_layer, _name, tensor_E):
    for expert in (1, 2, 15):
        tensor_E[expert] = tensor_E[expert] + 0.1 * tensor_E[expert].flip(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "granitemoe", "gpt_oss"])
def test_edited_survivors_compute_with_their_new_weights_and_get_the_old_ones_back(family, dtype, tmp_path):
    moe = open_model(random_model(family, dtype=dtype))
    before = {name: value.clone() for name, value in moe.model.state_dict().items()}
    dense = logits(moe.model)
    scale = moe.convention.trained_scale
    twin = with_weights(moe, edit_by_hand)
    with installed(twin, plan_of(twin, scale=scale)):
        wanted = logits(twin.model)
    plan = edited(moe, scale)
    assert plan.values_stored == 0
    plan.save(tmp_path / "plan")
    with installed(moe, Plan.load(tmp_path / "plan")):
        assert torch.equal(logits(moe.model), wanted)
    assert torch.equal(logits(moe.model), dense)
    assert all(torch.equal(value, before[name]) for name, value in moe.model.state_dict().items())


def test_an_edit_that_changes_nothing_is_the_rerouted_model_bit_for_bit():
    moe = opened_model("olmoe")
    with installed(moe, plan_of(moe)):
        wanted = logits(moe.model)
    with installed(moe, plan_of(moe, edits=dict.fromkeys((1, 2, 15), lambda weights: weights))):
        assert torch.equal(logits(moe.model), wanted)


def test_weights_are_back_after_a_failure_and_after_a_failed_entry():
    moe = opened_model("olmoe")
    dense = logits(moe.model)
    with pytest.raises(KeyboardInterrupt), installed(moe, edited(moe)):
        raise KeyboardInterrupt
    assert torch.equal(logits(moe.model), dense)
    half = plan_of(moe, edits={1: plus_tenth, 2: plus_tenth})
    half.edits[f"{moe.layers[-1].index}/2/down_proj"] = torch.zeros(3)
    with pytest.raises(RuntimeError), installed(moe, half):
        pass
    assert torch.equal(logits(moe.model), dense)


@pytest.mark.parametrize(("scale", "plain"), [("renorm", True), ("keep", False)])
def test_a_removed_model_holds_the_edited_weights(scale, plain):
    moe = opened_model("qwen3_moe")
    plan = edited(moe, scale)
    with installed(moe, plan):
        masked = logits(moe.model)
    programs = remove_experts(moe, plan)
    assert (programs == {}) is plain

    with Instrument(open_model(moe.model) if plain else moe, programs):
        torch.testing.assert_close(logits(moe.model), masked, rtol=0, atol=2e-6)


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fills", "edits", "says"),
    [
        ({0: Survivor(3)}, {}, r"expert 3 is pruned; in answers.replace, layer 0, expert 0; expected one of the layer"),
        ({0: Survivor(16)}, {}, "expert 16 does not exist"),
        ({}, {3: plus_tenth}, "expert 3 is pruned"),
        ({}, {16: lambda _: {}}, "expert 16 does not exist"),
        ({}, {1: lambda w: {"gate": w["down_proj"]}}, r"an edit of gate .*expected gate_up_proj \[32, 32\], down_proj"),
        ({}, {1: lambda w: {"down_proj": w["down_proj"][:3]}}, r"an edit of down_proj with shape \[3, 16\]"),
        ({}, {1: lambda w: {"down_proj": w["down_proj"] * torch.nan}}, "holds NaN or infinity.*down_proj"),
        ({0: Constant.of(torch.full((32,), torch.inf))}, {}, "holds NaN or infinity.*expert 0, mean_D"),
    ],
)
def test_an_impossible_answer_is_one_line(fills, edits, says):
    moe = opened_model("olmoe")

    class Late(Answers):
        def replace(self, layer, pruned):
            known = layer.weights(1)
            return Replacements(self.fills, {e: edit(known) for e, edit in self.edits.items()})

    mask = Mask.for_shapes(moe.shapes, {layer.index: PRUNED for layer in moe.layers})
    with pytest.raises(UsageError, match=says):
        make_plan(moe, mask, Late(fills, edits), None)


def test_a_survivor_below_zero_is_refused():
    with pytest.raises(UsageError, match="survivor -1 does not exist"):
        Survivor(-1)
