"""MoRA's proxies and ConMoE's remapping as shipped, against float64 loops over tokens written from the papers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from prunebench import Mask, load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens
from prunebench.errors import UsageError
from prunebench.install import installed, programs_of
from prunebench.moe import open_model
from prunebench.plan import fit_plan, make_plan
from prunebench.testing import opened_model, random_ids

PRUNED = (1, 4, 6, 9)
KEPT = tuple(e for e in range(16) if e not in PRUNED)
FAMILIES = ["olmoe", "deepseek_v3", "granitemoe"]


def text(blocks=24, length=32, seed=1):
    ids_BL = random_ids(blocks, length, seed=seed)
    return CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")


def mask_of(moe, pruned=PRUNED):
    return Mask.for_shapes(moe.shapes, {layer.index: pruned for layer in moe.layers})


def fitted(moe, name, tokens, **parameters):
    return fit_plan(moe, mask_of(moe), load_method(name, parameters), None, tokens)


@pytest.fixture(scope="module", params=FAMILIES)
def moe(request):
    return opened_model(request.param)


@pytest.fixture(scope="module")
def traced(moe, oracle, request):
    """layer -> inputs, logits, experts, gates and blocks of every token, past every hook of prunebench."""
    tokens = text()
    found = {}
    with torch.inference_mode(), oracle.Trace(moe.layers) as trace:
        moe.model(input_ids=tokens.ids_BL)
    for layer in moe.layers:
        logits_TE, gates_TK, index_TK = (oracle.array(part) for part in trace.router[layer.index][0])
        found[layer.index] = (
            oracle.array(trace.inputs[layer.index][0]),
            oracle.scores(oracle.ROUTERS[family_of(moe)], logits_TE),
            index_TK,
            gates_TK,
            np.repeat(np.arange(24), 32),
        )
    return found


def family_of(moe):
    return {"olmoe": "olmoe", "deepseek_v3": "deepseek_v3", "granitemoe": "granitemoe"}[moe.model.config.model_type]


# ------------------------------------------------------------------------------------------------------------- MoRA


def affine(x_S, y_S, weight_S, ridge):
    """One channel by weighted ridge regression, λ relative to the weighted variance of x, b free."""
    mean_x, mean_y = np.average(x_S, weights=weight_S), np.average(y_S, weights=weight_S)
    variance = np.average((x_S - mean_x) ** 2, weights=weight_S)
    a = np.average((x_S - mean_x) * (y_S - mean_y), weights=weight_S) / ((1 + ridge) * variance)
    return a, mean_y - a * mean_x


def best_by_hand(layer, oracle, traced, expert, ridge=1e-6):
    """(held-out R², survivor, a, b, weighted squared errors) of the best survivor."""
    x_TD, p_TE, index_TK, _, block_T = traced
    routed_T = (index_TK == expert).any(1)
    x_SD, weight_S, odd_S = x_TD[routed_T], p_TE[routed_T, expert], block_T[routed_T] % 2 == 1
    y_SD = oracle.expert(layer.experts, expert, x_SD)
    mean_D = np.average(y_SD[odd_S], axis=0, weights=weight_S[odd_S])
    total = (weight_S[odd_S, None] * (y_SD[odd_S] - mean_D) ** 2).sum()
    best = None
    for survivor in KEPT:
        z_SD = oracle.expert(layer.experts, survivor, x_SD)
        maps = [affine(z_SD[~odd_S, c], y_SD[~odd_S, c], weight_S[~odd_S], ridge) for c in range(y_SD.shape[1])]
        a_D, b_D = np.array(maps).T
        error_SD = weight_S[:, None] * (y_SD - a_D * z_SD - b_D) ** 2
        r2 = 1 - error_SD[odd_S].sum() / total
        if best is None or r2 > best[0]:
            best = r2, survivor, a_D, b_D, error_SD[~odd_S].sum(), len(x_SD)
    return best


def test_the_proxy_is_the_survivor_that_a_loop_over_all_of_them_finds(moe, traced, oracle):
    result = fitted(moe, "mora", text(), threshold=-9.0)
    assert result.plan.keeps_slots
    programs = programs_of(result.plan)
    for layer in moe.layers:
        for expert in PRUNED:
            r2, survivor, a_D, b_D, error, count = best_by_hand(layer, oracle, traced[layer.index], expert)
            fill, row = programs[layer.index].fills[expert], result.coverage[layer.index][expert]
            assert fill.survivor == survivor
            np.testing.assert_allclose(fill.scale_D, a_D, rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(fill.shift_D, b_D, rtol=1e-3, atol=1e-4)
            assert row["held_out_share"] == pytest.approx(r2, abs=1e-5)
            assert row["squared_error"] == pytest.approx(error, rel=1e-4)
            assert (row["tokens"], row["fallback"], row["outcome"]) == (count, "", "proxy")


@pytest.mark.parametrize("scale", ["keep", "renorm"])
def test_without_a_proxy_the_slots_are_rerouted(moe, scale):
    # Random experts do not predict each other.
    result = fitted(moe, "mora", text(), scale=scale)
    assert result.plan.fills_nothing
    assert result.plan.scales == (scale,)
    rows = [row for rows in result.coverage.values() for row in rows.values()]
    assert len(rows) == len(PRUNED) * len(moe.layers)
    assert {row["fallback"] for row in rows} == {"no proxy, rerouted"}
    assert max(row["held_out_share"] for row in rows) < 0.4
    reroute = make_plan(moe, mask_of(moe), load_method("reroute", {"scale": scale}), None)
    with torch.inference_mode():
        logits = []
        for plan in (result.plan, reroute):
            with installed(moe, plan):
                logits.append(moe.model(input_ids=random_ids()).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planted_rescaled_copies_are_all_found_in_a_model(dtype):
    # App. D.3, the positive control: survivors overwritten with copies whose output channels are rescaled.
    planted = {1: 2, 4: 8, 6: 0}
    twin = copy.deepcopy(opened_model("olmoe").model).to(dtype)
    scale_D = torch.rand(32, generator=torch.Generator().manual_seed(0)) * 1.5 + 0.5
    moe = open_model(twin)
    with torch.no_grad():
        for layer in moe.layers:
            for target, survivor in planted.items():
                layer.experts.gate_up_proj[survivor] = layer.experts.gate_up_proj[target]
                layer.experts.down_proj[survivor] = (layer.experts.down_proj[target] * scale_D[:, None]).to(dtype)
    result = fitted(moe, "mora", text(48))
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    for layer in moe.layers:
        fills = programs_of(result.plan)[layer.index].fills
        assert set(fills) == set(planted)
        for target, survivor in planted.items():
            assert fills[target].survivor == survivor
            assert result.coverage[layer.index][target]["held_out_share"] > 1 - tolerance / 10
            assert float((fills[target].scale_D * scale_D - 1).abs().median()) < tolerance
            assert float(fills[target].shift_D.abs().median()) < tolerance
        assert result.coverage[layer.index][9]["fallback"] == "no proxy, rerouted"


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"threshold": 1.0}, "a threshold of 1.0 for R²; expected less than 1"),
        ({"ridge": -1.0}, "ridge -1.0"),
        ({"scale": "softmax"}, "unknown scale 'softmax'"),
    ],
)
def test_moras_parameters_are_checked(parameters, says):
    with pytest.raises(UsageError, match=says):
        load_method("mora", parameters)


# ----------------------------------------------------------------------------------------------------------- ConMoE


def distances_by_hand(layer, oracle, expert):
    named = [oracle.array(layer.experts.get_parameter(name)) for name in ("gate_up_proj", "down_proj")]
    return {p: sum(np.square(tensor[expert] - tensor[p]).sum() for tensor in named) for p in KEPT}


def test_nearest_is_nearest_and_fits_nothing(moe, oracle):
    method = load_method("conmoe-nearest")
    assert not method.in_fit_pass()
    assert method.replace_needs() == ()
    plan = make_plan(moe, mask_of(moe), method, None)
    assert (plan.keeps_slots, plan.values_stored, plan.tensors) == (True, 0, {})
    for layer in moe.layers:
        for expert, fill in programs_of(plan)[layer.index].fills.items():
            distance = distances_by_hand(layer, oracle, expert)
            assert fill.survivor == min(distance, key=lambda p: (distance[p], p))


def functional_by_hand(layer, oracle, traced, expert):
    x_TD, _, index_TK, gates_TK, block_T = traced
    distance = distances_by_hand(layer, oracle, expert)
    near = sorted(distance, key=lambda p: (distance[p], p))[:4]
    costs = {}
    for fold in (0, 1):
        token_S, slot_S = np.nonzero((index_TK == expert) & (block_T % 2 == fold)[:, None])
        y_SD = oracle.expert(layer.experts, expert, x_TD[token_S])
        for p in near:
            error_S = np.square(y_SD - oracle.expert(layer.experts, p, x_TD[token_S])).sum(1)
            costs[fold, p] = np.mean(gates_TK[token_S, slot_S] ** 2 * error_S)
    best = [min(near, key=lambda p, fold=fold: costs[fold, p]) for fold in (0, 1)]
    if best[0] != best[1]:
        return near[0], "folds disagree"
    return best[0], "nearest already best" if best[0] == near[0] else "functional"


def test_functional_remaps_as_a_loop_over_all_routed_states_says(moe, traced, oracle):
    result = fitted(moe, "conmoe-functional", text(), states=10_000)
    outcomes = set()
    for layer in moe.layers:
        fills = programs_of(result.plan)[layer.index].fills
        for expert in PRUNED:
            survivor, outcome = functional_by_hand(layer, oracle, traced[layer.index], expert)
            row = result.coverage[layer.index][expert]
            assert (fills[expert].survivor, row["outcome"], row["fallback"]) == (survivor, outcome, "")
            assert row["tokens"] == (traced[layer.index][2] == expert).sum()
            outcomes.add(outcome)
    assert len(outcomes) > 1
    assert result.plan.values_stored == 0


def test_one_candidate_is_the_nearest(moe):
    nearest = make_plan(moe, mask_of(moe), load_method("conmoe-nearest"), None)
    one = fitted(moe, "conmoe-functional", text(), candidates=1).plan
    assert [layer.fills for layer in one.layers] == [layer.fills for layer in nearest.layers]


def test_states_are_drawn_by_seed_and_few_of_them(moe):
    plans = [fitted(moe, "conmoe-functional", text(), states=3, seed=seed) for seed in (0, 0, 1, 2, 3)]
    targets = [[layer.fills for layer in one.plan.layers] for one in plans]
    assert targets[0] == targets[1]
    assert any(other != targets[0] for other in targets[2:])


def test_an_expert_that_is_never_routed_to_goes_to_the_nearest_or_is_rerouted():
    moe = opened_model("deepseek_v3")
    for layer in moe.layers:
        layer.router.e_score_correction_bias[PRUNED[0]] = -10.0
    remap, mora = fitted(moe, "conmoe-functional", text()), fitted(moe, "mora", text())
    for layer in moe.layers:
        row = remap.coverage[layer.index][PRUNED[0]]
        assert (row["tokens"], row["fallback"], row["fit_share"]) == (0, "no states of a fold, nearest", 0.0)
        row = mora.coverage[layer.index][PRUNED[0]]
        assert (row["tokens"], row["fallback"]) == (0, "no routed tokens, rerouted")


def test_no_candidates_are_refused():
    with pytest.raises(UsageError, match="0 candidates; expected at least 1"):
        load_method("conmoe-functional", {"candidates": 0})
