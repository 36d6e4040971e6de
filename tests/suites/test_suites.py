"""The four shipped suites: their rows on a random model and on scripted answers, and their identity."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from prunebench.errors import IntegrityError, PrerequisiteError
from prunebench.evaluate import Evaluation, Generation, PassageScore, Score
from prunebench.loader import load_suite
from prunebench.suite import suite_content

ROOT = Path(__file__).parents[2]
SUITES = ROOT / "suites"
NAMES = ("multiple_choice", "arithmetic", "code", "perplexity")
TOKENIZER = ROOT / "fixtures/world/tokenizer"


@dataclasses.dataclass(frozen=True, eq=False)
class Scripted(Evaluation):
    """Answers by a function of the request, without a model."""

    answer: Any = None

    def loglikelihood(self, pairs):
        return [self.answer(pair) for pair in pairs]

    rolling = generate = loglikelihood


def scripted(answer, **more):
    return Scripted(torch.nn.Identity().eval(), None, answer=answer, **more)


@pytest.fixture(scope="module")
def world():
    """The world's tokenizer and a random model of its vocabulary."""
    from transformers import AutoTokenizer, OlmoeConfig, OlmoeForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    config = OlmoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    return OlmoeForCausalLM(config).eval(), tokenizer


def documents(task):
    path = SUITES / "data" / f"{task}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_a_suite_twice_gives_equal_rows_and_limit_gives_the_first_of_them(world, name):
    suite = load_suite(name)
    first, again = (suite.run(Evaluation(*world, batch_tokens=2048, limit=8)) for _ in range(2))
    assert first == again
    fewer = suite.run(Evaluation(*world, batch_tokens=2048, limit=3))
    keys = {(row.task, row.item, row.doc_hash, row.prompt_hash) for row in first}
    assert {(row.task, row.item, row.doc_hash, row.prompt_hash) for row in fewer} <= keys
    assert {row.suite for row in first} == {name}
    assert {row.task for row in first} == set(suite.tasks)
    assert set(suite.headline) <= {(row.task, row.filter, row.metric) for row in first}
    assert len({(row.task, row.filter, row.item, row.metric) for row in first}) == len(first)


def test_choices_are_scored_with_and_without_their_length():
    lls = {" a": -3.0, " bbbbbb": -4.0}  # acc takes the first, acc_norm the second

    def answer(pair):
        return Score(lls[" a" if pair.continuation == choices[pair.context][0] else " bbbbbb"], False, 2)

    docs = documents("continuation")
    choices = {doc["context"]: doc["choices"] for doc in docs}
    rows = [
        row
        for row in load_suite("multiple_choice").run(scripted_choices(answer, docs))
        if row.task == "tiny_continuation"
    ]
    for doc in docs:
        acc, norm = (next(r for r in rows if r.item == doc["id"] and r.metric == m) for m in ("acc", "acc_norm"))
        per_character = [-3.0 / len(doc["choices"][0]), -4.0 / len(doc["choices"][1])]
        assert acc.value == float(doc["label"] == 0)
        assert norm.value == float(doc["label"] == per_character.index(max(per_character)))
        assert {row.state for row in (acc, norm)} == {"ok" if row.value else "wrong" for row in (acc, norm)}
        detail = json.loads(acc.detail)
        assert detail["loglikelihoods"] == [-3.0, -4.0]
        assert detail["characters"] == [len(choice) for choice in doc["choices"]]
        assert detail["gold"] == doc["label"]


def scripted_choices(answer, docs):
    contexts = {doc["context"] for doc in docs}
    return scripted(lambda pair: answer(pair) if pair.context in contexts else Score(-1.0, False, 1))


def test_a_loglikelihood_that_is_not_finite_is_an_error_and_never_a_choice():
    rows = load_suite("multiple_choice").run(scripted(lambda pair: Score(math.nan, False, 1), limit=5))
    assert {(row.state, row.value) for row in rows} == {("error", 0.0)}
    assert json.loads(rows[0].detail)["loglikelihoods"][0] is None
    with pytest.raises(IntegrityError, match=r"nan.*tiny_perplexity"):
        load_suite("perplexity").run(scripted(lambda passage: PassageScore(math.nan, 3), limit=1))


@pytest.mark.parametrize(
    ("text", "finish", "strict", "flexible"),
    [
        (" 1+2=3.\n#### {n}", "eos", ("ok", 1.0), ("ok", 1.0)),
        (" #### {n}\n\nQuestion: more #### 77", "stop", ("ok", 1.0), ("wrong", 0.0)),  # first match against last number
        (" The answer is {n}.", "eos", ("unparsed", 0.0), ("ok", 1.0)),
        (" The answer is {n}", "length", ("truncated", 0.0), ("ok", 1.0)),
        (" #### ${n}", "eos", ("unparsed", 0.0), ("ok", 1.0)),
        (" #### {n}.", "eos", ("ok", 1.0), ("ok", 1.0)),
        (" #### 9{n}", "eos", ("wrong", 0.0), ("wrong", 0.0)),
        (" none", "eos", ("unparsed", 0.0), ("unparsed", 0.0)),
        (" none", "length", ("truncated", 0.0), ("truncated", 0.0)),
        (" \n", "eos", ("empty", 0.0), ("empty", 0.0)),
        ("", "eos", ("empty", 0.0), ("empty", 0.0)),
    ],
)
def test_strict_and_flexible_answers_are_extracted_as_by_lm_eval(text, finish, strict, flexible):
    (doc, *_) = documents("arithmetic")
    number = doc["answer"].split("#### ")[1]
    text = text.replace("{n}", number)
    rows = load_suite("arithmetic").run(scripted(lambda prompt: Generation(text, finish, 9), limit=1))
    assert {row.filter: (row.state, row.value) for row in rows} == {"strict": strict, "flexible": flexible}
    detail = json.loads(rows[0].detail)
    assert (detail["text"], detail["finish"], detail["tokens"]) == (text, finish, 9)


