"""How much a layer's output changes when one expert is deleted: RAZOR's token quantities (2609.30465 §2, App. A).

For a router that renormalises, a layer's routed output is λ·c with c = Σ_{j∈S} w_j f_j and Σ w_j = 1. With
r_j = f_j − c and the rank-(k+1) expert r of share w_r = p_r / Σ_{j∈S} p_j:

=======  ==============================================  ==================================================
RCS      λ·w_i‖r_i‖                                      a routing-weighted deviation from the mixture
RCS-LOO  λ·w_i‖r_i‖ / (1 − w_i)                          i deleted, the others renormalised
refill   λ·‖w_i r_i − w_r r_r‖ / (1 − w_i + w_r)         i deleted, r promoted, all renormalised
=======  ==============================================  ==================================================

Denominators are clamped at 1e-6 (App. A.4). The shares are float64 from the router's logits, so they are exact where
gates are rounded; a scale per expert goes with its output, and the epsilon that some routers add to their sum is in
the shares: both leave the identities exact. Routers that do not renormalise are outside the paper: there the sums are
not taken and their values are NaN, which no selection accepts. `FrozenRefillSums` is what Razor's released code scores
there, ‖g_i f_i − g_r f_r‖: i deleted, r promoted, every gate as it is.

T tokens, K slots per token, E experts, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prunebench.calibration.base import Statistic, sum_by_expert
from prunebench.moe import TokenBatch

__all__ = ["Deletion", "FrozenRefillSums", "RefillSums", "ResidualSums", "deletion_damage", "residual_norms"]

CLAMP = 1e-6
Float64 = npt.NDArray[np.float64]

_PARTS = ("sum_E", "squares_E")


def _chunks(batch: TokenBatch) -> Iterator[tuple[slice, Tensor]]:
    """Tokens and λ·f of their slots in float64, as many tokens at a time as stay in cache ([C, K, D])."""
    size = 64 if batch.outputs_SD.device.type == "cpu" else 2048
    factor_TK = batch.factor_E[batch.index_TK]
    for start in range(0, batch.tokens, size):
        part = slice(start, start + size)
        yield part, batch.outputs_SD[batch.row_TK[part]].double().mul_(factor_TK[part, :, None])


def residual_norms(batch: TokenBatch) -> Tensor:
    """RCS, λ·w_i‖r_i‖, of each slot ([T, K], float64); of a batch that `is_mixture`."""
    rcs_TK = batch.shares_TK.new_empty(batch.index_TK.shape)
    for part, outputs_CKD in _chunks(batch):
        share_CK = batch.shares_TK[part]
        residual_CKD = outputs_CKD.sub_(torch.bmm(share_CK[:, None], outputs_CKD))
        rcs_TK[part] = share_CK * residual_CKD.square_().sum(-1).sqrt_()
    return rcs_TK


def deletion_damage(batch: TokenBatch) -> Tensor:
    """The refill damage of deleting the expert of each slot ([T, K], float64); as `residual_norms`.

    A token without a rank-(k+1) expert has w_r = 0: its survivors are renormalised among themselves.
    """
    promoted = batch.promoted
    factor_T = batch.factor_E[promoted.expert_T.clamp(min=0)]
    damage_TK = batch.shares_TK.new_empty(batch.index_TK.shape)
    for part, outputs_CKD in _chunks(batch):
        share_CK, share_C = batch.shares_TK[part], promoted.share_T[part]
        mixture_CD = torch.bmm(share_CK[:, None], outputs_CKD)[:, 0]
        refill_CD = (promoted.outputs_TD[part].double() * factor_T[part, None] - mixture_CD) * share_C[:, None]
        change_CKD = outputs_CKD.sub_(mixture_CD[:, None]).mul_(share_CK[..., None]).sub_(refill_CD[:, None])
        left_CK = (1 - share_CK + share_C[:, None]).clamp(min=CLAMP)
        damage_TK[part] = change_CKD.square_().sum(-1).sqrt_() / left_CK
    return damage_TK


def _frozen_damage(batch: TokenBatch) -> Tensor:
    """‖g_i f_i − g_r f_r‖ of each slot, gates as applied ([T, K], float64)."""
    promoted = batch.promoted
    gate_T = promoted.share_T * batch.factor_E[promoted.expert_T.clamp(min=0)]
    damage_TK = gate_T.new_empty(batch.index_TK.shape)
    size = 64 if batch.outputs_SD.device.type == "cpu" else 2048
    for start in range(0, batch.tokens, size):
        part = slice(start, start + size)
        # What stands in slots without a row (identity experts) is nobody's, and is not read.
        row_CK = batch.row_TK[part].clamp(max=max(len(batch.expert_S) - 1, 0))
        lost_CKD = batch.outputs_SD[row_CK].double() * batch.gates_TK[part].double()[..., None]
        lost_CKD -= (promoted.outputs_TD[part].double() * gate_T[part, None])[:, None]
        damage_TK[part] = lost_CKD.square_().sum(-1).sqrt_()
    return damage_TK


@dataclass(frozen=True)
class Deletion:
    """Σ d and Σ d² over each expert's routed tokens, of one token quantity d; NaN where it is not defined.

    Args:
        sum_E: Σ d.
        squares_E: Σ d².
    """

    sum_E: Float64
    squares_E: Float64


class _Damage(Statistic):
    """Sums and sums of squares of token quantities, by expert; `outside_E` counts rows where they are not defined."""

    quantities: tuple[str, ...]

    def start(self, experts: int, width: int, device: torch.device) -> None:
        del width
        names = [f"{quantity}_{part}" for quantity in self.quantities for part in _PARTS]
        self.state = {name: torch.zeros(experts, dtype=torch.float64, device=device) for name in names}
        self.state["outside_E"] = torch.zeros(experts, dtype=torch.int64, device=device)

    def defined(self, batch: TokenBatch) -> bool:
        """Whether the quantities have a meaning for the layer as it runs."""
        return batch.is_mixture

    def of_slots(self, batch: TokenBatch) -> tuple[Tensor, ...]:
        """The quantities, in their order ([T, K] each)."""
        raise NotImplementedError

    def update(self, batch: TokenBatch) -> None:
        if not self.defined(batch):
            self.state["outside_E"] += batch.counts_E
            return
        for quantity, of_TK in zip(self.quantities, self.of_slots(batch), strict=True):
            of_S = of_TK[batch.token_S, batch.slot_S]
            self.state[f"{quantity}_sum_E"] += sum_by_expert(of_S, batch)
            self.state[f"{quantity}_squares_E"] += sum_by_expert(of_S.square(), batch)

    def value(self) -> dict[str, Deletion]:
        """Sums by quantity."""
        unknown = np.nan if bool(self.state["outside_E"].any()) else 0.0
        return {
            quantity: Deletion(*(self.state[f"{quantity}_{part}"].numpy() + unknown for part in _PARTS))
            for quantity in self.quantities
        }


class ResidualSums(_Damage):
    """RCS and RCS-LOO over routed tokens, from routed outputs alone; `value` is `{"rcs": …, "rcs-loo": …}`."""

    name = "residual_sums"
    quantities = ("rcs", "rcs-loo")

    def of_slots(self, batch: TokenBatch) -> tuple[Tensor, ...]:
        rcs_TK = residual_norms(batch)
        return rcs_TK, rcs_TK / (1 - batch.shares_TK).clamp(min=CLAMP)


class RefillSums(_Damage):
    """Refill damage over routed tokens; `value` is `{"refill": …}`. Asks for one more expert per token."""

    name = "refill_sums"
    quantities = ("refill",)

    def of_slots(self, batch: TokenBatch) -> tuple[Tensor, ...]:
        return (deletion_damage(batch),)


class FrozenRefillSums(_Damage):
    """‖g_i f_i − g_r f_r‖ over routed tokens, for any router with a rank k + 1; `value` is `{"frozen-refill": …}`."""

    name = "frozen_refill_sums"
    quantities = ("frozen-refill",)

    def defined(self, batch: TokenBatch) -> bool:
        return len(batch.expert_S) > 0 and batch.call is not None

    def of_slots(self, batch: TokenBatch) -> tuple[Tensor, ...]:
        return (_frozen_damage(batch),)
