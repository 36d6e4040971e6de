"""Smaller copies of a pruned expert: a gated MLP that keeps the nonlinearity, plus a bias (2610.41366 App. C.1).

D width, F neurons of the expert, H neurons of the copy, K rank of a factorised matrix, S rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from prunebench.errors import UsageError
from prunebench.replacement.fill import Fill

__all__ = ["GatedCopy", "GatedWeights", "LowRankExpert", "SmallExpert", "activation_named"]


def activation_named(name: str) -> nn.Module:
    """An activation by the name that model configs use, e.g. `silu`.

    Raises:
        UsageError: transformers knows no such name.
    """
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise UsageError(f"unknown activation {name!r}", expected="a name of transformers, such as silu")
    activation: nn.Module = ACT2FN[name]
    return activation


@dataclass(frozen=True)
class GatedWeights:
    """The three matrices of a gated expert, f(x) = down·(act(gate·x) ⊙ up·x), and its activation's name.

    Args:
        gate_FD: gate projection.
        up_FD: up projection.
        down_DF: down projection.
        activation: its name in the model's config (`hidden_act`).
    """

    gate_FD: Tensor
    up_FD: Tensor
    down_DF: Tensor
    activation: str

    def __post_init__(self) -> None:
        gate, up, down = (tuple(t.shape) for t in (self.gate_FD, self.up_FD, self.down_DF))
        if len(gate) != 2 or up != gate or down != gate[::-1]:
            raise UsageError(
                f"an expert of shapes gate {gate}, up {up}, down {down}", expected="[F, D], [F, D] and [D, F]"
            )

    @classmethod
    def of(cls, named: Mapping[str, Tensor], activation: str) -> Self:
        """From one expert's weights as `LayerView.weights` gives them.

        Raises:
            UsageError: not the common layout (`gate_up_proj` [2F, D] with the gate first, and `down_proj` [D, F]).
        """
        expected = {"gate_up_proj", "down_proj"}
        if set(named) != expected:
            raise UsageError(
                f"an expert with weights {', '.join(sorted(named))}",
                expected=", ".join(sorted(expected)),
                fix="this operator reads the expert's matrices; use one that does not, such as constant or tilt",
            )
        gate_FD, up_FD = named["gate_up_proj"].chunk(2, dim=0)
        return cls(gate_FD, up_FD, named["down_proj"], activation)

    @property
    def width(self) -> int:
        """D."""
        return self.gate_FD.shape[1]

    @property
    def neurons(self) -> int:
        """F."""
        return self.gate_FD.shape[0]

    def matrices(self) -> dict[str, Tensor]:
        """Gate, up and down, by name."""
        return {"gate": self.gate_FD, "up": self.up_FD, "down": self.down_DF}

    def hidden(self, x_SD: Tensor) -> Tensor:
        """The intermediate activation h = act(gate·x) ⊙ up·x ([S, F])."""
        activation: Tensor = activation_named(self.activation)(linear(x_SD, self.gate_FD))
        return activation * linear(x_SD, self.up_FD)

    def __call__(self, x_SD: Tensor) -> Tensor:
        """f(x) ([S, D])."""
        return linear(self.hidden(x_SD), self.down_DF)

    def double(self) -> Self:
        """The same in float64."""
        return type(self)(self.gate_FD.double(), self.up_FD.double(), self.down_DF.double(), self.activation)


class GatedCopy(Fill):
    """A copy of any form, with the mean-residual bias b = E[E(x) − E′(x)] (App. C.1), D values."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.act = activation_named(activation)
        self.register_buffer("bias_D", torch.zeros(width))
        self.bias_D: Tensor

    @abstractmethod
    def copied(self, x_SD: Tensor) -> Tensor:
        """E′(x), without the bias ([S, D])."""

    def forward(self, x_SD: Tensor) -> Tensor:
        return self.copied(x_SD) + self.bias_D


