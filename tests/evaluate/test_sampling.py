"""Drawing tokens: transformers' warpers, seeds that know nothing of batches, and logits that are no numbers."""

from __future__ import annotations

import collections
import random

import pytest
import torch

from prunebench.errors import UsageError
from prunebench.evaluate import Evaluation, Prompt, Sampling
from prunebench.evaluate.decoding import draw, prompt_of

TEXT = "Mara has stones and finds more Noka went to Accra Saka was sad 11 14 x + 10 def return"
WORDS = TEXT.split()


def some_prompts(sampling, count=10, **more):
    rng = random.Random(5)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 14))) for _ in range(count)]
    return [Prompt(text, (), 8, f"prompt {n}", sampling, **more) for n, text in enumerate(texts)]


def warped(logits_V, sampling):
    """The distribution that transformers' own warpers leave."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers(None, logits_V.double()[None])[0].softmax(-1)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(top_k=3),
        Sampling(top_p=0.6),
        Sampling(temperature=1.4, top_p=0.8, top_k=5),
        Sampling(top_p=0.01),
        Sampling(top_k=100),
    ],
)
def test_each_token_is_drawn_exactly_as_often_as_transformers_warpers_would_have_it(sampling):
    torch.manual_seed(0)
    logits_V = torch.randn(12) * 2
    logits_V[4] = -torch.inf
    steps = 4_000
    counts = collections.Counter(draw(logits_V, sampling, (step + 0.5) / steps) for step in range(steps))
    expected_V = warped(logits_V, sampling)
    for token, probability in enumerate(expected_V.tolist()):
        assert counts[token] / steps == pytest.approx(probability, abs=2 / steps)
    assert draw(logits_V, sampling, 0.0) == int(logits_V.argmax())
    for uniform in (1 - 2**-53, 1 - 2**-64):  # the second is 1.0
        assert expected_V[draw(logits_V, sampling, uniform)] > 0


def test_draws_do_not_depend_on_batches_and_do_on_seed_prompt_and_sample(model, tokenizer):
    def texts(tokens, prompts):
        return [generation.text for generation in Evaluation(model, tokenizer, tokens).generate(prompts)]

    prompts = some_prompts(Sampling(seed=3))
    one = texts(1, prompts)
    assert one == texts(150, prompts) == texts(100_000, prompts)
    assert one != texts(150, some_prompts(Sampling(seed=4)))
    assert one != texts(150, some_prompts(Sampling(seed=3), sample=1))
    assert one[::-1] == texts(150, prompts[::-1])
    assert len(set(texts(150, [prompts[0]._replace(sample=n) for n in range(8)]))) > 4


def test_the_likeliest_token_alone_is_greedy_and_greedy_prompts_may_stand_beside(model, tokenizer):
    greedy = [g.text for g in Evaluation(model, tokenizer, 200).generate(some_prompts(None))]
    assert [g.text for g in Evaluation(model, tokenizer, 200).generate(some_prompts(Sampling(top_k=1)))] == greedy
    mixed = [p for pair in zip(some_prompts(None), some_prompts(Sampling(seed=9)), strict=True) for p in pair]
    assert [g.text for g in Evaluation(model, tokenizer, 200).generate(mixed)][::2] == greedy


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        ({"do_sample": False, "temperature": 0.0}, None),
        ({"temperature": 0.7}, Sampling(temperature=0.7)),
        ({"do_sample": True}, Sampling()),
        ({"do_sample": True, "temperature": 0.0, "top_k": 4}, Sampling(top_k=4)),
        ({"do_sample": True, "top_p": 0.9, "seed": 5}, Sampling(top_p=0.9, seed=5)),
    ],
)
def test_a_tasks_own_settings_of_sampling(settings, sampling):
    assert prompt_of("Mara", settings, "item").sampling == sampling


def test_sampling_as_typed():
    text = "temperature=0.7,top_p=0.95, top_k=20,n=16,seed=2"
    assert Sampling.parse(text) == Sampling(0.7, 0.95, 20, 16, 2)
    assert Sampling.parse("n=4") == Sampling(n=4)
    assert Sampling(**Sampling.parse(text).to_json()) == Sampling.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "n", "n=x", "n=1,n=2", "heat=1", "temperature=0", "temperature=nan", "temperature=inf"),
        *("top_p=0", "top_p=1.1", "top_k=-1", "n=0", "seed=-1"),
    ],
)
def test_impossible_sampling_is_one_clear_line(text):
    with pytest.raises(UsageError) as caught:
        Sampling.parse(text)
    assert "\n" not in str(caught.value)


# --- logits that are no numbers


def poisoned(model, value, only_after=0):
    """A hook that turns one logit of every row with more than so many tokens into `value`."""
    seen = []

    def hook(_module, _args, output):
        seen.append(1)
        if len(seen) > only_after:
            output.logits[..., 7] = value
        return output

    return model.register_forward_hook(hook)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [None, Sampling()])
def test_a_generation_with_nan_or_infinite_logits_ends_as_invalid(new_model, tokenizer, value, sampling):
    model = new_model()
    model.generation_config.eos_token_id = None
    plain = Evaluation(model, tokenizer).generate(some_prompts(sampling, 3))
    poisoned(model, value, only_after=3)
    results = Evaluation(model, tokenizer).generate(some_prompts(sampling, 3))
    assert {result.finish for result in results} == {"invalid"}
    for result, whole in zip(results, plain, strict=True):
        assert result.tokens == 3
        assert whole.text.startswith(result.text.rstrip("\ufffd"))


def test_an_impossible_token_is_no_fault(new_model, tokenizer):
    model = new_model()
    poisoned(model, float("-inf"))
    assert {g.finish for g in Evaluation(model, tokenizer).generate(some_prompts(None, 4))} <= {"eos", "length"}
