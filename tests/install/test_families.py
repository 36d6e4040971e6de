"""Every family, physically smaller: equal to the masked one, and loaded in a fresh process with the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from prunebench import Mask
from prunebench.errors import UsageError
from prunebench.install import installed, remove_experts, slice_model
from prunebench.moe import Instrument, load_model, open_model
from prunebench.routing.convention import reach
from prunebench.storage import measured, pruned_bytes, read_headers
from prunebench.testing import FAMILIES, random_model
from prunebench.testing.families import half_of, logits_of, policy_of, reloaded, removed, renorm_plan

# Their routers must stay whole: a bias on a softmax.
WHOLE = {"ernie4_5_moe", "longcat_flash"}
# Its hash layers keep all their experts, and a config holds one number.
UNEQUAL = {"deepseek_v4.hash"}


def opened(family: str, **options):
    return open_model(random_model(family, **options), probe_tokens=64)


def half(moe) -> Mask:
    return Mask.for_shapes(moe.shapes, {layer.index: half_of(layer) for layer in moe.layers})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_removed_model_computes_what_the_masked_one_does(family):
    moe = opened(family)
    found, difference = removed(moe)
    assert found.exact is (None if family in WHOLE else True)
    assert difference < 2e-6
    if family not in WHOLE:
        smaller = open_model(moe.model, probe_tokens=64)
        assert {layer.expert_count for layer in smaller.layers} == {8}
        assert {layer.choices - 8 for layer in smaller.layers} == {moe.convention.identities}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every family that can be saved: its logits before, and what a fresh process makes of it."""
    root = tmp_path_factory.mktemp("saved")
    before, jobs = {}, []
    for family in FAMILIES:
        if family in UNEQUAL:
            continue
        moe = opened(family)
        slice_model(moe, half(moe))
        before[family] = logits_of(open_model(moe.model, probe_tokens=64))
        moe.model.save_pretrained(root / family)
        jobs.append((root / family, "float32", "eager", root / f"{family}.pt"))
    return root, before, dict(zip(before, reloaded(jobs), strict=True))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in UNEQUAL])
def test_a_saved_model_loads_in_a_fresh_process_with_the_same_bits(saved, family):
    _, before, after = saved
    assert after[family]["info"] == {}
    assert torch.equal(after[family]["logits"], before[family])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in UNEQUAL])
def test_the_saved_bytes_are_the_predicted_ones_part_by_part(saved, family, tmp_path):
    root, _, _ = saved
    model = random_model(family)
    model.save_pretrained(tmp_path)
    mask = half(open_model(model, probe_tokens=16))
    assert pruned_bytes(tmp_path, mask) == measured(read_headers(root / family))


def test_what_a_config_cannot_say_is_refused_before_anything_is_cut():
    moe = opened("deepseek_v4.hash")
    with pytest.raises(UsageError, match=r"layer 0 keeps all its experts: .*; in model.layers.0.mlp"):
        slice_model(moe, half(moe))
    uneven = opened("olmoe")
    with pytest.raises(UsageError, match="layers keep different numbers of experts"):
        slice_model(uneven, Mask.for_shapes(uneven.shapes, {0: (1,), 1: (1, 2)}))
    assert all(x.experts.down_proj.shape[0] == 16 for x in (*moe.layers, *uneven.layers))


def test_a_count_in_a_nested_text_config_is_written_there(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, Gemma4ForConditionalGeneration

    moe = opened("gemma4")
    text = moe.model.config.to_dict()
    config = AutoConfig.for_model("gemma4", text_config=text, vision_config=None, audio_config=None)
    whole = Gemma4ForConditionalGeneration(config).eval().requires_grad_(requires_grad=False)
    whole.model.language_model.load_state_dict(moe.model.model.state_dict())
    whole.tie_weights()
    whole.set_experts_implementation("eager")
    moe = open_model(whole, probe_tokens=64)
    assert [layer.name for layer in moe.layers] == ["model.language_model.layers.0", "model.language_model.layers.1"]
    assert remove_experts(moe, renorm_plan(moe)) == {}
    assert whole.config.text_config.num_experts == 8
    before = logits_of(moe)
    whole.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()
    assert torch.equal(logits_of(open_model(again, probe_tokens=64)), before)


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "deepseek_v4", "hy_v3", "minimax_m2", "afmoe", "lfm2_moe", "ernie4_5_moe", "longcat_flash"],
)
def test_a_bias_left_at_its_old_length_is_refused_by_name(family, tmp_path):
    moe = opened(family)
    layer = moe.layers[-1]
    old = reach(layer.bias_owner, layer.row.bias)
    slice_model(moe, half(moe))
    owner, _, name = layer.row.bias.rpartition(".")
    setattr(reach(layer.bias_owner, owner) if owner else layer.bias_owner, name, old)
    with pytest.raises(
        UsageError, match=rf"{layer.row.bias} of .* has {old.numel()} entries; in {layer.name} "
    ) as info:
        open_model(moe.model)
    assert "\n" not in str(info.value)
    moe.model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"bias has shape \[.*\]; in .*; expected \[.*\], by the config"):
        load_model("smaller", tmp_path)


def test_missing_weights_are_refused_and_not_drawn_at_random(tmp_path):
    model = random_model("olmoe")
    state = {
        name: tensor for name, tensor in model.state_dict().items() if not name.endswith("layers.1.mlp.gate.weight")
    }
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(UsageError, match=r"model.layers.1.mlp.gate.weight is missing"):
        load_model("less", tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v2.groups", "deepseek_v3.groups", "bailing_hybrid"])
def test_a_grouped_router_goes_only_where_equal_groups_are_chosen_anew(family):
    for policy, pruned, plain in (
        ("reselect", (0, 3, 5, 6, 8, 9, 14, 15), True),
        ("frozen", (0, 3, 5, 6, 8, 9, 14, 15), False),
        ("reselect", (0, 3, 5, 8, 9, 14), False),
    ):
        moe = opened(family)
        mask = Mask.for_shapes(moe.shapes, {layer.index: pruned for layer in moe.layers})
        plan = dataclasses.replace(renorm_plan(moe), mask=mask)
        with installed(moe, plan, policy=policy):
            masked = logits_of(moe)
        rest = remove_experts(moe, plan, policy=policy)
        assert (rest == {}) is plain
        with Instrument(moe, rest):
            torch.testing.assert_close(logits_of(moe), masked, rtol=0, atol=4e-6)


def test_policy_of_a_cut_router():
    assert policy_of(opened("deepseek_v3.groups")) == "reselect"
    assert policy_of(opened("deepseek_v3")) == "frozen"