class SmallExpert(GatedCopy):
    """A gated MLP of fewer neurons, each as it was in the expert; stores 3HD + D values.

    Args:
        width: D.
        neurons: H, at least 1.
        activation: the expert's own, by name.
    """

    def __init__(self, width: int, neurons: int, activation: str) -> None:
        super().__init__(width, activation)
        _check_size(neurons, "neurons")
        self.register_buffer("gate_HD", torch.zeros(neurons, width))
        self.register_buffer("up_HD", torch.zeros(neurons, width))
        self.register_buffer("down_DH", torch.zeros(width, neurons))
        self.gate_HD: Tensor
        self.up_HD: Tensor
        self.down_DH: Tensor

    @classmethod
    def of(cls, weights: GatedWeights) -> SmallExpert:
        """A copy with these matrices, in float32, and no bias yet."""
        fill = cls(weights.width, weights.neurons, weights.activation).to(weights.gate_FD.device)
        fill.gate_HD.copy_(weights.gate_FD)
        fill.up_HD.copy_(weights.up_FD)
        fill.down_DH.copy_(weights.down_DF)
        return fill

    def copied(self, x_SD: Tensor) -> Tensor:
        return linear(self.act(linear(x_SD, self.gate_HD)) * linear(x_SD, self.up_HD), self.down_DH)

    def to_json(self) -> dict[str, Any]:
        neurons, width = self.gate_HD.shape
        return {"width": width, "neurons": neurons, "activation": self.activation}


class LowRankExpert(GatedCopy):
    """The expert with each of its matrices as a product of rank K; stores 3K(D + F) + D values.

    Args:
        width: D.
        neurons: F, as many as the expert's.
        rank: K, at least 1.
        activation: the expert's own, by name.
    """

    def __init__(self, width: int, neurons: int, rank: int, activation: str) -> None:
        super().__init__(width, activation)
        _check_size(rank, "rank")
        for name in ("gate", "up"):
            self.register_buffer(f"{name}_in_KD", torch.zeros(rank, width))
            self.register_buffer(f"{name}_out_FK", torch.zeros(neurons, rank))
        self.register_buffer("down_in_KF", torch.zeros(rank, neurons))
        self.register_buffer("down_out_DK", torch.zeros(width, rank))
        self.gate_in_KD: Tensor
        self.gate_out_FK: Tensor
        self.up_in_KD: Tensor
        self.up_out_FK: Tensor
        self.down_in_KF: Tensor
        self.down_out_DK: Tensor

    @classmethod
    def of(cls, factors: Mapping[str, tuple[Tensor, Tensor]], activation: str) -> LowRankExpert:
        """A copy with these factors, in float32, and no bias yet.

        Args:
            factors: `gate`, `up` and `down`, each (left, right) with the matrix ≈ left·right.
            activation: the expert's own, by name.
        """
        (gate_out_FK, gate_in_KD), (up_out_FK, up_in_KD) = factors["gate"], factors["up"]
        down_out_DK, down_in_KF = factors["down"]
        neurons, rank = gate_out_FK.shape
        fill = cls(gate_in_KD.shape[1], neurons, rank, activation).to(gate_in_KD.device)
        fill.gate_in_KD.copy_(gate_in_KD)
        fill.gate_out_FK.copy_(gate_out_FK)
        fill.up_in_KD.copy_(up_in_KD)
        fill.up_out_FK.copy_(up_out_FK)
        fill.down_in_KF.copy_(down_in_KF)
        fill.down_out_DK.copy_(down_out_DK)
        return fill

    def copied(self, x_SD: Tensor) -> Tensor:
        gate_SF = linear(linear(x_SD, self.gate_in_KD), self.gate_out_FK)
        up_SF = linear(linear(x_SD, self.up_in_KD), self.up_out_FK)
        return linear(linear(self.act(gate_SF) * up_SF, self.down_in_KF), self.down_out_DK)

    def to_json(self) -> dict[str, Any]:
        (rank, width), neurons = self.gate_in_KD.shape, self.gate_out_FK.shape[0]
        return {"width": width, "neurons": neurons, "rank": rank, "activation": self.activation}


def _check_size(size: int, what: str) -> None:
    if size < 1:
        raise UsageError(
            f"a copy of {what} {size} is none",
            expected="at least 1",
            fix="raise the budget, or use the operator constant",
        )
