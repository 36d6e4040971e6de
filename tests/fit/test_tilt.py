"""The tilt's fit against independent solutions (2610.41366 App. B.1 and B.7)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prunebench.errors import UsageError
from prunebench.fit import (
    JointMoments,
    constant_error,
    fit_share,
    fit_tilt,
    held_out_share,
    pooled,
    reduced_rank,
    squared_error,
    weighted_fit_share,
)
from prunebench.replacement import Constant, Tilt

WIDTH, OUTPUTS = 7, 6


def rows(count: int = 200, *, seed: int = 0, offset: float = 3.0):
    """Correlated inputs, and outputs that are partly linear in them."""
    rng = np.random.default_rng(seed)
    x_SD = rng.normal(size=(count, WIDTH)) @ rng.normal(size=(WIDTH, WIDTH)) + offset
    y_SO = np.tanh(x_SD @ rng.normal(size=(WIDTH, OUTPUTS))) + rng.normal(size=(count, OUTPUTS)) * 0.3 - offset
    return x_SD, y_SO


def moments_of(x_SD, y_SO) -> JointMoments:
    return JointMoments.of(torch.from_numpy(x_SD), torch.from_numpy(y_SO))


def predict(linear, x_SD):
    z_SR = x_SD @ linear.down_RD.numpy().T - linear.offset_R.numpy()
    return linear.mean_O.numpy() + z_SR @ linear.up_OR.numpy().T


def double_tilt(linear, clip: float = 4.0) -> Tilt:
    """The fill in float64."""
    fill = Tilt(linear.down_RD.shape[1], linear.rank).double()
    fill.mean_D, fill.up_DR = linear.mean_O, linear.up_OR
    fill.down_RD, fill.offset_R, fill.clip_R = linear.down_RD, linear.offset_R, clip * linear.sigma_R
    return fill


@pytest.mark.parametrize("solver", ["svd", "gram"])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_full_rank_without_ridge_is_ordinary_least_squares(solver, offset):
    x_SD, y_SO = rows(offset=offset)
    linear = reduced_rank(moments_of(x_SD, y_SO), OUTPUTS, ridge=0.0, solver=solver)
    design = np.column_stack([x_SD - x_SD.mean(0), np.ones(len(x_SD))])
    coefficients, residual, *_ = np.linalg.lstsq(design, y_SO, rcond=None)
    np.testing.assert_allclose(predict(linear, x_SD), design @ coefficients, rtol=0, atol=1e-9 * max(1, offset / 100))
    assert squared_error(linear, moments_of(x_SD, y_SO)) == pytest.approx(residual.sum(), rel=1e-9)


def test_full_rank_with_ridge_is_the_relative_ridge_solution():
    x_SD, y_SO = rows()
    linear = reduced_rank(moments_of(x_SD, y_SO), OUTPUTS, ridge=0.05)
    x, y = x_SD - x_SD.mean(0), y_SO - y_SO.mean(0)
    # Independent form: ordinary least squares on rows extended by sqrt(λ C_jj)·e_j with target 0.
    extended = np.vstack([x, np.diag(np.sqrt(0.05 * (x**2).sum(0)))])
    coefficients = np.linalg.lstsq(extended, np.vstack([y, np.zeros((WIDTH, OUTPUTS))]), rcond=None)[0]
    np.testing.assert_allclose(predict(linear, x_SD), y_SO.mean(0) + x @ coefficients, atol=1e-10)


def optimal_by_eigenproblem(x_SD, y_SO, rank: int, ridge: float):
    """Izenman's solution without Cholesky or SVD: the generalised eigenproblem C_xy C_yx v = s G v gives span(V)."""
    x, y = x_SD - x_SD.mean(0), y_SO - y_SO.mean(0)
    gram = x.T @ x + ridge * np.diag((x**2).sum(0))
    cross = x.T @ y
    values, vectors = np.linalg.eig(np.linalg.solve(gram, cross @ cross.T))
    vectors = vectors.real[:, np.argsort(-values.real)[:rank]]
    # Best outputs for these features, in the ridged metric.
    return vectors @ np.linalg.solve(vectors.T @ gram @ vectors, vectors.T @ cross)


