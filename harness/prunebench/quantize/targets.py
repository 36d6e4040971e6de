"""Which parameters of a model are quantized: every decoder linear, by the rules that bytes are counted by (`storage`).

E experts, R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from prunebench.errors import UsageError
from prunebench.moe import MoEModel
from prunebench.moe.decoder import decoder_layers
from prunebench.quantize.setting import Setting
from prunebench.storage import is_linear

__all__ = ["Target", "decoder_modules", "targets_of"]


@dataclass(frozen=True)
class Target:
    """A parameter whose matrices are quantized.

    Args:
        weight: [R, C] of one linear, or [E, R, C] of all experts of a layer.
        experts: the experts that are left, increasing; (0,) for one linear.
    """

    weight: Tensor
    experts: tuple[int, ...] = (0,)

    @property
    def weight_ERC(self) -> Tensor:
        """The matrices of the experts that are left."""
        return self.weight[None] if self.weight.dim() == 2 else self.weight[list(self.experts)]


def decoder_modules(moe: MoEModel) -> Iterator[tuple[int, str, nn.Module]]:
    """Position, path and module of every decoder layer."""
    modules, path, reason = decoder_layers(moe)
    if reason:
        raise UsageError(reason, expected="one list of decoder layers")
    for position, module in enumerate(modules):
        yield position, f"{path}.{position}", module


def targets_of(
    moe: MoEModel, position: int, path: str, module: nn.Module, *, pruned: Mapping[int, Sequence[int]], setting: Setting
) -> dict[str, Target]:
    """The parameters of one decoder layer that are quantized, by name in the model.

    Args:
        moe: the opened model.
        position: of the decoder layer.
        path: its path.
        module: the decoder layer.
        pruned: layer index -> experts that nobody stores.
        setting: of what is left at 16 bits there are no targets.
    """
    targets: dict[str, Target] = {}
    if setting.bits.linears is not None:
        for name, child in module.named_modules():
            if isinstance(child, nn.Linear) and is_linear(f"{path}.{name}.weight", child.weight.shape):
                targets[f"{path}.{name}.weight"] = Target(child.weight)
    layer = next((one for one in moe.layers if one.index == position), None)
    if layer is not None and setting.bits.experts is not None:
        gone = set(pruned.get(position, ()))
        left = tuple(expert for expert in range(layer.expert_count) if expert not in gone)
        at = next(name for name, child in module.named_modules() if child is layer.experts)
        for tensor in layer.layout.tensors:
            weight = getattr(layer.experts, tensor)
            if weight.dim() == 3:
                targets[f"{path}.{at}.{tensor}"] = Target(weight, left)
    return targets
