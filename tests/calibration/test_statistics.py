"""Statistics equal a float64 computation from captured layer inputs; merged streams equal one; padding never counts."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from prunebench.calibration import CalibrationSpec, CalibrationTokens, score_pass
from prunebench.calibration.statistics import BUILT_IN, COLLECTED, ReleasedMoments
from prunebench.errors import IntegrityError, UsageError
from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.routing import Scale
from prunebench.testing import CORE, random_ids, random_model

KERNELS = ["eager", "grouped_mm"]


def tokens(ids_BL: torch.Tensor) -> CalibrationTokens:
    return CalibrationTokens(CalibrationSpec("file:x", ids_BL.shape[0], ids_BL.shape[1]), ids_BL, "test")


def fresh() -> list:
    return [kind() for kind in BUILT_IN]


def flat(result) -> dict[tuple, np.ndarray]:
    """Every number of a pass, by layer, statistic and part."""
    found = {}
    for index, statistics in result.layers.items():
        for name, statistic in statistics.items():
            value = statistic.value()
            if name == "residual_sums":  # tests/calibration/test_residuals.py has its formulas
                value = {f"{q} {part}": array for q, sums in value.items() for part, array in vars(sums).items()}
            parts = value if isinstance(value, dict) else vars(value) if name == "output_moments" else {"": value}
            for part, array in parts.items():
                found[index, name, part] = np.asarray(array)
    return found


def observed(moe, batches, **options) -> dict[tuple, np.ndarray]:
    """Statistics through an Instrument of our own, batch by batch."""
    layers = {layer.index: {s.name: s for s in fresh()} for layer in moe.layers}
    for layer in moe.layers:
        for statistic in layers[layer.index].values():
            statistic.start(layer.expert_count, layer.width, layer.device)

    def look(layer, batch):
        for statistic in layers[layer.index].values():
            statistic.update(batch)

    with torch.inference_mode(), Instrument(moe, observer=look, **options):
        for batch in batches:
            moe.model(**batch)

    class Result:
        pass

    result = Result()
    result.layers = layers
    return flat(result)


def expected(oracle, family, moe, batches) -> dict[tuple, np.ndarray]:
    """Statistics from block inputs, the routers' returned slots, and the weights, in float64."""
    with torch.inference_mode(), oracle.Trace(moe.layers) as trace:
        for ids_BL in batches:
            moe.model(input_ids=ids_BL, use_cache=False)
    wanted = {}
    for layer in moe.layers:
        i, count = layer.index, layer.expert_count
        x_TD = oracle.array(torch.cat(trace.inputs[i]))
        _, gates_TK, index_TK = (oracle.array(torch.cat(parts)) for parts in zip(*trace.router[i], strict=True))
        logits_TE = oracle.array(torch.cat([parts[0] for parts in trace.router[i]]))
        p_TE = oracle.scores(oracle.ROUTERS[family], logits_TE)
        names = [
            *("count", "gate_sum", "score_sum", "norm_sum", "norm_squared_sum", "gate_norm_sum"),
            *("gate_squared_norm_squared_sum", "output_max"),
        ]
        sums = {name: np.zeros(count) for name in names}
        mean_ED, variance_ED = np.zeros((count, 32)), np.zeros((count, 32))
        for e in range(count):
            rows, slots = np.nonzero(index_TK == e)
            if not len(rows):
                continue
            f_SD, g_S = oracle.expert(layer.experts, e, x_TD[rows]), gates_TK[rows, slots]
            norm_S = np.sqrt((f_SD**2).sum(axis=1))
            sums["count"][e] = len(rows)
            sums["gate_sum"][e] = g_S.sum()
            sums["score_sum"][e] = p_TE[rows, e].sum()
            sums["norm_sum"][e] = norm_S.sum()
            sums["norm_squared_sum"][e] = (norm_S**2).sum()
            sums["output_max"][e] = np.abs(f_SD).max()
            sums["gate_norm_sum"][e] = (g_S * norm_S).sum()
            sums["gate_squared_norm_squared_sum"][e] = (g_S**2 * norm_S**2).sum()
            mean_ED[e] = f_SD.mean(axis=0)
            variance_ED[e] = f_SD.var(axis=0)
        wanted |= {(i, name, ""): value for name, value in sums.items()}
        wanted |= {
            (i, "output_moments", "count_E"): sums["count"],
            (i, "output_moments", "mean_ED"): mean_ED,
            (i, "output_moments", "variance_ED"): variance_ED,
        }
    return wanted


def near(got, wanted, tolerance: float) -> None:
    """Equal to a tolerance relative to each expert's own size of the number."""
    assert got.keys() == wanted.keys()
    for key in wanted:
        size = np.abs(wanted[key])
        # A channel of a mean may cancel to nothing: its error is relative to the expert's vector.
        size = size if size.ndim == 1 else np.broadcast_to(size.max(axis=1, keepdims=True), size.shape)
        error = np.abs(got[key] - wanted[key])
        if np.isnan(wanted[key]).all():  # residuals, where the router does not renormalise
            assert np.isnan(got[key]).all(), key
            continue
        assert (error <= tolerance * size).all(), (key, float((error / np.maximum(size, 1e-300)).max()))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", CORE)
