"""How far a layer's output moves when a subset of its experts is gone: what subset search enumerates (2402.14800).

T tokens, E experts, B subsets, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prunebench.calibration import Statistic
from prunebench.errors import UsageError
from prunebench.moe import TokenBatch
from prunebench.routing import Scale, reroute

__all__ = ["SubsetErrors"]

_CHUNK = 256  # tokens whose outputs of all experts are held in float64 at a time


class SubsetErrors(Statistic):
    """Σ over batches of ‖Z − Z_P‖_F for each set P of missing experts; `value` is [B], float64.

    Z is the layer's routed output, Z_P that of a router without P, whose slots are refilled at the trained scale: both
    from the layer's intact input. The norm is taken over a whole batch and not squared, as the released code does; a
    batch is one forward, so the numbers depend somewhat on how the text is cut. Every expert runs on every token.

    Args:
        subsets: the missing experts of each, in the order of the values.
    """

    name = "subset_errors"

    def __init__(self, subsets: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.subsets = tuple(subsets)

    def start(self, experts: int, width: int, device: torch.device) -> None:
        del width
        self.experts = experts
        self.state = {"sum_B": torch.zeros(len(self.subsets), dtype=torch.float64, device=device)}

    def update(self, batch: TokenBatch) -> None:
        if batch.call is None or batch.evaluate is None or batch.call.convention.identities:
            raise UsageError(
                "subset search has to run every expert of the router on every token",
                expected="an intact layer without identity experts",
                fix="use another criterion",
            )
        moved = [self._weights(batch, subset) for subset in self.subsets]
        squares_B = torch.zeros_like(self.state["sum_B"])
        for start in range(0, batch.tokens, _CHUNK):
            x_CD = batch.x_TD[start : start + _CHUNK]
            every_S = torch.arange(self.experts, device=x_CD.device).repeat_interleave(len(x_CD))
            outputs_ECD = batch.evaluate(x_CD.repeat(self.experts, 1), every_S).double().view(self.experts, *x_CD.shape)
            outputs_CED = outputs_ECD.transpose(0, 1)
            # ‖Σ_e Δ_e f_e‖² from the inner products of a token's outputs: D is gone before subsets multiply the work.
            products_CEE = torch.bmm(outputs_CED, outputs_CED.transpose(1, 2))
            for number, moved_TE in enumerate(moved):
                moved_CE = moved_TE[start : start + _CHUNK]
                squares_B[number] += torch.einsum("ce,cef,cf->", moved_CE, products_CEE, moved_CE)
        self.state["sum_B"] += squares_B.clamp(min=0.0).sqrt()

    def _weights(self, batch: TokenBatch, subset: tuple[int, ...]) -> Tensor:
        """What each expert's output gains in weight when the subset is gone ([T, E])."""
        assert batch.call is not None
        blocked_E = torch.zeros(self.experts, dtype=torch.bool, device=batch.x_TD.device)
        blocked_E[list(subset)] = True
        index_TK, gates_TK = reroute(batch.call, blocked_E, Scale(batch.call.convention.trained_scale))
        weights_TE = batch.x_TD.new_zeros(batch.tokens, self.experts + 1, dtype=torch.float64)
        weights_TE.scatter_add_(1, index_TK, gates_TK.double())
        weights_TE.scatter_add_(1, batch.index_TK, -batch.gates_TK.double())
        return weights_TE[:, :-1]

    def value(self) -> npt.NDArray[np.float64]:
        return self.state["sum_B"].numpy()
