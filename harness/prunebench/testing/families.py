"""What must hold bit for bit for a family of models, as functions: for the tests, and for docs/families.md.

Each check takes an opened model and says what it found; nothing is asserted here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunebench.errors import UsageError
from prunebench.install import programs_of, shrink
from prunebench.mask import GroupPolicy, Mask
from prunebench.moe import Instrument, LayerProgram, MoELayer, MoEModel, TokenBatch
from prunebench.plan import LayerPlan, Plan
from prunebench.routing import Scale
from prunebench.testing.models import random_ids

__all__ = [
    "APART",
    "KERNELS",
    "Finding",
    "empty_mask",
    "forced",
    "half_of",
    "logits_of",
    "policy_of",
    "reloaded",
    "removed",
    "renorm_plan",
    "slots",
]

ROUNDING = 1e-6
KERNELS = ("eager", "grouped_mm", "batched_mm")


APART = (
    "the experts module itself gives other bits to the same rows when they are sent apart from the others', as seen on"
    " this very batch; logits within 1e-6"
)


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Args:
        exact: bit for bit; None where the question has no meaning.
        why: the largest difference, or the reason.
    """

    exact: bool | None
    why: str = ""


def logits_of(moe: MoEModel, ids_BL: Tensor | None = None) -> Tensor:
    """Logits of a plain forward on random tokens."""
    with torch.inference_mode():
        logits: Tensor = moe.model(input_ids=random_ids() if ids_BL is None else ids_BL, use_cache=False).logits
    return logits


def _compared(plain: Tensor, other: Tensor) -> Finding:
    if torch.equal(plain, other):
        return Finding(exact=True)
    return Finding(exact=False, why=f"logits differ by up to {float((plain - other).abs().max()):.1g}")


def empty_mask(moe: MoEModel) -> Finding:
    """Nothing is pruned and nobody watches: the instrument changes nothing."""
    plain = logits_of(moe)
    with Instrument(moe, {layer.index: LayerProgram(()) for layer in moe.layers}):
        return _compared(plain, logits_of(moe))


def forced(moe: MoEModel, scale: str) -> Finding:
    """Nothing is pruned, and slots and gates are rewritten all the same: the logits stay."""
    try:
        resolved = Scale.parse(scale).resolve(moe.convention)
    except UsageError as error:
        return Finding(exact=None, why=f"{error.what}: {moe.layers[0].row.note}")
    plain = logits_of(moe)
    with Instrument(moe, {layer.index: LayerProgram((), scale=resolved) for layer in moe.layers}, force=True):
        return _compared(plain, logits_of(moe))


class _Itself(nn.Module):
    """The very expert that it stands for."""

    def __init__(self, layer: MoELayer, expert: int) -> None:
        super().__init__()
        # Not a child: the fill owns nothing of the model.
        self._run = layer.run_experts
        self._expert = expert

    def forward(self, x_SD: Tensor) -> Tensor:
        return self._run(x_SD, torch.full((x_SD.shape[0],), self._expert, device=x_SD.device))


def slots(moe: MoEModel) -> Finding:
    """Half of the experts keep their slots and are answered by themselves, as fills: the logits stay.

    A fill's rows go through the module apart from the others'. Where the module itself, without any hook, gives other
    bits to the very same rows sent apart, no bits are promised, and the finding says that this was seen.
    """
    plain = logits_of(moe)
    programs = {}
    for layer in moe.layers:
        pruned = half_of(layer)
        programs[layer.index] = LayerProgram(pruned, {expert: _Itself(layer, expert) for expert in pruned})
    with Instrument(moe, programs):
        found = _compared(plain, logits_of(moe))
    close = not found.exact and float(found.why.rpartition(" ")[2]) <= ROUNDING
    return Finding(exact=False, why=APART) if close and _moved_apart(moe) else found


def _moved_apart(moe: MoEModel) -> float:
    """How far an expert's outputs move when its rows are sent to the experts module apart from the others'."""
    worst = 0.0

    def look(layer: MoELayer, batch: TokenBatch) -> None:
        nonlocal worst
        for expert, start, end in batch.segments:
            if expert in half_of(layer):
                own_SD = layer.run_experts(batch.x_TD[batch.token_S[start:end]], batch.expert_S[start:end])
                worst = max(worst, float((own_SD - batch.outputs_SD[start:end]).abs().max()))

    with Instrument(moe, observer=look):
        logits_of(moe)
    return worst


def half_of(layer: MoELayer) -> tuple[int, ...]:
    """Half of a layer's experts, equally many of each router group of four."""
    return tuple(expert for expert in range(layer.expert_count) if expert % 4 in {0, 3})


def policy_of(moe: MoEModel) -> GroupPolicy:
    """The policy under which a router may be cut: groups are chosen anew, as a cut router does."""
    return "reselect" if moe.convention.groups else "frozen"


def renorm_plan(moe: MoEModel) -> Plan:
    """Half of the experts rerouted at renorm."""
    mask = Mask.for_shapes(moe.shapes, {layer.index: half_of(layer) for layer in moe.layers})
    return Plan(mask, tuple(LayerPlan(layer.index, {}, "renorm", "renorm") for layer in moe.layers), {}, {})


def removed(moe: MoEModel) -> tuple[Finding, float]:
    """Cut half of the experts out, in place: does a plain model remain, and how far is it from the masked one?"""
    plan, policy = renorm_plan(moe), policy_of(moe)
    programs = programs_of(plan, policy=policy)
    with Instrument(moe, programs):
        masked = logits_of(moe)
    rest = {layer.index: shrink(layer, programs[layer.index]) for layer in moe.layers}
    left = {index: program for index, program in rest.items() if program is not None}
    with Instrument(moe, left):
        difference = float((masked - logits_of(moe)).abs().max())
    if left:
        return Finding(exact=None, why=moe.layers[0].row.note), difference
    return Finding(exact=True), difference


_RELOAD = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, logging
logging.set_verbosity_error()
logging.disable_progress_bar()
from prunebench.moe import open_model
from prunebench.testing import random_ids

for folder, dtype, kernel, out in json.load(sys.stdin):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), experts_implementation=kernel, output_loading_info=True
    )
    named = {key: sorted(map(str, value)) for key, value in info.items() if value}
    moe = open_model(model.eval())
    with torch.inference_mode():
        logits = moe.model(input_ids=random_ids(), use_cache=False).logits
    torch.save({"logits": logits, "info": named}, out)
"""


def reloaded(jobs: Sequence[tuple[Path, str, str, Path]]) -> list[Mapping[str, Any]]:
    """Load saved models in one fresh process, open them, and give their logits on the usual tokens.

    Args:
        jobs: (folder, dtype, experts implementation, file for the outcome) of each.

    Returns:
        `{logits, info}` of each, info being what transformers says about keys that do not match.
    """
    text = json.dumps([[str(folder), dtype, kernel, str(out)] for folder, dtype, kernel, out in jobs])
    subprocess.run([sys.executable, "-c", _RELOAD], input=text, text=True, check=True, capture_output=True)
    return [torch.load(out) for _, _, _, out in jobs]
