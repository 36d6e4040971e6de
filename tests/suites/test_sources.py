"""Where the data of the public suites come from, their identity, and their rows on scripted answers."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import math
import re
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prunebench.analysis import metrics_from_items
from prunebench.analysis.recompute import recompute
from prunebench.errors import IntegrityError, PrerequisiteError, UsageError
from prunebench.evaluate import Evaluation, Generation, PassageScore, Sampling, Score
from prunebench.evaluate.sources import splits_of
from prunebench.evaluate.tasks import ask
from prunebench.items import items_to_table
from prunebench.loader import load_suite
from prunebench.record import Run
from prunebench.suite import suite_content

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("_rows_by_hand", ROOT / "tests/evaluate/handwritten.py")
handwritten = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(handwritten)
PUBLIC = ("nine_tasks", "nine_tasks_5shot", "hellaswag", "gsm8k", "wikitext", "held_out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return handwritten.write(tmp_path_factory.mktemp("data"))


@dataclasses.dataclass(frozen=True, eq=False)
class Scripted(Evaluation):
    """Answers by a function of the request, without a model."""

    answer: Any = None

    def loglikelihood(self, pairs):
        return [self.answer(pair) for pair in pairs]

    rolling = generate = loglikelihood


def scripted(answer, **more):
    return Scripted(torch.nn.Identity().eval(), None, answer=answer, **more)


def as_run(suite, items):
    """Enough of a run to decide its items again."""
    table, headline = items_to_table(items), {suite.name: [list(cell) for cell in suite.cells]}
    record = {"metrics": metrics_from_items(table, headline), "headline": headline, "run_id": "0" * 16}
    return Run(record, table, Path("scripted"))


# --- sources


@pytest.mark.parametrize("name", [*PUBLIC, "humaneval", "mbpp"])
def test_every_task_names_a_data_set_by_a_full_revision(name):
    suite = load_suite(name)
    for task in suite.tasks:
        config = suite.task_file(task).config
        assert "/" in config["dataset_path"]
        assert re.fullmatch("[0-9a-f]{40}", config["dataset_kwargs"]["revision"])
        assert config["task"] == task


@pytest.mark.parametrize("name", PUBLIC)
def test_a_folder_the_data_folder_and_the_hub_give_one_identity(name, folder, monkeypatch):
    import datasets

    asked = []

    def load_dataset(path, config, *, split, revision):
        asked.append((path, config, split, revision))
        task = next(t for t in suite.tasks if suite.task_file(t).config["dataset_path"] == path and t not in done)
        own = suite.task_file(task).config
        assert (own.get("dataset_name"), own["dataset_kwargs"]["revision"]) == (config, revision)
        if split == [*splits_of(own, suite.shots_of(own))][-1]:
            done.add(task)
        if task in {"wikitext", "held_out"}:
            text = (folder / f"{own['metadata']['data']}.txt").read_text()
            return [{"text": f"{line}\n"} for line in text.split("\n")]
        # The hub's rows have more columns, and MMLU's are sorted by subject.
        rows = [{"idx": n, **row} for n, row in enumerate(handwritten.rows(task)[split])]
        return sorted(rows, key=lambda row: row["subject"]) if task == "mmlu" else rows

    suite, done = load_suite(f"{name}={folder}"), set()
    by_folder = suite_content(suite)
    monkeypatch.setenv("PRUNEBENCH_DATA", str(folder))
    assert suite_content(load_suite(name)) == by_folder
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    suite = load_suite(f"{name}=hub:")
    if name not in {"wikitext", "held_out"}:  # their lines end in line ends there, and texts in none
        assert suite_content(suite) == by_folder
    else:
        assert suite.documents(suite.tasks[0])
    assert asked


def test_a_rule_for_bos_is_part_of_the_content_but_for_the_tiny_worlds(folder, monkeypatch):
    public, tiny = load_suite(f"hellaswag={folder}"), load_suite("multiple_choice")
    assert (public.bos, tiny.bos) == ("tokenizer", "always")
    contents = suite_content(public), suite_content(tiny)
    monkeypatch.setattr(type(public), "bos", "always")
    monkeypatch.setattr(type(tiny), "bos", "tokenizer")
    assert suite_content(public) != contents[0]
    assert suite_content(tiny) != contents[1]


def test_without_any_source_the_hub_is_asked_and_offline_that_is_one_clear_line(monkeypatch):
    monkeypatch.delenv("PRUNEBENCH_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PrerequisiteError, match=r"hub:openai/gsm8k@cc7b047b.*PRUNEBENCH_DATA"):
        load_suite("gsm8k").documents("gsm8k")


def test_one_file_serves_a_suite_of_one_task_and_its_examples_stand_beside_it(folder, tmp_path):
    own = tmp_path / "mine.jsonl.gz"
    own.write_bytes(gzip.compress((folder / "gsm8k.jsonl").read_bytes()))
    with pytest.raises(PrerequisiteError, match="mine-train"):
        load_suite(f"gsm8k={own}").documents("gsm8k")
    (tmp_path / "mine-train.jsonl").write_bytes((folder / "gsm8k-train.jsonl").read_bytes())
    suite = load_suite(f"gsm8k={own}")
    assert suite_content(suite) == suite_content(load_suite(f"gsm8k={folder}"))
    with pytest.raises(UsageError, match="9 tasks"):
        load_suite(f"nine_tasks={own}").documents("boolq")


def test_a_missing_split_and_a_wrong_row_are_one_clear_line(folder, tmp_path):
    (tmp_path / "gsm8k.jsonl").write_bytes((folder / "gsm8k.jsonl").read_bytes())
    with pytest.raises(PrerequisiteError, match="split train of gsm8k"):
        load_suite(f"gsm8k={tmp_path}").documents("gsm8k")
    (tmp_path / "gsm8k-train.jsonl").write_text('{"question": "q"}\n')
    with pytest.raises(UsageError, match="answer"):
        load_suite(f"gsm8k={tmp_path}").documents("gsm8k")
    (tmp_path / "mmlu.json").write_text('{"anatomy": {"test": []}}')
    with pytest.raises(UsageError, match="no rows"):
        load_suite(f"nine_tasks={tmp_path}").documents("mmlu")


def test_a_source_that_is_not_there_is_told_as_such(tmp_path):
    for source in (tmp_path / "nowhere", "evalplus:humaneval"):
        with pytest.raises(PrerequisiteError, match=f"no such file or folder; in --suite gsm8k={source}"):
            load_suite(f"gsm8k={source}").documents("gsm8k")


@pytest.mark.parametrize("name", ["gsm8k", "fidelity", "humaneval", "wikitext"])
def test_an_empty_source_is_not_the_folder_that_one_stands_in(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    for source in ("", " "):
        with pytest.raises(UsageError, match=rf"given no source; in --suite {name}=; .*give --suite {name} "):
            load_suite(f"{name}={source}")
    if name in {"gsm8k", "wikitext"}:
        for hub in ("hub:@", "hub:@main"):
            with pytest.raises(UsageError, match=f"no data set is named; in {hub}"):
                load_suite(f"{name}={hub}").documents(name)


def test_files_as_other_systems_write_them_are_the_same_data(folder, tmp_path):
    plain = {name: (folder / name).read_bytes() for name in ("gsm8k.jsonl", "gsm8k-train.jsonl", "wikitext2-test.txt")}
    changes = {
        "bom": lambda text: b"\xef\xbb\xbf" + text,
        "crlf": lambda text: text.replace(b"\n", b"\r\n"),
        "both": lambda text: b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"),
    }
    for change, changed in changes.items():
        (tmp_path / change).mkdir()
        for name, text in plain.items():
            (tmp_path / change / name).write_bytes(changed(text))
        for name in ("gsm8k", "wikitext"):
            assert suite_content(load_suite(f"{name}={tmp_path / change}")) == suite_content(
                load_suite(f"{name}={folder}")
            ), (name, change)
    (tmp_path / "bom" / "gsm8k.jsonl").write_bytes(plain["gsm8k.jsonl"] + b"\r\n  \n")
    assert len(load_suite(f"gsm8k={tmp_path / 'bom'}").documents("gsm8k")["test"]) == handwritten.ASKED
    (tmp_path / "bom" / "gsm8k.jsonl").write_bytes(plain["gsm8k.jsonl"] + b'{"question": \n')
    with pytest.raises(UsageError, match=rf"no JSON; in .*gsm8k.jsonl, line {handwritten.ASKED + 1};"):
        load_suite(f"gsm8k={tmp_path / 'bom'}").documents("gsm8k")


ENDINGS = {"ctx_a": "A", "ctx_b": "b", "activity_label": "c", "endings": ["d", "e"], "label": "1"}
COPA = {"premise": "It fell.", "choice1": "A b.", "choice2": "C d.", "question": "cause", "label": 0}
PROBLEM = {"question": "One?", "answer": "#### 1"}


@pytest.mark.parametrize(
    ("suite", "task", "row", "says"),
    [
        ("gsm8k", "gsm8k", {**PROBLEM, "question": None}, "question is null.*behind 1 good rows"),
        ("wikitext", "wikitext", {"text": 1}, "no attribute 'removesuffix'"),
        ("wikitext", "wikitext", {"lines": ""}, "KeyError: 'text'"),
        ("held_out", "held_out", {"text": None}, "no attribute 'removesuffix'"),
        ("held_out", "held_out", {"page": ""}, "KeyError: 'text'"),
        ("hellaswag", "hellaswag", {**ENDINGS, "endings": "de"}, "endings are no list"),
        ("hellaswag", "hellaswag", {**ENDINGS, "ctx_a": 3}, "ctx_a is no text"),
        ("nine_tasks", "copa", {**COPA, "label": "x"}, "label is 'x', expected a whole number"),
    ],
)
def test_rows_that_are_not_of_a_data_set_are_refused_before_anything_is_asked(tmp_path, suite, task, row, says):
    good = {"gsm8k": PROBLEM, "hellaswag": ENDINGS, "copa": COPA}.get(task, {"text": "= T = \n"})
    file = tmp_path / "copa.jsonl" if task == "copa" else tmp_path / "data.jsonl"
    file.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n", encoding="utf-8")
    (tmp_path / "data-train.jsonl").write_text(json.dumps(good), encoding="utf-8")
    with pytest.raises(UsageError, match=says):
        load_suite(f"{suite}={tmp_path if task == 'copa' else file}").documents(task)


@pytest.mark.parametrize(
    ("task", "row", "says"),
    [
        ("hellaswag", {**ENDINGS, "label": -1}, "hellaswag, document 1; .*a split with labels"),
        ("hellaswag", {**ENDINGS, "label": 2}, "choice 2 of 2 is the right one; in hellaswag, document 1"),
        ("hellaswag", {**ENDINGS, "endings": ["d"], "label": 0}, "choice 0 of 1"),
        ("copa", {**COPA, "question": "why"}, "no attribute 'why'.*in copa, document 1"),
        ("copa", {**COPA, "choice1": ""}, "no element 0.*in copa, document 1"),
        ("copa", {**COPA, "premise": "a\ud800"}, "UnicodeEncodeError.*suite nine_tasks, task copa"),
        ("gsm8k", PROBLEM, "Sample larger than population.*in gsm8k, document 0"),
    ],
)
def test_documents_that_cannot_be_asked_are_named_in_one_line(tmp_path, task, row, says):
    good = {"hellaswag": ENDINGS, "copa": COPA, "gsm8k": PROBLEM}[task]
    (tmp_path / f"{task}.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n", encoding="utf-8")
    (tmp_path / f"{task}-train.jsonl").write_text(json.dumps(good), encoding="utf-8")
    suite = load_suite(f"{'nine_tasks' if task == 'copa' else task}={tmp_path}")
    evaluation = SimpleNamespace(limit=None, shard=(0, 1), chat=None, sampling=None)
    with pytest.raises(UsageError, match=says) as caught:
        ask(evaluation, suite, task)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("task", "field", "changed", "expected"),
    [
        ("gsm8k", "question", lambda text: {"text": text}, "a text"),
        ("gsm8k", "answer", lambda text: [text], "a text"),
        ("gsm8k", "answer", lambda _: 18, "a text"),
        ("arc_easy", "question", lambda text: [text], "a text"),
        ("arc_easy", "choices", lambda choices: choices["text"], "text and label"),
        ("arc_easy", "choices", lambda choices: {**choices, "text": choices["text"][:3]}, "text and label"),
        ("boolq", "label", bool, "a whole number"),
        ("mmlu", "choices", "".join, "a list of texts"),
        ("mmlu", "choices", lambda _: [1, 2, 3, 4], "a list of texts"),
        ("mmlu", "answer", "ABCD".__getitem__, "a whole number"),
        ("winogrande", "option1", lambda text: [text], "a text"),
    ],
    ids=range(11),
)
def test_a_field_of_another_kind_is_refused_and_never_printed_into_a_prompt(tmp_path, task, field, changed, expected):
    """A template makes a text of anything: a list would stand in the prompt with its brackets."""
    (asked, rows), (pool, examples) = handwritten.rows(task).items()
    handwritten.write(tmp_path)
    wrong = [*rows[:-1], {**rows[-1], field: changed(rows[-1][field])}]
    if task == "mmlu":
        groups = {
            row["subject"]: {asked: wrong, pool: [one for one in examples if one["subject"] == row["subject"]]}
            for row in rows
        }
        (tmp_path / "mmlu.json").write_text(json.dumps(groups))
    else:
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong))
    suite = load_suite(f"{'gsm8k' if task == 'gsm8k' else 'nine_tasks'}={tmp_path}")
    with pytest.raises(
        UsageError, match=rf"{field} is .*expected {expected}.*behind {len(wrong) - 1} good rows"
    ) as caught:
        suite.documents(task)
    assert "\n" not in str(caught.value)


def test_a_problem_whose_answer_holds_no_number_is_refused(tmp_path):
    for answer in ("", "many"):
        (tmp_path / "gsm8k.jsonl").write_text(json.dumps({**PROBLEM, "answer": answer}))
        (tmp_path / "gsm8k-train.jsonl").write_text(json.dumps(PROBLEM))
        with pytest.raises(UsageError, match="the answer holds no number"):
            load_suite(f"gsm8k={tmp_path}").documents("gsm8k")


def test_a_changed_file_is_read_anew_and_is_another_identity(folder, tmp_path):
    for name in ("gsm8k", "gsm8k-train"):
        (tmp_path / f"{name}.jsonl").write_bytes((folder / f"{name}.jsonl").read_bytes())
    suite = load_suite(f"gsm8k={tmp_path}")
    before = suite_content(suite)
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "One?", "answer": "#### 1"}\n')
    assert suite_content(suite) != before
    assert [doc["id"] for doc in suite.documents("gsm8k")["test"]] == ["0"]


def test_zero_shot_tasks_need_no_split_of_examples(folder, tmp_path):
    for task in handwritten.NINE:
        file = next(folder.glob(f"{task}.json*"))
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert suite_content(load_suite(f"nine_tasks={tmp_path}")) == suite_content(load_suite(f"nine_tasks={folder}"))
    with pytest.raises(PrerequisiteError, match="split train"):
        suite_content(load_suite(f"nine_tasks_5shot={tmp_path}"))


# --- choices


def test_metrics_means_and_rows_of_the_nine_tasks(folder):
    """Log-likelihoods by the length of a continuation, so that acc and acc_norm differ."""

    def answer(pair):
        return Score(-1.0 - 0.01 * len(pair.continuation) - (len(pair.context) % 7) / 10, False, 2)

    suites = [load_suite(f"{name}={folder}") for name in ("nine_tasks", "hellaswag")]
    items = [item for suite in suites for item in suite.run(scripted(answer))]
    headline = {suite.name: [list(cell) for cell in suite.headline] for suite in suites}
    numbers = metrics_from_items(items_to_table(items), headline)
    values = {}
    for item in items:
        detail = json.loads(item.detail)
        scores = detail["loglikelihoods"]
        if item.metric == "acc_norm":
            scores = [score / size for score, size in zip(scores, detail["characters"], strict=True)]
        assert detail["prediction"] == scores.index(max(scores))
        assert item.value == float(detail["prediction"] == detail["gold"])
        assert item.state == ("ok" if item.value else "wrong")
        assert len({len(detail[key]) for key in ("loglikelihoods", "greedy", "characters", "bytes", "tokens")}) == 1
        assert re.fullmatch("[0-9a-f]{16}", detail["target_hash"])
        assert ("tie" in detail) == (
            len(set(detail["loglikelihoods"])) < len(detail["loglikelihoods"])
            and detail["loglikelihoods"].count(max(detail["loglikelihoods"])) > 1
        )
        values.setdefault((item.task, item.metric), []).append(item.value)
    # 2610.41366 §3: acc_norm for ARC, OBQA and PIQA; HellaSwag's is lm-eval's acc_norm too.
    normalized = {"arc_challenge", "arc_easy", "openbookqa", "piqa", "hellaswag"}
    assert {task for task, metric in values if metric == "acc_norm"} == normalized

    def mean(tasks):
        per_task = [values[task, "acc_norm" if task in normalized else "acc"] for task in tasks]
        return sum(sum(own) / len(own) for own in per_task) / len(per_task)

    assert numbers["nine_tasks"]["value"] == pytest.approx(mean(handwritten.NINE))
    big_5 = ("arc_easy", "arc_challenge", "boolq", "piqa", "winogrande")
    assert numbers["nine_tasks/big5/acc"]["value"] == pytest.approx(mean(big_5))
    assert numbers["mora9/acc"]["value"] == pytest.approx(mean({*handwritten.NINE, "hellaswag"} - {"copa"}))
    alone = [item for item in items if item.suite == "nine_tasks"]
    without = metrics_from_items(items_to_table(alone), {"nine_tasks": headline["nine_tasks"]})
    assert "mora9/acc" not in without
    assert "nine_tasks/big5/acc" in without


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_choice_without_a_number_makes_the_item_invalid_and_is_never_a_choice(folder, bad):
    suite = load_suite(f"hellaswag={folder}")
    gold = [doc["label"] for doc in suite.documents("hellaswag")["validation"]]
    count = iter(range(1000))

    def answer(_pair):
        number = next(count)
        return Score(bad if number == 4 * 1 + 2 else -1.0 - (number % 4 != gold[number // 4]), False, 2)

    items = suite.run(scripted(answer))
    for item in items:
        assert item.state == ("invalid" if item.item == "1" else "ok")
        assert item.value == float(item.item != "1")
    invalid = json.loads(next(item.detail for item in items if item.item == "1"))
    assert invalid["prediction"] is None
    assert invalid["loglikelihoods"][2] is None
    assert recompute(as_run(suite, items)).agrees


# --- GSM8K

CASES = [
    # text, finish, gold, strict-match, flexible-extract, numeric
    ("So $29.00.\n#### $29.00", "eos", "29", ("unparsed", 0), ("wrong", 0), ("ok", 1)),
    ("#### 29.", "eos", "29", ("ok", 1), ("ok", 1), ("ok", 1)),
    ("#### 1,234", "eos", "1234", ("ok", 1), ("ok", 1), ("ok", 1)),
    ("#### -3", "eos", "-3", ("ok", 1), ("ok", 1), ("ok", 1)),
    ("#### +3", "eos", "3", ("unparsed", 0), ("ok", 1), ("ok", 1)),
    ("The total is 72 clips, altogether.", "eos", "72", ("unparsed", 0), ("ok", 1), ("ok", 1)),
    ("#### 42\n\nQuestion: What? #### 7", "length", "42", ("ok", 1), ("wrong", 0), ("ok", 1)),
    ("#### 42" + " and so on, 7 times" * 27, "length", "42", ("ok", 1), ("wrong", 0), ("ok", 1)),
    ("#### 41", "stop", "42", ("wrong", 0), ("wrong", 0), ("wrong", 0)),
    ("no idea", "eos", "42", ("unparsed", 0), ("unparsed", 0), ("unparsed", 0)),
    ("no idea", "length", "42", ("truncated", 0), ("truncated", 0), ("truncated", 0)),
    ("", "eos", "42", ("empty", 0), ("empty", 0), ("empty", 0)),
    ("#### 42", "invalid", "42", ("invalid", 0), ("invalid", 0), ("invalid", 0)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0][:20]}-{case[1]}")
def test_gsm8ks_three_readings(tmp_path, case):
    text, finish, gold, strict, flexible, numeric = case
    for name in ("gsm8k", "gsm8k-train"):
        rows = [{"question": f"{name} {n}?", "answer": f"It is so.\n#### {gold}"} for n in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = load_suite(f"gsm8k={tmp_path}")
    items = suite.run(scripted(lambda prompt: Generation(text, finish, 5), limit=1))
    found = {item.filter: (item.state, item.value) for item in items}
    assert found == {"strict-match": strict, "flexible-extract": flexible, "numeric": numeric}
    details = {item.filter: json.loads(item.detail) for item in items}
    for name, detail in details.items():
        assert (detail["text"], detail["finish"], detail["tokens"]) == (text, finish, 5)
        assert detail["target"].endswith(f"#### {gold}"), name
    ours = numeric[1]
    differing = {
        name: float(own[1])
        for name, own in (("strict-match", strict), ("flexible-extract", flexible))
        if own[1] != ours
    }
    if finish != "invalid":
        assert details["numeric"].get("lm_eval", {}) == differing
        extracted = details["numeric"]["extracted"]
        assert (extracted is not None and Decimal(extracted) == Decimal(gold)) == bool(ours)
    assert recompute(as_run(suite, items)).agrees


def test_several_samples_of_a_problem_are_rows_of_one_document(folder):
    suite = load_suite(f"gsm8k={folder}")
    asked = []

    def answer(prompt):
        asked.append(prompt)
        return Generation(f"#### {prompt.sample}", "eos", 3)

    items = suite.run(scripted(answer, sampling=Sampling(n=3, seed=7), limit=2))
    assert {(prompt.sampling, prompt.sample) for prompt in asked} == {(Sampling(n=3, seed=7), n) for n in range(3)}
    own = [item for item in items if item.filter == "numeric"]
    assert [item.item for item in own] == ["0#0", "0#1", "0#2", "1#0", "1#1", "1#2"]
    assert len({item.doc_hash for item in own}) == 2
    greedy = suite.run(scripted(lambda prompt: Generation("", "eos", 0), limit=1))
    assert greedy[0].prompt_hash != own[0].prompt_hash
    assert recompute(as_run(suite, items)).agrees


@pytest.mark.parametrize("until", [[], [""], ["Question:"], None])
def test_stop_strings_that_are_none_do_no_harm(folder, until):
    from prunebench.evaluate.decoding import prompt_of

    assert prompt_of("x", {"until": until}, "n").until == tuple(until or ())


# --- texts


def test_wikitexts_words_bytes_and_tokens(folder):
    suite = load_suite(f"wikitext={folder}")
    seen = []

    def answer(passage):
        seen.append(passage)
        return PassageScore(-2.5 * len(passage.text), len(passage.text))

    items = suite.run(scripted(answer))
    docs = suite.documents("wikitext")["test"]
    assert len(docs) == 2
    assert "".join(doc["page"] + "\n" for doc in docs).rstrip("\n") == handwritten.PAGES.rstrip("\n")
    assert {passage.window for passage in seen} == {2048}
    numbers = metrics_from_items(items_to_table(items), {"wikitext": [list(cell) for cell in suite.headline]})
    nats = sum(2.5 * len(doc["text"]) for doc in docs)
    words = sum(len(re.split(r"\s+", doc["page"])) for doc in docs)
    assert numbers["wikitext/wikitext/none/word_perplexity"]["value"] == pytest.approx(math.exp(nats / words))
    assert numbers["wikitext/wikitext/none/perplexity"]["value"] == pytest.approx(math.exp(2.5))
    size = sum(len(doc["page"].encode()) for doc in docs)
    assert numbers["wikitext/wikitext/none/byte_perplexity"]["value"] == pytest.approx(math.exp(nats / size))
    assert numbers["wikitext"] == numbers["wikitext/wikitext/none/word_perplexity"]
    assert recompute(as_run(suite, items)).agrees


def test_held_out_blocks_cover_the_text_and_are_published_in_nats(folder):
    suite = load_suite(f"held_out={folder}")
    docs = suite.documents("held_out")["validation"]
    text = (folder / "wikitext2-valid.txt").read_text()
    assert "".join(doc["text"] for doc in docs).rstrip("\n") == text.rstrip("\n")
    assert all(len(doc["text"]) >= 4096 for doc in docs[:-1])
    items = suite.run(scripted(lambda passage: PassageScore(-0.5 * len(passage.text), len(passage.text))))
    numbers = metrics_from_items(items_to_table(items), {"held_out": [list(cell) for cell in suite.headline]})
    assert numbers["held_out"]["value"] == pytest.approx(0.5)
    assert recompute(as_run(suite, items)).agrees


@pytest.mark.parametrize("name", ["wikitext", "held_out"])
def test_a_text_without_a_number_stops_the_run(folder, name):
    with pytest.raises(IntegrityError, match="nan"):
        load_suite(f"{name}={folder}").run(scripted(lambda passage: PassageScore(math.nan, 3)))
