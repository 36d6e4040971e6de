"""Quantized weights: GPTQ over all experts of a layer at once, in a sequential pass over the decoder.

`setting` says how many bits, `hessians` watches inputs, `kernel` makes integers, `passes` goes from layer to layer,
`model` installs what came out, `allocation` spreads bits over experts, `packed` writes files.
"""

from __future__ import annotations

from prunebench.quantize.allocation import allocate, costs
from prunebench.quantize.grid import Grid, dequantized, grid_of
from prunebench.quantize.kernel import FEWEST_TOKENS, Quantized, gptq, output_error, round_to_nearest
from prunebench.quantize.model import QuantizedLinear, QuantizedModel
from prunebench.quantize.packed import packed_tensors, read_packed, write_packed
from prunebench.quantize.passes import quantize_model, without_edits
from prunebench.quantize.setting import NAMES, Setting, setting_of

__all__ = [
    "FEWEST_TOKENS",
    "NAMES",
    "Grid",
    "Quantized",
    "QuantizedLinear",
    "QuantizedModel",
    "Setting",
    "allocate",
    "costs",
    "dequantized",
    "gptq",
    "grid_of",
    "output_error",
    "packed_tensors",
    "quantize_model",
    "read_packed",
    "round_to_nearest",
    "setting_of",
    "without_edits",
    "write_packed",
]