@pytest.mark.parametrize("solver", ["svd", "gram"])
@pytest.mark.parametrize("ridge", [0.0, 1e-2, 0.5])
@pytest.mark.parametrize("rank", range(1, OUTPUTS + 1))
def test_truncation_is_the_optimal_reduced_rank_regression_in_the_ridged_metric(rank, ridge, solver):
    x_SD, y_SO = rows()
    linear = reduced_rank(moments_of(x_SD, y_SO), rank, ridge=ridge, solver=solver)
    ours = (linear.up_OR @ linear.down_RD).numpy().T
    np.testing.assert_allclose(ours, optimal_by_eigenproblem(x_SD, y_SO, rank, ridge), atol=1e-9)
    assert np.linalg.matrix_rank(ours) == rank
    np.testing.assert_allclose(linear.up_OR.T @ linear.up_OR, np.eye(rank), atol=1e-10)


def ridged_objective(x_SD, y_SO, map_DO, ridge: float) -> float:
    x, y = x_SD - x_SD.mean(0), y_SO - y_SO.mean(0)
    return float(((y - x @ map_DO) ** 2).sum() + ridge * ((x**2).sum(0)[:, None] * map_DO**2).sum())


def test_no_other_map_of_the_rank_has_a_lower_ridged_error():
    x_SD, y_SO = rows()
    linear = reduced_rank(moments_of(x_SD, y_SO), 2, ridge=0.1)
    best = (linear.up_OR @ linear.down_RD).numpy().T
    floor, rng = ridged_objective(x_SD, y_SO, best, 0.1), np.random.default_rng(1)
    # Brute force: alternating least squares from random starts, each step exact in one factor.
    x, y = x_SD - x_SD.mean(0), y_SO - y_SO.mean(0)
    gram, cross = x.T @ x + 0.1 * np.diag((x**2).sum(0)), x.T @ y
    for _ in range(5):
        up = rng.normal(size=(OUTPUTS, 2))
        for _ in range(500):
            down = np.linalg.solve(gram, cross @ up @ np.linalg.inv(up.T @ up))
            up = cross.T @ down @ np.linalg.inv(down.T @ gram @ down)
        reached = ridged_objective(x_SD, y_SO, down @ up.T, 0.1)
        assert reached >= floor * (1 - 1e-12)
        np.testing.assert_allclose(down @ up.T, best, atol=1e-6)
    for _ in range(20):
        other = best + 0.01 * rng.normal(size=(WIDTH, 2)) @ rng.normal(size=(2, OUTPUTS))
        left, middle, right = np.linalg.svd(other)
        truncated = left[:, :2] * middle[:2] @ right[:2]
        assert ridged_objective(x_SD, y_SO, truncated, 0.1) > floor


@given(seed=st.integers(0, 999), rank=st.integers(0, OUTPUTS), ridge=st.sampled_from([1e-3, 1e-2, 1.0]))
def test_the_held_out_residual_formula_is_the_direct_evaluation(seed, rank, ridge):
    x_SD, y_SO = rows(80, seed=seed)
    other_x_SD, other_y_SO = rows(33, seed=seed + 1, offset=-2.0)
    linear = reduced_rank(moments_of(x_SD, y_SO), rank, ridge=ridge)
    for x, y in ((x_SD, y_SO), (other_x_SD, other_y_SO)):
        direct = ((y - predict(linear, x)) ** 2).sum()
        assert squared_error(linear, moments_of(x, y)) == pytest.approx(direct, rel=1e-10)
        flat = ((y - y_SO.mean(0)) ** 2).sum()
        assert constant_error(linear.mean_O, moments_of(x, y)) == pytest.approx(flat, rel=1e-10)


def test_the_limit_of_rank_zero_is_the_constant():
    x_SD, y_SO = rows()
    moments = moments_of(x_SD, y_SO)
    linear = reduced_rank(moments, 0)
    np.testing.assert_array_equal(predict(linear, x_SD), np.broadcast_to(linear.mean_O.numpy(), y_SO.shape))
    assert squared_error(linear, moments) == constant_error(moments.mean_y_O, moments) == float(moments.yy)


@pytest.mark.parametrize("rank", [0, -1, WIDTH + 1])
def test_a_tilt_of_rank_zero_is_refused_by_name(rank):
    moments = moments_of(*rows())
    for ask in (lambda: fit_tilt(moments, rank), lambda: held_out_share(moments, moments, rank), lambda: Tilt(7, rank)):
        with pytest.raises(UsageError, match=f"rank {rank} is no tilt") as info:
            ask()
        assert ("use the operator constant" in str(info.value)) is (rank < 1)


