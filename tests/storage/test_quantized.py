"""Bytes of quantized matrices, against arrays that are really packed, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prunebench.errors import UsageError
from prunebench.storage import Bits, bits_per_weight, packed


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Each row's integers, written one after the other as bits, cut into 32-bit words."""
    rows = []
    for row in codes:
        text = "".join(format(int(code), f"0{bits}b") for code in row)
        text += "0" * (-len(text) % 32)
        rows.append([int(text[at : at + 32], 2) for at in range(0, len(text), 32)])
    return np.array(rows, dtype=np.uint32)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 80),
    bits=st.integers(2, 8),
    group=st.integers(1, 100),
    zeros=st.sampled_from(["fp16", "bits"]),
)
def test_packed_bytes_are_those_of_packed_arrays(rows, columns, bits, group, zeros):
    rng = np.random.default_rng(0)
    codes = rng.integers(2**bits, size=(rows, columns))
    groups = len(range(0, columns, group))
    zero = rng.integers(2**bits, size=(rows, groups))
    found = packed(rows, columns, bits, group=group, zeros=zeros)
    assert found.weights == words(codes, bits).nbytes
    assert found.scales == np.zeros((rows, groups), np.float16).nbytes
    assert found.zeros == (zero.astype(np.float16).nbytes if zeros == "fp16" else words(zero.T, bits).nbytes)
    zero_bits = 16 if zeros == "fp16" else bits
    exact = codes.size * bits + zero.size * (16 + zero_bits)
    assert 0 <= 8 * found.ideal - exact < 8
    assert found.ideal <= found.on_disk


@pytest.mark.parametrize(
    ("bits", "zeros", "wanted"),
    [
        (4, "fp16", 4.25),
        (3, "fp16", 3.25),
        (2, "fp16", 2.25),
        (4, "bits", 4.15625),
        (3, "bits", 3.1484375),
        (2, "bits", 2.140625),
    ],
)
def test_bits_per_weight_at_group_128(bits, zeros, wanted):
    assert bits_per_weight(bits, zeros=zeros) == wanted
    whole = packed(1024, 2048, bits, zeros=zeros)
    assert whole.ideal == whole.on_disk
    assert 8 * whole.on_disk / (1024 * 2048) == wanted


@pytest.mark.parametrize(
    ("name", "experts", "linears"),
    [("w4", 4, 4), ("w2", 2, 2), ("e3a4", 3, 4), ("e2a4", 2, 4), ("w16", None, None), ("e4a16", 4, None)],
)
def test_settings_have_names(name, experts, linears):
    bits = Bits.named(name, group=32, zeros="bits")
    assert bits == Bits(experts, linears, 32, "bits")
    assert bits.name == name


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Bits.named("4bit"), "unknown quantization '4bit'"),
        (lambda: Bits.named("w44"), "44 bits"),
        (lambda: Bits.named("e1a4"), "1 bits; in experts"),
        (lambda: Bits(4, 9), "9 bits; in linears"),
        (lambda: Bits(4, 4, 0), "groups of 0"),
        (lambda: Bits(4, 4, 128, "int8"), "unknown zeros 'int8'"),
    ],
)
def test_impossible_settings_are_one_line(make, says):
    with pytest.raises(UsageError) as caught:
        make()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
