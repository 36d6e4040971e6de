"""RCS, RCS-LOO and refill are what deleting one expert does to a layer: recomputed token by token, and by the model."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prunebench import FrozenRefillSums, RefillSums, ResidualSums, UsageError
from prunebench.calibration.residuals import deletion_damage, residual_norms
from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.routing import Convention, Scale, select_survivors
from prunebench.testing import (
    FAMILIES,
    batch_of,
    measured,
    opened_model,
    random_ids,
    random_model,
    relabel_batch,
    router_call,
    score,
    split_batch,
)
from prunebench.testing.strategies import token_batches

_NAME = "prunebench_tests_layer_by_hand"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).parents[1] / "calibration" / "by_hand.py")
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])
hand = sys.modules[_NAME]
definitions = hand.definitions

RENORMALISING = [family for family, router in definitions.ROUTERS.items() if router.divides]
OTHERS = ["longcat_flash", "olmoe", "deepseek_v2", "deepseek_v2.groups", "dots1.no_renorm", "jamba"]
EXPERTS = 16


@pytest.mark.parametrize("family", [*RENORMALISING, *OTHERS])
def test_every_quantity_is_the_layer_recomputed_without_that_expert(family):
    # Gemma-4's router cannot be had in float64: there, outputs are float32 numbers too.
    exact = family != "gemma4"
    moe = open_model(random_model(family, dtype=torch.float64 if exact else torch.float32))
    ids_BL = random_ids(2, 12)
    kinds = [FrozenRefillSums(), *([ResidualSums(), RefillSums()] if family in RENORMALISING else [])]
    got = score(moe, kinds, ids_BL=ids_BL).layers
    for index, array, index_TK, outputs_TED in hand.captured(moe, ids_BL):
        wanted = hand.damage(definitions.ROUTERS[family], array, index_TK, outputs_TED)
        wanted = {name: sums[:, :EXPERTS] for name, sums in wanted.items()}
        for kind in kinds:
            for quantity, sums in got[index][kind.name].value().items():
                # Gates as applied are float32 numbers; shares are not.
                tolerance = 1e-6 if quantity == "frozen-refill" or not exact else 1e-9
                scale_E = np.maximum(wanted[quantity][0], 1e-12)
                assert (np.abs(sums.sum_E - wanted[quantity][0]) <= tolerance * scale_E + 1e-9).all(), (quantity, index)
                np.testing.assert_allclose(sums.squares_E, wanted[quantity][1], rtol=2 * tolerance, atol=1e-9)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v3.groups", "granitemoe"])
def test_refill_is_what_the_pruned_model_does_to_the_layer(family):
    moe = open_model(random_model(family, dtype=torch.float64))
    ids_BL, layer = random_ids(2, 12), moe.layers[0]
    expert = int(score(moe, []).layers[layer.index]["count"].value().argmax())

    def routed() -> torch.Tensor:
        seen = []
        handle = layer.experts.register_forward_hook(lambda _m, _args, output: seen.append(output.clone()))
        moe.model(input_ids=ids_BL, use_cache=False)
        handle.remove()
        return seen[0]

    seen = {}
    with torch.inference_mode():
        with Instrument(moe, observer=lambda one, batch: seen.setdefault(one.index, batch)):
            moe.model(input_ids=ids_BL, use_cache=False)
        batch = seen[layer.index]
        damage_TK = deletion_damage(batch)
        before_TD = routed()
        with Instrument(moe, {layer.index: LayerProgram((expert,), scale=Scale("renorm"))}):
            after_TD = routed()
    moved_T = (after_TD - before_TD).norm(dim=-1)
    slots = batch.index_TK == expert
    assert slots.any()
    torch.testing.assert_close(moved_T[slots.any(-1)], damage_TK[slots], rtol=1e-5, atol=1e-7)
    assert (moved_T[~slots.any(-1)] < 1e-12).all()


@pytest.mark.parametrize("family", OTHERS)
def test_where_a_router_does_not_renormalise_the_sums_are_not_numbers(family):
    layers = score(opened_model(family), [ResidualSums(), RefillSums()]).layers
    for statistics in layers.values():
        for kind in (ResidualSums, RefillSums):
            for sums in statistics[kind.name].value().values():
                assert np.isnan(sums.sum_E).all()
                assert np.isnan(sums.squares_E).all()


def test_sparsemixer_has_no_runner_up():
    with pytest.raises(UsageError, match="sparsemixer has no rank k \\+ 1"):
        score(opened_model("phimoe", top_k=2), [FrozenRefillSums()])


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in {"llama4", "phimoe"}])
def test_the_runner_up_is_whom_rerouting_promotes_whoever_is_deleted(family):
    moe = opened_model(family)
    checked = 0

    def look(layer, batch):
        nonlocal checked
        promoted = batch.promoted
        for expert in range(0, layer.expert_count, 5):
            blocked_E = torch.zeros(layer.choices, dtype=torch.bool)
            blocked_E[expert] = True
            selection = select_survivors(batch.call, blocked_E)
            hole_TK = selection.hole_TK
            newcomer = selection.index_TK[hole_TK]
            expected = promoted.expert_T[hole_TK.any(-1)]
            assert torch.equal(torch.where(newcomer == layer.choices, -1, newcomer), expected)
            checked += len(newcomer)
        alone = promoted.expert_T < 0
        assert (promoted.share_T[alone] == 0).all()
        assert not promoted.outputs_TD[alone].any()

    with torch.inference_mode(), Instrument(moe, observer=look):
        moe.model(input_ids=random_ids(2, 12), use_cache=False)
    assert checked


def mixture(outputs: list[list[float]], shares: list[float], runner: tuple[list[float], float] | None = None):
    """One token of a renormalising softmax router with these outputs and shares; the runner-up's share is p_r / Σ p."""
    logits = [math.log(share) for share in shares]
    every = [*outputs, *([runner[0]] if runner else [])]
    if runner:
        logits.append(math.log(runner[1]))
    table_ED = torch.tensor(every, dtype=torch.float64)
    call = router_call(
        Convention("softmax", renormalised=True), torch.tensor([logits], dtype=torch.float64), top_k=len(shares)
    )
    return batch_of(
        x_TD=torch.zeros(1, table_ED.shape[1], dtype=torch.float64),
        scores_TE=torch.softmax(call.logits_TE, -1).float(),
        choice_TE=call.logits_TE,
        index_TK=call.index_TK,
        gates_TK=call.gates_TK,
        outputs_TKD=table_ED[call.index_TK],
        call=call,
        evaluate=lambda _x_SD, expert_S: table_ED[expert_S],
    )


