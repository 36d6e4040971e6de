"""What tests of exports share: random checkpoints, plans of every kind on them, and what the pruned model computes."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunebench import (
    AffineSurvivor,
    Constant,
    GatedWeights,
    Mask,
    SmallExpert,
    Survivor,
    Tilt,
    Zero,
)
from prunebench.export import PrunedModel
from prunebench.install import installed
from prunebench.moe import open_model, weights_sha256
from prunebench.moe.load import load_weights
from prunebench.plan import FillPlan, LayerPlan, Plan
from prunebench.routing import Scale
from prunebench.testing import random_ids, random_model

EXPERTS, TOP_K = 8, 2
UNIFORM, PER_LAYER = "uniform", "per layer"
KEEPING = ("constant", "zero", "tilt", "neurons", "survivor", "affine survivor", "edited constant")
REFILLING = ("reroute", "half", "edited reroute")
SCALES = ("keep", "renorm", "interp:0.5", "ref:3")


def write_base(folder: Path, family: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A random checkpoint, without a tokenizer."""
    random_model(family, **{"experts": EXPERTS, "top_k": TOP_K, "dtype": dtype, **options}).save_pretrained(folder)
    return folder


@lru_cache(maxsize=64)
def digest(folder: Path) -> str:
    return weights_sha256(folder)


def open_base(folder: Path, dtype: str = "float32"):
    return open_model(load_weights(folder, dtype=dtype), probe_tokens=16)


def mask_for(moe, shape: str) -> Mask:
    """Half of the experts; per layer, one more in the first."""
    gone = [(1, 2, 4, 7), (0, 3, 5, 6)]
    pruned = {layer.index: gone[number % 2] for number, layer in enumerate(moe.layers)}
    if shape == PER_LAYER:
        pruned[moe.layers[0].index] = (1, 2, 3, 4, 7)
    return Mask.for_shapes(moe.shapes, pruned)


def _fill(kind: str, layer, expert: int, survivor: int, generator: torch.Generator):
    width = layer.width

    def draw(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    if kind == "constant":
        return Constant.of(draw(width))
    if kind == "zero":
        return Zero(width)
    if kind == "tilt":
        return Tilt.of(
            mean_D=draw(width), up_DR=draw(width, 2), down_RD=draw(2, width), offset_R=draw(2), clip_R=draw(2).abs() + 1
        )
    if kind == "neurons":
        return SmallExpert.of(GatedWeights(draw(3, width), draw(3, width), draw(width, 3), "silu"))
    if kind == "survivor":
        return Survivor(survivor)
    return AffineSurvivor.of(survivor, 1 + draw(width), draw(width))


def plan_for(moe, operator: str, scale: str | None = None, shape: str = UNIFORM, seed: int = 0) -> Plan:
    """A plan of random fills and edits."""
    mask, generator = mask_for(moe, shape), torch.Generator().manual_seed(seed)
    kind = operator.removeprefix("edited ")
    layers, tensors, declared, edits = [], {}, {}, {}
    for layer in moe.layers:
        pruned = mask.pruned_of(layer.index)
        survivor = next(e for e in range(layer.expert_count) if e not in pruned)
        filled = {"reroute": (), "half": pruned[::2]}.get(kind, pruned)
        fills = {}
        for expert in filled:
            fill = _fill("constant" if kind == "half" else kind, layer, expert, survivor, generator)
            fills[expert] = FillPlan(type(fill).__name__, fill.to_json())
            declared[f"{layer.index}/{expert}"] = fill.values_stored()
            for name, tensor in fill.state_dict().items():
                tensors[f"{layer.index}/{expert}/{name}"] = tensor.clone()
        asked = scale or moe.convention.trained_scale
        layers.append(LayerPlan(layer.index, fills, asked, str(Scale.parse(asked).resolve(moe.convention))))
        if operator.startswith("edited"):
            for name, weight in layer.weights(survivor).items():
                noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
                edits[f"{layer.index}/{survivor}/{name}"] = weight + 0.1 * noise
    return Plan(mask, tuple(layers), tensors, declared, edits)


def pruned_model(folder: Path, plan: Plan, **more: Any) -> PrunedModel:
    return PrunedModel(str(folder), folder, digest(folder), plan, **more)


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    """Of the random ids, of a model on which a plan may be installed."""
    return model(input_ids=random_ids(2, 16), use_cache=False).logits


def evaluated(moe, plan: Plan, policy: str = "frozen") -> Tensor:
    """What the harness evaluates."""
    with installed(moe, plan, policy=policy):
        return logits(moe.model)
