"""Our pipeline over lm-eval's tasks against lm-eval's own, and what the data file's content may do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prunebench.errors import PrerequisiteError, PruneBenchError, UsageError
from prunebench.evaluate import Evaluation, Score
from prunebench.evaluate.tasks import ask, load_task
from prunebench.record import content_hash
from prunebench.suite import Suite, TaskFile

CHOICE = """\
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: data/choice.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
PROBLEM = """\
task: problem
dataset_path: json
dataset_kwargs: {data_files: {test: data/problem.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: answer
generation_kwargs: {until: ["Question:", "a"], do_sample: false, max_gen_toks: 12}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
PASSAGE = """\
task: passage
dataset_path: json
dataset_kwargs: {data_files: {test: data/passage.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""
NAMES = ["Mara", "Noka", "Saka", "Gumo", "Bika", "Teto", "Lora", "Kimo"]
DATA = {
    "choice": [
        {"id": n, "context": f"{name} has", "choices": [" 1", " stones", " more", " sad x"], "label": n % 4}
        for n, name in enumerate(NAMES)
    ],
    "problem": [{"id": f"p{n}", "question": f"{name} has {n}?", "answer": str(n)} for n, name in enumerate(NAMES)],
    "passage": [{"id": name, "text": f"{name} went to Accra. " * (n % 4 + 1)} for n, name in enumerate(NAMES)],
}


@pytest.fixture
def folder(tmp_path):
    for name, yaml in {"choice": CHOICE, "problem": PROBLEM, "passage": PASSAGE}.items():
        for path, text in {
            tmp_path / "tasks" / f"{name}.yaml": yaml,
            tmp_path / "data" / f"{name}.jsonl": "".join(json.dumps(doc) + "\n" for doc in DATA[name]),
        }.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def suite(folder):
    class Local(Suite):
        name, version, tasks, headline = "local", 1, tuple(DATA), ()
        file = folder / "local.py"

        def run(self, evaluation):
            raise NotImplementedError

    return Local()


def test_lm_evals_own_evaluator_gives_the_same_metrics_for_every_item(model, tokenizer, suite):
    from lm_eval.evaluator import evaluate

    from prunebench.evaluate.lm import EngineLM

    evaluation = Evaluation(model, tokenizer, 300)
    tasks = {name: load_task(suite.task_file(name)) for name in suite.tasks}
    theirs = evaluate(EngineLM(evaluation), tasks, log_samples=True, bootstrap_iters=0)["samples"]
    for name in suite.tasks:
        answers = ask(evaluation, suite, name)
        assert len(answers) == len(theirs[name]) == len(NAMES)
        for answer, sample in zip(answers, theirs[name], strict=True):
            assert answer.doc == sample["doc"]
            for metric, value in answer.metrics["none"].items():
                assert sample[metric] == value


def hflm_samples(model, tokenizer, suite, name):
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=1,
        max_length=128,
        softmax_dtype="float32",
        add_bos_token=True,
    )
    task = load_task(suite.task_file(name))
    return evaluate(lm, {name: task}, log_samples=True, bootstrap_iters=0)["samples"][name]


def test_hflm_in_lm_evals_evaluator_agrees_on_every_choice(model, tokenizer_adding_bos, suite):
    theirs = hflm_samples(model, tokenizer_adding_bos, suite, "choice")
    for answer, sample in zip(ask(Evaluation(model, tokenizer_adding_bos), suite, "choice"), theirs, strict=True):
        assert {metric: sample[metric] for metric in ("acc", "acc_norm")} == answer.metrics["none"]
        for response, (loglikelihood, _) in zip(answer.responses, sample["filtered_resps"], strict=True):
            assert isinstance(response, Score)
            assert response.loglikelihood == pytest.approx(loglikelihood, abs=1e-4)


def test_hflm_in_lm_evals_evaluator_agrees_on_every_passage(model, tokenizer, suite):
    # With a tokenizer that adds BOS, lm-eval 0.4.13 scores a second BOS here; ours has exactly one either way.
    theirs = hflm_samples(model, tokenizer, suite, "passage")
    for answer, sample in zip(ask(Evaluation(model, tokenizer), suite, "passage"), theirs, strict=True):
        loglikelihood, words = answer.metrics["none"]["word_perplexity"]
        assert (pytest.approx(loglikelihood, abs=1e-4), words) == sample["word_perplexity"]


def test_limit_takes_the_first_documents_and_changes_no_answer(model, tokenizer, suite):
    for name in suite.tasks:
        full, part = (ask(Evaluation(model, tokenizer, 1, limit), suite, name) for limit in (None, 3))
        assert part == full[:3]


def test_hashes_tell_documents_and_prompts_apart_and_nothing_else(model, tokenizer, suite, folder):
    def items():
        return [a.item("acc", 1.0, "ok", {}) for a in ask(Evaluation(model, tokenizer), suite, "choice")]

    before = items()
    assert len({item.doc_hash for item in before}) == len({item.prompt_hash for item in before}) == len(NAMES)
    assert before == items()
    docs = [{**doc, "label": (doc["label"] + 1) % 4} for doc in DATA["choice"]]  # another gold, the same prompt
    (folder / "data/choice.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
    for old, new in zip(before, items(), strict=True):
        assert (old.prompt_hash, old.item) == (new.prompt_hash, new.item)
        assert old.doc_hash != new.doc_hash
    assert before[0].doc_hash == content_hash(json.dumps(DATA["choice"][0], sort_keys=True, separators=(",", ":")))


def test_a_changed_data_file_is_read_anew(model, tokenizer, suite, folder):
    evaluation = Evaluation(model, tokenizer)
    assert len(ask(evaluation, suite, "passage")) == len(NAMES)
    (folder / "data/passage.jsonl").write_text('{"id": 1, "text": "Other words."}\n', encoding="utf-8")
    (answer,) = ask(evaluation, suite, "passage")
    assert answer.doc["text"] == "Other words."


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, PrerequisiteError, "missing"),
        ("", UsageError, "no documents"),
        ('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}\n', UsageError, "repeated ids"),
        ('{"text": "a"}\n', UsageError, "id"),
        ("{\n", UsageError, "JSON"),
        ("[1]\n", UsageError, "JSON"),
    ],
)
def test_a_bad_data_file_is_one_clear_line(suite, content, error, message):
    path = suite.file.parent / "data/passage.jsonl"
    path.unlink()
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(error, match=message) as caught:
        load_task(suite.task_file("passage"))
    assert "passage.jsonl" in str(caught.value)


@pytest.mark.parametrize("content", [None, "- a list\n", "task: x\n", "task: [\n", "task: x\nf: !function a.b\n"])
def test_a_bad_task_file_is_one_clear_line(tmp_path, content):
    path = tmp_path / "tasks" / "x.yaml"
    if content is not None:
        path.parent.mkdir()
        path.write_text(content, encoding="utf-8")
    with pytest.raises(PruneBenchError, match=r"x\.yaml"):
        load_task(TaskFile(path))


def test_task_files_hold_no_path_of_a_machine():
    for path in sorted((Path(__file__).parents[2] / "suites/tasks").glob("*.yaml")):
        for data in TaskFile(path).config.get("dataset_kwargs", {}).get("data_files", {}).values():
            assert not Path(data).is_absolute()
            assert ".." not in Path(data).parts
