"""The scorer `prefix` against the batched one, on every family of models: shared, or refused by name."""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext

import pytest
import torch

from prunebench.evaluate import Evaluation, Pair, Passage, Prompt, Sampling
from prunebench.evaluate import sharing as module
from prunebench.evaluate.engine import KEPT
from prunebench.evaluate.sharing import refusal
from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.testing import FAMILIES, random_model

TEXT = "Mara has stones and finds more Noka went to Accra Saka was very sad 11 14 x + 10 return"
WORDS = TEXT.split()
STATES = "not one of keys and values alone"
REFUSED = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe", "granitemoehybrid", "jamba", "nemotron_h", "nemotron_h.latent"), STATES
    ),
    **dict.fromkeys(("bailing_hybrid", "lfm2_moe", "lfm2_moe.no_bias"), STATES),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "deepseek_v4.hash"), STATES),
}


class Bytes:
    """A tokenizer of 94 tokens: a character's code, reduced."""

    bos_token_id, eos_token_id, chat_template = 0, 0, None

    def __call__(self, texts, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[2 + ord(character) % 94 for character in text] for text in texts]}

    def decode(self, tokens, *, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(33 + token) for token in tokens)


def asked(seed=0, count=6):
    """Questions of four choices behind examples that several share."""
    rng = random.Random(seed)

    def words(low, high):
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    shots = [words(4, 8), words(4, 8)]
    contexts = [f"{rng.choice(shots)} {words(1, 4)}" for _ in range(count)]
    return [Pair(context, " " + words(1, 3)) for context in contexts for _ in range(4)]


def both(model, tokenizer, ask, **options):
    """What each scorer says; the second one's evaluation."""
    batched = ask(Evaluation(model, tokenizer, 600, scorer="batched"))
    prefix = Evaluation(model, tokenizer, 600, scorer="prefix", **options)
    return batched, ask(prefix), prefix


def close(batched, shared, tolerance=1e-5):
    for one, other in zip(batched, shared, strict=True):
        assert other.loglikelihood == pytest.approx(one.loglikelihood, abs=tolerance)
        assert other[1:] == one[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_scores_and_writes_the_same_or_is_refused_by_name(family):
    model = random_model(family)
    ask = lambda evaluation: evaluation.loglikelihood(asked())  # noqa: E731
    batched, shared, prefix = both(model, Bytes(), ask)
    if family in REFUSED:
        (reason,) = prefix.fell_back
        assert REFUSED[family] in reason
        assert shared == batched  # to the bit: it is the batched path
        return
    assert not prefix.fell_back
    close(batched, shared)
    prompts = [Prompt(pair.context[: 12 + n], (), 5) for n, pair in enumerate(asked(1, 2))]
    one, other = (Evaluation(model, Bytes(), 200, scorer=scorer).generate(prompts) for scorer in ("batched", "prefix"))
    assert one == other


@pytest.mark.parametrize(("size", "softmax_rows"), [(1, 1), (5, 1024), (64, 3)])
def test_sizes_change_nothing_but_rounding(model, tokenizer, monkeypatch, size, softmax_rows):
    monkeypatch.setattr(module, "PIECE_TOKENS", {"cpu": size})
    monkeypatch.setattr(module, "SOFTMAX_ROWS", softmax_rows)
    close(*both(model, tokenizer, lambda evaluation: evaluation.loglikelihood(asked()))[:2])


def test_what_is_scored_twice_and_texts_without_a_context(model, tokenizer):
    pairs = [Pair("Mara has", " A"), Pair("Mara has", " B"), Pair("Mara has", " A"), Pair("", "Mara"), Pair("Mara", "")]
    close(*both(model, tokenizer, lambda evaluation: evaluation.loglikelihood(pairs[:4]))[:2])
    passages = [Passage("Saka was sad. " * 30, window=24), Passage("Saka was sad.")]
    batched, shared, _ = both(model, tokenizer, lambda evaluation: evaluation.rolling(passages))
    for one, other in zip(batched, shared, strict=True):
        assert other.loglikelihood == pytest.approx(one.loglikelihood, abs=1e-4)
        assert other.tokens == one.tokens
    assert Evaluation(model, tokenizer, scorer="prefix").loglikelihood([]) == []
    assert Evaluation(model, tokenizer, scorer="prefix").generate([]) == []


# --- windows, kernels, and models that do something else


@pytest.mark.parametrize("window", [16, 500])
def test_a_window_that_binds_is_refused_and_one_that_never_does_is_not(window):
    model = random_model("mixtral")
    model.config.sliding_window = window
    batched, shared, prefix = both(model, Bytes(), lambda evaluation: evaluation.loglikelihood(asked()))
    close(batched, shared)
    assert [f"{window} tokens" in reason for reason in prefix.fell_back] == [True] * (window == 16)


def test_attention_that_takes_no_mask_is_refused():
    model = random_model("olmoe")
    model.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in refusal(model, 10, nullcontext)


@pytest.mark.parametrize("deaf", ["attention_mask", "position_ids", "cache"])
def test_a_model_that_ignores_what_it_is_given_is_found_out_on_trial(deaf):
    model = random_model("olmoe")
    kind = type(model)

    class Deaf(kind):
        def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, logits_to_keep=0, **more):
            given = {"attention_mask": attention_mask, "position_ids": position_ids, "cache": cache}
            if deaf == "cache" and attention_mask is not None:
                given["attention_mask"] = attention_mask[..., -input_ids.shape[1] :]
            del given[deaf]
            return super().forward(input_ids, logits_to_keep=logits_to_keep, **given, **more)

    model.__class__ = Deaf
    assert "on trial" in refusal(model, 10, nullcontext)
    evaluation = Evaluation(model, Bytes(), scorer="prefix")
    assert evaluation.loglikelihood(asked())
    assert len(evaluation.fell_back) == 1


