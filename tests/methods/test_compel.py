"""COMPEL's compensation as shipped: its weights from Eq. 11 by hand, its rerouting, and its neutral settings."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from prunebench import Mask, load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens, Fisher, gradient_pass
from prunebench.errors import UsageError
from prunebench.install import installed
from prunebench.moe import open_model
from prunebench.plan import make_plan
from prunebench.testing import opened_model, random_ids, random_model

PRUNED = (0, 3, 5, 6, 8)


def scores_of(moe):
    ids_BL = random_ids(6, 16)
    return gradient_pass(moe, CalibrationTokens(CalibrationSpec("file:x", 6, 16), ids_BL, "test"), [Fisher()])


def plan_of(moe, scores, **parameters):
    mask = Mask.for_shapes(moe.shapes, {layer.index: PRUNED for layer in moe.layers})
    return make_plan(moe, mask, load_method("compel", parameters), scores)


def rerouted(moe, scale):
    mask = Mask.for_shapes(moe.shapes, {layer.index: PRUNED for layer in moe.layers})
    return make_plan(moe, mask, load_method("reroute", {"scale": scale}), None)


@torch.inference_mode()
def logits(moe, plan):
    with installed(moe, plan):
        return moe.model(input_ids=random_ids()).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "granitemoe", "gpt_oss"])
@pytest.mark.parametrize("scale", ["keep", "renorm"])
def test_survivors_are_those_of_equation_11_and_slots_are_rerouted(family, dtype, scale):
    moe = open_model(random_model(family, dtype=dtype))
    scores = scores_of(moe)
    plan = plan_of(moe, scores, scale=scale)
    assert (plan.fills_nothing, plan.values_stored, plan.scales) == (True, 0, (scale,))
    twin = open_model(copy.deepcopy(moe.model))
    kept = [e for e in range(16) if e not in PRUNED]
    with torch.no_grad():
        for layer in twin.layers:
            fisher_E = scores.layers[layer.index]["fisher"].value()
            share_E = 0.1 * fisher_E / (fisher_E[kept].sum() + 1e-12)
            for name in layer.layout.tensors:
                weight_E = layer.experts.get_parameter(name)
                before_E = weight_E.detach().double().numpy().copy()
                for e in kept:
                    new = before_E[e] + share_E[e] * before_E[list(PRUNED)].sum(0)
                    weight_E[e] = torch.from_numpy(new).to(dtype)
            for e in kept:
                assert fisher_E[e] > 0
                edited = plan.edits_of(layer.index)[e]
                own = layer.weights(e)
                for name, tensor in edited.items():
                    assert tensor.dtype == dtype
                    close = 1e-6 if dtype == torch.float32 else 1e-2
                    torch.testing.assert_close(tensor.float(), own[name].float(), rtol=close, atol=1e-6)
    wanted, found = logits(twin, rerouted(twin, scale)), logits(moe, plan)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert not torch.equal(found, logits(moe, rerouted(moe, scale)))


@pytest.mark.parametrize("scale", ["trained", "other"])
def test_gamma_zero_is_rerouting_bit_for_bit(scale):
    moe = opened_model("deepseek_v3")
    plan = plan_of(moe, scores_of(moe), gamma=0.0, scale=scale)
    assert torch.equal(logits(moe, plan), logits(moe, rerouted(moe, scale)))


def test_the_median_change_of_a_survivor_is_small_and_every_survivor_takes_part():
    # App. H.6: the survivors' median relative change is 1.5-1.6 %, as 1/|S| of a tenth of the removed sum is small.
    moe = opened_model("olmoe")
    plan = plan_of(moe, scores_of(moe))
    changes = []
    for layer in moe.layers:
        edits = plan.edits_of(layer.index)
        assert set(edits) == set(range(16)) - set(PRUNED)
        for expert, named in edits.items():
            own = layer.weights(expert)
            changes += [float((tensor - own[name]).norm() / own[name].norm()) for name, tensor in named.items()]
    assert all(change > 0 for change in changes)
    assert np.median(changes) < 0.05


@pytest.mark.parametrize(
    ("parameters", "says"),
    [({"epsilon": 0.0}, "epsilon 0.0; expected more than 0"), ({"scale": "none"}, "unknown scale 'none'")],
)
def test_parameters_are_checked(parameters, says):
    with pytest.raises(UsageError, match=says):
        load_method("compel", parameters)
