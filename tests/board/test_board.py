"""The board shows what the items say, refuses a record that disagrees, and runs nothing that a record contains."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prunebench import board
from prunebench.board import build_board, write_board
from prunebench.board.markdown import to_markdown
from prunebench.errors import IntegrityError, PrerequisiteError, UsageError
from prunebench.mask import LayerMask, Mask
from prunebench.record import read_run, runs_under


@pytest.fixture(scope="module")
def records(factory, tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    factory.demo(folder / "demo")
    return folder


SMALLER = Mask("1:8x2 2:8x2", (LayerMask(1, 8, (0, 3)), LayerMask(2, 8, (1, 2))))
OTHER = Mask("1:8x2 2:8x2", (LayerMask(1, 8, (0, 3, 5, 6)), LayerMask(2, 8, (1, 2, 4, 6))))


class Page(html.parser.HTMLParser):
    """Rows of (cell text, data-sort) and every tag with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self.cell = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"}:
            self.cell = ["", dict(attributes).get("data-sort")]
            self.rows[-1].append(self.cell)
        elif tag == "small" and self.cell:
            self.cell[0] += " "

    def handle_endtag(self, tag):
        if tag in {"td", "th"}:
            self.cell = None

    def handle_data(self, data):
        if self.cell:
            self.cell[0] += data


