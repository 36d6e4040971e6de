"""Quantized weights: GPTQ over all experts of a layer at once, in a sequential pass over the decoder (`gptq`, …)."""

from __future__ import annotations

from prunebench.quantize.grid import Grid, dequantized, grid_of
from prunebench.quantize.kernel import FEWEST_TOKENS, Quantized, gptq, output_error, round_to_nearest

__all__ = ["FEWEST_TOKENS", "Grid", "Quantized", "dequantized", "gptq", "grid_of", "output_error", "round_to_nearest"]
