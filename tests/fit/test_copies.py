"""Smaller copies: each is the best of its kind, fits its budget, and has no mean residual (2610.41366 App. C.1)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prunebench.errors import UsageError
from prunebench.fit import (
    CopyPair,
    Gram,
    copy_errors,
    copy_size,
    low_rank_factors,
    neuron_energy,
    plain_svd,
    top_neurons,
    whitened_factors,
    whitened_svd,
    with_residual_bias,
)
from prunebench.moe import open_model
from prunebench.plan import layer_views
from prunebench.replacement import Constant, GatedWeights
from prunebench.testing import random_model

WIDTH, NEURONS = 12, 9


@pytest.fixture(scope="module")
def weights() -> GatedWeights:
    generator = torch.Generator().manual_seed(0)
    gate_FD, up_FD = torch.randn(2, NEURONS, WIDTH, generator=generator)
    return GatedWeights(gate_FD, up_FD, torch.randn(WIDTH, NEURONS, generator=generator), "silu")


@pytest.fixture(scope="module")
def x_SD() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    scale_D = torch.logspace(0.5, -2, WIDTH)
    return torch.randn(400, WIDTH, generator=generator) * scale_D + 0.3


def reference(weights: GatedWeights, x_SD) -> np.ndarray:
    """f(x) in float64, from the formula."""
    x, gate, up, down = (t.double().numpy() for t in (x_SD, weights.gate_FD, weights.up_FD, weights.down_DF))
    z = x @ gate.T
    return (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T


def test_a_gated_expert_computes_the_models_own_function(weights, x_SD):
    np.testing.assert_allclose(weights(x_SD).numpy(), reference(weights, x_SD), atol=1e-4)
    np.testing.assert_allclose(weights.double()(x_SD.double()).numpy(), reference(weights, x_SD), atol=1e-12)
    for family in ("olmoe", "granitemoe", "deepseek_v3"):
        [view, *_] = layer_views(open_model(random_model(family)), None, (), "x")
        inputs = torch.randn(20, view.width, generator=torch.Generator().manual_seed(2))
        own = GatedWeights.of(view.weights(5), "silu")
        torch.testing.assert_close(own(inputs), view.expert(5, inputs), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["svd", "svd-whitened", "neurons"])
def test_a_copy_of_full_size_is_the_expert(weights, x_SD, kind):
    hidden = Gram.of(weights.double().hidden(x_SD.double())).mean_FF
    inputs = Gram.of(x_SD).mean_FF
    copy = {
        "svd": lambda: plain_svd(weights, NEURONS),
        "svd-whitened": lambda: whitened_svd(weights, NEURONS, input_DD=inputs, hidden_FF=hidden),
        "neurons": lambda: top_neurons(weights, NEURONS, hidden.diagonal()),
    }[kind]()
    np.testing.assert_allclose(copy(x_SD).numpy(), reference(weights, x_SD), atol=2e-4)
    fitted = biased(copy, x_SD, weights(x_SD))
    assert fitted.fill.bias_D.abs().max() < 1e-5


def biased(copy, x_SD, y_SD):
    """The copy with its bias, of rows that are of blocks 0 and 1 in turn."""
    pair = CopyPair(copy, copy)
    return with_residual_bias(pair, copy_errors(pair, x_SD, y_SD, torch.arange(len(x_SD)) % 2))


def test_a_plain_svd_is_the_nearest_matrix_of_its_rank(weights):
    matrix = weights.gate_FD.double()
    for rank in (1, 4, NEURONS):
        left, right = low_rank_factors(matrix, rank)
        assert (left.shape, right.shape) == ((NEURONS, rank), (rank, WIDTH))
        singular = np.linalg.svd(matrix.numpy(), compute_uv=False)
        assert float((matrix - left @ right).square().sum()) == pytest.approx((singular[rank:] ** 2).sum(), abs=1e-12)


def test_a_whitened_svd_has_the_least_error_on_the_inputs(weights, x_SD):
    matrix, x = weights.gate_FD.double().numpy(), x_SD.double().numpy()
    moment = x.T @ x / len(x)
    for rank in (1, 3, 6):
        left, right = whitened_factors(weights.gate_FD, torch.from_numpy(moment), rank, damping=0.0)
        ours = (left @ right).numpy()
        # Independent: project the outputs of the rows onto their top principal directions.
        outputs = x @ matrix.T
        vectors = np.linalg.eigh(outputs.T @ outputs)[1][:, ::-1][:, :rank]
        np.testing.assert_allclose(ours, vectors @ vectors.T @ matrix, atol=1e-8)
        error = ((x @ (matrix - ours).T) ** 2).sum()
        tail = np.linalg.svd(outputs, compute_uv=False)[rank:]
        assert error == pytest.approx((tail**2).sum(), rel=1e-8)
        plain = torch.matmul(*low_rank_factors(weights.gate_FD, rank)).numpy()
        assert error < ((x @ (matrix - plain).T) ** 2).sum()


def test_cholesky_whitening_gives_the_same_product(weights, x_SD):
    moment = Gram.of(x_SD).mean_FF
    root = torch.linalg.cholesky(moment)
    left, middle, right = torch.linalg.svd(weights.gate_FD.double() @ root, full_matrices=False)
    wanted = left[:, :4] * middle[:4] @ right[:4] @ torch.linalg.inv(root)
    ours = torch.matmul(*whitened_factors(weights.gate_FD, moment, 4, damping=0.0))
    torch.testing.assert_close(ours, wanted, atol=1e-8, rtol=0)


def test_the_default_damping_hardly_moves_a_whitening_that_has_enough_tokens(weights, x_SD):
    moment = Gram.of(x_SD).mean_FF
    x = x_SD.double()
    errors = [
        float((x @ (weights.gate_FD.double() - left @ right).T).square().sum())
        for left, right in (whitened_factors(weights.gate_FD, moment, 4, damping=d) for d in (0.0, 1e-6))
    ]
    assert errors[1] == pytest.approx(errors[0], rel=1e-4)


@pytest.mark.parametrize("damping", [0.0, 1e-6])
def test_fewer_tokens_than_inputs_are_whitened_all_the_same(weights, x_SD, damping):
    few = x_SD[:3].double()
    product = torch.matmul(*whitened_factors(weights.gate_FD, Gram.of(few).mean_FF, 3, damping=damping))
    assert product.isfinite().all()
    wanted = few @ weights.gate_FD.double().T
    torch.testing.assert_close(few @ product.T, wanted, atol=1e-6 if damping == 0 else 1e-2, rtol=0)
    never = torch.from_numpy(np.linalg.svd(few.numpy())[2][3:])
    if damping == 0:
        assert (never @ product.T).abs().max() < 1e-6


def test_top_neurons_are_those_of_the_highest_energy_as_they_were(weights, x_SD):
    hidden_SF = weights.hidden(x_SD).double().numpy()
    energy_F = (hidden_SF**2).mean(0) * (weights.down_DF.double().numpy() ** 2).sum(0)
    copy = top_neurons(weights, 4, torch.from_numpy((hidden_SF**2).mean(0)))
    kept = np.sort(np.argsort(-energy_F)[:4])
    assert torch.equal(copy.gate_HD, weights.gate_FD[kept])
    assert torch.equal(copy.up_HD, weights.up_FD[kept])
    assert torch.equal(copy.down_DH, weights.down_DF[:, kept])


def test_a_neurons_energy_is_its_share_of_the_squared_output(weights, x_SD):
    hidden_SF = weights.hidden(x_SD).double()
    answers_SDF = hidden_SF[:, None, :] * weights.down_DF.double()
    wanted_F = answers_SDF.square().sum(1).mean(0)
    torch.testing.assert_close(neuron_energy(weights, hidden_SF.square().mean(0)), wanted_F)


def test_of_equal_neurons_the_lowest_is_kept():
    ones = torch.ones(3, 2)
    weights = GatedWeights(torch.tensor([[1.0, 0], [2, 0], [3, 0]]), ones, ones.T, "silu")
    assert top_neurons(weights, 2, torch.ones(3)).gate_HD[:, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("kind", ["svd", "neurons"])
def test_the_bias_is_the_mean_residual_whatever_the_batches(weights, x_SD, kind):
    y_SD = weights(x_SD)
    copy = plain_svd(weights, 3) if kind == "svd" else top_neurons(weights, 3, torch.ones(NEURONS))
    half = plain_svd(weights, 2)
    pair, block_S = CopyPair(copy, half), torch.arange(400) // 50
    errors = copy_errors(pair, x_SD[:0], y_SD[:0], block_S[:0])
    for x, y, block in zip(x_SD.split(33), y_SD.split(33), block_S.split(33), strict=True):
        errors = errors + copy_errors(pair, x, y, block)
    fitted = with_residual_bias(pair, errors)
    assert (fitted.tokens, fitted.fallback) == (400, "")
    direct_SD = (y_SD - fitted.fill(x_SD)).double()
    assert direct_SD.mean(0).abs().max() < 1e-5
    assert float(direct_SD.square().sum()) == pytest.approx(fitted.squared_error, rel=1e-5)
    spread_SD = y_SD.double() - y_SD.double().mean(0)
    assert fitted.constant_squared_error == pytest.approx(float(spread_SD.square().sum()), rel=1e-12)
    assert fitted.fit_share == pytest.approx(1 - fitted.squared_error / fitted.constant_squared_error)
    even_S = (block_S % 2 == 0).numpy()
    missed_SD, outputs_SD = ((y_SD - half(x_SD)).double().numpy(), y_SD.double().numpy())
    error, constant = (np.square(rows[~even_S] - rows[even_S].mean(0)).sum() for rows in (missed_SD, outputs_SD))
    assert fitted.held_out_share == pytest.approx(1 - error / constant, rel=1e-5)


def test_a_fold_without_rows_holds_nothing_out(weights, x_SD):
    pair = CopyPair(plain_svd(weights, 3), plain_svd(weights, 3))
    fitted = with_residual_bias(pair, copy_errors(pair, x_SD, weights(x_SD), torch.zeros(len(x_SD))))
    assert fitted.held_out_share is None
    assert fitted.tokens == len(x_SD)


def test_an_expert_without_tokens_is_the_constant_zero(weights, x_SD):
    copy = plain_svd(weights, 2)
    fitted = biased(copy, x_SD[:0], x_SD[:0])
    assert fitted.to_json() == with_residual_bias(CopyPair(copy, copy), None).to_json()
    assert fitted.fit_share == 0.0
    assert isinstance(fitted.fill, Constant)
    assert (fitted.fallback, fitted.tokens) == ("no routed tokens", 0)
    assert not fitted.fill(x_SD).any()


def test_values_stored_are_those_of_the_paper(weights):
    tilt_rank = 8
    for kind, each in (("svd", 3 * (WIDTH + NEURONS)), ("neurons", 3 * WIDTH)):
        size = copy_size(kind, width=WIDTH, neurons=NEURONS, tilt_rank=tilt_rank)
        copy = plain_svd(weights, size) if kind == "svd" else top_neurons(weights, size, torch.ones(NEURONS))
        assert copy.values_stored() == size * each + WIDTH
        assert size * each <= 2 * tilt_rank * WIDTH < (size + 1) * each


def test_a_copy_is_never_larger_than_the_expert():
    assert copy_size("neurons", width=12, neurons=9, tilt_rank=1000) == 9
    assert copy_size("svd", width=12, neurons=9, tilt_rank=1000) == 9


def test_a_budget_below_one_is_refused_by_name():
    with pytest.raises(UsageError, match=r"a svd copy of rank 0; in a budget of 48 values; expected at least 72"):
        copy_size("svd", width=12, neurons=12, tilt_rank=2)
    with pytest.raises(UsageError, match="a neurons copy of rank 0"):
        copy_size("neurons", width=12, neurons=12, tilt_rank=1)
    with pytest.raises(UsageError, match="unknown copy 'nmf'"):
        copy_size("nmf", width=12, neurons=12, tilt_rank=4)


@pytest.mark.parametrize("rank", [0, NEURONS + 1])
def test_sizes_out_of_range_are_refused(weights, rank):
    for make in (
        lambda: plain_svd(weights, rank),
        lambda: whitened_svd(weights, rank, input_DD=torch.eye(WIDTH), hidden_FF=torch.eye(NEURONS)),
        lambda: top_neurons(weights, rank, torch.ones(NEURONS)),
    ):
        with pytest.raises(UsageError, match=f"a copy of (rank|neurons) {rank}; expected 1 to {NEURONS}"):
            make()


def test_weights_of_another_layout_are_refused():
    with pytest.raises(
        UsageError, match=r"an expert with weights up_proj; expected down_proj, gate_up_proj; fix: this"
    ):
        GatedWeights.of({"up_proj": torch.ones(3, 2)}, "silu")
    with pytest.raises(UsageError, match=r"an expert of shapes gate \(3, 2\), up \(3, 2\), down \(3, 2\)"):
        GatedWeights(torch.ones(3, 2), torch.ones(3, 2), torch.ones(3, 2), "silu")
    with pytest.raises(UsageError, match="unknown activation 'no'"):
        GatedWeights(torch.ones(3, 2), torch.ones(3, 2), torch.ones(2, 3), "no")(torch.ones(1, 2))
