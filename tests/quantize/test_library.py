"""Integers, scales and zeros of a maintained library on a fixed case (`fixtures/quantize/make.py`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from prunebench.quantize import gptq

CASE = Path(__file__).parents[2] / "fixtures" / "quantize" / "llmcompressor.npz"


@pytest.fixture(scope="module")
def case():
    with np.load(CASE) as found:
        return {name: found[name] for name in found.files}


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_integers_are_llm_compressor_s(case, bits):
    assert case["made_with"][0] == "llmcompressor 0.14.0.1"
    inputs = torch.from_numpy(case["inputs"]).double()
    weight = torch.from_numpy(case["weight"])
    found = gptq(weight, inputs.transpose(1, 2) @ inputs, [inputs.shape[1]] * 2, bits, group=32)
    assert np.array_equal(found.grid.scale_ERG.numpy(), case[f"scale_{bits}"])
    assert np.array_equal(found.grid.zero_ERG.numpy().astype(np.uint8), case[f"zero_{bits}"])
    assert np.array_equal(found.codes_ERC.numpy(), case[f"codes_{bits}"])
