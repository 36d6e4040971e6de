"""Arms whose operator is fitted in a fit pass: what they need, what their records say, and what stays as it was."""

from __future__ import annotations

import pytest

from prunebench.errors import UsageError
from prunebench.fit import ModelSize, stored_per_expert
from prunebench.record import comparable, validate
from prunebench.run import Session
from prunebench.run.arm import prepare

OPERATORS = {
    "tilt": ("rank=4",),
    "neurons": ("tilt_rank=4",),
    "svd": ("tilt_rank=5",),
    "svd-whitened": ("tilt_rank=5",),
}
PRUNED, LAYERS = 8, 2


@pytest.mark.parametrize("name", OPERATORS)
def test_an_arm_runs_and_its_record_says_how_the_fit_went(name, spec, tmp_path):
    arm = spec(operator=name, operator_parameters=OPERATORS[name], blocks=16)
    record = Session(tmp_path / "one").execute(prepare(arm)).run.record
    validate(record)
    fit = record["fit"]
    assert fit["tokens"] == 16 * 32
    assert fit["proof"]["streamed"]
    pruned = {str(layer["index"]): layer["pruned"] for layer in record["mask"]["layers"]}
    assert {index: layer["experts"] for index, layer in fit["layers"].items()} == pruned
    assert {index: len(layer["squared_error"]) for index, layer in fit["layers"].items()} == {"0": PRUNED, "1": PRUNED}
    size = ModelSize.gated(total=0, layers=LAYERS, experts=16, top_k=4, width=32, neurons=16)
    rank = int(OPERATORS[name][0].partition("=")[2])
    each = stored_per_expert(size, name, rank=rank)
    constants = sum(len(layer["fallbacks"]) for layer in fit["layers"].values())
    stored = (PRUNED * LAYERS - constants) * each + constants * 32
    assert record["storage"]["parts"]["fills"] == 4 * stored
    assert record["arm"]["operator"] == name
    assert {entry["status"] for entry in record["integrity"]} <= {"pass", "not applicable"}
    again = Session(tmp_path / "two").execute(prepare(arm)).run.record
    assert comparable(again) == comparable(record)
    assert Session(tmp_path / "one").execute(prepare(arm)).reused


@pytest.mark.parametrize("name", OPERATORS)
def test_a_fit_pass_needs_no_score_pass_and_holds_a_given_mask(name, spec, tmp_path):
    session = Session(tmp_path)
    chosen = session.execute(prepare(spec())).run
    assert session.score_passes == 1
    held = {"method": None, "ratio": None, "mask": str(chosen.path), "operator": name}
    fills = {}
    for draw in ("A", "B"):
        run = session.execute(prepare(spec(**held, operator_parameters=OPERATORS[name], draw=draw))).run
        assert run.record["mask"] == chosen.record["mask"]
        assert run.record["identity"]["calibration"]["fit"]["draw"] == draw
        fills[draw] = run.record["tensors"]
    assert session.score_passes == 1
    assert fills["A"] != fills["B"]
    crossed = spec(operator=name, operator_parameters=OPERATORS[name], fit_draw="B")
    assert session.execute(prepare(crossed)).run.record["tensors"] == fills["B"]


@pytest.mark.parametrize("operator", ["constant", "zero", "reroute"])
def test_other_arms_have_no_fit_pass_and_say_nothing_of_one(operator, spec, tmp_path, monkeypatch):
    from prunebench.run import session as session_module

    monkeypatch.setattr(session_module, "fit_plan", lambda *_, **__: pytest.fail("a fit pass"))
    record = Session(tmp_path).execute(prepare(spec(operator=operator))).run.record
    assert "fit" not in record


def test_no_rank_is_refused_before_any_weight_is_read(spec, monkeypatch):
    from prunebench.run import arm as arm_module

    monkeypatch.setattr(arm_module, "resolve_model", lambda *_: pytest.fail("looked for the model"))
    with pytest.raises(UsageError, match="rank 0 is no tilt"):
        prepare(spec(operator="tilt", operator_parameters=("rank=0",)))


METHOD_SAYS = """
    visits: ClassVar[bool] = True

    def replace_needs(self):
        return (Count(), OutputMoments())

    def replace(self, layer, pruned):
        rows = layer.accumulate(pruned, lambda rows: len(rows.x_SD))
        counted = {e: int(n) for e, n in enumerate(layer.stats["count"]) if e in pruned and n}
        assert rows == counted, (rows, counted)
        return Replacements({e: Constant.of(torch.zeros(layer.width)) for e in pruned})
"""


def test_a_score_pass_and_a_fit_pass_meet_the_same_tokens_in_one_operator(spec, material, tmp_path):
    method = material.write_method(tmp_path / "methods", rest=METHOD_SAYS)
    session = Session(tmp_path / "out")
    record = session.execute(prepare(spec(method=method, batch_tokens=100, fit_draw="B"))).run.record
    assert record["fit"]["layers"] == {}
    assert session.score_passes == 2
