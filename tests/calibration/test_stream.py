"""The streamed fit pass: proven layers, the score pass's numbers, any number of equal visits, one layer's memory."""

from __future__ import annotations

import dataclasses
import functools
import gc
import types
from hashlib import sha256

import numpy as np
import pytest
import torch

from prunebench.calibration import (
    CalibrationSpec,
    CalibrationTokens,
    Checkpoint,
    Count,
    GateSum,
    OutputMoments,
    Statistic,
    fit_pass,
    only_experts,
    score_pass,
    stream_layers,
)
from prunebench.calibration.statistics import BUILT_IN
from prunebench.errors import IntegrityError, UsageError
from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.moe.decoder import prove
from prunebench.routing import Scale
from prunebench.testing import FAMILIES, random_ids, random_model

# Gates on the experts' input leave no un-weighted outputs to observe.
OBSERVABLE = [family for family in FAMILIES if family != "llama4"]
SHARES_KEYS = {
    "family": "gemma4",
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
}


@functools.cache
def opened(family: str, kernel: str = "eager", dtype: torch.dtype = torch.float32):
    return open_model(random_model(family, experts_implementation=kernel, dtype=dtype))


def tokens(ids_BL: torch.Tensor | None = None) -> CalibrationTokens:
    """Five blocks: with two of them in a forward, the last batch is uneven."""
    ids_BL = random_ids(5, 16) if ids_BL is None else ids_BL
    return CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")


def batches(ids_BL: torch.Tensor | None = None, rows: int = 2) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": part} for part in (random_ids(5, 16) if ids_BL is None else ids_BL).split(rows)]


def fresh() -> list[Statistic]:
    return [kind() for kind in BUILT_IN]


def same(one, other) -> None:
    """Every state of two passes, bit for bit."""
    assert one.keys() == other.keys()
    for index, statistics in one.items():
        assert statistics.keys() == other[index].keys()
        for name, statistic in statistics.items():
            for part, value in statistic.state.items():
                assert torch.equal(value, other[index][name].state[part]), (index, name, part)


def digest(batch) -> str:
    # What is cached on a batch is there only once somebody has asked for it.
    given = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    fields = [value for value in given if isinstance(value, torch.Tensor)]
    return sha256(b"".join(value.contiguous().view(torch.uint8).numpy().tobytes() for value in fields)).hexdigest()


def observed(moe, inputs, programs=None) -> dict[int, dict[str, Statistic]]:
    """Built-in statistics through one Instrument and full forwards, without any of the code under test."""
    layers = {layer.index: {statistic.name: statistic for statistic in fresh()} for layer in moe.layers}
    for layer in moe.layers:
        for statistic in layers[layer.index].values():
            statistic.start(layer.expert_count, layer.width, layer.device)

    def look(layer, batch):
        for statistic in layers[layer.index].values():
            statistic.update(batch)

    with torch.inference_mode(), Instrument(moe, programs, observer=look):
        for batch in inputs:
            moe.model(**batch, use_cache=False)
    return layers


def everything(visit) -> dict[str, torch.Tensor]:
    """Work that keeps all built-in statistics."""
    measured = visit.measure(fresh())
    return {f"{name}/{part}": value for name, one in measured.items() for part, value in one.state.items()}


def untouched(moe) -> bool:
    """No hook and no stand-in is left on the model."""
    return not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in moe.model.modules())


# --- the layers


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_called_alone_gives_the_full_forwards_hidden_states(family):
    moe = opened(family)
    inputs = batches(random_ids(3, 12))
    stack, proof = prove(moe, inputs[0])
    assert proof.streamed
    assert not proof.reason
    assert proof.layers == len(moe.model.model.layers)
    expected: list[list[torch.Tensor]] = []

    def keep(_layer, _args, output):
        expected[-1].append((output[0] if isinstance(output, tuple) else output).clone())

    handles = [layer.register_forward_hook(keep) for layer in moe.model.model.layers]
    with torch.inference_mode():
        for batch in inputs:
            expected.append([])
            moe.model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    hidden: list[torch.Tensor | None] = [None] * len(inputs)
    with torch.inference_mode():
        for position in range(len(stack.layers)):
            for number, batch in enumerate(inputs):
                hidden[number] = stack.run(batch, position, position, hidden[number])
                assert torch.equal(hidden[number], expected[number][position])
        # A stretch is as good as its layers.
        assert torch.equal(stack.run(inputs[0], 0, len(stack.layers) - 1), hidden[0])
    assert untouched(moe)


