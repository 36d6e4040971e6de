"""Published numbers and paired comparisons, from items, against plain arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prunebench.analysis import compare, comparison_table, metrics_from_items
from prunebench.analysis.bootstrap import sampled
from prunebench.errors import UsageError
from prunebench.record import Run, content_hash, items_to_table


@pytest.fixture
def make(factory):
    def run(items, **changes):
        record = factory.make_record(items, **changes)
        return Run(record, items_to_table(items), Path(changes.get("mask") or "run"))

    return run


@pytest.fixture
def pair(factory, make):
    return [make(factory.make_items(seed=s, n=30, skill=0.5 + 0.2 * s), mask=name) for s, name in enumerate("ab")]


def values(run, suite, task, filter_name, metric):
    return {i.item: i for i in run.items.items() if i.key[:3] == (suite, task, filter_name) and i.metric == metric}


def test_metrics_are_means_macro_means_and_perplexities(factory, pair):
    metrics = metrics_from_items(pair[0].items, factory.HEADLINE)
    mean = {
        t: np.mean([i.value for i in values(pair[0], "multiple_choice", t, "none", "acc").values()])
        for t in ("recall", "yes_no")
    }
    assert metrics["multiple_choice/recall/none/acc"]["value"] == pytest.approx(mean["recall"])
    assert metrics["multiple_choice"]["value"] == pytest.approx((mean["recall"] + mean["yes_no"]) / 2)
    assert metrics["multiple_choice"]["n"] == 60
    losses = values(pair[0], "perplexity", "stories", "none", "nll").values()
    ppl = np.exp(sum(i.value for i in losses) / sum(i.weight for i in losses))
    assert (
        metrics["perplexity"]["value"] == metrics["perplexity/stories/none/perplexity"]["value"] == pytest.approx(ppl)
    )
    assert "perplexity/stories/none/nll" not in metrics
    assert set(metrics) == {
        *("arithmetic", "multiple_choice", "perplexity", "perplexity/stories/none/perplexity"),
        *(f"arithmetic/arithmetic/{f}/exact_match" for f in ("strict", "flexible")),
        *(f"multiple_choice/{cell}" for cell in ("recall/none/acc", "recall/none/acc_norm", "yes_no/none/acc")),
    }


def test_a_headline_may_use_the_published_name(factory, pair):
    renamed = factory.HEADLINE | {"perplexity": [["stories", "none", "perplexity"]]}
    assert metrics_from_items(pair[0].items, renamed) == metrics_from_items(pair[0].items, factory.HEADLINE)


def test_a_headline_without_items_is_named(factory, pair):
    with pytest.raises(UsageError, match="code/mbpp/none/pass@1"):
        metrics_from_items(pair[0].items, {"code": [["mbpp", "none", "pass@1"]]})


def test_metrics_of_a_task_do_not_depend_on_the_other_tasks(factory, pair):
    alone = items_to_table(i for i in pair[0].items.items() if i.task == "yes_no")
    headline = {"multiple_choice": [["yes_no", "none", "acc"]]}
    name = "multiple_choice/yes_no/none/acc"
    assert metrics_from_items(alone, headline)[name] == metrics_from_items(pair[0].items, factory.HEADLINE)[name]


def test_a_contrast_is_the_paired_bootstrap_of_item_differences(pair):
    contrast = next(x for x in compare(*pair).contrasts if x.task == "yes_no")
    a, b = (values(run, "multiple_choice", "yes_no", "none", "acc") for run in pair)
    order = sorted(a, key=lambda item: (a[item].doc_hash, a[item].prompt_hash))
    d = np.array([a[item].value - b[item].value for item in order])
    oracle = sampled(d, suite="multiple_choice", task="yes_no").interval()
    assert contrast.difference.value == pytest.approx(oracle.value, abs=1e-12)
    assert contrast.difference.low == pytest.approx(oracle.low, abs=1e-12)
    assert contrast.difference.high == pytest.approx(oracle.high, abs=1e-12)
    assert (contrast.a_only, contrast.b_only) == (int((d > 0).sum()), int((d < 0).sum()))


def test_suites_are_macro_means_and_perplexities_have_ratios(pair):
    comparison = compare(*pair)
    choice = comparison.of_suite("multiple_choice")
    tasks = [x for x in comparison.contrasts if x.suite == "multiple_choice" and x.task and x.metric == "acc"]
    assert choice.difference.value == pytest.approx(np.mean([x.difference.value for x in tasks]), abs=1e-12)
    assert choice.a_only == sum(x.a_only for x in tasks)
    assert (choice.difference.n, choice.ratio, choice.lower_is_better) == (60, None, False)
    loss = comparison.of_suite("perplexity")
    assert (loss.a_only, loss.b_only, loss.lower_is_better) == (None, None, True)
    assert loss.ratio.value == pytest.approx(loss.a / loss.b)
    assert loss.difference.value == pytest.approx(loss.a - loss.b)
    assert loss.ratio.low <= loss.ratio.value <= loss.ratio.high
    assert (loss.ratio.low > 1) == (loss.difference.low > 0)


def test_swapping_the_runs_negates_everything(pair):
    for one, other in zip(compare(*pair).contrasts, compare(*reversed(pair)).contrasts, strict=True):
        assert one.difference.value == -other.difference.value
        assert one.difference.low == pytest.approx(-other.difference.high, abs=1e-12)
        assert one.difference.high == pytest.approx(-other.difference.low, abs=1e-12)
        assert (one.p, one.a_only, one.b_only) == (other.p, other.b_only, other.a_only)


def test_a_run_equals_itself_exactly(pair):
    for contrast in compare(pair[0], pair[0]).contrasts:
        d = contrast.difference
        assert (d.value, d.low, d.high, contrast.p) == (0.0, 0.0, 0.0, 1.0)
        assert not contrast.a_only
        assert contrast.ratio is None or (contrast.ratio.low, contrast.ratio.high) == (1.0, 1.0)


def test_the_order_and_the_names_of_rows_change_nothing(factory, make, pair):
    items = list(pair[0].items.items())
    renamed = [
        replace(i, item=f"{i.task}-{999 - int(i.item[-3:])}")
        for i in np.random.default_rng(0).permutation(np.array(items, object))
    ]
    assert compare(make(renamed, mask="a"), pair[1]) == compare(*pair)


def test_another_run_beside_changes_no_contrast(pair):
    alone = compare(*pair, suites=["arithmetic"])
    assert alone.contrasts == tuple(x for x in compare(*pair).contrasts if x.suite == "arithmetic")


def test_a_constant_shift_is_the_difference(factory, make):
    items = factory.make_items(n=20)
    moved = [replace(i, value=i.value + 3) if i.metric != "nll" else i for i in items]
    for contrast in compare(make(moved, mask="a"), make(items, mask="b")).contrasts:
        shift = 0.0 if contrast.lower_is_better else 3.0
        d = contrast.difference
        assert (d.value, d.low, d.high) == pytest.approx((shift, shift, shift), abs=1e-12)
        assert contrast.p == (1.0 if contrast.lower_is_better else 2 / 10_000)


def test_unequal_items_are_refused_by_name(factory, make):
    items = factory.make_items(n=12)
    full = make(items, mask="full")
    fewer = make([i for i in items if not (i.task == "recall" and i.item > "recall-004")], mask="short")
    for runs in ((full, fewer), (fewer, full)):
        with pytest.raises(UsageError) as caught:
            compare(*runs)
        text = str(caught.value)
        assert "short" in text.split(";", 1)[0]
        assert "lacks 7 of the items: recall-005, recall-006, recall-007 …" in text
        assert "multiple_choice/recall/none/acc" in text
        assert "\n" not in text


def test_another_prompt_is_another_item(factory, make):
    items = factory.make_items(n=5)
    changed = [replace(i, prompt_hash=content_hash("5-shot")) if i.item == "yes_no-003" else i for i in items]
    with pytest.raises(UsageError, match="yes_no-003"):
        compare(make(items, mask="a"), make(changed, mask="b"))


def test_repeated_documents_pair_only_with_the_same_repetition(factory, make):
    items = [i for i in factory.make_items(n=4) if i.task in {"recall", "yes_no"}]
    same = {name: content_hash(name) for name in ("x", "y")}

    def renamed(pattern):
        docs = dict(zip(sorted({i.item for i in items if i.task == "yes_no"}), pattern, strict=True))
        return [replace(i, doc_hash=same[docs[i.item]], prompt_hash=1) if i.task == "yes_no" else i for i in items]

    compare(make(renamed("xxyy"), mask="a"), make(renamed("yyxx"), mask="b"))
    with pytest.raises(UsageError, match="repeated in one run only"):
        compare(make(renamed("xxxy"), mask="a"), make(renamed("xyyy"), mask="b"))


@pytest.mark.parametrize(
    "change", [{"version": 2, "content": "c0ffee"}, {"version": 1, "content": "changed"}], ids=["version", "content"]
)
def test_another_suite_version_or_content_is_refused(factory, make, change):
    items = factory.make_items(n=3)
    with pytest.raises(UsageError, match="suite arithmetic differs in content"):
        compare(make(items, mask="a"), make(items, mask="b", suites={"arithmetic": change}))


def test_other_scoring_rules_are_refused(pair):
    pair[1].record["identity"]["engine"] = 2
    with pytest.raises(UsageError, match="engine 1 and 2"):
        compare(*pair)


def test_another_scorer_is_refused_for_its_suites_alone(pair):
    pair[1].record["identity"]["scorer"] = {"gsm8k": "prefix"}
    compare(*pair)
    pair[1].record["identity"]["scorer"] = {"arithmetic": "prefix"}
    with pytest.raises(UsageError, match=r"arithmetic differs in scorer \(batched and prefix\)"):
        compare(*pair)


def test_a_suite_of_one_run_only_is_refused_unless_not_asked_for(factory, make):
    items = factory.make_items(n=3)
    fewer = make([i for i in items if i.suite != "perplexity"], mask="fewer")
    with pytest.raises(UsageError, match=r"fewer .* has no suite perplexity"):
        compare(make(items), fewer)
    assert {x.suite for x in compare(make(items), fewer, suites=["arithmetic"]).contrasts} == {"arithmetic"}
    with pytest.raises(UsageError, match="no suite arithmetik"):
        compare(make(items), fewer, suites=["arithmetik"])


def test_json_and_table_say_the_same(pair):
    comparison = compare(*pair)
    data = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert (data["resamples"], data["seed"], data["level"]) == (10_000, 0, 0.95)
    assert len(data["contrasts"]) == len(comparison.contrasts) == 9
    text = comparison_table(comparison)
    for name in (pair[0].name, pair[1].name):
        assert name in text
    first = data["contrasts"][0]
    assert f"{100 * first['difference']['value']:+.2f}" in text
    assert len(text.splitlines()) == 3 + 2 + 9 + 2
    assert "exploratory, corrected for nothing" in text
