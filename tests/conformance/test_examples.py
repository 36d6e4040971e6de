"""The template and the worked examples of docs/add-a-method.md pass the checks as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prunebench import cli, load_method
from prunebench.conformance import report_of, write_template
from prunebench.errors import UsageError

TEXT = (Path(__file__).parents[2] / "docs" / "add-a-method.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
FILES = {re.search(r'name = "([\w-]+)"\n    reference', text)[1]: text for text in EXAMPLES if "(Method)" in text}


def test_the_page_has_a_criterion_a_fill_and_a_router_edit():
    assert list(FILES) == ["worst-case", "channel-tilt", "half-scale"]


@pytest.mark.parametrize("name", FILES)
def test_a_worked_example_passes_the_checks(tmp_path, name):
    path = tmp_path / f"{name}.py"
    path.write_text(FILES[name], encoding="utf-8")
    report = report_of(str(path))
    assert report.ok, report.to_text()
    assert not report.of("not run")


def test_a_new_method_passes_the_checks_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "methods").mkdir()
    assert cli.main(["new-method", "gate-entropy"]) == 0
    assert capsys.readouterr().out == "methods/gate-entropy.py\nnext: prunebench check methods/gate-entropy.py\n"
    method = load_method("methods/gate-entropy.py")
    assert (type(method).__name__, method.name) == ("GateEntropy", "gate-entropy")
    report = report_of(method)
    assert report.ok, report.to_text()


@pytest.mark.parametrize("name", ["Gate", "a b", "../x", "x-", ""])
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="expected small letters"):
        write_template(name, tmp_path)


def test_nothing_is_overwritten_and_no_name_is_taken_twice(tmp_path, capsys):
    write_template("mine", tmp_path)
    with pytest.raises(UsageError, match="is there already"):
        write_template("mine", tmp_path)
    assert cli.main(["new-method", "reap", "--folder", str(tmp_path)]) == 2
    assert "method 'reap' is there already" in capsys.readouterr().err
    assert cli.main(["new-method", "other", "--folder", str(tmp_path / "none")]) == 2
