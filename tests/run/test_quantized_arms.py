"""Quantized arms: identity, folder, integrity, bytes, the quantizer's own text, and arms that are not quantized."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from prunebench import cli
from prunebench.errors import UsageError
from prunebench.quantize import setting_of
from prunebench.run import ArmSpec, Session
from prunebench.run.arm import prepare
from prunebench.run.matching import matched
from prunebench.run.track import read_track
from prunebench.storage import account, read_headers, survey

QUICK = "w3(group=16, fewest=1)"


@pytest.fixture
def run(spec, tmp_path):
    session = Session(tmp_path)
    return lambda **changes: session.execute(prepare(spec(**changes))).run.record


def test_an_arm_that_is_not_quantized_says_nothing_of_it(spec, run):
    record = run(operator="reroute")
    assert "quantize" not in record["identity"]
    assert "quantize" not in record["arm"]
    assert "quantization" not in record
    assert record["run_id"] == run(operator="reroute", quant_text=spec().text)["run_id"]


def test_a_quantized_arm_is_another_one_and_its_integrity_is_of_quantized_weights(spec, run):
    plain, record = run(operator="reroute"), run(operator="reroute", quantize=QUICK)
    assert record["run_id"] != plain["run_id"]
    assert record["arm"]["quantize"] == "w3(group=16, fewest=1)"
    stated = record["identity"]["quantize"]
    assert (stated["experts"], stated["linears"], stated["group"], stated["zeros"]) == (3, 3, 16, "fp16")
    assert stated["calibration"]["blocks"] == 8
    checks = {one["check"]: one["status"] for one in record["integrity"]}
    assert checks["quantized weights are what is stored"] == "pass"
    assert "fail" not in checks.values()
    assert len(checks) == len(plain["integrity"]) + 1
    assert record["quantization"]["parts"]["experts"]["linears"] == 2 * 2 * 8
    assert record["mask"] == plain["mask"]


def test_its_bytes_are_the_formula_s(spec, run, model):
    from pathlib import Path

    record = run(operator="constant", quantize=QUICK)
    expected = account(
        survey(read_headers(Path(model))),
        setting_of(QUICK).bits,
        pruned={0: 8, 1: 8},
        fill_bytes=record["storage"]["parts"]["fills"],
        keep_router_rows=True,
    ).to_json()
    assert record["storage"] == expected
    assert record["storage"]["parts"]["fills"] > 0


def test_the_model_is_left_as_it_was_for_the_next_arm(spec, run):
    first = run(operator="reroute")
    run(operator="reroute", quantize="w2(group=16, fewest=1)")
    again = run(operator="reroute", seed=1)
    assert {name: one["value"] for name, one in again["metrics"].items()} == {
        name: one["value"] for name, one in first["metrics"].items()
    }


def test_the_unpruned_model_can_be_quantized(run):
    record = run(method=None, ratio=None, quantize="e2a4(group=16)")
    assert record["arm"]["dense"]
    assert record["identity"]["calibration"] is None
    assert record["identity"]["quantize"]["calibration"]["text"] == "world:general"
    assert record["storage"]["total"] < sum(record["storage"]["on_disk"]["parts"].values())


def test_the_quantizer_s_text_is_an_axis_of_its_own(spec, run):
    one = run(operator="reroute", quantize=QUICK)
    other = run(operator="reroute", quantize=QUICK, quant_text="world:arithmetic", quant_blocks=4)
    assert one["mask"] == other["mask"]
    assert other["identity"]["quantize"]["calibration"]["text"] == "world:arithmetic"
    assert other["quantization"]["tokens"] == 4 * 32
    assert one["quantization"]["sha256"] != other["quantization"]["sha256"]


def test_a_finished_quantized_run_is_recognised(spec, tmp_path):
    arm = prepare(spec(operator="reroute", quantize=QUICK))
    first, again = Session(tmp_path).execute(arm), Session(tmp_path).execute(arm)
    assert not first.reused
    assert again.reused
    assert json.loads(json.dumps(arm.known)) == arm.known


def test_folders_say_how_and_on_what(spec):
    names = [
        spec(**changes).folder.partition("/")[2]
        for changes in (
            {"method": None, "ratio": None, "quantize": "w4"},
            {"method": None, "ratio": None, "quantize": "w4", "text": "world:arithmetic", "draw": "B"},
            {"operator": "reroute", "quantize": "w4(group=64)", "quant_draw": "B"},
        )
    ]
    assert names == ["dense-w4", "dense-world_arithmetic-B-w4", "frequency-ratio0.5-reroute-A-w4_group=64_-quant=B"]


def test_what_is_said_twice_is_one_arm(spec):
    assert spec(quantize="w4(group=128)", quant_text="world:general", quant_blocks=8) == spec(quantize="w4")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_text": "world:arithmetic"}, "quant_text without a quantization"),
        ({"quantize": "w4", "quant_length": 100_000}, "longer than the model's context"),
    ],
)
def test_impossible_requests_are_refused_before_any_weight(spec, changes, said):
    with pytest.raises(UsageError, match=said):
        prepare(spec(operator="reroute", **changes))


def test_a_bad_setting_is_refused_when_it_is_named(spec):
    with pytest.raises(UsageError, match="unknown quantization 'q4'"):
        spec(quantize="q4")


TRACK = """
[track]
name = "x"
models = ["m"]
ratios = ["0.5"]
masks = ["mone"]
operators = ["constant"]
quant = { blocks = 4 }
[[grid]]
quantize = ["none", "w4"]
[[grid]]
masks = ["dense"]
quantize = ["e3a4"]
calibration = { text = "world:arithmetic" }
"""


def test_grids_quantize_their_arms_and_the_unpruned_model(tmp_path):
    path = tmp_path / "track.toml"
    path.write_text(TRACK)
    dense, plain, quantized, whole = read_track(path).arms
    assert dense == ArmSpec(model="m")
    assert plain == ArmSpec(model="m", method="mone", ratio="0.5", operator="constant")
    assert quantized == replace(plain, quantize="w4", quant_blocks=4)
    assert whole == ArmSpec(model="m", quantize="e3a4", quant_blocks=4, text="world:arithmetic")


@pytest.mark.parametrize("line", ['masks = ["dense", "mone"]\nquantize = ["w4"]', 'masks = ["dense"]'])
def test_dense_is_no_criterion_among_others(tmp_path, line):
    path = tmp_path / "track.toml"
    path.write_text(TRACK.partition("[[grid]]")[0] + "[[grid]]\n" + line)
    with pytest.raises(UsageError, match="dense is no criterion"):
        read_track(path)


# The first two keep all router rows; at renorm those of survivors are enough, edited or not.
@pytest.mark.parametrize(
    ("operator", "scale"), [("constant", None), ("reroute", None), ("reroute", "renorm"), ("compel", "renorm")]
)
def test_matching_keeps_as_many_experts_as_come_nearest(spec, run, operator, scale):
    asked = spec(operator=operator, scale=scale, ratio=None, quantize="w8(group=16, fewest=1)")
    found, near = matched(asked, "e6a8(group=16)")
    assert found == replace(asked, keep=near.setting)
    same = {"operator": operator, "scale": scale, "ratio": None, "quantize": "w8(group=16, fewest=1)"}
    assert run(keep=near.setting, **same)["storage"]["total"] == near.total
    # Nobody else comes nearer.
    for keep in (near.setting - 1, near.setting + 1):
        other = run(keep=keep, **same)
        assert abs(other["storage"]["total"] - near.target) >= abs(near.total - near.target)


def test_the_gap_that_is_printed_is_that_of_what_is_stored(model, suite, tmp_path, capsys):
    """Experts for which MoRA finds no proxy store nothing, which nobody knows before."""
    asked = ["run", "--model", model, "--method", "frequency", "--operator", "mora", "--suite", suite]
    asked += ["--blocks", "8", "--length", "32", "--out", str(tmp_path), "--json"]
    match_it = ["--quantize", "w8(group=16, fewest=1)", "--match", "e6a8(group=16)"]
    assert cli.main([*asked, *match_it, "--dry-run"]) == 0
    most = json.loads(capsys.readouterr().out)["match"]
    assert cli.main([*asked, *match_it]) == 0
    data = json.loads(capsys.readouterr().out)
    near, total = data["match"], data["record"]["storage"]["total"]
    assert near["total"] == total < most["total"]
    assert near["gap"] == pytest.approx(total / near["target"] - 1)
    assert (near["keep"], near["target"]) == (most["keep"], most["target"])


def test_what_an_operator_of_ones_own_stores_is_not_known_beforehand(spec):
    with pytest.raises(UsageError, match=r"what mone stores for a pruned expert is not known beforehand.*--operator"):
        matched(spec(method="mone", ratio=None, quantize="w4"), "e3a4")


def test_an_arm_with_a_budget_has_nothing_to_match_with(spec):
    with pytest.raises(UsageError, match="nothing to match with"):
        matched(spec(operator="reroute", quantize="w4"), "e3a4")


def test_edits_of_weights_that_stay_as_they_are_are_run_with(spec, tmp_path, monkeypatch):
    """At e16a8 experts are not quantized, so nothing but the plan has what their editor made of them."""
    seen = {}
    evaluate = Session._evaluate

    def watched(self, arm, loaded, deployed, *more):
        seen[arm.spec.quantize] = deployed.edits
        return evaluate(self, arm, loaded, deployed, *more)

    monkeypatch.setattr(Session, "_evaluate", watched)
    session = Session(tmp_path)
    whole, beside, inside = None, "e16a8(group=16, fewest=1)", QUICK
    for quantize in (whole, beside, inside):
        session.execute(prepare(spec(operator="compel", scale="renorm", quantize=quantize)))
    assert seen[whole]
    assert list(seen[beside]) == list(seen[whole])
    assert seen[inside] == {}
