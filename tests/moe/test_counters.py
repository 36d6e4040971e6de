"""Counters say what a hand count says: with padding on either side, in batches, and step by step with a cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from prunebench import Constant
from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.routing import Scale
from prunebench.testing import random_ids, random_model

PRUNED = (0, 3, 5, 6, 8, 9, 14, 15)


def programs(moe, filled):
    fills = {e: Constant.of(torch.full((32,), 0.1 * e)) for e in filled}
    return {layer.index: LayerProgram(PRUNED, fills, Scale("renorm")) for layer in moe.layers}


def counted(instrument):
    return {index: counters.read() for index, counters in instrument.counters.items()}


def close(first, second):
    assert first.keys() == second.keys()
    for index in first:
        assert first[index] == pytest.approx(second[index], rel=1e-5), index


@pytest.fixture(scope="module", params=["olmoe", "deepseek_v3"])
def moe(request):
    return open_model(random_model(request.param))


FILLED = [(), PRUNED, PRUNED[:3]]


@pytest.mark.parametrize("filled", FILLED, ids=["reroute", "constant", "mixed"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positional", [False, True], ids=["keyword", "positional"])
def test_padding_is_never_counted(oracle, moe, filled, side, positional):
    ids, mask = random_ids(4, 24), torch.ones(4, 24, dtype=torch.int64)
    for row, pad in enumerate((0, 3, 11, 23)):
        mask[row, (slice(None, pad) if side == "left" else slice(24 - pad, None))] = 0
    with (
        torch.inference_mode(),
        oracle.Trace(moe.layers) as trace,
        Instrument(moe, programs(moe, filled)) as instrument,
    ):
        if positional:
            moe.model(ids, mask)
        else:
            moe.model(input_ids=ids, attention_mask=mask)
    valid_T = mask.flatten().bool().numpy()
    blocked = set(PRUNED) - set(filled)
    rule = oracle.ROUTERS["olmoe" if moe.layers[0].convention.score == "softmax" else "deepseek_v3"]
    for layer in moe.layers:
        logits_TE, _, dense_TK = (oracle.array(part) for part in trace.router[layer.index][0])
        index_TK, _ = oracle.route(rule, logits_TE, oracle.bias_of(layer.router), dense_TK, blocked, "renorm")
        got = instrument.counters[layer.index].read()
        assert got["calls"] == valid_T.sum() == 96 - 37
        assert got["slots"] == 4 * valid_T.sum()
        assert got["asked"] == got["answered"] == np.isin(index_TK[valid_T], filled).sum()
        assert got["displaced"] == np.isin(dense_TK[valid_T], sorted(blocked)).any(axis=1).sum()
        assert got["reached_pruned"] == 0


@pytest.mark.parametrize("filled", FILLED, ids=["reroute", "constant", "mixed"])
def test_decoding_with_a_cache_counts_each_token_once(moe, filled):
    ids = random_ids(3, 12)
    with torch.inference_mode(), Instrument(moe, programs(moe, filled)) as whole:
        moe.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    with torch.inference_mode(), Instrument(moe, programs(moe, filled)) as steps:
        cache = DynamicCache(config=moe.model.config)
        for start, end in ((0, 7), (7, 8), (8, 9), (9, 12)):
            mask = torch.ones(3, end, dtype=torch.int64)
            moe.model(input_ids=ids[:, start:end], attention_mask=mask, cache=cache, use_cache=True)
    close(counted(whole), counted(steps))


def test_generation_counts_prompt_and_steps_without_the_padding(moe):
    ids, mask = random_ids(2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[0, :4] = 0
    with torch.inference_mode(), Instrument(moe, programs(moe, ())) as instrument:
        moe.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=1
        )
    for counters in instrument.counters.values():
        # Prompt: 2 + 6 tokens; then 4 more forwards of one token for each of the two.
        assert counters.calls == 8 + 2 * 4
        assert counters.slots == 4 * 16


@pytest.mark.parametrize("filled", FILLED, ids=["reroute", "constant", "mixed"])
def test_counters_of_two_batches_add_up(moe, filled):
    ids = random_ids(4, 12)
    with torch.inference_mode(), Instrument(moe, programs(moe, filled)) as whole:
        moe.model(input_ids=ids)
    with torch.inference_mode(), Instrument(moe, programs(moe, filled)) as parts:
        moe.model(input_ids=ids[:1])
        moe.model(inputs_embeds=moe.model.get_input_embeddings()(ids[1:]))
    close(counted(whole), counted(parts))


def test_a_slot_that_reaches_a_pruned_expert_is_counted(moe):
    layer = moe.layers[0]
    with torch.inference_mode(), Instrument(moe, programs(moe, ())) as instrument:
        # A hook that runs after ours and sends every token back to a pruned expert.
        handle = layer.router.register_forward_hook(lambda _m, _a, out: (out[0], out[1], torch.full_like(out[2], 3)))
        moe.model(input_ids=random_ids(1, 10))
        handle.remove()
    assert instrument.counters[layer.index].reached_pruned == 40


def test_blocks_are_numbered_over_the_pass(moe):
    numbers = []
    with torch.inference_mode(), Instrument(moe, observer=lambda _l, batch: numbers.append(batch.block_T.tolist())):
        moe.model(input_ids=random_ids(2, 3))
        moe.model(input_ids=random_ids(1, 3))
    assert numbers[:2] == [[0, 0, 0, 1, 1, 1]] * 2
    assert numbers[-1] == [2, 2, 2]
