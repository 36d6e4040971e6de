"""How texts reach the model: tokenizers of every kind, joins, chats, what is too long, and parts of a task."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from prunebench.errors import UsageError
from prunebench.evaluate import Evaluation, Pair, Passage, Prompt, bos_policy, end_tokens
from prunebench.evaluate.tasks import ask
from prunebench.suite import Suite

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if not loop.last or add_generation_prompt %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def retokenized(tokenizer):
    """The factory of variants: BOS, end and padding tokens as named, all others gone."""
    from transformers import PreTrainedTokenizerFast

    def make(**special):
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **special)

    return make


def fed(model):
    """What reaches the model, padding aside."""
    rows = []

    def hook(_module, _args, kwargs):
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"][:, -kwargs["input_ids"].shape[1] :]
        rows.extend(row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True))

    return rows, model.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize(
    "special",
    [
        {"bos_token": "<|end|>", "eos_token": "<|end|>"},
        {"bos_token": "<|end|>", "eos_token": "<|end|>", "pad_token": "<|end|>"},
        {"bos_token": "<|pad|>", "eos_token": "<|end|>", "pad_token": "<|end|>"},
        {"eos_token": "<|end|>"},
        {"eos_token": "<|end|>", "pad_token": "<|end|>"},
        {"bos_token": "<|end|>"},
    ],
    ids=lambda special: "-".join(f"{k[:3]}={v[2:-2]}" for k, v in special.items()),
)
def test_padding_and_end_tokens_change_nothing_and_bos_stands_once(new_model, tokenizer, retokenized, special):
    model, own = new_model(), retokenized(**special)
    rows, handle = fed(model)
    evaluation = Evaluation(model, own, 400)
    texts = ["Mara has 11 stones", "Noka", "Saka was very sad."]
    scores = evaluation.loglikelihood([Pair(text, " and more") for text in texts])
    evaluation.rolling([Passage(text) for text in texts])
    generations = evaluation.generate([Prompt(text, (), 3) for text in texts])
    handle.remove()
    bos = own.bos_token_id
    beginnings = [row for row in rows if len(row) > 1]
    if bos is not None:
        assert all(row[0] == bos and row.count(bos) == 1 for row in beginnings)
        assert str(bos) in bos_policy(own)
    else:
        assert bos_policy(own) == "no bos"
    alone = [Evaluation(model, own, 1).loglikelihood([Pair(text, " and more")])[0] for text in texts]
    assert [s.loglikelihood for s in scores] == pytest.approx([s.loglikelihood for s in alone], abs=1e-4)
    assert len(generations) == 3
    assert end_tokens(model, own) == sorted({0, *([own.eos_token_id] if own.eos_token_id is not None else [])})


def test_a_suite_may_leave_bos_to_the_tokenizer_as_lm_eval_does(model, tokenizer, tokenizer_adding_bos, shots):
    class Theirs(type(shots)):
        bos = "tokenizer"

    for own, begins in ((tokenizer, False), (tokenizer_adding_bos, True)):
        rows, handle = fed(model)
        answers = ask(Evaluation(model, own, 1).under(Theirs()), Theirs(), "choice")
        handle.remove()
        assert len(answers) == 9
        assert all((row[0] == 0) == begins and row.count(0) == begins for row in rows)
        assert bos_policy(own, "tokenizer") == ("one bos (id 0) before every text" if begins else "no bos")
    # The end token stands for it where a text has nothing before it.
    rows, handle = fed(model)
    (score,) = Evaluation(model, tokenizer, bos="tokenizer").loglikelihood([Pair("", "Mara has")])
    handle.remove()
    assert rows[0][0] == 0
    assert score.tokens == len(tokenizer.encode("Mara has"))


def test_a_tokenizer_without_bos_and_end_is_refused_where_one_is_needed(model, retokenized):
    evaluation = Evaluation(model, retokenized())
    assert evaluation.loglikelihood([Pair("Mara has", " stones")])[0].tokens > 0
    with pytest.raises(UsageError, match="neither a BOS nor an end token"):
        evaluation.rolling([Passage("Mara has stones")])


def test_a_token_that_spans_the_join_is_flagged_and_scored(model, tokenizer):
    evaluation = Evaluation(model, tokenizer)
    whole = next(
        tokenizer.decode([token])
        for token in range(300, len(tokenizer))
        if tokenizer.decode([token]).isalpha() and len(tokenizer.decode([token])) > 3
    )
    spanning, plain = evaluation.loglikelihood([Pair(whole[:2], whole[2:]), Pair("Mara has", " stones")])
    assert spanning.spans
    assert not plain.spans
    assert spanning.tokens > 0
    assert spanning.loglikelihood < 0


def test_what_is_too_long_is_an_error_or_cut_behind_its_bos_and_counted(new_model, tokenizer):
    model = new_model(length=16)
    pair = Pair("Mara has stones and finds more stones in Accra and Noka went there", " and was sad", "the long one")
    with pytest.raises(UsageError, match="the long one"):
        Evaluation(model, tokenizer).loglikelihood([pair])
    rows, handle = fed(model)
    (score,) = Evaluation(model, tokenizer, truncate=True).loglikelihood([pair])
    handle.remove()
    (row,) = rows
    tokens = tokenizer.encode(pair.context + pair.continuation)
    assert len(row) == 16
    assert row == [0, *tokens[-16:-1]]
    assert score.dropped == 1 + len(tokens) - 1 - 16
    (short,) = Evaluation(model, tokenizer, truncate=True).loglikelihood([Pair("Mara", " has")])
    assert short.dropped == 0
    with pytest.raises(UsageError, match="does not fit"):
        Evaluation(model, tokenizer, truncate=True).loglikelihood([Pair("a", " stones" * 40)])


def test_a_cut_prompt_leaves_room_for_its_answer(new_model, tokenizer):
    model = new_model(length=16)
    model.generation_config.eos_token_id = None
    prompt = Prompt("Mara has stones and finds more stones in Accra and Noka went there", (), 5, "the long one")
    with pytest.raises(UsageError, match="the long one"):
        Evaluation(model, tokenizer).generate([prompt])
    evaluation = Evaluation(model, tokenizer, truncate=True)
    rows, handle = fed(model)
    (generation,) = evaluation.generate([prompt])
    handle.remove()
    tokens = tokenizer.encode(prompt.text)
    assert rows[0] == [0, *tokens[-10:]]
    assert generation.tokens == 5 or generation.finish == "eos"
    assert evaluation.dropped(prompt) == 1 + len(tokens) - 11


@pytest.mark.parametrize("window", [8, 24, None])
def test_windows_are_no_longer_than_the_passage_says(new_model, tokenizer, window):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    model, text = new_model(length=32), "Saka was sad. Noka went to Accra. " * 5
    rows, handle = fed(model)
    (score,) = Evaluation(model, tokenizer).rolling([Passage(text, window=window)])
    handle.remove()
    tokens = tokenizer.encode(text)
    expected = [
        (context + targets)[:-1]
        for context, targets in map(make_disjoint_window, get_rolling_token_windows(tokens, 0, window or 32, 1))
    ]
    assert sorted(rows) == sorted(expected)
    assert max(map(len, rows)) == (window or 32)
    assert score.tokens == len(tokens)


# --- parts of a task, and chats

CHOICE = """\
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: data/choice.jsonl, train: data/train.jsonl}}
test_split: test
training_split: train
output_type: multiple_choice
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: choices
doc_to_target: label
num_fewshot: 3
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def shots(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "tasks/choice.yaml").write_text(CHOICE)
    for name, count in (("choice", 9), ("train", 20)):
        rows = [
            {"id": n, "question": f"{name} {n}", "choices": ["yes", "no", "maybe"], "label": n % 3}
            for n in range(count)
        ]
        (tmp_path / f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Local(Suite):
        name, version, tasks, headline = "local", 1, ("choice",), ()
        file = tmp_path / "local.py"

        def run(self, evaluation):
            raise NotImplementedError

    return Local()


def test_examples_are_drawn_over_the_whole_split_so_that_parts_are_parts(model, tokenizer, shots):
    evaluation = Evaluation(model, tokenizer, 1)
    whole = {answer.doc["id"]: answer for answer in ask(evaluation, shots, "choice")}
    assert len({answer.prompt_hash for answer in whole.values()}) == 9
    for part in ({"limit": 4}, {"shard": (0, 2)}, {"shard": (1, 2)}, {"shard": (2, 4), "limit": 7}):
        answers = ask(dataclasses.replace(evaluation, **part), shots, "choice")
        i, n = part.get("shard", (0, 1))
        assert [answer.doc["id"] for answer in answers] == [d for d in range(part.get("limit", 9)) if d % n == i]
        for answer in answers:
            assert answer == whole[answer.doc["id"]]


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_an_impossible_shard_is_refused(model, tokenizer, shard):
    with pytest.raises(UsageError, match="shard"):
        Evaluation(model, tokenizer, shard=shard)


def test_a_chat_template_that_begins_with_bos_gives_one_bos_and_lm_evals_prompts(new_model, retokenized, shots):
    from prunebench.evaluate.tasks import load_task

    tokenizer = retokenized(**dict.fromkeys(("bos_token", "eos_token"), "<|end|>"), chat_template=TEMPLATE)
    model = new_model(length=512)
    rows, handle = fed(model)
    ask(Evaluation(model, tokenizer, chat_template=True), shots, "choice")
    handle.remove()
    assert rows
    assert all(row[0] == 0 and row.count(0) == 1 for row in rows)
    theirs = load_task(shots.task_file("choice"))
    template = Evaluation(model, tokenizer, chat_template=True).chat
    theirs.build_all_requests(
        rank=0, world_size=1, apply_chat_template=True, fewshot_as_multiturn=True, chat_template=template
    )
    expected = [instance.args for instance in theirs.instances]
    ours = load_task(shots.task_file("choice")).build(None, chat=template)
    assert [instance.args for group in ours for instance in group] == expected
    assert expected[0][0].count("[assistant]") == 4


def test_a_chat_template_that_is_not_there_is_one_clear_line(model, tokenizer, shots):
    with pytest.raises(UsageError, match="no chat template"):
        ask(Evaluation(model, tokenizer, chat_template=True), shots, "choice")


def test_bfloat16_ties_are_ties_only_to_the_stored_digit(new_model, tokenizer):
    """float32 softmax over bfloat16 logits: scores are finite and of float32's grain."""
    model = new_model().to(torch.bfloat16)
    scores = Evaluation(model, tokenizer).loglikelihood([Pair(f"Mara {n}", " has stones") for n in range(12)])
    assert len({round(score.loglikelihood, 6) for score in scores}) == 12
