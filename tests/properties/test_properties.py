"""Rules that hold for every router, mask and model: drawn at random, small, and shrinking well."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prunebench import Constant, Mask, Zero, load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens, score_pass
from prunebench.calibration.statistics import BUILT_IN
from prunebench.install import installed, remove_experts
from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.plan import make_plan
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
from prunebench.testing import CORE, FAMILIES, random_ids, random_model

# Each example builds and runs models; the rules on tensors alone afford the profile's own number.
few = settings(max_examples=max(4, settings().max_examples // 5))

CONVENTIONS = {
    "softmax": Convention("softmax", renormalised=False),
    "softmax ×16": Convention("softmax", renormalised=False, factor=16.0),
    "softmax, renorm": Convention("softmax", renormalised=True),
    "selected": Convention("selected_softmax", renormalised=True),
    "sigmoid": Convention("sigmoid", renormalised=True, factor=2.446, epsilon=1e-20, biased=True),
    "sigmoid, no renorm": Convention("sigmoid", renormalised=False),
    "grouped softmax": Convention("softmax", renormalised=False, groups=Groups(2, 1, "max")),
    "grouped sigmoid": Convention(
        "sigmoid", renormalised=True, epsilon=1e-20, biased=True, groups=Groups(2, 1, "top2sum")
    ),
}
SOFTMAX = [name for name, convention in CONVENTIONS.items() if convention.score != "sigmoid"]


@dataclass
class Case:
    name: str
    call: RouterCall
    blocked_E: torch.Tensor

    def reroute(self, scale: str):
        return reroute(self.call, self.blocked_E, Scale.parse(scale))


def call_of(convention: Convention, logits_TE: torch.Tensor, bias_E: torch.Tensor | None, k: int) -> RouterCall:
    scores_TE, choice_TE = scores_and_choice(convention, logits_TE, bias_E)
    index_TK = native_index(convention, choice_TE, k)
    return RouterCall(convention, logits_TE, bias_E, index_TK, native_gates(convention, logits_TE, scores_TE, index_TK))


@st.composite
def cases(draw, *, names=tuple(CONVENTIONS)):
    """A router call and blocked experts that leave every group enough to fill k slots."""
    name = draw(st.sampled_from(names))
    convention = CONVENTIONS[name]
    k = draw(st.integers(1, 4))
    half = draw(st.integers(max(k, 2), 6))
    experts = 2 * half
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.1, 1.0, 5.0, 20.0]))
    logits_TE = torch.randn(draw(st.integers(1, 12)), experts, generator=generator) * spread
    bias_E = torch.randn(experts, generator=generator) * 0.2 if convention.biased else None
    blocked_E = torch.zeros(experts, dtype=torch.bool)
    for start in (0, half) if convention.groups else (0,):
        size = half if convention.groups else experts
        gone = draw(st.sets(st.integers(start, start + size - 1), max_size=size - k))
        blocked_E[list(gone)] = True
    return Case(name, call_of(convention, logits_TE, bias_E, k), blocked_E)


def distinct(case: Case) -> bool:
    """No two experts of a token are ranked alike, in float32."""
    choice_TE = scores_and_choice(case.call.convention, case.call.logits_TE, case.call.bias_E)[1]
    return all(len(set(row)) == len(row) for row in choice_TE.tolist())


@given(cases())
def test_keep_and_renorm_pick_the_same_experts_and_differ_by_one_scalar_per_token(case):
    (index_TK, keep_TK), (other_TK, renorm_TK) = case.reroute("keep"), case.reroute("renorm")
    assert torch.equal(index_TK, other_TK)
    logits_TE = case.call.logits_TE
    # The router's own gates are float32: a softmax loses relative accuracy with the depth of the logit below the top.
    depth_T = (logits_TE.amax(-1) - logits_TE.gather(1, index_TK).amin(-1)).tolist()
    for keep_K, renorm_K, depth in zip(keep_TK.double(), renorm_TK.double(), depth_T, strict=True):
        normal = (keep_K > 1e-35) & (renorm_K > 1e-35)
        ratio = keep_K[normal] / renorm_K[normal]
        if len(ratio):
            assert float(ratio.max() / ratio.min() - 1) < (8 + depth) * 2**-23


@given(cases(), st.sampled_from(["keep", "renorm", "interp:0.3", "ref:1"]))
def test_no_slot_is_blocked_repeated_or_not_a_number_and_survivors_stay(case, scale):
    index_TK, gates_TK = case.reroute(scale)
    assert not case.blocked_E[index_TK].any()
    assert all(len(set(row)) == len(row) for row in index_TK.tolist())
    survives_TK = ~case.blocked_E[case.call.index_TK]
    assert torch.equal(index_TK[survives_TK], case.call.index_TK[survives_TK])
    assert torch.isfinite(gates_TK).all()
    assert (gates_TK >= 0).all()


@given(cases())
def test_the_selection_is_the_top_k_of_the_choice_among_the_routable(case):
    index_TK, _ = case.reroute("keep")
    _, choice_TE = scores_and_choice(case.call.convention, case.call.logits_TE, case.call.bias_E)
    if case.call.convention.groups:
        return
    for row, choice_E in zip(index_TK.tolist(), choice_TE, strict=True):
        left = choice_E[~case.blocked_E].sort(descending=True)[0]
        assert sorted(choice_E[row].tolist(), reverse=True) == left[: len(row)].tolist()


@given(cases())
def test_interp_has_the_ends_bit_for_bit_and_lies_between_them(case):
    ends = {scale: case.reroute(scale)[1] for scale in ("keep", "renorm", "interp:0", "interp:1", "interp:0.5")}
    assert torch.equal(ends["interp:0"], ends["keep"])
    assert torch.equal(ends["interp:1"], ends["renorm"])
    low, high = torch.minimum(ends["keep"], ends["renorm"]), torch.maximum(ends["keep"], ends["renorm"])
    assert (ends["interp:0.5"] >= low * (1 - 1e-6)).all()
    assert (ends["interp:0.5"] <= high * (1 + 1e-6)).all()


@given(cases())
def test_a_reference_set_of_k_is_renorm_where_the_router_renormalises(case):
    if case.call.convention.renormalised:
        k = case.call.index_TK.shape[1]
        assert torch.equal(case.reroute(f"ref:{k}")[1], case.reroute("renorm")[1])


@given(cases(), st.sampled_from(["keep", "renorm", "interp:0.5"]))
def test_with_nothing_blocked_the_call_is_returned_bit_for_bit(case, scale):
    index_TK, gates_TK = reroute(case.call, torch.zeros_like(case.blocked_E), Scale.parse(scale))
    assert torch.equal(index_TK, case.call.index_TK)
    assert torch.equal(gates_TK, case.call.gates_TK)


@given(
    cases(names=tuple(SOFTMAX)),
    st.sampled_from([-8.0, -1.0, 0.5, 16.0]),
    st.sampled_from(["keep", "renorm", "interp:0.5", "ref:1"]),
)
def test_shifting_a_tokens_logits_changes_nothing_for_softmax_routers(case, shift, scale):
    call = case.call
    # Float32 logits are on a grid of 2^-16 here, so that the shift itself is exact.
    logits_TE = (call.logits_TE.double() * 2**12).round() / 2**12
    shift_T1 = shift * torch.arange(1, len(logits_TE) + 1)[:, None] / 4
    k = call.index_TK.shape[1]
    plain, moved = (
        Case(case.name, call_of(call.convention, x.float(), call.bias_E, k), case.blocked_E)
        for x in (logits_TE, logits_TE + shift_T1)
    )
    if not distinct(plain) or not distinct(moved):
        return
    (index_TK, gates_TK), (moved_TK, moved_gates_TK) = plain.reroute(scale), moved.reroute(scale)
    assert torch.equal(index_TK, moved_TK)
    torch.testing.assert_close(gates_TK, moved_gates_TK, rtol=1e-6, atol=1e-30)


@given(cases(), st.randoms(use_true_random=False), st.sampled_from(["keep", "renorm", "interp:0.5", "ref:1"]))
def test_relabelling_experts_relabels_the_routing(case, random, scale):
    if case.call.convention.groups or not distinct(case):
        return
    experts, k = len(case.blocked_E), case.call.index_TK.shape[1]
    new_of_old = list(range(experts))
    random.shuffle(new_of_old)
    old_of_new = torch.tensor(new_of_old).argsort()
    bias_E = None if case.call.bias_E is None else case.call.bias_E[old_of_new]
    call = call_of(case.call.convention, case.call.logits_TE[:, old_of_new], bias_E, k)
    index_TK, gates_TK = case.reroute(scale)
    named_TK, named_gates_TK = reroute(call, case.blocked_E[old_of_new], Scale.parse(scale))
    for row, gates, named, named_gates in zip(index_TK, gates_TK, named_TK, named_gates_TK, strict=True):
        wanted = {new_of_old[e]: float(g) for e, g in zip(row.tolist(), gates, strict=True)}
        assert dict(zip(named.tolist(), named_gates.tolist(), strict=True)) == pytest.approx(
            wanted, rel=1e-6, abs=1e-30
        )


# ---------------------------------------------------------------------------------------------- on whole tiny models

GROUPED = {"deepseek_v2.groups", "deepseek_v3.groups", "bailing_hybrid"}
# Statistics are of un-weighted outputs, which gates on the input do not have.
OBSERVED = tuple(name for name in FAMILIES if name != "llama4")
# Sparsemixer has one scale.
SCALED = tuple(name for name in FAMILIES if name != "phimoe")


@st.composite
def models(draw, *, families=tuple(FAMILIES)):
    """An opened tiny model: family, kernel, weights, E and k vary."""
    family = draw(st.sampled_from(families))
    grouped = family in GROUPED
    # LongCat-Flash's own code fails for one slot.
    top_k = draw(st.sampled_from([2, 4] if grouped or family == "longcat_flash" else [1, 2, 4]))
    experts = draw(st.sampled_from([8, 16] if grouped else [8, 12, 16]))
    kernel = draw(st.sampled_from(["eager", "grouped_mm"]))
    seed = draw(st.integers(0, 1000))
    return open_model(
        random_model(family, experts=experts, top_k=top_k, seed=seed, experts_implementation=kernel), probe_tokens=16
    )


@st.composite
def masks(draw, moe):
    """Any mask that the model's routers allow; some layers may lose nothing."""
    pruned = {}
    for shape in moe.shapes:
        size = shape.experts // shape.groups
        pruned[shape.index] = [
            group * size + e
            for group in range(shape.groups)
            for e in draw(st.sets(st.integers(0, size - 1), max_size=size - shape.fewest_per_group()))
        ]
    return Mask.for_shapes(moe.shapes, pruned)


