"""A track file expands to its arms in a stated order; every defect of it is one line that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from prunebench.errors import UsageError
from prunebench.loader import available, resolve_track
from prunebench.run import read_track

GOOD = {
    "name": '"t"',
    "models": '["m", "n"]',
    "ratios": '["0.25", 0.5]',
    "masks": '["reap", "random"]',
    "operators": '["constant", "reroute@other"]',
    "suites": '["arithmetic"]',
    "calibration": '{ text = "world:code", blocks = 8, length = 16, draws = ["A", "B"] }',
    "seed": "3",
}


def text(**changes: str | None) -> str:
    entries = {**GOOD, **changes}
    return "[track]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items() if value is not None)


def read(folder: Path, content: str | bytes, **options):
    file = folder / "track.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_track(file, **options)


def test_arms_are_models_then_draws_amounts_masks_operators_with_the_dense_arm_first(tmp_path):
    track = read(tmp_path, text())
    found = [(a.model, a.draw, a.ratio, a.method, a.operator, a.scale) for a in track.arms]
    wanted = []
    for model in ("m", "n"):
        wanted.append((model, "A", None, None, None, None))
        for draw in "AB":
            for ratio in ("0.25", "0.5"):
                for mask in ("reap", "random"):
                    wanted += [(model, draw, ratio, mask, *op) for op in (("constant", None), ("reroute", "other"))]
    assert found == wanted
    assert track.name == "t"
    assert {(a.text, a.blocks, a.length, a.seed, a.suites) for a in track.arms} == {
        ("world:code", 8, 16, 3, ("arithmetic",))
    }
    assert len({a.folder for a in track.arms}) == len(track.arms)


def test_a_track_may_leave_its_dense_arms_to_another(tmp_path):
    with_them, without = read(tmp_path, text()), read(tmp_path, text(dense="false"))
    assert read(tmp_path, text(dense="true")).arms == with_them.arms
    assert without.arms == tuple(arm for arm in with_them.arms if not arm.dense)
    with pytest.raises(UsageError, match=r"dense is a int; in .*track.toml; expected a bool"):
        read(tmp_path, text(dense="0"))
    with pytest.raises(UsageError, match=r"seed is a bool; in .*track.toml; expected a int"):
        read(tmp_path, text(seed="false"))


def test_keep_and_options_reach_every_arm_and_defaults_fill_the_rest(tmp_path):
    track = read(
        tmp_path,
        text(ratios=None, keep="[8]", calibration=None, suites=None, seed=None),
        limit=2,
        dtype="bfloat16",
        batch_tokens=64,
    )
    pruned = [arm for arm in track.arms if not arm.dense]
    assert {arm.keep for arm in pruned} == {8}
    assert {(a.limit, a.dtype, a.batch_tokens, a.draw, a.seed) for a in track.arms} == {(2, "bfloat16", 64, "A", 0)}
    assert all(arm.suites == ("multiple_choice", "arithmetic", "code", "perplexity") for arm in track.arms)


def test_grids_take_from_their_track_what_they_do_not_say(tmp_path):
    grids = (
        "[[grid]]\nmasks = ['mone']\n"
        "[[grid]]\nkeep = [8]\noperators = ['constant']\nfit = { text = 'world:general', draws = ['B', 'C'] }\n"
        "[[grid]]\nmasks = ['sge']\ncalibration = { blocks = 4, draws = ['C'] }\n"
    )
    track = read(tmp_path, text(models='["m"]', masks='["reap"]', ratios='["0.5"]', operators='["zero"]') + grids)
    said = [(a.method, a.operator, a.ratio, a.keep, a.draw, a.fit_draw, a.fit_text) for a in track.arms]
    assert said == [
        (None, None, None, None, "A", None, None),
        ("mone", "zero", "0.5", None, "A", None, None),
        ("mone", "zero", "0.5", None, "B", None, None),
        *(("reap", "constant", None, 8, a, None if a == b else b, "world:general") for a in "AB" for b in "BC"),
        ("sge", "zero", "0.5", None, "C", None, None),
    ]
    assert {(a.text, a.blocks, a.length) for a in track.arms[:-1]} == {("world:code", 8, 16)}
    assert (track.arms[-1].text, track.arms[-1].blocks, track.arms[-1].length) == ("world:code", 4, 16)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not a track"),
        ("[track", "not TOML"),
        (b"\xff\xfe\x00", "not TOML"),
        ("track = 3\n", "not a track"),
        (text() + "[other]\nx = 1\n", "not a track"),
        (text(mask='["reap"]'), "unknown key 'mask'.*did you mean masks"),
        (text(zzzzzz="1"), "unknown key 'zzzzzz'"),
        (text(calibration="{ lenght = 3 }"), "unknown key 'lenght'.*calibration.*did you mean length"),
        (text(name=None), "lacks name"),
        (text(models=None, name=None), "lacks name, models"),
        (text(operators=None, masks=None), "lacks masks, operators"),
        (text() + "[[grid]]\nsuites = ['x']\n", "unknown key 'suites'; in .*grid 1"),
        (text() + "[[grid]]\n[[grid]]\nfit = { draw = 'B' }\n", "unknown key 'draw'; in .*grid 2, fit.*draws"),
        (text(masks=None) + "[[grid]]\nmasks = ['reap']\n[[grid]]\n", "lacks masks; in .*grid 2"),
        (text() + "[[grid]]\nkeep = [8]\nratios = ['0.5']\n", "exactly one of ratios and keep; in .*grid 1"),
        (text() + "[grid]\nx = 1\n", "grid is no list of tables"),
        (text() + "[[grid]]\n[[grid]]\n", "twice"),
        (text(ratios=None), "exactly one of ratios and keep"),
        (text(keep="[8]"), "exactly one of ratios and keep"),
        (text(masks="[]"), "masks is empty"),
        (text(ratios="[]"), "ratios is empty"),
        (text(calibration="{ draws = [] }"), "draws is empty"),
        (text(models='"m"'), "models is a str.*expected a list"),
        (text(seed="true"), "seed is a bool"),
        (text(calibration='{ blocks = "8" }'), "blocks is a str"),
        (text(models='["m", "m"]'), "names m/dense twice"),
        (text(masks='["reap", "reap"]'), "twice"),
        (text(operators='["constant", "constant"]'), "twice"),
        (text(ratios='["0.5", 0.5]'), "twice"),
        (text(masks='["reap", "other/reap.py"]'), "share the folder m/reap.*rename one"),
        (text(masks="[1]"), "masks holds 1"),
        (text(models="[[]]"), "models holds"),
        (text(operators="[3.5]"), "operators holds 3.5"),
        (text(suites="[1]"), "suites holds 1"),
        (text(ratios="[true]"), "ratios holds True"),
        (text(ratios=None, keep='["8"]'), "keep holds '8'"),
        (text(ratios=None, keep="[8.0]"), "keep holds 8.0"),
        (text(calibration="{ draws = [1] }"), "draws holds 1"),
        (text() + "[[grid]]\nprotects = 'super'\n", "unknown key 'protects'; in .*did you mean protect"),
        (text(scope="3"), "scope is a int"),
        (text() + "[[grid]]\nspare = ['1:2']\n", "spare is a list; in .*grid 1; expected a str"),
    ],
)
def test_every_defect_is_one_line_that_names_the_file(content, says, tmp_path):
    with pytest.raises(UsageError, match=says) as caught:
        read(tmp_path, content)
    assert "track.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_grid_may_be_for_some_of_the_models_only(tmp_path):
    grids = '[[grid]]\nmasks = ["reap"]\n[[grid]]\nmodels = ["n"]\nmasks = ["razor(quantity=rcs)"]\n'
    track = read(tmp_path, text(ratios='["0.5"]', operators='["constant"]', calibration=None) + grids)
    assert [(arm.model, arm.method, arm.parameters) for arm in track.arms if not arm.dense] == [
        ("m", "reap", ()),
        ("n", "reap", ()),
        ("n", "razor", ("quantity=rcs",)),
    ]
    with pytest.raises(UsageError, match=r"o is no model of the track; in .*, grid 1; expected m, n"):
        read(tmp_path, text() + '[[grid]]\nmodels = ["o"]\n')


def test_a_grid_may_have_another_scope_and_protect_or_spare_experts(tmp_path):
    shared = text(models='["m"]', ratios='["0.5"]', masks='["reap"]', operators='["constant"]')
    shared = shared.replace('draws = ["A", "B"]', 'draws = ["A"]').replace("seed = 3\n", "")
    grids = '[[grid]]\n[[grid]]\nscope = "global"\n[[grid]]\nprotect = "super"\n'
    grids += '[[grid]]\nspare = "3:1,3:2"\nscope = "group"\n'
    arms = read(tmp_path, shared + grids).arms
    assert [(arm.method, arm.scope, arm.protect, arm.spare) for arm in arms] == [
        (None, "layer", None, None),
        ("reap", "layer", None, None),
        ("reap", "global", None, None),
        ("reap", "layer", "super", None),
        ("reap", "group", None, "3:1,3:2"),
    ]
    assert [arm.folder.replace("-world_code", "") for arm in arms[1:]] == [
        "m/reap-ratio0.5-constant-A",
        "m/reap-ratio0.5-global-constant-A",
        "m/reap-ratio0.5-protect=super-constant-A",
        "m/reap-ratio0.5-group-spare=3_1_3_2-constant-A",
    ]
    # Of the track too; a grid's own stands in place of its other. The dense model has no budget.
    track = shared + 'scope = "global"\nprotect = "super"\n'
    arms = read(tmp_path, track + '[[grid]]\n[[grid]]\nspare = "0:1"\nscope = "layer"\n').arms
    assert [(arm.scope, arm.protect, arm.spare) for arm in arms] == [
        ("layer", None, None),
        ("global", "super", None),
        ("layer", None, "0:1"),
    ]


def test_a_budget_that_says_nothing_new_is_the_arm_that_it_was(tmp_path):
    plain = read(tmp_path, text()).arms
    assert read(tmp_path, text(scope='"layer"')).arms == plain
    # So it is with the committed records, whose arms say none of it: each is still asked for by the same name.
    folders = {arm.folder for arm in read_track(resolve_track("tiny")).arms}
    records = Path(__file__).parents[2] / "leaderboard" / "records" / "tiny"
    assert {f"{file.parent.parent.name}/{file.parent.name}" for file in records.glob("*/*/record.json")} <= folders


def test_parameters_of_criteria_and_operators_are_named_in_parentheses(tmp_path):
    operators = '["tilt(rank=8)", "mora(threshold=0.2, ridge=0)@renorm", "./a(b)/op.py"]'
    track = read(tmp_path, text(models='["m"]', ratios='["0.5"]', masks='["x(p=1)"]', operators=operators))
    found = [(arm.operator, arm.operator_parameters, arm.scale) for arm in track.arms if arm.draw == "A"][1:]
    assert found == [
        ("tilt", ("rank=8",), None),
        ("mora", ("threshold=0.2", "ridge=0"), "renorm"),
        ("./a(b)/op.py", (), None),
    ]


def test_an_unreadable_track_is_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(UsageError, match="cannot read the track"):
            read_track(path)
    with pytest.raises(UsageError, match="no such track file"):
        resolve_track(str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match="did you mean demo"):
        resolve_track("demos")


@pytest.mark.parametrize("name", available("tracks"))
def test_shipped_tracks_are_tracks_of_distinct_arms(name):
    track = read_track(resolve_track(name))
    assert track.name == name
    assert len({arm.folder for arm in track.arms}) == len(track.arms)