def test_hooks_of_others_see_the_layers_true_input():
    moe = opened("olmoe")
    batch = batches()[0]
    stack, _ = prove(moe, batch)
    seen: list[torch.Tensor] = []
    handle = stack.layers[1].register_forward_pre_hook(lambda _layer, args: seen.append(args[0].clone()))
    with torch.inference_mode():
        after = stack.run(batch, 0, 0)
        stack.run(batch, 1, 1, after)
    handle.remove()
    assert torch.equal(seen[0], after)


@pytest.mark.parametrize("family", OBSERVABLE)
def test_statistics_are_the_score_passs_bit_for_bit(family):
    moe = opened(family)
    fit = fit_pass(moe, tokens(), fresh(), batch_tokens=32)
    assert fit.proof.streamed
    assert fit.scores.tokens == 80
    same(fit.scores.layers, score_pass(moe, tokens(), fresh(), batch_tokens=32).layers)


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2", "deepseek_v3.groups", "granitemoe", "deepseek_v4.hash"])
def test_so_they_are_in_bfloat16(family, kernel):
    moe = opened(family, kernel, torch.bfloat16)
    fit = fit_pass(moe, tokens(), fresh(), batch_tokens=32)
    assert fit.proof.streamed
    same(fit.scores.layers, score_pass(moe, tokens(), fresh(), batch_tokens=32).layers)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek_v2", {"num_hidden_layers": 5, "first_k_dense_replace": 2}),
        ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 3}),
        ("mixtral", {"sliding_window": 4}),
        ("olmoe", {"attn_implementation": "eager"}),
        ("gpt_oss", {"num_hidden_layers": 4, "sliding_window": 4}),
        ("gemma4", {**SHARES_KEYS, "num_kv_shared_layers": 0}),
    ],
    ids=["two dense", "three dense", "one window", "eager masks", "masks by type", "inputs per layer"],
)
def test_dense_layers_and_arguments_of_all_kinds_need_no_care(family, options):
    moe = open_model(random_model(**{"family": family, **options}))
    fit = fit_pass(moe, tokens(), fresh(), batch_tokens=32)
    assert fit.proof.streamed
    same(fit.scores.layers, score_pass(moe, tokens(), fresh(), batch_tokens=32).layers)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gemma4"])
def test_padding_is_routed_and_never_counted(family, side):
    moe = opened(family)
    ids, lengths = random_ids(5, 16), (16, 9, 1, 12, 5)
    mask, positions = torch.zeros(5, 16, dtype=torch.int64), torch.zeros(5, 16, dtype=torch.int64)
    for row, length in enumerate(lengths):
        place = slice(16 - length, None) if side == "left" else slice(None, length)
        mask[row, place], positions[row, place] = 1, torch.arange(length)
    parts = zip(ids.split(2), mask.split(2), positions.split(2), strict=True)
    inputs = [{"input_ids": i, "attention_mask": m, "position_ids": p} for i, m, p in parts]
    blocks: list[torch.Tensor] = []
    result = stream_layers(
        moe,
        inputs,
        lambda visit: visit.observe(lambda batch: blocks.append(batch.block_T)) or everything(visit),
        layers=[moe.layers[-1].index],
    )
    assert result.tokens == sum(lengths)
    assert result.proof.streamed
    assert torch.cat(blocks).bincount().tolist() == list(lengths)
    expected = observed(moe, inputs)[moe.layers[-1].index]
    for name, statistic in expected.items():
        for part, value in statistic.state.items():
            assert torch.equal(result.layers[moe.layers[-1].index][f"{name}/{part}"], value)
    assert int(expected["count"].value().sum()) == 4 * sum(lengths)


# --- visits