def by_expert(batch, of_TK: torch.Tensor) -> list[float]:
    order = batch.index_TK[0].argsort()
    return of_TK[0][order].tolist()


@pytest.mark.parametrize(("third", "wanted"), [(10.0, (1 / 2, 2.0, 3 / 2)), (-10.0, (23 / 6, 4 / 3, 31 / 6))])
def test_the_printed_scalar_outputs_shift_as_printed(third, wanted):
    batch = mixture([[8.0], [3.0], [third]], [1 / 3] * 3)
    loo_TK = residual_norms(batch) / (1 - batch.shares_TK)
    assert by_expert(batch, loo_TK) == pytest.approx(wanted, abs=1e-12)
    # Nobody is left to be promoted: the refill damage is the same.
    assert by_expert(batch, deletion_damage(batch)) == pytest.approx(wanted, abs=1e-12)
    sums = measured(ResidualSums(), batch).value()["rcs-loo"].sum_E
    assert sums.tolist() == pytest.approx(wanted, abs=1e-12)


def test_the_construction_of_figure_1():
    outputs = [[8.0, 0.0], [3.0, 4.0], [10.0, -4.0]]
    batch = mixture(outputs, [1 / 3] * 3, ([10.0, -5.0], 0.8 / 3))
    loo_TK = residual_norms(batch) / (1 - batch.shares_TK)
    assert by_expert(batch, loo_TK) == pytest.approx([0.5, math.sqrt(8), 2.5], abs=1e-12)
    assert by_expert(batch, deletion_damage(batch)) == pytest.approx([1.51, 3.66, 3 / 14], abs=5e-3)
    assert by_expert(batch, deletion_damage(batch))[2] == pytest.approx(3 / 14, abs=1e-12)
    assert int(batch.promoted.expert_T) == 3
    assert float(batch.promoted.share_T) == pytest.approx(0.8 / 3)


