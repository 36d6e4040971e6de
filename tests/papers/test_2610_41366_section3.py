"""2610.41366 §3, "Routing semantics in equations": each case, one token at a time, in exact fractions.

`1` is pruned throughout. The scores are chosen, the logits follow from them.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from prunebench.routing import Convention, RouterCall, Scale, native_gates, native_index, reroute, scores_and_choice

MOONLIGHT = 2.446
CONVENTIONS = {
    "olmoe": Convention("softmax", renormalised=False),
    "deepseek_v2": Convention("softmax", renormalised=False, sorted_topk=False),
    "granite": Convention("selected_softmax", renormalised=True),
    "moonlight": Convention("sigmoid", renormalised=True, factor=MOONLIGHT, epsilon=1e-20, biased=True),
}


def call(name: str, p: list[Fraction], *, k: int = 2, bias: list[float] | None = None) -> RouterCall:
    """The unpruned router's call on one token whose scores are p."""
    convention = CONVENTIONS[name]
    if convention.score == "sigmoid":
        logits = [math.log(x / (1 - x)) for x in p]
    else:
        assert sum(p) == 1
        logits = [math.log(x) for x in p]
    logits_TE = torch.tensor([logits], dtype=torch.float32)
    bias_E = torch.tensor(bias) if bias else None
    scores_TE, choice_TE = scores_and_choice(convention, logits_TE, bias_E)
    index_TK = native_index(convention, choice_TE, k)
    return RouterCall(convention, logits_TE, bias_E, index_TK, native_gates(convention, logits_TE, scores_TE, index_TK))


def rerouted(case: RouterCall, scale: str, pruned: tuple[int, ...] = (1,)) -> dict[int, float]:
    """Expert -> gate of the one token."""
    blocked_E = torch.zeros(case.logits_TE.shape[1], dtype=torch.bool)
    blocked_E[list(pruned)] = True
    index_TK, gates_TK = reroute(case, blocked_E, Scale.parse(scale).resolve(case.convention))
    return dict(zip(index_TK[0].tolist(), gates_TK[0].tolist(), strict=True))


def same(got: dict[int, float], wanted: dict[int, float | Fraction]) -> None:
    assert got.keys() == wanted.keys()
    for expert, gate in wanted.items():
        assert got[expert] == pytest.approx(float(gate), rel=1e-6), expert


SOFTMAX_P = [Fraction(4, 10), Fraction(3, 10), Fraction(1, 10), Fraction(2, 10)]


@pytest.mark.parametrize("model", ["olmoe", "deepseek_v2"])
def test_without_renormalisation_keep_is_p_and_renorm_is_p_over_what_is_left(model):
    case = call(model, SOFTMAX_P)
    assert set(case.index_TK[0].tolist()) == {0, 1}
    left = 1 - SOFTMAX_P[1]
    same(rerouted(case, "keep"), {0: SOFTMAX_P[0], 3: SOFTMAX_P[3]})
    same(rerouted(case, "renorm"), {0: SOFTMAX_P[0] / left, 3: SOFTMAX_P[3] / left})


@pytest.mark.parametrize("model", ["olmoe", "deepseek_v2"])
def test_without_renormalisation_neither_arm_sums_to_one(model):
    case = call(model, SOFTMAX_P)
    assert sum(rerouted(case, "keep").values()) == pytest.approx(0.6, rel=1e-6)
    assert sum(rerouted(case, "renorm").values()) == pytest.approx(6 / 7, rel=1e-6)


def test_granite_keep_divides_by_the_unpruned_top_k_and_renorm_by_the_selected_survivors():
    case = call("granite", SOFTMAX_P)
    same(rerouted(case, "keep"), {0: Fraction(4, 7), 3: Fraction(2, 7)})
    same(rerouted(case, "renorm"), {0: Fraction(4, 6), 3: Fraction(2, 6)})


def test_granite_keep_sums_to_less_than_one_exactly_when_a_pruned_expert_was_chosen():
    case = call("granite", SOFTMAX_P)
    assert sum(rerouted(case, "keep").values()) == pytest.approx(6 / 7, rel=1e-6)
    assert sum(rerouted(case, "renorm").values()) == pytest.approx(1, rel=1e-6)
    assert sum(rerouted(case, "keep", pruned=(2,)).values()) == pytest.approx(1, rel=1e-6)


