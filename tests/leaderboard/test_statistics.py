"""docs/results/statistics.md: held to the committed records, and its tables to plain loops on a synthetic track."""

from __future__ import annotations

import importlib
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from prunebench.analysis import Shelf, answers, read_declaration
from prunebench.analysis.forest import draw, forest
from prunebench.analysis.scores import Scores
from prunebench.errors import PrerequisiteError
from prunebench.loader import content_root

ROOT = content_root()
RECORDS = ROOT / "leaderboard" / "records" / "tiny"
FAMILIES = ROOT / "leaderboard" / "families" / "tiny.toml"
DOCS = ROOT / "docs" / "results"
MODULES = ("page", "tables", "arms", "__main__")


@pytest.fixture(scope="module")
def statistics():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield SimpleNamespace(**{name: importlib.import_module(f"leaderboard.statistics.{name}") for name in MODULES})


@pytest.fixture(scope="module")
def committed(statistics):
    return statistics.page.statistics(RECORDS, FAMILIES)


def texts(svg):
    """All texts of a drawing, with where they stand, and how many marks of each kind there are."""
    root = ET.fromstring(svg)  # noqa: S314 -- our own drawing
    kinds = [one.attrib.get("aria-roledescription") for one in root.iter()]
    shown = [one.text for one in root.iter() if one.tag.endswith("text")]
    return sorted(filter(None, shown)), {kind: kinds.count(kind) for kind in ("point", "circle", "rule mark container")}


def test_the_committed_page_is_what_the_records_give(committed):
    assert (DOCS / "statistics.md").read_text(encoding="utf-8") == committed.markdown


def test_the_committed_plot_shows_what_the_records_give(committed):
    """Not byte by byte: where fonts differ, axes may be a pixel apart."""
    drawn = draw(forest(committed.plotted), "svg")
    assert texts((DOCS / "operators.svg").read_text(encoding="utf-8")) == texts(drawn)


def test_the_families_say_their_date_and_what_was_known(committed):
    assert "declared 2026-11-30, sha256" in committed.markdown
    assert "confirms nothing" in committed.markdown


# --- on a synthetic track, where every outcome can be asked for


FAMILY = """
name = "t"
date = 2026-11-30
[[family]]
name = "gate scale"
suite = "multiple_choice"
each = { model = ["plain", "normed"], ratio = ["0.25", "0.5", "0.75"] }
label = "{model} {ratio} trained - other"
exploratory = true
arm = { model = "{model}", mask = "mone", ratio = "{ratio}", text = "world:general", draw = "A" }
a = { operator = "reroute@trained" }
b = { operator = "reroute@other" }
"""


@pytest.fixture(scope="module")
def shelf(records):
    """The runs of the constant and of rerouting only."""
    whole = Shelf.of(records)
    plain = {"dense", "constant", "reroute@trained", "reroute@other"}
    return Shelf(records, whole.left_out, [run for run in whole.runs if run.operator in plain])


@pytest.fixture(scope="module")
def grid(statistics, shelf):
    return statistics.arms.Grid.of(shelf)


@pytest.fixture(scope="module")
def scores(shelf, grid):
    runs = [*grid.arms.values(), *grid.dense.values()]
    return Scores(shelf, dict.fromkeys(("multiple_choice", "perplexity"), runs))


def numbers(text):
    return [float(number) for number in re.findall(r"[-+]?\d+\.?\d*", text)]


def test_the_grid_holds_every_operator_on_mones_masks_of_draw_a(grid):
    assert grid.models == {"plain": "keep", "normed": "renorm"}
    assert grid.ratios == ("0.25", "0.5", "0.75")
    assert grid.operators == ("constant", "reroute@trained", "reroute@other")
    assert len(grid.arms) == 2 * 3 * 3
    for (model, ratio, operator), run in grid.arms.items():
        assert (run.record["arm"]["model"], run.record["arm"]["mask"], run.ratio) == (model, "mone", ratio)
        assert run.operator == operator


