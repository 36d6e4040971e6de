"""Which expert gets how many bits: the allocation of Mixture-Compressor (2410.06270 §3.2), per layer, solved exactly.

An expert e at b bits costs φ_e^α · w_e^β · ε_eb^γ, where φ is the share of tokens routed to it, w its gates' sum over
all tokens divided by their number, and ε the Frobenius norm of what quantizing it to b bits changes in its linears'
outputs on the calibration inputs. Bits are chosen to cost least in all at a given mean, with at least one expert at
each width above the lowest. α = 1 and β = 1.5 are what 2610.41366 App. F.5 states as the authors' defaults, γ = 2 is
their released script's.

Theirs are 1, 2 and 3 bits; App. F.5 uses 2, 3 and 4, with 3 on average. No torch.

E experts, W widths.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from prunebench.errors import UsageError

__all__ = ["WIDTHS", "allocate", "costs"]

WIDTHS: Final = (2, 3, 4)
ALPHA, BETA, GAMMA = 1.0, 1.5, 2.0


def costs(
    share_E: NDArray[np.float64], gate_E: NDArray[np.float64], error_EW: NDArray[np.float64]
) -> NDArray[np.float64]:
    """φ^α · w^β · ε^γ of every expert and width ([E, W]).

    Args:
        share_E: φ.
        gate_E: w.
        error_EW: ε.
    """
    cost_EW: NDArray[np.float64] = (share_E**ALPHA * gate_E**BETA)[:, None] * error_EW**GAMMA
    return cost_EW


def allocate(cost_EW: NDArray[np.float64], mean: int, widths: tuple[int, ...] = WIDTHS) -> tuple[int, ...]:
    """The bits of every expert: the least total cost with no more than `mean` bits on average.

    Of equal costs the one with fewer bits for the later experts is taken. Experts that are too few to give each upper
    width to one of them need not.

    Args:
        cost_EW: of every expert at every width, 0 or more.
        mean: bits per expert, all in all.
        widths: increasing.

    Raises:
        UsageError: a mean outside the widths, or costs that are no numbers.
    """
    experts = cost_EW.shape[0]
    if not widths[0] <= mean <= widths[-1] or not np.isfinite(cost_EW).all():
        raise UsageError(
            f"no allocation of {mean} bits to {experts} experts", expected=f"{widths[0]} to {widths[-1]}, finite costs"
        )
    least = len(widths) - 1 if experts * (mean - widths[0]) >= sum(w - widths[0] for w in widths[1:]) else 0
    everyone = (1 << least) - 1
    # (bits spent, upper widths used) -> (cost, choice of the last expert, where that came from)
    state: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
    for e in range(experts):
        after: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (spent, used), (cost, chosen) in state.items():
            for w, width in enumerate(widths):
                key = (spent + width, used | (1 << (w - 1) if w else 0) & everyone)
                if key[0] + (experts - e - 1) * widths[0] > experts * mean:
                    continue
                found = (cost + float(cost_EW[e, w]), (*chosen, width))
                if key not in after or found[0] < after[key][0]:
                    after[key] = found
        state = after
    fine = [(cost, spent, chosen) for (spent, used), (cost, chosen) in state.items() if used == everyone]
    return min(fine)[2]
