"""Inputs on which other tools were reported to route, weigh or load wrongly, each with the right value."""

from __future__ import annotations

import math

import pytest
import torch

from prunebench.errors import UsageError
from prunebench.install import installed
from prunebench.mask import Budget, Mask
from prunebench.method import Method, Replacements, Routing
from prunebench.moe import open_model
from prunebench.moe.layer import find_layers
from prunebench.plan import make_plan
from prunebench.routing import (
    Convention,
    Groups,
    RouterCall,
    Scale,
    log_normaliser,
    native_gates,
    native_index,
    reroute,
    scores_and_choice,
    select_survivors,
)
from prunebench.testing import random_ids, random_model


def call_of(convention: Convention, logits: list[float], k: int, bias: list[float] | None = None) -> RouterCall:
    logits_TE = torch.tensor([logits])
    bias_E = None if bias is None else torch.tensor(bias)
    scores_TE, choice_TE = scores_and_choice(convention, logits_TE, bias_E)
    index_TK = native_index(convention, choice_TE, k)
    return RouterCall(convention, logits_TE, bias_E, index_TK, native_gates(convention, logits_TE, scores_TE, index_TK))


def routed(call: RouterCall, scale: str, pruned: tuple[int, ...] = (), policy: str = "frozen") -> dict[int, float]:
    blocked_E = torch.zeros(call.logits_TE.shape[1], dtype=torch.bool)
    blocked_E[list(pruned)] = True
    index_TK, gates_TK = reroute(call, blocked_E, Scale.parse(scale), policy)
    return dict(zip(index_TK[0].tolist(), gates_TK[0].tolist(), strict=True))


def logit(p: float) -> float:
    return math.log(p / (1 - p))


class TestNegativeBiasedScores:
    """E = 4, 2 groups of which 1 is kept, k = 2, biased scores [-.1, -.2, -.5, -.6]: a mask of zeros picks 2 and 3."""

    convention = Convention("sigmoid", renormalised=True, epsilon=1e-20, biased=True, groups=Groups(2, 1, "top2sum"))
    bias = (-0.6, -0.7, -1.0, -1.1)

    def call(self) -> RouterCall:
        return call_of(self.convention, [0.0] * 4, 2, list(self.bias))

    def test_the_best_group_is_picked_though_all_scores_are_negative(self):
        assert set(self.call().index_TK[0].tolist()) == {0, 1}
        assert routed(self.call(), "renorm") == pytest.approx({0: 0.5, 1: 0.5})

    def test_the_models_own_router_picks_the_same(self, own_router):
        router = own_router("deepseek_v3.groups", n_group=2, topk_group=1)
        router.set_bias(torch.tensor([x / 4 - 0.55 for x in (-0.1, -0.2, -0.5, -0.6) for _ in range(4)]))
        call = router(torch.zeros(1, 16))
        assert set(call.index_TK[0].tolist()) <= set(range(8))

    @pytest.mark.parametrize("scale", ["keep", "renorm", "interp:0.5", "ref:1"])
    @pytest.mark.parametrize("policy", ["frozen", "reselect"])
    @pytest.mark.parametrize("gone", [0, 1])
    def test_a_group_that_runs_dry_leaves_a_slot_empty_and_takes_nobody_from_outside(self, policy, scale, gone):
        # The lone survivor, -.1 or -.2, still beats the other group's -1.1.
        gates = routed(self.call(), scale, (gone,), policy)
        total = 1.0 if scale == "keep" else {"interp:0.5": 0.75}.get(scale, 0.5)
        assert gates == pytest.approx({1 - gone: 0.5 / total, 4: 0.0})

    def test_a_group_without_survivors_is_not_chosen_anew(self):
        assert routed(self.call(), "renorm", (0, 1), "reselect") == pytest.approx({2: 0.5, 3: 0.5})

    @pytest.mark.parametrize("scale", ["keep", "renorm", "interp:0.5", "ref:1"])
    def test_the_unpruned_routers_group_without_survivors_leaves_all_slots_empty(self, scale):
        blocked_E = torch.tensor([True, True, False, False])
        index_TK, gates_TK = reroute(self.call(), blocked_E, Scale.parse(scale))
        assert index_TK.tolist() == [[4, 4]]
        assert gates_TK.tolist() == [[0.0, 0.0]]


