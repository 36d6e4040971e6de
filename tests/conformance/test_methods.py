"""Every method of the repository keeps every rule, and its card says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from prunebench import load_method
from prunebench.conformance import card, index, report_of
from prunebench.conformance.result import Report
from prunebench.loader import available

CARDS = Path(__file__).parents[2] / "docs" / "methods"
ANEW = "prunebench check methods/*.py --cards docs/methods"


@pytest.mark.parametrize("name", available("methods"))
def test_a_method_passes_and_its_card_is_up_to_date(name):
    method = load_method(name)
    report = report_of(method)
    assert report.ok, report.to_text()
    assert not report.of("not run")
    text = (CARDS / f"{name}.md").read_text(encoding="utf-8") if (CARDS / f"{name}.md").is_file() else ""
    assert text == card(method, report), f"docs/methods/{name}.md is not what the checks say; write it anew: {ANEW}"


def test_the_index_names_every_method_and_no_card_is_left_over():
    names = available("methods")
    assert {path.stem for path in CARDS.glob("*.md")} == {*names, "README"}
    lines = (CARDS / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line.partition("]")[0].removeprefix("| [") for line in lines if line.startswith("| [")]
    assert rows == names, ANEW
    methods = [(load_method(name), Report(name, "", "", {}, ())) for name in names]
    bare = [line.rpartition(" | ")[0] for line in index(methods).splitlines() if line.startswith("| [")]
    assert [line.rpartition(" | ")[0] for line in lines if line.startswith("| [")] == bare, ANEW
