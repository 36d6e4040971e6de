"""The one table of router conventions: what each router class of transformers computes, as data.

A row says how logits become scores, what chooses, whether the selected gates are renormalised, and by which factor they
are scaled. Rows are keyed by router class because that is where the computation lives; a row is trusted only after
`moe.open_model` has replayed the router's own selection and gates from it, bit for bit, on the model at hand.

Notation (2610.41366 §3): p score, b selection bias, c scaling factor, D the unpruned top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from prunebench.errors import UsageError

__all__ = ["ROUTERS", "Convention", "Groups", "RouterRow", "convention_of"]

Score = Literal["softmax", "sigmoid", "selected_softmax"]
GroupScore = Literal["max", "top2sum"]


@dataclass(frozen=True)
class Groups:
    """Group-limited selection: only the `kept` best of `count` equal, contiguous groups of experts are eligible.

    Args:
        count: number of groups.
        kept: groups that stay eligible.
        score: a group's score: its best choice (DeepSeek-V2) or the sum of its two best (DeepSeek-V3).
    """

    count: int
    kept: int
    score: GroupScore

    @property
    def outside(self) -> float:
        """What the router writes over the choice of experts outside the kept groups."""
        return 0.0 if self.score == "max" else float("-inf")


@dataclass(frozen=True)
class Convention:
    """What one router computes, with its numbers filled in.

    Args:
        score: `softmax` over all logits, `sigmoid` of each, or `selected_softmax`: a softmax over the k selected
            logits, which is a softmax over all, renormalised over the selected.
        renormalised: the selected gates are divided by their sum, as trained.
        factor: c, multiplied last.
        epsilon: added to the sum before dividing.
        biased: a learned bias b is added to the score to choose, never to weigh.
        groups: group-limited selection, or None.
        gates_in: dtype of the gates that the router returns.
        sorted_topk: the router asks `torch.topk` for sorted slots (slot order only).
    """

    score: Score
    renormalised: bool
    factor: float = 1.0
    epsilon: float = 0.0
    biased: bool = False
    groups: Groups | None = None
    gates_in: Literal["logits", "hidden", "float32"] = "float32"
    sorted_topk: bool = True

    @property
    def trained_scale(self) -> Literal["keep", "renorm"]:
        """The scale that survivors' gates were trained under (2610.41366 §1)."""
        return "renorm" if self.renormalised else "keep"

    def describe(self) -> str:
        """The convention in a few words, for tables."""
        words: list[str] = ["softmax" if self.score == "selected_softmax" else self.score]
        words.append("renorm" if self.renormalised else "no renorm")
        if self.biased:
            words.append("bias")
        if self.factor != 1.0:
            words.append(f"×{self.factor:g}")
        if self.groups:
            words.append(f"{self.groups.kept} of {self.groups.count} groups")
        return ", ".join(words)


@dataclass(frozen=True)
class RouterRow:
    """One row of the table. Strings name attributes of the router module that hold the numbers.

    `grouped_if` is (attribute, value): groups apply only where the router says so.
    """

    score: Score
    renormalised: str | bool
    factor: str | float = 1.0
    epsilon: float = 0.0
    bias: str | None = None
    groups: tuple[str, str, GroupScore] | None = None
    grouped_if: tuple[str, str] | None = None
    gates_in: Literal["logits", "hidden", "float32"] = "float32"
    sorted_topk: bool = True

    def resolve(self, router: torch.nn.Module) -> Convention:
        """Fill the numbers in from a router module."""

        def number(value: Any) -> Any:
            return getattr(router, value) if isinstance(value, str) else value

        groups = None
        if self.groups and (self.grouped_if is None or getattr(router, self.grouped_if[0]) == self.grouped_if[1]):
            count, kept = int(number(self.groups[0]) or 1), int(number(self.groups[1]) or 1)
            # One group is no limit: dropping it keeps every later rule simple, and the self-check proves it harmless.
            groups = Groups(count, kept, self.groups[2]) if count > 1 else None
        return Convention(
            score=self.score,
            renormalised=bool(number(self.renormalised)),
            factor=float(number(self.factor)),
            epsilon=self.epsilon,
            biased=self.bias is not None,
            groups=groups,
            gates_in=self.gates_in,
            sorted_topk=self.sorted_topk,
        )


_OLMOE = RouterRow("softmax", renormalised="norm_topk_prob", gates_in="logits")

ROUTERS: dict[str, RouterRow] = {
    "OlmoeTopKRouter": _OLMOE,
    "Qwen3MoeTopKRouter": _OLMOE,
    "GraniteMoeTopKRouter": RouterRow("selected_softmax", renormalised=True, gates_in="hidden"),
    # config.norm_topk_prob exists and is ignored by this router.
    "DeepseekV2TopkRouter": RouterRow(
        "softmax",
        renormalised=False,
        factor="routed_scaling_factor",
        groups=("num_group", "topk_group", "max"),
        grouped_if=("topk_method", "group_limited_greedy"),
        sorted_topk=False,
    ),
    # Moonlight is a DeepSeek-V3 with one group and factor 2.446.
    "DeepseekV3TopkRouter": RouterRow(
        "sigmoid",
        renormalised="norm_topk_prob",
        factor="routed_scaling_factor",
        epsilon=1e-20,
        bias="e_score_correction_bias",
        groups=("num_group", "topk_group", "top2sum"),
        sorted_topk=False,
    ),
}


def convention_of(router: torch.nn.Module, *, where: str = "") -> tuple[RouterRow, Convention]:
    """The row of a router module (subclasses take their base's) and the convention with its numbers.

    Raises:
        UsageError: if no row describes the router.
    """
    for base in type(router).__mro__:
        if base.__name__ in ROUTERS:
            row = ROUTERS[base.__name__]
            return row, row.resolve(router)
    raise UsageError(
        f"unknown router {type(router).__name__}",
        where=where,
        expected="one of " + ", ".join(sorted(ROUTERS)),
        fix="add its row to prunebench/routing/convention.py",
    )
