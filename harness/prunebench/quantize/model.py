"""A quantized model as data: the integers of every decoder linear, installed reversibly as the weights they stand for.

Accuracy is that of a model whose weights are (q − z)·s in its own dtype; speed is not measured this way (2610.41366
App. F.2). What a file of these integers holds is `packed`'s business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from prunebench.errors import IntegrityError, UsageError
from prunebench.moe import MoEModel
from prunebench.moe.decoder import Proof
from prunebench.quantize.kernel import Quantized
from prunebench.quantize.setting import Setting
from prunebench.quantize.targets import decoder_modules, targets_of
from prunebench.storage import part_of

__all__ = ["QuantizedLinear", "QuantizedModel", "Undo"]


@dataclass(frozen=True)
class QuantizedLinear:
    """One parameter, quantized.

    Args:
        quantized: its matrices.
        experts: whose they are: the experts that are left; (0,) for one linear.
        tokens_E: inputs that each saw.
        error_E: Σ‖(W − Ŵ)x‖² over those inputs, by Σ‖Wx‖²; 0 where there were none.
    """

    quantized: Quantized
    experts: tuple[int, ...]
    tokens_E: tuple[int, ...]
    error_E: tuple[float, ...]


class Undo:
    """Weights written over, and what was there; whole parameters, on the host."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def write(self, weight: Tensor, value: Tensor, expert: int | None = None) -> None:
        """Put `value` in place of a parameter, or of one expert's slice of it."""
        if id(weight) not in self._kept:
            self._kept[id(weight)] = weight, weight.detach().to("cpu", copy=True)
        (weight if expert is None else weight[expert]).copy_(value)

    @torch.no_grad()
    def restore(self) -> None:
        """Everything as it was, bit for bit."""
        for weight, value in self._kept.values():
            weight.copy_(value)
        self._kept.clear()


@dataclass(frozen=True)
class QuantizedModel:
    """Every decoder linear as integers.

    Args:
        setting: as asked.
        linears: parameter name in the model -> its integers; by increasing layer.
        proof: whether the sequential pass ran the layers one at a time, and why not.
        tokens: of the calibration text.
        allocation: layer index -> bits of each expert that is left, where experts differ.
    """

    setting: Setting
    linears: Mapping[str, QuantizedLinear]
    proof: Proof
    tokens: int
    allocation: Mapping[int, tuple[int, ...]]

    @contextmanager
    def installed(self, moe: MoEModel) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """While entered, the model computes with the quantized weights; then it is as it was, bit for bit.

        Yields:
            A context in which it is as it was meanwhile.

        Raises:
            UsageError: a model of other parameters.
            IntegrityError: if a weight is not what the integers say when it is time to leave.
        """
        undo, parameters = Undo(), dict(moe.model.named_parameters())

        def write() -> None:
            for name, linear in self.linears.items():
                _write(undo, _parameter(parameters, name), name, linear)

        @contextmanager
        def suspended() -> Iterator[None]:
            undo.restore()
            try:
                yield
            finally:
                write()

        try:
            write()
            yield suspended
            if faults := self.faults(moe):
                raise IntegrityError("a quantized weight changed while it was in use", where=faults[0])
        finally:
            undo.restore()

    def put(self, moe: MoEModel) -> None:
        """Write the quantized weights for good.

        Raises:
            UsageError: a model of other parameters.
        """
        parameters = dict(moe.model.named_parameters())
        for name, linear in self.linears.items():
            _write(Undo(), _parameter(parameters, name), name, linear)

    def unquantized(self, moe: MoEModel, edits: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of a plan's edits those of parameters that are not quantized; the others are in the integers already.

        Args:
            moe: the model.
            edits: `layer/expert/name` -> new weights of a survivor.
        """
        names = {id(parameter): name for name, parameter in moe.model.named_parameters()}

        def is_left(key: str) -> bool:
            layer, _, parameter = key.split("/")
            return names[id(moe.layer(int(layer)).experts.get_parameter(parameter))] not in self.linears

        return {key: value for key, value in edits.items() if is_left(key)}

    def faults(self, moe: MoEModel, pruned: Mapping[int, Sequence[int]] | None = None) -> list[str]:
        """Where a model is not this one: weights that differ, and linears that should be here and are not.

        Args:
            moe: the model, with the quantized weights installed.
            pruned: layer index -> experts that are not stored; given, the list of linears is checked too.
        """
        parameters = dict(moe.model.named_parameters())
        faults = [name for name, linear in self.linears.items() if not _same(parameters[name], linear)]
        if pruned is None:
            return faults
        wanted: dict[str, tuple[int, ...]] = {}
        for position, path, module in decoder_modules(moe):
            targets = targets_of(moe, position, path, module, pruned=pruned, setting=self.setting)
            wanted |= {name: target.experts for name, target in targets.items()}
        own = {name: linear.experts for name, linear in self.linears.items()}
        return faults + sorted(f"{name} was left out" for name in wanted if own.get(name) != wanted[name])

    def digest(self) -> str:
        """sha256 over names, integers, scales and zeros."""
        total = sha256()
        for name, linear in sorted(self.linears.items()):
            total.update(name.encode())
            grid = linear.quantized.grid
            for tensor in (linear.quantized.codes_ERC, grid.scale_ERG, grid.zero_ERG):
                total.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """As it goes into a record: counts by part, every fallback by name, mean errors, and the digest."""
        parts: dict[str, Counter[str]] = {}
        errors: dict[str, list[float]] = {}
        fallbacks: dict[str, dict[str, str]] = {}
        dead = 0
        for name, linear in self.linears.items():
            counts = parts.setdefault(part_of(name), Counter())
            dead += sum(linear.quantized.dead_E)
            for place, reason in enumerate(linear.quantized.fallback_E):
                counts["linears"] += 1
                counts["fallbacks"] += bool(reason)
                if reason:
                    said = f"{reason} ({linear.tokens_E[place]})" if reason == "few tokens" else reason
                    fallbacks.setdefault(name, {})[str(linear.experts[place])] = said
            errors.setdefault(part_of(name), []).extend(linear.error_E)
        return {
            **self.setting.to_json(),
            "tokens": self.tokens,
            "proof": self.proof.to_json(),
            "parts": {
                part: {
                    "linears": counts["linears"],
                    "fallbacks": counts["fallbacks"],
                    "mean_relative_error": float(f"{sum(errors[part]) / len(errors[part]):.6g}"),
                }
                for part, counts in sorted(parts.items())
            },
            "fallbacks": fallbacks,
            "dead_columns": dead,
            "sha256": self.digest(),
            **({"allocation": {str(k): list(v) for k, v in self.allocation.items()}} if self.allocation else {}),
        }


def _parameter(parameters: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in parameters:
        raise UsageError(f"the model has no {name}", expected="the model that was quantized")
    return parameters[name]


def _write(undo: Undo, weight: Tensor, name: str, linear: QuantizedLinear) -> None:
    value_ERC = linear.quantized.weight_ERC
    if value_ERC.shape[1:] != weight.shape[-2:]:
        raise UsageError(
            f"{name} is {list(weight.shape)}", expected=f"{list(value_ERC.shape[1:])}, as it was when it was quantized"
        )
    for place, expert in enumerate(linear.experts):
        undo.write(weight, value_ERC[place].to(weight.device), expert if weight.dim() == 3 else None)


def _same(weight: Tensor, linear: QuantizedLinear) -> bool:
    value_ERC = linear.quantized.weight_ERC.to(weight.device, weight.dtype)
    return torch.equal(weight[None] if weight.dim() == 2 else weight[list(linear.experts)], value_ERC)