RENORM = st.sampled_from([
    Convention("softmax", renormalised=True),
    Convention("sigmoid", renormalised=True, factor=2.446, epsilon=1e-20, biased=True),
    Convention("selected_softmax", renormalised=True),
])  # fmt: skip


@given(token_batches(conventions=RENORM, min_top_k=2, min_experts=4), st.data())
def test_a_common_vector_added_to_all_outputs_changes_no_damage(batch, data):
    if not batch.is_mixture:
        return  # scores that underflow in float32: their gates are zeros, not shares
    shift_D = torch.tensor(data.draw(st.lists(st.integers(-5, 5), min_size=3, max_size=3)), dtype=torch.float32)
    evaluate = batch.evaluate
    moved = batch_of(
        x_TD=batch.x_TD,
        scores_TE=batch.scores_TE,
        choice_TE=batch.choice_TE,
        index_TK=batch.index_TK,
        gates_TK=batch.gates_TK,
        outputs_TKD=batch.outputs_TKD.double() + shift_D,
        call=batch.call,
        evaluate=lambda x_SD, expert_S: evaluate(x_SD, expert_S).double() + shift_D,
    )
    moved = batch_of(**{**parts(moved), "x_TD": batch.x_TD.double()})
    original = batch_of(**{**parts(batch), "x_TD": batch.x_TD.double()})
    for quantity in (residual_norms, deletion_damage):
        torch.testing.assert_close(quantity(moved), quantity(original), rtol=1e-7, atol=1e-6)


def parts(batch) -> dict:
    names = ("scores_TE", "choice_TE", "index_TK", "gates_TK", "outputs_TKD", "call", "evaluate")
    return {name: getattr(batch, name) for name in names}


@pytest.mark.parametrize("angle", [0.0, 1.0, 2.5])
def test_an_exact_match_of_weighted_residuals_leaves_the_mixture_unchanged(angle):
    # c of the other two and of i; then f_r with w_i r_i = w_r r_r.
    outputs, shares, runner_share = [[8.0, 1.0], [3.0, math.cos(angle)], [10.0, math.sin(angle)]], [0.5, 0.3, 0.2], 0.1
    mixture_D = np.array(shares) @ np.array(outputs)
    runner_D = mixture_D + shares[2] / runner_share * (np.array(outputs[2]) - mixture_D)
    batch = mixture(outputs, shares, (runner_D.tolist(), runner_share))
    damage = by_expert(batch, deletion_damage(batch))
    assert damage[2] == pytest.approx(0.0, abs=1e-12)
    assert damage[0] > 0.1


def summed_shares(batch) -> torch.Tensor:
    """What shares sum to ([T]): one, but for the ε that a sigmoid router adds to the sum that it divides by."""
    if batch.call.convention.score != "sigmoid":
        return torch.ones(batch.tokens, dtype=torch.float64)
    total_T = (1 / (1 + (-batch.call.logits_TE.double()).exp())).gather(1, batch.index_TK).sum(-1)
    return total_T / (total_T + 1e-20)


@given(token_batches(conventions=RENORM))
def test_shares_of_a_token_sum_to_one_so_that_their_mean_is_one_over_k(batch):
    assert batch.whole
    torch.testing.assert_close(batch.shares_TK.sum(-1), summed_shares(batch), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("logit", "short"), [(-18.4375, 1.017e-12), (-30.0, 1.0686e-7), (0.0, 0.0)])
def test_shares_fall_short_of_one_by_what_the_router_adds_to_their_sum(logit, short):
    convention = Convention("sigmoid", renormalised=True, factor=2.446, epsilon=1e-20)
    call = router_call(convention, torch.tensor([[logit, -40.0]]), top_k=1)
    batch = batch_of(
        x_TD=torch.zeros(1, 1),
        scores_TE=call.logits_TE.sigmoid(),
        choice_TE=call.logits_TE,
        index_TK=call.index_TK,
        gates_TK=call.gates_TK,
        outputs_TKD=torch.zeros(1, 1, 1),
        call=call,
    )
    assert 1 - float(batch.shares_TK.sum()) == pytest.approx(short, rel=2e-3, abs=1e-15)
    assert 1 - float(summed_shares(batch)) == pytest.approx(short, rel=2e-3, abs=1e-15)


