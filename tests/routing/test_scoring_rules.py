"""D, S and the gates of every arm are those of the definitions, on logits and biases chosen to hurt.

Each model's own router computes the logits, D and the unpruned gates; `definitions.py` says, token by token in decimals
of 200 digits, which D is possible and what S and the gates must be.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from prunebench.errors import UsageError
from prunebench.routing import Scale, reroute

K = 4
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
FAMILIES = [
    *("olmoe", "jamba", "deepseek_v2", "deepseek_v2.groups", "qwen3_moe", "mixtral", "hunyuan_v1_moe", "granitemoe"),
    *("gpt_oss", "gemma4", "ernie4_5_moe", "longcat_flash", "deepseek_v3", "deepseek_v3.groups", "bailing_hybrid"),
    *("nemotron_h", "glm4_moe_lite", "dots1.no_renorm", "hy_v3", "afmoe", "minimax_m2", "lfm2_moe"),
    *("lfm2_moe.no_bias", "deepseek_v4", "llama4"),
]
BIASED = [
    *("ernie4_5_moe", "longcat_flash", "deepseek_v3", "deepseek_v3.groups", "bailing_hybrid", "nemotron_h"),
    *("glm4_moe_lite", "dots1.no_renorm", "hy_v3", "afmoe", "minimax_m2", "lfm2_moe", "deepseek_v4"),
]
CASES = [(family, dtype) for family in FAMILIES for dtype in (FLOAT32, BFLOAT16)]
SCALES = ["keep", "renorm", "interp:0", "interp:0.3", "interp:1", "ref:2", "ref:4", "ref:7"]
# Two of each group of four, so that any two groups hold k survivors.
HALF = frozenset({0, 3, 5, 6, 8, 9, 14, 15})
EXTREMES = {
    "none": lambda e: 0.0 * e,
    "small": lambda e: (e - 5.0) / 64,
    "around eight": lambda e: 8.0 + ((7 * e) % 16 - 8.0) / 160,
    "huge on the pruned": lambda e: 100.0 * (e in HALF),
    "huge on survivors": lambda e: -100.0 * (e in HALF) - 3.0,
}


def tokens(choices: int) -> torch.Tensor:
    """Rows of logits, on a grid that bfloat16 holds exactly, so that equal logits are equal scores in every dtype."""
    random = torch.Generator().manual_seed(5)
    some = (torch.randn(12, choices, generator=random) * 16).round() / 8
    negative = -(torch.rand(4, choices, generator=random) * 64).round() / 8 - 1
    ties = torch.randint(-1, 2, (6, choices), generator=random).float()
    equal = torch.full((1, choices), -0.5)
    pruned = torch.tensor([e in HALF for e in range(choices)])
    # All of D is pruned; what is left underflows.
    below = torch.arange(choices) % 5
    gone = torch.where(pruned, 4 - torch.arange(choices) % 3, -150.0 - below)[None]
    deep = torch.where(torch.arange(choices) % 6 == 1, 1.0, -200.0 - below)[None]
    peaked = torch.where(torch.arange(choices) == 3, 30.0, -2.0 - below / 2)[None]
    return torch.cat([some, negative, ties, equal, gone, deep, peaked])


def flags(choices: int, blocked: frozenset[int]) -> torch.Tensor:
    return torch.tensor([e in blocked for e in range(choices)])


def told(definitions, rule, call):
    """The tokens of a call, as the definitions see them."""
    bias = None if call.bias_E is None else call.bias_E.tolist()
    scale = None if call.expert_scale_E is None else call.expert_scale_E.tolist()
    name = str(call.logits_TE.dtype).removeprefix("torch.")
    return [definitions.token(rule, row, bias, dtype=name, scale=scale) for row in call.logits_TE.tolist()]


def tolerance(rule, call):
    """Relative.

    Where the model stores gates in bfloat16, half a unit in the last place is 2^-9; where its scores are bfloat16 too,
    its own gates, which keep returns, went through roundings of each score, of the sum of four and of the quotient.
    """
    if call.gates_TK.dtype is FLOAT32:
        return 1e-6
    return 2.0**-6 if rule.own_dtype else 2.0**-8


def check(definitions, rule, call, blocked, scale, *, policy="frozen"):
    """Compare one call; returns how many tokens were compared."""
    choices = call.logits_TE.shape[1]
    index_TK, gates_TK = reroute(call, flags(choices, blocked), Scale.parse(scale), policy)
    assert gates_TK.dtype == call.gates_TK.dtype
    compared = 0
    for t, row in enumerate(told(definitions, rule, call)):
        dense = call.index_TK[t].tolist()
        among = definitions.eligible(row, blocked if policy == "reselect" else frozenset())
        if among is None or definitions.eligible(row) is None:
            continue  # tied groups: the router may keep either
        compared += 1
        wanted = definitions.survivors(row, dense, blocked, among, policy=policy)
        assert index_TK[t].tolist() == wanted, (t, row.ranked)
        z = definitions.normaliser(row, dense, wanted, blocked, among, scale)
        np.testing.assert_allclose(
            gates_TK[t].double().numpy(),
            definitions.gates(row, wanted, z),
            rtol=tolerance(rule, call),
            atol=definitions.smallest(row, z),
            err_msg=f"token {t}, D {dense}",
        )
    return compared


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_the_models_own_router_chooses_and_weighs_as_defined(definitions, own_router, family, dtype):
    router, rule = own_router(family, dtype), definitions.ROUTERS[family]
    choices = router.choices
    assert choices == 16 + rule.identities
    if rule.bias:
        router.set_bias(torch.tensor([EXTREMES["small"](e) for e in range(choices)]))
    call = router(tokens(choices))
    own_E = router.router.bias if family == "gpt_oss" else torch.zeros(choices)
    assert torch.equal(call.logits_TE.float(), (tokens(choices).to(own_E.dtype) + own_E).float())
    assert call.gates_TK.dtype == (dtype if rule.gates_in_model_dtype else FLOAT32)
    for t, row in enumerate(told(definitions, rule, call)):
        dense = call.index_TK[t].tolist()
        assert definitions.is_top(row, dense, 1e-6), (t, dense, row.ranked)
        z = definitions.normaliser(row, dense, dense, frozenset(), set(row.experts), "keep")
        np.testing.assert_allclose(
            call.gates_TK[t].double().numpy(),
            definitions.gates(row, dense, z),
            rtol=tolerance(rule, call),
            atol=definitions.smallest(row, z),
        )


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_with_half_of_the_experts_gone_experts_and_gates_are_those_of_the_definitions(
    definitions, own_router, family, dtype
):
    router, rule = own_router(family, dtype), definitions.ROUTERS[family]
    if rule.bias:
        router.set_bias(torch.tensor([EXTREMES["small"](e) for e in range(router.choices)]))
    call = router(tokens(router.choices))
    for scale in SCALES:
        compared = check(definitions, rule, call, HALF, scale)
        assert compared >= (14 if rule.groups else len(call.logits_TE))


@pytest.mark.parametrize("bias", EXTREMES)
@pytest.mark.parametrize("family", BIASED)
def test_extreme_biases_choose_as_defined_and_never_weigh(definitions, own_router, family, bias):
    router, rule = own_router(family), definitions.ROUTERS[family]
    router.set_bias(torch.tensor([EXTREMES[bias](e) for e in range(router.choices)]))
    call = router(tokens(router.choices))
    # Without an epsilon, a D whose scores all underflow has no gates: 0/0 in the model itself.
    defined_T = torch.isfinite(call.gates_TK).all(-1)
    assert defined_T.all() or family == "minimax_m2"
    call = type(call)(
        call.convention, call.logits_TE[defined_T], call.bias_E, call.index_TK[defined_T], call.gates_TK[defined_T]
    )
    for row, dense in zip(told(definitions, rule, call), call.index_TK.tolist(), strict=True):
        assert definitions.is_top(row, dense, 1e-6)
    for scale in ("keep", "renorm", "interp:0.3", "ref:6"):
        assert check(definitions, rule, call, HALF, scale) >= 12


@pytest.mark.parametrize("survivors", [4, 3, 1, 0])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_few_experts_left_the_rest_of_the_slots_is_empty(definitions, own_router, family, survivors):
    router, rule = own_router(family), definitions.ROUTERS[family]
    if rule.bias:
        router.set_bias(torch.tensor([EXTREMES["small"](e) for e in range(router.choices)]))
    call = router(tokens(router.choices))
    left = {2, 7, 11, 13} if survivors == 4 else set((7, 2, 11)[:survivors])
    blocked = frozenset(set(range(router.choices)) - left)
    for scale in ("keep", "renorm", "interp:0.3"):
        index_TK, gates_TK = reroute(call, flags(router.choices, blocked), Scale.parse(scale))
        assert torch.isfinite(gates_TK).all()
        assert (gates_TK[index_TK == router.choices] == 0).all()
        assert check(definitions, rule, call, blocked, scale)


@pytest.mark.parametrize("family", ["deepseek_v2.groups", "deepseek_v3.groups", "bailing_hybrid"])
@pytest.mark.parametrize(
    "blocked",
    [
        *(HALF, frozenset({0, 1, 2, 3, 5, 6, 7, 9}), frozenset(range(12)), frozenset({0, 1, 2, 4, 8, 9, 10, 11})),
        # Three and four are left in a group: new groups may hold better experts than members of D.
        *(frozenset({0, 5, 10, 15}), frozenset({3, 4, 12}), frozenset({8, 9})),
    ],
)
def test_groups_chosen_anew_are_chosen_among_the_survivors(definitions, own_router, family, blocked):
    router, rule = own_router(family), definitions.ROUTERS[family]
    if rule.bias:
        # Some choices are negative: a lone survivor scores its group alone, and may lose it for that.
        router.set_bias(torch.tensor([(e % 7 - 5.0) / 8 for e in range(router.choices)]))
    call = router(tokens(router.choices))
    for scale in ("keep", "renorm", "interp:0.3", "ref:3"):
        assert check(definitions, rule, call, blocked, scale, policy="reselect") >= 12


@pytest.mark.parametrize("norm_min", [1e-12, 0.2, 0.9])
def test_ernies_sum_counts_for_at_least_the_configured_minimum(definitions, own_router, norm_min):
    router = own_router("ernie4_5_moe", moe_norm_min=norm_min)
    rule = dataclasses.replace(definitions.ROUTERS["ernie4_5_moe"], at_least=norm_min)
    router.set_bias(torch.tensor([EXTREMES["huge on survivors"](e) for e in range(router.choices)]))
    call = router(tokens(router.choices))
    below = [t for t in told(definitions, rule, call) if sum(sorted(t.p)[-4:]) < norm_min]
    assert (len(below) > 0) == (norm_min == 0.9), "the minimum is in force for some tokens, and not for all"
    for scale in SCALES:
        check(definitions, rule, call, HALF, scale)


def test_longcats_identity_experts_stay_and_count_in_the_softmax(own_router):
    router = own_router("longcat_flash")
    router.set_bias(torch.zeros(router.choices))
    call = router(tokens(router.choices))
    everybody = flags(router.choices, frozenset(range(16)))
    index_TK, gates_TK = reroute(call, everybody, Scale("renorm"))
    assert ((index_TK >= 16) & (index_TK < 22)).all()
    left_TE = torch.softmax(call.logits_TE[:, 16:].double(), dim=-1)
    torch.testing.assert_close(gates_TK.double(), 6.0 * left_TE.gather(1, index_TK - 16), rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("blocked", [HALF, frozenset(), frozenset(range(14)), frozenset({3, 15})])
@pytest.mark.parametrize("band", [0.01, 0.25])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_sparsemixer_runs_again_among_the_survivors(definitions, own_router, dtype, band, blocked):
    router = own_router("phimoe", dtype, router_jitter_noise=band)
    logits_TE = tokens(router.choices)
    call = router(logits_TE)
    index_TK, gates_TK = reroute(call, flags(router.choices, blocked), Scale("renorm"))
    live = [e for e in range(router.choices) if e not in blocked]
    for t, row in enumerate(logits_TE.tolist()):
        wanted = {live[e]: gate for e, gate in definitions.sparsemixer([row[e] for e in live], band)}
        got = dict(zip(index_TK[t].tolist(), gates_TK[t].double().tolist(), strict=True))
        assert sorted(row[e] for e in got) == sorted(row[e] for e in wanted)
        # Of two that tie for the second slot either is right; its gate is the same.
        assert sorted(got.values()) == pytest.approx(sorted(wanted.values()), rel=1e-6 if dtype is FLOAT32 else 2.0**-8)
        best = sorted((row[e] for e in live), reverse=True)[:3]
        if len(set(best)) == len(best):
            assert got == pytest.approx(wanted, rel=1e-6 if dtype is FLOAT32 else 2.0**-8)
        if not blocked:
            assert call.gates_TK[t].double().tolist() == pytest.approx(list(wanted.values()), rel=2.0**-8)


@pytest.mark.parametrize("left", [(0,), (5,), ()])
def test_sparsemixer_with_one_expert_left_gives_it_one_slot_and_gate_one(own_router, left):
    router = own_router("phimoe")
    call = router(tokens(router.choices))
    blocked = frozenset(range(router.choices)) - set(left)
    index_TK, gates_TK = reroute(call, flags(router.choices, blocked), Scale("renorm"))
    for experts, gates in zip(index_TK.tolist(), gates_TK.tolist(), strict=True):
        assert sorted(experts) == sorted([*left, router.choices, router.choices][:2])
        assert sorted(gates) == [0.0, float(len(left))]


@pytest.mark.parametrize("scale", ["keep", "interp:0.5", "ref:2"])
def test_no_other_scale_is_defined_for_sparsemixer(own_router, scale):
    with pytest.raises(UsageError, match="not defined"):
        Scale.parse(scale).resolve(own_router("phimoe").layer.convention)
