"""`rerouting_summary` is what a direct count over tokens gives."""

from __future__ import annotations

import numpy as np
import pytest

from prunebench.analysis import rerouting_summary


def count(layers):
    """A record's routing from, per layer, one keep-over-renorm ratio per call; NaN where nothing was displaced."""
    stated = {}
    for index, ratios in layers.items():
        displaced = ratios[~np.isnan(ratios)]
        stated[str(index)] = {
            "calls": len(ratios),
            "filled_share": 0.0,
            "displaced_share": len(displaced) / len(ratios),
            "keep_over_renorm": float(displaced.mean()) if len(displaced) else 1.0,
            "above_one_share": float((displaced > 1).mean()) if len(displaced) else 0.0,
        }
    return {"bos": "one", "layers": stated}


def test_layers_are_weighed_by_their_calls_and_an_undisplaced_call_counts_one():
    rng = np.random.default_rng(0)
    layers = {}
    for index, (calls, share) in enumerate(((500, 0.9), (80, 0.1), (1300, 0.5))):
        ratios = rng.normal(0.8, 0.2, calls)
        ratios[rng.random(calls) > share] = np.nan
        layers[index + 1] = ratios
    every = np.concatenate(list(layers.values()))
    displaced = every[~np.isnan(every)]
    summary = rerouting_summary(count(layers))
    assert summary.calls == len(every)
    assert summary.displaced_share == pytest.approx(len(displaced) / len(every), rel=1e-12)
    assert summary.keep_over_renorm == pytest.approx(displaced.mean(), rel=1e-12)
    assert summary.keep_over_trained == pytest.approx(np.nan_to_num(every, nan=1.0).mean(), rel=1e-12)
    assert summary.above_one_share == pytest.approx((displaced > 1).sum() / len(every), rel=1e-12)


def test_nothing_displaced_is_a_ratio_of_one():
    summary = rerouting_summary(count({3: np.full(7, np.nan)}))
    assert (summary.displaced_share, summary.keep_over_renorm, summary.keep_over_trained) == (0.0, 1.0, 1.0)


def test_no_call_or_slots_that_were_filled_give_no_summary():
    assert rerouting_summary({}) is None
    assert rerouting_summary({"layers": {}}) is None
    filled = count({1: np.full(9, np.nan)})
    filled["layers"]["1"]["filled_share"] = 0.3
    assert rerouting_summary(filled) is None
    empty = count({1: np.full(9, np.nan)})
    empty["layers"]["1"]["calls"] = 0
    assert rerouting_summary(empty) is None


def test_a_layer_that_fills_beside_layers_that_reroute_is_counted():
    routing = count({1: np.array([0.5, np.nan]), 2: np.full(2, np.nan)})
    routing["layers"]["2"]["filled_share"] = 0.3
    assert rerouting_summary(routing).displaced_share == 0.25


def test_a_router_with_one_scale_has_no_ratio_of_two():
    stated = count({1: np.array([0.5, np.nan])})
    for name in ("keep_over_renorm", "above_one_share"):
        del stated["layers"]["1"][name]
    assert rerouting_summary(stated) is None
