"""Moments: any split of the rows, and any offset, gives the covariance of the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prunebench.calibration import CalibrationSpec, CalibrationTokens, ScoreResult, score_pass
from prunebench.errors import UsageError
from prunebench.fit import Gram, InputOutputMoments, JointMoments, Spread, pooled
from prunebench.moe import Instrument, open_model
from prunebench.testing import random_ids, random_model


def rows(count: int, width: int = 5, outputs: int = 4, *, seed: int = 0, offset: float = 0.0):
    generator = torch.Generator().manual_seed(seed)
    x_SD = torch.randn(count, width, generator=generator, dtype=torch.float64)
    y_SO = torch.randn(count, outputs, generator=generator, dtype=torch.float64) + x_SD[:, :outputs]
    return x_SD + offset, y_SO - 3 * offset


def close(moments: JointMoments, x_SD, y_SO, rtol: float = 1e-12) -> None:
    """Against numpy's covariance of all rows at once."""
    x, y = x_SD.double().numpy(), y_SO.double().numpy()
    both = np.cov(x.T, y.T, bias=True) * len(x)
    width, scale = x.shape[1], np.abs(both).max()
    assert moments.count == len(x)
    np.testing.assert_allclose(moments.mean_x_D.numpy(), x.mean(0), rtol=rtol, atol=rtol)
    np.testing.assert_allclose(moments.mean_y_O.numpy(), y.mean(0), rtol=rtol, atol=rtol)
    np.testing.assert_allclose(moments.xx_DD.numpy(), both[:width, :width], atol=rtol * scale)
    np.testing.assert_allclose(moments.xy_DO.numpy(), both[:width, width:], atol=rtol * scale)
    np.testing.assert_allclose(float(moments.yy), np.trace(both[width:, width:]), rtol=rtol)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    by_rows=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_split_of_the_rows_gives_their_covariance(sizes, by_rows, seed):
    x_SD, y_SO = rows(sum(sizes) + 1, seed=seed)
    total = JointMoments.none(5, 4)
    for x, y in zip(x_SD.split([*sizes, 1]), y_SO.split([*sizes, 1]), strict=True):
        total = total.including(x, y) if by_rows else total + JointMoments.of(x, y)
    close(total, x_SD, y_SO)


@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_streaming_equals_the_direct_covariance_under_large_offsets(offset):
    x_SD, y_SO = rows(4000, offset=offset)
    total = JointMoments.none(5, 4)
    for x, y in zip(x_SD.split(37), y_SO.split(37), strict=True):
        total = total.including(x, y)
    centred = JointMoments.of(*rows(4000))
    for part in ("xx_DD", "xy_DO", "yy"):
        # Rows were rounded when the offset was added, by 1e-16·offset of their spread.
        torch.testing.assert_close(
            getattr(total, part), getattr(centred, part), rtol=1e-15 * offset, atol=1e-12 * offset
        )
    sums_of_squares = x_SD.T @ x_SD - 4000 * torch.outer(x_SD.mean(0), x_SD.mean(0))
    assert (total.xx_DD - centred.xx_DD).abs().max() < (sums_of_squares - centred.xx_DD).abs().max() / 10


def test_rows_of_low_precision_are_accumulated_in_float64():
    x_SD, y_SO = (part.bfloat16() for part in rows(500, offset=100.0))
    close(JointMoments.of(x_SD[:200], y_SO[:200]).including(x_SD[200:], y_SO[200:]), x_SD, y_SO)


def test_adding_no_rows_changes_nothing():
    moments = JointMoments.of(*rows(9))
    none = JointMoments.none(5, 4)
    assert (moments + none) is moments
    assert (none + moments) is moments
    assert (none + none).count == 0
    assert not none.second_moment_DD.any()


def test_the_second_moment_is_not_centred():
    x_SD, y_SO = rows(50, offset=2.0)
    wanted = np.einsum("sd,se->de", x_SD.numpy(), x_SD.numpy()) / 50
    np.testing.assert_allclose(JointMoments.of(x_SD, y_SO).second_moment_DD.numpy(), wanted, rtol=1e-12)


def test_pooling_adds_what_is_within_each_expert_and_one_expert_is_itself():
    first, second = rows(30, seed=1, offset=5.0), rows(70, seed=2, offset=-9.0)
    moments = [JointMoments.of(*first), JointMoments.of(*second)]
    both = pooled(moments)
    close_rows = [part - part.mean(0) for part in first], [part - part.mean(0) for part in second]
    wanted = sum(x.T @ y for x, y in close_rows)
    torch.testing.assert_close(both.xy_DO, wanted)
    assert both.count == 100
    torch.testing.assert_close(both.mean_x_D, torch.cat([first[0], second[0]]).mean(0))
    one = pooled(moments[:1])
    assert all(torch.equal(torch.as_tensor(getattr(one, n)), torch.as_tensor(v)) for n, v in vars(moments[0]).items())
    with pytest.raises(UsageError, match="no moments to pool"):
        pooled([])