def test_another_operator_of_the_records_is_picked_up_with_what_tells_its_runs_apart(statistics, shelf, maker):
    """Copies of the constant's runs under other names, as later records may have them."""

    def called(run, name, number, **parameters):
        identity = run.record["identity"] | {"operator": {"name": name, "parameters": parameters}}
        record = run.record | {"identity": identity, "run_id": f"{name}{number}"}
        return replace(run, folder=f"{name}{number}", record=record)

    constant = [run for run in shelf.runs if statistics.arms._belongs(run) and run.operator == "constant"]
    tilts = [
        called(run, "tilt", f"{at}r{rank}", rank=rank, ridge=0.01) for at, run in enumerate(constant) for rank in (4, 8)
    ]
    others = [called(run, "mora", at, q=0.4) for at, run in enumerate(constant[:2])]
    partial = [called(constant[0], "half", 0)]
    partial[0].record["identity"]["operator_layers"] = {"only": [1]}
    more = Shelf(shelf.records, (), [*shelf.runs, *tilts, *others, *partial])
    grid = statistics.arms.Grid.of(more)
    assert grid.operators == ("constant", "reroute@trained", "reroute@other", "mora", "tilt rank=4", "tilt rank=8")
    assert len(grid.arms) == 18 + 12 + 2
    assert sum(grid.arm(model, ratio, "mora") is not None for model in grid.models for ratio in grid.ratios) == 2


def test_recovered_shares_are_ratios_on_the_same_resamples(statistics, grid, scores, maker, hand):
    for suite, table in (("perplexity", "perplexity"), ("multiple_choice", "multiple_choice")):
        rows = statistics.tables.recovered_table(grid, scores, table).rows
        assert len(rows) == 6
        for row, (ratio, model) in zip(rows, [(r, m) for r in grid.ratios for m in grid.models], strict=True):
            assert row[:2] == (f"{100 * float(ratio):g} %", grid.title(model))
            for text, operator in zip(row[2:], ("trained", "other"), strict=True):
                arms = [maker.arm(model, ratio, operator), maker.arm(model, ratio, "constant"), maker.Spec(model)]
                (own, own_B), (constant, constant_B), (dense, dense_B) = (hand.statistic(maker, a, suite) for a in arms)
                damage = dense_B - constant_B
                low, high = np.percentile(damage, [2.5, 97.5])
                if low <= 0 <= high:
                    assert text == "no damage detected"
                    continue
                found = numbers(text)
                assert found[0] == pytest.approx(100 * (own - constant) / (dense - constant), abs=0.51)
                if (np.sign(damage) == np.sign(dense - constant)).all():
                    ends = np.percentile(100 * (own_B - constant_B) / damage, [2.5, 97.5])
                    assert found[1:] == pytest.approx(ends, abs=0.51)
                else:
                    assert text.endswith("(no interval)")


def test_accuracies_and_the_highest_of_a_row(statistics, grid, scores, maker, hand):
    for row, (ratio, model) in zip(
        statistics.tables.accuracy_table(grid, scores).rows,
        [(r, m) for r in grid.ratios for m in grid.models],
        strict=True,
    ):
        arms = [maker.Spec(model), *(maker.arm(model, ratio, o) for o in ("constant", "trained", "other"))]
        values = [hand.statistic(maker, arm, "multiple_choice")[0] for arm in arms]
        assert [numbers(text)[0] for text in row[2:]] == pytest.approx(values, abs=0.006)
        strong = [text.startswith("**") for text in row[3:]]
        assert strong == [value == max(values[1:]) for value in values[1:]]


@pytest.fixture(scope="module")
def gate_scales(shelf, tmp_path_factory):
    file = tmp_path_factory.mktemp("families") / "f.toml"
    file.write_text(FAMILY)
    found, gaps = answers(shelf, read_declaration(file).questions)
    assert gaps == ()
    return found


def test_the_gate_scale_table_is_the_papers_table_1(statistics, gate_scales, grid, maker, hand):
    rows = statistics.tables.gate_scale_table(grid, gate_scales, "gate scale").rows
    for row in rows:
        model = row[0]
        assert row[1] == grid.models[model]
        for text, ratio in zip(row[2:], grid.ratios, strict=True):
            pair = [maker.arm(model, ratio, operator) for operator in ("trained", "other")]
            value, draws = hand.difference(maker, *pair, "multiple_choice")
            assert hand.Same(text.rstrip("*")) == hand.text(value, draws, 2)


def test_a_folder_without_runs_is_refused(statistics, tmp_path):
    with pytest.raises(PrerequisiteError, match="no complete run to compare"):
        statistics.page.write_statistics(tmp_path, FAMILIES, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert statistics.__main__.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 3


def test_the_command_writes_page_and_plot(statistics, committed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(statistics.page, "statistics", lambda *_: replace(committed, left_out=("half: damaged",)))
    assert statistics.__main__.main([str(RECORDS), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert shown.err == "left out half: damaged\n"
    assert committed.summary in shown.out
    assert (tmp_path / "out" / "statistics.md").read_text(encoding="utf-8") == committed.markdown
    assert "tiny-olmoe" in (tmp_path / "out" / "operators.svg").read_text(encoding="utf-8")
