"""The three doors: what a report says, what is expected to fail, and what a person is told."""

from __future__ import annotations

import ast
import copy
import inspect
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from prunebench import Method, cli, load_method
from prunebench.conformance import CHECKS, ConformanceError, check_method, parametrize_with_checks, report_of, rules
from prunebench.conformance.cases import CONVENTIONS, HOMES, case, least_gap
from prunebench.conformance.left import same
from prunebench.errors import UsageError
from prunebench.testing import FAMILIES, opened_model

ROOT = Path(__file__).parents[2]
DOUBTFUL = '''"""Doubtful."""

from dataclasses import dataclass

from prunebench import Method


@dataclass(frozen=True)
class Doubtful(Method):
    """A router edit without a reference, which is a fault."""

    name = "doubtful"
    share: float = 0.5
'''


@pytest.fixture
def doubtful(tmp_path):
    path = tmp_path / "doubtful.py"
    path.write_text(DOUBTFUL, encoding="utf-8")
    return str(path)


def test_a_failure_says_what_where_expected_both_ways_out_and_how_to_see_it_again(doubtful):
    with pytest.raises(ConformanceError) as info:
        check_method(load_method(doubtful, {"share": 0.25}), only=["metadata"])
    assert str(info.value) == (
        "doubtful fails 1 checks; metadata: reference ''; in class Doubtful; "
        'expected reference = "arXiv:…" or "ours"; fix: write it into the class; tables and cards show the reference; '
        "or --expect metadata=REASON, if it is right that it fails; "
        f"reproduce: prunebench check {doubtful} --param share=0.25 --only metadata"
    )


def test_an_expected_failure_is_one_and_a_stale_one_is_reported(doubtful):
    report = report_of(doubtful, only=["metadata", "needs"], expected_failures={"metadata": "it is a test"})
    assert report.ok
    assert [one.outcome for one in report.results] == ["expected failure", "passed"]
    report = report_of(doubtful, only=["needs"], expected_failures={"needs": "it was broken"})
    assert not report.ok
    assert "drop the expectation" in report.results[0].message
    with pytest.raises(ConformanceError, match="expected to fail"):
        report.demand()


def test_an_expectation_without_a_reason_or_of_no_check_is_refused(doubtful):
    with pytest.raises(UsageError, match="the expected failure of needs has no reason"):
        report_of(doubtful, expected_failures={"needs": " "})
    with pytest.raises(UsageError, match="unknown check 'need'"):
        report_of(doubtful, expected_failures={"need": "typed wrong"})
    with pytest.raises(UsageError, match="unknown check"):
        report_of(doubtful, only=["everything"])


@parametrize_with_checks(["frequency"])
def test_the_decorator_makes_a_test_per_check(method, check):
    check(method)


@dataclass(frozen=True)
class Nameless(Method):
    """A method that is not in a file of its own and has no reference."""

    name = "nameless"


EXPECTED = {"metadata": "it is an example", "imports": "it stands in a test"}


@parametrize_with_checks([Nameless()], expected_failures={"nameless": EXPECTED})
def test_the_decorator_expects_what_it_is_told_to(method, check):
    check(method)


