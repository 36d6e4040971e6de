"""Declared contrasts on records, against plain loops over the same stream; and every refusal by name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prunebench.analysis import Report, Shelf, answers, read_declaration
from prunebench.analysis.arms import Selector, UnfoundError
from prunebench.analysis.declared import Question
from prunebench.analysis.mcnemar import mcnemar
from prunebench.analysis.multiplicity import holm
from prunebench.analysis.pairing import MINIMUM_ITEMS
from prunebench.analysis.report import LEGEND, shown_adjusted, shown_p
from prunebench.analysis.scores import Scores
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.record import content_hash, items_to_table, read_run

N, B = 40, 10_000
CHOICE = ("recall", "yes_no")
RANK = {rank: {"operator": {"parameters": {"rank": rank}}} for rank in (4, 8)}
ARMS = {
    "dense": {"dense": True},
    "constant-A": {"operator": "constant", "scale": None, "resolved_scale": None},
    "constant-B": {"operator": "constant", "scale": None, "resolved_scale": None, "fit_draw": "B"},
    "constant-C": {"operator": "constant", "scale": None, "resolved_scale": None, "fit_draw": "C"},
    "trained": {},
    "other": {"scale": "other", "resolved_scale": "renorm"},
    "sge-constant": {"mask": "sge", "operator": "constant", "scale": None, "resolved_scale": None},
    "sge-trained": {"mask": "sge"},
    "tilt4": {"operator": "tilt", "scale": None, "resolved_scale": None, "identity": RANK[4]},
    "tilt8": {"operator": "tilt", "scale": None, "resolved_scale": None, "identity": RANK[8]},
}
ARM = {"model": "tiny-olmoe", "mask": "reap", "ratio": "0.5", "draw": "A"}


def skill(name):
    return 0.9 if name == "dense" else 0.35 + 0.05 * list(ARMS).index(name)


@pytest.fixture(scope="module")
def records(factory, tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    for seed, (name, arm) in enumerate(ARMS.items()):
        factory.write(folder / "m" / name, factory.make_items(seed=seed, n=N, skill=skill(name)), **arm)
    return folder


@pytest.fixture(scope="module")
def shelf(records):
    return Shelf.of(records)


def ask(a, b, suite="multiple_choice", *, label=None, family="f", **more):
    terms = ((1.0, a), (-1.0, b))
    return Question(label or f"{a} - {b}", suite, terms, family, **more)


def run(name):
    return Selector(run=f"m/{name}")


def pick(**fields):
    return Selector(**ARM | fields)


def drawn(suite, task, n):
    """Indices of every resample, from the documented stream."""
    key = hashlib.blake2b(f"0\0{suite}\0{task}".encode(), digest_size=16).digest()
    raw = np.random.PCG64(int.from_bytes(key, "big")).random_raw((B * n + 1) // 2).astype("<u8").view("<u4")
    return ((raw[: B * n].astype(np.uint64) * np.uint64(n)) >> np.uint64(32)).reshape(B, n).astype(int)


def outcomes(records, name, suite, task, metric):
    items = [
        i for i in read_run(records / "m" / name).items.items() if (i.suite, i.task, i.metric) == (suite, task, metric)
    ]
    items = [i for i in items if i.filter in {"none", "strict"}]
    return sorted(items, key=lambda item: item.doc_hash)


def by_hand(records, weights, suite="multiple_choice"):
    """Value and draws of a weighted sum of runs: macro means of choice tasks in points, or ln perplexity."""
    value, draws = 0.0, np.zeros(B)
    for name, weight in weights.items():
        if suite == "perplexity":
            own = outcomes(records, name, suite, "stories", "nll")
            loss, tokens = (np.array([getattr(i, field) for i in own]) for field in ("value", "weight"))
            index = drawn(suite, "stories", N)
            value += weight * loss.sum() / tokens.sum()
            draws += weight * loss[index].sum(1) / tokens[index].sum(1)
            continue
        for task in CHOICE:
            values = np.array([i.value for i in outcomes(records, name, suite, task, "acc")])
            value += weight * 100 * values.mean() / len(CHOICE)
            draws += weight * 100 * values[drawn(suite, task, N)].mean(1) / len(CHOICE)
    return value, draws


def check(answer, value, draws):
    draws = np.where(np.abs(draws) < 1e-12, 0, draws)
    low, high, low90, high90 = np.percentile(draws, [2.5, 97.5, 5, 95])
    assert answer.difference.value == pytest.approx(value, abs=1e-9)
    assert (answer.difference.low, answer.difference.high) == pytest.approx((low, high), abs=1e-9)
    assert answer.interval90 == pytest.approx((low90, high90), abs=1e-9)
    assert answer.bound == pytest.approx(max(abs(low90), abs(high90)), abs=1e-9)
    assert answer.detectable == pytest.approx((1.959964 + 0.841621) * draws.std(ddof=1), rel=1e-5)
    smaller = min((draws <= 0).sum(), (draws >= 0).sum())
    assert answer.p == pytest.approx(min(1, 2 * max(smaller, 1) / B), abs=4 / B)


@pytest.mark.parametrize("suite", ["multiple_choice", "perplexity"])
def test_a_difference_is_that_of_a_plain_loop(records, shelf, suite):
    (answer,), gaps = answers(shelf, [ask(pick(operator="reroute@trained"), pick(operator="constant"), suite)])
    assert gaps == ()
    check(answer, *by_hand(records, {"trained": 1, "constant-A": -1}, suite))
    assert answer.lower_is_better == (suite == "perplexity")


def test_interactions_and_means_over_masks_are_taken_on_the_same_draws(records, shelf):
    interaction = Question(
        "interaction",
        "multiple_choice",
        ((1.0, run("trained")), (-1.0, run("constant-A")), (-1.0, run("sge-trained")), (1.0, run("sge-constant"))),
        "f",
    )
    mean = Question(
        "mean",
        "multiple_choice",
        ((0.5, run("trained")), (0.5, run("sge-trained")), (-0.5, run("constant-A")), (-0.5, run("sge-constant"))),
        "f",
    )
    one, other = answers(shelf, [interaction, mean])[0]
    check(one, *by_hand(records, {"trained": 1, "constant-A": -1, "sge-trained": -1, "sge-constant": 1}))
    check(other, *by_hand(records, {"trained": 0.5, "sge-trained": 0.5, "constant-A": -0.5, "sge-constant": -0.5}))
    assert one.discordant is other.discordant is one.mcnemar is None


def test_some_tasks_of_a_suite(records, shelf):
    (answer,), _ = answers(shelf, [ask(run("trained"), run("other"), tasks=("yes_no",))])
    a, b = (
        np.array([i.value for i in outcomes(records, name, "multiple_choice", "yes_no", "acc")])
        for name in ("trained", "other")
    )
    assert answer.difference.value == pytest.approx(100 * (a - b).mean())
    assert answer.discordant == (int((a > b).sum()), int((a < b).sum()))
    assert answer.mcnemar == mcnemar(*answer.discordant)
    with pytest.raises(UsageError, match="no task riddles"):
        answers(shelf, [ask(run("trained"), run("other"), tasks=("riddles",))])


def test_discordant_counts_of_a_suite_are_added_and_not_tested(records, shelf):
    (answer,), _ = answers(shelf, [ask(run("trained"), run("other"))])
    counts = [0, 0]
    for task in CHOICE:
        pairs = zip(*(outcomes(records, n, "multiple_choice", task, "acc") for n in ("trained", "other")), strict=True)
        for a, b in pairs:
            counts[0] += a.value > b.value
            counts[1] += a.value < b.value
    assert answer.discordant == tuple(counts)
    assert answer.mcnemar is None


def test_holm_is_over_the_declared_only(shelf):
    names = ["constant-A", "other", "sge-trained", "sge-constant", "tilt4"]
    questions = [
        ask(run("dense"), run(name), family="ab"[at % 2], exploratory=at == 4, label=name)
        if at < 4
        else ask(run("dense"), run(name), family="x", exploratory=True, label=name)
        for at, name in enumerate(names)
    ]
    found = answers(shelf, questions)[0]
    p = [one.p for one in found[:4]]
    assert [one.holm_all for one in found[:4]] == holm(p).tolist()
    assert [found[0].holm_family, found[2].holm_family] == holm(p[::2]).tolist()
    assert [found[1].holm_family, found[3].holm_family] == holm(p[1::2]).tolist()
    last = found[4]
    assert (last.holm_family, last.holm_all, last.verdict) == (None, None, None)
    assert last.mark == ("*" if last.p < 0.05 else "")


def test_established_is_one_sign_on_every_draw_that_was_asked_for(shelf):
    def replicate(draw):
        return ((1.0, run("trained")), (-1.0, pick(operator="constant", fit_draw=draw)))

    question = ask(run("trained"), pick(operator="constant"), replicates=(replicate("B"), replicate("C")))
    (answer,), _ = answers(shelf, [question])
    own = [answer.difference.value, *answer.replicates]
    assert len(own) == 3
    assert answer.established == (min(own) > 0 or max(own) < 0)
    lacking = replace(question, replicates=(replicate("B"), replicate("D")))
    (answer,), _ = answers(shelf, [lacking])
    assert (len(answer.replicates), len(answer.missing), answer.established) == (1, 1, None)
    assert "no run of" in answer.missing[0]
    (answer,), _ = answers(shelf, [replace(question, replicates=())])
    assert answer.established is None


def test_an_arm_that_is_missing_or_there_twice_is_a_gap_and_counts_for_nothing(shelf):
    missing = ask(pick(operator="mora"), run("trained"), label="missing")
    twice = ask(pick(operator="tilt"), run("trained"), label="twice")
    no_suite = ask(run("trained"), run("other"), "code", label="suite")
    found, gaps = answers(shelf, [missing, ask(run("trained"), run("other")), twice, no_suite])
    assert len(found) == 1
    assert found[0].holm_all == found[0].p
    assert [gap.question.label for gap in gaps] == ["missing", "twice", "suite"]
    assert gaps[0].reason == "no run of tiny-olmoe, reap A, ratio 0.5, mora"
    assert gaps[1].reason.startswith("2 runs of tiny-olmoe, reap A, ratio 0.5, tilt, which differ in operator")
    assert gaps[2].reason == "no code in m/trained"


def test_arms_are_found_by_what_their_records_say(shelf):
    cases = {
        "trained": pick(operator="reroute@trained"),
        "other": pick(operator="reroute@other"),
        "constant-A": pick(operator="constant"),
        "constant-C": pick(operator="constant", fit_draw="C"),
        "sge-trained": pick(mask="sge", operator="reroute@trained"),
        "tilt8": pick(operator="tilt", parameters=(("rank", 8),)),
        "dense": Selector(model="tiny-olmoe", dense=True),
    }
    for name, selector in cases.items():
        assert shelf.find(selector).folder == f"m/{name}"
    for wrong in (pick(operator="reroute"), pick(operator="tilt", parameters=(("rank", 5),)), pick(ratio="0.25")):
        with pytest.raises(UnfoundError):
            shelf.find(wrong)


def test_every_run_is_read_once_and_scored_once(shelf, monkeypatch):
    read, seen = shelf.outcomes, []
    monkeypatch.setattr(shelf, "outcomes", lambda found: seen.append(found.folder) or read(found))
    questions = [
        ask(run(a), run(b), suite) for suite in ("multiple_choice", "perplexity") for a in ARMS for b in ARMS if a < b
    ]
    assert len(answers(shelf, questions, resamples=100)[0]) == 90
    assert sorted(seen) == sorted(f"m/{name}" for name in ARMS)


def test_runs_on_other_items_are_scored_apart(factory, tmp_path):
    """A suite may hold runs that are never subtracted from one another; each is scored on its own items."""
    for seed, n in ((1, 40), (2, 40), (3, 55)):
        items = factory.make_items(seed=seed, n=n)
        factory.write(tmp_path / f"r{seed}", items, identity={"seed": seed})
    shelf = Shelf.of(tmp_path)
    scores = Scores(shelf, {"arithmetic": shelf.runs}, resamples=200)
    for found in shelf.runs:
        own = read_run(tmp_path / found.folder)
        rows = own.items.rows("arithmetic", "arithmetic", "strict", "exact_match")
        assert scores.score(found, "arithmetic").value == pytest.approx(100 * rows.value.mean())
        assert scores.score(found, "arithmetic").n == len(rows)


# --- refusals


@pytest.fixture
def refused(factory, tmp_path):
    """Two runs, the second with something else about it; the contrast must be refused in one line that names it."""

    def run_with(items=None, **changes):
        own = factory.make_items(seed=1, n=N)
        factory.write(tmp_path / "one", own)
        other = items(own) if items else own
        factory.write(tmp_path / "two", other, **{"identity": {"seed": 1}} | changes)
        with pytest.raises(UsageError) as caught:
            answers(Shelf.of(tmp_path), [ask(Selector(run="one"), Selector(run="two"))], resamples=100)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return run_with


def test_unequal_item_sets(refused):
    line = refused(lambda items: [i for i in items if i.item not in {"recall-003", "recall-004"}])
    assert "two (" in line.split(";", 1)[0]
    assert "lacks 2 of the items: recall-003, recall-004" in line
    assert "multiple_choice/recall/none/acc" in line


def test_a_duplicate_item(refused, factory):
    def repeated(items):
        extra = [replace(i, item=f"{i.item}-again") for i in items if i.item == "recall-003"]
        return items + extra

    assert "repeated in one run only" in refused(repeated)
    item = factory.make_items(n=1)[0]
    with pytest.raises(UsageError, match="two outcomes for one item"):
        items_to_table([item, item])


def test_another_version_of_a_task(refused):
    line = refused(suites={"multiple_choice": {"version": 2, "content": "c0ffee"}})
    assert "suite multiple_choice differs in content" in line


def test_other_prompts(refused):
    def asked_otherwise(items):
        return [replace(i, prompt_hash=content_hash(f"5-shot {i.item}")) if i.task == "recall" else i for i in items]

    line = refused(asked_otherwise)
    assert f"asked {N} items under other prompts: recall-000, recall-001, recall-002 …" in line
    assert "fix: evaluate both with the same task files and examples" in line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "bfloat16"),
        ("device", "cuda"),
        ("experts_implementation", "grouped_mm"),
        ("batch_tokens", 512),
    ],
)
def test_other_kernels_and_dtypes(refused, field, value):
    assert f"executed with different {field}" in refused(identity={field: value})


def test_other_scoring_rules(refused):
    assert "scored by different rules (engine 1 and 2)" in refused(identity={"engine": 2})


def test_other_numbers_of_tokens(factory, tmp_path):
    own = factory.make_items(seed=1, n=N)
    factory.write(tmp_path / "one", own)
    factory.write(
        tmp_path / "two", [replace(i, weight=i.weight + (i.metric == "nll")) for i in own], identity={"seed": 1}
    )
    with pytest.raises(UsageError, match="scored other numbers of tokens"):
        answers(Shelf.of(tmp_path), [ask(Selector(run="one"), Selector(run="two"), "perplexity")], resamples=100)


def test_other_clusters(refused):
    def grouped(items):
        return [replace(i, detail=json.dumps({"cluster": i.item[-1]})) for i in items]

    assert "items are grouped otherwise" in refused(grouped)


def test_too_few_items_are_no_ground_for_a_claim(factory, tmp_path):
    for seed, name in enumerate(("one", "two")):
        factory.write(tmp_path / name, factory.make_items(seed=seed, n=MINIMUM_ITEMS - 1), identity={"seed": seed})
    question = ask(Selector(run="one"), Selector(run="two"), label="tiny")
    with pytest.raises(UsageError, match=rf"too few items for a claim: {MINIMUM_ITEMS - 1} items.* f: tiny"):
        answers(Shelf.of(tmp_path), [question], resamples=100)
    assert answers(Shelf.of(tmp_path), [replace(question, exploratory=True)], resamples=100)[0]


def test_few_clusters_are_few_items(factory, tmp_path):
    for seed, name in enumerate(("one", "two")):
        items = [
            replace(i, detail=json.dumps({"cluster": int(i.item[-3:]) // 4}))
            for i in factory.make_items(seed=seed, n=80)
        ]
        factory.write(tmp_path / name, items, identity={"seed": seed})
    with pytest.raises(UsageError, match="20 items, fewer than 30"):
        answers(Shelf.of(tmp_path), [ask(Selector(run="one"), Selector(run="two"))], resamples=100)


def test_the_shelf_leaves_out_what_is_no_evidence(factory, tmp_path):
    own = factory.make_items(seed=1, n=5)
    factory.write(tmp_path / "good", own)
    factory.write(tmp_path / "limited", own, limit=5)
    factory.write(tmp_path / "same", own)
    failed = [{"check": "stored values", "status": "fail", "detail": ""}]
    factory.write(tmp_path / "failed", own, integrity=failed, identity={"seed": 2})
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "record.json").write_text("{}")
    shelf = Shelf.of(tmp_path)
    assert [found.folder for found in shelf.runs] == ["good"]
    reasons = {str(one.path): one.reason for one in shelf.left_out}
    assert reasons["limited"] == "partial: made with a limit of 5 items"
    assert reasons["same"] == "the same run as good"
    assert reasons["failed"] == "failed: stored values"
    assert "half-written" in reasons["half"]
    with pytest.raises(UsageError, match="no such folder"):
        Shelf.of(tmp_path / "nowhere")
    with pytest.raises(PrerequisiteError, match="no complete run to compare"):
        Shelf.of(tmp_path / "limited")


# --- what is shown


def test_the_report_says_the_same_as_text_and_json(shelf, tmp_path):
    file = tmp_path / "f.toml"
    file.write_text(
        'name = "demo"\ndate = 2026-11-30\n[[family]]\nname = "f"\nsuite = "multiple_choice"\nlabel = "t - o"\n'
        'a = "m/trained"\nb = "m/other"\n[[family]]\nname = "g"\nsuite = "perplexity"\nlabel = "t - c"\n'
        'exploratory = true\na = "m/trained"\nb = "m/constant-A"\n[[family]]\nname = "g2"\nsuite = "perplexity"\n'
        'label = "none"\na = "m/nowhere"\nb = "m/other"\n'
    )
    declaration = read_declaration(file)
    found, gaps = answers(shelf, declaration.questions)
    report = Report(declaration, found, gaps)
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    text = report.text()
    assert data["declaration"] == {"name": "demo", "date": "2026-11-30", "sha256": declaration.sha256, "note": ""}
    assert f"families: demo, 2026-11-30, sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}" in text
    assert [one["status"] for one in data["contrasts"]] == ["declared", "exploratory"]
    assert data["not_measured"] == [{"family": "g2", "label": "none", "reason": "no run of m/nowhere"}]
    one, other = data["contrasts"]
    line = next(line for line in text.splitlines() if " t - o " in line)
    d = one["difference"]
    assert f"{d['value']:+.2f} [{d['low']:+.2f}, {d['high']:+.2f}]{one['mark']}" in line
    for shown in (
        shown_p(one["p"]),
        shown_adjusted(one["holm_family"]),
        shown_adjusted(one["holm_all"]),
        one["verdict"],
    ):
        assert shown in line
    assert "exploratory" in next(line for line in text.splitlines() if " t - c " in line)
    assert (other["holm_family"], other["holm_all"], other["verdict"]) == (None, None, None)
    assert "1 declared contrasts" in text
    assert "1 exploratory, 1 not measured" in text
    assert LEGEND in text


def test_no_record_is_written_or_changed(records, shelf):
    before = {path: path.stat().st_mtime_ns for path in Path(records).rglob("*")}
    answers(shelf, [ask(run("trained"), run("other"))], resamples=100)
    assert {path: path.stat().st_mtime_ns for path in Path(records).rglob("*")} == before
