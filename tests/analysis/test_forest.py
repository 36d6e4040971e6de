"""The forest plot: one specification behind both files, and every number of it in the specification."""

from __future__ import annotations

import importlib
import json
import re
import xml.etree.ElementTree as ET

import pytest

from prunebench.analysis import write_forest
from prunebench.analysis.bootstrap import Interval
from prunebench.analysis.contrasts import Answer
from prunebench.analysis.declared import Question
from prunebench.analysis.forest import draw, forest
from prunebench.analysis.multiplicity import Verdict
from prunebench.errors import PrerequisiteError, UsageError


def answer(label, value, low, high, verdict=None, *, family="operators", replicates=(), loss=False):
    question = Question(label, "s", (), family, exploratory=verdict is None)
    holm = None if verdict is None else 0.04
    shown = Interval(value, low, high, 100)
    p = 0.01 if low > 0 or high < 0 else 0.4
    return Answer(question, shown, (low, high), 1.0, 1.0, p, loss, replicates, (), None, None, holm, holm, verdict)


ANSWERS = [
    answer("m 25 % tilt - constant", 1.8, 1.2, 2.5, Verdict.BOTH, replicates=(1.6, 1.9)),
    answer("m 50 % tilt - keep", 1.1, 0.1, 2.1, Verdict.LOST),
    answer("m 75 % <keep> & constant", -0.4, -1.2, 0.3, Verdict.NONE),
    answer("m 50 % neurons - constant", 0.7, 0.2, 1.2, family="others"),
    answer("m 50 % ppl", -0.05, -0.07, -0.03, Verdict.TABLE, family="perplexity", loss=True),
]


@pytest.fixture(scope="module")
def specification():
    return forest(ANSWERS, title="a title")


@pytest.fixture(scope="module")
def svg(specification):
    return ET.fromstring(draw(specification, "svg"))  # noqa: S314 -- our own drawing


def data(node):
    """Every row of data anywhere in a specification."""
    if isinstance(node, dict):
        found = node["data"]["values"] if "data" in node else []
        return [*found, *(row for below in node.values() for row in data(below))]
    return [row for below in node for row in data(below)] if isinstance(node, list) else []


def rows(specification):
    return {row["contrast"]: row for row in data(specification) if "estimate" in row}


def test_every_number_is_in_the_specification(specification):
    found = rows(specification)
    assert list(found) == [one.question.label for one in ANSWERS]
    for one in ANSWERS:
        row = found[one.question.label]
        d = one.difference
        assert (row["estimate"], row["low"], row["high"]) == (d.value, d.low, d.high)
        assert row["excludes"] == (d.low > 0 or d.high < 0)
        assert row["mark"] == {"both": "‡", "table": "†"}.get(str(one.verdict), "")
    assert {row["draw"] for row in data(specification) if "draw" in row} == {1.6, 1.9}


def test_it_is_the_same_text_every_time(specification):
    assert json.dumps(forest(ANSWERS, title="a title")) == json.dumps(specification)


def test_the_drawing_shows_every_contrast_its_marks_and_units(svg):
    texts = [element.text for element in svg.iter() if element.tag.endswith("text")]
    for one in ANSWERS:
        assert one.question.label in texts
    for words in (
        "a title",
        "operators",
        "others (exploratory)",
        "points",
        "ln perplexity, below zero is better",
        "‡",
        "†",
    ):
        assert words in texts


def test_markers_are_filled_where_the_interval_excludes_zero(svg):
    labelled = [element.attrib for element in svg.iter() if element.attrib.get("aria-roledescription") == "point"]
    fills = {}
    for attributes in labelled:
        name = re.search(r"contrast: (.*?);", attributes["aria-label"])[1]
        fills[name] = attributes["fill"]
    for one in ANSWERS:
        assert (fills[one.question.label] != "white") == one.excludes_zero


def test_the_page_and_the_drawing_come_from_one_specification_and_ask_nothing_of_the_network(tmp_path, specification):
    svg, page = write_forest(ANSWERS, tmp_path / "new", title="a title")
    assert svg.read_text() == draw(specification, "svg")
    html = page.read_text()
    assert not re.search(r"(?:src|href)=\"https?:", html)
    for one in ANSWERS:
        assert json.dumps(one.question.label)[1:-1] in html


@pytest.mark.parametrize("library", ["altair", "vl_convert"])
def test_a_missing_library_names_the_extra(library, monkeypatch, tmp_path):
    real = importlib.import_module

    def absent(name, *rest):
        if name == library:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(PrerequisiteError, match=rf"{library} is not installed.*prunebench\[plots\]"):
        write_forest(ANSWERS, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write_forest(ANSWERS[:1], tmp_path / "file")