def test_moonlight_divides_raw_sigmoids_and_multiplies_by_c():
    p = [Fraction(8, 10), Fraction(6, 10), Fraction(1, 10), Fraction(5, 10)]
    case = call("moonlight", p, bias=[0.0, 0.0, 0.0, 0.0])
    same(rerouted(case, "keep"), {0: MOONLIGHT * 8 / 14, 3: MOONLIGHT * 5 / 14})
    same(rerouted(case, "renorm"), {0: MOONLIGHT * 8 / 13, 3: MOONLIGHT * 5 / 13})


def test_moonlight_ranks_p_plus_b_and_weighs_by_p():
    p = [Fraction(8, 10), Fraction(2, 10), Fraction(7, 10), Fraction(3, 10)]
    case = call("moonlight", p, bias=[0.0, 0.7, -0.5, 0.0])
    assert set(case.index_TK[0].tolist()) == {0, 1}, "the bias lifts 1 over 2"
    # Among the survivors 3 (0.3) is chosen before 2 (0.7 - 0.5), though 2 has the larger p.
    same(rerouted(case, "renorm"), {0: MOONLIGHT * 8 / 11, 3: MOONLIGHT * 3 / 11})


def test_moonlight_keep_can_exceed_the_trained_total():
    p = [Fraction(8, 10), Fraction(2, 10), Fraction(1, 10), Fraction(6, 10)]
    case = call("moonlight", p, bias=[0.0, 0.9, 0.0, 0.0])
    assert set(case.index_TK[0].tolist()) == {0, 1}
    total = sum(rerouted(case, "keep").values())
    assert total == pytest.approx(MOONLIGHT * 14 / 10, rel=1e-6)
    assert total > MOONLIGHT
    assert sum(rerouted(case, "renorm").values()) == pytest.approx(MOONLIGHT, rel=1e-6)


@pytest.mark.parametrize("model", CONVENTIONS)
def test_keep_gives_a_chosen_survivor_the_very_gate_of_the_unpruned_router(model):
    case = call(model, SOFTMAX_P, bias=[0.0] * 4 if model == "moonlight" else None)
    dense = dict(zip(case.index_TK[0].tolist(), case.gates_TK[0].tolist(), strict=True))
    assert rerouted(case, "keep")[0] == dense[0]


@pytest.mark.parametrize("model", CONVENTIONS)
@pytest.mark.parametrize("scale", ["keep", "renorm", "interp:0.5", "ref:3"])
def test_the_selection_is_the_same_in_every_arm(model, scale):
    case = call(model, SOFTMAX_P, bias=[0.0] * 4 if model == "moonlight" else None)
    assert rerouted(case, scale).keys() == {0, 3}


@pytest.mark.parametrize(
    ("model", "trained", "other"),
    [
        ("olmoe", "keep", "renorm"),
        ("deepseek_v2", "keep", "renorm"),
        ("granite", "renorm", "keep"),
        ("moonlight", "renorm", "keep"),
    ],
)
def test_the_trained_scale_is_the_one_the_router_was_trained_with(model, trained, other):
    case = call(model, SOFTMAX_P, bias=[0.0] * 4 if model == "moonlight" else None)
    assert rerouted(case, "trained") == rerouted(case, trained)
    assert rerouted(case, "other") == rerouted(case, other)
    assert rerouted(case, "trained") != rerouted(case, "other")


@pytest.mark.parametrize("model", CONVENTIONS)
@pytest.mark.parametrize("alpha", ["0.25", "0.5", "0.9"])
def test_interp_is_linear_in_the_normaliser_and_not_in_the_gate(model, alpha):
    case = call(model, SOFTMAX_P, bias=[0.0] * 4 if model == "moonlight" else None)
    keep, renorm, between = rerouted(case, "keep"), rerouted(case, "renorm"), rerouted(case, f"interp:{alpha}")
    a = float(alpha)
    for expert, gate in between.items():
        # 1/g is proportional to Z.
        assert 1 / gate == pytest.approx((1 - a) / keep[expert] + a / renorm[expert], rel=1e-6)


@pytest.mark.parametrize("model", CONVENTIONS)
def test_interp_has_keep_and_renorm_as_its_ends_bit_for_bit(model):
    case = call(model, SOFTMAX_P, bias=[0.0] * 4 if model == "moonlight" else None)
    assert rerouted(case, "interp:0") == rerouted(case, "keep")
    assert rerouted(case, "interp:1") == rerouted(case, "renorm")
