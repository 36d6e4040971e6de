"""Calibrated, planned, proved and run: every family passes every integrity check under every kind of arm."""

from __future__ import annotations

import pytest
import torch

from prunebench import Mask, integrity, load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens, OutputMoments, score_pass
from prunebench.errors import UsageError
from prunebench.install import installed
from prunebench.moe import open_model
from prunebench.plan import make_plan
from prunebench.testing import FAMILIES, random_ids, random_model
from prunebench.testing.families import half_of

NIGHTLY = [pytest.mark.slow]


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        pytest.param("float32", "eager"),
        pytest.param("float32", "grouped_mm", marks=NIGHTLY),
        pytest.param("bfloat16", "eager", marks=NIGHTLY),
        pytest.param("bfloat16", "grouped_mm", marks=NIGHTLY),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_arm_of_every_family_passes_every_check(family, dtype, kernel):
    model = random_model(family, dtype=getattr(torch, dtype), experts_implementation=kernel)
    moe = open_model(model, probe_tokens=64)
    assert integrity.check_empty_mask(moe, random_ids(2, 16)).status == "pass"
    arms = [("zero", None), *(("reroute", scale) for scale in ("keep", "renorm") if scale in moe.convention.scales)]
    scores = None
    if moe.convention.gates_on == "output":
        tokens = CalibrationTokens(CalibrationSpec("file:x", 4, 16), random_ids(4, 16), "test")
        scores = score_pass(moe, tokens, [OutputMoments()])
        arms.append(("constant", None))
    mask = Mask.for_shapes(moe.shapes, {layer.index: half_of(layer) for layer in moe.layers})
    for operator, scale in arms:
        plan = make_plan(moe, mask, load_method(operator, {"scale": scale} if scale else None), scores)
        checks = integrity.check_before_evaluation(moe, plan, random_ids(8, 32))
        with torch.inference_mode(), installed(moe, plan) as instrument:
            moe.model(input_ids=random_ids(2, 16), use_cache=False)
        checks += integrity.check_counters(plan, {index: c.read() for index, c in instrument.counters.items()})
        assert [check for check in checks if check.status == "fail"] == []
        statuses = {check.check: check.status for check in checks}
        assert statuses["masked equals physically removed"] == "pass"
        assert statuses["no token reaches a pruned expert"] == "pass"


@pytest.mark.parametrize("scale", ["keep", "other", "interp:0.5", "ref:3"])
def test_a_scale_that_a_router_leaves_undefined_is_refused_when_the_arm_is_planned(scale):
    moe = open_model(random_model("phimoe"))
    mask = Mask.for_shapes(moe.shapes, {layer.index: half_of(layer) for layer in moe.layers})
    with pytest.raises(UsageError, match=r"scale .* is not defined for routers .* sparsemixer; expected renorm"):
        make_plan(moe, mask, load_method("reroute", {"scale": scale}), None)


def test_statistics_of_un_weighted_outputs_are_refused_where_there_are_none():
    moe = open_model(random_model("llama4"))
    tokens = CalibrationTokens(CalibrationSpec("file:x", 4, 16), random_ids(4, 16), "test")
    with pytest.raises(UsageError, match="Llama4Router multiplies gates into the experts' input"):
        score_pass(moe, tokens, [OutputMoments()])