def logits(moe, **options) -> torch.Tensor:
    with torch.inference_mode():
        return moe.model(input_ids=random_ids(2, 12), use_cache=False, **options).logits


@few
@given(st.data())
def test_masked_equals_removed(data):
    moe = data.draw(models())
    mask = data.draw(masks(moe))
    kinds = moe.convention.scales
    scale = data.draw(
        st.sampled_from(
            [*(x for x in ("keep", "renorm", "interp:0.25", "ref:1") if Scale.parse(x).kind in kinds), "zero"]
        )
    )
    operator = load_method("zero") if scale == "zero" else load_method("reroute", {"scale": scale})
    plan = make_plan(moe, mask, operator, None)
    with installed(moe, plan):
        masked = logits(moe)
    with Instrument(moe, remove_experts(moe, plan)):
        removed = logits(moe)
    torch.testing.assert_close(removed, masked, rtol=0, atol=4e-6 * max(1.0, float(masked.abs().max())))


@few
@given(st.data())
def test_a_constant_of_zero_equals_zero(data):
    moe = data.draw(models())
    mask = data.draw(masks(moe))

    def run(fill):
        programs = {x.index: LayerProgram(x.pruned, dict.fromkeys(x.pruned, fill)) for x in mask.layers}
        with Instrument(moe, programs):
            return logits(moe)

    width = moe.layers[0].width
    assert torch.equal(run(Constant.of(torch.zeros(width))), run(Zero(width)))


