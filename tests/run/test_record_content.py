"""A record says what was run, and its numbers are those of its items and of the files it speaks of."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from prunebench.analysis import metrics_from_items
from prunebench.errors import UsageError
from prunebench.install import remove_experts
from prunebench.loader import load_method
from prunebench.mask import Mask
from prunebench.moe import load_model
from prunebench.plan import make_plan
from prunebench.record import comparable, run_id, validate
from prunebench.routing import Scale
from prunebench.run import ArmSpec, Session
from prunebench.run.arm import prepare
from prunebench.storage import stored_bytes
from prunebench.testing import random_model


@pytest.fixture(scope="module")
def arms(request, tmp_path_factory):
    """Records of a few arms, by what was asked for, all made by one session."""
    model, suite = request.getfixturevalue("model"), request.getfixturevalue("suite")
    out = tmp_path_factory.mktemp("arms")
    session = Session(out)

    def make(**changes):
        values = {"model": model, "method": "frequency", "ratio": "0.5", "suites": (suite,), "blocks": 8, "length": 32}
        return session.execute(prepare(ArmSpec(**{**values, **changes})))

    return {
        "dense": make(method=None, ratio=None),
        "renorm": make(operator="reroute", scale="renorm"),
        "keep": make(operator="reroute", scale="keep"),
        "constant": make(operator="constant"),
        "zero": make(operator="zero"),
        "other": make(operator="reroute", scale="other"),
        "kept": make(ratio=None, keep=12),
        "limit": make(limit=2),
    }


def test_every_record_is_valid_and_its_id_is_its_identitys(arms):
    for outcome in arms.values():
        validate(outcome.run.record)
        assert outcome.run.record["run_id"] == run_id(outcome.run.record["identity"])
    assert len({outcome.run.record["run_id"] for outcome in arms.values()}) == len(arms)


def test_metrics_are_those_of_the_items(arms):
    for outcome in arms.values():
        record, items = outcome.run.record, outcome.run.items
        assert record["metrics"] == metrics_from_items(items, record["headline"])
        by_hand = [item.value for item in items.items() if item.metric == "acc"]
        assert record["metrics"]["quick"]["value"] == pytest.approx(sum(by_hand) / len(by_hand), abs=1e-12)
        assert record["metrics"]["quick"]["n"] == len(by_hand)


def test_a_limit_makes_a_run_partial_and_only_a_limit_does(arms):
    states = {name: outcome.run.record["status"] for name, outcome in arms.items()}
    assert states.pop("limit") == "partial"
    assert set(states.values()) == {"complete"}
    assert arms["limit"].run.record["metrics"]["quick"]["n"] == 2


def test_the_arm_says_what_was_asked_and_what_came_of_it(arms):
    def said(name, *keys):
        return tuple(arms[name].run.record["arm"][key] for key in keys)

    what = ("mask", "operator", "scale", "resolved_scale", "ratio", "keep", "dense")
    assert said("dense", *what) == (None, None, None, None, None, None, True)
    assert said("renorm", *what) == ("frequency", "reroute", "renorm", "renorm", 0.5, None, False)
    assert said("other", *what) == ("frequency", "reroute", "other", "renorm", 0.5, None, False)
    assert said("constant", *what) == ("frequency", "constant", None, None, 0.5, None, False)
    assert said("zero", *what)[:4] == ("frequency", "zero", None, None)
    assert said("kept", *what) == ("frequency", "reroute", "trained", "keep", 0.25, 12, False)


def test_the_recorded_mask_is_the_one_of_the_identity_and_prunes_what_was_asked(arms):
    for name, outcome in arms.items():
        record = outcome.run.record
        if name == "dense":
            assert record["mask"] is record["identity"]["mask"] is None
            continue
        mask = Mask.from_json(record["mask"])
        assert mask.digest == record["identity"]["mask"]["digest"]
        assert {len(layer.pruned) for layer in mask.layers} == {4 if name == "kept" else 8}


def test_a_recorded_mask_given_as_a_file_gives_the_same_outcomes(arms, spec, tmp_path):
    made = arms["renorm"].run
    Mask.from_json(made.record["mask"]).save(tmp_path / "m.json")
    arm = spec(method=None, ratio=None, mask=str(tmp_path / "m.json"), operator="reroute", scale="renorm")
    given = Session(tmp_path).execute(prepare(arm)).run
    assert list(given.items.items()) == list(made.items.items())
    assert given.record["metrics"] == made.record["metrics"]
    assert given.record["arm"]["mask"] == "m"
    assert given.record["identity"]["mask"]["digest"] == made.record["identity"]["mask"]["digest"]


def test_rerouting_at_renorm_stores_what_a_physically_smaller_checkpoint_stores(arms, model, tmp_path):
    record = arms["renorm"].run.record
    loaded = load_model("m", Path(model))
    plan = make_plan(loaded.moe, Mask.from_json(record["mask"]), load_method("reroute"), None, scale=Scale("renorm"))
    assert not remove_experts(loaded.moe, plan)
    loaded.moe.model.save_pretrained(tmp_path)
    saved = stored_bytes(tmp_path)
    assert record["storage"]["total"] == saved["total"]
    assert record["storage"]["parts"] == saved["parts"]
    total = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert record["storage"]["total"] == total


def test_keeping_the_gates_keeps_the_router_rows_and_nothing_else(arms, model):
    dense, renorm, keep = (arms[name].run.record["storage"]["parts"] for name in ("dense", "renorm", "keep"))
    assert keep["router"] == dense["router"] == 2 * 16 * 32 * 4
    assert renorm["router"] == dense["router"] // 2
    assert keep["experts"] == renorm["experts"] == dense["experts"] // 2
    assert {part: size for part, size in dense.items() if part not in {"experts", "router"}} == {
        part: size for part, size in renorm.items() if part not in {"experts", "router"}
    }
    assert arms["dense"].run.record["storage"]["total"] == stored_bytes(Path(model))["total"]


def test_constants_store_one_value_per_channel_in_the_experts_dtype(arms):
    constant, zero = (arms[name].run.record["storage"]["parts"] for name in ("constant", "zero"))
    assert constant["fills"] == 2 * 8 * 32 * 4
    assert zero["fills"] == 0
    assert constant["router"] == zero["router"] == arms["dense"].run.record["storage"]["parts"]["router"]
    tensors = arms["constant"].run.record["tensors"]
    assert {index: len(group["experts"]) for index, (group,) in tensors.items()} == {"0": 8, "1": 8}
    shapes = [group["tensors"]["mean_D"]["shape"] for (group,) in tensors.values()]
    assert sum(8 * math.prod(shape) for shape in shapes) * 4 == constant["fills"]
    assert arms["zero"].run.record["tensors"] == {}


def test_constants_of_a_bfloat16_checkpoint_are_counted_in_bfloat16(spec, model, tmp_path):
    from transformers import AutoModelForCausalLM

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(half)
    for file in Path(model).glob("tokenizer*"):
        (half / file.name).write_bytes(file.read_bytes())
    record = Session(tmp_path / "out").execute(prepare(spec(model=str(half), operator="constant"))).run.record
    assert record["storage"]["parts"]["fills"] == 2 * 8 * 32 * 2
    assert record["identity"]["dtype"] == "float32"


def test_integrity_entries_are_all_there_and_passed(arms):
    names = {entry["check"] for entry in arms["renorm"].run.record["integrity"]}
    assert len(names) == len(arms["renorm"].run.record["integrity"]) >= 8
    for outcome in arms.values():
        assert {entry["status"] for entry in outcome.run.record["integrity"]} <= {"pass", "not applicable"}
    assert {entry["check"] for entry in arms["dense"].run.record["integrity"]} < names


def test_routing_diagnostics_are_shares(arms):
    assert arms["dense"].run.record["routing"]["layers"] == {}
    for name in ("renorm", "keep", "constant", "zero"):
        layers = arms[name].run.record["routing"]["layers"]
        assert set(layers) == {"0", "1"}
        for layer in layers.values():
            for share in ("filled_share", "displaced_share", "above_one_share"):
                assert 0 <= layer[share] <= 1
            assert np.isfinite(layer["keep_over_renorm"])


def test_keep_and_renorm_have_different_numbers_and_scales_that_mean_the_same_have_equal_ones(arms):
    details = {name: [item.detail for item in outcome.run.items.items()] for name, outcome in arms.items()}
    assert details["renorm"] == details["other"]
    assert details["keep"] != details["renorm"]
    assert details["dense"] != details["renorm"]
    assert details["constant"] != details["zero"]


def test_only_volatile_fields_tell_two_executions_apart(arms, spec, tmp_path):
    again = Session(tmp_path).execute(prepare(spec(operator="constant")))
    assert comparable(again.run.record) == comparable(arms["constant"].run.record)
    assert (again.folder / "items.parquet").read_bytes() == (arms["constant"].folder / "items.parquet").read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"draw": "B"},
        {"operator": "constant", "fit_draw": "B"},
        {"dtype": "bfloat16"},
        {"batch_tokens": 64},
        {"limit": 2},
        {"experts_implementation": "grouped_mm"},
        {"ratio": "0.25"},
    ],
    ids=repr,
)
def test_what_can_change_a_number_changes_the_run_id(changes, arms, spec, tmp_path):
    other = Session(tmp_path).execute(prepare(spec(**changes))).run.record
    assert other["run_id"] != Session(tmp_path / "base").execute(prepare(spec())).run.record["run_id"]


@pytest.mark.parametrize("family", ["deepseek_v3", "granitemoe", "qwen3_moe", "deepseek_v2.groups"])
def test_every_family_runs_dense_rerouted_and_filled(family, spec, material, tmp_path):
    folder = material.write_model(tmp_path / family, family)
    session = Session(tmp_path / "out")
    for changes in ({"method": None, "ratio": None}, {"operator": "reroute", "scale": "other"}, {"method": "mone"}):
        record = session.execute(prepare(spec(model=str(folder), **changes))).run.record
        assert record["status"] == "complete"
    assert session.score_passes == 1


@pytest.mark.parametrize(
    "case",
    [
        ("mixtral", "renorm", True),
        ("mixtral", "keep", False),
        ("ernie4_5_moe", "renorm", False),  # removal rescales the softmax, but not the bias added to it
        ("dots1.no_renorm", "keep", True),  # independent scores, not renormalised: all scales are one
    ],
)
def test_router_rows_go_where_nothing_needs_them(case, spec, material, tmp_path):
    family, scale, go = case
    folder = str(material.write_model(tmp_path / family, family))
    arm = {"model": folder, "method": "random", "operator": "reroute", "scale": scale}
    sizes = {
        name: Session(tmp_path / "out").execute(prepare(spec(**changes))).run.record["storage"]["parts"]
        for name, changes in (("dense", {"model": folder, "method": None, "ratio": None}), ("pruned", arm))
    }
    assert (sizes["pruned"]["router"] < sizes["dense"]["router"]) is go


def test_a_router_with_one_scale_is_refused_another_before_any_weight_is_read(spec, material, tmp_path):
    folder = str(material.write_model(tmp_path / "phimoe", "phimoe", top_k=2))
    arm = {"model": folder, "method": "random", "operator": "reroute"}
    with pytest.raises(UsageError, match=r"scale keep is not defined .*expected renorm"):
        prepare(spec(**arm, scale="keep"))
    layers = Session(tmp_path / "out").execute(prepare(spec(**arm))).run.record["routing"]["layers"]
    assert all("keep_over_renorm" not in layer and layer["displaced_share"] > 0 for layer in layers.values())


def test_the_groups_of_a_router_are_chosen_anew_only_if_asked(spec, material, tmp_path):
    folder = str(material.write_model(tmp_path / "grouped", "deepseek_v3.groups"))
    session = Session(tmp_path / "out")
    arm = {"model": folder, "method": "random", "operator": "reroute", "scale": "renorm"}
    frozen, anew = (session.execute(prepare(spec(**arm, **more))).run for more in ({}, {"groups": "reselect"}))
    assert "groups" not in frozen.record["identity"]
    assert anew.record["identity"]["groups"] == "reselect"
    assert anew.record["mask"] == frozen.record["mask"]
    assert anew.path != frozen.path
    assert {check["status"] for check in anew.record["integrity"]} <= {"pass", "not applicable"}
    assert anew.items.detail.tolist() != frozen.items.detail.tolist()
    with pytest.raises(UsageError, match="constant refills no slots, so its groups stay"):
        prepare(spec(model=folder, method="mone", operator="constant", groups="reselect"))


def test_a_grouped_router_keeps_all_its_rows(spec, model, tmp_path):
    grouped = tmp_path / "grouped"
    random_model("deepseek_v2.groups", vocab_size=1024).save_pretrained(grouped)
    for file in Path(model).glob("tokenizer*"):
        (grouped / file.name).write_bytes(file.read_bytes())
    arm = spec(model=str(grouped), operator="reroute", scale="renorm")
    record = Session(tmp_path / "out").execute(prepare(arm)).run.record
    loaded = load_model("m", grouped)
    mask = Mask.from_json(record["mask"])
    plan = make_plan(loaded.moe, mask, load_method("reroute"), None, scale=Scale("renorm"))
    assert set(remove_experts(loaded.moe, plan)) == {1, 2}
    left = sum(layer.router.weight.nbytes for layer in loaded.moe.layers)
    assert record["storage"]["parts"]["router"] == left == 2 * 16 * 32 * 4
