"""Group policies, empty slots, extreme logits, and what a router without the pruned rows computes: every scoring."""

from __future__ import annotations

import math

import pytest
import torch

from prunebench import Mask
from prunebench.errors import UsageError
from prunebench.mask import LayerShape
from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.routing import (
    Convention,
    Groups,
    RouterCall,
    Scale,
    native_gates,
    native_index,
    reroute,
    scores_and_choice,
    select_survivors,
)
from prunebench.testing import random_ids, random_model

CONVENTIONS = {
    "softmax": Convention("softmax", renormalised=False, factor=6.0),
    "softmax, renorm": Convention("softmax", renormalised=True, expert_scales=True),
    "softmax, bias, floor": Convention("softmax", renormalised=True, floor=1e-12, biased=True),
    "selected softmax, native dtype": Convention("selected_softmax", renormalised=True, scores_in="logits"),
    "sigmoid, native dtype": Convention("sigmoid", renormalised=True, epsilon=1e-6, biased=True, scores_in="logits"),
    "sigmoid, no renorm": Convention("sigmoid", renormalised=False, biased=True),
    "selected sigmoid": Convention("selected_sigmoid", renormalised=False, gates_on="input"),
    "sqrtsoftplus": Convention(
        "sqrtsoftplus", renormalised=True, factor=1.5, epsilon=1e-20, biased=True, scores_in="logits"
    ),
    "sparsemixer": Convention("sparsemixer", renormalised=False, band=0.01, scores_in="logits"),
    "max of groups": Convention("softmax", renormalised=False, factor=16.0, groups=Groups(4, 2, "max")),
    "top2sum of groups": Convention(
        "sigmoid", renormalised=True, factor=2.5, epsilon=1e-20, biased=True, groups=Groups(4, 2, "top2sum")
    ),
}
BLOCKED = (0, 3, 5, 6, 8, 9, 14, 15)  # two of each group of four
K = 2


def call_of(convention: Convention, logits_TE: torch.Tensor, k: int = K, bias_E: torch.Tensor | None = None):
    experts = logits_TE.shape[1]
    if convention.biased and bias_E is None:
        bias_E = torch.randn(experts, generator=torch.Generator().manual_seed(9)) * 0.1
    scale_E = None
    if convention.expert_scales:
        scale_E = 1 + torch.randn(experts, generator=torch.Generator().manual_seed(8)) * 0.2
    return native(convention, logits_TE, k, bias_E, scale_E)


def native(convention, logits_TE, k, bias_E, scale_E):
    """The router's own call, by the replay that every model's routers are held to."""
    scores_TE, choice_TE = scores_and_choice(convention, logits_TE, bias_E)
    index_TK = native_index(convention, choice_TE, k)
    gates_TK = native_gates(convention, logits_TE, scores_TE, index_TK, scale_E)
    return RouterCall(convention, logits_TE, bias_E, index_TK, gates_TK, scale_E)


def blocked_of(ids, experts: int = 16) -> torch.Tensor:
    blocked_E = torch.zeros(experts, dtype=torch.bool)
    blocked_E[list(ids)] = True
    return blocked_E


def random_logits(tokens: int = 200, spread: float = 1.5) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(3)) * spread


def by_expert(index_TK: torch.Tensor, gates_TK: torch.Tensor, experts: int = 17) -> torch.Tensor:
    """Gates laid out by expert, so that slot order does not matter."""
    return torch.zeros(len(index_TK), experts).scatter_(1, index_TK, gates_TK.float())


@pytest.mark.parametrize("name", [name for name, c in CONVENTIONS.items() if c.loses_rows("renorm", 8)])
def test_renorm_is_what_a_router_without_the_pruned_rows_computes(name):
    convention = CONVENTIONS[name]
    call = call_of(convention, random_logits())
    index_TK, gates_TK = reroute(call, blocked_of(BLOCKED), Scale("renorm"), "reselect")
    stay = torch.tensor([e for e in range(16) if e not in BLOCKED])
    less = native(
        convention,
        call.logits_TE[:, stay],
        K,
        None if call.bias_E is None else call.bias_E[stay],
        None if call.expert_scale_E is None else call.expert_scale_E[stay],
    )
    torch.testing.assert_close(
        by_expert(index_TK, gates_TK), by_expert(stay[less.index_TK], less.gates_TK), rtol=3e-6, atol=0
    )


