"""Weights and inputs that are correlated, as a layer's are."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def layer() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """E matrices, their inputs, and H = Σ x xᵀ of each."""

    def make(experts: int, rows: int, columns: int, *, tokens: int = 400, seed: int = 0) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        weight_ERC = torch.randn(experts, rows, columns, generator=generator)
        mixing_CC = torch.eye(columns) + 0.2 * torch.randn(columns, columns, generator=generator)
        x_ETC = torch.randn(experts, tokens, columns, generator=generator) @ mixing_CC
        return weight_ERC, x_ETC, x_ETC.double().transpose(1, 2) @ x_ETC.double()

    return make


@pytest.fixture(scope="session")
def by_hand() -> ModuleType:
    """The oracle."""
    name = "prunebench_tests_gptq_by_hand"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "by_hand.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
