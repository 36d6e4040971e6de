"""`prunebench compare`: two runs, declared families with a plot, and protocols; and which options go together."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from prunebench import cli

FAMILIES = """
name = "demo"
date = 2026-11-30
note = "written before"

[[family]]
name = "scale"
suite = "multiple_choice"
each = { mask = ["mone", "random"] }
label = "{mask} trained - other"
arm = { model = "tiny-olmoe", mask = "{mask}", ratio = "0.5", draw = "A" }
a = { operator = "reroute@trained" }
b = { operator = "reroute@other" }

[[family]]
name = "tilt"
suite = "multiple_choice"
label = "tilt - constant"
arm = { model = "tiny-olmoe", mask = "mone", ratio = "0.5", draw = "A" }
a = { operator = "tilt" }
b = { operator = "constant" }
"""


@pytest.fixture(scope="module")
def records(factory, tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    factory.demo(folder, n=30)
    return folder


@pytest.fixture
def families(tmp_path):
    path = tmp_path / "families.toml"
    path.write_text(FAMILIES)
    return path


def call(capsys, *arguments):
    capsys.readouterr()
    code = cli.main([str(argument) for argument in arguments])
    return code, capsys.readouterr()


def test_families_are_answered_corrected_and_drawn(records, families, tmp_path, capsys):
    out = tmp_path / "plots"
    code, shown = call(capsys, "compare", records, "--families", families, "--plot", out, "--json")
    assert code == 0
    data = json.loads(shown.out)
    assert data["declaration"]["sha256"] == hashlib.sha256(families.read_bytes()).hexdigest()
    assert data["declaration"]["date"] == "2026-11-30"
    assert [one["label"] for one in data["contrasts"]] == ["mone trained - other", "random trained - other"]
    for one in data["contrasts"]:
        assert {"difference", "p", "holm_family", "holm_all", "verdict", "bound"} <= set(one)
    assert [one["label"] for one in data["not_measured"]] == ["tilt - constant"]
    assert data["plots"] == [str(out / "forest.svg"), str(out / "forest.html")]
    assert "mone trained - other" in (out / "forest.svg").read_text()

    code, shown = call(capsys, "compare", records, "--families", families)
    assert code == 0
    for word in ("Holm family", "Holm all", "verdict", data["declaration"]["sha256"], "written before", "not measured"):
        assert word in shown.out


def test_two_runs_show_flips_and_call_themselves_exploratory(records, capsys):
    runs = [records / f"tiny-olmoe-{name}" for name in ("mone-reroute-trained", "mone-reroute-other")]
    code, shown = call(capsys, "compare", *runs, "--json")
    assert code == 0
    data = json.loads(shown.out)
    assert (data["families"], data["status"]) == (None, "exploratory, corrected for nothing")
    task = next(one for one in data["contrasts"] if one["task"] == "recall" and one["metric"] == "acc")
    assert {"a_only", "b_only", "exact", "mid_p"} <= set(task["mcnemar"])
    suites = {one["suite"]: one for one in data["contrasts"] if not one["task"]}
    assert suites["multiple_choice"]["mcnemar"] is None, "several tasks are no one sample"
    assert suites["arithmetic"]["mcnemar"] is not None
    assert suites["perplexity"]["mcnemar"] is None
    assert "McNemar" in call(capsys, "compare", *runs)[1].out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a"], "RUN_B is missing"),
        (["a", "b", "--families", "f"], "RUN_B with --families"),
        (["a", "--families", "f", "--suite", "s"], "--suite with --families"),
        (["a", "--families", "f", "--robustness"], "--robustness with --families"),
        (["a", "b", "--plot", "p"], "--plot without --families"),
        (["a", "b", "--robustness"], "--robustness without one --suite"),
        (["a", "b", "--robustness", "--suite", "s", "--suite", "t"], "--robustness without one --suite"),
        (["a", "b", "--few-shot", "s"], "--few-shot without --robustness"),
        (["a", "b", "--fixed-answer", "t"], "--fixed-answer without --robustness"),
        (["a", "b", "--robustness", "--suite", "s"], "no such run folder"),
        (["nowhere", "--families", "f"], "cannot read the families"),
    ],
    ids=" ".join,
)
def test_options_that_do_not_go_together_are_one_line(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, shown = call(capsys, "compare", *arguments)
    assert (code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert says in shown.err


def test_families_of_which_none_can_be_measured(records, tmp_path, capsys):
    path = tmp_path / "f.toml"
    path.write_text(FAMILIES.replace("tiny-olmoe", "tiny-nothing"))
    code, shown = call(capsys, "compare", records, "--families", path)
    assert code == 3
    assert "none of 3 contrasts can be measured" in shown.err
    assert "no run of tiny-nothing" in shown.err


def test_a_claim_on_too_few_items_is_refused(factory, families, tmp_path, capsys):
    factory.demo(tmp_path / "few", n=10)
    code, shown = call(capsys, "compare", tmp_path / "few", "--families", families)
    assert code == 2
    assert "too few items for a claim: 10 items, fewer than 30" in shown.err
    assert "scale: mone trained - other" in shown.err


def test_robustness_is_one_command(factory, tmp_path, capsys):
    for seed, name in enumerate("ab"):
        rng_items = [
            i for i in factory.make_items(seed=seed, n=40) if i.suite == "multiple_choice" and i.metric == "acc"
        ]
        detail = '{"loglikelihoods": [0.0, 1.0], "gold": 1, "bytes": [%d, 2]}'
        items = [replace(i, detail=detail % (3 if i.task == "yes_no" else int(i.item[-3:]))) for i in rng_items]
        factory.write(tmp_path / name, items, identity={"seed": seed})
    runs = (tmp_path / "a", tmp_path / "b")
    asked = ("compare", *runs, "--robustness", "--suite", "multiple_choice", "--fixed-answer", "yes_no")
    code, shown = call(capsys, *asked, "--json")
    assert code == 0
    found = {one["name"]: one for one in json.loads(shown.out)["protocols"]}
    assert found["fixed answers"]["tasks"] == ["yes_no"]
    assert found["options of the item"]["tasks"] == ["recall"]
    assert found["with examples"]["note"] == "no suite with examples was named"
    assert "protocol" in call(capsys, *asked)[1].out