@pytest.mark.parametrize("place", ["host", "device", "disk"])
def test_every_visit_sees_identical_tensors_and_the_right_blocks(place, tmp_path):
    moe = opened("deepseek_v2")
    seen: dict[int, list[list[str]]] = {}
    where = tmp_path / "room" if place == "disk" else place
    names: list[int] = []

    def work(visit):
        assert (visit.tokens, visit.blocks, visit.batches) == (80, 5, 3)
        for _ in range(3):
            shown: list[tuple[str, torch.Tensor]] = []
            visit.observe(lambda batch, shown=shown: shown.append((digest(batch), batch.block_T)))
            assert torch.equal(torch.cat([blocks for _, blocks in shown]), torch.arange(5).repeat_interleave(16))
            seen.setdefault(visit.layer.index, []).append([one for one, _ in shown])
        names.append(len(list(tmp_path.rglob("hidden-*"))))
        return {}

    result = stream_layers(moe, batches(), work, buffers=where)
    assert result.proof.streamed
    for visits in seen.values():
        assert visits[0] == visits[1] == visits[2]
        assert len(visits[0]) == 3
    # Two buffers at most; the last layer's outputs are not kept.
    assert names == ([6, 3] if place == "disk" else [0, 0])
    assert not list(tmp_path.rglob("hidden-*"))
    whole: dict[int, list[str]] = {}
    with (
        torch.inference_mode(),
        Instrument(moe, observer=lambda at, b: whole.setdefault(at.index, []).append(digest(b))),
    ):
        for batch in batches():
            moe.model(**batch, use_cache=False)
    assert {index: visits[0] for index, visits in seen.items()} == whole


class Residual(Statistic):
    """Σ ‖f - μ‖² per expert, with the means of an earlier visit."""

    name = "residual"
    after = ("output_moments",)

    def start(self, experts, width, device):
        self.state = {"sum_E": torch.zeros(experts, dtype=torch.float64, device=device)}

    def given(self, earlier):
        self.mean_ED = torch.from_numpy(earlier["output_moments"].value().mean_ED)

    def update(self, batch):
        rows = (batch.outputs_SD.double() - self.mean_ED[batch.expert_S]).square().sum(-1)
        self.state["sum_E"].index_add_(0, batch.expert_S, rows)

    def value(self):
        return self.state["sum_E"].numpy()


class Share(Residual):
    """One that comes after two others, of two visits."""

    name = "share"
    after = ("residual", "count")

    def given(self, earlier):
        self.mean_ED = torch.zeros(1)
        self.state["of_E"] = torch.from_numpy(earlier["residual"].value() * (earlier["count"].value() > 0))

    def update(self, batch):
        pass


def test_a_statistic_that_comes_after_another_gets_another_visit_and_its_value():
    moe = opened("olmoe")
    visits: list[str] = []
    fit = fit_pass(
        moe,
        tokens(),
        [Share(), Residual(), OutputMoments()],
        progress=lambda what, done, total: visits.append(what),
    )
    assert sorted({what for what in visits if "visit" in what}) == [
        f"layer {index}, visit {number}" for index in (0, 1) for number in (1, 2, 3)
    ]
    for statistics in fit.scores.layers.values():
        moments = statistics["output_moments"].value()
        wanted_E = (moments.variance_ED * moments.count_E[:, None]).sum(1)
        np.testing.assert_allclose(statistics["residual"].value(), wanted_E, rtol=1e-12)
        np.testing.assert_array_equal(statistics["share"].state["of_E"].numpy(), statistics["residual"].value())


def test_an_after_that_cannot_be_met_and_a_score_pass_that_cannot_meet_it_are_refused():
    moe = opened("olmoe")
    with pytest.raises(UsageError, match="'residual' comes after 'output_moments', which is not there before it"):
        fit_pass(moe, tokens(), [Residual()])
    circle = type("Circle", (Residual,), {"name": "circle", "after": ("circle",)})
    with pytest.raises(UsageError, match="'circle' comes after 'circle'"):
        fit_pass(moe, tokens(), [circle()])
    with pytest.raises(UsageError, match="'residual' comes after output_moments; in a score pass"):
        score_pass(moe, tokens(), [OutputMoments(), Residual()])
    with pytest.raises(UsageError, match="two statistics of one name"):
        fit_pass(moe, tokens(), [GateSum(), GateSum()])


