"""Opened random models, and what a test asks of one in a line: scores, a method's mask, the same model renumbered."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from torch import Tensor

from prunebench.calibration import (
    CalibrationSpec,
    CalibrationTokens,
    ScoreResult,
    Statistic,
    gradient_pass,
    score_pass,
    split_gradient,
)
from prunebench.install import slice_layer
from prunebench.mask import Budget, Mask
from prunebench.method import Method
from prunebench.moe import MoEModel, open_model
from prunebench.plan import layer_views
from prunebench.testing.batches import check_relabelling
from prunebench.testing.models import random_ids, random_model

__all__ = ["opened_model", "relabel_model", "score", "select"]

# The self-check needs few tokens to catch a wrong row; a test opens many models.
_PROBE_TOKENS = 16


def opened_model(
    family: str = "olmoe",
    *,
    experts: int = 16,
    top_k: int = 4,
    seed: int = 0,
    experts_implementation: str = "eager",
) -> MoEModel:
    """`random_model`, opened: its routers are proven to follow their rows of the convention table.

    Models are kept, so that another of the same arguments costs a copy of it: change yours as you like.

    Args:
        family: a key of `FAMILIES`.
        experts: E.
        top_k: k.
        seed: of all weights.
        experts_implementation: eager, grouped_mm or batched_mm.
    """
    return copy.deepcopy(_kept_model(family, experts, top_k, seed, experts_implementation))


@lru_cache(maxsize=256)
def _kept_model(family: str, experts: int, top_k: int, seed: int, implementation: str) -> MoEModel:
    model = random_model(family, experts=experts, top_k=top_k, seed=seed, experts_implementation=implementation)
    return open_model(model, probe_tokens=_PROBE_TOKENS)


def score(
    moe: MoEModel, statistics: Sequence[Statistic], *, ids_BL: Tensor | None = None, batch_tokens: int = 8192
) -> ScoreResult:
    """A score pass, and where asked for a gradient pass, over token ids ([B, L]), by default 4 random blocks of 24."""
    tokens = _tokens(ids_BL)
    others, gradient = split_gradient(statistics)
    scores = score_pass(moe, tokens, others, batch_tokens=batch_tokens)
    return scores.joined(gradient_pass(moe, tokens, gradient)) if gradient else scores


def _tokens(ids_BL: Tensor | None) -> CalibrationTokens:
    ids_BL = random_ids() if ids_BL is None else ids_BL
    return CalibrationTokens(CalibrationSpec("file:random", *ids_BL.shape), ids_BL, "random")


def select(method: Method, moe: MoEModel, budget: Budget, *, ids_BL: Tensor | None = None, seed: int = 0) -> Mask:
    """The mask that a method selects on given token ids: after a score pass, or layer by layer as its schedule says.

    Two tokens (`random_ids(1, 2)`) leave most experts never routed to.

    Args:
        method: has `select`.
        moe: the opened model.
        budget: how many experts go.
        ids_BL: token ids, by default 4 random blocks of 24.
        seed: of the generator that the method is handed.
    """
    needs = method.select_needs()
    rng = np.random.default_rng(seed)
    if method.schedule != "one_shot":
        from prunebench.run.selection import choose_mask  # loads everything that an arm needs

        tokens = _tokens(ids_BL)
        return choose_mask(moe, method, budget, needs=needs, scores=None, tokens=tokens, rng=rng)
    declared = tuple(statistic.name for statistic in needs)
    views = layer_views(moe, score(moe, needs, ids_BL=ids_BL), declared, f"{method.name}.select_needs")
    return method.select(views, budget, rng=rng)


def relabel_model(moe: MoEModel, old_of_new: Sequence[int]) -> MoEModel:
    """The same model with its experts renumbered in every layer: expert n is `old_of_new[n]` of `moe`.

    Its logits are those of `moe` up to rounding, unless its router limits groups: those are contiguous ids.

    Raises:
        UsageError: if that does not name every expert once.
    """
    twin = copy.deepcopy(moe)
    for layer in twin.layers:
        order_E = check_relabelling(old_of_new, layer.expert_count)
        slice_layer(layer, tuple(order_E.tolist()), router=True)
    return open_model(twin.model, probe_tokens=_PROBE_TOKENS)
