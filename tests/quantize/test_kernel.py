from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prunebench.errors import UsageError
from prunebench.quantize import gptq, output_error, round_to_nearest

BITS = (2, 3, 4)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [16, 64])
def test_integers_are_those_of_the_definition_in_float64(layer, by_hand, bits, group):
    weight, _, hessian = layer(2, 32, 64)
    found = gptq(weight, hessian, [400, 400], bits, group=group)
    for e in range(2):
        expected = by_hand.gptq_by_hand(weight[e], hessian[e], bits, group)
        assert torch.equal(found.codes_ERC[e].long(), expected)


@pytest.mark.parametrize("bits", BITS)
def test_the_grid_is_the_definition_s(layer, by_hand, bits):
    weight, _, hessian = layer(1, 6, 40)
    found = gptq(weight, hessian, [400], bits, group=16).grid
    scales, zeros = by_hand.grid_by_hand(weight[0], bits, 16)
    assert found.scale_ERG.dtype == torch.float16
    assert found.scale_ERG[0].tolist() == scales
    assert found.zero_ERG[0].tolist() == zeros


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("groups", ["static", "dynamic"])
def test_a_diagonal_hessian_rounds_to_nearest(layer, bits, groups):
    weight, _, _ = layer(3, 8, 48)
    hessian = torch.diag_embed(torch.rand(3, 48, dtype=torch.float64) + 0.1)
    found = gptq(weight, hessian, [400] * 3, bits, group=16, groups=groups)
    assert torch.equal(found.codes_ERC, round_to_nearest(weight, bits, group=16).codes_ERC)
    assert found.fallback_E == ("", "", "")