def markdown_rows(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[c.strip().replace("**", "") for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def shown(records):
    """The board as Markdown."""
    built = build_board(records)
    return to_markdown(built.table, built.shown_left_out)


def edit(folder, change):
    path = folder / "record.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_every_run_is_a_row_with_its_numbers_dense_first(records, tmp_path):
    result = write_board(records, tmp_path)
    rows = markdown_rows(result.markdown.read_text())
    assert result.markdown.read_text() == shown(records)
    assert result.rows == len(rows) == 7
    assert result.left_out == ()
    assert rows[0]["method (mask)"] == "dense"
    assert [(r["method (mask)"], r["operator"], r["scale"]) for r in rows[1:4]] == [
        ("mone", "constant", "—"),
        ("mone", "reroute", "other (= renorm)"),
        ("mone", "reroute", "trained (= keep)"),
    ]
    runs = {run.record["run_id"]: run.record for run in map(read_run, runs_under(records).runs)}
    for row in rows:
        metrics = runs[row["run"]]["metrics"]
        m = {key: 100 * value for key, value in metrics["arithmetic"].items()}
        assert row["arithmetic (% ↑ [95 % CI], n = 20)"] == f"{m['value']:.1f} [{m['low']:.1f}, {m['high']:.1f}]"
        p = metrics["perplexity"]
        assert (
            row["perplexity (↓ lower is better [95 % CI], n = 20)"]
            == f"{p['value']:.3f} [{p['low']:.3f}, {p['high']:.3f}]"
        )
        assert row["integrity (checks passed)"] == "✓ 1/1"
    assert rows[1]["stored MB (% of dense)"] == "2.50 (55.6 %)"


def test_how_often_a_slot_moved_and_how_far_the_scales_are_apart_is_over_all_layers(factory, tmp_path):
    """Layer 1: 100 calls, 40 displaced, ratio 0.5, 10 of them above 1; layer 2: 300 calls, 60 displaced, 0.75, none."""
    layers = {
        "1": {
            "calls": 100,
            "filled_share": 0.0,
            "displaced_share": 0.4,
            "keep_over_renorm": 0.5,
            "above_one_share": 0.25,
        },
        "2": {
            "calls": 300,
            "filled_share": 0.0,
            "displaced_share": 0.2,
            "keep_over_renorm": 0.75,
            "above_one_share": 0.0,
        },
    }
    factory.write(tmp_path / "r" / "a", factory.make_items(n=2), routing={"layers": layers})
    constant = {"operator": "constant", "scale": None, "resolved_scale": None}
    factory.write(tmp_path / "r" / "b", factory.make_items(n=2), **constant)
    rows = markdown_rows(shown(tmp_path / "r"))
    said = {row["operator"]: row["calls rerouted (%)"] for row in rows}
    # 100 of 400 calls; (40 · 0.5 + 60 · 0.75) / 100 = 0.65; 10 of 400 calls.
    assert said == {"constant": "—", "reroute": "25.0 (keep ÷ renorm 0.65, above 1 on 2.5 %)"}


def test_differences_are_from_the_constant_on_the_same_mask(records, tmp_path):
    rows = markdown_rows(shown(records))
    column = "multiple_choice − constant (points [95 % CI])"
    value = {
        (r["method (mask)"], r["operator"], r["scale"][:5]): r["multiple_choice (% ↑ [95 % CI], n = 40)"] for r in rows
    }
    number = {key: float(text.split()[0]) for key, text in value.items()}
    for row in rows:
        mask = row["method (mask)"]
        if mask == "dense":
            assert row[column] == "— (dense)"
        elif row["operator"] == "constant":
            assert row[column] == "— (is the constant)"
        else:
            gain = number[mask, "reroute", row["scale"][:5]] - number[mask, "constant", "—"]
            assert float(row[column].split()[0]) == pytest.approx(gain, abs=0.051)


@pytest.mark.parametrize(
    "other",
    [{"draw": "B"}, {"model": "tiny-moonlight"}, {"mask_data": OTHER}, {"mask_data": SMALLER}],
    ids=["draw", "model", "mask", "budget"],
)
def test_a_constant_of_another_draw_model_mask_or_budget_does_not_serve(factory, tmp_path, other):
    factory.write(tmp_path / "r" / "a", factory.make_items(n=4))
    constant = {"operator": "constant", "scale": None, "resolved_scale": None}
    factory.write(tmp_path / "r" / "b", factory.make_items(n=4), **(constant | other))
    assert shown(tmp_path / "r").count("— (no constant arm)") == 3
    factory.write(tmp_path / "r" / "c", factory.make_items(n=4), **constant)
    assert "no constant arm" not in shown(tmp_path / "r")


def test_a_constant_asked_for_alike_comes_before_one_of_the_same_mask(factory, tmp_path):
    factory.write(tmp_path / "r" / "a", factory.make_items(n=4))
    constant = {"operator": "constant", "scale": None, "resolved_scale": None}
    factory.write(tmp_path / "r" / "b", factory.make_items(n=4, seed=1), **constant, ratio=0.51)
    assert "no constant arm" not in shown(tmp_path / "r")
    factory.write(tmp_path / "r" / "c", factory.make_items(n=4), **constant)
    rows = markdown_rows(shown(tmp_path / "r"))
    gain = next(row for row in rows if row["operator"] == "reroute")["arithmetic − constant (points [95 % CI])"]
    assert gain == "+0.0 [+0.0, +0.0]"
    factory.write(tmp_path / "r" / "d", factory.make_items(n=4), **constant, identity={"operator": {"version": 2}})
    assert "several constant arms" in shown(tmp_path / "r")


def test_the_same_records_give_the_same_bytes_wherever_they_lie(records, tmp_path):
    one = write_board(records, tmp_path / "one")
    shutil.copytree(records, tmp_path / "moved" / "deeper")
    other = write_board(tmp_path / "moved", tmp_path / "other")
    for name in ("markdown", "html"):
        assert getattr(one, name).read_bytes() == getattr(other, name).read_bytes()
        assert str(records) not in getattr(one, name).read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["metrics"]["arithmetic"].update(value=0.99), r"metric arithmetic: the record says value 0\.99"),
        (lambda r: r["metrics"]["perplexity"].update(low=0.5), r"metric perplexity: the record says low 0\.5"),
        (lambda r: r["metrics"].update(extra={"value": 1, "low": 1, "high": 1, "n": 1}), "metric extra.*give None"),
        (
            lambda r: r["metrics"].pop("arithmetic/arithmetic/flexible/exact_match"),
            "flexible.*the record says value None",
        ),
        (lambda r: r["metrics"]["arithmetic"].update(n=21), "says n 21, its items give 20"),
    ],
    ids=["value", "interval", "invented", "removed", "count"],
)
def test_a_record_that_its_items_contradict_is_refused_by_name(records, tmp_path, change, message):
    shutil.copytree(records, tmp_path / "r")
    edit(tmp_path / "r" / "demo" / "tiny-olmoe-mone-constant", change)
    with pytest.raises(IntegrityError, match=message) as caught:
        build_board(tmp_path / "r")
    assert "tiny-olmoe-mone-constant" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_partial_half_written_and_repeated_runs_are_left_out_with_the_reason(factory, records, tmp_path):
    shutil.copytree(records / "demo", tmp_path / "r")
    factory.write(tmp_path / "r" / "partial", factory.make_items(n=2), limit=2)
    shutil.copytree(tmp_path / "r" / "tiny-olmoe-dense", tmp_path / "r" / "zcopy")
    shutil.copytree(tmp_path / "r" / "tiny-olmoe-dense", tmp_path / "r" / "half")
    (tmp_path / "r" / "half" / "record.json").unlink()
    shutil.copytree(tmp_path / "r" / "tiny-olmoe-dense", tmp_path / "r" / "cut")
    (tmp_path / "r" / "cut" / "items.parquet").write_bytes(b"PAR1")
    result = write_board(tmp_path / "r", tmp_path / "out")
    assert result.rows == 7
    reasons = {one.path.name: one.reason for one in result.left_out}
    assert reasons == {
        "cut": "cannot read the items",
        "half": "half-written run folder: no record.json",
        "partial": "partial: made with a limit of 2 items",
        "zcopy": "the same run as tiny-olmoe-dense",
    }
    for path in (result.markdown, result.html):
        assert all(reason in path.read_text() for reason in reasons.values())


