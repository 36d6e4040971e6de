"""Under a mask: the same tokens with a cache as without, ragged batches too; padding is never counted."""

from __future__ import annotations

import pytest
import torch

from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.routing import Scale
from prunebench.testing import random_ids, random_model
from prunebench.testing.families import half_of

# Full, latent and sliding attention, and sinks; then hybrids with Mamba, Mamba-2, linear attention and convolutions.
ATTENTION = ["olmoe", "deepseek_v3.groups", "gemma4", "gpt_oss", "mixtral", "ernie4_5_moe", "longcat_flash", "llama4"]
HYBRIDS = ["jamba", "granitemoehybrid", "qwen3_next", "nemotron_h", "bailing_hybrid", "lfm2_moe"]
NEW = 6
LENGTHS = (9, 4, 7)


def opened(family: str):
    return open_model(random_model(family), probe_tokens=64)


def masked(moe) -> Instrument:
    return Instrument(moe, {x.index: LayerProgram(half_of(x), scale=Scale("renorm")) for x in moe.layers})


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths, padded on the left, and their mask."""
    width = max(LENGTHS)
    ids, mask = random_ids(len(LENGTHS), width), torch.ones(len(LENGTHS), width, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        ids[row, : width - length], mask[row, : width - length] = 1, 0
    return ids, mask


def greedy(moe, ids: torch.Tensor, **options) -> torch.Tensor:
    """Tokens after the prompt, chosen by the model's own generate."""
    with torch.inference_mode():
        out = moe.model.generate(
            input_ids=ids, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=1, **options
        )
    return out[:, ids.shape[1] :]


def one_by_one(moe, ids: torch.Tensor) -> list[int]:
    """The same without any cache: the whole text again for every token."""
    text = ids.clone()
    with torch.inference_mode():
        for _ in range(NEW):
            logits = moe.model(input_ids=text, use_cache=False).logits[:, -1]
            # generate() never ends a text before its least length.
            logits[:, moe.model.generation_config.eos_token_id or 0] = -torch.inf
            text = torch.cat([text, logits.argmax(-1, keepdim=True)], dim=1)
    return text[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", [*ATTENTION, *HYBRIDS])
def test_with_a_cache_the_same_tokens_as_without(family):
    moe = opened(family)
    ids = random_ids(1, 9)
    with masked(moe) as instrument:
        cached = greedy(moe, ids, attention_mask=torch.ones_like(ids))[0].tolist()
        calls = {index: int(counters.calls) for index, counters in instrument.counters.items()}
        wanted = one_by_one(moe, ids)
    assert cached == wanted
    # The prompt, and one token for each further step; the last token is never read.
    assert set(calls.values()) == {9 + NEW - 1}
    assert all(counters.reached_pruned == 0 for counters in instrument.counters.values())
    plain = greedy(moe, ids, attention_mask=torch.ones_like(ids))[0].tolist()
    assert plain != cached, "the mask matters"


@pytest.mark.parametrize("family", [*ATTENTION, *HYBRIDS])
def test_a_ragged_batch_gives_every_prompt_its_own_tokens_and_counts_no_padding(family):
    moe = opened(family)
    ids, mask = ragged()
    with masked(moe) as instrument:
        together = greedy(moe, ids, attention_mask=mask).tolist()
        calls = {index: int(counters.calls) for index, counters in instrument.counters.items()}
        alone = []
        for row, length in enumerate(LENGTHS):
            prompt = ids[row : row + 1, ids.shape[1] - length :]
            alone.append(greedy(moe, prompt, attention_mask=torch.ones_like(prompt))[0].tolist())
    assert together == alone
    assert set(calls.values()) == {sum(LENGTHS) + len(LENGTHS) * (NEW - 1)}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*ATTENTION, *HYBRIDS])
def test_padding_on_either_side_is_routed_and_never_counted(family, side):
    moe = opened(family)
    ids, mask = random_ids(3, 12), torch.ones(3, 12, dtype=torch.int64)
    for row, pad in enumerate((0, 3, 8)):
        mask[row, slice(None, pad) if side == "left" else slice(12 - pad, None)] = 0
    ids[mask == 0] = 1
    with torch.inference_mode(), masked(moe) as padded:
        moe.model(input_ids=ids, attention_mask=mask, use_cache=False)
    with torch.inference_mode(), masked(moe) as apart:
        for row in range(3):
            moe.model(input_ids=ids[row][mask[row] == 1][None], use_cache=False)
    for index, counters in padded.counters.items():
        got, wanted = counters.read(), apart.counters[index].read()
        assert got["calls"] == wanted["calls"] == int(mask.sum())
        assert got["slots"] == wanted["slots"]
        assert got["displaced"] == wanted["displaced"], "the same tokens lost a slot"
        assert got["ratio_sum"] == pytest.approx(wanted["ratio_sum"], rel=1e-4)
