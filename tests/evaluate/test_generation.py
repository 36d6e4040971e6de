"""Greedy generation against transformers' own, at every batch size."""

from __future__ import annotations

import random

import pytest
import torch

from prunebench.evaluate import Evaluation, Generation, Prompt
from prunebench.evaluate.decoding import Decoding, prompt_of

TEXT = "Mara has stones and finds more Noka went to Accra Saka was sad 11 14 x + 10 def return"
WORDS = TEXT.split()


def some_prompts(until=(), limit=12, count=24):
    rng = random.Random(5)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 14))) for _ in range(count)]
    return [Prompt(text, tuple(until), limit, f"prompt {n}") for n, text in enumerate(texts)]


def by_transformers(model, tokenizer, prompt):
    inputs = torch.tensor([[0, *tokenizer.encode(prompt.text)]])
    output = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=prompt.max_tokens,
        pad_token_id=1,
    )
    return tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)


def cut(text, stops):
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


@pytest.mark.parametrize("batch_tokens", [1, 120, 100_000])
def test_text_equals_transformers_generate_cut_at_the_earliest_stop(any_model, tokenizer, batch_tokens, scorer):
    prompts = some_prompts(count=8)
    full = [by_transformers(any_model, tokenizer, prompt) for prompt in prompts]
    # Stop strings that really occur, inside and across tokens; no unfinished character, which more tokens may finish.
    candidates = {text[at : at + size] for text in full[:5] for at, size in ((4, 2), (7, 1))}
    stops = tuple(sorted(stop for stop in candidates if stop and "\ufffd" not in stop))[:4]
    prompts = [prompt._replace(until=stops) for prompt in prompts]
    results = Evaluation(any_model, tokenizer, batch_tokens, scorer=scorer).generate(prompts)
    assert [result.text for result in results] == [cut(text, stops) for text in full]
    for result, text in zip(results, full, strict=True):
        assert (result.finish == "stop") == any(stop in text for stop in stops)


def test_batch_size_one_and_many_give_the_same_text_in_float32(any_model, tokenizer, scorer):
    prompts = some_prompts(until=("a",), limit=24)
    one, some, all_at_once = (
        Evaluation(any_model, tokenizer, size, scorer=scorer).generate(prompts) for size in (1, 200, 100_000)
    )
    assert one == some == all_at_once
    assert len({result.finish for result in one}) > 1


def test_batches_do_not_depend_on_the_answers(new_model, tokenizer):
    """Shapes of all forward passes of two different models, without stops before the limit."""
    shapes = []
    for seed in (0, 1):
        seen, model = [], new_model(seed=seed)
        model.generation_config.eos_token_id = None
        model.register_forward_pre_hook(
            lambda _module, _args, kwargs, seen=seen: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        Evaluation(model, tokenizer, 120).generate(some_prompts(limit=3))
        shapes.append(seen)
    assert shapes[0] == shapes[1]
    assert len({rows for rows, _ in shapes[0]}) > 1


def test_the_end_token_ends_a_text_and_is_no_part_of_it(new_model, tokenizer, scorer):
    model = new_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all logits equal: argmax takes id 0, the end token
    assert Evaluation(model, tokenizer, scorer=scorer).generate(some_prompts(count=2)) == [Generation("", "eos", 0)] * 2


def test_generation_uses_the_models_whole_length_and_no_more(new_model, tokenizer, scorer):
    model = new_model(length=16)
    model.generation_config.eos_token_id = 399
    prompt = Prompt("Mara has stones", (), 50)
    (result,) = Evaluation(model, tokenizer, scorer=scorer).generate([prompt])
    used = 1 + len(tokenizer.encode(prompt.text))
    if result.finish == "length":
        assert result.tokens == 16 - used + 1
    else:
        assert result.tokens < 16 - used + 1


class Pieces:
    """A tokenizer whose token n is the text pieces[n]; a special token if that is in angle brackets."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, tokens, *, skip_special_tokens):
        pieces = [self.pieces[token] for token in tokens]
        return "".join(piece for piece in pieces if not (skip_special_tokens and piece.startswith("<")))


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "finish"),
    [
        (["ab", "c", "[DO", "NE] x", "y"], ("[DONE]",), "abc", "stop"),
        (["ab", "c\n\nd", "[DONE]"], ("[DONE]", "\n\n"), "abc", "stop"),
        (["a", "bbQ", "b"], ("Q", "bb"), "a", "stop"),  # two in one token: the earlier in the text wins
        (["Q", "a"], ("Q",), "", "stop"),
        (["a", "b"], ("Q",), "ab", "length"),
        (["a", "b"], (), "ab", "length"),
        # A special token is no text, but ends one if it spells a stop string.
        (["#### 42", "<|im_end|>", " then 7"], ("</s>", "<|im_end|>"), "#### 42", "stop"),
        (["a", "\n", "<|im_end|>", "b"], ("\n<|im_end|>",), "a\n", "stop"),  # the text is lm-eval's
        (["<|im_end|>", "b"], ("<|im_end|>",), "", "stop"),
        (["a", "<|x|>", "b", "Q"], ("<|im_end|>", "Q"), "ab", "stop"),
        (["Que", "<|x|>", "stion:", "b"], ("Question:",), "", "stop"),
        (["a", "<|x|>", "b"], ("Q",), "ab", "length"),
    ],
)
def test_the_earliest_stop_string_by_text_ends_it(pieces, stops, text, finish):
    decoding = Decoding(Pieces(*pieces), [0], stops, len(pieces), frozenset())
    for token in range(len(pieces)):
        decoding.push(token)
    assert decoding.result()[:2] == (text, finish)


@pytest.mark.parametrize(
    ("settings", "until", "limit"),
    [
        ({"until": ["a", "b"], "max_gen_toks": 5, "do_sample": False, "temperature": 0.0}, ("a", "b"), 5),
        ({"until": "a"}, ("a",), 256),
        ({"until": []}, (), 256),
        ({"until": None}, (), 256),
        ({"until": [""]}, ("",), 256),
    ],
)
def test_lm_evals_generation_settings_are_understood(model, tokenizer, settings, until, limit, *, scorer):
    prompt = prompt_of("Mara", settings, "item")
    assert prompt == Prompt("Mara", until, limit, "item")
    (result,) = Evaluation(model, tokenizer, scorer=scorer).generate([prompt._replace(max_tokens=2)])
    assert result.tokens <= 2