def test_an_altered_record_is_left_out_with_what_is_wrong(records, tmp_path):
    shutil.copytree(records, tmp_path / "r")
    edit(tmp_path / "r" / "demo" / "tiny-olmoe-mone-constant", lambda r: r["arm"].update(ratio=0.25))
    result = write_board(tmp_path / "r", tmp_path / "out")
    assert result.rows == 6
    assert (
        "tiny-olmoe-mone-constant: half-written or altered run folder: arm.ratio is 0.25" in result.markdown.read_text()
    )


def test_nothing_to_show_is_one_line(factory, tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        write_board(tmp_path / "none", tmp_path)
    with pytest.raises(PrerequisiteError, match="no complete run"):
        write_board(tmp_path, tmp_path)
    factory.write(tmp_path / "r" / "partial", factory.make_items(n=2), limit=2)
    with pytest.raises(PrerequisiteError, match="partial: made with a limit"):
        write_board(tmp_path / "r", tmp_path)


def test_failed_checks_are_marked_and_named(factory, tmp_path):
    checks = [
        {"check": name, "status": status, "detail": ""}
        for name, status in (("k slots", "pass"), ("zero tokens", "fail"), ("x", "not applicable"))
    ]
    factory.write(tmp_path / "r" / "a", factory.make_items(n=2), integrity=checks)
    factory.write(tmp_path / "r" / "b", factory.make_items(n=2), integrity=[], mask="b")
    text = shown(tmp_path / "r")
    assert "**✗ 1/2** (zero tokens)" in text
    assert "— (no check applied)" in text
    assert "no dense run" in text


def test_suites_of_another_content_get_a_column_of_their_own(factory, tmp_path):
    factory.write(tmp_path / "r" / "a", factory.make_items(n=2))
    factory.write(
        tmp_path / "r" / "b",
        factory.make_items(n=2),
        operator="constant",
        suites={"arithmetic": {"version": 2, "content": "beef"}},
    )
    rows = markdown_rows(shown(tmp_path / "r"))
    columns = [name for name in rows[0] if name.startswith("arithmetic v")]
    assert [name.split(" (")[0].split(" −")[0] for name in columns] == [
        "arithmetic v1 c0ffee",
        "arithmetic v2 beef",
    ] * 3
    assert [row["operator"] for row in rows] == ["constant", "reroute"]
    assert rows[0][columns[0]] == "— (not run)"
    assert rows[1][columns[4]] == "— (no constant arm)"
    assert rows[1][columns[5]] == "— (not run)"


def test_a_budget_by_count_shows_the_share_and_the_count(factory, tmp_path):
    factory.write(tmp_path / "r" / "a", factory.make_items(n=2), ratio=None, keep=4)
    rows = markdown_rows(shown(tmp_path / "r"))
    assert rows[0]["ratio pruned"] == "0.5 (keep 4)"


def test_a_constant_on_other_items_gives_no_difference_but_the_reason(factory, tmp_path):
    factory.write(tmp_path / "r" / "a", factory.make_items(n=3))
    constant = {"operator": "constant", "scale": None, "resolved_scale": None}
    factory.write(tmp_path / "r" / "b", factory.make_items(n=4), **constant)
    text = shown(tmp_path / "r")
    assert "— (a (" in text
    assert "lacks 1 of the items: arithmetic-003" in text


def test_retracted_runs_are_left_out_with_the_reason(factory, records, tmp_path):
    shutil.copytree(records / "demo", tmp_path / "r")
    identifier = read_run(tmp_path / "r" / "tiny-olmoe-mone-constant").record["run_id"]
    reason = "its text held <b>test items</b>"
    text = f'[[retraction]]\nrun = "{identifier}"\ndate = 2026-12-01\nreason = "{reason}"\n'
    (tmp_path / "r" / "retractions.toml").write_text(text)
    board = build_board(tmp_path / "r")
    assert [str(one) for one in board.shown_left_out] == [f"tiny-olmoe-mone-constant: retracted 2026-12-01: {reason}"]
    assert len(board.table.rows) == 6
    assert "retracted 2026-12-01: its text held &lt;b&gt;test items" in shown(tmp_path / "r")


def test_importing_the_board_takes_no_model_library():
    code = (
        "import sys, prunebench.board; print(sorted({'torch', 'transformers', 'pandas', 'lm_eval'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(board.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
