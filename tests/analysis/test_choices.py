"""Answer bias against ability: scikit-learn's AUC, plain loops, and simulated margins (2610.41366 App. A.10)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from prunebench.analysis.bootstrap import item_counts
from prunebench.analysis.choices import (
    Choices,
    Flips,
    accuracy,
    area,
    best_threshold,
    bias_corrected,
    choices_of,
    flips,
    has_fixed_answers,
    predicted_shares,
    prior_matched,
)
from prunebench.errors import UsageError
from prunebench.record import Item, content_hash, items_to_table

B = 200
STATISTICS = (accuracy, area, prior_matched, best_threshold)


def task(scores, gold, *, name="boolq", sizes=(), clusters=None):
    gold = np.asarray(gold)
    labels = np.arange(len(gold)) if clusters is None else np.asarray(clusters)
    return Choices(tuple(tuple(map(float, own)) for own in scores), gold, sizes, labels, "s", name)


def margins(values, gold, **more):
    return task([(0.0, value) for value in values], gold, **more)


def skilled(n=400, *, seed=0, prior=0.6, distance=1.5):
    """Margins of a model that ranks well, and the right answers."""
    rng = np.random.default_rng(seed)
    gold = (rng.random(n) < prior).astype(int)
    return rng.normal(distance * (gold - 0.5), 1.0), gold


pairs = st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 1)), min_size=2, max_size=25)


def by_pairs(values, gold):
    """AUC as the share of (positive, negative) pairs that are in order, ties half."""
    found = [
        (a > b) + 0.5 * (a == b)
        for a, g in zip(values, gold, strict=True)
        for b, h in zip(values, gold, strict=True)
        if g == 1 and h == 0
    ]
    return sum(found) / len(found)


def by_thresholds(values, gold):
    """Best accuracy over every threshold."""
    cuts = [-1e9, *sorted(set(values)), 1e9]
    return max(np.mean([(v > cut) == (g == 1) for v, g in zip(values, gold, strict=True)]) for cut in cuts)


def by_matching(values, gold):
    """Expected accuracy with as many of the smallest margins called negative as are negative, ties in random order."""
    negatives = sum(g == 0 for g in gold)
    total = 0.0
    for v, g in zip(values, gold, strict=True):
        below, equal = sum(w < v for w in values), sum(w == v for w in values)
        share = min(1.0, max(0.0, (negatives - below) / equal))
        total += share if g == 0 else 1 - share
    return total / len(gold)


@given(pairs)
def test_each_statistic_is_its_definition(items):
    values, gold = zip(*items, strict=True)
    own = margins(values, gold)
    assert prior_matched(own, resamples=1).value == pytest.approx(by_matching(values, gold))
    assert best_threshold(own, resamples=1).value == pytest.approx(by_thresholds(values, gold))
    assert accuracy(own, resamples=1).value == pytest.approx(np.mean([(v > 0) == (g == 1) for v, g in items]))
    assume(len(set(gold)) == 2)
    assert area(own, resamples=1).value == pytest.approx(by_pairs(values, gold))
    assert area(own, resamples=1).value == pytest.approx(roc_auc_score(gold, values))


@settings(max_examples=10)
@given(pairs, st.booleans())
def test_every_resample_is_the_statistic_of_its_items(items, clustered):
    values, gold = map(np.array, zip(*items, strict=True))
    assume(len(set(gold.tolist())) == 2)
    clusters = np.arange(len(gold)) // 2 if clustered else np.arange(len(gold))
    own = margins(values, gold, clusters=clusters)
    counts = np.concatenate(list(item_counts(clusters, suite="s", task="boolq", resamples=25)))
    found = {one: one(own, resamples=25).draws_B for one in STATISTICS}
    for b, row in enumerate(counts):
        v, g = (np.repeat(x, row).tolist() for x in (values, gold))
        assert found[prior_matched][b] == pytest.approx(by_matching(v, g))
        assert found[best_threshold][b] == pytest.approx(by_thresholds(v, g))
        assert found[accuracy][b] == pytest.approx(np.mean([(x > 0) == (y == 1) for x, y in zip(v, g, strict=True)]))
        assert found[area][b] == pytest.approx(roc_auc_score(g, v) if len(set(g)) == 2 else 0.5)


def test_a_pure_shift_leaves_the_area_and_prior_matching_closes_the_gap():
    values, gold = skilled()
    before, after = margins(values, gold), margins(values - 1.7, gold)
    assert accuracy(after, resamples=1).value < accuracy(before, resamples=1).value - 0.1
    for statistic in (area, prior_matched, best_threshold):
        shifted, plain = (statistic(one, resamples=B) for one in (after, before))
        assert shifted.value == plain.value
        assert shifted.draws_B.tolist() == plain.draws_B.tolist()
    changed = flips(after, before)
    assert (changed.total, changed.net, changed.to_second) == (changed.to_first, changed.to_first, 0)


def test_a_shift_and_a_reordering_lower_the_area_and_leave_a_gap():
    values, gold = skilled()
    noise = np.random.default_rng(1).normal(0, 2.0, len(gold))
    before, after = margins(values, gold), margins(values - 1.7 + noise, gold)
    change, gap = (
        statistic(after, resamples=1000).minus(statistic(before, resamples=1000)).interval()
        for statistic in (area, prior_matched)
    )
    assert change.high < 0
    assert gap.high < 0
    assert flips(after, before).to_second > 0


def test_a_gap_that_was_a_shift_and_one_that_was_not_are_told_apart():
    """Accuracies fall by as much; only one of them is a loss of ranking."""
    values, gold = skilled(2000)
    rng = np.random.default_rng(2)
    own = (values, values - 1.0, values + rng.normal(0, 1.6, len(gold)))
    scored = [[one(margins(v, gold), resamples=1).value for one in (accuracy, area)] for v in own]
    base, shift, noise = scored
    assert shift[0] == pytest.approx(noise[0], abs=0.05)
    assert shift[0] < base[0] - 0.05
    assert shift[1] == base[1] > noise[1] + 0.05


def test_intervals_of_the_area_cover_the_truth():
    """Normal margins one and a half apart: the true area is Φ(1.5 / √2)."""
    from scipy.stats import norm

    truth = norm.cdf(1.5 / np.sqrt(2))
    intervals = [area(margins(*skilled(150, seed=seed)), resamples=500).interval() for seed in range(300)]
    hits = np.mean([i.low <= truth <= i.high for i in intervals])
    assert 0.95 - 3 * np.sqrt(0.95 * 0.05 / 300) - 0.01 <= hits <= 0.95 + 3 * np.sqrt(0.95 * 0.05 / 300)


def test_letter_bias_is_taken_away_by_plain_means():
    rng = np.random.default_rng(3)
    gold = rng.integers(0, 4, 300)
    honest = rng.normal(0, 1, (300, 4))
    honest[np.arange(300), gold] += 1.0
    biased = task(honest + np.array([4.0, 0.0, -1.0, 0.5]), gold, name="mmlu")
    columns = [np.mean(column) for column in zip(*biased.loglikelihoods, strict=True)]
    corrected = [[score - mean for score, mean in zip(row, columns, strict=True)] for row in biased.loglikelihoods]
    expected = np.mean([int(np.argmax(row)) == g for row, g in zip(corrected, gold, strict=True)])
    found = bias_corrected(biased, resamples=B)
    assert found.value == expected > accuracy(biased, resamples=B).value + 0.1
    counts = np.concatenate(list(item_counts(np.arange(300), suite="s", task="mmlu", resamples=B)))
    scores = np.array(biased.loglikelihoods)
    for b in range(0, B, 40):
        own, right = np.repeat(scores, counts[b], axis=0), np.repeat(gold, counts[b])
        assert found.draws_B[b] == pytest.approx(np.mean((own - own.mean(axis=0)).argmax(axis=1) == right))
    assert predicted_shares(biased)[0] > 0.8
    assert predicted_shares(biased).sum() == pytest.approx(1)


def test_a_bias_that_is_the_same_for_all_answers_of_an_item_is_none():
    rng = np.random.default_rng(4)
    gold, scores = rng.integers(0, 4, 50), rng.normal(0, 1, (50, 4))
    lifted = scores + rng.normal(0, 5, (50, 1))
    assert accuracy(task(lifted, gold), resamples=1).value == accuracy(task(scores, gold), resamples=1).value


def test_the_flips_of_moonlight_on_boolq():
    """App. A.10: 858 items flip, 466 more "no" on net, and 196 the other way."""
    no, yes = -1.0, 1.0
    before = [yes] * 662 + [no] * 196 + [yes] * 1000
    after = [no] * 662 + [yes] * 196 + [yes] * 1000
    changed = flips(*(margins(one, [1] * len(one)) for one in (after, before)))
    assert changed == Flips(to_first=662, to_second=196)
    assert (changed.total, changed.net) == (858, 466)


def rows(details, *, name="boolq"):
    return items_to_table(
        Item("s", name, "none", f"i{n}", content_hash(f"d{n}"), 1, "acc", 1.0, detail=json.dumps(detail))
        for n, detail in enumerate(details)
    )


def detail(scores, gold, sizes=(3, 2)):
    return {"loglikelihoods": scores, "gold": gold, "bytes": list(sizes)}


def test_options_are_read_in_paired_order():
    own = choices_of(rows([detail([-1.0, -float(n)], n % 2) for n in range(6)]))
    order = sorted(range(6), key=lambda n: content_hash(f"d{n}"))
    assert own.loglikelihoods == tuple((-1.0, -float(n)) for n in order)
    assert own.gold_N.tolist() == [n % 2 for n in order]


@pytest.mark.parametrize(
    "wrong", [{}, {"loglikelihoods": [1.0, None], "gold": 0}, {"loglikelihoods": [1.0], "gold": 1}, {"gold": 0}, []]
)
def test_an_item_without_its_options_is_named(wrong):
    with pytest.raises(UsageError, match="s/boolq/i0"):
        choices_of(rows([wrong]))


def test_which_tasks_have_fixed_answers():
    fixed = [detail([0.0, 1.0], 1), detail([1.0, 0.0], 0)]
    own = [detail([0.0, 1.0], 1, (4, 9)), detail([0.0, 1.0], 1, (3, 2))]
    assert has_fixed_answers(choices_of(rows(fixed)))
    assert has_fixed_answers(choices_of(rows(fixed, name="mmlu_anatomy")))
    assert not has_fixed_answers(choices_of(rows(own, name="riddles")))
    assert not has_fixed_answers(choices_of(rows(fixed, name="piqa")))
    assert has_fixed_answers(choices_of(rows(fixed, name="truth")), ("truth",))
    with pytest.raises(UsageError, match="cannot tell whether the answers are the same"):
        has_fixed_answers(choices_of(rows(fixed, name="truth")))
    with pytest.raises(UsageError, match="options of different sizes"):
        has_fixed_answers(choices_of(rows(own)))


def test_what_has_no_margin_is_refused():
    with pytest.raises(UsageError, match="other than two answers"):
        area(task([(0.0, 1.0, 2.0)], [0]))
    with pytest.raises(UsageError, match="never right"):
        area(margins([0.5, 1.0], [1, 1]))
    with pytest.raises(UsageError, match="different numbers of options"):
        bias_corrected(task([(0.0, 1.0), (0.0, 1.0, 2.0)], [0, 1]))
    with pytest.raises(UsageError, match="other items"):
        flips(margins([0.5], [1]), margins([0.5, 1.0], [1, 1]))
