"""The bootstrap against scipy and a plain double loop, and the properties that make contrasts exact."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prunebench import analysis
from prunebench.analysis.bootstrap import Sampled, confidence_interval, resample_counts, sampled
from prunebench.errors import UsageError

finite = st.floats(-1e3, 1e3)


def plain_indices(seed, suite, task, n, resamples):
    """The stream again, in Python integers: which item each draw of each resample is."""
    key = hashlib.blake2b(f"{seed}\0{suite}\0{task}".encode(), digest_size=16).digest()
    stream = np.random.PCG64(int.from_bytes(key, "big"))
    halves = [h for raw in stream.random_raw((resamples * n + 1) // 2).tolist() for h in (raw & 0xFFFFFFFF, raw >> 32)]
    return [[(halves[b * n + i] * n) >> 32 for i in range(n)] for b in range(resamples)]


@pytest.mark.parametrize("perplexity", [False, True])
def test_replicates_equal_a_plain_double_loop(perplexity):
    rng = np.random.default_rng(1)
    values, weights = rng.gamma(2, 3, 23), rng.integers(1, 9, 23).astype(float)
    got = sampled(values, weights if perplexity else None, suite="s", task="t", resamples=300)
    draws = []
    for index in plain_indices(0, "s", "t", 23, 300):
        if perplexity:
            draws.append(np.exp(sum(values[i] for i in index) / sum(weights[i] for i in index)))
        else:
            draws.append(sum(values[i] for i in index) / 23)
    np.testing.assert_allclose(got.draws_B, draws, rtol=1e-12)
    low, high = np.percentile(draws, [2.5, 97.5])
    assert got.interval().low == pytest.approx(low, rel=1e-12)
    assert got.interval().high == pytest.approx(high, rel=1e-12)
    assert got.value == pytest.approx(np.exp(values.sum() / weights.sum()) if perplexity else values.mean(), rel=1e-12)


def test_intervals_agree_with_scipy_within_resampling_noise():
    values = np.random.default_rng(2).gamma(2, 3, 150)
    ours = confidence_interval(values)
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(0)
    )
    noise = 0.03 * (ours.high - ours.low)
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=noise)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=noise)


def test_a_paired_perplexity_ratio_agrees_with_scipy():
    rng = np.random.default_rng(4)
    tokens = rng.integers(5, 40, 150).astype(float)
    a, b = (tokens * rng.gamma(4, scale, 150) for scale in (0.5, 0.45))
    ours = sampled(a, tokens).log().minus(sampled(b, tokens).log())
    theirs = scipy.stats.bootstrap(
        (a, b, tokens),
        lambda x, y, n, axis: (x.sum(axis) - y.sum(axis)) / n.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    noise = 0.03 * (ours.interval().high - ours.interval().low)
    assert ours.interval().low == pytest.approx(theirs.confidence_interval.low, abs=noise)
    assert ours.interval().high == pytest.approx(theirs.confidence_interval.high, abs=noise)


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(3)
    hits = [
        interval.low <= 0.6 <= interval.high
        for trial in range(400)
        for interval in [confidence_interval(rng.random(120) < 0.6, task=str(trial % 7), resamples=400)]
    ]
    assert 0.91 <= np.mean(hits) <= 0.98


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 400), st.integers(0, 5), st.integers(1, 50))
def test_every_resample_draws_n_items_uniformly(n, seed, resamples):
    counts = np.concatenate(list(resample_counts(seed, "s", "t", n, resamples)))
    assert counts.shape == (resamples, n)
    assert (counts.sum(axis=1, dtype=int) == n).all()


def test_blocks_do_not_change_the_stream(monkeypatch):
    whole = np.concatenate(list(resample_counts(0, "s", "t", 10, 100)))
    monkeypatch.setattr(sys.modules[resample_counts.__module__], "_CHUNK", 70)
    assert np.array_equal(np.concatenate(list(resample_counts(0, "s", "t", 10, 100))), whole)


def test_draws_are_uniform():
    counts = sum(block.sum(axis=0, dtype=int) for block in resample_counts(0, "s", "t", 50, 4000))
    assert scipy.stats.chisquare(counts).pvalue > 0.001


@settings(max_examples=20, deadline=None)
@given(st.lists(finite, min_size=2, max_size=30), finite)
def test_a_shift_moves_value_and_interval(values, shift):
    one, other = (confidence_interval(np.array(values) + s, resamples=500) for s in (0.0, shift))
    for name in ("value", "low", "high"):
        assert getattr(other, name) == pytest.approx(getattr(one, name) + shift, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 50), min_size=3, max_size=30))
def test_intervals_hold_the_point_estimate_and_stay_within_the_items(values):
    interval = confidence_interval(values)
    assert min(values) - 1e-9 <= interval.low <= interval.value + 1e-9
    assert interval.value - 1e-9 <= interval.high <= max(values) + 1e-9


def test_streams_depend_on_seed_suite_and_task_only():
    draws = {
        key: tuple(np.concatenate(list(resample_counts(*key, 20, 20))).ravel())
        for key in [(0, "s", "t"), (1, "s", "t"), (0, "s2", "t"), (0, "s", "t2")]
    }
    assert len(set(draws.values())) == 4


@pytest.mark.parametrize(
    ("draws", "p"),
    [
        ([1.0] * 10, 0.2),
        ([-1.0] + [1.0] * 9, 0.2),
        ([-1.0] * 3 + [1.0] * 7, 0.6),
        ([0.0] * 10, 1.0),
        ([1e-17, -1e-17] * 5, 1.0),
    ],
    ids=["never", "once", "three", "zero", "rounding"],
)
def test_p_is_twice_the_smaller_tail_and_at_least_2_over_b(draws, p):
    assert Sampled(1.0, np.array(draws), 10).p_value() == pytest.approx(p)


def test_p_agrees_with_a_normal_test_on_paired_data():
    d = np.random.default_rng(5).normal(0.15, 1, 300)
    assert sampled(d).p_value() == pytest.approx(scipy.stats.ttest_1samp(d, 0).pvalue, abs=0.01)
    assert sampled(d + 1).p_value() == 2 / 10_000


def test_no_items_is_an_error():
    with pytest.raises(UsageError, match="no items to resample"):
        confidence_interval([])


@settings(max_examples=10, deadline=None)
@given(st.lists(finite, min_size=1, max_size=20), st.lists(finite, min_size=1, max_size=20))
def test_macro_mean_weighs_tasks_equally(one, other):
    assume(len(one) != len(other))
    parts = [sampled(values, task=task, resamples=50) for task, values in (("a", one), ("b", other))]
    mean = Sampled.macro_mean(parts)
    assert mean.value == pytest.approx((np.mean(one) + np.mean(other)) / 2, abs=1e-9)
    np.testing.assert_allclose(mean.draws_B, (parts[0].draws_B + parts[1].draws_B) / 2, atol=1e-9)
    assert mean.n == len(one) + len(other)


def test_two_thousand_items_take_about_a_second():
    values = np.random.default_rng(0).random((2, 2000))
    start = time.process_time()
    sampled(values[0], task="t").minus(sampled(values[1], task="t")).interval()
    assert time.process_time() - start < 3  # about 0.5 s on an idle core


def test_importing_takes_no_model_library():
    heavy = {"torch", "transformers", "scipy", "altair", "pyarrow"}
    code = f"import sys, prunebench.analysis; print(sorted({heavy} & set(sys.modules)))"
    root = str(Path(analysis.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": root}
    )
    assert done.stdout.strip() == "[]"