class TestABiasChoosesAndNeverWeighs:
    """Sigmoid scores .6, .5, .4 with bias 0, 0, 1 and k = 2: {2, 0}, weighed from .4 and .6."""

    convention = Convention("sigmoid", renormalised=True, epsilon=1e-20, biased=True)

    def call(self) -> RouterCall:
        return call_of(self.convention, [logit(p) for p in (0.6, 0.5, 0.4)], 2, [0.0, 0.0, 1.0])

    @pytest.mark.parametrize("scale", ["keep", "renorm"])
    def test_unpruned(self, scale):
        assert self.call().index_TK[0].tolist() == [2, 0]
        assert routed(self.call(), scale) == pytest.approx({2: 0.4, 0: 0.6}, rel=1e-6)

    def test_with_the_favoured_expert_gone(self):
        assert routed(self.call(), "keep", (2,)) == pytest.approx({0: 0.6, 1: 0.5}, rel=1e-6)
        assert routed(self.call(), "renorm", (2,)) == pytest.approx({0: 0.6 / 1.1, 1: 0.5 / 1.1}, rel=1e-6)

    def test_with_another_gone(self):
        assert routed(self.call(), "keep", (0,)) == pytest.approx({2: 0.4, 1: 0.5}, rel=1e-6)
        assert routed(self.call(), "renorm", (0,)) == pytest.approx({2: 0.4 / 0.9, 1: 0.5 / 0.9}, rel=1e-6)


@pytest.mark.parametrize(
    ("score", "renormalised", "scale", "gates"),
    [
        ("softmax", False, "keep", (0.237, 0.087)),
        ("softmax", False, "renorm", (0.665, 0.245)),
        ("softmax", True, "renorm", (0.731, 0.269)),
        # Over the unpruned top-2's mass, .881.
        ("softmax", True, "keep", (0.269, 0.099)),
        ("selected_softmax", True, "renorm", (0.731, 0.269)),
        ("selected_softmax", True, "keep", (0.269, 0.099)),
    ],
)
def test_logits_2_1_0_minus1_with_expert_0_pruned_under_all_four_pairs(score, renormalised, scale, gates):
    call = call_of(Convention(score, renormalised=renormalised), [2.0, 1.0, 0.0, -1.0], 2)
    assert set(call.index_TK[0].tolist()) == {0, 1}
    found = routed(call, scale, (0,))
    assert found == pytest.approx({1: gates[0], 2: gates[1]}, abs=5e-4)
    powers = [math.exp(x) for x in (2, 1, 0, -1)]
    z = {
        (False, "keep"): sum(powers),
        (False, "renorm"): sum(powers[1:]),
        (True, "keep"): powers[0] + powers[1],
        (True, "renorm"): powers[1] + powers[2],
    }[renormalised, scale]
    assert found == pytest.approx({1: powers[1] / z, 2: powers[2] / z}, rel=1e-6)


@pytest.mark.parametrize("family", ["deepseek_v2.groups", "deepseek_v3.groups"])
def test_ten_experts_in_four_groups_are_refused(family):
    model = random_model(family, experts=10, n_group=4, topk_group=2)
    with pytest.raises(UsageError, match=r"10 experts in 4 router groups.*a multiple of the groups"):
        open_model(model)


def test_eight_groups_of_one_are_refused_by_name_where_a_groups_score_adds_two():
    model = random_model("deepseek_v3.groups", experts=8, top_k=2, n_group=8, topk_group=2)
    with pytest.raises(UsageError, match=r"router groups of 1 expert.*at least 2"):
        open_model(model)


@pytest.mark.parametrize("policy", ["frozen", "reselect"])
def test_eight_groups_of_one_work_where_a_groups_score_is_its_best(policy):
    moe = open_model(random_model("deepseek_v2.groups", experts=8, top_k=2, n_group=8, topk_group=3))
    assert moe.convention.groups == Groups(8, 3, "max")
    call = call_of(moe.convention, [3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0], 2)
    assert set(call.index_TK[0].tolist()) == {0, 1}
    # Three groups are kept: once 0 and 1 are gone, the unpruned router's hold one expert.
    assert routed(call, "keep", (0,), policy).keys() == {1, 2}
    assert routed(call, "keep", (0, 1), policy).keys() == ({2, 8} if policy == "frozen" else {2, 3})


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v3.groups", "nemotron_h", "deepseek_v4", "longcat_flash"])
def test_a_bias_left_at_its_old_length_is_refused(family):
    model = random_model(family)
    layer = find_layers(model)[-1]
    bias_E = layer.router.e_score_correction_bias
    layer.router.e_score_correction_bias = torch.zeros(len(bias_E) + 4, dtype=bias_E.dtype)
    with pytest.raises(UsageError, match=r"e_score_correction_bias of \w+ has 2[06] entries.*expected (16|22)"):
        open_model(model)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("hy_v3", "e_score_correction_bias"),
        ("minimax_m2", "e_score_correction_bias"),
        ("afmoe", "expert_bias"),
        ("lfm2_moe", "expert_bias"),
    ],
)
def test_a_blocks_bias_left_at_its_old_length_is_refused(family, name):
    model = random_model(family)
    block = find_layers(model)[-1].block
    old = getattr(block, name)
    longer = torch.zeros(20, dtype=old.dtype)
    is_parameter = isinstance(old, torch.nn.Parameter)
    setattr(block, name, torch.nn.Parameter(longer, requires_grad=False) if is_parameter else longer)
    with pytest.raises(UsageError, match=rf"{name} of \w+ has 20 entries.*expected 16"):
        open_model(model)