def test_pruned_experts_rows_alone_are_those_of_the_whole():
    moe = opened("deepseek_v2")
    experts = {1: (0, 3, 7), 2: (5,)}
    whole = fit_pass(moe, tokens(), fresh(), batch_tokens=32).scores.layers
    part = fit_pass(moe, tokens(), fresh(), batch_tokens=32, experts=experts).scores.layers
    for index, ids in experts.items():
        rest = [expert for expert in range(16) if expert not in ids]
        for name, statistic in part[index].items():
            for key, value in statistic.state.items():
                assert torch.equal(value[list(ids)], whole[index][name].state[key][list(ids)])
                assert not value[rest].any()
    only = fit_pass(moe, tokens(), fresh(), batch_tokens=32, experts={2: range(16)}).scores.layers
    same(only, {2: whole[2]})


def test_a_restricted_batch_keeps_its_tokens_and_only_the_wanted_rows():
    moe = opened("olmoe")
    wanted_E = torch.zeros(16, dtype=torch.bool)
    wanted_E[[2, 9]] = True

    def see(batch):
        part = only_experts(batch, wanted_E)
        assert part.tokens == batch.tokens
        assert part.counts_E.sum() == len(part.expert_S) == wanted_E[batch.expert_S].sum()
        assert torch.equal(part.counts_E[[2, 9]], batch.counts_E[[2, 9]])
        assert torch.equal(part.outputs_SD, batch.outputs_SD[wanted_E[batch.expert_S]])
        assert [expert for expert, _, _ in part.segments] == [e for e in (2, 9) if batch.counts_E[e]]

    stream_layers(moe, batches(), lambda visit: visit.observe(see) or {})


def test_survivors_can_answer_the_pruned_experts_tokens_within_a_visit():
    moe = opened("olmoe")

    def work(visit):
        def see(batch):
            x_SD = batch.x_TD[batch.token_S]
            own_SD = visit.layer.run_experts(x_SD, batch.expert_S)
            assert torch.allclose(own_SD, batch.outputs_SD, atol=1e-6)
            other_SD = visit.layer.run_experts(x_SD, torch.full_like(batch.expert_S, 7))
            assert len(x_SD) == 0 or not torch.allclose(other_SD, batch.outputs_SD, atol=1e-3)

        visit.observe(see, experts=[1, 4])
        return {}

    stream_layers(moe, batches(), work)


# --- what is installed, and what changes on the way


def rerouted(moe) -> dict[int, LayerProgram]:
    return {layer.index: LayerProgram((0, 1, 2, 3), scale=Scale("renorm")) for layer in moe.layers}


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_whatever_is_installed_is_what_gets_measured(family):
    moe = opened(family)
    with Instrument(moe, rerouted(moe)):
        expected = score_pass(moe, tokens(), fresh(), batch_tokens=32).layers
        same(fit_pass(moe, tokens(), fresh(), batch_tokens=32).scores.layers, expected)
    same(fit_pass(moe, tokens(), fresh(), batch_tokens=32, programs=rerouted(moe)).scores.layers, expected)
    assert int(expected[moe.layers[0].index]["count"].value()[:4].sum()) == 0


@pytest.mark.parametrize("options", [{"family": "deepseek_v2", "num_hidden_layers": 4}, SHARES_KEYS])
def test_a_layer_may_change_before_its_outputs_go_on(options):
    moe = open_model(random_model(**options))
    programs = rerouted(moe)
    result = stream_layers(moe, batches(), everything, change=lambda layer, _kept: programs[layer.index])
    for layer in moe.layers:
        before = {index: program for index, program in programs.items() if index < layer.index}
        for name, statistic in observed(moe, batches(), before)[layer.index].items():
            for part, value in statistic.state.items():
                assert torch.equal(result.layers[layer.index][f"{name}/{part}"], value), (layer.index, name, part)
    assert untouched(moe)


