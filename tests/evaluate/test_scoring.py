"""Log-likelihoods against float64 sums of one plain forward per request, and against lm-eval's own HFLM."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from prunebench.errors import UsageError
from prunebench.evaluate import Evaluation, Pair, Passage, Prompt, bos_policy

TEXT = "Mara has stones and finds more Noka went to Accra Saka was very sad 11 14 x + 10 naïve 東京 def return"
WORDS = TEXT.split()


def some_text(rng, low, high):
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def some_pairs(count=40, seed=0):
    rng = random.Random(seed)
    return [Pair(some_text(rng, 0, 14), " " + some_text(rng, 1, 4), f"pair {n}") for n in range(count)]


def direct(model, tokens, scored_from):
    """float64 log-probabilities of tokens[scored_from:], from one unbatched forward without a mask."""
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([tokens])).logits[0].double()
    logprob_TV = torch.log_softmax(logits_TV, -1)
    targets = tokens[scored_from:]
    rows = logprob_TV[scored_from - 1 : -1]
    greedy = rows.argmax(-1).tolist() == targets
    return float(rows[range(len(targets)), targets].sum()), greedy


@pytest.mark.parametrize("batch_tokens", [1, 150, 100_000])
def test_loglikelihoods_equal_an_unbatched_float64_computation(any_model, tokenizer, batch_tokens, scorer):
    pairs = some_pairs()
    scores = Evaluation(any_model, tokenizer, batch_tokens, scorer=scorer).loglikelihood(pairs)
    for pair, score in zip(pairs, scores, strict=True):
        context = tokenizer.encode(pair.context) if pair.context else []
        whole = tokenizer.encode(pair.context + pair.continuation)
        expected, greedy = direct(any_model, [0, *whole], 1 + len(context))
        assert score.loglikelihood == pytest.approx(expected, abs=5e-5)
        assert (score.is_greedy, score.tokens) == (greedy, len(whole) - len(context))


def test_a_greedy_continuation_is_flagged_and_only_that(model, tokenizer, scorer):
    evaluation = Evaluation(model, tokenizer, scorer=scorer)
    contexts = [f"Mara has {n} stones" for n in range(12)]
    produced = evaluation.generate([Prompt(context, (), 3) for context in contexts])
    pairs = [Pair(c, g.text) for c, g in zip(contexts, produced, strict=True)]
    retokenised = [
        tokenizer.encode(c + g.text)[len(tokenizer.encode(c)) :] == tokenizer.encode(g.text) and g.tokens == 3
        for c, g in zip(contexts, produced, strict=True)
    ]
    kept = [pair for pair, same in zip(pairs, retokenised, strict=True) if same]
    flags = [score.is_greedy for score in evaluation.loglikelihood(kept) if score.tokens == 3]
    assert flags
    assert all(flags)


def hflm(model, tokenizer, length=128):
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=1,
        max_length=length,
        softmax_dtype="float32",
        add_bos_token=True,
    )


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_lm_evals_hflm_gives_the_same_loglikelihoods_and_choices(new_model, tokenizer_adding_bos, family, scorer):
    from lm_eval.api.instance import Instance

    model, rng = new_model(family, seed=2), random.Random(3)
    contexts = [some_text(rng, 3, 12) for _ in range(15)]
    pairs = [Pair(context, " " + some_text(rng, 1, 4)) for context in contexts for _ in range(4)]
    requests = [Instance("loglikelihood", {}, (pair.context, pair.continuation), 0) for pair in pairs]
    theirs = hflm(model, tokenizer_adding_bos).loglikelihood(requests, disable_tqdm=True)
    ours = Evaluation(model, tokenizer_adding_bos, 300, scorer=scorer).loglikelihood(pairs)
    their_ll, our_ll = np.array([ll for ll, _ in theirs]), np.array([score.loglikelihood for score in ours])
    assert np.abs(their_ll - our_ll).max() < 1e-4
    assert [greedy for _, greedy in theirs] == [score.is_greedy for score in ours]
    characters = np.array([len(pair.continuation) for pair in pairs])
    for scale in (np.ones(len(pairs)), characters):  # acc and acc_norm
        decisions = [(ll / scale).reshape(-1, 4).argmax(1).tolist() for ll in (their_ll, our_ll)]
        assert decisions[0] == decisions[1]


@pytest.mark.parametrize("length", [16, 128])
def test_rolling_equals_a_direct_computation_and_lm_evals(new_model, tokenizer, length, scorer):
    from lm_eval.api.instance import Instance

    model, rng = new_model(length=length), random.Random(4)
    texts = [some_text(rng, 1, 20) for _ in range(8)]
    ours = Evaluation(model, tokenizer, 200, scorer=scorer).rolling([Passage(text) for text in texts])
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    theirs = hflm(model, tokenizer, length).loglikelihood_rolling(requests, disable_tqdm=True)
    for text, our, their in zip(texts, ours, theirs, strict=True):
        tokens = [0, *tokenizer.encode(text)]
        assert our.tokens == len(tokens) - 1
        assert our.loglikelihood == pytest.approx(their, abs=1e-4)
        if len(tokens) - 1 <= length:
            assert our.loglikelihood == pytest.approx(direct(model, tokens, 1)[0], abs=1e-4)
        else:  # the first window, then windows of the last `length` tokens before each block
            first = direct(model, tokens[: length + 1], 1)[0]
            rest = 0.0
            for end in range(2 * length, len(tokens) - 1 + length, length):
                end_token = min(end, len(tokens) - 1)
                scored = end_token - (end - length)
                window = tokens[end_token - length : end_token + 1]
                rest += direct(model, window, len(window) - scored)[0]
            assert our.loglikelihood == pytest.approx(first + rest, abs=1e-4)


def test_exactly_one_bos_whether_the_tokenizer_adds_one_or_not(model, tokenizer, tokenizer_adding_bos, scorer):
    pairs = some_pairs(10)
    assert tokenizer_adding_bos.encode("Mara")[0] == 0
    one, other = (
        Evaluation(model, each, scorer=scorer).loglikelihood(pairs) for each in (tokenizer, tokenizer_adding_bos)
    )
    assert one == other
    assert bos_policy(tokenizer) == bos_policy(tokenizer_adding_bos) == "one bos (id 0) before every text"


def test_spaces_that_end_a_context_belong_to_the_continuation(model, tokenizer, scorer):
    evaluation = Evaluation(model, tokenizer, scorer=scorer)
    moved, plain = evaluation.loglikelihood([Pair("Mara has ", "stones"), Pair("Mara has", " stones")])
    assert moved == plain


def test_a_token_that_spans_context_and_continuation_is_scored_apart(model, tokenizer, scorer):
    context, continuation = next(
        (word[:cut], word[cut:])
        for word in (" stones", "Question", " return", "Answer")
        for cut in range(2, len(word))
        if len(tokenizer.encode(word)) <= len(tokenizer.encode(word[:cut]))
    )
    (score,) = Evaluation(model, tokenizer, scorer=scorer).loglikelihood([Pair(context, continuation)])
    tokens = [0, *tokenizer.encode(context), *tokenizer.encode(continuation)]
    assert score.loglikelihood == pytest.approx(direct(model, tokens, len(tokens) - score.tokens)[0], abs=5e-5)


def test_two_evaluations_are_equal_to_the_last_bit(model, tokenizer, scorer):
    pairs = some_pairs()
    assert Evaluation(model, tokenizer, 200, scorer=scorer).loglikelihood(pairs) == Evaluation(
        model, tokenizer, 200, scorer=scorer
    ).loglikelihood(pairs)


def test_what_does_not_fit_is_an_error_that_names_the_item(new_model, tokenizer, scorer):
    evaluation = Evaluation(new_model(length=16), tokenizer, scorer=scorer)
    long = "stones " * 30
    with pytest.raises(UsageError, match=r"item 7.*1 to 16 tokens"):
        evaluation.loglikelihood([Pair("short", " one"), Pair(long, " x", "item 7")])
    with pytest.raises(UsageError, match=r"item 8.*1 to 16 tokens"):
        evaluation.generate([Prompt(long, (), 4, "item 8")])
    with pytest.raises(UsageError, match=r"empty.*item 9"):
        evaluation.rolling([Passage("", "item 9")])
    with pytest.raises(UsageError, match=r"no tokens.*item 10"):
        evaluation.loglikelihood([Pair("short", "", "item 10")])


def test_padding_is_right_masked_and_without_influence(model, tokenizer):
    seen = []

    def watch(_module, _args, kwargs):
        seen.append((kwargs["input_ids"], kwargs["attention_mask"]))

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        Evaluation(model, tokenizer, 10_000).loglikelihood(some_pairs(9))
    finally:
        handle.remove()
    ((ids_BT, mask_BT),) = seen
    lengths_B = mask_BT.sum(-1)
    assert (mask_BT == (torch.arange(ids_BT.shape[1]) < lengths_B[:, None])).all()
    assert lengths_B.min() < lengths_B.max()


def test_no_answer_carries_a_gradient_and_a_training_model_is_refused(new_model, tokenizer):
    model = new_model().train()
    with pytest.raises(UsageError, match="training mode"):
        Evaluation(model, tokenizer)
    model.eval()
    Evaluation(model, tokenizer).loglikelihood(some_pairs(2))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("wrong", [{"batch_tokens": 0}, {"limit": 0}])
def test_an_impossible_setting_is_refused(model, tokenizer, wrong):
    with pytest.raises(UsageError, match="impossible"):
        dataclasses.replace(Evaluation(model, tokenizer), **wrong)


def test_progress_counts_up_to_all_requests(model, tokenizer, scorer):
    told = []
    Evaluation(model, tokenizer, 100, progress=lambda *what: told.append(what), scorer=scorer).loglikelihood(
        some_pairs(20)
    )
    assert told[-1] == ("score", 20, 20)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_bfloat16_logits_are_scored_in_float32(new_model, tokenizer):
    model, seen = new_model().to(torch.bfloat16), []
    model.register_forward_hook(lambda _module, _args, output: seen.append(output.logits))
    for pair in some_pairs(20):
        (score,) = Evaluation(model, tokenizer).loglikelihood([pair])
        targets = tokenizer.encode(pair.context + pair.continuation)[-score.tokens :]
        assert seen[-1].dtype == torch.bfloat16
        logprob_TV = torch.log_softmax(seen[-1][0, -len(targets) :].double(), -1)
        assert score.loglikelihood == pytest.approx(float(logprob_TV[range(len(targets)), targets].sum()), abs=1e-5)
