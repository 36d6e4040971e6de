"""Committed runs of the tiny world, decided again from what they store."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from prunebench.analysis.recompute import recompute
from prunebench.items import items_to_table
from prunebench.mask import canonical_json
from prunebench.record import read_run, runs_under
from prunebench.run.stored import stored_documents

RECORDS = Path(__file__).parents[2] / "leaderboard/records/tiny"


@pytest.mark.parametrize("number", [0, 7, 100])
def test_a_committed_run_agrees(number):
    run = read_run(runs_under(RECORDS).runs[number])
    report = recompute(run, stored_documents(run))
    assert report.agrees, report.to_text()
    cells = {cell.cell: cell for cell in report.cells}
    assert all(cell.believed == 0 for name, cell in cells.items() if not name.startswith("code/"))
    # What a program did is not decided without a sandbox.
    assert all(cell.believed == cell.rows for name, cell in cells.items() if name.startswith("code/"))
    assert cells["arithmetic/tiny_arithmetic/strict/exact_match"].agree == 240


def test_without_its_documents_a_word_problem_is_believed_and_said_so():
    run = read_run(runs_under(RECORDS).runs[0])
    cells = {cell.cell: cell for cell in recompute(run).cells}
    assert cells["arithmetic/tiny_arithmetic/strict/exact_match"].believed == 240
    assert cells["multiple_choice/tiny_recall/none/acc"].believed == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gold": "x"}, "ValueError"),
        ({"loglikelihoods": []}, "ValueError"),
        ({"loglikelihoods": 5}, "TypeError"),
        ({"gold": None}, "TypeError"),
    ],
)
def test_a_detail_that_cannot_be_decided_is_a_row_that_differs(change, says):
    run = read_run(runs_under(RECORDS).runs[0])
    items = list(run.items.items())
    place = next(place for place, item in enumerate(items) if "loglikelihoods" in json.loads(item.detail))
    detail = {**json.loads(items[place].detail), **change}
    items[place] = dataclasses.replace(items[place], detail=canonical_json(detail))
    report = recompute(dataclasses.replace(run, items=items_to_table(items)), stored_documents(run))
    faulty = [cell for cell in report.cells if cell.first]
    assert len(faulty) == 1
    assert f"cannot be decided ({says}" in faulty[0].first
    assert faulty[0].agree == faulty[0].rows - 1
    assert not report.agrees


@pytest.mark.parametrize("detail", ["{}", "[]", '{"gold":1}'])
def test_an_emptied_detail_is_not_believed_where_others_can_be_decided(detail):
    run = read_run(runs_under(RECORDS).runs[0])
    items = list(run.items.items())
    place = next(place for place, item in enumerate(items) if "loglikelihoods" in json.loads(item.detail))
    items[place] = dataclasses.replace(items[place], detail=detail)
    report = recompute(dataclasses.replace(run, items=items_to_table(items)), stored_documents(run))
    (faulty,) = (cell for cell in report.cells if cell.first)
    assert (faulty.agree, faulty.believed) == (faulty.rows - 1, 0)
    assert "nothing to decide by" in faulty.first
    assert not report.agrees
