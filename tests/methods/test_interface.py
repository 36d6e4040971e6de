"""What a method may see and what it is told when it asks for something else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from prunebench import Budget, Count, GateSum, Method, OutputMoments, load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens, score_pass
from prunebench.errors import UsageError
from prunebench.moe import open_model
from prunebench.plan import layer_views
from prunebench.testing import random_ids, random_model


@dataclass(frozen=True)
class Plain(Method):
    name = "plain"

    power: float = 2.0
    layers: int = 3


@pytest.fixture(scope="module", params=["olmoe", "deepseek_v3"])
def moe(request):
    return open_model(random_model(request.param))


@pytest.fixture(scope="module")
def scores(moe):
    tokens = CalibrationTokens(CalibrationSpec("file:x", 2, 16), random_ids(2, 16), "test")
    return score_pass(moe, tokens, [Count(), GateSum(), OutputMoments()])


def test_a_method_without_select_says_how_to_use_it(moe):
    with pytest.raises(UsageError) as info:
        Plain().select(layer_views(moe, None, (), "plain"), Budget(keep=8), rng=np.random.default_rng(0))
    assert str(info.value) == (
        "plain selects no experts; expected a method with select; "
        "fix: give another --method for the mask and this one as --operator, or give --mask FILE"
    )


def test_the_defaults_fill_nothing_and_route_as_trained(moe):
    [view, *_] = layer_views(moe, None, (), "plain")
    assert not Plain().replace(view, (1, 2)).fills
    assert Plain().route(view, (1, 2)).scale == "trained"
    assert Plain().select_needs() == Plain().replace_needs() == ()
    assert not Plain.selects()
    assert not Plain.keeps_slots()


def test_parameters_are_the_fields_verbatim():
    assert Plain(power=0.5).parameters() == {"power": 0.5, "layers": 3}
    assert load_method("reroute", {"scale": "keep"}).parameters() == {"scale": "keep"}


def test_reading_an_undeclared_statistic_names_the_line_to_add(moe, scores):
    [view, *_] = layer_views(moe, scores, ("count",), "mine.select_needs")
    with pytest.raises(UsageError) as info:
        view.stats["gate_sum"]
    assert str(info.value) == (
        "statistic 'gate_sum' was not declared; in mine.select_needs; expected one of count; "
        "fix: add the statistic named 'gate_sum' to the tuple that mine.select_needs returns"
    )
    with pytest.raises(UsageError, match="expected one of none"):
        layer_views(moe, scores, (), "mine.select_needs")[0].stats["count"]


def test_a_declared_statistic_without_a_pass_is_one_clear_line(moe):
    with pytest.raises(UsageError, match=r"statistic 'count' was not measured; in mine.select_needs"):
        layer_views(moe, None, ("count",), "mine.select_needs")[0].stats["count"]


def test_statistics_are_a_mapping_of_what_was_declared(moe, scores):
    [view, *_] = layer_views(moe, scores, ("count", "output_moments"), "x")
    assert list(view.stats) == ["count", "output_moments"]
    assert len(view.stats) == 2
    assert "gate_sum" not in list(view.stats)
    assert view.tokens == 32


def test_what_a_method_does_to_its_statistics_does_not_reach_the_next(moe, scores):
    [view, *_] = layer_views(moe, scores, ("count", "gate_sum", "output_moments"), "x")
    before = view.stats["gate_sum"].copy(), view.stats["output_moments"].mean_ED.copy()
    view.stats["gate_sum"][:] = 0
    view.stats["output_moments"].mean_ED[:] = np.nan
    [other, *_] = layer_views(moe, scores, ("gate_sum", "output_moments"), "y")
    np.testing.assert_array_equal(other.stats["gate_sum"], before[0])
    np.testing.assert_array_equal(other.stats["output_moments"].mean_ED, before[1])


def test_a_view_shows_shapes_and_no_name_of_the_model(moe):
    [view, *_] = layer_views(moe, None, (), "x")
    assert (view.index, view.experts, view.width) == (moe.layers[0].index, 16, 32)
    assert view.convention == moe.convention
    public = " ".join(
        f"{name}={getattr(view, name)!r}"
        for name in dir(view)
        if not name.startswith("_") and name not in ("expert", "weights")
    )
    assert type(moe.model).__name__ not in public
    assert "model.layers" not in repr(view)


def test_weights_and_router_rows_are_copies(moe):
    [view, *_] = layer_views(moe, None, (), "x")
    layer = moe.layers[0]
    kept = layer.experts.down_proj.clone(), layer.router.weight.clone()
    view.weights(3)["down_proj"].zero_()
    view.router_rows_ED.zero_()
    assert torch.equal(layer.experts.down_proj, kept[0])
    assert torch.equal(layer.router.weight, kept[1])


def test_an_expert_can_be_asked_on_any_rows(oracle, moe):
    [view, *_] = layer_views(moe, None, (), "x")
    x_SD = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    wanted_SD = oracle.expert(moe.layers[0].experts, 9, oracle.array(x_SD))
    np.testing.assert_allclose(oracle.array(view.expert(9, x_SD)), wanted_SD, atol=1e-6, rtol=1e-5)
