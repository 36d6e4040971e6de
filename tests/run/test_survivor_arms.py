"""Arms in which survivors answer or are edited, or whose operator stands in some layers only."""

from __future__ import annotations

import pytest

from prunebench.board.naming import identifying_cells
from prunebench.errors import UsageError
from prunebench.fit import ModelSize, remap_summary, stored_per_expert
from prunebench.record import comparable, validate
from prunebench.run import Session
from prunebench.run.arm import prepare

SURVIVORS = {"mora": ("threshold=-9.0",), "conmoe-nearest": (), "conmoe-functional": (), "compel": ()}
PRUNED, LAYERS = 8, 2


@pytest.mark.parametrize("name", SURVIVORS)
def test_an_arm_runs_and_its_record_says_who_answers(name, spec, tmp_path):
    arm = spec(operator=name, operator_parameters=SURVIVORS[name], blocks=16)
    record = Session(tmp_path / "one").execute(prepare(arm)).run.record
    validate(record)
    assert record["arm"]["operator"] == name
    assert record["arm"]["scale"] == ("trained" if name == "compel" else None)
    assert {check["status"] for check in record["integrity"]} <= {"pass", "not applicable"}
    stored = 2 * 32 * PRUNED * LAYERS if name == "mora" else 0
    assert record["storage"]["parts"]["fills"] == 4 * stored
    assert ("fit" in record) == (name in ("mora", "conmoe-functional"))
    assert bool(record["tensors"]) == (name == "mora")
    assert ("edits" in record) == (name == "compel")
    if name == "compel":
        assert "remap" not in record
        survivors = {
            str(layer["index"]): sorted(set(range(16)) - set(layer["pruned"])) for layer in record["mask"]["layers"]
        }
        assert {index: group["experts"] for index, [group] in record["edits"].items()} == survivors
    else:
        layers = {
            int(index): {int(e): j for e, j in layer.items()} for index, layer in record["remap"]["layers"].items()
        }
        pruned = {layer["index"]: set(layer["pruned"]) for layer in record["mask"]["layers"]}
        assert {index: set(layer) for index, layer in layers.items()} == pruned
        assert all(j not in pruned[index] for index, layer in layers.items() for j in layer.values())
        summary = remap_summary(layers).to_json()
        assert {key: record["remap"][key] for key in ("slots", "targets", "most")} == {
            key: summary[key] for key in ("slots", "targets", "most")
        }
        outcomes = {"mora": 16, "conmoe-nearest": 0, "conmoe-functional": 16}
        assert sum(record["remap"]["outcomes"].values()) == outcomes[name]
    again = Session(tmp_path / "two").execute(prepare(arm)).run.record
    assert comparable(again) == comparable(record)
    assert Session(tmp_path / "one").execute(prepare(arm)).reused


def test_an_operator_that_refills_what_it_leaves_open_takes_a_scale(spec, tmp_path):
    session = Session(tmp_path)
    for name in ("mora", "compel"):
        runs = [
            session.execute(prepare(spec(operator=name, scale=scale, blocks=16))).run for scale in ("keep", "renorm")
        ]
        assert [run.record["arm"]["resolved_scale"] for run in runs] == ["keep", "renorm"]
        assert list(runs[0].items.detail) != list(runs[1].items.detail)
    # Every slot found its proxy, so that the scale is of no use; nobody could know before.
    arm = spec(operator="mora", operator_parameters=("threshold=-9.0",), scale="keep", blocks=16)
    assert session.execute(prepare(arm)).run.record["arm"]["resolved_scale"] is None
    with pytest.raises(UsageError, match="scale keep has no meaning for conmoe-nearest"):
        prepare(spec(operator="conmoe-nearest", scale="keep"))


def test_a_fit_of_what_fits_nothing_is_refused_and_the_fishers_draw_is_the_fits(spec, tmp_path):
    with pytest.raises(UsageError, match="conmoe-nearest fits nothing"):
        prepare(spec(operator="conmoe-nearest", fit_draw="B"))
    session = Session(tmp_path)
    records = [session.execute(prepare(spec(operator="compel", blocks=16, fit_draw=draw))).run.record for draw in "AB"]
    assert records[0]["mask"] == records[1]["mask"]
    assert records[0]["edits"] != records[1]["edits"]
    assert [record["identity"]["calibration"]["fit"]["draw"] for record in records] == ["A", "B"]


