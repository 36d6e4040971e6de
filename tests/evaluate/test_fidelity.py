"""Fidelity against a plain float64 loop over both models' logits (2609.30465 §3.1), axes, batches, restoring."""

from __future__ import annotations

import importlib.util
import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from prunebench.analysis import metrics_from_items
from prunebench.errors import IntegrityError, PrerequisiteError, UsageError
from prunebench.evaluate import Evaluation, Pair
from prunebench.evaluate.fidelity import batch_of
from prunebench.install import installed
from prunebench.items import items_to_table
from prunebench.loader import load_suite
from prunebench.mask import Mask
from prunebench.method import Method
from prunebench.moe import open_model
from prunebench.plan import Plan, make_plan

SPEC = importlib.util.spec_from_file_location("_handwritten_rows", Path(__file__).with_name("handwritten.py"))
handwritten = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(handwritten)


@pytest.fixture(scope="module")
def opened(new_model):
    return open_model(new_model(seed=3))


@pytest.fixture(scope="module")
def plan(opened) -> Plan:
    """Half of the experts gone, slots refilled by survivors."""
    from prunebench.loader import load_method

    operator: Method = load_method("reroute")
    mask = Mask.for_shapes(opened.shapes, {shape.index: range(0, 8, 2) for shape in opened.shapes})
    return make_plan(opened, mask, operator, None)