def test_every_statistic_equals_float64_from_captured_inputs(oracle, family, kernel):
    moe = open_model(random_model(family, experts_implementation=kernel))
    result = score_pass(moe, tokens(random_ids(6, 32)), fresh(), batch_tokens=64)
    got, wanted = flat(result), expected(oracle, family, moe, random_ids(6, 32).split(2))
    assert result.tokens == 192
    got = {key: value for key, value in got.items() if key[1] != "residual_sums"}
    for key in wanted:
        if "count" in key[1] or key[2] == "count_E":
            np.testing.assert_array_equal(got[key], wanted[key])
            assert got[key].dtype == np.int64
    near(got, wanted, 1e-6)


@pytest.mark.parametrize("family", CORE)
def test_an_expert_that_was_never_routed_to_has_zeros(oracle, family):
    model = random_model(family)
    for name, module in model.named_modules():
        if name.endswith(".gate") and hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias[5] = -100.0
    moe = open_model(model)

    def exclude(layer):
        def hook(_module, _args, output):
            logits, gates, index = output
            return logits, gates, torch.where(index == 5, 6, index)

        return layer.router.register_forward_hook(hook)

    handles = [exclude(layer) for layer in moe.layers]
    result = score_pass(moe, tokens(random_ids(2, 16)), fresh())
    for handle in handles:
        handle.remove()
    for (_, name, part), array in flat(result).items():
        if name == "residual_sums" and np.isnan(array).all():
            continue  # not renormalised, or gates that are not those of the slots that the hook put in
        assert np.isfinite(array).all()
        assert not np.asarray(array[5]).any(), (name, part)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_padding_is_never_counted(family, side, kernel):
    moe = open_model(random_model(family, experts_implementation=kernel))
    ids, lengths = random_ids(4, 16), (16, 9, 1, 12)
    mask, positions = torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4, 16, dtype=torch.int64)
    padded = torch.ones(4, 16, dtype=torch.int64)
    for row, n in enumerate(lengths):
        place = slice(16 - n, None) if side == "left" else slice(None, n)
        mask[row, place], padded[row, place], positions[row, place] = 1, ids[row, :n], torch.arange(n)
    together = observed(moe, [{"input_ids": padded, "attention_mask": mask, "position_ids": positions}])
    alone = observed(moe, [{"input_ids": ids[row : row + 1, :n]} for row, n in enumerate(lengths)])
    for key in alone:
        if "count" in key[1]:
            np.testing.assert_array_equal(together[key], alone[key])
            assert together[key].sum() == 4 * sum(lengths)
    # The attention's kernel depends on the padding; nothing else differs.
    near(together, alone, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_measuring_changes_no_output_of_a_model_of_any_dtype(dtype):
    moe = open_model(random_model("qwen3_moe", dtype=dtype))
    with torch.inference_mode():
        plain = moe.model(input_ids=random_ids(2, 12), use_cache=False).logits
        statistics = [kind() for kind in COLLECTED]
        for statistic in statistics:
            statistic.start(16, 32, torch.device("cpu"))
        with Instrument(moe, observer=lambda _layer, batch: [one.update(batch) for one in statistics]):
            assert torch.equal(plain, moe.model(input_ids=random_ids(2, 12), use_cache=False).logits)


@pytest.mark.parametrize("family", ["olmoe", "granitemoe"])
def test_merged_streams_equal_one_stream(family):
    moe = open_model(random_model(family))
    ids = random_ids(6, 16)
    # One block per forward in all runs: GEMMs are not invariant to the batch, and that is not the rule under test.
    whole = score_pass(moe, tokens(ids), fresh(), batch_tokens=16)
    for cut in (1, 3):
        first = score_pass(moe, tokens(ids[:cut]), fresh(), batch_tokens=16)
        second = score_pass(moe, tokens(ids[cut:]), fresh(), batch_tokens=16)
        for index, statistics in first.layers.items():
            for name, statistic in statistics.items():
                statistic.merge(second.layers[index][name])
        got, wanted = flat(first), flat(whole)
        for key in wanted:
            if "count" in key[1] or key[2] == "count_E":
                np.testing.assert_array_equal(got[key], wanted[key])
        near(got, wanted, 1e-12)


def test_merging_an_empty_stream_changes_nothing():
    moe = open_model(random_model())
    result = score_pass(moe, tokens(random_ids(2, 8)), fresh())
    before = flat(copy.deepcopy(result))
    for statistics in result.layers.values():
        for statistic in statistics.values():
            empty = type(statistic)()
            empty.start(16, 32, torch.device("cpu"))
            statistic.merge(empty)
    after = flat(result)
    assert all(np.array_equal(after[key], before[key], equal_nan=True) for key in before)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_batch_size_does_not_matter(kernel):
    moe = open_model(random_model(experts_implementation=kernel))
    results = [flat(score_pass(moe, tokens(random_ids(6, 16)), fresh(), batch_tokens=n)) for n in (16, 32, 96, 10_000)]
    for other in results[1:]:
        for key in results[0]:
            if "count" in key[1] or key[2] == "count_E":
                np.testing.assert_array_equal(other[key], results[0][key])
        # Sums are float64, but inputs and outputs come from float32 GEMMs that round by batch: hence not 1e-12.
        near(other, results[0], 2e-5)


def test_variance_survives_a_mean_that_dwarfs_the_spread():
    moe = open_model(random_model())
    layer = moe.layers[0]
    statistic, generator = BUILT_IN[-1](), torch.Generator().manual_seed(0)
    statistic.start(16, 32, torch.device("cpu"))
    rows = []
    with torch.inference_mode():

        def look(seen, batch):
            if seen.index == layer.index:
                outputs = 1e4 + torch.rand(batch.outputs_SD.shape, generator=generator) / 64
                rows.append((batch.expert_S, outputs))
                batch.outputs_SD.copy_(outputs)
                statistic.update(batch)

        with Instrument(moe, observer=look):
            for block in random_ids(4, 24):
                moe.model(input_ids=block[None])
    expert_S, outputs_SD = (torch.cat(parts).double().numpy() for parts in zip(*rows, strict=True))
    moments = statistic.value()
    for e in np.unique(expert_S.astype(int)):
        np.testing.assert_allclose(moments.variance_ED[e], outputs_SD[expert_S == e].var(axis=0), rtol=1e-6, atol=1e-12)


def test_whatever_is_installed_is_what_gets_measured(oracle):
    moe = open_model(random_model("olmoe"))
    programs = {layer.index: LayerProgram((0, 1, 2, 3), scale=Scale("renorm")) for layer in moe.layers}
    with Instrument(moe, programs):
        result = score_pass(moe, tokens(random_ids(2, 24)), fresh())
    with torch.inference_mode(), oracle.Trace(moe.layers) as trace, Instrument(moe, programs):
        moe.model(input_ids=random_ids(2, 24))
    for layer in moe.layers:
        logits_TE, _, dense_TK = (oracle.array(part) for part in trace.router[layer.index][0])
        index_TK, gates_TK = oracle.route(oracle.ROUTERS["olmoe"], logits_TE, None, dense_TK, {0, 1, 2, 3}, "renorm")
        found = result.layers[layer.index]
        np.testing.assert_array_equal(found["count"].value(), np.bincount(index_TK.ravel(), minlength=16))
        wanted_E = np.bincount(index_TK.ravel(), weights=gates_TK.ravel(), minlength=16)
        np.testing.assert_allclose(found["gate_sum"].value(), wanted_E, rtol=1e-6)


def test_a_layer_that_does_not_fill_k_slots_per_token_voids_the_pass(monkeypatch):
    moe = open_model(random_model())
    update = BUILT_IN[0].update

    def lose_one(self, batch):
        update(self, batch)
        self.state["count_E"][0] -= 1

    monkeypatch.setattr(BUILT_IN[0], "update", lose_one)
    with pytest.raises(
        IntegrityError, match=r"127 slots for 32 tokens; in model.layers.0.mlp; expected k = 4 slots per token"
    ):
        score_pass(moe, tokens(random_ids(2, 16)), fresh())


@pytest.mark.parametrize("family", CORE)
def test_counts_and_soft_counts_keep_their_books(family):
    moe = open_model(random_model(family))
    for statistics in score_pass(moe, tokens(random_ids(3, 16)), [kind() for kind in COLLECTED]).layers.values():
        value = {name: one.value() for name, one in statistics.items()}
        assert value["count"].sum() == 4 * 48
        # p ≤ 1, and routed tokens are some of all.
        assert (value["score_sum"] <= value["count"] + 1e-6).all()
        assert (value["score_sum"] <= value["score_total"] + 1e-6).all()
        if moe.convention.simplex:
            assert value["score_total"].sum() == pytest.approx(48, rel=1e-6)
        # Jensen: a mean of squares is at least the square of the mean.
        count_E = np.maximum(value["count"], 1)
        assert (value["norm_squared_sum"] / count_E >= (value["norm_sum"] / count_E) ** 2 * (1 - 1e-9)).all()


def test_the_released_variance_depends_on_the_cuts_skips_the_first_batch_and_cannot_be_merged():
    moe = open_model(random_model())
    found = {}
    for batch_tokens in (16, 48, 96):
        layers = score_pass(moe, tokens(random_ids(6, 16)), [ReleasedMoments()], batch_tokens=batch_tokens).layers
        found[batch_tokens] = layers[0]["released_moments"].value()
    # The whole text in one forward: every expert's first batch.
    assert not found[96].any()
    assert not np.allclose(found[16], found[48])
    with pytest.raises(UsageError, match="released_moments of two streams cannot be merged"):
        layers[0]["released_moments"].merge(layers[1]["released_moments"])
