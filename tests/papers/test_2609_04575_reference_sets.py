"""2609.04575 eq. (2): activate the top k1, normalise by the mass of the top k2; w_i = p_i / Σ_{top-k2} p."""

from __future__ import annotations

import math

import pytest
import torch

from prunebench.errors import UsageError
from prunebench.routing import Convention, RouterCall, Scale, native_gates, native_index, reroute, scores_and_choice

P = [0.30, 0.25, 0.15, 0.12, 0.10, 0.08]
QWEN = Convention("softmax", renormalised=True)
GRANITE = Convention("selected_softmax", renormalised=True)
MOONLIGHT = Convention("sigmoid", renormalised=True, factor=2.446, epsilon=1e-20, biased=True)
PLAIN = Convention("softmax", renormalised=False)


def gates(
    convention: Convention, scale: str, pruned: tuple[int, ...] = (), bias: list[float] | None = None
) -> dict[int, float]:
    odds = [p / (1 - p) if convention.score == "sigmoid" else p for p in P]
    logits_TE = torch.tensor([[math.log(x) for x in odds]])
    bias_E = None if bias is None else torch.tensor(bias)
    scores_TE, choice_TE = scores_and_choice(convention, logits_TE, bias_E)
    index_TK = native_index(convention, choice_TE, 2)
    call = RouterCall(convention, logits_TE, bias_E, index_TK, native_gates(convention, logits_TE, scores_TE, index_TK))
    blocked_E = torch.zeros(len(P), dtype=torch.bool)
    blocked_E[list(pruned)] = True
    index_TK, gates_TK = reroute(call, blocked_E, Scale.parse(scale))
    return dict(zip(index_TK[0].tolist(), gates_TK[0].tolist(), strict=True))


@pytest.mark.parametrize("convention", [QWEN, GRANITE])
@pytest.mark.parametrize("k2", [1, 2, 3, 4, 5, 6])
def test_the_weights_are_p_over_the_mass_of_the_top_k2(convention, k2):
    mass = sum(P[:k2])
    assert gates(convention, f"ref:{k2}") == pytest.approx({0: 0.30 / mass, 1: 0.25 / mass}, rel=1e-6)


@pytest.mark.parametrize("k2", [1, 2, 3, 4])
def test_after_pruning_the_reference_set_is_of_routable_experts(k2):
    mass = sum([0.30, 0.15, 0.12, 0.08][:k2])
    assert gates(QWEN, f"ref:{k2}", pruned=(1, 4)) == pytest.approx({0: 0.30 / mass, 2: 0.15 / mass}, rel=1e-6)


@pytest.mark.parametrize("convention", [QWEN, GRANITE, MOONLIGHT])
@pytest.mark.parametrize("pruned", [(), (0,), (1, 3), (0, 1, 2)])
def test_k2_equal_to_k1_is_standard_renormalisation(convention, pruned):
    bias = [0.0] * 6 if convention.biased else None
    renorm = gates(convention, "renorm", pruned, bias)
    assert gates(convention, "ref:2", pruned, bias) == pytest.approx(renorm, rel=1e-6)


def test_k2_of_all_experts_removes_the_normalisation():
    assert gates(QWEN, "ref:6") == pytest.approx({0: 0.30, 1: 0.25}, rel=1e-6)


def test_a_larger_reference_set_never_raises_the_gain():
    totals = [sum(gates(QWEN, f"ref:{k2}").values()) for k2 in range(1, 7)]
    assert totals == sorted(totals, reverse=True)
    assert all(total < 1 for total in totals[2:])


def test_the_bias_chooses_the_reference_set_and_does_not_weigh():
    # Ranked by p + b: 5, 4, 0, …; their p sum to 0.08 + 0.10 + 0.30.
    bias = [0.0, 0.0, 0.0, 0.0, 0.5, 0.6]
    wanted = {5: 2.446 * 0.08 / 0.48, 4: 2.446 * 0.10 / 0.48}
    assert gates(MOONLIGHT, "ref:3", bias=bias) == pytest.approx(wanted, rel=1e-6)


def test_a_router_trained_without_renormalisation_has_no_reference_set():
    assert gates(PLAIN, "ref:4", pruned=(1,)) == gates(PLAIN, "keep", pruned=(1,))


def test_a_reference_set_larger_than_what_is_routable_is_refused():
    with pytest.raises(UsageError, match=r"ref:5 needs 5 survivors; expected ref:k2 with k2 ≤ 4"):
        gates(QWEN, "ref:5", pruned=(0, 1))
