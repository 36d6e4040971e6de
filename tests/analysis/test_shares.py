"""Chance, what is kept above it, damage that is taken back, and how alike two selections are."""

from __future__ import annotations

import gzip
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from prunebench.analysis.agreement import agreement, expected_agreement, midranks, spearman
from prunebench.analysis.bootstrap import Sampled, sampled
from prunebench.analysis.choices import Choices
from prunebench.analysis.shares import BIG_5, NINE_TASKS, above_chance, chance, mean_chance, recovered
from prunebench.errors import UsageError
from prunebench.mask import LayerMask, Mask

REAL = Path(__file__).parents[3] / "shared" / "data" / "real"


def task(name, options, gold):
    """Items with so many options each; sizes that differ unless the answers are fixed."""
    scores = tuple((0.0,) * count for count in options)
    fixed = name in {"boolq", "rte", "mmlu"}
    sizes = tuple((4,) * count if fixed else (n, *(1,) * (count - 1)) for n, count in enumerate(options))
    return Choices(scores, np.array(gold), sizes, np.arange(len(gold)), "nine", name)


def test_the_nine_tasks_and_the_big_5():
    assert sum(NINE_TASKS.values()) == 24_842
    assert len(NINE_TASKS) == 9
    assert sum(NINE_TASKS[name] for name in BIG_5) == 9_923


def test_chance_is_the_majority_of_two_fixed_answers_and_one_over_the_options_elsewhere():
    assert chance(task("boolq", [2] * 8, [1] * 5 + [0] * 3)) == 5 / 8
    assert chance(task("piqa", [2] * 8, [1] * 5 + [0] * 3)) == 1 / 2
    assert chance(task("mmlu", [4] * 8, [0] * 8)) == 1 / 4
    assert chance(task("arc_easy", [4, 3, 5], [0, 0, 0])) == pytest.approx((1 / 4 + 1 / 3 + 1 / 5) / 3)


def lines(name):
    with gzip.open(REAL / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.skipif(not REAL.is_dir(), reason="no ../shared/data/real")
def test_chance_on_the_nine_tasks_is_40_55():
    found = {}
    for name in ("arc_challenge", "arc_easy"):
        options = [len(doc["choices"]["text"]) for doc in lines(name)]
        assert len(options) == NINE_TASKS[name]
        found[name] = chance(task(name, options, [0] * len(options)))
    answers = [int(doc["label"]) for doc in lines("boolq")]
    found["boolq"] = chance(task("boolq", [2] * len(answers), answers))
    assert (len(answers), round(100 * found["boolq"], 1)) == (NINE_TASKS["boolq"], 62.2)
    for name, count in (("openbookqa", 4), ("piqa", 2), ("winogrande", 2)):
        assert len(lines(name)) == NINE_TASKS[name]
        found[name] = chance(task(name, [count] * NINE_TASKS[name], [0] * NINE_TASKS[name]))
    with gzip.open(REAL / "mmlu.json.gz", "rt", encoding="utf-8") as file:
        subjects = json.load(file)
    assert sum(len(own["test"]) for own in subjects.values()) == NINE_TASKS["mmlu"]
    found["mmlu"], found["copa"] = 1 / 4, 1 / 2
    found["rte"] = chance(task("rte", [2] * 277, [0] * 146 + [1] * 131))  # not in that folder; its majority is 52.7 %
    assert set(found) == set(NINE_TASKS)
    assert f"{100 * mean_chance(found):.2f}" == "40.55"


def scores(*means):
    rng = np.random.default_rng(0)
    return [sampled((rng.random(500) < mean).astype(float), task="t").times(100) for mean in means]


def test_what_is_kept_above_chance():
    arm, dense = scores(0.6, 0.8)
    share = above_chance(arm, dense, 40.0)
    assert share.value == pytest.approx((arm.value - 40) / (dense.value - 40))
    low, high = np.percentile((arm.draws_B - 40) / (dense.draws_B - 40), [2.5, 97.5])
    assert (share.low, share.high) == pytest.approx((low, high))


def test_what_is_recovered_of_accuracy_and_of_perplexity():
    operator, constant, dense = scores(0.7, 0.6, 0.9)
    share = recovered(operator, constant, dense)
    assert share.value == pytest.approx((operator.value - constant.value) / (dense.value - constant.value))
    ratio = (operator.draws_B - constant.draws_B) / (dense.draws_B - constant.draws_B)
    assert (share.low, share.high) == pytest.approx(tuple(np.percentile(ratio, [2.5, 97.5])))
    # §4.5 writes it for losses: (const − op) / (const − dense).
    losses = [one.times(-0.01) for one in (operator, constant, dense)]
    assert recovered(*losses).value == pytest.approx(share.value)
    assert (constant.value, dense.value) != (0, 0)
    assert recovered(dense, constant, dense).value == pytest.approx(1)
    assert recovered(constant, constant, dense).value == 0


def test_without_damage_there_is_no_share():
    operator, constant = scores(0.7, 0.7)
    assert recovered(operator, constant, constant) == recovered(operator, constant, operator)
    assert recovered(operator, constant, constant).value is None


def test_a_denominator_that_changes_sign_on_some_draw_has_a_value_and_no_interval():
    part = Sampled(1.0, np.ones(1000), 9)
    whole = Sampled(2.0, np.array([-1.0] * 10 + [2.0] * 990), 9)
    share = above_chance(part, whole, 0.0)
    assert (share.value, share.low, share.high) == (0.5, None, None)


def masks(*ids):
    return [Mask("1:8x2 2:8x2", (LayerMask(1, 8, one), LayerMask(2, 8, other))) for one, other in ids]


def test_agreement_is_the_share_of_pruned_experts_in_common():
    one, other = masks(((0, 1, 2, 3), (4, 5)), ((0, 1, 6, 7), (4, 5)))
    assert agreement(one, other) == Fraction(4, 6)
    assert agreement(one, other, layer=1) == Fraction(1, 2)
    assert agreement(one, one) == 1
    assert expected_agreement(one) == (Fraction(16, 8) + Fraction(4, 8)) / 6


def test_masks_that_cannot_be_compared():
    one, fewer = masks(((0, 1), (2, 3)), ((0,), (2,)))
    with pytest.raises(UsageError, match="the masks prune 4 and 2 experts"):
        agreement(one, fewer)
    other = Mask("1:8x2", (LayerMask(1, 8, (0, 1)),))
    with pytest.raises(UsageError, match="masks of different shapes"):
        agreement(one, other)


pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=30)


@given(pairs)
def test_spearman_is_scipys_with_ties(values):
    x, y = zip(*values, strict=True)
    assert midranks(x).tolist() == stats.rankdata(x).tolist()
    assume(len(set(x)) > 1 and len(set(y)) > 1)
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)


def test_what_has_no_ranks():
    with pytest.raises(UsageError, match="constant"):
        spearman([1, 1], [1, 2])
    with pytest.raises(UsageError, match="ranks of 1 and 2 values"):
        spearman([1], [1, 2])
