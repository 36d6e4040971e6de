"""Code tasks: what programs are held against, evalplus's rules, pass@k, and the tiny world's programs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.evaluate import Answer, Evaluation, Generation
from prunebench.evaluate.code import (
    assertion_case,
    base_and_plus,
    check_case,
    code_item,
    inputs_case,
    pass_at_k,
    required_names,
)
from prunebench.record import content_hash
from prunebench.sandbox import OPEN, Verdict, boxed, run_case
from prunebench.sandbox.inside.compare import RULES, close, is_floats, same

# --- pass@k


def test_pass_at_k_is_the_share_of_draws_with_a_passing_sample():
    for n in range(1, 7):
        for passed in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
                assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_is_evalplus_estimate():
    from evalplus.eval import estimate_pass_at_k

    for n, passed, k in ((200, 3, 1), (200, 3, 10), (200, 150, 100), (64, 0, 64), (1, 1, 1)):
        assert pass_at_k(n, passed, k) == pytest.approx(estimate_pass_at_k(n, [passed], k)[0], abs=1e-12)


@pytest.mark.parametrize(("n", "passed", "k"), [(1, 2, 1), (3, 1, 4), (3, -1, 1), (3, 1, 0), (0, 0, 1)])
def test_impossible_samples_are_refused(n, passed, k):
    with pytest.raises(ValueError, match="samples"):
        pass_at_k(n, passed, k)


def test_a_row_says_n_k_and_how_it_failed():
    texts = ("a", "b", "c", "d")
    answer = Answer("s", "t", {"id": "1"}, 1, tuple(Generation(text, "eos", 1) for text in texts), {}, {})
    verdicts = [
        Verdict("ok", ""),
        Verdict("error", "NameError: name 'x' is not defined"),
        Verdict("ok", ""),
        Verdict("wrong", ""),
    ]
    item = code_item(answer, verdicts, filter_name="strict", k=2, flags={"ran_past": True})
    detail = json.loads(item.detail)
    assert (item.metric, item.filter, item.state) == ("pass@2", "strict", "error")
    assert item.value == pytest.approx(1 - 1 / 6)
    assert [detail[key] for key in ("n", "k", "passed", "kind", "text", "ran_past")] == [
        4,
        2,
        2,
        "undefined name",
        "b",
        True,
    ]
    silent = dataclasses.replace(answer, responses=(Generation(" \n", "eos", 1),))
    assert code_item(silent, [Verdict("error", "NameError: f")], filter_name="strict").state == "empty"


def test_a_program_behind_logits_that_are_no_numbers_does_not_pass_and_a_cut_prompt_is_in_the_row():
    answer = Answer("s", "t", {"id": "1"}, 1, (Generation("a", "invalid", 1),), {}, {}, target="check(f)", dropped=7)
    item = code_item(answer, [Verdict("ok", "")], filter_name="strict")
    detail = json.loads(item.detail)
    assert (item.state, item.value, detail["passed"], detail["dropped"]) == ("invalid", 0.0, 0, 7)
    assert detail["target_hash"] == f"{content_hash('check(f)'):016x}"


# --- evalplus's rules


@pytest.fixture(scope="module")
def evalplus_says():
    """evalplus's own verdict on an output, from its checker in this process: our programs here are harmless."""
    from evalplus.eval import unsafe_execute

    class Stat:
        value = 3

    def says(dataset, entry, inputs, outputs, expected, atol):  # noqa: PLR0917 - evalplus's own
        code = f"outputs = iter({outputs!r})\ndef {entry}(*_):\n    return next(outputs)\n"
        stat, details, progress = Stat(), [False] * len(inputs), Stat()
        with pytest.MonkeyPatch.context() as patch:
            # It disables half of this process for good otherwise.
            patch.setattr("evalplus.eval.reliability_guard", lambda **_: None)
            patch.setattr("evalplus.eval.create_tempdir", _nothing)
            unsafe_execute(
                dataset, entry, code, inputs, expected, [5.0] * len(inputs), atol, False, stat, details, progress
            )
        return list(details)

    return says


