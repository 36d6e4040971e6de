"""Fits through the interface of methods: what is deployed errs as the moments said it would."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from prunebench import (
    Constant,
    CopyPair,
    GatedWeights,
    InputOutputMoments,
    LayerView,
    Mask,
    Method,
    Replacements,
    Statistic,
    copy_errors,
    fit_share,
    fit_tilt,
    held_out_share,
    plain_svd,
    reduced_rank,
    squared_error,
    with_residual_bias,
)
from prunebench.calibration import CalibrationSpec, CalibrationTokens, score_pass
from prunebench.install import programs_of
from prunebench.moe import Instrument, open_model
from prunebench.plan import layer_views, make_plan
from prunebench.testing import random_ids, random_model

PRUNED = (1, 4, 6, 9)
RANK = 4


@dataclass(frozen=True)
class Tilted(Method):
    """A whole operator."""

    name = "tilted"

    rank: int = RANK
    clip: float = 4.0

    def replace_needs(self) -> tuple[Statistic, ...]:
        return (InputOutputMoments(),)

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        moments = layer.stats["input_output_moments"]
        return Replacements({e: fit_tilt(moments.all(e), self.rank, clip=self.clip).fill for e in pruned})


@pytest.fixture(scope="module", params=["olmoe", "deepseek_v3"])
def moe(request):
    return open_model(random_model(request.param))


@pytest.fixture(scope="module")
def ids_BL():
    return random_ids(40, 32)


@pytest.fixture(scope="module")
def scores(moe, ids_BL):
    tokens = CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")
    return score_pass(moe, tokens, [InputOutputMoments()])


@pytest.fixture(scope="module")
def rows(moe, ids_BL):
    """(layer, expert) -> inputs and outputs of the unpruned model."""
    found: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def observe(layer, batch):
        for expert, start, end in batch.segments:
            x_SD = batch.x_TD[batch.token_S[start:end]]
            found.setdefault((layer.index, expert), []).append((x_SD, batch.outputs_SD[start:end].clone()))

    with torch.inference_mode(), Instrument(moe, observer=observe):
        moe.model(input_ids=ids_BL, use_cache=False)
    return {key: tuple(torch.cat(part) for part in zip(*parts, strict=True)) for key, parts in found.items()}


def test_the_deployed_tilt_errs_as_its_moments_say(moe, scores, rows):
    index = moe.layers[0].index
    mask = Mask.for_shapes(moe.shapes, {index: PRUNED})
    moments = scores.layers[index]["input_output_moments"].value()
    free = programs_of(make_plan(moe, mask, Tilted(clip=1e3), scores))[index].fills
    clipped = programs_of(make_plan(moe, mask, Tilted(), scores))[index].fills
    for expert in PRUNED:
        x_SD, y_SD = rows[index, expert]
        said = squared_error(reduced_rank(moments.all(expert), RANK), moments.all(expert))
        error, with_clip = (float((y_SD - fills[expert](x_SD)).double().square().sum()) for fills in (free, clipped))
        constant = float((y_SD.double() - y_SD.double().mean(0)).square().sum())
        assert error == pytest.approx(said, rel=1e-4)
        assert error < constant
        assert fit_share(error, constant) == pytest.approx(fit_share(said, float(moments.all(expert).yy)), abs=1e-4)
        assert with_clip == pytest.approx(error, rel=0.02)
        folds = (moments.fold(expert, 0), moments.fold(expert, 1))
        assert held_out_share(*folds, RANK) < fit_share(said, float(moments.all(expert).yy))


def test_too_few_tokens_leave_a_constant_in_the_plan(moe, scores):
    index = moe.layers[0].index
    counts = {e: scores.layers[index]["input_output_moments"].value().all(e).count for e in PRUNED}
    rank = min(32, min(counts.values()) // 4 + 1)
    plan = make_plan(moe, Mask.for_shapes(moe.shapes, {index: PRUNED}), Tilted(rank), scores)
    kinds = {e: fill.kind for layer in plan.layers if layer.index == index for e, fill in layer.fills.items()}
    assert kinds == {e: "Constant" if counts[e] <= 4 * rank else "Tilt" for e in PRUNED}


def test_a_copy_with_its_bias_beats_the_constant_on_its_own_tokens(moe, rows):
    [view, *_] = layer_views(moe, None, (), "x")
    for expert in PRUNED:
        x_SD, y_SD = rows[view.index, expert]
        copy = plain_svd(GatedWeights.of(view.weights(expert), "silu"), 12)
        pair = CopyPair(copy, copy)
        fill = with_residual_bias(pair, copy_errors(pair, x_SD, y_SD, torch.zeros(len(x_SD)))).fill
        mean = Constant.of(y_SD.mean(0))
        assert float((y_SD - fill(x_SD)).square().sum()) < float((y_SD - mean(x_SD)).square().sum())
