"""Every arm of a track has a readable folder of its own, below the records folder, whatever its names are."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from prunebench.errors import UsageError
from prunebench.run import ArmSpec
from prunebench.run.arm import matches

ARM = {"model": "tiny-olmoe", "method": "reap", "ratio": "0.5"}


def test_a_plain_arm_has_a_plain_name():
    assert ArmSpec(**ARM).folder == "tiny-olmoe/reap-ratio0.5-A"
    assert ArmSpec("tiny-olmoe").folder == "tiny-olmoe/dense"
    assert ArmSpec("org/name@main", limit=3).folder == "org--name_main/dense-limit3"


def test_arms_that_differ_have_different_folders():
    changes = [
        {},
        {"model": "tiny-moonlight"},
        {"method": "mone"},
        {"ratio": "0.25"},
        {"ratio": None, "keep": 8},
        {"operator": "constant"},
        {"operator": "reroute", "scale": "keep"},
        {"operator": "reroute", "scale": "interp:0.5"},
        {"operator": "reroute", "scale": "interp:0.25"},
        {"operator": "reroute", "operator_parameters": ("scale=renorm",)},
        {"parameters": ("x=1",)},
        {"draw": "B"},
        {"text": "world:code"},
        {"fit_draw": "B"},
        {"operator": "reroute", "groups": "reselect"},
        {"fit_text": "world:code"},
        {"fit_blocks": 8},
        {"fit_length": 16},
        {"fit_text": "world:code", "fit_draw": "B"},
        {"limit": 4},
        {"method": None, "ratio": None, "mask": "a.json", "operator": "zero"},
        {"method": None, "ratio": None},
    ]
    folders = [ArmSpec(**{**ARM, **change}).folder for change in changes]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "../../etc/passwd"},
        {"model": "/"},
        {"model": "a\\b\n\tc"},
        {"method": "../x/../my method.py"},
        {"mask": "../../masks/./..", "method": None, "ratio": None},
        {"text": "file:/a/../b c.txt"},
        {"scale": "../.."},
        {"parameters": ("path=/etc/../passwd", "x=" + "9" * 600)},
        {"parameters": ("x=" + "π" * 600,)},
        {"operator": ".hidden.py"},
        {"ratio": "../0.5"},
    ],
    ids=repr,
)
def test_no_name_leads_out_of_the_records_folder_or_is_too_long(change, tmp_path):
    folder = ArmSpec(**{**ARM, **change}).folder
    parts = folder.split("/")
    assert len(parts) == 2
    for part in parts:
        assert part
        assert not part.startswith(".")
        assert len(part.encode()) < 200
    (tmp_path / folder).mkdir(parents=True)


def test_long_names_that_differ_at_their_end_stay_different():
    one, other = (ArmSpec(**{**ARM, "parameters": (f"x={'9' * 300}{end}",)}).folder for end in "12")
    assert one != other


@pytest.mark.parametrize("typed", [".", "./", "../my model", "../my model/"])
def test_a_model_folder_is_called_by_its_own_name_however_it_was_typed(typed, tmp_path, monkeypatch):
    here = tmp_path / "my model"
    here.mkdir()
    monkeypatch.chdir(here)
    assert ArmSpec(model=typed).folder == "my_model/dense"


def test_a_linked_model_folder_is_called_as_in_its_record(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert ArmSpec(model=str(tmp_path / "link")).folder == "real/dense"


def test_an_arm_survives_json():
    arm = ArmSpec(**ARM, parameters=("x=1",), suites=("code",), limit=2)
    assert ArmSpec.from_json(arm.to_json()) == arm


def test_an_identity_matches_what_is_known_of_it_and_nothing_else():
    identity = {"model": {"name": "m", "weights": "w"}, "mask": {"digest": "d", "source": "reap"}, "seed": 0}
    assert matches(identity, {})
    assert matches(identity, {"model": {"name": "m"}})
    assert matches(identity, identity)
    assert not matches(identity, {"model": {"name": "other"}})
    assert not matches(identity, {"model": None})
    assert not matches(identity, {"seed": None})
    assert not matches(identity, {"unknown": 1})
    assert not matches({**identity, "model": None}, {"model": {"name": "m"}})


def test_folders_do_not_depend_on_the_order_of_a_dictionary():
    for keys in itertools.permutations(ARM):
        assert ArmSpec(**{key: ARM[key] for key in keys}).folder == "tiny-olmoe/reap-ratio0.5-A"
    assert Path(ArmSpec(**ARM).folder).parts == ("tiny-olmoe", "reap-ratio0.5-A")


def test_what_people_vary_by_hand_has_a_folder_of_its_own():
    base = {"model": "m", "method": "random", "ratio": "0.5"}
    arms = [{}, {"seed": 1}, {"dtype": "bfloat16"}, {"experts_implementation": "grouped_mm"}, {"draw": "B"}]
    assert len({ArmSpec(**{**base, **change}).folder for change in arms}) == len(arms)


def test_masks_of_different_runs_give_different_folders(tmp_path):
    folders = set()
    for run in ("reap-ratio0.5-A", "reap-ratio0.25-A", "reap-ratio0.5-B"):
        (tmp_path / run).mkdir()
        folders.add(ArmSpec(model="m", mask=str(tmp_path / run), operator="constant").folder)
    assert folders == {f"m/mask=reap-ratio{rest}-constant-A" for rest in ("0.5-A", "0.25-A", "0.5-B")}


@pytest.mark.parametrize("ratio", ["0.5", "0.50", ".5"])
def test_a_ratio_has_one_text(ratio):
    assert ArmSpec(model="m", method="reap", ratio=ratio).ratio == "0.5"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"limit": "2"}, {"keep": "16"}, {"seed": 1.5}, {"limit": True}, {"batch_tokens": 10.5}),
        *({"scale": 0.5}, {"suites": None}, {"suites": (1,)}, {"text": 3}, {"ratio": 0.5}),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(UsageError, match=f"^{name} is .*expected "):
        ArmSpec(model="m", **wrong)
