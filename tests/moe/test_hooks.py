"""What masked layers compute, against a float64 oracle; and that an Instrument leaves nothing behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from prunebench import Constant, Fill, Zero
from prunebench.errors import IntegrityError, UsageError
from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.routing import Scale
from prunebench.testing import CORE, random_ids, random_model

KERNELS = ["eager", "grouped_mm"]
PRUNED = (0, 3, 5, 6, 8, 9, 14, 15)


class Linear(Fill):
    """An answer that depends on its input, so that rows cannot be mixed up unnoticed."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        weight = torch.randn(width, width, generator=torch.Generator().manual_seed(seed)) / width**0.5
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x_SD):
        return x_SD @ self.weight

    def to_json(self):
        return {}


def hooks(model: nn.Module) -> int:
    return sum(
        len(getattr(module, name))
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_backward_hooks")
    )


def logits(moe, **options):
    with torch.inference_mode():
        return moe.model(input_ids=random_ids(), use_cache=False, **options).logits


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", CORE)
@pytest.mark.parametrize("kind", ["constant", "linear", "mixed", "keep", "renorm", "ref:6"])
def test_a_masked_layer_computes_what_the_equations_say(oracle, family, kernel, kind):
    moe = open_model(random_model(family, experts_implementation=kernel))
    rule = oracle.ROUTERS[family]
    scale = kind if ":" in kind or kind in ("keep", "renorm") else "renorm"
    filled = {"constant": PRUNED, "linear": PRUNED, "mixed": PRUNED[::2]}.get(kind, ())
    means = {e: torch.randn(32, generator=torch.Generator().manual_seed(e)) for e in filled}
    fills = {e: Constant.of(means[e]) if kind == "constant" or e == 0 else Linear(32, e) for e in filled}
    answers = {
        e: (lambda x, e=e: np.tile(oracle.array(means[e]), (len(x), 1)))
        if isinstance(fill, Constant)
        else (lambda x, fill=fill: x @ oracle.array(fill.weight))
        for e, fill in fills.items()
    }
    programs = {layer.index: LayerProgram(PRUNED, fills, Scale.parse(scale)) for layer in moe.layers}
    with torch.inference_mode(), oracle.Trace(moe.layers) as trace, Instrument(moe, programs) as instrument:
        moe.model(input_ids=random_ids(), use_cache=False)
    blocked = set(PRUNED) - set(filled)
    for layer in moe.layers:
        [(logits_TE, gates_TK, dense_TK)] = trace.router[layer.index]
        index_TK, wanted_gates_TK = oracle.array(dense_TK), oracle.array(gates_TK)
        bias_E = oracle.bias_of(layer.router)
        if blocked:
            index_TK, wanted_gates_TK = oracle.route(rule, oracle.array(logits_TE), bias_E, index_TK, blocked, scale)
        x_TD = trace.inputs[layer.index][0]
        wanted_TD = oracle.mixture(layer.experts, oracle.array(x_TD), index_TK, wanted_gates_TK, answers)
        wanted_TD += oracle.shared(layer.block, x_TD)
        np.testing.assert_allclose(oracle.array(trace.outputs[layer.index][0]), wanted_TD, atol=2e-5 * rule.factor)
        counted = instrument.counters[layer.index].read()
        assert counted["reached_pruned"] == 0
        assert counted["asked"] == counted["answered"] == np.isin(index_TK, filled).sum()
        assert counted["slots"] == 4 * 96
        assert counted["calls"] == 96
        displaced_T = np.isin(oracle.array(dense_TK), sorted(blocked)).any(axis=1)
        assert counted["displaced"] == displaced_T.sum()
        if blocked:
            ends = [
                oracle.route(rule, oracle.array(logits_TE), bias_E, oracle.array(dense_TK), blocked, end)[1]
                for end in ("keep", "renorm")
            ]
            ratio_T = (ends[0].sum(1) / ends[1].sum(1))[displaced_T]
            assert counted["ratio_sum"] == pytest.approx(ratio_T.sum(), rel=1e-6)
            assert counted["ratio_above_one"] == (ratio_T > 1).sum()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_a_batch_in_which_every_slot_asks_for_a_fill_is_answered(oracle, family, dtype, kernel):
    moe = open_model(random_model(family, experts_implementation=kernel, dtype=dtype))
    fills = {e: Constant.of(torch.full((32,), float(e))) for e in range(16)}
    programs = {layer.index: LayerProgram(tuple(range(16)), fills) for layer in moe.layers}
    with torch.inference_mode(), oracle.Trace(moe.layers) as trace, Instrument(moe, programs) as instrument:
        moe.model(input_ids=random_ids())
    for layer in moe.layers:
        [(_, gates_TK, index_TK)] = trace.router[layer.index]
        wanted_T = (gates_TK.double() * index_TK).sum(1)
        x_TD = trace.inputs[layer.index][0]
        got_TD = oracle.array(trace.outputs[layer.index][0]) - oracle.shared(layer.block, x_TD)
        rounding = 8 * torch.finfo(dtype).eps
        np.testing.assert_allclose(got_TD, np.tile(wanted_T[:, None], (1, 32)), rtol=rounding, atol=rounding * 16)
        assert instrument.counters[layer.index].answered == 4 * 96