def test_weights_may_change_too():
    edited, plain = (open_model(random_model("olmoe", num_hidden_layers=3)) for _ in range(2))

    def halve(layer, _kept=None):
        layer.experts.down_proj.data *= 0.5

    result = stream_layers(edited, batches(), everything, change=halve)
    for layer in plain.layers:
        expected = observed(plain, batches())[layer.index]
        assert torch.equal(
            result.layers[layer.index]["output_moments/mean_ED"], expected["output_moments"].state["mean_ED"]
        )
        halve(layer)


# --- the proof


def leave_behind(moe, reader: int) -> None:
    """Layer 0 leaves its output on itself, and a later layer adds it to its own."""
    layers = moe.model.model.layers
    native = type(layers[0]).forward

    def leaving(self, *args, **kwargs):
        self.left = native(self, *args, **kwargs)
        return self.left

    def reading(self, *args, **kwargs):
        return native(self, *args, **kwargs) + 0.1 * layers[0].left

    layers[0].forward = types.MethodType(leaving, layers[0])
    layers[reader].forward = types.MethodType(reading, layers[reader])


def test_a_layer_that_reads_what_another_left_behind_is_found_out_and_gets_full_passes():
    moe = open_model(random_model("olmoe", num_hidden_layers=4))
    leave_behind(moe, 2)
    said: list[str] = []
    fit = fit_pass(moe, tokens(), fresh(), batch_tokens=32, progress=lambda what, done, total: said.append(what))
    assert not fit.proof.streamed
    assert fit.proof.reason == (
        "decoder layer 2 (OlmoeDecoderLayer), called alone, gives other hidden states than in the full forward"
    )
    assert fit.proof.layers == 2
    assert not any("hidden states" in what for what in said)
    same(fit.scores.layers, score_pass(moe, tokens(), fresh(), batch_tokens=32).layers)


def test_a_layer_that_misses_something_says_what():
    moe = open_model(random_model(**SHARES_KEYS))
    fit = fit_pass(moe, tokens(), fresh(), batch_tokens=32)
    assert fit.proof.to_json() == {
        "streamed": False,
        "reason": "decoder layer 2 (Gemma4TextDecoderLayer) cannot be called alone: KeyError: 'sliding_attention'",
        "layers": 2,
        "tokens": 32,
    }
    same(fit.scores.layers, score_pass(moe, tokens(), fresh(), batch_tokens=32).layers)


def test_layers_that_are_not_called_once_in_order_get_whole_forwards():
    moe = open_model(random_model("olmoe", num_hidden_layers=3))
    layers = moe.model.model.layers
    once = type(layers[1]).forward
    # The last layer sends its output through the middle one again.
    layers[2].forward = types.MethodType(
        lambda self, hidden, **kwargs: layers[1](once(self, hidden, **kwargs), **kwargs), layers[2]
    )
    seen: list[str] = []
    result = stream_layers(
        moe, batches(), lambda visit: visit.observe(lambda b: seen.append(digest(b))) or {}, layers=[1]
    )
    assert result.proof.reason == "the full forward calls the decoder layers in the order 0, 1, 1, 2"
    whole: dict[int, list[str]] = {}
    with (
        torch.inference_mode(),
        Instrument(moe, observer=lambda at, b: whole.setdefault(at.index, []).append(digest(b))),
    ):
        for batch in batches():
            moe.model(**batch, use_cache=False)
    assert seen == whole[1]


def test_a_router_that_does_not_run_as_a_module_is_an_error():
    moe = open_model(random_model("olmoe"))
    router = moe.layers[1].router
    moe.layers[1].block.gate.forward = router.forward
    moe.layers[1].block.forward = lambda hidden: hidden
    with pytest.raises(IntegrityError, match=r"the hooks of a layer did not run; in model.layers.1.mlp"):
        fit_pass(moe, tokens(), [Count()])


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_layer_that_works_in_place_spoils_no_buffer(place):
    moe = open_model(random_model("olmoe", num_hidden_layers=3))
    layers = moe.model.model.layers
    native = type(layers[1]).forward
    layers[1].forward = types.MethodType(
        lambda self, hidden, **kwargs: native(self, hidden.mul_(2), **kwargs), layers[1]
    )

    def work(visit):
        shown: list[list[str]] = [[], []]
        for one in shown:
            visit.observe(lambda batch, one=one: one.append(digest(batch)))
        assert shown[0] == shown[1]
        return everything(visit)

    result = stream_layers(moe, batches(), work, buffers=place)
    assert result.proof.streamed
    for index, statistics in observed(moe, batches()).items():
        for name, statistic in statistics.items():
            for part, value in statistic.state.items():
                assert torch.equal(result.layers[index][f"{name}/{part}"], value)


