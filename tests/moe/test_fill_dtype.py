"""A fill computes in the dtype that it stores, whatever the model's."""

import pytest
import torch
from torch import nn

from prunebench.errors import UsageError
from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.testing import random_ids, random_model


class _Linear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.full((width, width), 0.01))
        self.seen: list[torch.dtype] = []

    def forward(self, x_SD: torch.Tensor) -> torch.Tensor:
        self.seen.append(x_SD.dtype)
        return x_SD @ self.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_float32_fill_runs_in_a_model_of_any_dtype(dtype):
    moe = open_model(random_model("olmoe", dtype=dtype))
    fill = _Linear(moe.layers[0].width)
    with torch.inference_mode(), Instrument(moe, {0: LayerProgram((0, 1, 2), {0: fill, 1: fill, 2: fill})}):
        logits = moe.model(input_ids=random_ids(), use_cache=False).logits
    assert logits.dtype == dtype
    assert set(fill.seen) == {torch.float32}


def test_a_program_for_a_layer_that_does_not_exist_is_refused():
    moe = open_model(random_model("olmoe"))
    with pytest.raises(UsageError, match="layer 99, which is no MoE layer"):
        Instrument(moe, {99: LayerProgram((0,))})
