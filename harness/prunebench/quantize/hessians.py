"""H = Σ x xᵀ of every linear of a layer, from the very inputs that its forward multiplies by their weights.

A torch function mode sees each call of `linear` while a layer runs: whatever router, operator and layout lead there,
an input that reaches a weight is counted for it, and one that does not is not. Experts of a layer share one tensor; a
slice of it is told by its address. Sums are float64.

E experts, R rows (outputs), C columns (inputs), S rows of an input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from prunebench.errors import IntegrityError
from prunebench.quantize.targets import Target

__all__ = ["Hessians"]


class Hessians(TorchFunctionMode):
    """While entered, adds up x xᵀ of every target's inputs.

    Args:
        targets: name -> target.
    """

    def __init__(self, targets: Mapping[str, Target]) -> None:
        super().__init__()
        self.targets = targets
        self.sums: dict[str, Tensor] = {}
        self.rows: dict[str, list[int]] = {}
        for name, target in targets.items():
            columns, count = target.weight.shape[-1], len(target.experts)
            self.sums[name] = torch.zeros(count, columns, columns, dtype=torch.float64, device=target.weight.device)
            self.rows[name] = [0] * count
        self._of_address = {
            target.weight.data_ptr() + expert * _step(target.weight): (name, place)
            for name, target in targets.items()
            for place, expert in enumerate(target.experts)
        }

    def __torch_function__(
        self, func: Any, types: Collection[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            self._add(args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs["weight"])
        return func(*args, **kwargs)

    def _add(self, x: Tensor, weight: Tensor) -> None:
        found = self._of_address.get(weight.data_ptr())
        if found is None or weight.shape != self.targets[found[0]].weight.shape[-2:]:
            return
        name, place = found
        x_SC = x.reshape(-1, x.shape[-1]).double()
        self.sums[name][place].addmm_(x_SC.T, x_SC)
        self.rows[name][place] += x_SC.shape[0]

    def check(self, together: Collection[str], where: str) -> None:
        """That the experts' matrices saw the same rows, and any at all.

        Raises:
            IntegrityError: if not: the module multiplies in a way that is not seen here.
        """
        rows = [self.rows[name] for name in together]
        if any(one != rows[0] for one in rows) or (rows and not sum(rows[0])):
            raise IntegrityError(
                "the experts' linears were not all seen",
                where=where,
                expected="one call of `linear` per expert and matrix",
                fix="run the experts by the eager implementation",
            )


def _step(weight: Tensor) -> int:
    """Bytes from one expert's matrix to the next one's."""
    return weight.stride(0) * weight.element_size() if weight.dim() == 3 else 0
