"""Score validity: ranks of resamples, and what the four correlations are of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from prunebench.analysis.bootstrap import resample_counts
from prunebench.analysis.validity import ceiling, resampled_spearman, validity
from prunebench.errors import UsageError


def series(seed: int, *, ties: bool = False) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = {1: rng.normal(size=8), 4: rng.normal(size=5)}
    return {index: np.round(one) for index, one in values.items()} if ties else values


@pytest.mark.parametrize("ties", [False, True])
def test_a_resamples_correlation_is_that_of_the_drawn_experts_written_out(ties):
    x_N, y_N = series(1, ties=ties)[1], series(2, ties=ties)[1]
    [counts_BN] = resample_counts(0, "a", "b", 8, 50)
    found_B = resampled_spearman(x_N, y_N, counts_BN)
    for found, counts_N in zip(found_B, counts_BN, strict=True):
        drawn = [place for place, count in enumerate(counts_N) for _ in range(count)]
        if len(set(x_N[drawn])) < 2 or len(set(y_N[drawn])) < 2:
            assert math.isnan(found)
        else:
            assert found == pytest.approx(stats.spearmanr(x_N[drawn], y_N[drawn]).statistic, abs=1e-12)


def test_a_resample_of_one_expert_has_no_order():
    counts_BN = np.array([[3, 0, 0], [1, 1, 1]], dtype=np.uint16)
    found_B = resampled_spearman(np.array([1.0, 2, 3]), np.array([3.0, 2, 1]), counts_BN)
    assert math.isnan(found_B[0])
    assert found_B[1] == -1


def test_the_four_correlations_are_of_what_they_say():
    scores, damage = (series(1), series(2)), (series(3), series(4))
    found = validity(scores, damage, resamples=200)
    pairs = {"test": (0, 2), "retest": (1, 3), "scores": (0, 1), "damage": (2, 3)}
    everything = (*scores, *damage)
    for name, (a, b) in pairs.items():
        by_layer = {i: stats.spearmanr(everything[a][i], everything[b][i]).statistic for i in (1, 4)}
        pooled = [np.concatenate([everything[place][i] for i in (1, 4)]) for place in (a, b)]
        for index, rho in by_layer.items():
            assert found.layers[index][name].value == pytest.approx(rho, abs=1e-12)
        assert found.mean[name].value == pytest.approx(sum(by_layer.values()) / 2, abs=1e-12)
        assert found.pooled[name].value == pytest.approx(stats.spearmanr(*pooled).statistic, abs=1e-12)
        one = found.pooled[name]
        assert one.low <= one.value <= one.high
        assert one.n == 13


def test_the_mean_of_layers_is_resampled_in_all_layers_at_once():
    scores, damage = (series(1), series(1)), (series(3), series(3))
    found = validity(scores, damage, resamples=400)
    draws = []
    for index, size in ((1, 8), (4, 5)):
        counts_BN = np.concatenate(list(resample_counts(0, "score validity", f"layer {index}", size, 400)))
        draws.append(resampled_spearman(scores[0][index], damage[0][index], counts_BN))
    mean_B = (draws[0] + draws[1]) / 2
    low, high = np.quantile(mean_B[np.isfinite(mean_B)], [0.025, 0.975])
    assert (found.mean["test"].low, found.mean["test"].high) == pytest.approx((low, high))


def test_the_blocks_in_which_resamples_are_counted_change_nothing(monkeypatch):
    asked = ((series(1), series(2)), (series(3), series(4)))
    whole = validity(*asked, resamples=100).to_json()
    monkeypatch.setattr("prunebench.analysis.validity._ROWS", 40)
    assert validity(*asked, resamples=100).to_json() == whole


def test_the_ceiling_is_the_geometric_mean_of_both_retests():
    one = series(1)
    noisy = {
        index: values + np.random.default_rng(9).normal(scale=0.5, size=len(values)) for index, values in one.items()
    }
    found = validity((one, noisy), (one, one), resamples=50)
    expected = math.sqrt(found.pooled["scores"].value * found.pooled["damage"].value)
    assert ceiling(found.pooled) == pytest.approx(expected)
    upside_down = {index: -values for index, values in one.items()}
    assert ceiling(validity((one, upside_down), (one, one), resamples=50).pooled) is None


def test_a_layer_of_equal_scores_has_no_correlation_and_is_left_out_of_the_mean():
    flat = {1: np.ones(8), 4: series(1)[4]}
    found = validity((flat, flat), (series(2), series(2)), resamples=50)
    assert found.layers[1]["test"].value is None
    assert found.layers[1]["test"].low is None
    assert found.mean["test"].value == found.layers[4]["test"].value
    nothing = {1: np.ones(8), 4: np.ones(5)}
    assert validity((nothing, nothing), (series(2), series(2)), resamples=50).mean["test"].value is None


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ({1: np.arange(8.0)}, "scores and damages of different experts"),
        ({1: np.arange(7.0), 4: np.arange(5.0)}, "scores and damages of different experts"),
        ({1: np.arange(8.0), 4: np.full(5, np.nan)}, "not finite"),
    ],
)
def test_what_does_not_belong_together_is_refused(scores, says):
    with pytest.raises(UsageError, match=says):
        validity((scores, scores), (series(1), series(1)))


def test_two_experts_are_no_ranking():
    two = {1: np.arange(2.0)}
    with pytest.raises(UsageError, match="2 experts are too few to rank; in layer 1"):
        validity((two, two), (two, two))