@few
@given(st.data())
def test_interp_equals_its_ends_in_the_logits_bit_for_bit(data):
    moe = data.draw(models(families=SCALED))
    mask = data.draw(masks(moe))

    def run(scale):
        with installed(moe, make_plan(moe, mask, load_method("reroute", {"scale": scale}), None)):
            return logits(moe)

    assert torch.equal(run("interp:0"), run("keep"))
    assert torch.equal(run("interp:1"), run("renorm"))


@few
@given(st.data())
def test_no_token_reaches_a_pruned_expert_whatever_the_mask(data):
    moe = data.draw(models())
    mask = data.draw(masks(moe))
    with installed(moe, make_plan(moe, mask, load_method("reroute"), None)) as instrument:
        logits(moe)
    for index, counters in instrument.counters.items():
        assert counters.reached_pruned == 0
        assert counters.slots == 24 * moe.layer(index).top_k


def statistics(moe, ids_BL, batch_tokens=10_000):
    tokens = CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")
    return score_pass(moe, tokens, [kind() for kind in BUILT_IN], batch_tokens=batch_tokens).layers


@few
@given(st.data())
def test_statistics_of_split_streams_merge_to_those_of_one(data):
    moe = data.draw(models(families=OBSERVED))
    ids = random_ids(5, 8, seed=data.draw(st.integers(0, 100)))
    cut = data.draw(st.integers(1, 4))
    whole, first, second = (statistics(moe, part, batch_tokens=8) for part in (ids, ids[:cut], ids[cut:]))
    for index, found in first.items():
        for name, statistic in found.items():
            statistic.merge(second[index][name])
            for key, value in whole[index][name].state.items():
                if value.dtype == torch.int64:
                    assert torch.equal(statistic.state[key], value)
                else:
                    torch.testing.assert_close(statistic.state[key], value, rtol=1e-12, atol=1e-13)


