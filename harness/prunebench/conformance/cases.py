"""The tiny random models that methods are tried on, opened once and shared by all checks.

Each has eight experts and top-2 unless its name says otherwise. Token counts of experts differ by two or more, so that
no criterion of counts meets a tie that a rounding or a renumbering could decide.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prunebench.calibration import Count
from prunebench.moe import MoEModel, TokenBatch, open_model
from prunebench.moe.hooks import Instrument
from prunebench.testing import opened_model, random_ids, relabel_model, score

if TYPE_CHECKING:
    from prunebench.moe import MoELayer

__all__ = ["CONVENTIONS", "EXPERTS", "HOMES", "RENUMBERED", "TOP_K", "Case", "case", "first_batch"]

EXPERTS, TOP_K = 8, 2
# Where checks that need one model take it: the first of these whose router the method does not refuse.
HOMES = ("olmoe", "qwen3_moe")
# One family of every way of routing in prunebench.testing.FAMILIES, and of every layout of an expert.
CONVENTIONS = (
    *("olmoe", "qwen3_moe", "granitemoe", "deepseek_v2.groups", "deepseek_v3", "deepseek_v3.groups", "dots1.no_renorm"),
    *("lfm2_moe.no_bias", "deepseek_v4.hash", "phimoe", "gpt_oss", "gemma4", "ernie4_5_moe", "longcat_flash"),
    *("nemotron_h", "llama4"),
)
# Of texts on which the token counts of any two experts of a layer differ by two or more, and so tie nowhere.
SEEDS = {"olmoe": 11, "qwen3_moe": 44}
RENUMBERED = (5, 0, 7, 2, 6, 1, 3, 4)
_BLOCKS, _LENGTH = 8, 24
_NOISE = 1e-6
_HUGE = 1e6


@dataclass(frozen=True)
class Case:
    """A model and the text that is calibrated on.

    Args:
        words: what it is, for messages.
        moe: the opened model; whoever changes it puts it back.
        ids_BL: token ids.
        tied: whether statistics are handed out as if all experts were alike.
    """

    words: str
    moe: MoEModel
    ids_BL: Tensor
    tied: bool = False


def _text(family: str) -> Tensor:
    return random_ids(_BLOCKS, _LENGTH, seed=SEEDS[family]) if family in SEEDS else random_ids(2, _LENGTH)


@lru_cache(maxsize=128)
def case(kind: str, family: str) -> Case:
    """A case by kind.

    `plain`; `renumbered`: its experts in another order; `noisy`: its router and experts times 1 ± 1e-6; `zero`: its
    experts answer zero; `huge`: a million times as much; `few`: two tokens of text, so that most experts are never
    routed to; `tied`: its statistics are as if all experts were alike; `one`: top-1; `wide`: sixteen experts.
    """
    sizes = {"plain": (EXPERTS, TOP_K), "one": (EXPERTS, 1), "wide": (2 * EXPERTS, TOP_K)}
    if kind in sizes:
        experts, top_k = sizes[kind]
        moe = opened_model(family, experts=experts, top_k=top_k)
        return Case(f"a random {family}, {experts} experts, top-{moe.layers[0].top_k}", moe, _text(family))
    plain = case("plain", family)
    if kind == "few":
        return Case(f"{plain.words}, two tokens of text", plain.moe, random_ids(1, 2))
    if kind == "tied":
        return Case(f"{plain.words}, all of equal statistics", plain.moe, plain.ids_BL, tied=True)
    if kind == "renumbered":
        return Case(f"{plain.words}, renumbered", relabel_model(plain.moe, RENUMBERED), plain.ids_BL)
    return Case(f"{plain.words}, {kind} weights", _changed(plain.moe, kind), plain.ids_BL)


def least_gap(where: Case) -> int:
    """The least difference of two experts' token counts in a layer of a case, and the least count."""
    counts = score(where.moe, [Count()], ids_BL=where.ids_BL).layers.values()
    return min(int(torch.tensor([0, *sorted(one["count"].value().tolist())]).diff().min()) for one in counts)


def _changed(moe: MoEModel, kind: str) -> MoEModel:
    """A copy with every expert's (and for noise every router's) weights scaled."""
    twin = copy.deepcopy(moe)
    generator = torch.Generator().manual_seed(0)
    for layer in twin.layers:
        for expert in range(layer.expert_count):
            for name, weight in layer.weights(expert).items():
                if kind == "noisy":
                    weight.mul_(1 + _NOISE * torch.randn(weight.shape, generator=generator))
                elif "down" in name:
                    weight.mul_({"zero": 0.0, "huge": _HUGE}[kind])
        if kind == "noisy":
            rows_ED = layer.router_rows_ED
            rows_ED.mul_(1 + _NOISE * torch.randn(rows_ED.shape, generator=generator))
    return open_model(twin.model, probe_tokens=16)


@lru_cache(maxsize=8)
def first_batch(family: str) -> TokenBatch:
    """The first layer's routed tokens of the plain case."""
    plain, seen = case("plain", family), []

    def look(layer: MoELayer, batch: TokenBatch) -> None:
        del layer
        seen.append(batch)

    with torch.no_grad(), Instrument(plain.moe, observer=look):
        plain.moe.model(input_ids=plain.ids_BL, use_cache=False)
    return copy.deepcopy(seen[0])
