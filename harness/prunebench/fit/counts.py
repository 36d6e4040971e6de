"""What an operator stores, from a model's configuration alone (2610.41366 App. B.2, C.1, C.2 and H.4).

Two bases are told apart, as in the paper: *stored* counts everything kept for pruned experts, the mean or bias
included; *added* counts over MoNE's constant model, which already stores a mean (D values) per pruned expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from prunebench.errors import UsageError
from prunebench.fit.copies import CopyKind, copy_size
from prunebench.mask import Budget, LayerShape
from prunebench.moe.layer import find_layers
from prunebench.replacement import GatedWeights

__all__ = ["OPERATORS", "ModelSize", "OperatorCost", "cost", "extra_experts", "model_size", "stored_per_expert"]


@dataclass(frozen=True)
class ModelSize:
    """A model in numbers; all its MoE layers are alike.

    Args:
        total: values of all parameters, tied ones once.
        layers: MoE layers.
        experts: E.
        top_k: k.
        width: D.
        neurons: F of one routed expert.
        expert: values of one routed expert, 3DF if it is a gated MLP.
    """

    total: int
    layers: int
    experts: int
    top_k: int
    width: int
    neurons: int
    expert: int

    @classmethod
    def gated(cls, *, total: int, layers: int, experts: int, top_k: int, width: int, neurons: int) -> ModelSize:
        """Of gated experts without biases."""
        return cls(total, layers, experts, top_k, width, neurons, 3 * width * neurons)

    def pruned(self, budget: Budget) -> int:
        """Experts that go, over all layers."""
        return self.layers * budget.pruned_count(LayerShape(0, self.experts, self.top_k))


def model_size(model: nn.Module) -> ModelSize:
    """The size of a transformers model; on the meta device it costs no memory.

    Raises:
        UsageError: no MoE layers, layers that are not alike, or experts that are no gated MLP.
    """
    sizes = {}
    for layer in find_layers(model):
        expert = layer.weights(0)
        gated = GatedWeights.of(expert, "silu")
        values = sum(weight.numel() for weight in expert.values())
        sizes[layer.index] = (layer.expert_count, layer.top_k, layer.width, gated.neurons, values)
    if len(set(sizes.values())) != 1:
        raise UsageError("MoE layers of different shapes", expected="all alike, for a count from a configuration")
    experts, top_k, width, neurons, values = next(iter(sizes.values()))
    total = sum(parameter.numel() for parameter in model.parameters())
    return ModelSize(total, len(sizes), experts, top_k, width, neurons, values)


def _tilt(size: ModelSize, rank: int, _times: int) -> int:
    if not 1 <= rank <= size.width:
        raise UsageError(
            f"rank {rank} is no tilt",
            expected=f"1 to the width, {size.width}",
            fix="for rank 0 use the operator constant" if rank < 1 else "lower the rank",
        )
    return 2 * rank * size.width + size.width + 2 * rank


def _copy(kind: CopyKind) -> Callable[[ModelSize, int, int], int]:
    def stored(size: ModelSize, rank: int, times: int) -> int:
        count = copy_size(kind, width=size.width, neurons=size.neurons, tilt_rank=rank, times=times)
        each = size.width if kind == "neurons" else size.width + size.neurons
        return 3 * count * each + size.width

    return stored


def _nothing(_size: ModelSize, _rank: int, _times: int) -> int:
    return 0


# Values stored for one pruned expert: (size, the tilt's rank r, times its budget) -> values.
OPERATORS: Final[Mapping[str, Callable[[ModelSize, int, int], int]]] = {
    "constant": lambda size, _rank, _times: size.width,
    "tilt": _tilt,
    "neurons": _copy("neurons"),
    "svd": _copy("svd"),
    "svd-whitened": _copy("svd-whitened"),
    "mora": lambda size, _rank, _times: 2 * size.width,  # at most: for every pruned expert that finds its proxy
    "conmoe-nearest": _nothing,
    "conmoe-functional": _nothing,
    "compel": _nothing,
    "reroute": _nothing,
    "zero": _nothing,
}


def stored_per_expert(size: ModelSize, operator: str, *, rank: int = 32, times: int = 1) -> int:
    """Values that an operator stores for one pruned expert.

    Args:
        size: the model.
        operator: one of `OPERATORS`; for `mora` it is what an accepted proxy stores.
        rank: r of the tilt; for copies, of the tilt that sets their budget.
        times: 1 or 4, the copies' budget in tilts.
    """
    if operator not in OPERATORS:
        raise UsageError(f"unknown operator {operator!r}", expected=", ".join(OPERATORS))
    return OPERATORS[operator](size, rank, times)


def extra_experts(size: ModelSize, more: int = 1, *, gross: bool = True) -> int:
    """Values of keeping `more` experts in every layer instead of their constants.

    Args:
        size: the model.
        more: per layer.
        gross: the experts alone, as the paper counts; else less the means that they make needless.
    """
    return size.layers * more * (size.expert - (0 if gross else size.width))


@dataclass(frozen=True)
class OperatorCost:
    """What an operator costs on a pruned model, in values.

    Args:
        operator: its name.
        pruned: experts that are gone, over all layers.
        per_expert: stored for each, at most.
        stored: for all of them.
        added: over the constant model; negative where less than a mean is stored.
        constant_model: the dense model without the pruned experts, with a mean for each and with every router row.
        total: the pruned model with this operator, every router row counted.
    """

    operator: str
    pruned: int
    per_expert: int
    stored: int
    added: int
    constant_model: int
    total: int

    @property
    def added_share(self) -> float:
        """Added values as a share of the constant model, as in App. B.2."""
        return self.added / self.constant_model

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**vars(self), "added_share": self.added_share}


def cost(size: ModelSize, budget: Budget, operator: str, *, rank: int = 32, times: int = 1) -> OperatorCost:
    """Added and total values of an operator at a budget.

    Args:
        size: the model.
        budget: a ratio or experts kept per layer.
        operator: as for `stored_per_expert`.
        rank: the same.
        times: the same.
    """
    pruned = size.pruned(budget)
    per_expert = stored_per_expert(size, operator, rank=rank, times=times)
    rest = size.total - pruned * size.expert
    stored, means = pruned * per_expert, pruned * size.width
    return OperatorCost(operator, pruned, per_expert, stored, stored - means, rest + means, rest + stored)
