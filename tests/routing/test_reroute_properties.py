"""What must hold of every rerouting, whatever the router, the logits, the bias and the mask.

Logits lie on a grid of 1/8, so that a shift of all of them is exact.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from prunebench.routing import Scale, reroute

EXPERTS, K, TOKENS = 16, 4, 2
SOFTMAX = ["olmoe", "qwen3_moe", "granitemoe", "gpt_oss", "gemma4"]
SIGMOID = ["deepseek_v3", "minimax_m2", "lfm2_moe.no_bias", "deepseek_v4", "llama4", "dots1.no_renorm"]
COUPLED = ["ernie4_5_moe", "longcat_flash"]
GROUPED = ["deepseek_v2.groups", "deepseek_v3.groups"]
NOT_RENORMALISED = ["olmoe", "deepseek_v2.groups", "longcat_flash", "llama4", "dots1.no_renorm"]
ALL = [*SOFTMAX, *SIGMOID, *COUPLED, *GROUPED]
# Longcat's identity experts have biases too, which stay zero here.
BIASED = ["deepseek_v3", "minimax_m2", "deepseek_v4", "dots1.no_renorm", "deepseek_v3.groups", "ernie4_5_moe"]
# GPT-OSS has a bias that is part of the logits, and stays where it is.
RELABELLED = [family for family in ALL if family != "gpt_oss"]
SCALES = ["keep", "renorm", "interp:0.3", "ref:2", "ref:6"]

grids = arrays.arrays(np.int8, (TOKENS, EXPERTS), elements=st.integers(-48, 48))
# No two experts of a token are equal.
rankings = st.permutations(range(EXPERTS)).map(lambda order: np.array([order, order[::-1]]) * 6 - 48)
biases = arrays.arrays(np.int8, EXPERTS, elements=st.integers(-32, 32))
masks = st.frozensets(st.integers(0, EXPERTS - 1), max_size=EXPERTS)
# As many are left as the largest reference set.
fair_masks = st.frozensets(st.integers(0, EXPERTS - 1), max_size=EXPERTS - 6)


class Case:
    """One router call on logits and a bias that were drawn, in eighths and 97ths, and a mask."""

    def __init__(self, own_router, family: str, logits: np.ndarray, bias: np.ndarray, pruned: frozenset[int]) -> None:
        router = own_router(family)
        self.choices, self.pruned = router.choices, pruned
        # Identity experts are all different, and off the grid.
        logits_TE = (-torch.arange(self.choices) / 5).repeat(len(logits), 1)
        logits_TE[:, :EXPERTS] = torch.from_numpy(logits.astype(np.float32)) / 8
        if router.layer.bias_E is not None:
            whole_E = torch.zeros(self.choices)
            whole_E[:EXPERTS] = torch.from_numpy(bias.astype(np.float32)) / 97
            router.set_bias(whole_E)
        self.call = router(logits_TE)
        if self.call.bias_E is not None:
            # It is the router's own tensor, which the next case overwrites.
            self.call = dataclasses.replace(self.call, bias_E=self.call.bias_E.clone())

    @property
    def blocked_E(self) -> torch.Tensor:
        return torch.tensor([e in self.pruned for e in range(self.choices)])

    def route(self, scale: str | Scale, policy="frozen", **changes) -> tuple[torch.Tensor, torch.Tensor]:
        scale = Scale.parse(scale) if isinstance(scale, str) else scale
        return reroute(dataclasses.replace(self.call, **changes), self.blocked_E, scale, policy)

    def by_expert(self, scale: str) -> torch.Tensor:
        """Gates by expert, a number per expert taken out again; NaN where an expert is not chosen."""
        index_TK, gates_TK = self.route(scale)
        wide_TE = torch.full((len(index_TK), self.choices + 1), torch.nan, dtype=torch.float64)
        wide_TE = wide_TE.scatter_(1, index_TK, gates_TK.double())[:, :-1]
        own_E = self.call.expert_scale_E
        return wide_TE if own_E is None else wide_TE / own_E


def same(left, right, rtol=1e-6):
    torch.testing.assert_close(left, right, rtol=rtol, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("family", ALL)
@given(drawn=st.tuples(grids, biases, masks))
def test_nobody_masked_nobody_twice_and_empty_only_where_too_few_live(definitions, own_router, family, drawn):
    case = Case(own_router, family, *drawn)
    call, pruned = case.call, case.pruned
    bias = None if call.bias_E is None else call.bias_E.tolist()
    for policy, scale in itertools.product(("frozen", "reselect"), ("keep", "renorm")):
        index_TK, gates_TK = case.route(scale, policy)
        assert torch.isfinite(gates_TK).all()
        for t, slots in enumerate(index_TK.tolist()):
            filled = [e for e in slots if e != case.choices]
            assert len(set(filled)) == len(filled)
            assert not set(filled) & pruned
            assert (gates_TK[t][index_TK[t] == case.choices] == 0).all()
            row = definitions.token(definitions.ROUTERS[family], call.logits_TE[t].tolist(), bias)
            among = definitions.eligible(row, pruned if policy == "reselect" else frozenset())
            if among is not None and (policy == "reselect" or definitions.eligible(row) is not None):
                assert set(filled) <= among
                assert len(filled) == min(K, len(among - pruned))


@pytest.mark.parametrize("family", ALL)
@given(drawn=st.tuples(grids, biases, masks))
def test_survivors_keep_their_slots_and_under_keep_their_gates(own_router, family, drawn):
    case = Case(own_router, family, *drawn)
    stays_TK = ~case.blocked_E[case.call.index_TK]
    for scale in ("keep", "renorm", "interp:0.3"):
        index_TK, gates_TK = case.route(scale)
        assert torch.equal(index_TK[stays_TK], case.call.index_TK[stays_TK])
        if scale == "keep" or not case.pruned:
            assert torch.equal(gates_TK[stays_TK], case.call.gates_TK[stays_TK])


@pytest.mark.parametrize("family", RELABELLED)
@given(drawn=st.tuples(rankings, biases, fair_masks), data=st.data())
def test_relabelled_experts_get_the_same_gates(own_router, family, drawn, data):
    logits, bias, pruned = drawn
    order = data.draw(st.permutations(range(EXPERTS)))
    if family in GROUPED:
        # Groups may change places, and experts places in their group.
        order = [g * 4 + e for g in data.draw(st.permutations(range(4))) for e in order if e < 4]
    moved = frozenset(order.index(e) for e in pruned)
    found = {scale: Case(own_router, family, *drawn).by_expert(scale) for scale in SCALES}
    for scale in SCALES:
        other_TE = Case(own_router, family, logits[:, order], bias[order], moved).by_expert(scale)
        same(other_TE[:, :EXPERTS], found[scale][:, order])
        same(other_TE[:, EXPERTS:], found[scale][:, EXPERTS:])


@pytest.mark.parametrize("family", [*SOFTMAX, *COUPLED, "deepseek_v2.groups"])
@given(drawn=st.tuples(rankings, biases, fair_masks), shift=st.integers(-64, 64))
def test_a_softmax_does_not_see_a_shift_of_all_logits(own_router, family, drawn, shift):
    case = Case(own_router, family, *drawn)
    for scale in SCALES:
        index_TK, gates_TK = case.route(scale)
        shifted_TK, shifted_gates_TK = case.route(scale, logits_TE=case.call.logits_TE + shift / 8)
        assert torch.equal(shifted_TK, index_TK)
        same(shifted_gates_TK, gates_TK)


@pytest.mark.parametrize("family", [*SOFTMAX, *SIGMOID])
@given(drawn=st.tuples(rankings, biases, fair_masks), other=rankings)
def test_renorm_does_not_see_the_pruned_experts_logits(own_router, family, drawn, other):
    logits, bias, pruned = drawn
    changed = np.where([e in pruned for e in range(EXPERTS)], other, logits)
    found_TE = Case(own_router, family, *drawn).by_expert("renorm")
    same(Case(own_router, family, changed, bias, pruned).by_expert("renorm"), found_TE)


@pytest.mark.parametrize("family", ALL)
@given(drawn=st.tuples(rankings, biases, fair_masks), slot=st.integers(0, K - 1), more=st.integers(1, 40))
def test_an_expert_that_is_chosen_stays_so_when_its_logit_rises(own_router, family, drawn, slot, more):
    logits, bias, pruned = drawn
    case = Case(own_router, family, *drawn)
    expert = int(case.route("renorm")[0][0, slot])
    assume(expert < EXPERTS)
    before = float(case.by_expert("renorm")[0, expert])
    risen = logits.copy()
    risen[0, expert] += more
    after = float(Case(own_router, family, risen, bias, pruned).by_expert("renorm")[0, expert])
    assert not np.isnan(after)
    if family not in (*COUPLED, *GROUPED):
        # The others of S are the same, and worth no more.
        assert after >= before * (1 - 1e-6)


@pytest.mark.parametrize("family", BIASED)
@given(drawn=st.tuples(rankings, biases, fair_masks), more=st.sampled_from([-2, -1, 1, 4]))
def test_a_constant_added_to_the_bias_changes_nothing(own_router, family, drawn, more):
    logits, bias, pruned = drawn
    found = {scale: Case(own_router, family, *drawn).by_expert(scale) for scale in SCALES}
    other = Case(own_router, family, logits, bias.astype(np.int16) + 97 * more, pruned)
    for scale in SCALES:
        same(other.by_expert(scale), found[scale])


@pytest.mark.parametrize("family", ALL)
@given(drawn=st.tuples(grids, biases, fair_masks))
def test_under_every_scale_gates_are_to_each_other_as_scores_are(definitions, own_router, family, drawn):
    case = Case(own_router, family, *drawn)
    scores = definitions.ROUTERS[family].scores
    p_TE = np.array(
        [[float(p) for p in definitions.exact_scores(scores, tuple(row))] for row in case.call.logits_TE.tolist()]
    )
    for scale in SCALES:
        quotients_TE = case.by_expert(scale).numpy() / p_TE
        largest_T1 = np.nanmax(np.append(quotients_TE, np.zeros((TOKENS, 1)), axis=1), axis=1, keepdims=True)
        wanted_TE = np.where(np.isnan(quotients_TE), np.nan, largest_T1)
        np.testing.assert_allclose(quotients_TE, wanted_TE, rtol=2e-6)


@pytest.mark.parametrize("family", ALL)
@given(drawn=st.tuples(grids, biases, masks), alpha=st.floats(0, 1))
def test_interp_goes_from_keep_to_renorm_linearly_in_z(own_router, family, drawn, alpha):
    case = Case(own_router, family, *drawn)
    keep_TK, renorm_TK = (case.route(scale)[1] for scale in ("keep", "renorm"))
    assert torch.equal(case.route("interp:0")[1], keep_TK)
    assert torch.equal(case.route("interp:1")[1], renorm_TK)
    wanted_TK = 1 / ((1 - alpha) / keep_TK.double() + alpha / renorm_TK.double())
    between_TK = case.route(Scale("interp", alpha=alpha))[1].double()
    same(between_TK, wanted_TK.where(keep_TK != 0, 0.0), rtol=2e-6)


@pytest.mark.parametrize("family", ALL)
@given(drawn=st.tuples(grids, biases, fair_masks))
def test_a_reference_set_of_k_is_renorm_where_that_was_trained_and_else_keep(own_router, family, drawn):
    case = Case(own_router, family, *drawn)
    wanted = case.route("keep" if family in NOT_RENORMALISED else "renorm")
    assert all(map(torch.equal, case.route(f"ref:{K}"), wanted))


@pytest.mark.parametrize("family", ALL)
@given(drawn=st.tuples(grids, biases, fair_masks))
def test_a_larger_reference_set_never_raises_a_gate(own_router, family, drawn):
    case = Case(own_router, family, *drawn)
    gates = [case.route(f"ref:{k2}")[1].double().abs() for k2 in (1, 2, 4, 6)]
    for smaller_TK, larger_TK in itertools.pairwise(gates):
        assert (larger_TK <= smaller_TK * (1 + 1e-6)).all()


@pytest.mark.parametrize("family", ALL)
@given(drawn=st.tuples(grids, biases, fair_masks))
def test_a_token_is_routed_alone_as_it_is_among_others(own_router, family, drawn):
    case = Case(own_router, family, *drawn)
    call = case.call
    for scale, t in itertools.product(("keep", "renorm", "ref:6"), range(TOKENS)):
        alone = {name: getattr(call, name)[t : t + 1] for name in ("logits_TE", "index_TK", "gates_TK")}
        whole = [part[t : t + 1] for part in case.route(scale)]
        assert all(map(torch.equal, case.route(scale, **alone), whole))