def test_of_a_softmax_with_a_bias_removal_would_choose_otherwise():
    convention = CONVENTIONS["softmax, bias, floor"]
    call = call_of(convention, random_logits(), bias_E=torch.linspace(-0.3, 0.3, 16))
    ours_TK, _ = reroute(call, blocked_of(BLOCKED), Scale("renorm"))
    stay = torch.tensor([e for e in range(16) if e not in BLOCKED])
    less = native(convention, call.logits_TE[:, stay], K, call.bias_E[stay], None)
    assert (ours_TK.sort().values != stay[less.index_TK].sort().values).any()
    choice_TE = scores_and_choice(convention, call.logits_TE, call.bias_E)[1].masked_fill(
        blocked_of(BLOCKED), -torch.inf
    )
    assert torch.equal(ours_TK.sort().values, choice_TE.topk(K).indices.sort().values), "the rule: the unpruned p + b"


@pytest.mark.parametrize("scale", ["keep", "renorm", "interp:0.5", "ref:3"])
@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("policy", ["frozen", "reselect"])
def test_with_nothing_blocked_the_routers_own_gates_come_back(name, scale, policy):
    convention = CONVENTIONS[name]
    scale = Scale.parse(scale) if scale != "ref:3" else Scale("ref", k2=K)
    call = call_of(convention, random_logits())
    if scale.kind not in convention.scales:
        with pytest.raises(UsageError, match="is not defined for routers of the kind: sparsemixer; expected renorm"):
            reroute(call, blocked_of(()), scale)
        return
    index_TK, gates_TK = reroute(call, blocked_of(()), scale, policy)
    assert torch.equal(index_TK, call.index_TK)
    assert torch.equal(gates_TK, call.gates_TK)


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [1.0, 60.0, 1000.0])
def test_extreme_logits_never_give_a_number_that_is_none(name, dtype, spread):
    convention = CONVENTIONS[name]
    call = call_of(convention, random_logits(spread=spread).to(dtype))
    for scale in convention.scales:
        chosen = Scale(scale, alpha=0.5, k2=3)
        for policy in ("frozen", "reselect"):
            index_TK, gates_TK = reroute(call, blocked_of(BLOCKED), chosen, policy)
            assert torch.isfinite(gates_TK).all()
            assert not blocked_of((*BLOCKED,), 17)[index_TK].any()
            assert all(len(set(row)) == len(row) for row in index_TK.tolist())


@pytest.mark.parametrize("name", [name for name, c in CONVENTIONS.items() if c.groups is None])
@pytest.mark.parametrize("left", [1, 0])
def test_slots_that_nobody_is_left_for_are_empty(name, left):
    convention = CONVENTIONS[name]
    call = call_of(convention, random_logits())
    for scale in convention.scales[:2]:
        index_TK, gates_TK = reroute(call, blocked_of(range(16 - left)), Scale(scale))
        assert ((index_TK == 16).sum(-1) == K - left).all()
        assert ((index_TK == 15).sum(-1) == left).all()
        assert torch.isfinite(gates_TK).all()
        assert (gates_TK[index_TK == 16] == 0).all()
        if left and scale == "renorm" and convention.renormalised and not convention.expert_scales:
            alone_T = gates_TK[index_TK == 15].float()
            torch.testing.assert_close(alone_T, torch.full((200,), convention.factor), rtol=1e-4, atol=0)


# ------------------------------------------------------------------------------------------------ by hand

MAX = Convention("softmax", renormalised=False, groups=Groups(3, 1, "max"))


def test_frozen_keeps_the_unpruned_routers_groups_and_reselect_chooses_anew():
    logits_TE = torch.tensor([[5.0, 1.0, 4.0, 3.0, 2.0, 2.5]])
    call = call_of(MAX, logits_TE)
    assert call.index_TK.tolist() == [[0, 1]]
    p = torch.softmax(logits_TE[0].double(), 0)
    index_TK, gates_TK = reroute(call, blocked_of([0], 6), Scale("renorm"), "frozen")
    assert index_TK.tolist() == [[6, 1]]
    assert gates_TK.tolist()[0] == pytest.approx([0.0, float(p[1] / (1 - p[0]))], rel=1e-6)
    index_TK, gates_TK = reroute(call, blocked_of([0], 6), Scale("renorm"), "reselect")
    assert index_TK.tolist() == [[2, 3]]
    assert gates_TK.tolist()[0] == pytest.approx([float(p[e] / (1 - p[0])) for e in (2, 3)], rel=1e-6)


