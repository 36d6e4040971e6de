"""A model's own router with the pruned rows cut out computes renorm, for all families but two, whose theory says no.

The routers are cut by hand: every tensor with one entry per choice loses those of the pruned experts. No table of
prunebench's is asked what to cut.
"""

from __future__ import annotations

import pytest
import torch

from prunebench.routing import Scale, reroute
from prunebench.testing import FAMILIES

# Two of each group of four.
PRUNED = (0, 3, 5, 6, 8, 9, 14, 15)
GROUPED = ("deepseek_v2.groups", "deepseek_v3.groups", "bailing_hybrid")
# A bias added to a softmax: cutting rows rescales p and leaves the bias as it is.
COUPLED = ("ernie4_5_moe", "longcat_flash")
PLAIN = [family for family in FAMILIES if family not in (*GROUPED, *COUPLED)]
NOT_RENORMALISED = ("olmoe", "deepseek_v2", "flex_olmo", "qwen2_moe", "jamba")
ONE_SCALE = ("dots1.no_renorm", "llama4")


def prepared(own_router, family, dtype=torch.float32, *, bias=0.1):
    router = own_router(family, dtype)
    if router.layer.bias_E is not None:
        router.set_bias(torch.randn(router.choices, generator=torch.Generator().manual_seed(3)) * bias)
    return router


def logits(family: str, choices: int, dtype=torch.float32, tokens: int = 64) -> torch.Tensor:
    """Without ties: shuffled grids, which are exact in bfloat16, close and wide; in float32 Gaussian numbers too."""
    random = torch.Generator().manual_seed(4)
    order = torch.rand(tokens, choices, generator=random).argsort(dim=1).float()
    # GPT-OSS adds a bias of up to a quarter, which must not make ties.
    close = (order - choices / 2) / (1 if family == "gpt_oss" else 4)
    if dtype is torch.bfloat16:
        return close
    return torch.cat([close[:8], order[8:16] * 2.5 - 20, torch.randn(tokens, choices, generator=random)])


def blocked(choices: int, pruned=PRUNED) -> torch.Tensor:
    return torch.isin(torch.arange(choices), torch.tensor(pruned))


def as_dense(index_TK, gates_TK, choices: int) -> torch.Tensor:
    """Gates by expert; 0 where none."""
    return torch.zeros(len(index_TK), choices, dtype=torch.float64).scatter_(1, index_TK, gates_TK.double())


def cut(router, logits_TE, pruned=PRUNED):
    """What the router without the pruned rows says of the same tokens, by original id."""
    kept = (~blocked(router.choices, pruned)).nonzero()[:, 0]
    call = router.without(pruned)(logits_TE)
    return as_dense(kept[call.index_TK], call.gates_TK, router.choices)


def masked(router, logits_TE, scale, policy="frozen", *, pruned=PRUNED):
    index_TK, gates_TK = reroute(router(logits_TE), blocked(router.choices, pruned), Scale.parse(scale), policy)
    return as_dense(index_TK, gates_TK, router.choices)