def test_a_higher_rank_holds_the_lower_ones():
    moments = moments_of(*rows())
    full = reduced_rank(moments, 5)
    errors = []
    for rank in range(6):
        cut, own = full.truncated(rank), reduced_rank(moments, rank)
        for name, value in vars(own).items():
            torch.testing.assert_close(getattr(cut, name), value)
        errors.append(squared_error(own, moments))
    assert errors == sorted(errors, reverse=True)
    with pytest.raises(UsageError, match="rank 6 of a map of rank 5"):
        full.truncated(6)


def test_where_nothing_clips_the_deployed_error_is_the_fitted_residual():
    # Square, as in a model.
    x_SD, y_SO = rows(500)
    y_SD = np.column_stack([y_SO, y_SO[:, 0] ** 2])
    moments = moments_of(x_SD, y_SD)
    linear = reduced_rank(moments, 3)
    x, y = torch.from_numpy(x_SD), torch.from_numpy(y_SD)
    fill = double_tilt(linear, clip=50.0)
    assert (fill.features(x).abs() < fill.clip_R).all()
    assert float((y - fill(x)).square().sum()) == pytest.approx(squared_error(linear, moments), rel=1e-13)
    fitted = fit_tilt(moments, 3, clip=50.0)
    assert (fitted.tokens, fitted.fallback) == (500, "")
    assert fitted.fill.mean_D.dtype == torch.float32
    deployed = float((y.float() - fitted.fill(x.float())).square().sum())
    assert deployed == pytest.approx(squared_error(linear, moments), rel=1e-5)


def test_the_offset_is_the_mean_feature_and_the_clip_four_of_its_deviations():
    x_SD, y_SO = rows(300)
    y_SD = np.column_stack([y_SO, y_SO[:, 0]])
    fill = fit_tilt(moments_of(x_SD, y_SD), 4).fill
    features_SR = x_SD @ fill.down_RD.double().numpy().T
    np.testing.assert_allclose(fill.offset_R, features_SR.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fill.clip_R, 4 * features_SR.std(0), rtol=1e-5)
    far = torch.full((1, WIDTH), 1e6)
    clipped = fill.features(far).clamp(-fill.clip_R, fill.clip_R)
    torch.testing.assert_close(fill(far), fill.mean_D + clipped @ fill.up_DR.T)
    assert torch.equal(clipped.abs()[0], fill.clip_R)


def test_on_gaussian_features_the_clip_touches_6_3e_5_of_the_values():
    generator = torch.Generator().manual_seed(0)
    width, count = 8, 250_000
    x_SD = torch.randn(count, width, generator=generator, dtype=torch.float64)
    y_SD = x_SD @ torch.randn(width, width, generator=generator, dtype=torch.float64)
    fill = double_tilt(reduced_rank(JointMoments.of(x_SD, y_SD), width))
    share = float((fill.features(x_SD).abs() > fill.clip_R).double().mean())
    expected = math.erfc(4 / math.sqrt(2))
    assert expected == pytest.approx(6.3e-5, rel=0.01)
    # 2 million values: the count is Poisson with mean 127; four deviations either way.
    assert share == pytest.approx(expected, abs=4 * math.sqrt(expected / (count * width)))


@pytest.mark.parametrize(("tokens", "falls_back"), [(0, True), (1, True), (12, True), (13, False)])
def test_at_most_four_times_the_rank_of_routed_tokens_leave_the_constant(tokens, falls_back):
    x_SD, y_SO = rows(20)
    y_SD = np.column_stack([y_SO, y_SO[:, 0]])
    moments = moments_of(x_SD[:tokens], y_SD[:tokens]) if tokens else JointMoments.none(WIDTH, WIDTH)
    fitted = fit_tilt(moments, 3)
    assert fitted.tokens == tokens
    assert isinstance(fitted.fill, Constant if falls_back else Tilt)
    assert fitted.fallback == (f"{tokens} routed tokens, at most 4·3" if falls_back else "")
    assert torch.equal(fitted.fill.mean_D, moments.mean_y_O.float())
    assert not fitted.fill.mean_D.isnan().any()
    if falls_back:
        assert held_out_share(moments, moments_of(x_SD, y_SD), 3) == 0.0


def test_an_input_that_never_varies_has_no_weight():
    x_SD, y_SO = rows(300)
    x_SD[:, 2] = 1234.5678
    linear = reduced_rank(moments_of(x_SD, y_SO), 3, ridge=0.0)
    rest = np.delete(x_SD, 2, axis=1)
    alone = reduced_rank(moments_of(rest, y_SO), 3, ridge=0.0)
    assert not linear.down_RD[:, 2].any()
    np.testing.assert_allclose(predict(linear, x_SD), predict(alone, rest), atol=1e-9)