@given(token_batches(conventions=RENORM, ties=False, min_experts=4), st.data())
def test_sums_depend_neither_on_the_cuts_nor_on_the_labels(batch, data):
    cut = data.draw(st.integers(0, batch.tokens))
    old_of_new = data.draw(st.permutations(range(len(batch.counts_E))))
    for kind in (ResidualSums, RefillSums, FrozenRefillSums):
        whole = measured(kind(), batch).state
        merged, second = (measured(kind(), part) for part in split_batch(batch, cut))
        merged.merge(second)
        named = measured(kind(), relabel_batch(batch, old_of_new)).state
        for key, value_E in whole.items():
            torch.testing.assert_close(merged.state[key], value_E, rtol=1e-9, atol=1e-6)
            torch.testing.assert_close(named[key], value_E[old_of_new], rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("family", RENORMALISING)
def test_the_mean_share_is_one_over_k(family):
    moe, shares = opened_model(family), []
    with torch.inference_mode(), Instrument(moe, observer=lambda _layer, batch: shares.append(batch.shares_TK)):
        moe.model(input_ids=random_ids(2, 12), use_cache=False)
    for share_TK in shares:
        # LFM2 adds 1e-6 to the sum that it divides by.
        assert float(share_TK.mean()) == pytest.approx(1 / share_TK.shape[1], rel=1e-5)


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm"])
def test_one_more_expert_runs_per_token_and_only_if_asked(monkeypatch, kernel):
    moe = opened_model("qwen3_moe", experts_implementation=kernel)
    rows = []
    own = type(moe.layers[0]).run_experts

    def counted(self, x_SD, expert_S):
        rows.append(len(x_SD))
        return own(self, x_SD, expert_S)

    monkeypatch.setattr(type(moe.layers[0]), "run_experts", counted)
    with torch.inference_mode():
        plain = moe.model(input_ids=random_ids(2, 12), use_cache=False).logits
        score(moe, [ResidualSums()], ids_BL=random_ids(2, 12))
        assert not rows
        score(moe, [RefillSums(), FrozenRefillSums()], ids_BL=random_ids(2, 12))
        # Once for both statistics.
        assert rows == [24] * len(moe.layers)
        asked = RefillSums()
        asked.start(EXPERTS, 32, torch.device("cpu"))
        with Instrument(moe, observer=lambda _layer, batch: asked.update(batch)):
            watched = moe.model(input_ids=random_ids(2, 12), use_cache=False).logits
    assert torch.equal(plain, watched)


def test_the_runner_up_of_a_rerouted_layer_is_refused():
    moe = opened_model("qwen3_moe")
    program = {layer.index: LayerProgram((0, 1, 2), scale=Scale("renorm")) for layer in moe.layers}
    with Instrument(moe, program), pytest.raises(UsageError, match="the runner-up of a layer that is pruned"):
        score(moe, [RefillSums()])


def test_padding_leaves_the_sums_of_the_tokens_alone():
    moe = open_model(random_model("qwen3_moe", dtype=torch.float64))
    ids_BL = random_ids(2, 12)
    padded = torch.cat([ids_BL, torch.ones(2, 4, dtype=torch.int64)], dim=1)
    mask = torch.cat([torch.ones(2, 12, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)], dim=1)
    found = []
    for batch_of_ids in ({"input_ids": ids_BL}, {"input_ids": padded, "attention_mask": mask}):
        statistics = {layer.index: [ResidualSums(), RefillSums()] for layer in moe.layers}
        for both in statistics.values():
            for one in both:
                one.start(EXPERTS, 32, torch.device("cpu"))

        def look(layer, batch, statistics=statistics):
            for one in statistics[layer.index]:
                one.update(batch)

        with torch.inference_mode(), Instrument(moe, observer=look):
            moe.model(**batch_of_ids, use_cache=False)
        found.append(
            {(i, one.name, key): v for i, s in statistics.items() for one in s for key, v in one.state.items()}
        )
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-12)
