"""Coverage, rejection under the null and Holm's family-wise error, where the truth is known.

Every trial is a column of one resampling: trials share which items are drawn, which is how runs share it, and leaves
each trial's own error as it is. `tox -e nightly` runs more trials, and n = 14,042 in full.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from prunebench.analysis.bootstrap import Sampled, sampled_columns
from prunebench.analysis.multiplicity import holm


def accuracies(rng, n, count):
    """Right answers of runs that are right on 25 to 90 of 100; at one accuracy, coverage hangs on how it divides n."""
    truth = rng.uniform(0.25, 0.9, count)
    return (rng.random((n, count)) < truth).astype(float), truth


def differences(rng, n, count):
    """Two runs that agree on most items: +1, 0 or −1."""
    up, down = rng.uniform(0.05, 0.25, (2, count))
    uniform = rng.random((n, count))
    return (uniform < up).astype(float) - (uniform > 1 - down), up - down


def losses(rng, n, count):
    """Skewed, as losses are."""
    truth = rng.uniform(1.0, 3.0, count)
    return rng.gamma(4.0, 1.0, (n, count)) * truth / 4, truth


KINDS = {"accuracies": accuracies, "differences": differences, "losses": losses}


def coverage(kind, n, count, resamples):
    values_NC, truths = KINDS[kind](np.random.default_rng(0), n, count)
    intervals = [one.interval() for one in sampled_columns(values_NC, task=f"{kind} {n}", resamples=resamples)]
    return float(np.mean([one.low <= truth <= one.high for one, truth in zip(intervals, truths, strict=True)]))


def error_of(share, count):
    """Three standard errors of a share in so many trials."""
    return 3 * math.sqrt(share * (1 - share) / count)


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_at_100_items_cover_the_truth(kind):
    assert 0.93 <= coverage(kind, 100, 4000, 2000) <= 0.965


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_at_500_items_cover_the_truth(kind):
    assert abs(coverage(kind, 500, 2000, 2000) - 0.95) <= error_of(0.95, 2000)


def test_intervals_at_14042_items_cover_the_truth():
    assert abs(coverage("differences", 14_042, 250, 1000) - 0.95) <= error_of(0.95, 250)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [500, 14_042])
def test_intervals_cover_the_truth_in_many_trials(kind, n):
    assert abs(coverage(kind, n, 2000, 4000) - 0.95) <= error_of(0.95, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_intervals_at_100_items_cover_the_truth_in_many_trials(kind):
    assert 0.93 <= coverage(kind, 100, 10_000, 10_000) <= 0.965


def null_p(n, count, *, seed=1, resamples=2000):
    """p-values of contrasts between two runs of one skill, on items of differing difficulty."""
    rng = np.random.default_rng(seed)
    difficulty = rng.random((n, 1))
    a, b = ((rng.random((n, count)) < difficulty).astype(float) for _ in range(2))
    return np.array([one.p_value() for one in sampled_columns(a - b, task=f"null {n}", resamples=resamples)])


@pytest.mark.parametrize("n", [100, 500])
def test_nothing_is_rejected_too_often_where_nothing_differs(n):
    p = null_p(n, 3000)
    for alpha in (0.01, 0.05, 0.10):
        assert (p < alpha).mean() <= alpha + 0.01


def family_wise_error(sizes, trials_count, n, resamples):
    """Share of simulated families in which Holm rejects a true null: all arms against one reference, none better."""
    rng = np.random.default_rng(5)
    families = []
    for _ in range(trials_count):
        difficulty = rng.random((n, 1))
        families.append((rng.random((n, sizes + 1)) < difficulty).astype(float))
    flat = np.concatenate([one[:, 1:] - one[:, :1] for one in families], axis=1)
    p = np.array([one.p_value() for one in sampled_columns(flat, task="families", resamples=resamples)])
    return float(np.mean([(holm(own) < 0.05).any() for own in p.reshape(trials_count, sizes)]))


def test_holm_keeps_the_family_wise_error():
    assert family_wise_error(10, 400, 300, 4000) <= 0.05 + error_of(0.05, 400)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [5, 27])
def test_holm_keeps_the_family_wise_error_in_many_trials(sizes):
    assert family_wise_error(sizes, 2000, 300, 10_000) <= 0.05 + error_of(0.05, 2000)


def test_without_correction_a_family_errs_far_more_often():
    """The simulation can fail: uncorrected, ten nulls are hit in far more than one family of twenty."""
    p = null_p(300, 3000, seed=6).reshape(300, 10)
    assert np.mean([(own < 0.05).any() for own in p]) > 0.2


def test_an_interaction_is_covered_on_the_same_draws():
    """A difference of differences of four runs on one task, and its plain loop over trials."""
    rng = np.random.default_rng(7)
    n, count, truth = 200, 600, 0.1
    difficulty = rng.random((n, 1, 1)) * 0.6
    gains = np.array([0.2, 0.0, 0.1, 0.0])[:, None]
    arms_NAC = (rng.random((n, 4, count)) < difficulty + gains).astype(float)
    draws = sampled_columns(arms_NAC.reshape(n, -1), task="interaction", resamples=1000)
    a, b, c, d = (draws[at * count : (at + 1) * count] for at in range(4))
    both = [w.minus(x).minus(y.minus(z)) for w, x, y, z in zip(a, b, c, d, strict=True)]
    direct = sampled_columns(
        arms_NAC[:, 0] - arms_NAC[:, 1] - arms_NAC[:, 2] + arms_NAC[:, 3], task="interaction", resamples=1000
    )
    for one, other in zip(both, direct, strict=True):
        np.testing.assert_allclose(one.draws_B, other.draws_B, atol=1e-12)
    hits = np.mean([i.low <= truth <= i.high for i in map(Sampled.interval, both)])
    assert abs(hits - 0.95) <= error_of(0.95, count)
