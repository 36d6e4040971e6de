"""Fills: what they compute, what they store, and that a plan rebuilds them from their saved form."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from prunebench import Mask, Method, Replacements
from prunebench.errors import UsageError
from prunebench.fit import plain_svd, top_neurons
from prunebench.install import installed, programs_of
from prunebench.moe import open_model
from prunebench.plan import Plan, make_plan
from prunebench.replacement import Constant, GatedWeights, LowRankExpert, SmallExpert, Tilt, Zero
from prunebench.testing import random_ids, random_model

WIDTH, RANK, NEURONS = 32, 3, 16


def random_tilt(seed: int = 0) -> Tilt:
    generator = torch.Generator().manual_seed(seed)
    return Tilt.of(
        mean_D=torch.randn(WIDTH, generator=generator),
        up_DR=torch.randn(WIDTH, RANK, generator=generator),
        down_RD=torch.randn(RANK, WIDTH, generator=generator),
        offset_R=torch.randn(RANK, generator=generator),
        clip_R=torch.rand(RANK, generator=generator),
    )


def weights() -> GatedWeights:
    generator = torch.Generator().manual_seed(1)
    gate_FD, up_FD = torch.randn(2, NEURONS, WIDTH, generator=generator)
    return GatedWeights(gate_FD, up_FD, torch.randn(WIDTH, NEURONS, generator=generator), "silu")


FILLS = {
    "constant": lambda: Constant.of(torch.arange(WIDTH).float()),
    "zero": lambda: Zero(WIDTH),
    "tilt": random_tilt,
    "neurons": lambda: top_neurons(weights(), 5, torch.ones(NEURONS)),
    "svd": lambda: plain_svd(weights(), 2),
}
STORED = {
    "constant": WIDTH,
    "zero": 0,
    "tilt": 2 * RANK * WIDTH + WIDTH + 2 * RANK,
    "neurons": 3 * 5 * WIDTH + WIDTH,
    "svd": 3 * 2 * (WIDTH + NEURONS) + WIDTH,
}


@pytest.mark.parametrize("name", FILLS)
def test_a_fill_stores_what_the_paper_counts(name):
    assert FILLS[name]().values_stored() == STORED[name]


@pytest.mark.parametrize("name", FILLS)
def test_a_fill_is_rebuilt_from_its_saved_form_and_runs_in_a_model(name, tmp_path):
    moe = open_model(random_model("olmoe"))

    @dataclass(frozen=True)
    class Mine(Method):
        name = "mine"

        def replace(self, layer, pruned):
            return Replacements({e: FILLS[name]() for e in pruned})

    made = make_plan(moe, Mask.for_shapes(moe.shapes, {0: (1, 4), 1: (2,)}), Mine(), None)
    made.save(tmp_path / "plan.safetensors")
    plan = Plan.load(tmp_path / "plan.safetensors")
    assert plan.layers == made.layers
    assert plan.values_stored == 3 * STORED[name] == sum(plan.declared.values())
    assert all(fill.file is None for layer in plan.layers for fill in layer.fills.values())
    x_SD = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(2))
    for program in programs_of(plan).values():
        for fill in program.fills.values():
            assert torch.equal(fill(x_SD), FILLS[name]()(x_SD))
    with torch.inference_mode(), installed(moe, plan) as instrument:
        assert moe.model(input_ids=random_ids()).logits.isfinite().all()
    assert all(int(c.asked) == int(c.answered) > 0 for i, c in instrument.counters.items() if i in (0, 1))


@pytest.mark.parametrize("name", FILLS)
def test_a_fill_answers_each_row_by_itself_and_no_rows_at_all(name):
    fill = FILLS[name]()
    x_SD = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3))
    assert fill(x_SD[:0]).shape == (0, WIDTH)
    torch.testing.assert_close(fill(x_SD)[2:3], fill(x_SD[2:3]))


def test_the_tilt_is_its_formula():
    fill = random_tilt()
    x_SD = 3 * torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(4))
    x, mean, up, down, offset, clip = (
        t.double().numpy() for t in (x_SD, fill.mean_D, fill.up_DR, fill.down_RD, fill.offset_R, fill.clip_R)
    )
    wanted = mean + (x @ down.T - offset).clip(-clip, clip) @ up.T
    torch.testing.assert_close(fill(x_SD).double(), torch.from_numpy(wanted), atol=1e-5, rtol=1e-5)


def test_replacing_an_expert_by_its_full_copy_changes_nothing_beyond_rounding():
    moe = open_model(random_model("deepseek_v3"))

    @dataclass(frozen=True)
    class Itself(Method):
        name = "itself"

        def replace(self, layer, pruned):
            own = {e: GatedWeights.of(layer.weights(e), "silu") for e in pruned}
            return Replacements({e: SmallExpert.of(own[e]) for e in pruned})

    index = moe.layers[0].index
    plan = make_plan(moe, Mask.for_shapes(moe.shapes, {index: tuple(range(8))}), Itself(), None)
    with torch.inference_mode():
        wanted = moe.model(input_ids=random_ids()).logits
        with installed(moe, plan):
            found = moe.model(input_ids=random_ids()).logits
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_fills_of_no_size_are_refused():
    for make in (lambda: SmallExpert(8, 0, "silu"), lambda: LowRankExpert(8, 4, 0, "silu")):
        with pytest.raises(UsageError, match=r"a copy of (neurons|rank) 0 is none; expected at least 1"):
            make()
    with pytest.raises(UsageError, match="rank 0 is no tilt"):
        Tilt(8, 0)
    with pytest.raises(UsageError, match="unknown activation 'swish9'"):
        SmallExpert(8, 2, "swish9")
