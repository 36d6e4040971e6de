"""Sampled generations against the definitions of 2609.30465 App. E.5 and E.6, in plain loops."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunebench.analysis.bootstrap import item_counts, sampled
from prunebench.analysis.generations import (
    Completion,
    distinct,
    fenced,
    jaccard_distance,
    loop_share,
    loops,
    median,
    question_mean,
    questions_of,
    rate,
    relative_change,
    stray_delimiter,
)
from prunebench.errors import UsageError
from prunebench.record import Item, content_hash, items_to_table

token_lists = st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=15), min_size=2, max_size=6)
KEY = {"suite": "s", "task": "t"}


def completions(*tokens, finish="eos"):
    return [Completion(tuple(own), finish) for own in tokens]


@given(token_lists, st.integers(2, 4))
def test_distinct_pools_the_samples_of_a_question_and_crosses_none(tokens, n):
    seen, total = set(), 0
    for own in tokens:
        for at in range(len(own)):
            if at + n <= len(own):
                seen.add("-".join(map(str, own[at : at + n])))
                total += 1
    assert distinct(completions(*tokens), n) == pytest.approx(len(seen) / total)


@given(token_lists)
def test_jaccard_distance_is_over_all_pairs(tokens):
    sets = [{tuple(own[at : at + 4]) for at in range(len(own) - 3)} for own in tokens]
    expected = [1 - len(a & b) / len(a | b) for a, b in combinations(sets, 2)]
    assert jaccard_distance(completions(*tokens)) == pytest.approx(sum(expected) / len(expected))
    assert len(expected) == len(tokens) * (len(tokens) - 1) // 2


def test_sixteen_samples_have_120_pairs():
    samples = completions(*([at, at, at, at] for at in range(16)))
    assert jaccard_distance(samples) == 1.0
    assert len(list(combinations(samples, 2))) == 120


def test_examples_by_hand():
    same = completions([1, 2, 3, 4], [1, 2, 3, 4])
    assert distinct(same, 2) == 3 / 6
    assert jaccard_distance(same) == 0.0
    assert jaccard_distance(completions([1], [2])) == 0.0, "no 4-gram in either"
    with pytest.raises(UsageError, match="no sample has 4 tokens"):
        distinct(completions([1, 2, 3]), 4)
    with pytest.raises(UsageError, match="at least two to compare"):
        jaccard_distance(completions([1, 2, 3, 4]))


def test_a_prefix_controls_length():
    long = Completion(tuple(range(200)), "length", "text")
    assert long.prefix(128).tokens == tuple(range(128))
    assert long.prefix(128).limited


def test_a_loop_has_fewer_than_a_quarter_of_its_4_grams_different():
    assert loops(Completion((1, 2) * 40, "length"))
    assert not loops(Completion(tuple(range(80)), "length"))
    assert not loops(Completion((1, 2, 3), "length"))
    # 4 of 16 4-grams are different: exactly a quarter is no loop; 4 of 17 is one.
    assert not loops(Completion((1, 2, 3, 4) * 4 + (1, 2, 3), "length"))
    assert loops(Completion((1, 2, 3, 4) * 5, "length"))


def test_forms_of_a_response():
    assert stray_delimiter(Completion((), "eos", "a </think> b </think>"))
    assert not stray_delimiter(Completion((), "eos", "a <think> b"))
    assert fenced(Completion((), "eos", "so:\n```python\nx\n```"))
    assert not fenced(Completion((), "eos", "use ``` inline"))


@pytest.fixture(scope="module")
def questions():
    rng = np.random.default_rng(0)
    return [
        [
            Completion(
                tuple(rng.integers(0, int(rng.choice([1, 2, 30])), int(rng.integers(5, 40))).tolist()),
                "length" if rng.random() < 0.4 else "eos",
            )
            for _ in range(int(rng.integers(2, 6)))
        ]
        for _ in range(25)
    ]


def resampled(questions, resamples=60):
    """The questions of every resample."""
    counts = np.concatenate(list(item_counts(np.arange(len(questions)), resamples=resamples, **KEY)))
    return [[own for own, times in zip(questions, row, strict=True) for _ in range(times)] for row in counts]


def test_rates_medians_and_loop_shares_resample_questions(questions):
    how = {"resamples": 60, **KEY}
    limited = rate(questions, lambda one: one.limited, **how)
    middle = median(questions, lambda one: len(one.tokens), **how)
    looping = loop_share(questions, **how)
    assert looping.value > 0
    for b, drawn in enumerate([questions, *resampled(questions)]):
        flat = [one for own in drawn for one in own]
        capped = [loops(one) for one in flat if one.limited]
        expected = (
            np.mean([one.limited for one in flat]),
            np.median([len(one.tokens) for one in flat]),
            np.mean(capped),
        )
        found = [one.value if b == 0 else one.draws_B[b - 1] for one in (limited, middle, looping)]
        assert found == pytest.approx(expected)
    assert limited.n == sum(map(len, questions))


def test_no_completion_at_the_limit_has_no_loop_share():
    with pytest.raises(UsageError, match="no completion ended at the length limit"):
        loop_share([completions([1, 2, 3, 4, 5])])


def test_diversity_is_averaged_over_questions_and_compared_in_pairs(questions):
    other = [[Completion(one.tokens[: len(one.tokens) // 2 + 4], one.finish) for one in own] for own in questions]
    how = {"resamples": 60, **KEY}
    ours, theirs = (question_mean(q, lambda own: distinct(own, 2), **how) for q in (other, questions))
    change = relative_change(ours, theirs)
    assert ours.value == pytest.approx(np.mean([distinct(own, 2) for own in other]))
    assert change.value == pytest.approx(100 * (ours.value / theirs.value - 1))
    for b, (own, reference) in enumerate(zip(resampled(other), resampled(questions), strict=True)):
        means = [np.mean([distinct(one, 2) for one in group]) for group in (own, reference)]
        assert change.draws_B[b] == pytest.approx(100 * (means[0] / means[1] - 1))


def test_generations_are_read_from_items_by_document():
    rows = items_to_table(
        Item(
            *("s", "t", "none", f"q{n // 3}#{n % 3}"),
            *(content_hash(f"d{n // 3}"), 1, "pass@1", 1.0),
            detail=json.dumps({"text": f"a b c {n}", "finish": "length" if n == 4 else "eos", "tokens": 4}),
        )
        for n in range(6)
    )
    questions = questions_of(rows, str.split)
    assert sorted(len(own) for own in questions) == [3, 3]
    assert sorted(one.tokens[-1] for own in questions for one in own) == list("012345")
    assert sum(one.limited for own in questions for one in own) == 1
    bad = items_to_table([Item("s", "t", "none", "q", 1, 1, "acc", 1.0, detail='{"text": "x"}')])
    with pytest.raises(UsageError, match=r"item q.*expected text and finish"):
        questions_of(bad, str.split)


def test_samples_of_a_problem_stay_together_in_a_score():
    """pass@1 over five samples of each problem: the interval is that of the problems' shares."""
    rng = np.random.default_rng(1)
    right = rng.random((30, 5)) < rng.random((30, 1))
    together = sampled(right.ravel(), clusters=np.repeat(np.arange(30), 5), **KEY)
    assert together.draws_B == pytest.approx(sampled(right.mean(axis=1), **KEY).draws_B)