def test_the_command_line_reports_and_exits_by_what_it_found(doubtful, capsys):
    assert cli.main(["check", doubtful, "--only", "metadata", "--only", "needs"]) == 1
    assert "1 failed, 1 passed" in capsys.readouterr().out
    assert cli.main(["check", doubtful, "--only", "metadata", "--expect", "metadata=an example", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["ok"], data["results"][0]["outcome"]) == (True, "expected failure")
    assert cli.main(["check", doubtful, "--only", "needs", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("# doubtful\n\nA router edit without a reference")
    assert cli.main(["check", "no-such-method"]) == 2


def test_every_check_is_short_and_states_its_rule():
    for check in CHECKS.values():
        source = inspect.getsource(check.run)
        assert len(source.splitlines()) <= 31, f"{check.name}: more than 30 lines and its decorator"
        assert check.rule.endswith("."), check.name
        assert ast.get_docstring(ast.parse(source).body[0]) is not None
        assert set(check.after) <= set(CHECKS)


def test_the_page_lists_every_check_and_its_rule():
    assert rules() in (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")


def test_no_two_experts_of_a_home_have_nearly_equal_token_counts():
    for family in HOMES:
        assert least_gap(case("plain", family)) >= 2


def test_every_way_of_routing_and_every_layout_of_weights_is_among_the_conventions():
    def kind(family):
        moe = opened_model(family, experts=8, top_k=2)
        convention = moe.convention
        ways = (convention.score, convention.renormalised, convention.biased, convention.groups is not None)
        return (*ways, convention.expert_scales, convention.identities > 0, tuple(sorted(moe.layers[0].weights(0))))

    assert {kind(family) for family in FAMILIES} == {kind(family) for family in CONVENTIONS}


def test_the_same_is_the_same_whatever_it_is_made_of():
    @dataclass(slots=True)
    class Slotted:
        mean_D: np.ndarray

    nan = float("nan")
    for one, other in [
        (np.array([nan, 1.0]), np.array([nan, 2.0])),
        (torch.tensor([nan, 1.0]), torch.tensor([nan, 2.0])),
        ({"a": {"b": [np.zeros(2)]}}, {"a": {"b": [np.ones(2)]}}),
        (Slotted(np.zeros(2)), Slotted(np.ones(2))),
        ({1, 2}, {1, 3}),
        (nan, 1.0),
    ]:
        assert same(one, copy.deepcopy(one))
        assert not same(one, other)


RAISES = {
    "needs": "    def select_needs(self):\n        raise ValueError('no')\n",
    "parameters": "    def __post_init__(self):\n        if self.share != 0.25:\n            raise OSError('no')\n",
    "signatures": "    select = 3\n",
}


@pytest.mark.parametrize("check", RAISES)
def test_whatever_a_method_raises_wherever_it_is_asked_is_a_failure_of_its_own(tmp_path, check):
    path = tmp_path / "raising.py"
    path.write_text(DOUBTFUL + "\n" + RAISES[check], encoding="utf-8")
    if check == "parameters":
        method = load_method(str(path), {"share": 0.25})
        object.__setattr__(method, "share", 0.75)
    else:
        method = load_method(str(path))
    report = report_of(method, only=[check])
    assert [one.outcome for one in report.results] == ["failed"]
    assert "expected no error" in report.results[0].message


def test_what_is_wrong_with_a_request_is_said_before_any_check_runs(doubtful, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("prunebench.conformance.apart.report_apart", None)
    wrong = {
        "no such method file": [doubtful, "no-such.py"],
        "gives no reason": [doubtful, "--expect", "metadata"],
        "two reasons are given": [doubtful, "--expect", "metadata=a", "--expect", "metadata=b"],
        "--cards with --only": [doubtful, "--cards", str(tmp_path), "--only", "metadata"],
        "cannot write cards": [doubtful, "--cards", doubtful],
        "two methods are named doubtful": [doubtful, doubtful, "--cards", str(tmp_path)],
    }
    for what, arguments in wrong.items():
        assert cli.main(["check", *arguments]) == 2
        assert what in capsys.readouterr().err


def test_a_card_is_never_written_beside_its_folder(doubtful, tmp_path, capsys):
    path = Path(doubtful)
    path.write_text(DOUBTFUL.replace('"doubtful"', '"../doubtful"'), encoding="utf-8")
    assert cli.main(["check", doubtful, "--cards", str(tmp_path / "cards")]) == 2
    assert "method name '../doubtful'" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.md"))


def test_a_check_that_is_asked_for_twice_runs_once(doubtful):
    assert len(report_of(doubtful, only=["needs", "needs"]).results) == 1
