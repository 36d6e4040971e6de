"""With nothing pruned, the rewriting and the watching change no bit of the logits."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.routing import Scale
from prunebench.testing import CORE, random_ids, random_model

SCALES = ["keep", "renorm", "interp:0.5", "interp:0.3", "ref:4"]
KERNELS = ["eager", "grouped_mm"]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request):
    return request.param


@pytest.fixture(scope="module", params=CORE)
def moe(request, dtype, kernel):
    return open_model(random_model(request.param, dtype=dtype, experts_implementation=kernel))


@pytest.fixture(scope="module")
def plain(moe):
    with torch.inference_mode():
        return moe.model(input_ids=random_ids(), use_cache=False).logits


@pytest.mark.parametrize("scale", SCALES)
def test_forced_rewriting_is_bit_exact(moe, plain, scale):
    programs = {layer.index: LayerProgram((), scale=Scale.parse(scale)) for layer in moe.layers}
    with torch.inference_mode(), Instrument(moe, programs, force=True) as instrument:
        forced = moe.model(input_ids=random_ids(), use_cache=False).logits
    assert torch.equal(plain, forced)
    assert {index: int(c.slots) for index, c in instrument.counters.items()} == {
        x.index: 4 * 24 * 4 for x in moe.layers
    }


def test_an_observed_forward_is_bit_exact(moe, plain):
    seen = []
    with (
        torch.inference_mode(),
        Instrument(moe, observer=lambda layer, batch: seen.append((layer.index, batch.tokens))),
    ):
        observed = moe.model(input_ids=random_ids(), use_cache=False).logits
    assert torch.equal(plain, observed)
    assert seen == [(layer.index, 96) for layer in moe.layers]


def test_forced_rewriting_is_bit_exact_with_padding_and_with_a_cache(moe):
    mask = torch.ones(4, 24, dtype=torch.int64)
    mask[0, 20:], mask[2, :5] = 0, 0
    programs = {layer.index: LayerProgram((), scale=Scale("renorm")) for layer in moe.layers}

    def both() -> list[torch.Tensor]:
        cache = DynamicCache(config=moe.model.config)
        first = moe.model(input_ids=random_ids(), attention_mask=mask, cache=cache, use_cache=True)
        more = torch.cat([mask, torch.ones(4, 1, dtype=torch.int64)], 1)
        second = moe.model(input_ids=random_ids(4, 1, seed=9), attention_mask=more, cache=cache, use_cache=True)
        return [first.logits, second.logits]

    with torch.inference_mode():
        plain = both()
        with Instrument(moe, programs, force=True):
            forced = both()
    assert all(torch.equal(a, b) for a, b in zip(plain, forced, strict=True))