# --- killed and resumed


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("options", [{"family": "deepseek_v2", "num_hidden_layers": 5}, SHARES_KEYS])
def test_a_pass_killed_after_a_layer_goes_on_behind_it_with_equal_numbers(options, sequential, tmp_path):
    moe = open_model(random_model(**options))
    programs = rerouted(moe)
    indices = [layer.index for layer in moe.layers]
    change = (lambda layer, _kept: programs[layer.index]) if sequential else None
    at_once = stream_layers(moe, batches(), everything, change=change)
    began: list[int] = []

    def work(visit, dies_at: int | None):
        began.append(visit.layer.index)
        if visit.layer.index == dies_at:
            visit.observe(None)
            raise Killed
        return everything(visit)

    checkpoint = Checkpoint(tmp_path / "fit", "key")
    for dies_at in (indices[1], indices[3], None):
        run = functools.partial(work, dies_at=dies_at)
        if dies_at is None:
            result = stream_layers(moe, batches(), run, change=change, checkpoint=checkpoint)
        else:
            with pytest.raises(Killed):
                stream_layers(moe, batches(), run, change=change, checkpoint=checkpoint, buffers=tmp_path)
        assert untouched(moe)
        assert not list(tmp_path.rglob("hidden-*"))
    assert began == [*indices[:2], *indices[1:4], *indices[3:]]
    assert result.resumed == tuple(indices[:3])
    assert list(result.layers) == indices
    for index, kept in at_once.layers.items():
        assert all(torch.equal(value, result.layers[index][name]) for name, value in kept.items())


def test_only_whole_files_of_the_same_key_are_taken_over(tmp_path):
    moe = opened("deepseek_v2")
    checkpoint = Checkpoint(tmp_path, "key")
    first = fit_pass(moe, tokens(), fresh(), checkpoint=checkpoint)
    assert first.resumed == ()
    again = fit_pass(moe, tokens(), fresh(), checkpoint=checkpoint)
    assert again.resumed == (1, 2)
    same(first.scores.layers, again.scores.layers)
    checkpoint.path(1).write_bytes(checkpoint.path(1).read_bytes()[:-9])
    assert fit_pass(moe, tokens(), fresh(), checkpoint=checkpoint).resumed == (2,)
    for other in (
        fit_pass(moe, tokens(), fresh(), checkpoint=Checkpoint(tmp_path, "other")),
        fit_pass(moe, tokens(), [Count()], checkpoint=Checkpoint(tmp_path, "other")),
        fit_pass(moe, tokens(), [Count()], experts={1: [0], 2: [0]}, checkpoint=Checkpoint(tmp_path, "other")),
    ):
        assert other.resumed == ()


# --- memory


class Gram(Statistic):
    """Σ x xᵀ per expert: the matrices that a linear fit needs."""

    name = "gram"

    def start(self, experts, width, device):
        self.state = {"sum_EDD": torch.zeros(experts, width, width, dtype=torch.float64, device=device)}

    def update(self, batch):
        for expert, start, end in batch.segments:
            x_SD = batch.x_TD[batch.token_S[start:end]].double()
            self.state["sum_EDD"][expert].addmm_(x_SD.T, x_SD)

    def value(self):
        return self.state["sum_EDD"].numpy()