def test_fewer_rows_than_inputs_need_a_ridge():
    moments = moments_of(*rows(4))
    assert reduced_rank(moments, 2).rank == 2
    with pytest.raises(UsageError, match=r"covariance of 4 rows is singular at ridge 0.0; expected a positive ridge"):
        reduced_rank(moments, 2, ridge=0.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 7}, "rank 7 of a map 7 → 6"),
        ({"rank": -1}, "rank -1 of a map"),
        ({"rank": 2, "ridge": -0.1}, "ridge -0.1"),
        ({"rank": 2, "solver": "qr"}, "unknown solver 'qr'"),
    ],
)
def test_a_fit_that_makes_no_sense_is_refused(options, text):
    with pytest.raises(UsageError, match=text):
        reduced_rank(moments_of(*rows()), **options)


def test_a_regression_on_no_rows_is_refused():
    with pytest.raises(UsageError, match="a regression on no rows"):
        reduced_rank(JointMoments.none(WIDTH, OUTPUTS), 2)


def test_the_scale_of_rows_and_their_number_do_not_change_the_map():
    x_SD, y_SO = rows()
    once, twice = moments_of(x_SD, y_SO), moments_of(np.tile(x_SD, (2, 1)), np.tile(y_SO, (2, 1)))
    scaled = moments_of(x_SD * np.arange(1, WIDTH + 1), y_SO)
    wanted = predict(reduced_rank(once, 3), x_SD)
    np.testing.assert_allclose(predict(reduced_rank(twice, 3), x_SD), wanted, atol=1e-10)
    # The ridge is relative to each channel, so units of the input do not matter.
    np.testing.assert_allclose(predict(reduced_rank(scaled, 3), x_SD * np.arange(1, WIDTH + 1)), wanted, atol=1e-10)


def test_a_pooled_fit_is_least_squares_with_a_mean_per_expert():
    parts = [rows(60, seed=4, offset=9.0), rows(90, seed=5, offset=-1.0)]
    shared = reduced_rank(pooled([moments_of(*part) for part in parts]), OUTPUTS, ridge=0.0)
    x_SD, y_SO = (np.vstack([part[i] for part in parts]) for i in range(2))
    who = np.repeat(np.eye(2), [60, 90], axis=0)
    coefficients = np.linalg.lstsq(np.column_stack([x_SD, who]), y_SO, rcond=None)[0][:WIDTH]
    np.testing.assert_allclose((shared.up_OR @ shared.down_RD).numpy().T, coefficients, atol=1e-9)


def test_a_pooled_fit_of_one_expert_is_the_experts_own():
    moments = moments_of(*rows())
    own, alone = reduced_rank(moments, 3), reduced_rank(pooled([moments]), 3)
    assert all(torch.equal(getattr(own, name), getattr(alone, name)) for name in vars(own))


def test_the_held_out_share_is_fitted_on_one_fold_and_scored_on_the_other():
    (x_SD, y_SO), (other_x_SD, other_y_SO) = rows(150, seed=3), rows(150, seed=3, offset=3.1)
    linear = reduced_rank(moments_of(x_SD, y_SO), 2)
    direct = 1 - ((other_y_SO - predict(linear, other_x_SD)) ** 2).sum() / ((other_y_SO - y_SO.mean(0)) ** 2).sum()
    share = held_out_share(moments_of(x_SD, y_SO), moments_of(other_x_SD, other_y_SO), 2)
    assert share == pytest.approx(direct, rel=1e-10)
    in_sample = fit_share(squared_error(linear, moments_of(x_SD, y_SO)), float(moments_of(x_SD, y_SO).yy))
    assert 0 < in_sample < 1


def test_the_fit_share_of_a_constant_that_errs_nowhere_is_zero():
    assert fit_share(0.0, 0.0) == 0.0
    assert fit_share(2.0, 8.0) == 0.75
    assert fit_share(9.0, 8.0) == -0.125


def test_the_weighted_share_is_the_mean_with_the_papers_weights():
    ops, consts, gates = [1.0, 5.0, 2.0], [4.0, 6.0, 2.0], [0.1, 0.5, 0.3]
    weights = [gate * const for gate, const in zip(gates, consts, strict=True)]  # n·E[G²]·tr Σ
    wanted = np.average([1 - o / c for o, c in zip(ops, consts, strict=True)], weights=weights)
    assert weighted_fit_share(ops, consts, gates) == pytest.approx(wanted)
