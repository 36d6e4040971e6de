"""The board's differences, groups, shares and fronts, held against plain computations of the same."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from prunebench.analysis import compare
from prunebench.analysis.shares import Share
from prunebench.board import build_board, committed, stale
from prunebench.board.contrasts import contrasts_page, exploratory_answers
from prunebench.board.markdown import with_board
from prunebench.board.plots import pareto
from prunebench.board.reported import read_reported
from prunebench.board.reporting import ITEMS
from prunebench.board.runpage import run_page, share_html
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.record import read_run


@pytest.fixture(scope="module")
def records(factory, tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    factory.demo(folder, n=40)
    return folder


@pytest.fixture(scope="module")
def board(records):
    return build_board(records)


def rows(board):
    return {row.entry.folder: row for row in board.table.rows}


def test_differences_are_those_of_two_runs_alone(records, board):
    dense = read_run(records / "tiny-olmoe-dense")
    for folder, row in rows(board).items():
        mask = "mone" if "mone" in folder else "random"
        if row.entry.dense:
            assert {numbers.dense for numbers in row.numbers.values()} == {"dense"}
            continue
        run, constant = read_run(records / folder), read_run(records / f"tiny-olmoe-{mask}-constant")
        for suite in ("arithmetic", "multiple_choice"):
            for found, other in ((row.numbers[suite].dense, dense), (row.numbers[suite].constant, constant)):
                if folder == other.path.name:
                    assert found == "is the constant"
                    continue
                alone = compare(run, other, suites=[suite]).of_suite(suite)
                for key in ("value", "low", "high"):
                    assert getattr(found, key) == pytest.approx(100 * getattr(alone.difference, key), abs=1e-9)
                assert found.p == pytest.approx(alone.p)
        alone = compare(run, dense, suites=["perplexity"]).of_suite("perplexity")
        assert row.numbers["perplexity"].dense.value == pytest.approx(np.log(alone.a / alone.b), abs=1e-12)


def test_groups_are_made_as_they_are_said_to_be(records, board):
    """The best not yet in a group leads one; its members are those that p > 0.05 does not tell from it."""
    for suite, best in (("arithmetic", max), ("multiple_choice", max), ("perplexity", min)):
        left = {folder: row for folder, row in rows(board).items() if not row.entry.dense}
        number = 0
        while left:
            number += 1
            value = best(row.numbers[suite].value for row in left.values())
            leader = min(folder for folder, row in left.items() if row.numbers[suite].value == value)
            first = read_run(records / leader)
            for folder in sorted(left):
                p = compare(first, read_run(records / folder), suites=[suite]).of_suite(suite).p
                if folder == leader or p > 0.05:
                    assert left.pop(folder).numbers[suite].group == number


def test_too_few_items_carry_no_group(factory, tmp_path):
    factory.demo(tmp_path, n=29)
    assert {n.group for row in build_board(tmp_path).table.rows for n in row.numbers.values()} == {0}


def test_the_share_recovered_is_of_the_constants_damage(board):
    row = rows(board)["tiny-olmoe-random-reroute-trained"]
    numbers = row.numbers["multiple_choice"]
    constant = rows(board)["tiny-olmoe-random-constant"].numbers["multiple_choice"]
    wanted = numbers.constant.value / -constant.dense.value
    assert numbers.recovered.value == pytest.approx(wanted)
    assert rows(board)["tiny-olmoe-dense"].numbers["multiple_choice"].recovered is None


def test_pairs_of_scales_are_trained_minus_other(board):
    assert [(pair.trained.folder, pair.other.folder) for pair in board.scored.scales] == [
        (f"tiny-olmoe-{mask}-reroute-trained", f"tiny-olmoe-{mask}-reroute-other") for mask in ("mone", "random")
    ]
    pair = board.scored.scales[0]
    values = [rows(board)[one.folder].numbers["arithmetic"].value for one in (pair.trained, pair.other)]
    assert pair.differences["arithmetic"].value == pytest.approx(100 * (values[0] - values[1]))


def test_no_two_arms_of_the_page_of_contrasts_read_the_same(board):
    page = contrasts_page(board.table, board.scored.scales, None, ())
    body = page.split("Damage recovered</h2>")[1].split("<tbody>")[1].split("</tbody>")[0]
    arms = [row.split('<td class="n">')[0] for row in body.split("<tr>")[1:]]
    assert len(arms) == 4, "two masks, rerouted at two scales"
    assert len(set(arms)) == len(arms)
    labels = [
        (one.question.family, one.question.label) for one in exploratory_answers(board.table, board.scored.scales)
    ]
    assert len(set(labels)) == len(labels)


def test_a_share_of_nearly_nothing_has_no_sign():
    assert share_html(Share(-0.001, -0.19, -0.0)) == "0 %<small>[-19, 0]</small>"


def test_calls_are_counted_in_full(factory, tmp_path):
    routing = {"bos": "", "layers": {"1": {"calls": 59587, "displaced_share": 0.25}}}
    factory.write(tmp_path / "a", factory.make_items(n=2), routing=routing)
    table = build_board(tmp_path).table
    assert '<td class="n">59,587</td><td class="n">0.25</td>' in run_page(table.rows[0], table, ())


def test_what_is_not_reported_is_missing(factory, tmp_path):
    factory.write(tmp_path / "a", factory.make_items(n=2))
    (row,) = build_board(tmp_path).table.rows
    missing = [one.item for one in row.reported if not one.text]
    assert missing == [ITEMS[1], ITEMS[4]], "one operator on this mask, and nothing quantized"
    assert (row.cells["reported"].text, row.cells["reported"].detail) == ("3", "missing: 2, 5")
    assert "mask: world:general A, 32 tokens; fit: none" in row.reported[3].text
    factory.write(tmp_path / "b", factory.make_items(n=2), operator="constant", scale=None, resolved_scale=None)
    texts = {row.reported[1].text for row in build_board(tmp_path).table.rows}
    assert texts == {"one other operator: constant", "one other operator: reroute @ keep"}


@pytest.mark.parametrize("lower_is_better", [False, True])
def test_the_front_is_what_nothing_beats_on_both(lower_is_better):
    chance = random.Random(0)
    for _ in range(50):
        points = [(chance.randrange(6), chance.randrange(6)) for _ in range(chance.randrange(1, 12))]
        sign = -1 if lower_is_better else 1
        front = {points[at] for at in pareto(points, lower_is_better=lower_is_better)}
        unbeaten = {
            (x, y)
            for x, y in points
            if not any(a <= x and sign * b >= sign * y and (a, b) != (x, y) for a, b in points)
        }
        assert front == unbeaten


def test_declared_contrasts_leave_their_marks(records, tmp_path):
    families = tmp_path / "f.toml"
    arm = "model = 'tiny-olmoe', mask = 'mone', ratio = '0.5'"
    families.write_text(
        "name = 'f'\ndate = 2026-11-30\n[[family]]\nname = 'one'\nsuite = 'multiple_choice'\nlabel = 'x'\n"
        f"arm = {{ {arm} }}\na = {{ operator = 'reroute@trained' }}\nb = {{ operator = 'constant' }}\n"
        "[[family]]\nname = 'two'\nsuite = 'multiple_choice'\nlabel = 'y'\n"
        f"arm = {{ {arm} }}\na = {{ operator = 'reroute@trained' }}\nb = {{ operator = 'nothing' }}\n"
    )
    board = build_board(records, families=families)
    (answer,) = board.declared.answers
    found = rows(board)["tiny-olmoe-mone-reroute-trained"].numbers["multiple_choice"].constant
    assert found.mark == answer.mark
    assert found.p == pytest.approx(answer.p)
    assert [gap.question.label for gap in board.declared.gaps] == ["y"]
    data = json.loads(board.json)
    assert [one["label"] for one in data["declared"]] == ["x"]
    assert data["gaps"][0][1] == "y"


PLACE = "before\n\n<!-- board t {}: made by `prunebench board`, not by hand -->\n{}<!-- end of the board -->\n\nafter\n"


def test_a_files_board_is_put_anew_and_what_stands_around_it_stays(records, tmp_path):
    board = build_board(records, track="t")
    for kind in ("summary", "full"):
        (tmp_path / f"{kind}.md").write_text(PLACE.format(kind, "what was there\n"))
    files = [tmp_path / "summary.md", tmp_path / "full.md"]
    wanted = committed(board, tmp_path / "t.json", files, tmp_path / "docs")
    assert stale(wanted) == list(wanted)
    for path, content in wanted.items():
        path.write_bytes(content)
    assert stale(committed(board, tmp_path / "t.json", files, tmp_path / "docs")) == []
    text = files[1].read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "what was there" not in text
    assert "[mone](docs/mone.md)" in text
    files[0].write_text(files[0].read_text().replace("alike", "better"))
    assert stale(wanted) == [files[0]]


def test_a_file_without_a_place_for_the_board_is_one_line(tmp_path):
    with pytest.raises(PrerequisiteError):
        with_board(tmp_path / "none.md", {"t full": "x"})
    (tmp_path / "a.md").write_text("nothing")
    with pytest.raises(UsageError, match="no place for the board"):
        with_board(tmp_path / "a.md", {"t full": "x"})
    (tmp_path / "a.md").write_text(PLACE.format("full", "")[:60])
    with pytest.raises(UsageError):
        with_board(tmp_path / "a.md", {"t full": "x"})


GOOD = "[[score]]\nmodel = 'm'\narm = 'a'\nmetric = 'x'\nvalue = 1.5\nsource = 's'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no score is reported"),
        (GOOD.replace("1.5", "'1.5'"), "value is '1.5'"),
        (GOOD.replace("1.5", "nan"), "value is nan"),
        (GOOD.replace("source = 's'", ""), "no source"),
        (GOOD + "colour = 'red'", "unknown field 'colour'"),
        ("=", "cannot read"),
    ],
)
def test_reported_scores_need_a_number_and_a_source(tmp_path, text, message):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_reported(tmp_path / "r.toml")
    (tmp_path / "r.toml").write_text(GOOD)
    (only,) = read_reported(tmp_path / "r.toml")
    assert (only.value, only.source) == (1.5, "s")
