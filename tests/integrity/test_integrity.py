"""Every check passes on a right plan and fails on a broken twin, and only the check that is about the defect fails."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from prunebench import Constant, Mask, Method, Replacements, Routing, integrity, load_method
from prunebench.errors import IntegrityError
from prunebench.install import installed
from prunebench.moe import hooks, open_model
from prunebench.plan import make_plan
from prunebench.routing import Convention, RouterCall, Scale, native_gates, native_index, scores_and_choice
from prunebench.testing import CORE, random_ids, random_model

PRUNED = (0, 3, 5, 6, 8, 9, 14, 15)
KERNELS = ["eager", "grouped_mm"]
RATIO, ANSWER, REMOVED, STORED = (
    "keep and renorm differ by one scalar",
    "every slot has an answer",
    "masked equals physically removed",
    "stored values as declared",
)
EMPTY, REACHED, ASKED, SLOTS = (
    "empty mask is bit-exact",
    "no token reaches a pruned expert",
    "every asked fill answered",
    "k slots per token",
)


class Half(Method):
    name = "half"

    def replace(self, layer, pruned):
        return Replacements({e: Constant.of(torch.full((layer.width,), 0.1 * e)) for e in pruned[::2]})

    def route(self, layer, pruned):
        return Routing()


def plan_for(moe, operator: str, scale: str = "trained"):
    mask = Mask.for_shapes(moe.shapes, {layer.index: PRUNED for layer in moe.layers})
    method = (
        Half() if operator == "half" else load_method(operator, {"scale": scale} if operator == "reroute" else None)
    )
    return make_plan(moe, mask, method, None)


def before(moe, plan) -> dict[str, str]:
    return {check.check: check.status for check in integrity.check_before_evaluation(moe, plan, random_ids(8, 40))}


def failures(statuses: dict[str, str]) -> list[str]:
    return [name for name, status in statuses.items() if status == "fail"]


@pytest.fixture(scope="module")
def moe():
    return open_model(random_model("olmoe"))


@pytest.fixture(scope="module")
def renormalising():
    return open_model(random_model("deepseek_v3"))


# ----------------------------------------------------------------------------------------------------- right plans


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", CORE)
def test_right_plans_pass_every_check(family, kernel, dtype):
    moe = open_model(random_model(family, dtype=dtype, experts_implementation=kernel))
    empty = integrity.check_empty_mask(moe, random_ids(2, 16))
    assert (empty.check, empty.status) == (EMPTY, "pass")
    assert kernel in empty.detail
    for operator, scale in (
        ("zero", ""),
        ("half", ""),
        ("reroute", "keep"),
        ("reroute", "renorm"),
        ("reroute", "interp:0.5"),
    ):
        plan = plan_for(moe, operator, scale)
        statuses = before(moe, plan)
        assert statuses.pop(RATIO) == ("not applicable" if operator == "zero" else "pass")
        assert statuses == {ANSWER: "pass", REMOVED: "pass", STORED: "pass"}
        with torch.inference_mode(), installed(moe, plan) as instrument:
            moe.model(input_ids=random_ids(2, 16))
        counters = {index: c.read() for index, c in instrument.counters.items()}
        found = {check.check: check.status for check in integrity.check_counters(plan, counters)}
        assert found == {REACHED: "pass", ASKED: "not applicable" if operator == "reroute" else "pass", SLOTS: "pass"}


def test_the_checks_leave_the_model_as_it_was(moe):
    with torch.inference_mode():
        logits = moe.model(input_ids=random_ids()).logits
    before(moe, plan_for(moe, "half"))
    integrity.check_empty_mask(moe, random_ids(2, 8))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in moe.model.modules())
    with torch.inference_mode():
        assert torch.equal(logits, moe.model(input_ids=random_ids()).logits)


# --------------------------------------------------------------------------------------------------- broken twins


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_output_off_by_two_ten_millionths_fails_the_empty_mask(monkeypatch, kernel):
    moe = open_model(random_model("olmoe", experts_implementation=kernel))
    reduce = hooks._LayerHooks._reduce
    monkeypatch.setattr(hooks._LayerHooks, "_reduce", lambda *call: reduce(*call) * (1 + 2e-7))
    check = integrity.check_empty_mask(moe, random_ids(2, 16))
    assert check.status == "fail"
    assert "scale keep: logits differ by up to" in check.detail


def test_gates_off_by_two_ten_millionths_fail_the_empty_mask(monkeypatch, moe):
    gates_of = hooks.gates_of
    monkeypatch.setattr(hooks, "gates_of", lambda selection, scale: gates_of(selection, scale) * (1 + 2e-7))
    assert integrity.check_empty_mask(moe, random_ids(2, 16)).status == "fail"


def test_slots_added_in_another_order_fail_the_empty_mask(monkeypatch):
    moe = open_model(random_model("olmoe", experts_implementation="grouped_mm"))

    def flipped(_self, call, outputs_SD, _counts_E):
        outputs_TKD = outputs_SD.new_zeros(*call.index_TK.shape, outputs_SD.shape[-1])
        outputs_TKD[call.token_S, call.slot_S] = outputs_SD
        return (outputs_TKD * call.gates_TK[..., None]).flip(1).sum(1).to(call.x_TD.dtype)

    monkeypatch.setattr(hooks._LayerHooks, "_reduce", flipped)
    assert integrity.check_empty_mask(moe, random_ids(4, 24)).status == "fail"


def altered(kind: str, change):
    """`reroute` with one scale's answer changed."""
    reroute = integrity.reroute

    def twin(call, blocked_E, scale, policy):
        index_TK, gates_TK = reroute(call, blocked_E, scale, policy)
        return change(index_TK.clone(), gates_TK.clone()) if scale.kind == kind else (index_TK, gates_TK)

    return twin


