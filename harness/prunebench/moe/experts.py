"""The one table of expert-weight layouts: which tensors of an experts module hold one slice per expert, and its habits.

Execution needs no layout (`moe.hooks` runs the module's own code); what needs one is whatever looks at or cuts single
experts, and the order and dtype in which a module adds up its slots. Modules that transformers' kernels can run say by
three flags how their weights lie; the few others have a row by class.

T tokens, K slots per token, E experts, D width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from prunebench.errors import UsageError

__all__ = ["EXPERTS", "LAYOUTS", "ExpertsRow", "experts_row"]


@dataclass(frozen=True)
class ExpertsRow:
    """One layout of expert weights.

    Args:
        tensors: parameters with one slice per expert on their first axis; the last matrix is the down projection.
        width_axis: the axis of `down_proj` that is D.
        count: attribute that counts the experts.
        total: attribute that counts experts and identity experts together.
        spare: tensors of `tensors` that have an unused slice for every identity expert too.
        adds_in: dtype in which `eager` adds up a token's slots.
        takes: `(x_TD, index_TK, gates_TK)`; the same with K ≥ 2 only; or every expert's input, one after the other.
    """

    tensors: tuple[str, ...]
    width_axis: Literal[1, 2] = 1
    count: str = "num_experts"
    total: str | None = None
    spare: tuple[str, ...] = ()
    adds_in: Literal["hidden", "gates"] = "hidden"
    takes: Literal["slots", "two slots", "all"] = "slots"


_GATED = ExpertsRow(("gate_up_proj", "down_proj"))

# (has_gate, has_bias, is_transposed) of transformers' `use_experts_implementation`.
LAYOUTS: dict[tuple[bool, bool, bool], ExpertsRow] = {
    (True, False, False): _GATED,
    (True, True, True): ExpertsRow(
        ("gate_up_proj", "gate_up_proj_bias", "down_proj_bias", "down_proj"), width_axis=2
    ),  # gpt_oss
}

EXPERTS: dict[str, ExpertsRow] = {
    # Its eager loop adds up in the dtype of the gates, float32, and rounds once.
    "NemotronHExperts": ExpertsRow(("up_proj", "down_proj"), adds_in="gates"),
    # Its loop squeezes the slots away where K is 1.
    "LongcatFlashExperts": ExpertsRow(
        ("gate_up_proj", "down_proj"),
        count="num_routed_experts",
        total="total_experts",
        spare=("gate_up_proj",),
        takes="two slots",
    ),
    "Llama4TextExperts": ExpertsRow(("gate_up_proj", "down_proj"), width_axis=2, takes="all"),
}


def experts_row(experts: nn.Module, *, where: str = "") -> ExpertsRow:
    """The layout of an experts module (subclasses take their base's).

    Raises:
        UsageError: if no row describes it, or a tensor does not have one slice per expert.
    """
    for base in type(experts).__mro__:
        if base.__name__ in EXPERTS:
            return _checked(experts, EXPERTS[base.__name__], where)
    flags = tuple(getattr(experts, name, None) for name in ("has_gate", "has_bias", "is_transposed"))
    if flags not in LAYOUTS:
        raise UsageError(
            f"unknown layout of expert weights in {type(experts).__name__}",
            where=where,
            expected="one of " + ", ".join(sorted(EXPERTS)) + ", or gated experts as transformers' kernels take them",
            fix="add its row to prunebench/moe/experts.py",
        )
    return _checked(experts, LAYOUTS[flags], where)


def _checked(experts: nn.Module, row: ExpertsRow, where: str) -> ExpertsRow:
    count = getattr(experts, row.count, None)
    if not isinstance(count, int):
        raise UsageError("cannot tell the number of experts", where=where, expected=f"experts.{row.count}")
    for name in row.tensors:
        tensor = getattr(experts, name, None)
        wanted = getattr(experts, row.total) if row.total and name in row.spare else count
        if not isinstance(tensor, Tensor) or tensor.shape[0] != wanted:
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else "missing"
            raise UsageError(f"experts.{name} is {shape}", where=where, expected=f"{wanted} experts on its first axis")
    return row