def relabelled(model: torch.nn.Module, old_of_new: torch.Tensor) -> torch.nn.Module:
    """The same model with its experts renumbered: expert n of the copy is `old_of_new[n]` of the model."""
    twin = copy.deepcopy(model)
    for name, module in twin.named_modules():
        if name.endswith(".experts"):
            for parameter in module.parameters():
                parameter.data = parameter.data[old_of_new].clone()
        elif name.endswith((".gate", ".router")):
            module.weight.data = module.weight.data[old_of_new].clone()
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias = module.e_score_correction_bias[old_of_new].clone()
    return twin


@few
@given(st.data())
def test_relabelling_experts_permutes_statistics_masks_and_changes_no_output(data):
    moe = data.draw(models(families=[name for name in CORE if not name.endswith("groups")]))
    experts = moe.layers[0].expert_count
    old_of_new = torch.tensor(data.draw(st.permutations(range(experts))))
    twin = open_model(relabelled(moe.model, old_of_new), probe_tokens=16)
    ids = random_ids(3, 16)
    mine, theirs = statistics(moe, ids), statistics(twin, ids)
    for index, found in mine.items():
        np.testing.assert_array_equal(theirs[index]["count"].value(), found["count"].value()[old_of_new])
        for name in ("gate_sum", "norm_sum", "gate_norm_sum", "gate_squared_norm_squared_sum"):
            np.testing.assert_allclose(theirs[index][name].value(), found[name].value()[old_of_new], rtol=2e-5)
        mean_ED, twin_ED = (s[index]["output_moments"].value().mean_ED for s in (mine, theirs))
        np.testing.assert_allclose(twin_ED, mean_ED[old_of_new], atol=1e-5)
    mask = data.draw(masks(moe))
    new_of_old = old_of_new.argsort()
    named = Mask.for_shapes(twin.shapes, {x.index: new_of_old[list(x.pruned)].tolist() for x in mask.layers})
    scale = data.draw(st.sampled_from(["keep", "renorm"]))
    plans = [make_plan(m, k, load_method("reroute", {"scale": scale}), None) for m, k in ((moe, mask), (twin, named))]
    with installed(moe, plans[0]), installed(twin, plans[1]):
        torch.testing.assert_close(logits(twin), logits(moe), rtol=0, atol=1e-5 * moe.convention.factor)
