"""The operator `svd`: the leading singular directions of a pruned expert's matrices, and a bias."""

from __future__ import annotations

from dataclasses import dataclass

from prunebench import (
    CopyPair,
    LayerView,
    Method,
    Replacements,
    check_copy_budget,
    copy_errors,
    copy_size,
    plain_svd,
    with_residual_bias,
)


@dataclass(frozen=True)
class Svd(Method):
    """Truncated SVD of gate, up and down at one rank, and a bias.

    The bias is the mean of what the copy misses on the expert's routed tokens. A never-routed expert answers with zero,
    as its constant does. Router and gates are unchanged.

    Args:
        tilt_rank: r of the tilt whose 2rD values the copy's factors must fit under.
        times: that many times its budget; 1 or 4 in the paper.

    Source: 2610.41366 App. C.1.
    """

    name = "svd"
    reference = "arXiv:2610.41366"
    visits = True

    tilt_rank: int = 32
    times: int = 1

    def __post_init__(self) -> None:
        check_copy_budget(self.tilt_rank, self.times)

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        experts = {e: layer.gated(e) for e in pruned}
        copies = {}
        for e, expert in experts.items():
            rank = copy_size(
                "svd", width=layer.width, neurons=expert.neurons, tilt_rank=self.tilt_rank, times=self.times
            )
            copy = plain_svd(expert, rank)
            copies[e] = CopyPair(copy, copy)
        errors = layer.accumulate(
            pruned, lambda rows: copy_errors(copies[rows.expert], rows.x_SD, rows.y_SD, rows.block_S)
        )
        return Replacements({e: with_residual_bias(copies[e], errors.get(e)) for e in pruned})
