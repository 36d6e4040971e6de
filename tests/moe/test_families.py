"""Every family opens, and with nothing pruned every way of rewriting its slots changes no bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from prunebench.errors import UsageError
from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.routing import Scale
from prunebench.testing import FAMILIES, random_model
from prunebench.testing.families import APART, KERNELS, empty_mask, forced, half_of, logits_of, slots

# float32 in the readable reference and bfloat16 in the GPU's kernel; the other four combinations at night.
USUAL = {("float32", "eager"), ("bfloat16", "grouped_mm")}
WAYS = [
    pytest.param(dtype, kernel, marks=[] if (dtype, kernel) in USUAL else [pytest.mark.slow], id=f"{dtype}-{kernel}")
    for dtype, kernel in itertools.product(("float32", "bfloat16"), KERNELS)
]


def opened(family: str, dtype: str = "float32", kernel: str = "eager", **options):
    return open_model(
        random_model(family, dtype=getattr(torch, dtype), experts_implementation=kernel, **options), probe_tokens=64
    )


@pytest.mark.parametrize(("dtype", "kernel"), WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_with_nothing_pruned_no_rewriting_changes_a_bit(family, dtype, kernel):
    moe = opened(family, dtype, kernel)
    assert empty_mask(moe).exact
    for scale in ("keep", "renorm", "interp:0.5", f"ref:{moe.layers[0].top_k}"):
        kind = Scale.parse(scale).kind
        found = forced(moe, scale)
        assert found.exact is (True if kind in moe.convention.scales else None), (scale, found.why)
    found = slots(moe)
    assert found.exact or (found.why == APART and dtype == "float32"), found.why


@pytest.mark.parametrize(("dtype", "kernel"), WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_masked_no_token_reaches_a_pruned_expert_and_every_slot_is_filled(family, dtype, kernel):
    moe = opened(family, dtype, kernel)
    plain = logits_of(moe)
    for scale in moe.convention.scales[:2]:
        programs = {layer.index: LayerProgram(half_of(layer), scale=Scale(scale)) for layer in moe.layers}
        with Instrument(moe, programs) as instrument:
            masked = logits_of(moe)
        assert torch.isfinite(masked).all()
        assert (masked - plain).abs().max() > plain.std() / 10, "half of the experts matter"
        for layer in moe.layers:
            counted = instrument.counters[layer.index].read()
            assert (counted["calls"], counted["slots"]) == (96, 96 * layer.top_k)
            assert counted["reached_pruned"] == counted["empty"] == 0
            assert counted["displaced"] > 0


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama4"])
def test_an_observer_sees_the_layer_and_changes_no_bit(family):
    moe = opened(family)
    plain, seen = logits_of(moe), {}
    with Instrument(moe, observer=lambda layer, batch: seen.setdefault(layer.index, batch)):
        assert torch.equal(plain, logits_of(moe))
    for layer in moe.layers:
        batch = seen[layer.index]
        others = int((batch.index_TK >= layer.expert_count).sum())
        assert (others > 0) == (layer.convention.identities > 0)
        assert batch.counts_E.shape == (layer.expert_count,)
        assert int(batch.counts_E.sum()) == len(batch.expert_S) == 96 * layer.top_k - others
        assert batch.scores_TE.dtype == torch.float32
        assert batch.scores_TE.shape == (96, layer.expert_count)
        assert batch.outputs_SD.shape[1] == batch.x_TD.shape[1] == layer.width
        for expert, start, end in batch.segments[:2]:
            own_SD = layer.run_experts(batch.x_TD[batch.token_S[start:end]], batch.expert_S[start:end])
            torch.testing.assert_close(batch.outputs_SD[start:end], own_SD)
            assert all(len(part) for part in layer.weights(expert).values())


def test_a_layer_with_gates_on_the_input_has_no_un_weighted_outputs_to_observe():
    with (
        pytest.raises(UsageError, match=r"Llama4Router multiplies gates into the experts' input; in model.layers.0"),
        Instrument(opened("llama4"), observer=lambda *_: None),
    ):
        pass


def test_a_fill_of_a_layer_with_gates_on_the_input_answers_the_scaled_input():
    moe = opened("llama4")
    seen = []

    class Look(torch.nn.Module):
        def forward(self, x_SD):
            seen.append(x_SD)
            return torch.zeros_like(x_SD)

    layer = moe.layers[0]
    with Instrument(moe, {layer.index: LayerProgram((3,), {3: Look()})}) as instrument:
        logits_of(moe)
    counted = instrument.counters[layer.index].read()
    assert counted["asked"] == counted["answered"] == len(seen[0]) > 0


def test_hash_layers_stay_and_the_others_can_be_pruned():
    moe = opened("deepseek_v4.hash")
    assert [layer.index for layer in moe.layers] == [1, 2]
    assert [(one.index, one.name) for one in moe.unprunable] == [(0, "model.layers.0.mlp")]
    assert "token id" in moe.unprunable[0].reason
    with pytest.raises(UsageError, match=r"no MoE layers that can be pruned.*fixed table by token id"):
        opened("deepseek_v4", mlp_layer_types=["hash_moe"] * 3)


def test_a_known_router_that_cannot_be_pruned_is_refused_with_the_reason():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "jetmoe",
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=1,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=16,
        num_local_experts=4,
    )
    with pytest.raises(UsageError, match=r"JetMoeTopKGating cannot be pruned: it sorts .* in model.layers.0"):
        open_model(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["gates", "selection"])
def test_a_changed_router_forward_fails_loudly_and_by_name(family, part):
    """What another transformers version would look like: every family's router, altered a little."""
    moe = opened(family)
    router = moe.layers[-1].router
    forward = type(router).forward

    def altered(self, *args, **kwargs):
        output = list(forward(self, *args, **kwargs))
        dense = len(output) == 2
        if part == "gates":
            output[0 if dense else 1] = output[0 if dense else 1] * (1 + 2e-7)
        elif dense:
            output[0] = output[0].roll(1, dims=1)
        else:
            output[2] = output[2].roll(1, dims=0)
        return tuple(output)

    router.forward = altered.__get__(router)
    with pytest.raises(UsageError, match=f"{type(router).__name__}.*replayed (gates|selection).*convention.py") as info:
        open_model(moe.model)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "nemotron_h", "gpt_oss", "longcat_flash", "gemma4"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_pruned_expert_with_nan_weights_poisons_no_token(family, kernel):
    moe = opened(family, kernel=kernel)
    _poisoned(moe)
    with Instrument(moe, {x.index: LayerProgram(half_of(x), scale=Scale("renorm")) for x in moe.layers}):
        assert torch.isfinite(logits_of(moe)).all()


def test_nor_where_all_experts_run_on_every_token():
    moe = opened("llama4")
    _poisoned(moe)
    with Instrument(moe, {x.index: LayerProgram(half_of(x), scale=Scale("renorm")) for x in moe.layers}):
        assert torch.isfinite(logits_of(moe)).all()


def _poisoned(moe) -> None:
    for layer in moe.layers:
        for expert in half_of(layer):
            for weight in layer.weights(expert).values():
                weight.fill_(torch.nan)