class _nothing:  # noqa: N801 - a context manager in place of a function
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


VALUES: tuple[Any, ...] = (
    *(
        0,
        1,
        True,
        2.0,
        1.0 + 1e-7,
        1.0 + 1e-5,
        1.0 + 1e-13,
        1e9 + 1,
        1e9,
        -0.0,
        float("inf"),
        float("-inf"),
        float("nan"),
    ),
    *(
        "",
        "a",
        None,
        [],
        (),
        {},
        [1, 2],
        (1, 2),
        [1.0, 2.0],
        (1.0, 2.0),
        [1.0, 2.0 + 1e-8],
        [1.0, 2.1],
        [1.0],
        [1.0, 2],
    ),
    *(
        [[1.0], [2.0]],
        [[1.0], [2.0 + 1e-8]],
        [(1.0, 2.0)],
        {1: 2.0},
        {1: 2.0 + 1e-9},
        {1, 2},
        1j,
        1j + 1e-9,
        [True],
        "1.0",
    ),
)


@pytest.mark.parametrize("atol", [0, 1e-4])
def test_outputs_agree_when_evalplus_says_so(evalplus_says, atol):
    for expected in VALUES:
        theirs = [evalplus_says("mbpp", "f", [[0]], [output], [expected], atol)[0] for output in map(_literal, VALUES)]
        ours = [_agrees(output, expected, atol) for output in VALUES]
        for output, one, other in zip(VALUES, ours, theirs, strict=True):
            assert one == other, (output, expected, atol)


def _agrees(output, expected, atol, rule="Mbpp/f", arguments=(0,)):
    try:
        return bool(RULES.get(rule, same)(output, expected, arguments, atol))
    except Exception:  # noqa: BLE001 - as the judge has it: no agreement
        return False