def same_experts(left_TE, right_TE) -> torch.Tensor:
    return ((left_TE > 0) == (right_TE > 0)).all(dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", PLAIN)
def test_renorm_is_the_router_without_the_pruned_rows(own_router, family, dtype):
    router = prepared(own_router, family, dtype)
    logits_TE = logits(family, router.choices, dtype)
    found_TE, wanted_TE = masked(router, logits_TE, "renorm"), cut(router, logits_TE)
    assert same_experts(found_TE, wanted_TE).all()
    half = router(logits_TE).gates_TK.dtype is torch.bfloat16
    # Gates stored in bfloat16, and by some routers computed in it, step by step: once each way.
    torch.testing.assert_close(found_TE, wanted_TE, rtol=2.0**-6 if half else 2e-6, atol=1e-38)


# One and two of each group.
@pytest.mark.parametrize("pruned", [(0, 5, 10, 15), PRUNED], ids=["three left", "two left"])
@pytest.mark.parametrize("family", GROUPED)
def test_with_groups_renorm_is_that_router_where_groups_are_chosen_anew_and_only_there(own_router, family, pruned):
    router = prepared(own_router, family)
    logits_TE = logits(family, router.choices)
    wanted_TE = cut(router, logits_TE, pruned)
    anew_TE = masked(router, logits_TE, "renorm", "reselect", pruned=pruned)
    assert same_experts(anew_TE, wanted_TE).all()
    torch.testing.assert_close(anew_TE, wanted_TE, rtol=2e-6, atol=1e-38)
    frozen_TE = masked(router, logits_TE, "renorm", "frozen", pruned=pruned)
    assert not same_experts(frozen_TE, wanted_TE).all(), "the unpruned router's groups are others"


@pytest.mark.parametrize("family", COUPLED)
def test_a_bias_on_a_softmax_ranks_others_once_rows_are_cut(own_router, family):
    router = prepared(own_router, family)
    logits_TE = logits(family, router.choices)
    found_TE, wanted_TE = masked(router, logits_TE, "renorm"), cut(router, logits_TE)
    same_T = same_experts(found_TE, wanted_TE)
    assert not same_T.all(), "top-k of p + b is not top-k of p / (1 - P) + b"
    torch.testing.assert_close(found_TE[same_T], wanted_TE[same_T], rtol=2e-6, atol=1e-38)
    # Each ranks as its own rule says.
    gone_E = blocked(router.choices)
    p_TE = torch.softmax(logits_TE.double(), dim=-1).masked_fill(gone_E, 0.0)
    left_TE = p_TE / p_TE.sum(dim=-1, keepdim=True)
    for gates_TE, scores_TE in ((found_TE, p_TE), (wanted_TE, left_TE)):
        rank_TE = (scores_TE + router.layer.bias_E.double()).masked_fill(gone_E, -torch.inf)
        best_TK = rank_TE.topk(4, dim=-1)[1]
        assert torch.equal((gates_TE > 0).double(), torch.zeros_like(gates_TE).scatter_(1, best_TK, 1.0))


@pytest.mark.parametrize("family", COUPLED)
def test_without_a_bias_a_softmax_has_no_such_exception(own_router, family):
    router = prepared(own_router, family, bias=0.0)
    logits_TE = logits(family, router.choices)
    found_TE, wanted_TE = masked(router, logits_TE, "renorm"), cut(router, logits_TE)
    assert same_experts(found_TE, wanted_TE).all()
    torch.testing.assert_close(found_TE, wanted_TE, rtol=2e-6, atol=1e-38)


@pytest.mark.parametrize("family", [family for family in PLAIN if family != "phimoe"])
def test_keep_is_that_router_times_one_number_per_token(own_router, family):
    router = prepared(own_router, family)
    logits_TE = logits(family, router.choices)
    call = router(logits_TE)
    keep_TE, cut_TE = masked(router, logits_TE, "keep"), cut(router, logits_TE)
    ratio_TE = torch.where(cut_TE > 0, keep_TE / cut_TE, torch.nan)
    ratio_T = ratio_TE.nanmean(dim=1)
    chosen_T1 = cut_TE > 0
    torch.testing.assert_close(
        ratio_TE[chosen_T1], ratio_T[:, None].expand_as(ratio_TE)[chosen_T1], rtol=4e-6, atol=1e-38
    )
    if family in ONE_SCALE:
        torch.testing.assert_close(ratio_T, torch.ones_like(ratio_T), rtol=2e-6, atol=0)
    elif family in NOT_RENORMALISED:
        gone_T = torch.softmax(call.logits_TE.double(), dim=-1)[:, blocked(router.choices)].sum(dim=-1)
        torch.testing.assert_close(ratio_T, 1 - gone_T, rtol=4e-6, atol=1e-7)
    else:
        displaced_T = blocked(router.choices)[call.index_TK].any(dim=1)
        torch.testing.assert_close(ratio_T[~displaced_T], torch.ones_like(ratio_T[~displaced_T]), rtol=2e-6, atol=0)
        if call.bias_E is None:
            assert (ratio_T[displaced_T] < 1).all(), "the promoted are worth less than those that they replace"
