"""Installed reversibly or removed for good, a plan computes the same; a plain smaller model needs no prunebench."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from prunebench import Constant, Mask, Method, Replacements, Routing, load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens, OutputMoments, score_pass
from prunebench.errors import UsageError
from prunebench.install import installed, remove_experts, slice_model
from prunebench.moe import Instrument, open_model
from prunebench.plan import make_plan
from prunebench.testing import CORE, opened_model, random_ids, random_model

KERNELS = ["eager", "grouped_mm"]
PRUNED = (0, 3, 5, 6, 8, 9, 14, 15)
PLAIN = ["olmoe", "qwen3_moe", "granitemoe", "deepseek_v2", "deepseek_v3"]


class Half(Method):
    """Fills for half of the pruned, the other half leaves the router."""

    name = "half"

    def replace(self, layer, pruned):
        return Replacements({e: Constant.of(torch.full((layer.width,), 0.1 * e)) for e in pruned[::2]})

    def route(self, layer, pruned):
        return Routing()


def opened(family: str, kernel: str = "eager", **options):
    return open_model(random_model(family, experts_implementation=kernel, **options))


def plan_for(moe, operator: str, scale: str | None = None):
    tokens = CalibrationTokens(CalibrationSpec("file:x", 4, 16), random_ids(4, 16), "test")
    scores = score_pass(moe, tokens, [OutputMoments()])
    method = Half() if operator == "half" else load_method(operator, {"scale": scale} if scale else None)
    return make_plan(moe, Mask.for_shapes(moe.shapes, {layer.index: PRUNED for layer in moe.layers}), method, scores)


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=random_ids(), use_cache=False).logits


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", CORE)
def test_the_dense_model_is_back_bit_for_bit_after_every_arm(family, kernel):
    moe = opened(family, kernel)
    dense = logits(moe.model)
    for operator, scale in (
        ("constant", None),
        ("zero", None),
        ("half", None),
        ("reroute", "keep"),
        ("reroute", "renorm"),
    ):
        with installed(moe, plan_for(moe, operator, scale)):
            assert not torch.equal(dense, logits(moe.model))
        assert torch.equal(dense, logits(moe.model))


def test_arms_do_not_depend_on_the_order_in_which_they_run():
    moe = opened("deepseek_v3")
    plans = [plan_for(moe, *arm) for arm in (("constant",), ("reroute", "keep"), ("half",))]

    def run(plan):
        with installed(moe, plan):
            return logits(moe.model)

    forwards = [run(plan) for plan in plans]
    backwards = [run(plan) for plan in reversed(plans)]
    assert all(torch.equal(a, b) for a, b in zip(forwards, reversed(backwards), strict=True))


def test_a_plan_for_another_model_is_refused():
    plan = plan_for(opened("olmoe"), "zero")
    with pytest.raises(UsageError, match="the mask is for another model"):
        installed(opened("olmoe", experts=8), plan)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", PLAIN)
def test_a_removed_model_reloads_with_transformers_alone_and_equals_the_masked_one(family, kernel, tmp_path):
    moe = opened(family, kernel)
    plan = plan_for(moe, "reroute", "renorm")
    with installed(moe, plan):
        masked = logits(moe.model)
    before = sum(p.numel() for p in moe.model.parameters())
    assert remove_experts(moe, plan) == {}
    smaller = open_model(moe.model)
    assert all((layer.expert_count, layer.router_rows_ED.shape[0]) == (8, 8) for layer in smaller.layers)
    per_expert = 3 * 32 * 16 + 32
    assert before - sum(p.numel() for p in moe.model.parameters()) == len(moe.layers) * 8 * per_expert
    torch.testing.assert_close(logits(moe.model), masked, rtol=0, atol=2e-6)

    moe.model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation=kernel).eval()
    assert len(open_model(reloaded).layers) == len(moe.layers)
    torch.testing.assert_close(logits(reloaded), masked, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", CORE)
@pytest.mark.parametrize(
    ("operator", "scale"),
    [
        ("constant", None),
        ("zero", None),
        ("half", None),
        ("reroute", "keep"),
        ("reroute", "interp:0.4"),
        ("reroute", "ref:6"),
    ],
)
def test_a_removed_model_with_its_programs_equals_the_masked_one(family, kernel, operator, scale):
    moe = opened(family, kernel)
    plan = plan_for(moe, operator, scale)
    with installed(moe, plan) as whole:
        masked = logits(moe.model)
    programs = remove_experts(moe, plan)
    assert set(programs) == {layer.index for layer in moe.layers}
    assert all(p.positions == tuple(e for e in range(16) if e not in PRUNED) for p in programs.values())
    assert all(layer.experts.down_proj.shape[0] == 8 for layer in moe.layers)
    assert all(layer.router_rows_ED.shape[0] == 16 for layer in moe.layers), "keep needs every row"
    with Instrument(moe, programs) as parts:
        removed = logits(moe.model)
    torch.testing.assert_close(removed, masked, rtol=0, atol=2e-6 * max(1.0, float(masked.abs().max())))
    for index, counters in whole.counters.items():
        assert parts.counters[index].read() == pytest.approx(counters.read(), rel=1e-5)


def test_layers_may_lose_different_numbers():
    moe = opened("olmoe")
    mask = Mask.for_shapes(moe.shapes, {0: (1, 2), 1: (3, 4, 5, 6)})
    plan = make_plan(moe, mask, load_method("reroute", {"scale": "renorm"}), None)
    with installed(moe, plan):
        masked = logits(moe.model)
    assert remove_experts(moe, plan) == {}
    assert [layer.expert_count for layer in open_model(moe.model).layers] == [14, 12]
    torch.testing.assert_close(logits(moe.model), masked, rtol=0, atol=2e-6)


def test_a_layer_that_loses_nothing_is_not_touched():
    moe = opened("olmoe")
    weight = moe.layers[0].experts.down_proj
    plan = make_plan(moe, Mask.for_shapes(moe.shapes, {1: (3, 4)}), load_method("zero"), None)
    with installed(moe, plan) as instrument:
        logits(moe.model)
    assert set(instrument.counters) == {1}
    programs = remove_experts(moe, plan)
    assert set(programs) == {1}
    assert moe.layers[0].experts.down_proj is weight


def test_a_router_whose_own_code_needs_two_experts_keeps_its_rows_when_one_is_left():
    moe = opened_model("glm4_moe", experts=4, top_k=1)
    mask = Mask.for_shapes(moe.shapes, {shape.index: (0, 1, 3) for shape in moe.shapes})
    plan = make_plan(moe, mask, load_method("reroute", {"scale": "renorm"}), None)
    ids = random_ids(2, 12)
    with torch.inference_mode(), installed(moe, plan):
        masked = moe.model(input_ids=ids, use_cache=False).logits
    left = remove_experts(moe, plan)
    assert set(left) == {shape.index for shape in moe.shapes}
    with torch.inference_mode(), Instrument(moe, left):
        removed = moe.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(removed, masked, rtol=0, atol=4e-6)
    with pytest.raises(UsageError, match="1 expert is left per layer; expected at least 2"):
        slice_model(opened_model("glm4_moe", experts=4, top_k=1), mask)
