"""Super experts: the few whose output makes a layer's massive activations (2507.23279, Eq. 6 and Algorithm 1).

    a_{l,e} = max over calibration tokens and channels of |f_{l,e}|;  A = all of them, over all layers together
    (l, e) is super  iff  a_{l,e} > P99.5(A)  and  a_{l,e} > 0.1 · max(A)  and  l ∈ L

L are the layers in which a massive activation forms: a block's hidden states have one after the layer, and had none
before it. What counts as one is not in the paper. Ours, by name: `absolute` (|h| > 100 and > 1,000 × the median |h| of
the block's hidden states: Sun et al. 2024, 2402.17762) and, for models whose stream is small, `relative` (the second
half alone). Layers are the model's own indices. f is un-weighted, before its gate; all tokens count (the released code
takes the first routed token of each batch). Percentiles are interpolated linearly. With fewer than 202 pairs only the
largest can exceed P99.5.

Not a score: use it to protect experts (`Budget.protected`), or to report.

B blocks, L tokens per block, D width, E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prunebench.calibration.score import Progress, ScoreResult, batches_of
from prunebench.calibration.statistics import OutputMax
from prunebench.calibration.text import CalibrationTokens
from prunebench.errors import UsageError
from prunebench.mask import LayerShape
from prunebench.moe import MoEModel
from prunebench.moe.decoder import LAST_TOKEN, watch_decoder_layers

__all__ = [
    "MassiveRule",
    "SuperExperts",
    "find_super_experts",
    "forming_layers",
    "same_layer_control",
    "super_experts",
]

MassiveRule = Literal["absolute", "relative"]
Pair = tuple[int, int]

PERCENTILE = 99.5
SHARE = 0.1
ABSOLUTE, TIMES_MEDIAN = 100.0, 1000.0


@dataclass(frozen=True)
class SuperExperts:
    """What was found.

    Args:
        rule: what counts as a massive activation.
        forming: L, the layers in which one forms.
        threshold: the larger of the two numbers that a_{l,e} must exceed.
        found: (layer, expert) of the super experts, in order.
        maxima: their a.
    """

    rule: MassiveRule
    forming: tuple[int, ...]
    threshold: float
    found: tuple[Pair, ...]
    maxima: tuple[float, ...]

    @property
    def protected(self) -> dict[int, frozenset[int]]:
        """As `Budget.protected` takes them."""
        layers = sorted({index for index, _ in self.found})
        return {index: frozenset(e for i, e in self.found if i == index) for index in layers}

    def to_json(self) -> dict[str, Any]:
        """For a mask's report."""
        found = [[index, expert, value] for (index, expert), value in zip(self.found, self.maxima, strict=True)]
        return {"rule": self.rule, "forming": list(self.forming), "threshold": self.threshold, "found": found}


def super_experts(
    max_of: Mapping[int, npt.ArrayLike], forming: Collection[int], rule: MassiveRule = "absolute"
) -> SuperExperts:
    """Eq. 6, given a_{l,e} by layer index ([E] each) and L.

    Raises:
        UsageError: a maximum that is not a finite number.
    """
    arrays = {index: np.asarray(values, dtype=np.float64) for index, values in max_of.items()}
    every = np.concatenate(list(arrays.values()))
    if not every.size or not np.isfinite(every).all():
        raise UsageError(
            f"{int((~np.isfinite(every)).sum())} of {every.size} maxima are not finite",
            where="super experts",
            expected="the largest |output| of each expert",
        )
    threshold = max(float(np.percentile(every, PERCENTILE)), SHARE * float(every.max()))
    found = [
        (index, expert)
        for index, values_E in sorted(arrays.items())
        for expert in np.flatnonzero(values_E > threshold).tolist()
        if index in forming
    ]
    maxima = tuple(float(arrays[index][expert]) for index, expert in found)
    return SuperExperts(rule, tuple(sorted(forming)), threshold, tuple(found), maxima)


def _is_massive(hidden_BLD: Tensor, rule: MassiveRule) -> Tensor:
    """Which blocks have a massive activation ([B])."""
    size_BN = hidden_BLD.detach().abs().flatten(1).double()
    peak_B = size_BN.amax(1)
    massive_B = peak_B > TIMES_MEDIAN * size_BN.median(1).values
    return massive_B & (peak_B > ABSOLUTE) if rule == "absolute" else massive_B


def forming_layers(
    moe: MoEModel,
    tokens: CalibrationTokens,
    rule: MassiveRule = "absolute",
    *,
    batch_tokens: int = 8192,
    progress: Progress | None = None,
) -> tuple[int, ...]:
    """L: the decoder layers, by index, after which some block has a massive activation that it had not before.

    Raises:
        UsageError: an unknown rule, or a model whose decoder layers stand in several lists.
    """
    if rule not in get_args(MassiveRule):
        raise UsageError(f"unknown rule {rule!r} for massive activations", expected=", ".join(get_args(MassiveRule)))
    forms: set[int] = set()

    def see(position: int, before: Tensor, after: Tensor) -> None:
        if position not in forms and bool((_is_massive(after, rule) & ~_is_massive(before, rule)).any()):
            forms.add(position)

    done = 0
    with torch.inference_mode(), watch_decoder_layers(moe, see):
        for ids_BL in batches_of(tokens, batch_tokens):
            moe.model(input_ids=ids_BL.to(moe.input_device), use_cache=False, logits_to_keep=LAST_TOKEN)
            done += ids_BL.shape[0]
            if progress is not None:
                progress(done, tokens.ids_BL.shape[0])
    return tuple(sorted(forms))


def find_super_experts(
    moe: MoEModel,
    tokens: CalibrationTokens,
    scores: ScoreResult,
    rule: MassiveRule = "absolute",
    *,
    batch_tokens: int = 8192,
    progress: Progress | None = None,
) -> SuperExperts:
    """Algorithm 1: one more forward for L, and the maxima of a score pass on the same tokens."""
    forming = forming_layers(moe, tokens, rule, batch_tokens=batch_tokens, progress=progress)
    max_of = {index: statistics[OutputMax.name].value() for index, statistics in scores.layers.items()}
    return super_experts(max_of, forming, rule)


def same_layer_control(
    found: Sequence[Pair], shapes: Sequence[LayerShape], rng: np.random.Generator
) -> tuple[Pair, ...]:
    """Equally many experts of the same layers, drawn at random among the others (2610.41366 Table E.7).

    Raises:
        UsageError: a layer without enough others, or that does not exist.
    """
    experts_of = {shape.index: shape.experts for shape in shapes}
    control: list[Pair] = []
    for index in sorted({index for index, _ in found}):
        taken = {expert for i, expert in found if i == index}
        others = [expert for expert in range(experts_of.get(index, 0)) if expert not in taken]
        if len(others) < len(taken):
            raise UsageError(
                f"{len(others)} other experts for a control of {len(taken)}",
                where=f"layer {index}",
                expected="as many others as were found",
            )
        control += [(index, int(e)) for e in sorted(rng.choice(others, size=len(taken), replace=False).tolist())]
    return tuple(control)
