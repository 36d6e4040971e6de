"""From a track to a board: a grid of complete runs, the two files of the board, and a comparison, all by command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import prunebench
from prunebench import cli
from prunebench.loader import content_root
from prunebench.record import comparable, read_run
from prunebench.run import Session
from prunebench.run.arm import prepare

OPERATORS = ("constant", "reroute@trained", "reroute@other")


def call(capsys, *arguments: object) -> dict:
    """The JSON document of a command that must succeed."""
    capsys.readouterr()
    assert cli.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def ground(request, tmp_path_factory) -> tuple[Path, Path]:
    """A track of seven arms and the records folder of its grid."""
    model, suite = request.getfixturevalue("model"), request.getfixturevalue("suite")
    folder = tmp_path_factory.mktemp("ground")
    track = folder / "t.toml"
    track.write_text(
        f'[track]\nname = "t"\nmodels = ["{model}"]\nratios = ["0.5"]\nmasks = ["mone", "random"]\n'
        f'operators = {json.dumps(OPERATORS)}\nsuites = ["{suite}"]\ncalibration = {{ blocks = 8, length = 32 }}\n'
    )
    assert cli.main(["grid", str(track), "--out", str(folder / "records")]) == 0
    return track, folder / "records"


def test_a_grid_makes_every_arm_once(ground, capsys):
    track, records = ground
    wanted = {"dense"}
    wanted |= {f"{mask}-ratio0.5-{op.replace('@', '-')}-A" for mask in ("mone", "random") for op in OPERATORS}
    assert {path.name for path in (records / "rand").iterdir()} == wanted
    again = call(capsys, "grid", track, "--out", records)
    assert again["done"] == []
    assert again["failed"] == {}
    assert set(again["reused"]) == {f"rand/{name}" for name in wanted}


def test_the_board_shows_every_run_with_its_numbers(ground, tmp_path, capsys):
    _, records = ground
    result = call(capsys, "board", records, "--out", tmp_path)
    assert (result["rows"], result["left_out"]) == (7, [])
    markdown = Path(result["markdown"]).read_text()
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    for record in (read_run(path.parent).record for path in records.rglob("record.json")):
        (row,) = (line for line in rows if record["run_id"] in line)
        assert f"{100 * record['metrics']['quick']['value']:.1f}" in row
        assert f"{record['storage']['total'] / 1e6:.2f}" in row
        for word in ("mask", "operator"):
            assert (record["arm"][word] or "dense") in row
    page = Path(result["html"]).read_text()
    assert not re.search(r"(?:src|href)=\"https?:", page)
    assert str(tmp_path) not in page + markdown


def test_the_board_is_the_same_bytes_twice(ground, tmp_path, capsys):
    _, records = ground
    one, two = (call(capsys, "board", records, "--out", tmp_path / name) for name in "ab")
    for kind in ("markdown", "html"):
        assert Path(one[kind]).read_bytes() == Path(two[kind]).read_bytes()


def test_compare_gives_the_difference_of_the_two_runs(ground, capsys):
    _, records = ground
    folders = [records / "rand" / name for name in ("dense", "mone-ratio0.5-constant-A")]
    values = [read_run(folder).record["metrics"]["quick"]["value"] for folder in folders]
    shown = json.dumps(call(capsys, "compare", *folders))
    contrast = next(entry for entry in json.loads(shown)["contrasts"] if entry["suite"] == "quick")
    assert contrast["a"] == pytest.approx(values[0])
    assert contrast["b"] == pytest.approx(values[1])
    assert contrast["difference"]["value"] == pytest.approx(values[0] - values[1])
    same = call(capsys, "compare", folders[0], folders[0])["contrasts"][0]["difference"]
    assert (same["value"], same["low"], same["high"]) == (0, 0, 0)


def test_masks_are_shared_by_the_operators_of_a_criterion(ground):
    _, records = ground
    digests: dict[str, set[str]] = {}
    for path in records.rglob("record.json"):
        record = json.loads(path.read_text())
        if not record["arm"]["dense"]:
            digests.setdefault(record["arm"]["mask"], set()).add(record["mask"]["digest"])
    assert {mask: len(found) for mask, found in digests.items()} == {"mone": 1, "random": 1}


def test_runs_with_a_limit_do_not_reach_the_board(ground, tmp_path, capsys):
    track, _ = ground
    assert cli.main(["grid", str(track), "--out", str(tmp_path / "r"), "--limit", "2"]) == 0
    capsys.readouterr()
    assert cli.main(["board", str(tmp_path / "r"), "--out", str(tmp_path / "b")]) == 3
    assert "no complete run to show" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_python_and_the_command_line_make_the_same_record(ground, model, suite, tmp_path):
    _, records = ground
    outcome = prunebench.run(
        model=Path(model),
        method="mone",
        operator="reroute",
        scale="trained",
        ratio=0.5,
        suites=[Path(suite)],
        blocks=8,
        length=32,
        out=tmp_path,
    )
    by_command = read_run(records / "rand" / "mone-ratio0.5-reroute-trained-A")
    assert comparable(outcome.run.record) == comparable(by_command.record)
    assert (outcome.folder / "items.parquet").read_bytes() == (by_command.path / "items.parquet").read_bytes()
    assert outcome.folder.name == by_command.path.name


def test_python_takes_one_suite_as_a_text_and_refuses_unknown_words(model, suite, tmp_path):
    outcome = prunebench.run(model=model, suites=suite, blocks=8, length=32, out=tmp_path)
    assert list(outcome.run.record["headline"]) == ["quick"]
    with pytest.raises(prunebench.UsageError, match="ration"):
        prunebench.run(model=model, ration=0.5)
    with pytest.raises(prunebench.UsageError, match="model"):
        prunebench.run()


def test_the_shipped_suites_run_through(model, spec, tmp_path):
    names = ("multiple_choice", "arithmetic", "code", "perplexity")
    arm = spec(suites=names, limit=1, operator="constant")
    record = Session(tmp_path).execute(prepare(arm)).run.record
    assert set(record["headline"]) == set(names)
    assert set(names) <= set(record["metrics"])
    assert record["status"] == "partial"


@pytest.mark.skipif(
    not (content_root() / "fixtures" / "zoo" / "tiny-olmoe" / "config.json").is_file(),
    reason="the trained tiny-olmoe is not in fixtures/zoo",
)
def test_a_trained_model_loses_more_by_a_random_mask_than_by_none(tmp_path):
    shared = {"model": "tiny-olmoe", "suites": "perplexity", "limit": 8, "blocks": 8, "length": 64, "out": tmp_path}
    dense = prunebench.run(**shared).run.record["metrics"]["perplexity"]["value"]
    pruned = prunebench.run(**shared, method="random", ratio=0.5).run.record["metrics"]["perplexity"]["value"]
    assert pruned > dense