def test_arithmetic_is_asked_with_gsm8ks_stop_string_and_room_for_the_longest_answer(world):
    _, tokenizer = world
    asked = []
    load_suite("arithmetic").run(scripted(lambda prompt: asked.append(prompt) or Generation("", "eos", 0), limit=2))
    assert [prompt.text for prompt in asked] == [doc["question"] for doc in documents("arithmetic")[:2]]
    assert asked[0].until == ("Question:",)
    assert asked[0].max_tokens > max(len(tokenizer.encode(doc["answer"])) for doc in documents("arithmetic"))


@pytest.mark.parametrize("task", ["code_mbpp", "code_humaneval"])
def test_code_is_asked_with_room_for_the_longest_solution(world, task):
    _, tokenizer = world
    asked = []
    load_suite("code").run(scripted(lambda prompt: asked.append(prompt) or Generation("", "eos", 0)))
    by_text = {prompt.text: prompt for prompt in asked}
    for doc in documents(task):
        prompt = by_text[doc["prompt"]]
        assert prompt.max_tokens > len(tokenizer.encode(doc["canonical_solution"]))
        solution = doc["canonical_solution"].split("[DONE]")[0]
        assert not any(stop in solution for stop in prompt.until)


def test_reference_solutions_pass_and_mutated_or_empty_ones_do_not():
    docs = {doc["prompt"]: doc for task in ("code_mbpp", "code_humaneval") for doc in documents(task)[:5]}

    def solved(prompt):
        return Generation(docs[prompt.text]["canonical_solution"].split("[DONE]")[0], "stop", 9)

    def mutated(prompt):
        generation = solved(prompt)
        return generation._replace(text=generation.text.replace("return ", "return 1 + "))

    for answer, states in {
        solved: {("ok", 1.0)},
        mutated: {("wrong", 0.0)},
        lambda prompt: Generation(" \n", "eos", 1): {("empty", 0.0)},
        lambda prompt: Generation("    return undefined\n", "eos", 1): {("error", 0.0)},
    }.items():
        rows = load_suite("code").run(scripted(answer, limit=5))
        assert {(row.state, row.value) for row in rows} == states
        assert {row.metric for row in rows} == {"pass@1"}


def test_the_same_program_is_run_once():
    ran = []

    @dataclasses.dataclass(frozen=True, eq=False)
    class Counting(Scripted):
        def run_program(self, program):
            ran.append(program)
            return "ok", ""

    answer = Counting(torch.nn.Identity().eval(), None, limit=4, answer=lambda prompt: Generation("x = 1", "eos", 1))
    rows = load_suite("code").run(answer)
    assert len(rows) == 8
    assert len(ran) == len(set(ran))


def test_perplexity_rows_sum_to_the_perplexity_per_token():
    docs = documents("perplexity")[:6]
    counts = {doc["text"]: 3 + n for n, doc in enumerate(docs)}
    rows = load_suite("perplexity").run(
        scripted(lambda passage: PassageScore(-2.0 * counts[passage.text], counts[passage.text]), limit=6)
    )
    assert sum(row.value for row in rows) / sum(row.weight for row in rows) == pytest.approx(2.0)
    for row, doc in zip(rows, docs, strict=True):
        assert json.loads(row.detail)["bytes"] == len(doc["text"].encode())
        assert row.weight == json.loads(row.detail)["tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_identity_changes_with_the_file_each_task_and_each_data_file_and_with_nothing_else(tmp_path, name):
    folder = tmp_path / "suites"
    shutil.copytree(SUITES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    suite = load_suite(str(folder / f"{name}.py"))
    identity = suite_content(suite)
    assert identity == suite_content(load_suite(name))
    assert len(identity) == 16
    files = [suite.task_file(task) for task in suite.tasks]
    for path in [*(file.path for file in files), *(path for file in files for path in file.data_files.values())]:
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        assert suite_content(suite) != identity, path.name
        path.write_bytes(content)
    (folder / "other.py").write_text("", encoding="utf-8")
    assert suite_content(suite) == identity
    with (folder / f"{name}.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert suite_content(load_suite(str(folder / f"{name}.py"))) != identity


def test_a_missing_data_file_is_one_clear_line(tmp_path):
    folder = tmp_path / "suites"
    shutil.copytree(SUITES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "data/perplexity.jsonl").unlink()
    suite = load_suite(str(folder / "perplexity.py"))
    with pytest.raises(PrerequisiteError, match=r"perplexity\.jsonl"):
        suite_content(suite)
