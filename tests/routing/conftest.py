"""For the tests of routing: the definitions, and models' own routers that compute the logits a test asks for."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from prunebench.moe import MoELayer
from prunebench.moe.layer import find_layers
from prunebench.routing import RouterCall
from prunebench.testing import random_model

EXPERTS, TOP_K = 16, 4
BIASES = ("e_score_correction_bias", "expert_bias")


@pytest.fixture(scope="session")
def definitions() -> ModuleType:
    """The scoring rules and the arms, without prunebench."""
    spec = importlib.util.spec_from_file_location(
        "prunebench_tests_definitions", Path(__file__).with_name("definitions.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OwnRouter:
    """A model's own router; its matrix is made the identity, so that its input is its logits."""

    def __init__(self, layer: MoELayer, dtype: torch.dtype) -> None:
        self.layer, self.router, self.dtype = layer, layer.router, dtype
        self.choices = self.width = 0
        with torch.no_grad():
            for name, tensor in self.router.named_parameters():
                if name.endswith("weight") and tensor.dim() == 2:
                    tensor.copy_(torch.eye(*tensor.shape))
                    self.choices, self.width = tensor.shape
            if type(self.router).__name__ == "GptOssTopKRouter":
                # Part of the logits; on the tests' grid, so that equal logits stay equal scores.
                self.router.bias.copy_((torch.arange(self.choices) % 5 - 2) / 8)
            if hasattr(self.router, "per_expert_scale"):
                # Gemma-4 looks at a normalised input.
                self.router.norm = torch.nn.Identity()
                self.router.scale.fill_(1.0)
                self.router.scalar_root_size = 1.0

    def set_bias(self, bias_E: torch.Tensor) -> None:
        """Write the selection bias, wherever it lives."""
        own = [*self.router.named_parameters(), *self.router.named_buffers()]
        mine = [*self.layer.block.named_parameters(recurse=False), *self.layer.block.named_buffers(recurse=False)]
        [tensor] = {id(t): t for name, t in [*own, *mine] if name.rpartition(".")[2] in BIASES}.values()
        with torch.no_grad():
            tensor.copy_(bias_E.reshape(tensor.shape))

    def __call__(self, logits_TE: torch.Tensor) -> RouterCall:
        """What the router does on tokens of these logits."""
        x_TD = torch.zeros(len(logits_TE), self.width, dtype=self.dtype)
        x_TD[:, : logits_TE.shape[1]] = logits_TE
        return self.on(x_TD)

    def on(self, x_TD: torch.Tensor) -> RouterCall:
        """What the router does on these hidden states."""
        calls: list[RouterCall] = []
        handles = self.layer.watch_router(lambda call, _: calls.append(call))
        try:
            with torch.inference_mode():
                run_router(self.layer, x_TD)
        finally:
            for handle in handles:
                handle.remove()
        [call] = calls
        return call

    def without(self, pruned: tuple[int, ...]) -> OwnRouter:
        """A copy whose tensors lack the entries of these experts, wherever an axis has one entry per choice."""
        block = copy.deepcopy(self.layer.block)
        name = next(name for name in ("router", "gate") if isinstance(getattr(block, name, None), torch.nn.Module))
        kept = torch.tensor([e for e in range(self.choices) if e not in set(pruned)])
        for module in (block, *getattr(block, name).modules()):
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for path, tensor in tensors:
                axes = [axis for axis, size in enumerate(tensor.shape) if size == self.choices]
                if axes and (module is not block or path in BIASES):
                    cut = tensor.detach().index_select(axes[0], kept)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    setattr(module, path, torch.nn.Parameter(cut, requires_grad=False) if is_parameter else cut)
            for attribute, value in vars(module).items():
                if type(value) is int and value in {self.choices, EXPERTS}:
                    setattr(module, attribute, value - len(pruned))
        smaller = copy.copy(self)
        smaller.layer = dataclasses.replace(self.layer, block=block, router=getattr(block, name))
        smaller.router, smaller.choices = smaller.layer.router, len(kept)
        return smaller


def run_router(layer: MoELayer, x_TD: torch.Tensor) -> Any:
    """Call a router as its block does: some take their bias from the block, one takes sequences."""
    bias = [name for name in inspect.signature(layer.router.forward).parameters if name in BIASES]
    x = x_TD[None] if type(layer.router).__name__.startswith("Afmoe") else x_TD
    return layer.router(x, *(getattr(layer.block, name, None) for name in bias))


@pytest.fixture(scope="session")
def own_router() -> Any:
    """`own_router(family, dtype)`: a random model's router whose logits a test chooses; cached."""

    @cache
    def opened(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> OwnRouter:
        model = random_model(family, experts=EXPERTS, top_k=TOP_K, dtype=dtype, **options)
        return OwnRouter(find_layers(model)[-1], dtype)

    return opened