class _Literal:
    """A value whose repr is Python even where it is no number."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return f"__import__('pickle').loads({__import__('pickle').dumps(self.value)!r})"


def _literal(value):
    return _Literal(value)


@pytest.mark.parametrize(
    ("entry", "arguments", "expected", "outputs"),
    [
        ("similar_elements", [(1, 2), (2, 1)], (1, 2), [(2, 1), [1, 2, 2], {1, 2}, (1,), 3, None]),
        ("Diff", [[1], [2]], [1, 2], [[2, 1], [1], [1, 2, 3]]),
        ("sum_div", [7], 1, [0, 1, 2, 0.0]),
        ("surface_Area", [3, 4], 33, [33, 34, 35, 33.0]),
        ("digit_distance_nums", [1, 20], 18, [18, 3, 4]),
        ("check_str", ["a"], True, [True, False, None, 0, "match"]),
        ("text_match_three", ["a"], False, [True, False, None, 0, "match"]),
    ],
)
def test_tasks_of_their_own_rule_agree_when_evalplus_says_so(evalplus_says, entry, arguments, expected, outputs):
    for output in outputs:
        theirs = evalplus_says("mbpp", entry, [arguments], [output], [expected], 0)[0]
        assert _agrees(output, expected, 0, f"Mbpp/{entry}", arguments) == theirs, output


def test_where_we_differ_from_evalplus_it_is_a_fault_of_its():
    """HumanEval/32 can pass here; Mbpp/164 can fail; a tolerance does not outlive the output that it is for."""
    coefficients = [[-6.0, 11.0, -6.0, 1.0]]
    for root in (1.0, 2.0, 3.0):
        assert _agrees(root, 1.0, 1e-4, "HumanEval/find_zero", coefficients)
    assert not _agrees(1.5, 1.0, 1e-4, "HumanEval/find_zero", coefficients)
    assert not _agrees(False, True, 0, "Mbpp/are_equivalent", [36, 57])
    assert not _agrees(10**9 + 1, 10**9, 0)


def test_closeness_is_numpys():
    rng = random.Random(0)
    for _ in range(2000):
        expected = rng.choice([0.0, 1.0, -3.5, 1e6, 1e-9]) * rng.random()
        output = expected + rng.choice([0, 1e-9, 1e-7, 1e-6, 1e-4, -1e-6]) * rng.random() * 2
        atol = rng.choice([1e-6, 1e-4])
        assert close(output, expected, atol) == bool(np.allclose(output, expected, rtol=1e-7, atol=atol))
    assert not close(math.nan, math.nan, 1.0)
    assert not close(1.0, math.inf, 1.0)
    assert close(math.inf, math.inf, 1.0)
    assert not is_floats([])
    assert is_floats((1.0, 2.0))


# --- cases, on tasks written here in the data sets' own form

HUMANEVAL = {
    "id": "Own/0",
    "prompt": 'def shifted(s):\n    """One on."""\n    return "".join(chr(ord(c) + 1) for c in s)\n\n\n'
    'def unshift(s):\n    """One back."""\n',
    "entry_point": "unshift",
    "canonical_solution": '    return "".join(chr(ord(c) - 1) for c in s)\n',
    "test": "def check(candidate):\n    for s in ('abc', 'hello', ''):\n"
    "        assert candidate(shifted(s)) == s\n    assert candidate('b') == unshift('b')\n",
}
MBPP = {
    "id": "0",
    "text": "Write a function to count the nodes of a chain.",
    "code": "class Node:\r\n  def __init__(self, n):\r\n    self.n = n\r\n    self.next = None\r\n"
    "def count_nodes(head):\r\n  n = 0\r\n  while head:\r\n    n, head = n + 1, head.next\r\n  return n",
    "test_setup_code": "root = Node(1)\r\nroot.next = Node(2)\r\nroot.next.next = Node(3)",
    "test_list": [
        "assert count_nodes(root) == 3",
        "assert count_nodes(root.next) == 2",
        "assert count_nodes(None) == 0",
    ],
}
PLUS = {
    "id": "Mbpp/0",
    "text": "Write a function to find the roots.",
    "entry_point": "roots",
    "canonical_solution": "def roots(xs, extra=None):\n    xs.sort()\n    return [x ** 0.5 for x in xs]\n",
    "atol": 0.0,
    "base_input": "[[[4, 9]], [[]]]",
    "plus_input": "[[[2, 3, 0]], [[1e300]], [[16], [1]]]",
}


def test_humaneval_is_checked_beside_the_reference_whose_helpers_are_not_the_programs():
    good = f"{HUMANEVAL['prompt']}{HUMANEVAL['canonical_solution']}"
    for program, state in (
        (good, "ok"),
        (good.replace("- 1", "- 2"), "wrong"),
        # The program's own helper is no use to it: what it would have to undo is the reference's.
        (good.replace("+ 1", "+ 0").replace("- 1", "- 0"), "wrong"),
        (HUMANEVAL["prompt"], "wrong"),
        ("", "error"),
    ):
        assert run_case(check_case(HUMANEVAL, program), boxed()).state == state, program


def test_mbpp_asks_for_what_the_reference_defines_and_the_tests_use():
    tests = "\n".join([MBPP["test_setup_code"], *MBPP["test_list"]])
    assert required_names(MBPP, tests) == ["Node", "count_nodes"]
    own_sum = {**MBPP, "code": "def sum(a, b):\n    return a - b", "test_list": ["assert sum(3, 1) == 2"]}
    assert required_names(own_sum, "assert sum(3, 1) == 2") == ["sum"]


def test_mbpp_is_asserted_after_the_tasks_own_setup():
    for program, state in (
        (MBPP["code"], "ok"),
        (MBPP["code"].replace("n + 1", "n + 2"), "wrong"),
        (MBPP["code"].replace("class Node", "class Other"), "error"),
        ("def count_nodes(head):\n    return 3", "error"),
    ):
        assert run_case(assertion_case(MBPP, program), boxed()).state == state, program


def test_inputs_are_answered_as_the_reference_does_and_are_not_the_programs_to_change():
    good = PLUS["canonical_solution"]
    for which in ("base", "plus"):
        assert run_case(inputs_case(PLUS, good, "Mbpp", which), boxed()).state == "ok"
    near = good.replace("x ** 0.5", "x ** 0.5 + 1e-9")
    far = good.replace("x ** 0.5", "x ** 0.5 + 1e-3")
    unsorted = good.replace("xs.sort()", "pass")
    states = {
        name: [run_case(inputs_case(PLUS, program, "Mbpp", which), boxed()).state for which in ("base", "plus")]
        for name, program in (("near", near), ("far", far), ("unsorted", unsorted))
    }
    assert states == {"near": ["ok", "ok"], "far": ["wrong", "wrong"], "unsorted": ["ok", "wrong"]}
    failed = run_case(inputs_case(PLUS, far, "Mbpp", "plus"), boxed())
    assert failed.reason == "AssertionError: input 0 of 3"


def test_what_is_too_large_to_send_is_compared_by_its_digest():
    big = {
        **PLUS,
        "entry_point": "table",
        "canonical_solution": "def table(n):\n    return [(i, str(i)) for i in range(n)]\n",
        "base_input": "[[3]]",
        "plus_input": "[[200000]]",
    }
    good = big["canonical_solution"]
    for program, state in (
        (good, "ok"),
        (good.replace("str(i)", "str(i + (i == 199_999))"), "wrong"),
        (good.replace("(i, str(i))", "[i, str(i)]"), "wrong"),
        (
            "class E(list):\n    def __eq__(s, o): return True\ndef table(n):\n    return E([10 ** 9] * 10 ** 6)",
            "error wrong",
        ),
    ):
        assert run_case(inputs_case(big, program, "Mbpp", "plus"), boxed()).state in state.split(), program


def test_more_inputs_are_asked_only_of_who_passed_on_the_tasks_own():
    model = torch.nn.Identity().eval()
    asked = []

    @dataclasses.dataclass(frozen=True, eq=False)
    class Watched(Evaluation):
        def run_cases(self, cases, canary):
            asked.append([case.name for case in cases])
            return super().run_cases(cases, canary)

    good = PLUS["canonical_solution"]
    no_more = {**PLUS, "id": "Mbpp/1", "plus_input": "[]"}
    programs = [good, good.replace("xs.sort()", "pass"), "def roots(xs): return 0", good]
    verdicts = base_and_plus(Watched(model, None), [PLUS, PLUS, PLUS, no_more], programs, "Mbpp")
    states = [(base.state, plus.state) for base, plus in verdicts]
    assert states == [("ok", "ok"), ("ok", "wrong"), ("wrong", "wrong"), ("ok", "ok")]
    assert asked == [["Mbpp/0, base"] * 3 + ["Mbpp/1, base"], ["Mbpp/0, plus"] * 2]


def test_mbpp_plus_without_evalplus_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "evalplus.data.mbpp", None)
    with pytest.raises(PrerequisiteError, match=r"pip install 'prunebench\[code\]'"):
        inputs_case(PLUS, "", "Mbpp", "base")
    assert inputs_case({**PLUS, "prompt": ""}, "", "HumanEval", "base").data["_inputs"] == [[[4, 9]], [[]]]


# --- the tiny world's programs, whose tests come at their end

ASSERTIONS = "assert add(1) == 3\nassert add(2) == 4\n"


def evaluation_that_asked(*tests, **more):
    evaluation = Evaluation(torch.nn.Identity().eval(), None, **more)
    for test in tests:
        evaluation._asserted[test] = "add"
    return evaluation


def test_a_programs_own_tests_are_taken_off_and_run_outside():
    evaluation = evaluation_that_asked(ASSERTIONS)
    assert evaluation.run_program(f"def add(x):\n    return x + 2\n{ASSERTIONS}") == ("ok", "")
    assert evaluation.run_program(f"def add(x):\n    return x + 3\n{ASSERTIONS}").state == "wrong"
    always = "class E:\n    def __eq__(s, o): return True\ndef add(x):\n    return E()\n"
    assert evaluation.run_program(always + ASSERTIONS).state == "wrong"


def test_only_a_documents_own_assertions_are_believed():
    evaluation = evaluation_that_asked(ASSERTIONS, f"assert add(0) == 2\n{ASSERTIONS}")
    with pytest.raises(UsageError, match="ends in no document's test"):
        evaluation.run_program("def add(x):\n    return 9\nassert True\n")
    # An assertion that the model wrote stays with the program; one of another document's only adds to what must hold.
    own = "def add(x):\n    return x + 2\nassert add(1) == 4\n"
    assert evaluation.run_program(own + ASSERTIONS).state == "wrong"
    assert (
        evaluation.run_program(f"def add(x):\n    return x + 2 * (x > 0)\nassert add(0) == 2\n{ASSERTIONS}").state
        == "wrong"
    )


def test_the_unsafe_way_is_one_that_is_asked_for():
    assert evaluation_that_asked(ASSERTIONS).box == boxed()
    unsafe = evaluation_that_asked(ASSERTIONS, unsafe_local=True)
    assert unsafe.box is OPEN
    assert unsafe.run_program(f"def add(x):\n    return x + 2\n{ASSERTIONS}").state == "ok"


def test_the_asked_verdicts_come_from_cases_that_are_run_once(monkeypatch):
    from prunebench.evaluate import engine

    ran = []
    real = engine.run_cases

    def counting(cases, *arguments, **keywords):
        ran.extend(case.program for case in cases)
        return real(cases, *arguments, **keywords)

    monkeypatch.setattr(engine, "run_cases", counting)
    reports = []
    evaluation = Evaluation(torch.nn.Identity().eval(), None, progress=lambda *report: reports.append(report))
    good, bad = (
        check_case(HUMANEVAL, text) for text in (f"{HUMANEVAL['prompt']}{HUMANEVAL['canonical_solution']}", "")
    )
    assert [verdict.state for verdict in evaluation.run_cases([good, bad, good, bad], good)] == ["ok", "error"] * 2
    assert len(ran) == 2
    assert reports == [("run programs", 1, 2), ("run programs", 2, 2)]


def recorded_programs():
    """(document, text, state, reason) of programs of the committed records, some of each state."""
    from prunebench.loader import content_root
    from prunebench.record import read_items

    root = content_root()
    docs = {}
    for task in ("code_mbpp", "code_humaneval"):
        for line in (root / f"suites/data/{task}.jsonl").read_text(encoding="utf-8").splitlines():
            doc = json.loads(line)
            docs[doc["id"]] = {**doc, "head": doc["prompt"] if task == "code_humaneval" else ""}
    arms = (
        "dense",
        "mone-ratio0.5-constant-A",
        "random-ratio0.75-reroute-trained-A",
        "reap-ratio0.5-reroute-trained-A",
    )
    by_state: dict[str, list[Any]] = {}
    for arm in arms:
        for item in read_items(root / "leaderboard/records/tiny/tiny-olmoe" / arm / "items.parquet").items():
            if item.suite == "code" and item.state != "empty":
                detail = json.loads(item.detail)
                row = (docs[item.item], detail["text"], item.state, detail["reason"])
                by_state.setdefault(item.state, []).append(row)
    return [row for rows in by_state.values() for row in random.Random(0).sample(rows, 12)]


def test_the_committed_records_programs_have_the_verdicts_that_were_recorded():
    """State and reason: they were made before there was a sandbox, with the tests in the program's own process."""
    rows = recorded_programs()
    assert {state for _, _, state, _ in rows} == {"ok", "wrong", "error"}
    for doc, text, state, reason in rows:
        evaluation = Evaluation(torch.nn.Identity().eval(), None)
        vars(evaluation)["_tried_box"] = boxed()
        evaluation._asserted[doc["test"]] = doc["entry_point"]
        assert evaluation.run_program(f"{doc['head']}{text}\n{doc['test']}") == (state, reason), text