# ---------------------------------------------------------------------------------------------------- some layers only


def test_an_operator_in_one_layer_leaves_the_constant_in_the_others(spec, tmp_path):
    session = Session(tmp_path)
    whole, some, constant = (
        session.execute(prepare(spec(blocks=16, **more))).run
        for more in (
            {"operator": "tilt", "operator_parameters": ("rank=4",)},
            {"operator": "tilt", "operator_parameters": ("rank=4",), "operator_layers": "1"},
            {"operator": "constant"},
        )
    )
    record = some.record
    validate(record)
    tilt = stored_per_expert(
        ModelSize.gated(total=0, layers=2, experts=16, top_k=4, width=32, neurons=16), "tilt", rank=4
    )
    fallbacks = 8 * 32  # of the layer without a tilt
    assert record["storage"]["parts"]["fills"] == 4 * (fallbacks + 8 * tilt)
    assert set(record["fit"]["layers"]) == {"1"}
    assert record["fit"]["layers"]["1"] == whole.record["fit"]["layers"]["1"]
    for other, index in ((whole, "1"), (constant, "0")):
        assert record["tensors"][index] == other.record["tensors"][index]
    assert record["identity"]["operator_layers"]["only"] == [1]
    assert "operator_layers" not in whole.record["identity"]
    assert some.path.name.endswith("tilt-rank=4-layers=1-A")
    tilted = "clip=4.0, rank=4, ridge=0.01"
    cells = [row[2].visible for row in identifying_cells([whole, some, constant])]
    assert cells == [f"tilt {tilted}", f"tilt {tilted}, only in layers 1", "constant"]
    assert session.execute(
        prepare(spec(blocks=16, operator="tilt", operator_parameters=("rank=4",), operator_layers=" 1 "))
    ).reused


@pytest.mark.parametrize("operator", ["reroute", "conmoe-nearest", "compel", "zero"])
def test_operators_without_a_fit_pass_stand_in_some_layers_too(operator, spec, tmp_path):
    record = Session(tmp_path).execute(prepare(spec(blocks=16, operator=operator, operator_layers="0"))).run.record
    assert set(record["tensors"]) == {"1"}
    assert set(record.get("edits", {})) == ({"0"} if operator == "compel" else set())
    assert record["storage"]["parts"]["fills"] == 4 * 8 * 32


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"operator": "tilt", "operator_layers": "7"}, "operator layer 7 is no MoE layer.*expected 0, 1"),
        ({"operator": "tilt", "operator_layers": "one"}, "operator layers 'one'; expected indices such as 15"),
        ({"operator": "tilt", "operator_layers": ""}, "operator layers ''"),
        ({"operator": "constant", "operator_layers": "0"}, "constant answers in the other layers too"),
        ({"method": None, "ratio": None, "operator_layers": "0"}, "the dense model has no operator"),
    ],
)
def test_impossible_layers_are_one_line(more, says, spec):
    with pytest.raises(UsageError, match=says):
        prepare(spec(**more))


# ------------------------------------------------------------------------------------------------------------ resumed


def test_a_killed_fit_goes_on_behind_its_finished_layers(spec, tmp_path, monkeypatch):
    from prunebench import plan as plan_module

    arm = spec(operator="tilt", operator_parameters=("rank=4",), blocks=16)
    whole = Session(tmp_path / "whole").execute(prepare(arm)).run
    asked = []
    ask = plan_module._ask

    def killed(view, *rest):
        if view.index == 1:
            raise KeyboardInterrupt
        return ask(view, *rest)

    monkeypatch.setattr(plan_module, "_ask", killed)
    with pytest.raises(KeyboardInterrupt):
        Session(tmp_path / "cut").execute(prepare(arm))
    saved = list((tmp_path / "cut" / ".cache").glob("fit-*/layer-*"))
    assert [path.name for path in saved] == ["layer-0.safetensors"]
    monkeypatch.setattr(plan_module, "_ask", lambda view, *rest: asked.append(view.index) or ask(view, *rest))
    resumed = Session(tmp_path / "cut").execute(prepare(arm)).run
    assert asked == [1]
    assert comparable(resumed.record) == comparable(whole.record)
    assert not list((tmp_path / "cut" / ".cache").glob("fit-*"))