def storages() -> dict[int, int]:
    """Address -> bytes of every tensor that Python tracks."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def peak(layers: int, buffers, statistic: Statistic, length: int = 64) -> float:
    """Most bytes alive at any layer beyond those before the pass, in units of the whole text's hidden states."""
    moe = open_model(random_model("olmoe", num_hidden_layers=layers, hidden_size=64))
    ids_BL = random_ids(16, length)
    gc.collect()
    before, most = storages().keys(), 0
    gc.freeze()  # what is there is not looked at again

    def work(visit):
        nonlocal most

        def see(batch):
            nonlocal most
            statistic.update(batch)
            if int(batch.block_T[-1]) == 15:
                most = max(most, sum(size for place, size in storages().items() if place not in before))

        statistic.start(16, 64, torch.device("cpu"))
        visit.observe(see)
        visit.observe(see)
        return {"layer": torch.tensor(visit.layer.index)}

    result = stream_layers(moe, batches(ids_BL, 4), work, buffers=buffers)
    gc.unfreeze()
    assert result.proof.streamed
    return most / (ids_BL.numel() * 64 * 4)


def test_memory_is_one_layers_whatever_the_depth(tmp_path):
    # From three layers on there is one with both buffers full; nothing is added by depth.
    three, eight = peak(3, "host", Count()), peak(8, "host", Count())
    assert eight <= 1.01 * three
    # Inputs and outputs of the whole text go to the disk; what is left is for one batch, a quarter of it.
    assert peak(3, tmp_path, Count()) < three - 1.7
    # Where matrices per expert dominate, as in a linear fit, eight layers take what two do.
    assert peak(8, "host", Gram(), 16) <= 1.1 * peak(2, "host", Gram(), 16)


# --- the rest


def test_progress_counts_blocks_within_a_visit_and_layers():
    seen: list[tuple[str, int, int]] = []
    fit_pass(opened("deepseek_v2"), tokens(), [Count()], batch_tokens=32, progress=lambda *step: seen.append(step))
    assert seen == [
        *(("hidden states before layer 1", done, 5) for done in (2, 4, 5)),
        *(("layer 1, visit 1", done, 5) for done in (2, 4, 5)),
        ("fit pass, layers", 1, 2),
        *(("layer 2, visit 1", done, 5) for done in (2, 4, 5)),
        ("fit pass, layers", 2, 2),
    ]


def test_a_single_layer_is_reached_without_visiting_others():
    moe = opened("deepseek_v2")
    result = stream_layers(moe, batches(), everything, layers=[2])
    assert list(result.layers) == [2]
    for name, statistic in observed(moe, batches())[2].items():
        assert all(torch.equal(v, result.layers[2][f"{name}/{part}"]) for part, v in statistic.state.items())


def test_the_model_is_left_as_it_was_whatever_happens():
    moe = opened("deepseek_v2")
    plain = moe.model(input_ids=random_ids(), use_cache=False).logits
    fit_pass(moe, tokens(), [Count()])

    def fails(_batch):
        raise RuntimeError("the observer's own fault")

    for late in (False, True):

        def work(visit, late=late):
            visit.observe(fails if not late or visit.layer.index == 2 else None)
            return {}

        with pytest.raises(RuntimeError, match="the observer's own fault"):
            stream_layers(moe, batches(), work)
    assert untouched(moe)
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(moe.model(input_ids=random_ids(), use_cache=False).logits, plain)


def test_a_layer_that_is_over_cannot_be_visited():
    kept = []
    moe = opened("olmoe")

    def work(visit):
        kept.append(visit)
        visit.observe(None)
        if len(kept) == 2:
            kept[0].observe(None)
        return {}

    with pytest.raises(UsageError, match="layer 0 is over"):
        stream_layers(moe, batches(), work)


def test_what_does_not_exist_is_refused():
    moe = opened("deepseek_v2")
    with pytest.raises(UsageError, match=r"layer 0 is no MoE layer; expected 1, 2"):
        stream_layers(moe, batches(), everything, layers=[0, 1])
    with pytest.raises(UsageError, match=r"expert 16 does not exist; in model.layers.1.mlp; expected 0 to 15"):
        fit_pass(moe, tokens(), [Count()], experts={1: [16]})
    with pytest.raises(UsageError, match="0 batches"):
        stream_layers(moe, [], everything)
    with pytest.raises(UsageError, match="each with input_ids"):
        stream_layers(moe, [{"inputs_embeds": torch.zeros(1, 2, 32)}], everything)


def test_a_folder_without_room_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot keep hidden states"):
        stream_layers(opened("olmoe"), batches(), everything, buffers=tmp_path / "file")