@pytest.mark.parametrize("kernel", KERNELS)
def test_zero_is_the_constant_of_zero_bit_for_bit(kernel):
    moe = open_model(random_model("olmoe", experts_implementation=kernel))

    def run(fill):
        programs = {layer.index: LayerProgram(PRUNED, dict.fromkeys(PRUNED, fill)) for layer in moe.layers}
        with Instrument(moe, programs):
            return logits(moe)

    assert torch.equal(run(Zero(32)), run(Constant.of(torch.zeros(32))))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", CORE)
def test_leaving_restores_the_model_and_removes_every_hook(family, kernel):
    moe = open_model(random_model(family, experts_implementation=kernel))
    assert hooks(moe.model) == 0
    before = logits(moe)
    programs = {layer.index: LayerProgram(PRUNED, {0: Zero(32)}, Scale("keep")) for layer in moe.layers}
    with Instrument(moe, programs, observer=lambda *_: None):
        assert not torch.equal(before, logits(moe))
    assert hooks(moe.model) == 0
    assert torch.equal(before, logits(moe))


def test_an_exception_on_the_way_removes_every_hook():
    moe = open_model(random_model())
    before = logits(moe)

    def fail(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Instrument(moe, observer=fail):
        logits(moe)
    assert hooks(moe.model) == 0
    assert torch.equal(before, logits(moe))


def test_an_instrument_that_cannot_be_entered_leaves_no_hook():
    moe = open_model(random_model())
    programs = {0: LayerProgram((1,), scale=Scale("keep")), 1: LayerProgram((99,), scale=Scale("keep"))}
    with pytest.raises(IndexError), Instrument(moe, programs):
        pass
    assert hooks(moe.model) == 0


def test_other_peoples_hooks_stay():
    moe = open_model(random_model())
    seen = []
    handle = moe.layers[0].experts.register_forward_hook(lambda *_: seen.append(1))
    with Instrument(moe, force=True):
        logits(moe)
    logits(moe)
    assert seen == [1, 1]
    handle.remove()


def test_an_instrument_can_be_entered_again_after_a_failed_forward():
    moe = open_model(random_model())
    instrument = Instrument(moe, {0: LayerProgram((1, 2))})
    with instrument, pytest.raises(IndexError):
        moe.model(input_ids=torch.tensor([[1000]]))
    with instrument:
        logits(moe)
    assert instrument.counters[0].calls == 96


def test_layers_without_a_program_run_untouched():
    moe = open_model(random_model())
    with Instrument(moe, {1: LayerProgram((0, 1))}) as instrument:
        assert hooks(moe.model.model.layers[0]) == 0
        assert hooks(moe.model.model.layers[1]) == 3
        logits(moe)
    assert set(instrument.counters) == {1}


@pytest.mark.parametrize("bypassed", ["experts", "router"])
def test_a_masked_layer_whose_hooks_do_not_fire_is_an_error(monkeypatch, bypassed):
    moe = open_model(random_model("olmoe"))
    block = moe.layers[1].block

    def fused(hidden):
        flat = hidden.reshape(-1, hidden.shape[-1])
        _, gates, index = block.gate.forward(flat) if bypassed == "router" else block.gate(flat)
        out = block.experts(flat, index, gates) if bypassed == "router" else block.experts.forward(flat, index, gates)
        return out.view(hidden.shape)

    monkeypatch.setattr(block, "forward", fused)
    with pytest.raises(IntegrityError) as info, Instrument(moe, {1: LayerProgram((0, 1), scale=Scale("keep"))}):
        logits(moe)
    assert "model.layers.1.mlp" in str(info.value)
    assert "\n" not in str(info.value)
    assert hooks(moe.model) == 0


@pytest.mark.parametrize("outer", ["fills", "observer"])
def test_a_second_instrument_over_rewritten_rows_is_refused_and_not_measured_wrong(outer):
    moe = open_model(random_model())
    programs = {0: LayerProgram((1,), {1: Zero(32)})} if outer == "fills" else {}
    observer = (lambda *_: None) if outer == "observer" else None
    with (
        Instrument(moe, programs, observer=observer),
        pytest.raises(UsageError, match="another Instrument"),
        Instrument(moe, observer=lambda *_: None),
    ):
        pass
    assert hooks(moe.model) == 0


@pytest.mark.parametrize("shape", [(32,), (1, 32), (32, 1)])
def test_a_fill_that_answers_with_another_shape_is_refused_and_not_broadcast(shape):
    moe = open_model(random_model())

    class Wrong(Zero):
        def forward(self, x_SD):
            return x_SD.new_ones(shape) if shape != (32, 1) else x_SD[:, :1]

    instrument = Instrument(moe, {0: LayerProgram((3,), {3: Wrong(32)})})
    with (
        pytest.raises(UsageError, match=r"the fill of expert 3 answers with shape .*; in model.layers.0") as info,
        instrument,
    ):
        logits(moe)
    assert "\n" not in str(info.value)


def test_an_observer_watches_a_rerouted_model(oracle):
    moe = open_model(random_model("olmoe"))
    seen = {}
    programs = {layer.index: LayerProgram(PRUNED, scale=Scale("keep")) for layer in moe.layers}

    def look(layer, batch):
        seen.setdefault(layer.index, []).append((batch.index_TK, batch.gates_TK, batch.outputs_TKD))

    with Instrument(moe, programs, observer=look):
        together = logits(moe)
    with Instrument(moe, programs), Instrument(moe, observer=look):
        nested = logits(moe)
    assert torch.equal(together, nested)
    for first, second in seen.values():
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert not np.isin(oracle.array(first[0]), PRUNED).any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", CORE)
def test_the_observer_sees_the_very_rows_of_the_layer(oracle, family, kernel):
    moe = open_model(random_model(family, experts_implementation=kernel))
    batches = {}
    look = Instrument(moe, observer=lambda layer, batch: batches.setdefault(layer.index, batch))
    with torch.inference_mode(), oracle.Trace(moe.layers) as trace, look:
        moe.model(input_ids=random_ids())
    for layer in moe.layers:
        batch, x_TD = batches[layer.index], trace.inputs[layer.index][0]
        logits_TE, gates_TK, index_TK = trace.router[layer.index][0]
        assert torch.equal(batch.x_TD, x_TD)
        assert torch.equal(batch.index_TK, index_TK)
        assert torch.equal(batch.gates_TK, gates_TK)
        np.testing.assert_allclose(
            oracle.array(batch.scores_TE), oracle.scores(oracle.ROUTERS[family], oracle.array(logits_TE)), rtol=2e-6
        )
        assert batch.expert_S.tolist() == sorted(index_TK.flatten().tolist())
        assert torch.equal(index_TK[batch.token_S, batch.slot_S], batch.expert_S)
        assert torch.equal(gates_TK[batch.token_S, batch.slot_S], batch.gates_S)
        assert batch.counts_E.tolist() == np.bincount(oracle.array(index_TK).ravel(), minlength=16).tolist()
        assert batch.block_T.tolist() == np.repeat(np.arange(4), 24).tolist()
        for expert, start, end in batch.segments:
            wanted_SD = oracle.expert(layer.experts, expert, oracle.array(x_TD)[batch.token_S[start:end].numpy()])
            np.testing.assert_allclose(oracle.array(batch.outputs_SD[start:end]), wanted_SD, atol=1e-6, rtol=1e-5)
            assert torch.equal(batch.outputs_TKD[batch.token_S[start], batch.slot_S[start]], batch.outputs_SD[start])
        norms_S = np.linalg.norm(oracle.array(batch.outputs_SD), axis=1)
        np.testing.assert_allclose(batch.output_norms_S.numpy(), norms_S, rtol=1e-14)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", CORE)
def test_one_experts_weights_and_outputs_can_be_had_without_hooks(oracle, family, kernel):
    moe = open_model(random_model(family, experts_implementation=kernel))
    x_SD = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    layer = moe.layers[-1]
    got_SD = layer.run_experts(x_SD, torch.tensor([3, 3, 0, 15, 7]))
    wanted_SD = np.concatenate(
        [oracle.expert(layer.experts, e, oracle.array(x_SD[i : i + 1])) for i, e in enumerate((3, 3, 0, 15, 7))]
    )
    np.testing.assert_allclose(oracle.array(got_SD), wanted_SD, atol=1e-6, rtol=1e-5)
    assert torch.equal(layer.weights(7)["down_proj"], layer.experts.down_proj[7])
    with pytest.raises(UsageError, match=r"expert 16 does not exist; in .*; expected 0 to 15"):
        layer.weights(16)


def test_what_an_observer_sees_of_a_padded_batch_is_the_valid_tokens_renumbered(oracle):
    moe = open_model(random_model("deepseek_v3"))
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[0, :3], mask[2, 5:] = 0, 0
    batches = {}
    look = Instrument(moe, observer=lambda layer, batch: batches.setdefault(layer.index, batch))
    with torch.inference_mode(), oracle.Trace(moe.layers) as trace, look:
        moe.model(input_ids=random_ids(3, 8), attention_mask=mask)
    valid_T = mask.flatten().bool()
    for layer in moe.layers:
        batch = batches[layer.index]
        logits_TE, gates_TK, index_TK = (part[valid_T] for part in trace.router[layer.index][0])
        assert batch.tokens == 18
        assert torch.equal(batch.x_TD, trace.inputs[layer.index][0][valid_T])
        assert torch.equal(batch.index_TK, index_TK)
        assert torch.equal(batch.gates_TK, gates_TK)
        assert torch.equal(batch.scores_TE, logits_TE.sigmoid())
        assert torch.equal(batch.choice_TE, logits_TE.sigmoid() + layer.router.e_score_correction_bias)
        assert batch.block_T.tolist() == [0] * 5 + [1] * 8 + [2] * 5
        assert torch.equal(index_TK[batch.token_S, batch.slot_S], batch.expert_S)
        assert batch.counts_E.tolist() == np.bincount(oracle.array(index_TK).ravel(), minlength=16).tolist()
        wanted_SD = [
            oracle.expert(layer.experts, int(e), oracle.array(batch.x_TD[t])[None])[0]
            for e, t in zip(batch.expert_S, batch.token_S, strict=True)
        ]
        np.testing.assert_allclose(oracle.array(batch.outputs_SD), wanted_SD, atol=1e-6, rtol=1e-5)