def test_members_of_d_whose_group_lost_leave_their_slots_and_the_others_stay():
    convention = Convention("softmax", renormalised=False, groups=Groups(3, 2, "max"))
    # Groups 0 and 1 are kept; without expert 0, group 2 beats what is left of group 0.
    call = call_of(convention, torch.tensor([[5.0, 1.0, 4.0, 0.0, 2.0, 2.5]]), k=3)
    assert call.index_TK.tolist() == [[0, 2, 1]]
    assert reroute(call, blocked_of([0], 6), Scale("keep"), "frozen")[0].tolist() == [[3, 2, 1]]
    assert reroute(call, blocked_of([0], 6), Scale("keep"), "reselect")[0].tolist() == [[5, 2, 4]]


def test_a_lone_survivor_scores_its_group_alone_and_an_empty_group_cannot_be_chosen():
    convention = Convention("sigmoid", renormalised=True, groups=Groups(2, 1, "top2sum"))
    logit = [math.log(p / (1 - p)) for p in (0.9, 0.8, 0.5, 0.45)]
    call = call_of(convention, torch.tensor([logit]))
    assert call.index_TK.tolist() == [[0, 1]]
    # .9 alone loses against .5 + .45, and wins against .5 alone.
    assert reroute(call, blocked_of([1], 4), Scale("renorm"), "reselect")[0].tolist() == [[2, 3]]
    assert reroute(call, blocked_of([1, 3], 4), Scale("renorm"), "reselect")[0].tolist() == [[0, 4]]
    assert reroute(call, blocked_of([0, 1], 4), Scale("renorm"), "reselect")[0].tolist() == [[2, 3]]
    # With negative choices too: an empty group counts as -inf, not as zero.
    biased = Convention("sigmoid", renormalised=True, biased=True, groups=Groups(2, 1, "top2sum"))
    call = call_of(biased, torch.tensor([logit]), bias_E=torch.full((4,), -3.0))
    assert reroute(call, blocked_of([0, 1], 4), Scale("renorm"), "reselect")[0].tolist() == [[2, 3]]


def test_a_group_chosen_anew_may_hold_better_experts_than_a_member_of_d():
    convention = Convention("softmax", renormalised=False, groups=Groups(3, 2, "top2sum"))
    # Groups 0 and 1 win by their sums; without expert 3, group 2 takes the place of group 1, and 4 beats 1.
    p = torch.tensor([[0.30, 0.08, 0.16, 0.20, 0.15, 0.11]])
    call = call_of(convention, p.log())
    assert call.index_TK.tolist() == [[0, 3]]
    assert reroute(call, blocked_of([3], 6), Scale("keep"), "reselect")[0].tolist() == [[0, 4]]
    call = call_of(convention, p.log(), k=3)
    assert call.index_TK.tolist() == [[0, 3, 2]]
    assert reroute(call, blocked_of([3], 6), Scale("keep"), "frozen")[0].tolist() == [[0, 1, 2]]
    assert reroute(call, blocked_of([3], 6), Scale("keep"), "reselect")[0].tolist() == [[0, 4, 5]]
    four = call_of(convention, torch.tensor([[0.30, 0.08, 0.16, 0.20, 0.15, 0.11]]).log(), k=4)
    assert reroute(four, blocked_of([3], 6), Scale("keep"), "reselect")[0].tolist() == [[0, 4, 5, 1]]


@pytest.mark.parametrize("policy", ["frozen", "reselect"])
def test_ties_go_to_the_lowest_id_among_the_promoted_and_d_keeps_its_order(policy):
    convention = Convention("sigmoid", renormalised=True, groups=Groups(2, 1, "top2sum"))
    call = RouterCall(convention, torch.zeros(1, 12), None, torch.tensor([[4, 1, 5]]), torch.full((1, 3), 1 / 3))
    selection = select_survivors(call, blocked_of([1, 7], 12), policy)
    assert selection.index_TK.tolist() == [[4, 0, 5]]