@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("ernie4_5_moe", "moe_statics.e_score_correction_bias"),
        ("gemma4", "per_expert_scale"),
        ("gpt_oss", "bias"),
    ],
)
def test_other_numbers_per_expert_left_at_their_old_length_are_refused(family, path):
    model = random_model(family)
    router = find_layers(model)[-1].router
    *parents, name = path.split(".")
    owner = router.get_submodule(".".join(parents))
    longer = torch.zeros(*getattr(owner, name).shape[:-1], 20)
    setattr(owner, name, torch.nn.Parameter(longer, requires_grad=False))
    with pytest.raises(UsageError, match=rf"{name} of \w+ has 20 entries.*expected 16"):
        open_model(model)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "granitemoe", "llama4", "longcat_flash"])
def test_more_slots_than_survivors_are_refused_before_any_work(family):
    moe = open_model(random_model(family))
    with pytest.raises(UsageError, match=r"keep 3 leaves 3 experts.*at least top-k = 4"):
        Budget(keep=3).check(moe.shapes)
    mask = Mask.for_shapes(moe.shapes, {layer.index: range(13) for layer in moe.layers})

    class Untouchable:
        """An operator that nobody may ask anything."""

        name = "untouchable"

        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked for")

    with pytest.raises(UsageError, match=r"the mask leaves 3 experts.*at least 4 survivors"):
        make_plan(moe, mask, Untouchable(), None)


@pytest.mark.parametrize(
    ("family", "pruned", "policy"),
    [
        # Group 0 is left one expert, and two kept groups must fill four slots.
        ("deepseek_v3.groups", (0, 1, 2), "frozen"),
        ("deepseek_v2.groups", (0, 1, 2), "frozen"),
        ("deepseek_v3.groups", (0, 1, 2, 4, 5, 6), "reselect"),
    ],
)
def test_groups_that_could_not_fill_the_slots_are_refused_before_any_work(family, pruned, policy):
    shapes = [layer.shape for layer in find_layers(random_model(family))]
    mask = Mask.for_shapes(shapes, {shapes[0].index: pruned})
    with pytest.raises(UsageError, match=r"the mask leaves .*prune fewer"):
        mask.check_fits(shapes, policy=policy)


class Reroute(Method):
    """No fills."""

    name = "reroute"
    scale = "renorm"

    def replace_needs(self):
        return ()

    def replace(self, layer, pruned):
        return Replacements()

    def route(self, layer, pruned):
        return Routing(self.scale)


PRUNED = (0, 3, 5, 6, 8, 9, 14, 15)
KERNELS = ["eager", "grouped_mm", "batched_mm"]
NATIVE_ONLY = ("longcat_flash", "llama4")


@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        (family, kernel)
        for family in ("olmoe", "granitemoe", "deepseek_v3.groups", "gpt_oss", "nemotron_h", *NATIVE_ONLY)
        for kernel in KERNELS
        if kernel == "eager" or family not in NATIVE_ONLY
    ],
)
def test_a_pruned_expert_with_nan_weights_poisons_no_token(family, kernel, poison):
    moe = open_model(random_model(family, experts_implementation=kernel))
    mask = Mask.for_shapes(moe.shapes, {layer.index: PRUNED for layer in moe.layers})
    plan = make_plan(moe, mask, Reroute(), None, scale=Scale.parse("renorm"))

    def logits():
        with installed(moe, plan), torch.inference_mode():
            return moe.model(input_ids=random_ids(), use_cache=False).logits

    clean = logits()
    assert torch.isfinite(clean).all()
    for layer in moe.layers:
        for expert in PRUNED:
            for tensor in layer.weights(expert).values():
                tensor.fill_(poison)
    with torch.inference_mode():
        assert not torch.isfinite(moe.model(input_ids=random_ids(), use_cache=False).logits).all(), "the poison works"
    assert torch.equal(logits(), clean)


