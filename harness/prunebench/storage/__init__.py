"""Stored bytes: of saved tensors, of a configuration, and pruned and quantized by formula. No tensor is loaded."""

from __future__ import annotations

from prunebench.storage.accounts import ALL_PARTS, Account, Layer, Matrix, Survey, account, is_linear, survey
from prunebench.storage.matching import Match, gap_text, match
from prunebench.storage.quantized import Bits, Packed, bits_per_weight, packed
from prunebench.storage.saved import (
    PARTS,
    Tensor,
    file_bytes,
    measured,
    part_of,
    pruned_bytes,
    read_headers,
    stored_bytes,
)
from prunebench.storage.shapes import config_tensors, tied_names

__all__ = [
    "ALL_PARTS",
    "PARTS",
    "Account",
    "Bits",
    "Layer",
    "Match",
    "Matrix",
    "Packed",
    "Survey",
    "Tensor",
    "account",
    "bits_per_weight",
    "config_tensors",
    "file_bytes",
    "gap_text",
    "is_linear",
    "match",
    "measured",
    "packed",
    "part_of",
    "pruned_bytes",
    "read_headers",
    "stored_bytes",
    "survey",
    "tied_names",
]