def one_gate(index_TK, gates_TK):
    gates_TK[3, 1] *= 1 + 1e-5
    return index_TK, gates_TK


def one_expert(index_TK, gates_TK):
    index_TK[3, 1] = 1 if index_TK[3, 1] != 1 else 2
    return index_TK, gates_TK


def no_number(index_TK, gates_TK):
    return index_TK, gates_TK.masked_fill(
        torch.rand(gates_TK.shape, generator=torch.Generator().manual_seed(0)) < 0.02, torch.nan
    )


def all_gates(index_TK, gates_TK):
    return index_TK, gates_TK * (1 + 2e-7)


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("renorm", one_gate, "varies by"),
        ("keep", one_gate, "a survivor's gate changed under keep|varies by"),
        ("renorm", one_expert, "the two scales pick different experts"),
        ("keep", all_gates, "a survivor's gate changed under keep"),
        ("renorm", no_number, "a gate is not a number"),
    ],
)
@pytest.mark.parametrize("name", ["moe", "renormalising"])
def test_a_reroute_that_alters_a_gate_or_an_expert_fails_the_ratio_check(  # noqa: PLR0917  fixtures and cases
    monkeypatch, request, name, kind, change, reason
):
    model = request.getfixturevalue(name)
    plan = plan_for(model, "reroute", "keep")
    monkeypatch.setattr(integrity, "reroute", altered(kind, change))
    checks = integrity.check_before_evaluation(model, plan, random_ids(8, 40))
    assert [check.check for check in checks if check.status == "fail"] == [RATIO]
    assert any(text in checks[0].detail for text in reason.split("|"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spread", [1.0, 6.0, 30.0])
def test_gates_too_small_for_their_type_do_not_fail_the_ratio_check(dtype, spread):
    convention = Convention("softmax", renormalised=False, gates_in="logits")
    logits_TE = (torch.randn(256, 16, generator=torch.Generator().manual_seed(0)) * spread).to(dtype)
    scores_TE, choice_TE = scores_and_choice(convention, logits_TE, None)
    index_TK = native_index(convention, choice_TE, 4)
    call = RouterCall(
        convention, logits_TE, None, index_TK, native_gates(convention, logits_TE, scores_TE, index_TK).to(dtype)
    )
    program = hooks.LayerProgram(PRUNED, scale=Scale("keep"))
    assert integrity.check_one_ratio({0: call}, {0: program}).status == "pass"


def test_a_layer_with_too_few_that_can_answer_fails(moe):
    plan = plan_for(moe, "reroute")
    few = dataclasses.replace(plan, mask=Mask.for_shapes(moe.shapes, {0: range(13), 1: PRUNED}))
    check = integrity.check_slots_answered(few, moe)
    assert (check.check, check.status) == (ANSWER, "fail")
    assert check.detail == "layer 0: 3 routable experts for 4"
    # With a fill each, the same mask is answered.
    filled = dataclasses.replace(plan_for(moe, "zero").layers[0], fills=dict.fromkeys(range(13)))
    answered = dataclasses.replace(few, layers=(filled, plan.layers[1]))
    assert integrity.check_slots_answered(answered, moe).status == "pass"


@pytest.mark.parametrize("operator", ["zero", "half", "reroute"])
@pytest.mark.parametrize("defect", ["weight", "order", "wrong expert"])
def test_a_removed_copy_that_differs_fails(monkeypatch, moe, operator, defect):
    shrink, plan = integrity.shrink, plan_for(moe, operator, "renorm")

    def twin(layer, program):
        rest = shrink(layer, program)
        weight = layer.experts.down_proj
        if defect == "weight":
            weight[2] *= 1.001
        elif defect == "order":
            weight.data = weight.flip(0).clone()
        else:
            weight.data = torch.roll(weight, 1, 0)
        return rest

    with torch.no_grad():
        monkeypatch.setattr(integrity, "shrink", twin)
        checks = integrity.check_before_evaluation(moe, plan, random_ids(8, 40))
    assert [check.check for check in checks if check.status == "fail"] == [REMOVED]
    assert "layer 0: outputs differ by" in next(check.detail for check in checks if check.status == "fail")


@pytest.mark.parametrize("operator", ["half", "reroute"])
def test_a_masked_layer_that_computes_something_else_than_the_removed_one_fails(monkeypatch, moe, operator):
    gates_of = hooks.gates_of
    plan = plan_for(moe, operator, "renorm")
    monkeypatch.setattr(hooks, "gates_of", lambda selection, scale: gates_of(selection, Scale("keep")))
    # Half keeps its router whole in the removed copy, so that both run the same wrong code.
    assert failures(before(moe, plan)) == ([REMOVED] if operator == "reroute" else [])


def test_a_removed_copy_that_is_not_a_number_fails(monkeypatch, moe):
    shrink, plan = integrity.shrink, plan_for(moe, "zero")

    def twin(layer, program):
        rest = shrink(layer, program)
        layer.experts.down_proj.data[:] = float("nan")
        return rest

    monkeypatch.setattr(integrity, "shrink", twin)
    assert failures(before(moe, plan)) == [REMOVED]


@pytest.mark.parametrize("declared", [0, 31, 33])
def test_a_fill_that_declares_a_wrong_number_fails(moe, declared):
    plan = plan_for(moe, "half")
    assert plan.declared["1/5"] == 32
    wrong = dataclasses.replace(plan, declared={**plan.declared, "1/5": declared})
    checks = integrity.check_before_evaluation(moe, wrong, random_ids(8, 40))
    assert [check.check for check in checks if check.status == "fail"] == [STORED]
    assert checks[-1].detail == f"layer 1, expert 5: 32 values stored, {declared} declared"


def test_a_fill_class_that_hides_values_fails(moe):
    class Shy(Constant):
        def values_stored(self):
            return 1

    method = type(
        "Mine",
        (Method,),
        {"name": "mine", "replace": lambda _s, layer, pruned: Replacements({pruned[0]: Shy(layer.width)})},
    )
    Shy.__module__ = "prunebench.replacement"
    plan = make_plan(moe, Mask.for_shapes(moe.shapes, {0: (1,)}), method(), None)
    assert integrity.check_stored_values(plan).status == "fail"


# -------------------------------------------------------------------------------------------------------- counters


def good() -> dict[str, float]:
    return {
        "calls": 10,
        "slots": 40,
        "reached_pruned": 0,
        "asked": 6,
        "answered": 6,
        "displaced": 0,
        "ratio_sum": 0.0,
        "ratio_above_one": 0,
    }


def verdicts(plan, counters) -> list[str]:
    return failures({check.check: check.status for check in integrity.check_counters(plan, counters)})


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, []),
        ({"reached_pruned": 1}, [REACHED]),
        ({"answered": 5}, [ASKED]),
        ({"answered": 7}, [ASKED]),
        ({"slots": 39}, [SLOTS]),
        ({"slots": 30}, [SLOTS]),
        ({"slots": 50}, [SLOTS]),
        ({"calls": 0, "slots": 0}, [SLOTS]),
    ],
)
def test_one_wrong_counter_fails_its_check(moe, change, failed):
    plan = plan_for(moe, "half")
    counters = {0: good(), 1: {**good(), **change}}
    assert verdicts(plan, counters) == failed
    if failed:
        detail = next(check.detail for check in integrity.check_counters(plan, counters) if check.status == "fail")
        assert detail.startswith("layer 1: ")


