"""Rerouting on real router calls of every family, against a per-token float64 oracle; ties, groups, extreme logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prunebench.errors import UsageError
from prunebench.moe import open_model
from prunebench.routing import (
    Convention,
    Groups,
    RouterCall,
    Scale,
    native_gates,
    native_index,
    reroute,
    scores_and_choice,
)
from prunebench.testing import CORE, random_ids, random_model

SCALES = ["keep", "renorm", "interp:0", "interp:0.3", "interp:1", "ref:2", "ref:4", "ref:8"]
CONVENTIONS = {
    "softmax": Convention("softmax", renormalised=False),
    "softmax, renorm": Convention("softmax", renormalised=True),
    "selected": Convention("selected_softmax", renormalised=True),
    "sigmoid": Convention("sigmoid", renormalised=True, factor=2.446, epsilon=1e-20, biased=True),
}


def blocked(experts: int, ids: tuple[int, ...]) -> torch.Tensor:
    flags_E = torch.zeros(experts, dtype=torch.bool)
    flags_E[list(ids)] = True
    return flags_E


def call_of(convention: Convention, logits_TE: torch.Tensor, k: int, bias_E: torch.Tensor | None = None) -> RouterCall:
    if convention.biased and bias_E is None:
        bias_E = torch.zeros(logits_TE.shape[1])
    scores_TE, choice_TE = scores_and_choice(convention, logits_TE, bias_E)
    index_TK = native_index(convention, choice_TE, k)
    gates_TK = native_gates(convention, logits_TE, scores_TE, index_TK)
    return RouterCall(convention, logits_TE, bias_E, index_TK, gates_TK)


@pytest.fixture(scope="module", params=CORE)
def family(request):
    return request.param


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def traced(request, oracle, family):
    """Every layer's router call on the same tokens."""
    moe = open_model(random_model(family, dtype=request.param))
    with torch.inference_mode(), oracle.Trace(moe.layers) as trace:
        moe.model(input_ids=random_ids(2, 24))
    return [(layer, layer.call_of(trace.router[layer.index][0])) for layer in moe.layers]


@pytest.mark.parametrize("scale", SCALES)
def test_experts_slots_and_gates_are_those_of_the_equations(oracle, family, traced, scale):
    # Two of each group of four go, so that grouped routers can fill their slots; more would be refused as a mask.
    pruned = (0, 3, 5, 6, 8, 9, 14, 15)
    rule = oracle.ROUTERS[family]
    for layer, call in traced:
        index_TK, gates_TK = reroute(call, blocked(16, pruned), Scale.parse(scale))
        wanted_TK, wanted_gates_TK = oracle.route(
            rule, oracle.array(call.logits_TE), oracle.bias_of(layer.router), call.index_TK.numpy(), set(pruned), scale
        )
        np.testing.assert_array_equal(index_TK.numpy(), wanted_TK)
        assert gates_TK.dtype == call.gates_TK.dtype
        # A gate in bfloat16 is within half a unit in the last place; the router's own gates are float32 computations.
        eps = torch.finfo(gates_TK.dtype).eps
        np.testing.assert_allclose(oracle.array(gates_TK), wanted_gates_TK, rtol=4e-6 if eps < 1e-6 else eps)


@pytest.mark.parametrize("scale", SCALES)
def test_no_pruned_expert_is_chosen_and_none_twice_and_survivors_keep_their_slots(traced, scale):
    blocked_E = blocked(16, (1, 2, 4, 7, 10, 11, 12, 13))
    for _layer, call in traced:
        index_TK, gates_TK = reroute(call, blocked_E, Scale.parse(scale))
        assert not blocked_E[index_TK].any()
        assert all(len(set(row)) == len(row) for row in index_TK.tolist())
        survives_TK = ~blocked_E[call.index_TK]
        assert torch.equal(index_TK[survives_TK], call.index_TK[survives_TK])
        assert torch.isfinite(gates_TK.float()).all()
        if scale == "keep":
            assert torch.equal(gates_TK[survives_TK], call.gates_TK[survives_TK])


@pytest.mark.parametrize("scale", ["keep", "renorm", "interp:0.3", "interp:0.5"])
def test_with_nothing_blocked_the_call_is_the_routers_own_bit_for_bit(traced, scale):
    for _layer, call in traced:
        index_TK, gates_TK = reroute(call, blocked(16, ()), Scale.parse(scale))
        assert torch.equal(index_TK, call.index_TK)
        assert torch.equal(gates_TK, call.gates_TK)


