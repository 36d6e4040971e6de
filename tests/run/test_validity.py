"""Deleting experts one by one: the damage is that of a model written out, and what is finished is kept."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from prunebench import UsageError, load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens, OutputMoments, score_pass
from prunebench.mask import Mask
from prunebench.moe import open_model
from prunebench.plan import make_plan
from prunebench.run import Session
from prunebench.run.arm import prepare
from prunebench.run.validity import MEASURES, delete_experts, divergences, sample_experts, score_validity
from prunebench.testing import opened_model, random_ids, random_model


def tokens(ids_BL: torch.Tensor) -> CalibrationTokens:
    return CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")


def planner(moe, name="reroute", scores=None):
    operator = load_method(name)

    def plan_of(index, expert):
        return make_plan(moe, Mask.for_shapes(moe.shapes, {index: (expert,)}), operator, scores)

    return plan_of


def by_hand(model, ids_BL, index, expert, *, renormalised, mean_D=None) -> np.ndarray:
    """Logits of a model whose block `index` is written out as a float64 loop over tokens without one expert.

    Without a mean the expert is taken out of the choice: the slot goes to the next, at the trained scale. With one it
    keeps its slots and answers the mean.
    """
    block = model.model.layers[index].mlp
    experts, router_ED = block.experts, block.gate.weight.double().numpy()
    up_EFD, down_EDF = experts.gate_up_proj.double().numpy(), experts.down_proj.double().numpy()
    top_k = block.gate.top_k

    def forward(hidden_BLD):
        x_TD = hidden_BLD.reshape(-1, hidden_BLD.shape[-1]).double().numpy()
        out_TD = np.zeros_like(x_TD)
        for t, x_D in enumerate(x_TD):
            logits_E = router_ED @ x_D
            p_E = np.exp(logits_E - logits_E.max())
            p_E /= p_E.sum()
            order = [int(e) for e in np.argsort(-p_E) if mean_D is not None or e != expert][:top_k]
            total = sum(p_E[e] for e in order) if renormalised else 1.0
            for e in order:
                a_F, b_F = np.split(up_EFD[e] @ x_D, 2)
                y_D = mean_D if e == expert else down_EDF[e] @ (a_F / (1 + np.exp(-a_F)) * b_F)
                out_TD[t] += p_E[e] / total * y_D
        return torch.from_numpy(out_TD).to(hidden_BLD.dtype).reshape(hidden_BLD.shape)

    block.forward = forward
    try:
        with torch.inference_mode():
            return model(input_ids=ids_BL, use_cache=False).logits.double().numpy()
    finally:
        del block.forward


def compared(dense_BLV, pruned_BLV, ids_BL) -> np.ndarray:
    """(3, B): the definitions, as loops over positions and words."""
    found = np.zeros((3, len(ids_BL)))
    for b, ids_L in enumerate(ids_BL.tolist()):
        for t in range(len(ids_L) - 1):
            p_V, q_V = (np.exp(x[b, t] - np.logaddexp.reduce(x[b, t])) for x in (dense_BLV, pruned_BLV))
            found[0, b] += sum(p * np.log(p / q) for p, q in zip(p_V, q_V, strict=True))
            found[1, b] += sum(q * np.log(q / p) for p, q in zip(p_V, q_V, strict=True))
            found[2, b] += np.log(p_V[ids_L[t + 1]] / q_V[ids_L[t + 1]])
    return found / (ids_BL.shape[1] - 1)


@pytest.mark.parametrize(("family", "renormalised"), [("olmoe", False), ("qwen3_moe", True)])
def test_a_deletion_does_what_a_model_written_out_in_float64_does(family, renormalised):
    model = random_model(family, dtype=torch.float64)
    moe, ids_BL = open_model(model), random_ids(2, 9)
    with torch.inference_mode():
        dense_BLV = model(input_ids=ids_BL, use_cache=False).logits.double().numpy()
    damages = delete_experts(moe, tokens(ids_BL), {0: (3, 8), 1: (5,)}, planner(moe))
    assert damages.proof.streamed
    for index, ids in {0: (3, 8), 1: (5,)}.items():
        for place, expert in enumerate(ids):
            pruned_BLV = by_hand(model, ids_BL, index, expert, renormalised=renormalised)
            expected_3B = compared(dense_BLV, pruned_BLV, ids_BL)
            assert np.abs(expected_3B).max() > 1e-3
            for row, name in enumerate(MEASURES):
                # Norms and the router's softmax are float32 in the model too.
                assert damages.blocks[index][name][place] == pytest.approx(expected_3B[row], rel=1e-4, abs=1e-7)


def test_another_operator_answers_for_the_deleted_expert():
    model = random_model("olmoe", dtype=torch.float64)
    moe, ids_BL = open_model(model), random_ids(2, 9)
    scores = score_pass(moe, tokens(random_ids(4, 24, seed=5)), [OutputMoments()])
    mean_ED = scores.layers[1]["output_moments"].value().mean_ED
    damages = delete_experts(moe, tokens(ids_BL), {1: (2, 7)}, planner(moe, "constant", scores))
    with torch.inference_mode():
        dense_BLV = model(input_ids=ids_BL, use_cache=False).logits.double().numpy()
    for place, expert in enumerate((2, 7)):
        pruned_BLV = by_hand(model, ids_BL, 1, expert, renormalised=False, mean_D=mean_ED[expert])
        expected_3B = compared(dense_BLV, pruned_BLV, ids_BL)
        assert damages.blocks[1]["kl"][place] == pytest.approx(expected_3B[0], rel=1e-4)


@pytest.mark.parametrize(
    "family", ["olmoe", "deepseek_v3", "granitemoe", "deepseek_v2.groups", "gpt_oss", "nemotron_h"]
)
def test_entering_at_the_deleted_experts_layer_changes_no_bit(family):
    moe, ids_BL = opened_model(family), random_ids(4, 16)
    experts = {layer.index: (0, 11) for layer in moe.layers}
    one = delete_experts(moe, tokens(ids_BL), experts, planner(moe), batch_tokens=32)
    whole = delete_experts(moe, tokens(ids_BL), experts, planner(moe), batch_tokens=32, whole=True)
    assert one.proof.streamed
    for index in experts:
        for name in MEASURES:
            assert np.array_equal(one.blocks[index][name], whole.blocks[index][name])
            assert one.blocks[index][name].shape == (2, 4)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in moe.model.modules())
    assert not any("forward" in vars(m) for m in moe.model.modules())


def test_an_expert_that_nothing_is_routed_to_does_no_damage():
    moe = opened_model("olmoe")
    ids_BL = random_ids(1, 3)
    seen: set[int] = set()
    handles = moe.layers[1].watch_router(lambda call, _dtype: seen.update(call.index_TK.flatten().tolist()))
    with torch.inference_mode():
        moe.model(input_ids=ids_BL, use_cache=False)
    for handle in handles:
        handle.remove()
    idle = min(set(range(16)) - seen)
    scores = score_pass(moe, tokens(random_ids(4, 24)), [OutputMoments()])
    for plan_of in (planner(moe), planner(moe, "constant", scores)):
        damages = delete_experts(moe, tokens(ids_BL), {1: (idle,)}, plan_of)
        assert all(not damages.blocks[1][name].any() for name in MEASURES)


def test_what_is_finished_is_kept_and_a_larger_sample_adds_to_it(tmp_path):
    moe, ids_BL = opened_model("olmoe"), random_ids(4, 16)
    asked: list[tuple[int, int]] = []
    plan_of = planner(moe)

    def counted(index, expert):
        asked.append((index, expert))
        return plan_of(index, expert)

    def killed(index, expert):
        if index == 1:
            raise KeyboardInterrupt
        return plan_of(index, expert)

    options = {"batch_tokens": 32, "folder": tmp_path, "key": "this"}
    small = {0: (1, 4), 1: (2, 9)}
    with pytest.raises(KeyboardInterrupt):
        delete_experts(moe, tokens(ids_BL), small, killed, **options)
    finished = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(finished) == ["layer-000-batch-0000.json", "layer-000-batch-0001.json"]
    resumed = delete_experts(moe, tokens(ids_BL), small, counted, **options)
    assert asked == [(1, 2), (1, 9)]
    fresh = delete_experts(moe, tokens(ids_BL), small, plan_of, batch_tokens=32)
    for index in small:
        for name in MEASURES:
            assert np.array_equal(resumed.blocks[index][name], fresh.blocks[index][name])
    asked.clear()
    more = delete_experts(moe, tokens(ids_BL), {0: (1, 4, 7), 1: (2, 9)}, counted, **options)
    assert asked == [(0, 7)]
    assert np.array_equal(more.blocks[0]["kl"][:2], fresh.blocks[0]["kl"])
    asked.clear()
    # A file that was cut short, and one of another request, are made anew.
    (tmp_path / "layer-000-batch-0000.json").write_text('{"key": "this", "exp')
    delete_experts(moe, tokens(ids_BL), small, counted, **options)
    assert asked == [(0, 1), (0, 4)]
    asked.clear()
    delete_experts(moe, tokens(ids_BL), small, counted, **{**options, "key": "other"})
    assert len(asked) == 4
    assert all(json.loads(path.read_text())["key"] == "other" for path in tmp_path.iterdir())


def test_a_larger_sample_of_experts_holds_a_smaller_one():
    moe = opened_model("olmoe")
    small, large = (sample_experts(moe, count, None, 3) for count in (4, 9))
    assert all(len(small[index]) == 4 and set(small[index]) < set(large[index]) for index in (0, 1))
    assert small[0] != small[1]
    assert sample_experts(moe, None, [1], 0) == {1: tuple(range(16))}
    with pytest.raises(UsageError, match=r"layer 7 is no MoE layer; expected 0, 1"):
        sample_experts(moe, 4, [7], 0)
    with pytest.raises(UsageError, match="2 experts per layer are too few to rank"):
        sample_experts(moe, 2, None, 0)
    with pytest.raises(UsageError, match="17 experts per layer; in layer 0 with 16; expected 3 to 16"):
        sample_experts(moe, 17, None, 0)


def test_words_without_probability_add_nothing_and_infinite_damage_is_refused():
    dense_BLV = torch.tensor([[[0.0, 1.0, -torch.inf], [0.0, 0.0, 0.0]]])
    ids_BL = torch.tensor([[0, 1]])
    assert divergences(dense_BLV, dense_BLV, ids_BL) == pytest.approx(0)
    with pytest.raises(UsageError, match="divergence is not finite"):
        divergences(torch.zeros(1, 2, 3), dense_BLV, ids_BL)


def test_scores_are_those_that_masks_are_made_of(spec, tmp_path):
    session = Session(tmp_path)
    arm = prepare(spec(method="reap"))
    scores, mask = session.rank(arm), session.choose(arm)
    for layer in mask.layers:
        order = sorted(range(layer.experts), key=lambda e: (scores[layer.index][e], -e))
        assert layer.pruned == tuple(sorted(order[: len(layer.pruned)]))
    with pytest.raises(UsageError, match="residual-products gives experts no scores of their own"):
        session.rank(prepare(spec(method="residual-products", operator="reroute")))


def test_held_out_blocks_must_be_unseen_and_enough(spec, tmp_path):
    first, second = prepare(spec(method="reap")), prepare(spec(method="reap", draw="B"))
    deletion = prepare(spec(method="random", operator="reroute"))
    session = Session(tmp_path)
    with pytest.raises(UsageError, match="4 held-out blocks are among the calibration's; in reap"):
        score_validity(session, {"reap": (first, second)}, deletion, second.spec.calibration, blocks=2)
    held_out = CalibrationSpec(first.spec.text, 8, 32, "C")
    with pytest.raises(UsageError, match="two texts of 5 held-out blocks; expected 1 to 4"):
        score_validity(session, {"reap": (first, second)}, deletion, held_out, blocks=5)
    found = score_validity(session, {"reap": (first, second)}, deletion, held_out, blocks=2, experts=4, resamples=20)
    data = found.to_json()
    assert set(data["validity"]["reap"]) == set(MEASURES)
    halves = data["damage"]["0"]["kl"]
    blocks_NB = found.damages.blocks[0]["kl"]
    assert halves == [blocks_NB[:, :2].mean(1).tolist(), blocks_NB[:, 2:].mean(1).tolist()]
    assert len(list((tmp_path / ".cache").glob("deletions-*/layer-*.json"))) == 2