@pytest.fixture
def data(tmp_path):
    def write(rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    return write


def by_hand(moe, plan, tokenizer, row):
    """Σ over the response's tokens of KL(q ‖ p), −ln q and −ln p, from two plain forwards, entry by entry."""
    # This tokenizer puts no BOS before a text, so there is none.
    context = tokenizer.encode(row["context"].rstrip())
    whole = tokenizer.encode(row["context"] + row["continuation"])
    ids = torch.tensor([whole])
    with torch.no_grad():
        p_TV = moe.model(input_ids=ids, use_cache=False).logits[0].double()
        with installed(moe, plan):
            q_TV = moe.model(input_ids=ids, use_cache=False).logits[0].double()
    kl = nll = dense = 0.0
    for position in range(len(context) - 1, len(whole) - 1):
        p, q = (row_V.tolist() for row_V in (p_TV[position], q_TV[position]))
        total_p, total_q = (math.log(math.fsum(math.exp(x) for x in own)) for own in (p, q))
        logs = [(x - total_q, y - total_p) for x, y in zip(q, p, strict=True)]
        kl += math.fsum(math.exp(lq) * (lq - lp) for lq, lp in logs)
        lq, lp = logs[whole[position + 1]]
        nll, dense = nll - lq, dense - lp
    return kl, nll, dense, len(whole) - len(context)


def test_every_item_equals_a_plain_loop(opened, plan, tokenizer, data):
    rows = handwritten.fidelity_rows(3)
    suite = load_suite(f"fidelity={data(rows)}")
    with installed(opened, plan) as instrument:
        evaluation = Evaluation(opened.model, tokenizer, 120, dense=instrument.suspended)
        items = suite.run(evaluation)
    assert suite.needs_dense
    kinds = {metric: [item for item in items if item.metric == metric] for metric in suite.metrics}
    for place, row in enumerate(rows):
        kl, nll, dense, tokens = by_hand(opened, plan, tokenizer, row)
        assert kinds["reverse_kl"][place].value == pytest.approx(kl, rel=2e-4, abs=1e-5)
        assert kinds["delta_nll"][place].value == pytest.approx(nll - dense, abs=2e-4)
        assert {kinds[metric][place].weight for metric in suite.metrics} == {float(tokens)}
        assert kinds["reverse_kl"][place].task == row["axis"]
        assert kinds["reverse_kl"][place].filter == ("covered" if row["covered"] else "held-out")
        assert kl > 0


def test_the_dense_model_is_at_no_distance_from_itself(opened, tokenizer, data):
    suite = load_suite(f"fidelity={data(handwritten.fidelity_rows(2))}")
    items = suite.run(Evaluation(opened.model, tokenizer, dense=nullcontext))
    assert {item.value for item in items} == {0.0}


def test_numbers_pool_tokens_within_axes_and_weigh_axes_equally(opened, plan, tokenizer, data):
    suite = load_suite(f"fidelity={data(handwritten.fidelity_rows())}")
    with installed(opened, plan) as instrument:
        items = suite.run(Evaluation(opened.model, tokenizer, dense=instrument.suspended))
    numbers = metrics_from_items(items_to_table(items), {"fidelity": [list(cell) for cell in suite.cells]})
    per_axis = {}
    for axis, covered in handwritten.AXES.items():
        details = [json.loads(i.detail) for i in items if i.task == axis and i.metric == "reverse_kl"]
        tokens = sum(detail["tokens"] for detail in details)
        kl = sum(detail["reverse_kl"] for detail in details) / tokens
        delta = sum(detail["nll"] - detail["dense_nll"] for detail in details) / tokens
        kind = "covered" if covered else "held-out"
        per_axis[axis] = kl, delta, math.exp(delta) - 1
        for metric, value in zip(("reverse_kl", "delta_nll", "excess_ppl"), per_axis[axis], strict=True):
            assert numbers[f"fidelity/{axis}/{kind}/{metric}"]["value"] == pytest.approx(value, rel=1e-9, abs=1e-12)
    for place, metric in enumerate(("reverse_kl", "delta_nll", "excess_ppl")):
        for part, axes in (
            ("all-axes", [*handwritten.AXES]),
            ("covered", [a for a, c in handwritten.AXES.items() if c]),
            ("held-out", [a for a, c in handwritten.AXES.items() if not c]),
        ):
            mean = sum(per_axis[axis][place] for axis in axes) / len(axes)
            assert numbers[f"fidelity/{part}/{metric}"]["value"] == pytest.approx(mean, rel=1e-9, abs=1e-12)
    assert numbers["fidelity"] == numbers["fidelity/all-axes/reverse_kl"]


def test_batches_of_an_axis_are_drawn_together(opened, plan, tokenizer, data):
    """Eight documents in six batches: the draws are those of six sums, not of eight."""
    import numpy as np

    from prunebench.analysis.bootstrap import resample_counts

    suite = load_suite(f"fidelity={data(handwritten.fidelity_rows())}")
    with installed(opened, plan) as instrument:
        items = suite.run(Evaluation(opened.model, tokenizer, dense=instrument.suspended))
    own = sorted(
        (i for i in items if i.task == "chat" and i.metric == "reverse_kl"), key=lambda i: (i.doc_hash, i.prompt_hash)
    )
    labels = list(dict.fromkeys(json.loads(item.detail)["cluster"] for item in own))
    assert sorted(labels) == [f"chat, batch {n}" for n in range(6)]
    sums = np.zeros((6, 2))
    for item in own:
        sums[labels.index(json.loads(item.detail)["cluster"])] += (item.value, item.weight)
    draws = np.concatenate([c.astype(float) @ sums for c in resample_counts(0, "fidelity", "chat", 6)])
    low, high = np.percentile(draws[:, 0] / draws[:, 1], [2.5, 97.5])
    numbers = metrics_from_items(items_to_table(items), {"fidelity": [list(cell) for cell in suite.cells]})
    stated = numbers["fidelity/chat/held-out/reverse_kl"]
    assert (stated["low"], stated["high"]) == (pytest.approx(low, rel=1e-9), pytest.approx(high, rel=1e-9))


@pytest.mark.parametrize(
    ("count", "sizes"), [(4, [1] * 4), (6, [1] * 6), (8, [2, 1, 1, 2, 1, 1]), (1024, [171] * 4 + [170] * 2)]
)
def test_batches_are_equal_runs(count, sizes):
    batches = [batch_of(place, count) for place in range(count)]
    assert batches == sorted(batches)
    assert sorted(batches.count(batch) for batch in set(batches)) == sorted(sizes)


def test_suspending_gives_the_untouched_model_and_then_the_pruned_one_with_its_counters(opened, plan, tokenizer):
    ids = torch.tensor([tokenizer.encode("Mara has 11 stones and finds 3 more.")])

    def logits():
        with torch.inference_mode():
            return opened.model(input_ids=ids, use_cache=False).logits

    plain = logits()
    with installed(opened, plan) as instrument:
        pruned = logits()
        counted = instrument.snapshot()
        with instrument.suspended():
            assert torch.equal(logits(), plain)
        assert instrument.snapshot() == counted
        assert torch.equal(logits(), pruned)
        after = instrument.snapshot()
        assert after != counted
        instrument.restore(counted)
        assert instrument.snapshot() == counted
        logits()
        assert instrument.snapshot() == after
    assert torch.equal(logits(), plain)
    assert not torch.equal(plain, pruned)


def test_a_limit_is_per_axis_and_batches_stay_those_of_the_whole(opened, tokenizer, data):
    suite = load_suite(f"fidelity={data(handwritten.fidelity_rows())}")
    whole = suite.run(Evaluation(opened.model, tokenizer, dense=nullcontext))
    part = suite.run(Evaluation(opened.model, tokenizer, dense=nullcontext, limit=3))
    assert part == [item for item in whole if int(item.item) < 3]


def test_chats_are_scored_at_what_the_assistant_says(opened, tokenizer, data):
    from transformers import PreTrainedTokenizerFast

    chatty = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        **dict.fromkeys(("bos_token", "eos_token"), "<|end|>"),
        chat_template="{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}|{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    )
    messages = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Mara."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "In Accra."},
    ]
    suite = load_suite(f"fidelity={data([{'axis': 'chat', 'covered': True, 'messages': messages}])}")
    (item, *_) = suite.run(Evaluation(opened.model, chatty, dense=nullcontext))
    contexts = ["[user]Who?|[assistant]", "[user]Who?|[assistant]Mara.|[user]Where?|[assistant]"]
    scores = Evaluation(opened.model, chatty).loglikelihood(
        [Pair(contexts[0], "Mara."), Pair(contexts[1], "In Accra.")]
    )
    detail = json.loads(item.detail)
    assert detail["nll"] == pytest.approx(-sum(score.loglikelihood for score in scores), abs=1e-4)
    assert item.weight == sum(score.tokens for score in scores)
    suite = load_suite(f"fidelity={data([{'axis': 'chat', 'covered': True, 'messages': messages[:3]}])}")
    with pytest.raises(UsageError, match="does not end on the assistant"):
        suite.run(Evaluation(opened.model, chatty, dense=nullcontext))
    suite = load_suite(f"fidelity={data([{'axis': 'chat', 'covered': True, 'messages': messages}])}")
    with pytest.raises(UsageError, match="no chat template"):
        suite.run(Evaluation(opened.model, tokenizer, dense=nullcontext))


