"""Installing a plan: reversibly, by hooks on the dense model, or for good, as a physically smaller one.

One dense load serves every arm of a grid: `installed` is a context manager and leaves the model as it was.
`remove_experts` is for checkpoints and proofs: it slices the pruned experts out of the model that it is given. Which
tensors have a row per expert is said by the two tables, `routing.convention` and `moe.experts`, never guessed from
shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from prunebench.errors import UsageError
from prunebench.mask import GroupPolicy, Mask, survivors_of
from prunebench.moe import Instrument, LayerProgram, MoELayer, MoEModel
from prunebench.moe.hooks import Observer
from prunebench.plan import Plan
from prunebench.replacement import Survivor
from prunebench.routing import Scale

__all__ = ["installed", "programs_of", "remove_experts", "shrink", "slice_layer", "slice_model"]

# The names under which configurations count the experts of a layer.
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def programs_of(plan: Plan, *, policy: GroupPolicy = "frozen") -> dict[int, LayerProgram]:
    """The plan's layers as programs, every fill rebuilt from its saved form.

    Args:
        plan: what to install.
        policy: who chooses the groups of a group-limited router.
    """
    programs = {}
    for layer in plan.layers:
        fills = {
            expert: fill.build(plan.state_of(layer.index, expert), where=f"layer {layer.index}, expert {expert}")
            for expert, fill in layer.fills.items()
        }
        programs[layer.index] = LayerProgram(
            plan.mask.pruned_of(layer.index),
            fills,
            Scale.parse(layer.scale),
            policy,
            sources={expert: fill.survivor for expert, fill in fills.items() if isinstance(fill, Survivor)},
            edits=plan.edits_of(layer.index),
        )
    return programs


def installed(
    moe: MoEModel, plan: Plan, *, observer: Observer | None = None, policy: GroupPolicy = "frozen"
) -> Instrument:
    """The pruned model, while the returned context is entered; it counts every slot."""
    plan.mask.check_fits(moe.shapes, policy=policy)
    return Instrument(moe, programs_of(plan, policy=policy), observer=observer)


def _slice(owner: nn.Module, path: str, kept: tuple[int, ...], *, axis: int = 0) -> None:
    """Keep these entries of the tensor at a dotted path, as the parameter or buffer that it is."""
    *parents, name = path.split(".")
    module = owner.get_submodule(".".join(parents))
    tensor = getattr(module, name)
    assert isinstance(tensor, Tensor)
    sliced = tensor.detach().index_select(axis, torch.tensor(kept, device=tensor.device)).clone()
    is_parameter = isinstance(tensor, nn.Parameter)
    setattr(module, name, nn.Parameter(sliced, requires_grad=False) if is_parameter else sliced)
    if isinstance(module, nn.Linear):
        module.out_features = len(kept)


def _set_count(module: nn.Module, name: str | None, value: int) -> None:
    if name is not None and isinstance(getattr(module, name, None), int):
        setattr(module, name, value)


def slice_layer(layer: MoELayer, survivors: tuple[int, ...], *, router: bool) -> None:
    """Keep only these experts' weights of a layer, in place.

    Args:
        layer: the layer.
        survivors: ids that stay, increasing; identity experts always do.
        router: slice the router's rows, selection bias and scales per expert too, and the counts.
    """
    count, layout, row = len(survivors), layer.layout, layer.row
    choices = (*survivors, *range(layer.expert_count, layer.choices))
    for name in layout.tensors:
        _slice(layer.experts, name, choices if name in layout.spare else survivors)
    _set_count(layer.experts, layout.count, count)
    _set_count(layer.experts, layout.total, len(choices))
    if not router:
        return
    for name in row.rows:
        _slice(layer.router, name, choices)
    if row.scale is not None:
        _slice(layer.router, row.scale, choices)
    if row.bias is not None and layer.convention.biased:
        _slice(layer.bias_owner, row.bias, choices, axis=layer.bias_axis)
    _set_count(layer.router, "num_experts", count)
    _set_count(layer.router, row.choices, len(choices))
    _set_count(layer.block, "num_experts", count)


def _router_goes_too(layer: MoELayer, program: LayerProgram, survivors: tuple[int, ...]) -> bool:
    """Whether a plain router without the pruned rows computes what the program does."""
    if program.fills or not layer.convention.loses_rows(program.scale.kind, len(survivors)):
        return False
    groups = layer.convention.groups
    if groups is None:
        return True
    left = {sum(layer.shape.group_of(e) == group for e in survivors) for group in range(groups.count)}
    return program.policy == "reselect" and len(left) == 1 and left.pop() >= groups.smallest


def shrink(layer: MoELayer, program: LayerProgram) -> LayerProgram | None:
    """Slice the pruned experts' weights out of a layer, in place; edited survivors are written for good.

    Where pruned experts leave the router too (no fills, scale renorm; with groups, chosen anew and equally many left in
    each; no bias on a softmax), the router rows go as well: a plain transformers layer remains and None is returned.
    Everything else needs the pruned experts' rows to choose or to form its gates (2610.41366 §3), so the router stays
    whole and the returned program maps original ids to new positions.
    """
    survivors = survivors_of(program.pruned, layer.expert_count)
    with torch.no_grad():
        for expert, named in program.edits.items():
            for name, value in named.items():
                layer.weights(expert)[name].copy_(value)
    plain = _router_goes_too(layer, program, survivors)
    slice_layer(layer, survivors, router=plain)
    return None if plain else dataclasses.replace(program, positions=survivors, edits={})


def remove_experts(moe: MoEModel, plan: Plan, *, policy: GroupPolicy = "frozen") -> Mapping[int, LayerProgram]:
    """Slice the pruned experts out of the whole model, in place and for good.

    Returns:
        Programs that the smaller model still needs, to be run under `Instrument`. If there are none, the model is a
        plain one: open it again with `open_model`, or save it (transformers can reload it only if every layer kept the
        same number; layers that cannot be pruned keep all).
    """
    plan.mask.check_fits(moe.shapes, policy=policy)
    left: dict[int, LayerProgram] = {}
    for index, program in programs_of(plan, policy=policy).items():
        rest = shrink(moe.layer(index), program) if program.pruned else None
        if rest is not None:
            left[index] = rest
    kept = {layer.experts - len(layer.pruned) for layer in plan.mask.layers}
    if not left and len(kept) == 1 and not moe.unprunable:
        _set_configured_count(moe.model.config.get_text_config(), moe.layers[0].expert_count, kept.pop())
    return left


def slice_model(moe: MoEModel, mask: Mask) -> None:
    """Slice the pruned experts out of experts and routers alike, whatever that does to the routing, in place.

    What remains is a plain model that transformers can save and load. It equals the masked one only where
    `remove_experts` leaves no program; elsewhere its routers choose or weigh otherwise, and it is a model of its own.

    Raises:
        UsageError: if its configuration could not say how many experts are left.
    """
    mask.check_fits(moe.shapes, policy="reselect")
    kept = {len(layer.survivors) for layer in mask.layers}
    if len(kept) > 1:
        raise UsageError("layers keep different numbers of experts", expected="one number, which a config can hold")
    if min(kept) < (least := moe.convention.fewest_rows):
        raise UsageError(f"{min(kept)} expert is left per layer", expected=f"at least {least}, which the router needs")
    if moe.unprunable:
        one = moe.unprunable[0]
        raise UsageError(
            f"layer {one.index} keeps all its experts: {one.reason}",
            where=one.name,
            expected="one number of experts in all layers, which a config can hold",
        )
    for layer, part in zip(moe.layers, mask.layers, strict=True):
        slice_layer(layer, part.survivors, router=True)
    _set_configured_count(moe.model.config.get_text_config(), moe.layers[0].expert_count, kept.pop())


def _set_configured_count(config: Any, old: int, new: int) -> None:
    """Write the number of experts under every name that the configuration stores it by."""
    names = [name for name in _COUNTS if name in vars(config)]
    if not names:
        raise UsageError(
            f"{type(config).__name__} does not say how many experts a layer has", expected=" or ".join(_COUNTS)
        )
    for name in names:
        value = getattr(config, name)
        if isinstance(value, list):
            setattr(config, name, [new if count == old else count for count in value])
        elif value == old:
            setattr(config, name, new)