SHAPES = (LayerShape(0, 8, 4, 4, 2),)


@pytest.mark.parametrize(
    ("pruned", "frozen", "reselect"),
    [
        ((), True, True),
        ((0, 2), False, False),  # 1, 1, 2, 2: the two smallest groups hold two
        ((0, 1, 2, 3), False, True),  # 0, 0, 2, 2: the empty ones cannot be chosen
        ((0, 1), False, True),
        ((0,), False, False),
        ((0, 1, 2, 3, 4), False, False),
    ],
)
def test_masks_that_leave_too_little_are_refused_under_the_policy_in_force(pruned, frozen, reselect):
    mask = Mask.for_shapes(SHAPES, {0: pruned})
    for policy, fine in (("frozen", frozen), ("reselect", reselect)):
        if fine:
            mask.check_fits(SHAPES, policy=policy)
        else:
            with pytest.raises(UsageError, match=r"the mask leaves \d experts; in mask, layer 0, .*router group"):
                mask.check_fits(SHAPES, policy=policy)


@pytest.mark.parametrize(
    ("groups", "experts", "k", "reason"),
    [
        (Groups(4, 2, "max"), 10, 2, "10 experts in 4 router groups; in here; expected a multiple of the groups"),
        (Groups(8, 4, "top2sum"), 8, 2, "router groups of 1 expert; in here; expected at least 2"),
        (Groups(4, 5, "max"), 8, 2, "5 kept router groups of 4"),
        (Groups(4, 1, "max"), 8, 3, "top-3 from 1 router groups of 2 experts"),
    ],
)
def test_groups_that_cannot_work_are_refused_by_name(groups, experts, k, reason):
    with pytest.raises(UsageError) as info:
        groups.check(experts, k, where="here")
    assert reason in str(info.value)


def test_groups_of_one_expert_work_where_the_best_scores_its_group():
    moe = open_model(random_model("deepseek_v2.groups", experts=8, top_k=2, n_group=8, topk_group=4))
    assert moe.convention.groups == Groups(8, 4, "max")
    with pytest.raises(UsageError, match=r"10 experts in 4 router groups; in model.layers.1.mlp"):
        random_and_open("deepseek_v3.groups", experts=10)
    with pytest.raises(UsageError, match=r"router groups of 1 expert; in model.layers.1.mlp"):
        random_and_open("deepseek_v3.groups", experts=8, top_k=2, n_group=8)


def random_and_open(family, **options):
    return open_model(random_model(family, **options))


# ------------------------------------------------------------------------------------------------ in models


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["deepseek_v2.groups", "deepseek_v3.groups"])
def test_empty_slots_add_nothing_send_no_row_and_are_counted(family, kernel):
    moe = open_model(random_model(family, experts_implementation=kernel))
    pruned = tuple(e for e in range(16) if e not in {1, 6, 7, 11, 14})
    programs = {x.index: LayerProgram(pruned, scale=Scale("keep"), policy="frozen") for x in moe.layers}
    with torch.inference_mode(), Instrument(moe, programs) as instrument:
        logits = moe.model(input_ids=random_ids(), use_cache=False).logits
    assert torch.isfinite(logits).all()
    counted = instrument.counters[1].read()
    assert counted["slots"] == 4 * 96
    assert 0 < counted["empty"] < counted["slots"]
    assert counted["reached_pruned"] == 0


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm", "batched_mm"])
def test_a_model_without_any_survivor_runs_its_shared_experts_alone(kernel):
    moe = open_model(random_model("deepseek_v3", experts_implementation=kernel))
    layer = moe.layers[0]
    block, hidden = layer.block, torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    programs = {x.index: LayerProgram(tuple(range(16)), scale=Scale("renorm")) for x in moe.layers}
    outputs = []
    handle = block.register_forward_hook(lambda _m, args, out: outputs.append((args[0], out)))
    with torch.inference_mode(), Instrument(moe, programs) as instrument:
        moe.model(inputs_embeds=hidden, use_cache=False)
        (seen, out) = outputs[0]
        torch.testing.assert_close(out, block.shared_experts(seen), rtol=0, atol=0)
    handle.remove()
    assert instrument.counters[1].empty == 4 * 10
