"""Operators that answer from survivors: MoRA's proxy, ConMoE's remapping, COMPEL's compensation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prunebench.errors import UsageError
from prunebench.fit import (
    PairMoments,
    Remap,
    absorbed_shares,
    affine_maps,
    best_proxy,
    compensated,
    functional_remap,
    held_out_r2,
    nearest_survivors,
    parameter_distances,
    remap_summary,
    slot_cost,
)
from prunebench.moe import open_model
from prunebench.plan import layer_views
from prunebench.testing import random_model

# ------------------------------------------------------------------------------------------------- MoRA's proxy


def outputs(count: int, *, survivors: int = 3, width: int = 6, seed: int = 0):
    """A pruned expert's outputs, R survivors' on the same tokens, and token weights."""
    generator = torch.Generator().manual_seed(seed)
    target_SD = torch.randn(count, width, generator=generator, dtype=torch.float64) + 2
    source_RSD = torch.randn(survivors, count, width, generator=generator, dtype=torch.float64) - 1
    source_RSD[1] += 0.8 * target_SD
    return target_SD, source_RSD, torch.rand(count, generator=generator, dtype=torch.float64)


def by_least_squares(target_SD, source_SD, weight_S, ridge: float):
    """a, b of every channel from numpy, rows scaled by sqrt(ω); the ridge as one more row per channel."""
    a, b = [], []
    root = np.sqrt(weight_S.numpy())
    for y, x in zip(target_SD.numpy().T, source_SD.numpy().T, strict=True):
        spread = np.sqrt(ridge * np.sum(weight_S.numpy() * (x - np.average(x, weights=weight_S.numpy())) ** 2))
        design = np.vstack([np.column_stack([root * x, root]), [spread, 0]])
        solution = np.linalg.lstsq(design, np.append(root * y, 0), rcond=None)[0]
        a.append(solution[0])
        b.append(solution[1])
    return np.array(a), np.array(b)


@pytest.mark.parametrize("ridge", [0.0, 1e-6, 0.3])
def test_the_affine_map_is_weighted_ridge_regression_by_channel(ridge):
    target_SD, source_RSD, weight_S = outputs(80)
    a_RD, b_RD = affine_maps(PairMoments.of(target_SD, source_RSD, weight_S), ridge=ridge)
    for r in range(3):
        a_D, b_D = by_least_squares(target_SD, source_RSD[r], weight_S, ridge)
        np.testing.assert_allclose(a_RD[r], a_D, atol=1e-10)
        np.testing.assert_allclose(b_RD[r], b_D, atol=1e-10)


@given(seed=st.integers(0, 999), cut=st.integers(0, 40))
def test_pair_moments_add_up_and_give_the_direct_r2(seed, cut):
    target_SD, source_RSD, weight_S = outputs(40, seed=seed)
    whole = PairMoments.of(target_SD, source_RSD, weight_S)
    halves = PairMoments.of(target_SD[:cut], source_RSD[:, :cut], weight_S[:cut]) + PairMoments.of(
        target_SD[cut:], source_RSD[:, cut:], weight_S[cut:]
    )
    for name, value in vars(whole).items():
        torch.testing.assert_close(getattr(halves, name), value, rtol=1e-11, atol=1e-11)
    a_RD, b_RD = affine_maps(PairMoments.of(*outputs(30, seed=seed + 1)))
    mean_D = torch.from_numpy(np.average(target_SD.numpy(), axis=0, weights=weight_S.numpy()))
    total = (weight_S[:, None] * (target_SD - mean_D) ** 2).sum()
    for r, q in enumerate(held_out_r2(a_RD, b_RD, whole)):
        error = (weight_S[:, None] * (target_SD - a_RD[r] * source_RSD[r] - b_RD[r]) ** 2).sum()
        assert float(q) == pytest.approx(1 - float(error / total), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_planted_rescaled_copies_are_all_found(dtype):
    # App. D.3: survivors overwritten with copies of pruned experts whose output channels are rescaled by s in [0.5, 2].
    [view, *_] = layer_views(open_model(random_model("olmoe", hidden_size=48)), None, (), "x")
    generator = torch.Generator().manual_seed(5)
    x_SD = torch.randn(600, 48, generator=generator)
    pruned, survivors = (0, 3, 7, 9), (1, 2, 4, 5, 6, 8)
    planted = {0: 2, 3: 8, 7: 1, 9: 5}
    scale_PD = torch.rand(4, 48, generator=generator) * 1.5 + 0.5
    answers = {e: view.expert(e, x_SD).to(dtype) for e in (*pruned, *survivors)}
    for target, s_D in zip(pruned, scale_PD, strict=True):
        answers[planted[target]] = (answers[target].double() * s_D).to(dtype)
    weight_S = torch.rand(600, generator=generator)
    source_RSD = torch.stack([answers[e] for e in survivors])
    for target, s_D in zip(pruned, scale_PD, strict=True):
        folds = [
            PairMoments.of(answers[target][half], source_RSD[:, half], weight_S[half])
            for half in (slice(0, 300), slice(300, 600))
        ]
        proxy = best_proxy(*folds, survivors)
        assert proxy.survivor == planted[target]
        assert proxy.accepted
        assert proxy.r2 == pytest.approx(1.0, abs=1e-4)
        assert proxy.values_stored == 2 * 48
        exact = dtype == torch.float64
        assert float((proxy.a_D * s_D - 1).abs().median()) < (1e-5 if exact else 3e-3)
        assert float(proxy.b_D.abs().median()) < (1e-6 if exact else 1e-3)
        others = [r for r, e in enumerate(survivors) if e != planted[target]]
        apart = [
            PairMoments.of(answers[target][half], source_RSD[others][:, half], weight_S[half])
            for half in (slice(0, 300), slice(300, 600))
        ]
        real = best_proxy(*apart, [survivors[r] for r in others])
        assert not real.accepted
        assert real.values_stored == 0


def test_the_threshold_must_be_exceeded_and_ties_go_to_the_first():
    target_SD, source_RSD, weight_S = outputs(60)
    source_RSD[2] = source_RSD[1]
    moments = PairMoments.of(target_SD, source_RSD, weight_S)
    proxy = best_proxy(moments, moments, (4, 9, 7))
    assert proxy.survivor == 9
    assert not best_proxy(moments, moments, (4, 9, 7), threshold=proxy.r2).accepted
    assert best_proxy(moments, moments, (4, 9, 7), threshold=proxy.r2 - 1e-12).accepted


def test_no_tokens_and_no_spread_give_no_proxy_and_no_nan():
    target_SD, source_RSD, weight_S = outputs(20)
    moments = PairMoments.of(target_SD, source_RSD, weight_S)
    for odd in (
        PairMoments.of(target_SD[:0], source_RSD[:, :0], weight_S[:0]),
        PairMoments.of(target_SD, source_RSD, weight_S * 0),
        PairMoments.of(torch.ones_like(target_SD), torch.ones_like(source_RSD), weight_S),
    ):
        for proxy in (best_proxy(odd, moments, (1, 2, 3)), best_proxy(moments, odd, (1, 2, 3))):
            assert not proxy.accepted
            assert np.isfinite(proxy.r2)
    with pytest.raises(UsageError, match="2 survivors; expected 3, as in the moments"):
        best_proxy(moments, moments, (1, 2))


# ------------------------------------------------------------------------------------------- ConMoE's remapping


@pytest.fixture(scope="module")
def experts():
    [view, *_] = layer_views(open_model(random_model()), None, (), "x")
    return {e: view.weights(e) for e in range(16)}


def test_the_parameter_distance_is_the_frobenius_distance_of_all_matrices(experts):
    pruned, kept = (0, 5), (1, 2, 9)
    found = parameter_distances([experts[e] for e in pruned], [experts[e] for e in kept])
    flat = {e: np.concatenate([w.double().numpy().ravel() for w in named.values()]) for e, named in experts.items()}
    wanted = [[np.sum((flat[i] - flat[p]) ** 2) for p in kept] for i in pruned]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert float(parameter_distances([experts[3]], [experts[3]])[0, 0]) == 0.0


def test_a_reordering_of_neurons_changes_the_distance_and_not_the_function(experts):
    # The documented weakness of a distance between parameters.
    named = experts[4]
    order = torch.arange(15, -1, -1)
    gate_FD, up_FD = named["gate_up_proj"].chunk(2)
    turned = {"gate_up_proj": torch.cat([gate_FD[order], up_FD[order]]), "down_proj": named["down_proj"][:, order]}
    assert float(parameter_distances([named], [turned])[0, 0]) > 1.0


def test_experts_of_other_shapes_are_refused(experts):
    with pytest.raises(UsageError, match="two experts with different weights"):
        parameter_distances([experts[0]], [{"down_proj": experts[0]["down_proj"]}])


def test_the_nearest_come_first_and_ties_go_to_the_lowest_id():
    distance_R = torch.tensor([3.0, 1.0, 1.0, 2.0, 1.0])
    survivors = (10, 9, 4, 7, 12)
    assert nearest_survivors(distance_R, survivors) == (4,)
    assert nearest_survivors(distance_R, survivors, count=4) == (4, 9, 12, 7)
    assert nearest_survivors(distance_R, survivors, count=9) == (4, 9, 12, 7, 10)
    with pytest.raises(UsageError, match="2 survivors; expected one per distance, 5"):
        nearest_survivors(distance_R, (1, 2))


def test_the_slot_cost_is_the_router_weighted_output_error():
    target_SD, candidate_CSD, gates_S = outputs(64, survivors=4)
    wanted = [np.mean(gates_S.numpy() ** 2 * ((target_SD - one) ** 2).sum(1).numpy()) for one in candidate_CSD]
    np.testing.assert_allclose(slot_cost(gates_S, target_SD, candidate_CSD), wanted, rtol=1e-12)
    assert slot_cost(gates_S[:0], target_SD[:0], candidate_CSD[:, :0]).isnan().all()


@pytest.mark.parametrize(
    ("costs", "survivor", "outcome"),
    [
        ([[2, 1, 3, 4], [5, 2, 6, 3]], 9, "functional"),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 4, "nearest already best"),
        ([[1, 1, 3, 4], [2, 2, 3, 4]], 4, "nearest already best"),
        ([[2, 1, 3, 4], [5, 6, 2, 9]], 4, "folds disagree"),
        ([[2, 1, 3, 4], [1, 2, 3, 4]], 4, "folds disagree"),
        ([[2, 1, 3, 4], [np.nan] * 4], 4, "empty fold"),
    ],
)
def test_the_functional_choice_needs_both_folds_and_must_beat_the_nearest(costs, survivor, outcome):
    remap = functional_remap((4, 9, 12, 7), torch.tensor(costs, dtype=torch.float64))
    assert remap == Remap(survivor, 4, outcome)
    assert remap.changed is (survivor != 4)


@given(costs=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=2, max_size=2))
def test_a_changed_target_is_strictly_better_on_both_folds(costs):
    candidates = (4, 9, 12, 7)
    remap = functional_remap(candidates, torch.tensor(costs, dtype=torch.float64))
    index = candidates.index(remap.survivor)
    if remap.changed:
        assert all(fold[index] < fold[0] and fold[index] == min(fold) for fold in costs)
    else:
        assert index == 0


def test_the_summary_counts_targets_within_each_layer():
    targets = {0: {1: 4, 2: 9, 3: 9}, 1: {1: 9}}
    summary = remap_summary(targets, ["nearest already best", "functional", "functional", "folds disagree", ""])
    assert summary.to_json() == {
        "slots": 4,
        "targets": 3,
        "most": 2,
        "outcomes": {"folds disagree": 1, "functional": 2, "nearest already best": 1},
    }
    assert remap_summary({}).most == 0


# ---------------------------------------------------------------------------------------- COMPEL's compensation


def bits(weights):
    return {
        (e, n): w.view(torch.int16 if w.dtype == torch.bfloat16 else torch.int32)
        for e, x in weights.items()
        for n, w in x.items()
    }


def cast(experts, dtype):
    return {e: {name: weight.to(dtype) for name, weight in named.items()} for e, named in experts.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gamma_zero_changes_nothing_bit_for_bit(experts, dtype):
    weights = cast(experts, dtype)
    weights[2]["down_proj"][:8] = -0.0  # adding 0·θ to it may flip the sign bit
    fisher = dict.fromkeys(weights, 1.0)
    before = bits({e: {n: w.clone() for n, w in named.items()} for e, named in weights.items()})
    after = bits(compensated(weights, (0, 1), fisher, gamma=0.0))
    assert {e for e, _ in after} == set(range(2, 16))
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    assert all(torch.equal(value, before[key]) for key, value in bits(weights).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_survivors_absorb_the_removed_weights_by_their_fisher(experts, dtype):
    weights = cast(experts, dtype)
    rng = np.random.default_rng(0)
    fisher = {e: float(f) for e, f in enumerate(rng.exponential(size=16) * 1e-3)}
    pruned = (1, 4, 5, 11)
    after = compensated(weights, pruned, fisher)
    kept = [e for e in range(16) if e not in pruned]
    total = sum(fisher[e] for e in kept) + 1e-12
    for e in kept:
        for name in weights[e]:
            removed = sum(weights[i][name].double().numpy() for i in pruned)
            wanted = weights[e][name].double().numpy() + 0.1 * fisher[e] / total * removed
            assert after[e][name].dtype == dtype
            tolerance = 1e-6 if dtype == torch.float32 else 2.0**-8
            np.testing.assert_allclose(after[e][name].double(), wanted, rtol=tolerance, atol=1e-7)


def test_all_that_is_absorbed_is_gamma_times_what_was_removed(experts):
    fisher = dict.fromkeys(experts, 0.7)
    after = compensated(experts, (3, 8), fisher, gamma=0.5)
    for name in experts[0]:
        gained = sum(after[e][name].double() - experts[e][name].double() for e in after)
        wanted = 0.5 * (experts[3][name] + experts[8][name]).double()
        torch.testing.assert_close(gained, wanted, atol=1e-6, rtol=1e-5)
    assert absorbed_shares(fisher, tuple(after), gamma=0.5)[0] == pytest.approx(0.5 / 14)


def test_without_fisher_nothing_changes_and_nothing_is_nan(experts):
    after = compensated(experts, (0,), dict.fromkeys(experts, 0.0))
    assert all(torch.equal(after[e][name], experts[e][name]) for e in after for name in after[e])
    one = compensated(experts, (0,), {**dict.fromkeys(experts, 0.0), 3: 1e-9})
    assert [e for e in one if not torch.equal(one[e]["down_proj"], experts[e]["down_proj"])] == [3]


def test_with_nothing_pruned_nothing_changes(experts):
    after = compensated(experts, (), dict.fromkeys(experts, 1.0))
    assert all(torch.equal(after[e][name], experts[e][name]) for e in experts for name in experts[e])


def test_the_scale_of_the_loss_does_not_matter(experts):
    fisher = {e: float(e + 1) for e in experts}
    small = {e: value * 1e-4 for e, value in fisher.items()}
    one, other = (absorbed_shares(f, range(8)) for f in (fisher, small))
    assert one == pytest.approx(other, rel=1e-8)


def test_bad_fisher_and_unknown_experts_are_refused(experts):
    fisher = dict.fromkeys(experts, 1.0)
    with pytest.raises(UsageError, match="Fisher nan; in expert 3; expected a finite number"):
        compensated(experts, (0,), {**fisher, 3: float("nan")})
    with pytest.raises(UsageError, match="expert 99 does not exist"):
        compensated(experts, (99,), fisher)
    with pytest.raises(UsageError, match=r"epsilon 0.0; expected more than 0"):
        absorbed_shares(fisher, (0,), epsilon=0.0)