def test_a_token_whose_choice_held_no_pruned_expert_keeps_its_gates_where_that_is_the_rule(traced):
    blocked_E = blocked(16, (0, 1, 4, 5))
    for layer, call in traced:
        untouched_T = ~blocked_E[call.index_TK].any(-1)
        if layer.convention.renormalised:
            for scale in ("keep", "renorm", "interp:0.5"):
                _, gates_TK = reroute(call, blocked_E, Scale.parse(scale))
                assert torch.equal(gates_TK[untouched_T], call.gates_TK[untouched_T])


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=CONVENTIONS)
@pytest.mark.parametrize("scale", ["keep", "renorm", "interp:0.5", "ref:2"])
def test_ties_among_promoted_experts_go_to_the_lowest_id(convention, scale):
    logits_TE = torch.tensor([[5.0, 4.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]])
    call = call_of(convention, logits_TE, 3)
    call = RouterCall(convention, logits_TE, call.bias_E, torch.tensor([[0, 1, 7]]), call.gates_TK)
    index_TK, _ = reroute(call, blocked(8, (0, 2, 7)), Scale.parse(scale))
    assert index_TK.tolist() == [[3, 1, 4]], "holes are filled in slot order, best choice first"


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=CONVENTIONS)
def test_all_logits_equal_still_fills_every_slot(convention):
    call = call_of(convention, torch.zeros(3, 8), 4)
    index_TK, gates_TK = reroute(call, blocked(8, (2, 4, 5, 6)), Scale("renorm"))
    assert [sorted(row) for row in index_TK.tolist()] == [[0, 1, 3, 7]] * 3
    assert torch.isfinite(gates_TK).all()


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=CONVENTIONS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("logit", [30.0, 100.0, 3e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_stay_finite_where_the_retained_scores_underflow(convention, scale, logit, dtype):
    logits_TE = torch.full((2, 16), -logit, dtype=dtype)
    logits_TE[:, :4] = logit
    logits_TE[1, 8:10] = 0.0
    call = call_of(convention, logits_TE, 4)
    index_TK, gates_TK = reroute(call, blocked(16, (0, 1, 2, 3)), Scale.parse(scale))
    assert torch.isfinite(gates_TK).all()
    assert (gates_TK >= 0).all()
    assert index_TK[0].tolist() == [4, 5, 6, 7]
    assert index_TK[1].tolist()[:2] == [8, 9]
    if scale in ("renorm", "interp:1") and convention.score != "sigmoid":
        # A softmax over what is left knows nothing of the pruned scores, however large.
        left = torch.softmax(logits_TE[:, 4:].double(), dim=-1).gather(1, index_TK - 4)
        if convention.renormalised:
            left = left / left.sum(-1, keepdim=True)
        torch.testing.assert_close(gates_TK.double(), left, rtol=1e-6, atol=1e-12)


def test_renorm_of_a_softmax_is_the_softmax_over_the_retained_logits():
    logits_TE = torch.randn(64, 16, generator=torch.Generator().manual_seed(3)) * 4
    call = call_of(CONVENTIONS["softmax"], logits_TE, 4)
    blocked_E = blocked(16, tuple(range(0, 16, 2)))
    index_TK, gates_TK = reroute(call, blocked_E, Scale("renorm"))
    smaller_TR = torch.softmax(logits_TE.double()[:, 1::2], dim=-1)
    torch.testing.assert_close(gates_TK.double(), smaller_TR.gather(1, index_TK // 2), rtol=1e-6, atol=0)


def test_independent_sigmoids_without_renormalisation_have_one_arm():
    convention = Convention("sigmoid", renormalised=False)
    call = call_of(convention, torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), 2)
    ends = [reroute(call, blocked(8, (0, 1, 2)), Scale(kind))[1] for kind in ("keep", "renorm")]
    assert torch.equal(*ends)


@pytest.mark.parametrize("how", ["max", "top2sum"])
def test_groups_are_those_the_unpruned_router_chose(oracle, how):
    convention = Convention(
        "softmax" if how == "max" else "sigmoid",
        renormalised=how != "max",
        biased=how != "max",
        groups=Groups(4, 2, how),
    )
    rule = oracle.Router(convention.score, convention.renormalised, groups=(4, 2, how))
    logits_TE = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)) * 2
    bias_E = torch.randn(16, generator=torch.Generator().manual_seed(2)) * 0.2 if convention.biased else None
    call = call_of(convention, logits_TE, 4, bias_E)
    # The best experts of each group go: reselection would move to other groups.
    pruned = (0, 1, 4, 5, 8, 9, 12, 13)
    index_TK, _ = reroute(call, blocked(16, pruned), Scale("keep"))
    choice_TE = oracle.choices(rule, logits_TE.numpy(), oracle.array(bias_E))
    for t, row in enumerate(index_TK.tolist()):
        kept = oracle.eligible(rule, choice_TE[t])
        assert set(row) <= kept
        assert set(row) == kept - set(pruned), "four survivors are left in two groups"


@pytest.mark.parametrize(
    "text",
    ["", "Keep", "interp", "interp:", "interp:1.1", "interp:-0.1", "interp:1.2.3", "interp:nan", "interp:inf", "ref",
     "ref:", "ref:0", "ref:-1", "ref:2.5", "drop", "keep ", "renorm:1"],
)  # fmt: skip
def test_an_unknown_scale_is_refused_with_the_list(text):
    with pytest.raises(
        UsageError, match=r"unknown scale .*expected trained, other, keep, renorm, interp:α .* or ref:k2"
    ) as info:
        Scale.parse(text)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "text",
    [
        "trained",
        "other",
        "keep",
        "renorm",
        "interp:0",
        "interp:1",
        "interp:0.5",
        "interp:0.123456789",
        "interp:0.00001",
        "ref:1",
        "ref:64",
    ],
)
def test_a_scale_is_the_same_after_it_was_written_and_read(text):
    scale = Scale.parse(text)
    assert Scale.parse(str(scale)) == scale


def test_an_unresolved_scale_is_refused():
    call = call_of(CONVENTIONS["softmax"], torch.randn(2, 8), 2)
    with pytest.raises(UsageError, match="scale trained is not resolved"):
        reroute(call, blocked(8, (0,)), Scale("trained"))