# DeepSeek-V2 writes 0 over the scores outside the groups; where those inside underflow to 0, its top-k takes either.
# Groups 0 and 1 are kept for their one expert each; the other groups' experts are not negligible.
TWO_ALONE = [2.0, -200.0, -200.0, -200.0, 1.0, -200.0, -200.0, -200.0, *[0.0] * 8]


def outside(index_TK: torch.Tensor) -> torch.Tensor:
    return (index_TK >= 8) & (index_TK < 16)


def test_an_expert_from_outside_the_groups_has_gate_zero_in_the_replay(own_router):
    call = own_router("deepseek_v2.groups")(torch.tensor([TWO_ALONE]))
    assert outside(call.index_TK).any(), "the case is the one meant"
    assert (call.gates_TK[outside(call.index_TK)] == 0).all()
    scores_TE, _ = scores_and_choice(call.convention, call.logits_TE, None)
    assert torch.equal(native_gates(call.convention, call.logits_TE, scores_TE, call.index_TK), call.gates_TK)


@pytest.mark.parametrize("pruned", [(), (1,), (0,), (4,), (15,)])
@pytest.mark.parametrize("scale", ["keep", "renorm", "interp:0.5"])
def test_an_expert_from_outside_the_groups_has_gate_zero_under_every_scale(own_router, scale, pruned):
    call = own_router("deepseek_v2.groups")(torch.tensor([TWO_ALONE]))
    blocked_E = torch.isin(torch.arange(16), torch.tensor(pruned, dtype=torch.long))
    index_TK, gates_TK = reroute(call, blocked_E, Scale.parse(scale))
    assert (gates_TK[outside(index_TK)] == 0).all()


def test_groups_chosen_anew_prefer_a_better_expert_to_one_of_two_tied_members_of_the_unpruned_choice(own_router):
    router = own_router("deepseek_v2.groups")
    groups = ([5.0, 1.0, 1.0, -1.0], [4.0, -3.0, -3.0, -3.0], [3.0, 2.0, -3.0, -3.0], [-3.0] * 4)
    logits_TE = torch.tensor([[x for group in groups for x in group]])
    call = router(logits_TE)
    assert set(call.index_TK[0].tolist()) == {0, 1, 2, 4}
    # Without 4 the third group is chosen in place of the second: 5, 3, 2, and one of the tied 1s.
    gone = (3, 4, 11, 15)
    kept = torch.tensor([e for e in range(16) if e not in gone])
    own = router.without(gone)(logits_TE)
    assert {0, 8, 9} < set(kept[own.index_TK[0]].tolist())
    index_TK, _ = reroute(call, ~torch.isin(torch.arange(16), kept), Scale("renorm"), "reselect")
    assert {0, 8, 9} < set(index_TK[0].tolist())


def test_ends_that_lie_hundreds_of_nats_apart_are_interpolated():
    convention = Convention("sigmoid", renormalised=True, biased=True)
    # p_0 = e^-800, p_1 = 1/2: keep divides by p_0, renorm by p_1, half way by p_1 / 2.
    call = call_of(convention, [-800.0, 0.0], 1, [2.0, 0.0])
    assert routed(call, "interp:0.5", (0,)) == pytest.approx({1: 2.0})


def test_the_ends_of_an_interpolation_are_keep_and_renorm_bit_for_bit_whichever_is_larger():
    convention = Convention("sigmoid", renormalised=True, biased=True)
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(500, 8, generator=generator, dtype=torch.float64).float()
    bias_E = torch.randn(8, generator=generator)
    scores_TE, choice_TE = scores_and_choice(convention, logits_TE, bias_E)
    index_TK = native_index(convention, choice_TE, 3)
    call = RouterCall(convention, logits_TE, bias_E, index_TK, native_gates(convention, logits_TE, scores_TE, index_TK))
    selection = select_survivors(call, torch.tensor([True] * 3 + [False] * 5))
    ends = {name: log_normaliser(selection, Scale.parse(name)) for name in ("keep", "renorm", "interp:0", "interp:1")}
    assert (ends["renorm"] > ends["keep"]).any()
    assert (ends["renorm"] < ends["keep"]).any()
    assert torch.equal(ends["interp:0"], ends["keep"])
    assert torch.equal(ends["interp:1"], ends["renorm"])
