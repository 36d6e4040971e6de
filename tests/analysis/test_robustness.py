"""One contrast under several protocols, against plain arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prunebench.analysis.bootstrap import sampled
from prunebench.analysis.robustness import robustness
from prunebench.errors import UsageError
from prunebench.record import Item, Run, content_hash, items_to_table

N = 50
HEADLINE = [["arc_easy", "none", "acc_norm"], ["boolq", "none", "acc"], ["piqa", "none", "acc_norm"]]


def items(seed, suite="zero", *, prompt="", metrics=("acc", "acc_norm"), n=N):
    made = []
    for task, _, _ in HEADLINE:
        for number in range(n):
            rng = np.random.default_rng([seed, number, len(task), len(suite)])
            sizes = [3, 2] if task == "boolq" else [5 + number % 3, 9]
            detail = {"loglikelihoods": rng.normal(0, 1, 2).tolist(), "gold": number % 2, "bytes": sizes}
            for metric in metrics:
                value = float(rng.random() < 0.5 + 0.1 * seed)
                ids = (suite, task, "none", f"{task}-{number}")
                hashes = content_hash(f"{task} {number}"), content_hash(f"{prompt}{task} {number}")
                made.append(Item(*ids, *hashes, metric, value, detail=json.dumps(detail)))
    return made


def made(name, rows, headline=None, **changes):
    identity = {"engine": 1, "dtype": "float32", "device": "cpu", "experts_implementation": "eager"}
    suites = sorted({row.suite for row in rows})
    identity |= {"batch_tokens": 8, "suites": {suite: {"version": 1} for suite in suites}} | changes
    record = {"run_id": name, "identity": identity, "headline": dict.fromkeys(suites, headline or HEADLINE)}
    return Run(record, items_to_table(rows), Path(name))


@pytest.fixture(scope="module")
def pair():
    return [made(name, items(seed) + items(seed, "five", prompt="x")) for seed, name in enumerate("ab")]


def difference(pair, cells, suite="zero"):
    """Macro mean of item differences in points, and its draws on the resamples of the suite as reported."""
    parts = []
    for task, metric in cells:
        columns = []
        for run in pair:
            own = [i for i in run.items.items() if (i.suite, i.task, i.metric) == (suite, task, metric)]
            columns.append(np.array([i.value for i in sorted(own, key=lambda i: i.doc_hash)]))
        parts.append(sampled(columns[0] - columns[1], suite="zero", task=task))
    return 100 * np.mean([part.value for part in parts]), 100 * np.mean([part.draws_B for part in parts], axis=0)


CASES = {
    "as reported": [("arc_easy", "acc_norm"), ("boolq", "acc"), ("piqa", "acc_norm")],
    "raw accuracy": [("arc_easy", "acc"), ("boolq", "acc"), ("piqa", "acc")],
    "options of the item": [("arc_easy", "acc_norm"), ("piqa", "acc_norm")],
    "fixed answers": [("boolq", "acc")],
}


def test_every_protocol_is_the_contrast_of_its_tasks_and_metric(pair):
    found = {one.name: one for one in robustness(*pair, "zero", few_shot="five").protocols}
    assert list(found) == [*CASES, "with examples (five)", "with examples − as reported"]
    for name, cells in CASES.items():
        value, draws = difference(pair, cells)
        assert found[name].difference.value == pytest.approx(value)
        low, high = np.percentile(draws, [2.5, 97.5])
        assert (found[name].difference.low, found[name].difference.high) == pytest.approx((low, high))
        assert found[name].tasks == tuple(task for task, _ in cells)
        assert found[name].p is not None


def test_what_examples_change_is_tested_on_the_same_items(pair):
    found = {one.name: one for one in robustness(*pair, "zero", few_shot="five").protocols}
    plain, shown = (difference(pair, CASES["as reported"], suite) for suite in ("zero", "five"))
    low, high = np.percentile(shown[1] - plain[1], [2.5, 97.5])
    change = found["with examples − as reported"].difference
    assert (change.value, change.low, change.high) == pytest.approx((shown[0] - plain[0], low, high))
    assert found["with examples (five)"].difference.value == pytest.approx(shown[0])


def test_what_cannot_be_had_is_said(pair):
    rows = robustness(*pair, "zero").protocols
    assert rows[-1].note == "no suite with examples was named"
    only = [made(name, items(seed), headline=HEADLINE[1:2]) for seed, name in enumerate("ab")]
    assert robustness(*only, "zero").protocols[2].note == "no such task in the suite"
    normed = [made(n, [i for i in items(s) if i.metric == "acc_norm" or i.task == "boolq"]) for s, n in enumerate("ab")]
    assert robustness(*normed, "zero").protocols[1].note == "no acc of arc_easy"
    few = [made(name, items(seed, n=20)) for seed, name in enumerate("ab")]
    assert {one.note for one in robustness(*few, "zero").protocols[:4]} == {"no claim: 20 items, fewer than 30"}
    assert all(one.p is None for one in robustness(*few, "zero").protocols)


def test_a_task_that_is_said_to_have_fixed_answers_moves(pair):
    unknown = [
        made(
            run.path.name,
            [
                replace(i, task="truth", detail=i.detail.replace("[3, 2]", "[5, 5]"))
                for i in run.items.items()
                if i.task == "boolq" and i.suite == "zero"
            ],
            headline=[["truth", "none", "acc"]],
        )
        for run in pair
    ]
    with pytest.raises(UsageError, match="cannot tell whether the answers are the same"):
        robustness(*unknown, "zero")
    assert robustness(*unknown, "zero", fixed=["truth"]).protocols[3].tasks == ("truth",)


def test_other_questions_with_examples_are_refused(pair):
    strangers = [
        made(n, items(s) + [replace(i, doc_hash=i.doc_hash ^ 1) for i in items(s, "five")]) for s, n in enumerate("ab")
    ]
    with pytest.raises(UsageError, match="0 tasks of five ask what arc_easy asks"):
        robustness(*strangers, "zero", few_shot="five")


def test_runs_that_cannot_be_paired_are_refused(pair):
    with pytest.raises(UsageError, match="executed with different dtype"):
        robustness(pair[0], made("c", items(1), dtype="bfloat16"), "zero")
    with pytest.raises(UsageError, match="has no suite nine"):
        robustness(*pair, "nine")
    with pytest.raises(UsageError, match="lacks 10 of the items"):
        robustness(made("a", items(0)), made("c", items(1, n=N - 10)), "zero")


def test_text_and_json_say_the_same(pair):
    result = robustness(*pair, "zero", few_shot="five")
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    text = result.text()
    for one in data["protocols"]:
        assert one["name"] in text
        assert f"{one['difference']['value']:+.2f}" in text
    assert data["status"] in text