@pytest.mark.parametrize("bits", BITS)
def test_round_to_nearest_is_the_definition(layer, by_hand, bits):
    weight, _, _ = layer(1, 5, 20)
    scales, zeros = by_hand.grid_by_hand(weight[0], bits, 8)
    expected = [
        [by_hand.nearest(float(weight[0, r, c]), scales[r][c // 8], zeros[r][c // 8], bits) for c in range(20)]
        for r in range(5)
    ]
    assert round_to_nearest(weight, bits, group=8).codes_ERC[0].tolist() == expected


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("groups", ["static", "dynamic"])
def test_errors_on_the_calibration_inputs_are_below_those_of_rounding(layer, bits, groups):
    weight, inputs, hessian = layer(4, 32, 96)
    found = gptq(weight, hessian, [400] * 4, bits, group=32, groups=groups)
    plain = round_to_nearest(weight, bits, group=32)
    assert (output_error(weight, found, hessian) < output_error(weight, plain, hessian)).all()
    # The error is what its name says.
    missed = (weight.double() - found.weight_ERC.double()) @ inputs.double().transpose(1, 2)
    assert torch.allclose(output_error(weight, found, hessian), missed.square().sum((1, 2)), rtol=1e-9)


def test_dynamic_groups_take_their_grid_from_the_weights_as_they_have_become(layer, by_hand):
    """By the definition: the rest moves by Eq. 2 after each column, and a group's range is read at its first column."""
    weight, _, hessian = layer(1, 8, 48)
    damped = hessian[0] + 0.01 * hessian[0].diagonal().mean() * torch.eye(48, dtype=torch.float64)
    left, codes = weight[0].double().clone(), torch.zeros(8, 48, dtype=torch.int64)
    for c in range(48):
        if c % 16 == 0:
            scales, zeros = by_hand.grid_by_hand(left[:, c : c + 16].float(), 3, 16)
        inverse = torch.linalg.inv(damped[c:, c:])
        for r in range(8):
            scale, zero = scales[r][0], zeros[r][0]
            codes[r, c] = by_hand.nearest(float(left[r, c]), scale, zero, 3)
            left[r, c:] -= (left[r, c] - (int(codes[r, c]) - zero) * scale) / inverse[0, 0] * inverse[0]
    found = gptq(weight, hessian, [400], 3, group=16, groups="dynamic")
    assert torch.equal(found.codes_ERC[0].long(), codes)


@pytest.mark.parametrize("bits", BITS)
def test_gate_and_up_as_one_matrix_are_what_they_are_apart(layer, bits):
    weight, _, hessian = layer(3, 64, 48)
    whole = gptq(weight, hessian, [400] * 3, bits, group=16)
    for half in (slice(0, 32), slice(32, 64)):
        alone = gptq(weight[:, half], hessian, [400] * 3, bits, group=16)
        assert torch.equal(whole.codes_ERC[:, half], alone.codes_ERC)
        assert torch.equal(whole.grid.scale_ERG[:, half], alone.grid.scale_ERG)


@pytest.mark.parametrize("groups", ["static", "dynamic"])
def test_together_is_one_by_one_with_bits_of_their_own(layer, groups):
    weight, _, hessian = layer(5, 24, 72)
    bits, tokens = [2, 3, 4, 2, 8], [400, 20, 400, 400, 400]
    whole = gptq(weight, hessian, tokens, bits, group=32, groups=groups)
    for e in range(5):
        alone = gptq(weight[e : e + 1], hessian[e : e + 1], tokens[e : e + 1], bits[e], group=32, groups=groups)
        assert torch.equal(whole.codes_ERC[e], alone.codes_ERC[0])
        assert torch.equal(whole.grid.zero_ERG[e], alone.grid.zero_ERG[0])
        assert whole.fallback_E[e] == alone.fallback_E[0]
        assert int(whole.codes_ERC[e].max()) <= 2 ** bits[e] - 1


@given(order=st.permutations(range(5)))
def test_permuting_experts_permutes_results(layer, order):
    weight, _, hessian = layer(5, 8, 24)
    bits, tokens = [2, 3, 4, 3, 2], [400, 0, 400, 127, 128]
    plain = gptq(weight, hessian, tokens, bits, group=16)
    order = list(order)
    other = gptq(weight[order], hessian[order], [tokens[e] for e in order], [bits[e] for e in order], group=16)
    assert torch.equal(other.codes_ERC, plain.codes_ERC[order])
    assert list(other.fallback_E) == [plain.fallback_E[e] for e in order]
    assert torch.equal(other.weight_ERC, plain.weight_ERC[order])


def test_who_saw_few_tokens_or_none_is_rounded_to_nearest_and_says_so(layer):
    weight, _, hessian = layer(3, 8, 40)
    hessian[1] = 0.0
    found = gptq(weight, hessian, [127, 0, 128], 3, group=16)
    plain = round_to_nearest(weight, 3, group=16)
    assert found.fallback_E == ("few tokens", "few tokens", "")
    assert torch.equal(found.codes_ERC[:2], plain.codes_ERC[:2])
    assert not torch.equal(found.codes_ERC[2], plain.codes_ERC[2])
    assert (found.weight_ERC[1] != 0).any()


def test_dead_columns_are_rounded_to_nearest_and_disturb_nobody(layer, by_hand):
    weight, inputs, _ = layer(2, 8, 40)
    inputs[0, :, [3, 17, 39]] = 0.0
    hessian = inputs.double().transpose(1, 2) @ inputs.double()
    found = gptq(weight, hessian, [400] * 2, 3, group=8)
    assert found.dead_E == (3, 0)
    plain = round_to_nearest(weight, 3, group=8)
    assert torch.equal(found.codes_ERC[0][:, [3, 17, 39]], plain.codes_ERC[0][:, [3, 17, 39]])
    assert found.fallback_E == ("", "")
    # The other columns are as if the dead ones were not there, their grids held.
    expected = by_hand.gptq_by_hand(weight[0], hessian[0], 3, 8)
    assert torch.equal(found.codes_ERC[0].long(), expected)


def test_a_matrix_whose_hessian_has_no_factor_is_rounded_to_nearest_alone(layer):
    weight, _, hessian = layer(3, 8, 24)
    hessian[1] -= 3 * hessian[1].diagonal().mean() * torch.eye(24, dtype=torch.float64)
    hessian[2, 3, 5] = hessian[2, 5, 3] = torch.nan
    found = gptq(weight, hessian, [400] * 3, 4, group=8)
    assert found.fallback_E == ("", "no factor", "no factor")
    plain = round_to_nearest(weight, 4, group=8)
    assert torch.equal(found.codes_ERC[1:], plain.codes_ERC[1:])
    assert torch.equal(found.codes_ERC[:1], gptq(weight[:1], hessian[:1], [400], 4, group=8).codes_ERC)


def test_few_tokens_for_many_columns_leave_a_singular_hessian_that_damping_saves(layer):
    weight, _, hessian = layer(1, 8, 200, tokens=130)
    found = gptq(weight, hessian, [130], 3, group=64)
    assert found.fallback_E == ("",)
    assert output_error(weight, found, hessian) < output_error(weight, round_to_nearest(weight, 3, group=64), hessian)


def test_what_float32_cannot_factor_float64_may(layer, by_hand):
    weight, _, _ = layer(1, 8, 40)
    x = torch.randn(400, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x[:, :20] = x[:, 20:] + 1e-5 * x[:, :20]
    hessian = (x.T @ x)[None]
    assert torch.linalg.cholesky_ex(hessian.float().flip(1, 2)).info.item()
    found = gptq(weight, hessian, [400], 3, group=8, damping=0.0)
    assert found.fallback_E == ("",)
    expected = by_hand.gptq_by_hand(weight[0], hessian[0], 3, 8, damping=0.0)
    assert (found.codes_ERC[0].long() == expected).float().mean() > 0.9  # what is owed is still summed in float32


def test_groups_too_narrow_for_a_scale_of_16_bits_take_the_smallest_there_is(layer):
    weight, _, hessian = layer(2, 4, 16)
    weight[0, :, :8] *= 1e-9
    for found in (gptq(weight, hessian, [400] * 2, 3, group=8), round_to_nearest(weight, 3, group=8)):
        assert (found.grid.scale_ERG[0, :, 0] == 2.0**-24).all()
        assert torch.isfinite(found.weight_ERC).all()
        assert found.weight_ERC[0, :, :8].abs().max() <= 7 * 2.0**-24
    assert (round_to_nearest(weight, 3, group=8).weight_ERC[0, :, :8] == 0).all()


def test_zero_stays_zero_and_what_is_stored_is_what_is_computed_with(layer):
    weight, _, hessian = layer(2, 8, 24)
    weight[0, 2] = 0.0
    weight[1, 4] = 5.0  # one sign only
    found = gptq(weight, hessian, [400] * 2, 4, group=8)
    assert (found.weight_ERC[0, 2] == 0).all()
    for e in range(2):
        for c in range(24):
            scale, zero = found.grid.scale_ERG[e, :, c // 8].float(), found.grid.zero_ERG[e, :, c // 8].float()
            assert torch.equal(found.weight_ERC[e, :, c], (found.codes_ERC[e, :, c].float() - zero) * scale)


def test_inputs_are_left_as_they_are(layer):
    weight, _, hessian = layer(2, 8, 24)
    before = weight.clone(), hessian.clone()
    gptq(weight, hessian, [400, 3], 3, group=8)
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bits": 1}, "bits"),
        ({"bits": [3]}, "bits"),
        ({"tokens_E": [400]}, "token counts"),
        ({"group": 0}, "groups of 0"),
        ({"damping": -1.0}, "damping -1"),
    ],
)
def test_nonsense_is_refused(layer, change, said):
    weight, _, hessian = layer(2, 4, 8)
    asked = {"weight_ERC": weight, "hessian_ECC": hessian, "tokens_E": [400] * 2, "bits": 3, **change}
    with pytest.raises(UsageError, match=said):
        gptq(**asked)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38])
def test_weights_that_no_scale_spans_are_refused(layer, value):
    weight, _, hessian = layer(2, 4, 8)
    weight[1, 2, 3] = value
    with pytest.raises(UsageError, match="no scale; in matrix 1"):
        gptq(weight, hessian, [400] * 2, 3, group=8)