def test_a_run_in_which_no_slot_asked_for_a_fill_fails(moe):
    nothing = {**good(), "asked": 0, "answered": 0}
    assert verdicts(plan_for(moe, "half"), {0: nothing, 1: nothing}) == [ASKED]
    assert verdicts(plan_for(moe, "reroute"), {0: nothing, 1: nothing}) == []


def test_a_masked_layer_that_was_never_counted_fails(moe):
    assert verdicts(plan_for(moe, "half"), {0: good()}) == [SLOTS]
    assert SLOTS in verdicts(plan_for(moe, "half"), {})


def test_a_slot_that_reaches_a_pruned_expert_in_a_run_fails(moe):
    plan = plan_for(moe, "reroute")
    with torch.inference_mode(), installed(moe, plan) as instrument:
        moe.model(input_ids=random_ids(2, 16))
        handle = moe.layers[1].router.register_forward_hook(lambda _m, _a, out: (*out[:2], torch.full_like(out[2], 3)))
        moe.model(input_ids=random_ids(1, 1))
        handle.remove()
    counters = {index: c.read() for index, c in instrument.counters.items()}
    assert verdicts(plan, counters) == [REACHED]
    detail = integrity.check_counters(plan, counters)[0].detail
    assert detail == "layer 1: 4 slots asked for an unroutable expert"


def test_a_failing_check_stops_the_run_and_says_where():
    checks = [
        integrity.Check("a", "pass", "fine"),
        integrity.Check("b", "fail", "layer 7: no"),
        integrity.Check("c", "fail", "x"),
    ]
    with pytest.raises(IntegrityError) as info:
        integrity.demand(checks)
    assert str(info.value) == "integrity check failed: b; in layer 7: no"
    assert info.value.exit_code == 1
    assert integrity.demand(checks[:1]) == checks[:1]
    assert checks[0].to_json() == {"check": "a", "status": "pass", "detail": "fine"}