@pytest.mark.parametrize("lacking", ["position_ids", "logits_to_keep", "cache"])
def test_a_forward_without_an_argument_is_refused_by_its_name(lacking, monkeypatch):
    model = random_model("olmoe")
    names = module.forward_names(model) - {lacking}
    monkeypatch.setattr(module, "forward_names", lambda _model: names)
    assert f"no {lacking}" in refusal(model, 10, nullcontext)


def test_a_head_that_excludes_tokens_is_none(new_model, tokenizer):
    model = new_model()

    def exclude(_module, _args, output):
        output.logits[..., 7] = -torch.inf
        return output

    model.register_forward_hook(exclude)
    assert refusal(model, 10, nullcontext) is None
    del tokenizer


def test_bfloat16_is_shared_too(tokenizer, new_model):
    model = new_model().to(torch.bfloat16)
    batched, shared, prefix = both(model, tokenizer, lambda evaluation: evaluation.loglikelihood(asked()))
    assert not prefix.fell_back
    for one, other in zip(batched, shared, strict=True):
        assert other.loglikelihood == pytest.approx(one.loglikelihood, abs=0.5)


# --- counters


@contextmanager
def counting(model):
    """A plan that reroutes two experts of each layer: token-layer calls are counted."""
    moe = open_model(model)
    with Instrument(moe, {layer.index: LayerProgram((1, 3)) for layer in moe.layers}) as instrument:
        yield instrument, lambda: {counted.read()["calls"] for counted in instrument.counters.values()}


def test_counters_see_every_token_that_is_computed_once_and_no_trial(new_model, tokenizer):
    model = new_model()
    pairs = asked()
    with counting(model) as (instrument, calls):
        evaluation = Evaluation(model, tokenizer, 10_000, scorer="prefix", dense=instrument.suspended)
        shared = evaluation.loglikelihood(pairs)
        rows, _ = evaluation._rows(pairs)
        distinct = {tuple(row.inputs[:size]) for row in rows for size in range(1, len(row.inputs) + 1)}
        assert calls() == {len(distinct)}
        close(Evaluation(model, tokenizer, scorer="batched").loglikelihood(pairs), shared)


def test_counters_see_every_generated_token_once_whatever_the_batch(new_model, tokenizer):
    model = new_model()
    prompts = [Prompt(pair.context, ("a",), 12, sampling=Sampling(seed=n)) for n, pair in enumerate(asked(2))]
    seen = []
    for batch_tokens in (1, 300, 100_000):
        with counting(model) as (instrument, calls):
            evaluation = Evaluation(model, tokenizer, batch_tokens, scorer="prefix", dense=instrument.suspended)
            generated = evaluation.generate(prompts)
            seen.append(calls())
    inputs = [evaluation._with_bos(tokens) for tokens in evaluation._encode([prompt.text for prompt in prompts])]
    distinct = {tuple(own[:size]) for own in inputs for size in range(1, len(own) + 1)}
    # Of a generation every token is fed but the last: where it ends on an end token, that one.
    fed = sum(one.tokens - (one.finish != "eos") for one in generated)
    assert seen[2] == {len(distinct) + fed}
    assert len(seen[0]) == len(seen[1]) == 1
    assert min(seen[0]) >= min(seen[1]) >= min(seen[2])  # smaller batches read common beginnings more than once


# --- generation


def test_places_are_refilled_and_samples_of_a_prompt_read_it_once(new_model, tokenizer):
    model, shapes = new_model(), []
    model.generation_config.eos_token_id = None
    refusal(model, 10, nullcontext)
    model.register_forward_pre_hook(
        lambda _module, _args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    limits = [3, 9, 3, 3, 3, 9]
    prompts = [
        Prompt(f"Mara has {n // 3}", (), limit, sampling=Sampling(seed=1), sample=n % 3)
        for n, limit in enumerate(limits)
    ]
    evaluation = Evaluation(model, tokenizer, 9, scorer="prefix")
    generated = evaluation.generate(prompts)
    assert [one.tokens for one in generated] == limits
    steps = [rows for rows, width in shapes if width == 1]
    longest = max(len(evaluation._with_bos(own)) for own in evaluation._encode([p.text for p in prompts])) + 9
    assert max(steps) == KEPT * 9 // longest
    assert sum(steps) == sum(limits) - len(limits)  # the first token of each comes with its prompt
    assert len(steps) < sum(limits) - len(limits)
    alone = [Evaluation(model, tokenizer, 1, scorer="batched").generate([prompt])[0] for prompt in prompts]
    assert generated == alone


def test_rows_of_all_lengths_leave_and_join(new_model, tokenizer):
    """Against one prompt at a time, with ends at random places."""
    model = new_model(seed=3)
    rng = random.Random(1)
    prompts = [
        Prompt(" ".join(rng.choices(WORDS, k=rng.randint(1, 20))), ("a", "o"), rng.randint(1, 30)) for _ in range(40)
    ]
    alone = [Evaluation(model, tokenizer, 1, scorer="batched").generate([prompt])[0] for prompt in prompts]
    for batch_tokens in (1, 150, 400, 100_000):
        assert Evaluation(model, tokenizer, batch_tokens, scorer="prefix").generate(prompts) == alone
    assert {one.finish for one in alone} >= {"stop", "length"}