def test_a_spread_is_the_mean_and_the_error_about_any_centre():
    v_SD, _ = rows(40, offset=1e5)
    total = Spread.of(v_SD[:0])
    for part in v_SD.split(7):
        total = total + Spread.of(part)
    torch.testing.assert_close(total.mean_D, v_SD.mean(0), rtol=1e-14, atol=0)
    torch.testing.assert_close(total.squares, (v_SD - v_SD.mean(0)).square().sum(), rtol=1e-9, atol=0)
    centre_D = v_SD.mean(0) + torch.arange(5.0)
    torch.testing.assert_close(total.about(centre_D), (v_SD - centre_D).square().sum(), rtol=1e-9, atol=0)
    none = Spread.of(v_SD[:0]) + Spread.of(v_SD[:0])
    assert (none.count, float(none.squares), bool(none.mean_D.any())) == (0, 0.0, False)


def test_a_gram_is_the_mean_outer_product():
    v_SD, _ = rows(40, offset=1.0)
    total = Gram.of(v_SD[:0]) + Gram.of(v_SD[:11]) + Gram.of(v_SD[11:])
    torch.testing.assert_close(total.mean_FF, v_SD.T @ v_SD / 40)
    assert not Gram.of(v_SD[:0]).mean_FF.any()


# ------------------------------------------------------------------------------------------------ as a statistic


def tokens(ids_BL: torch.Tensor) -> CalibrationTokens:
    return CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")


def seen(moe, ids_BL):
    """Every routed row of the first layer: expert, block, input, output."""
    found = []
    with (
        torch.inference_mode(),
        Instrument(
            moe,
            observer=lambda layer, batch: (
                found.append(
                    (
                        batch.expert_S,
                        batch.block_T[batch.token_S],
                        batch.x_TD[batch.token_S].double(),
                        batch.outputs_SD.double(),
                    )
                )
                if layer.index == moe.layers[0].index
                else None
            ),
        ),
    ):
        moe.model(input_ids=ids_BL, use_cache=False)
    return found[0]


@pytest.mark.parametrize("folds", [1, 2, 3])
def test_the_statistic_is_the_moments_of_each_experts_rows_by_fold(folds):
    moe, ids_BL = open_model(random_model()), random_ids(6, 16)
    result = score_pass(moe, tokens(ids_BL), [InputOutputMoments(folds)], batch_tokens=32)
    value = result.layers[moe.layers[0].index]["input_output_moments"].value()
    expert_S, block_S, x_SD, y_SO = seen(moe, ids_BL)
    assert value.folds == folds
    for expert in range(16):
        mine = expert_S == expert
        if mine.any():
            close(value.all(expert), x_SD[mine], y_SO[mine], rtol=1e-5)  # float32 GEMMs round by batch
        for fold in range(folds):
            chosen = mine & (block_S % folds == fold)
            moments = value.fold(expert, fold)
            assert moments.count == int(chosen.sum())
            if moments.count:
                torch.testing.assert_close(moments.mean_y_O, y_SO[chosen].mean(0), rtol=1e-4, atol=1e-6)


def test_two_streams_merge_into_one_and_the_state_survives_a_file(tmp_path):
    moe, ids_BL = open_model(random_model()), random_ids(8, 16)
    whole, first, second = (
        score_pass(moe, tokens(part), [InputOutputMoments()], batch_tokens=16)
        for part in (ids_BL, ids_BL[:4], ids_BL[4:])
    )
    whole.save(tmp_path / "pass.safetensors", "key")
    loaded = ScoreResult.load(tmp_path / "pass.safetensors", "key", [InputOutputMoments()])
    for layer in moe.layers:
        name = InputOutputMoments.name
        merged = first.layers[layer.index][name]
        merged.merge(second.layers[layer.index][name])
        wanted = whole.layers[layer.index][name].value()
        for expert in range(16):
            for fold in range(2):
                ours, theirs = merged.value().fold(expert, fold), wanted.fold(expert, fold)
                stored = loaded.layers[layer.index][name].value().fold(expert, fold)
                assert ours.count == theirs.count == stored.count
                for part in ("mean_x_D", "mean_y_O", "xx_DD", "xy_DO", "yy"):
                    torch.testing.assert_close(getattr(ours, part), getattr(theirs, part), rtol=1e-12, atol=1e-12)
                    assert torch.equal(getattr(stored, part), getattr(theirs, part))


def test_only_experts_with_rows_cost_memory():
    statistic = InputOutputMoments()
    statistic.start(64, 2048, torch.device("cpu"))
    assert sum(tensor.numel() for tensor in statistic.state.values()) == 2 * 64 + 1
    never = statistic.value().all(63)
    assert (never.count, never.xx_DD.shape) == (0, (2048, 2048))


def test_no_folds_are_refused():
    with pytest.raises(UsageError, match="0 folds; in input_output_moments"):
        InputOutputMoments(0)
