"""Stored bytes: of saved tensors, of a configuration, and pruned and quantized by formula. No tensor is loaded."""

from __future__ import annotations

from prunebench.storage.accounts import ALL_PARTS, Account, Layer, Matrix, Survey, account, is_linear, survey
from prunebench.storage.matching import TOLERANCE, Match, gap_text, match
from prunebench.storage.quantized import Bits, Packed, bits_per_weight, packed
from prunebench.storage.saved import (
    INDEX,
    PARTS,
    SINGLE,
    Tensor,
    expert_of,
    file_bytes,
    layer_of,
    measured,
    part_of,
    pruned_bytes,
    read_headers,
    router_axis,
    shards_of,
    stored_bytes,
)
from prunebench.storage.shapes import config_tensors, tied_names

__all__ = [
    "ALL_PARTS",
    "INDEX",
    "PARTS",
    "SINGLE",
    "TOLERANCE",
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
    "expert_of",
    "file_bytes",
    "gap_text",
    "is_linear",
    "layer_of",
    "match",
    "measured",
    "packed",
    "part_of",
    "pruned_bytes",
    "read_headers",
    "router_axis",
    "shards_of",
    "stored_bytes",
    "survey",
    "tied_names",
]
