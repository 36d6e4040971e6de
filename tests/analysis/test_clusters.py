"""Items that are drawn together, and many runs at once, against plain loops over the documented stream."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prunebench.analysis.bootstrap import Sampled, item_counts, sampled, sampled_columns
from prunebench.analysis.metrics import RATIOS, cell_sampled, clusters_of, in_units, paired_order
from prunebench.analysis.scores import Stratum, suite_scores
from prunebench.errors import UsageError
from prunebench.record import Item, content_hash, items_to_table


def drawn(n, resamples, task="t"):
    """The stream in Python integers: which of n things each draw of each resample is."""
    key = hashlib.blake2b(f"0\0s\0{task}".encode(), digest_size=16).digest()
    raws = np.random.PCG64(int.from_bytes(key, "big")).random_raw((resamples * n + 1) // 2).tolist()
    halves = [half for raw in raws for half in (raw & 0xFFFFFFFF, raw >> 32)]
    return [[(halves[b * n + i] * n) >> 32 for i in range(n)] for b in range(resamples)]


@pytest.mark.parametrize("perplexity", [False, True])
def test_clusters_are_drawn_whole(perplexity):
    rng = np.random.default_rng(0)
    labels = rng.choice(list("pqrstuvw"), 40)
    values, weights = rng.random(40), rng.integers(1, 9, 40).astype(float)
    got = sampled(values, weights if perplexity else None, clusters=labels, suite="s", task="t", resamples=200)
    names = list(dict.fromkeys(labels.tolist()))
    members = [[i for i in range(40) if labels[i] == name] for name in names]
    draws = []
    for resample in drawn(len(names), 200):
        items = [i for group in resample for i in members[group]]
        below = sum(weights[i] for i in items) if perplexity else len(items)
        mean = sum(values[i] for i in items) / below
        draws.append(np.exp(mean) if perplexity else mean)
    np.testing.assert_allclose(got.draws_B, draws, rtol=1e-12)
    assert got.value == pytest.approx(np.exp(values.sum() / weights.sum()) if perplexity else values.mean())
    assert got.n == 40


def test_item_counts_repeat_a_cluster_on_each_of_its_items():
    labels = ["a", "b", "a", "c", "b", "a"]
    counts = np.concatenate(list(item_counts(labels, suite="s", task="t", resamples=50)))
    for row, resample in zip(counts, drawn(3, 50), strict=True):
        assert row.tolist() == [resample.count("abc".index(label)) for label in labels]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.booleans(), st.booleans())
def test_many_runs_at_once_are_each_run_by_itself(n, runs, weighted, clustered):
    rng = np.random.default_rng(n * 7 + runs)
    values_NC = rng.random((n, runs))
    weights = rng.integers(1, 5, n).astype(float) if weighted else None
    clusters = rng.integers(0, 5, n) if clustered else None
    key = {"suite": "s", "task": "t", "resamples": 40, "clusters": clusters}
    together = sampled_columns(values_NC, weights, **key)
    for at, one in enumerate(together):
        alone = sampled(values_NC[:, at], weights, **key)
        assert one.value == pytest.approx(alone.value, rel=1e-14)
        np.testing.assert_allclose(one.draws_B, alone.draws_B, rtol=1e-13)


def test_labels_of_single_items_change_nothing():
    values = np.random.default_rng(1).random(25)
    one, other = sampled(values, task="t"), sampled(values, clusters=[f"x{at}" for at in range(25)], task="t")
    assert (one.value, one.draws_B.tolist()) == (other.value, other.draws_B.tolist())


def test_identical_samples_of_a_problem_are_worth_one():
    """Eight copies of each outcome: with clusters the interval stays, without it would shrink by √8."""
    values = (np.random.default_rng(2).random(100) < 0.5).astype(float)
    alone = sampled(values, task="t").draws_B
    copies = sampled(np.repeat(values, 8), clusters=np.repeat(np.arange(100), 8), task="t").draws_B
    assert copies.tolist() == alone.tolist()
    assert sampled(np.repeat(values, 8), task="t").draws_B.std() < alone.std() / 2


def item(number, doc, value=1.0, detail=None):
    ids = ("s", "t", "none", f"i{number}")
    return Item(*ids, content_hash(doc), content_hash(f"p{number}"), "acc", value, detail=json.dumps(detail or {}))


def test_rows_of_one_document_and_rows_that_name_a_cluster_belong_together():
    assert clusters_of(items_to_table(item(n, f"d{n}") for n in range(4))) is None
    samples = items_to_table(item(n, f"d{n // 2}") for n in range(4))
    assert len(set(clusters_of(samples).tolist())) == 2
    passages = items_to_table(item(n, f"d{n}", detail={"cluster": n % 2}) for n in range(4))
    assert clusters_of(passages)[0] == clusters_of(passages)[2] != clusters_of(passages)[1]


def test_a_cell_is_resampled_by_its_clusters():
    table = paired_order(items_to_table(item(n, f"d{n // 4}", float(n % 3 == 0)) for n in range(40)))
    got = cell_sampled(table, resamples=100)
    oracle = sampled(table.value, clusters=table.doc_hash, suite="s", task="t", resamples=100)
    assert got.draws_B.tolist() == oracle.draws_B.tolist()
    assert got.draws_B.tolist() != sampled(table.value, suite="s", task="t", resamples=100).draws_B.tolist()


def test_no_items_are_refused():
    with pytest.raises(UsageError, match="no items to resample"):
        sampled_columns(np.empty((0, 3)))


def test_multiples_and_logarithms_are_those_of_every_draw():
    one = Sampled(2.0, np.array([1.0, 2.0, 4.0]), 3)
    assert one.times(100).draws_B.tolist() == [100, 200, 400]
    assert one.log().minus(one.times(2).log()).draws_B == pytest.approx([-np.log(2)] * 3)


@pytest.mark.parametrize("metric", [*sorted(RATIOS), "nll", "acc"])
def test_families_score_a_cell_as_its_run_does(metric):
    """Ratios of sums by their own rules: Σ values / Σ weights as it is, and of excess_ppl exp of it less 1."""
    rng = np.random.default_rng(3)
    values, weights = rng.random(40).round(), rng.integers(1, 9, 40).astype(float)
    items = [
        Item("s", "t", "none", str(n), content_hash(str(n)), content_hash(str(n)), metric, value, weight, "ok", "{}")
        for n, (value, weight) in enumerate(zip(values.tolist(), weights.tolist(), strict=True))
    ]
    rows = paired_order(items_to_table(items))
    alone = cell_sampled(rows, resamples=50)
    cell = ("t", "none", {"nll": "perplexity"}.get(metric, metric))
    stratum = Stratum(rows.value[:, None], None if metric == "acc" else rows.weight)
    (score,) = suite_scores({cell: stratum}, "s", resamples=50)
    wanted = in_units(alone, [cell[2]])
    assert score.value == wanted.value
    np.testing.assert_array_equal(score.draws_B, wanted.draws_B)
    quotient = values.sum() / weights.sum()
    by_hand = {"acc": values.mean(), "nll": np.exp(quotient), "excess_ppl": np.exp(quotient) - 1}.get(metric, quotient)
    assert alone.value == pytest.approx(by_hand, abs=1e-12)
