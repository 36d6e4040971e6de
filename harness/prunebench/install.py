"""Installing a plan: reversibly, by hooks on the dense model, or for good, as a physically smaller one.

One dense load serves every arm of a grid: `installed` is a context manager and leaves the model as it was.
`remove_experts` is for checkpoints and proofs: it slices the pruned experts out of the model that it is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn

from prunebench.moe import Instrument, LayerProgram, MoELayer, MoEModel
from prunebench.moe.hooks import Observer
from prunebench.plan import Plan
from prunebench.routing import Scale

__all__ = ["installed", "programs_of", "remove_experts", "shrink"]


def programs_of(plan: Plan) -> dict[int, LayerProgram]:
    """The plan's layers as programs, every fill rebuilt from its saved form."""
    programs = {}
    for layer in plan.layers:
        fills: dict[int, nn.Module] = {
            expert: fill.build(plan.state_of(layer.index, expert), where=f"layer {layer.index}, expert {expert}")
            for expert, fill in layer.fills.items()
        }
        pruned = plan.mask.pruned_of(layer.index)
        programs[layer.index] = LayerProgram(pruned, fills, Scale.parse(layer.scale))
    return programs


def installed(moe: MoEModel, plan: Plan, *, observer: Observer | None = None) -> Instrument:
    """The pruned model, while the returned context is entered; it counts every slot."""
    plan.mask.check_fits(moe.shapes)
    return Instrument(moe, programs_of(plan), observer=observer)


def _slice_first_axis(module: nn.Module, count: int, kept: tuple[int, ...]) -> None:
    """Keep these entries of every tensor of the module whose first axis is the experts'."""
    index = torch.tensor(kept)
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.shape[:1] == (count,):
            sliced = parameter.detach()[index.to(parameter.device)].clone()
            setattr(module, name, nn.Parameter(sliced, requires_grad=False))
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.shape[:1] == (count,):
            setattr(module, name, buffer[index.to(buffer.device)].clone())
    if hasattr(module, "num_experts"):
        setattr(module, "num_experts", len(kept))  # noqa: B010  the type of a module's attribute is Tensor | Module


def shrink(layer: MoELayer, program: LayerProgram) -> LayerProgram | None:
    """Slice the pruned experts' weights out of a layer, in place.

    Where pruned experts leave the router too (no fills, scale renorm, no groups), the router rows go as well: a plain
    transformers layer remains and None is returned. Every other scale needs the pruned experts' rows to form its gates
    (2610.41366 §3), so the router stays whole and the returned program maps original ids to new positions.
    """
    survivors = tuple(expert for expert in range(layer.expert_count) if expert not in set(program.pruned))
    _slice_first_axis(layer.experts, layer.expert_count, survivors)
    plain = not program.fills and program.scale.kind == "renorm" and layer.convention.groups is None
    if plain:
        _slice_first_axis(layer.router, layer.expert_count, survivors)
        return None
    return dataclasses.replace(program, positions=survivors)


def remove_experts(moe: MoEModel, plan: Plan) -> Mapping[int, LayerProgram]:
    """Slice the pruned experts out of the whole model, in place and for good.

    Returns:
        Programs that the smaller model still needs, to be run under `Instrument`. If there are none, the model is a
        plain one: open it again with `open_model`, or save it (transformers can reload it only if every layer kept the
        same number).
    """
    plan.mask.check_fits(moe.shapes)
    left: dict[int, LayerProgram] = {}
    for index, program in programs_of(plan).items():
        rest = shrink(moe.layer(index), program) if program.pruned else None
        if rest is not None:
            left[index] = rest
    kept = {layer.experts - len(layer.pruned) for layer in plan.mask.layers}
    if not left and len(kept) == 1:
        options = ("num_experts", "n_routed_experts", "num_local_experts")
        setattr(moe.model.config, next(name for name in options if hasattr(moe.model.config, name)), kept.pop())
    return left