def test_chats_are_rendered_without_thinking(opened, tokenizer, data):
    """2609.30465 App. B.2. A template of Qwen3's kind: an empty thought stands before every last answer."""
    from transformers import PreTrainedTokenizerFast

    thinking = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        **dict.fromkeys(("bos_token", "eos_token"), "<|end|>"),
        chat_template="{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]"
        "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}|{% endfor %}"
        "{% if add_generation_prompt %}[assistant]"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}",
    )
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Mara."}]
    suite = load_suite(f"fidelity={data([{'axis': 'chat', 'covered': True, 'messages': messages}])}")
    (item, *_) = suite.run(Evaluation(opened.model, thinking, dense=nullcontext))
    (score,) = Evaluation(opened.model, thinking).loglikelihood(
        [Pair("[user]Who?|[assistant]<think></think>", "Mara.")]
    )
    assert json.loads(item.detail)["nll"] == pytest.approx(-score.loglikelihood, abs=1e-4)


def test_nan_stops_the_run_and_says_where(new_model, tokenizer, data):
    model = new_model()
    model.register_forward_hook(lambda _m, _a, output: output.logits.fill_(float("nan")) is None or output)
    suite = load_suite(f"fidelity={data(handwritten.fidelity_rows(1))}")
    with pytest.raises(IntegrityError, match=r"nan.*axis mathematics"):
        suite.run(Evaluation(model, tokenizer, dense=nullcontext))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"axis": "a", "covered": True, "context": "x"}], "continuation"),
        ([{"axis": "a", "context": "x", "continuation": "y"}], "covered"),
        ([{"axis": "a", "covered": "false", "context": "x", "continuation": "y"}], "covered is 'false'"),
        ([{"axis": None, "covered": True, "context": "x", "continuation": "y"}], "None is no text"),
        ([{"axis": "", "covered": True, "context": "x", "continuation": "y"}], "no name"),
        ([{"axis": "a", "covered": True, "context": None, "continuation": "y"}], "None is no text"),
        ([{"axis": "a", "covered": True, "messages": "hello"}], "indices"),
        ([{"axis": "a", "covered": True, "messages": [{"role": "assistant"}]}], "content"),
        ([{"axis": "a", "covered": True, "messages": [{"role": "assistant", "content": 5}]}], "5 is no text"),
        (
            [{"axis": "a", "covered": c, "context": "x", "continuation": "y"} for c in (True, False)],
            "both covered and held out",
        ),
    ],
)
def test_other_rows_are_one_clear_line(data, rows, message):
    with pytest.raises(UsageError, match=message):
        load_suite(f"fidelity={data(rows)}").documents("fidelity")


def test_without_data_and_without_a_dense_model_it_says_what_is_missing(opened, tokenizer, monkeypatch):
    monkeypatch.delenv("PRUNEBENCH_DATA", raising=False)
    with pytest.raises(PrerequisiteError, match="fidelity=FILE"):
        load_suite("fidelity").documents("fidelity")
    with pytest.raises(UsageError, match="nothing to compare with"):
        Evaluation(opened.model, tokenizer).fidelity([Pair("a", " b")])
