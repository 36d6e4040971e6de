"""The operator `neurons`: a pruned expert's highest-energy neurons answer for it, and a bias for the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from prunebench import (
    CopyPair,
    ExpertRows,
    Folds,
    LayerView,
    Method,
    Replacements,
    check_copy_budget,
    copy_errors,
    copy_size,
    top_neurons,
    with_residual_bias,
)


@dataclass(frozen=True)
class Neurons(Method):
    """The k neurons with the largest E[h_j²]·‖W_down[:, j]‖² over the expert's routed tokens, exactly, and a bias.

    The bias is the mean of what the copy misses on those tokens, for which the text is met a second time. A
    never-routed expert answers with zero, as its constant does. Router and gates are unchanged.

    Args:
        tilt_rank: r of the tilt whose 2rD values the copy's factors must fit under.
        times: that many times its budget; 1 or 4 in the paper.

    Source: 2610.41366 App. C.1.
    """

    name = "neurons"
    reference = "arXiv:2610.41366"
    visits = True

    tilt_rank: int = 32
    times: int = 1

    def __post_init__(self) -> None:
        check_copy_budget(self.tilt_rank, self.times)

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        experts = {e: layer.gated(e) for e in pruned}

        def squares(rows: ExpertRows) -> Folds[Tensor]:
            square_SF = experts[rows.expert].double().hidden(rows.x_SD.double()).square()
            return Folds.of(rows.block_S, lambda fold_S: square_SF[fold_S].sum(0))

        energy = layer.accumulate(pruned, squares)
        copies = {}
        for e, expert in experts.items():
            size = copy_size(
                "neurons", width=layer.width, neurons=expert.neurons, tilt_rank=self.tilt_rank, times=self.times
            )
            never_F = expert.down_DF.new_zeros(expert.neurons)
            sums = energy.get(e, Folds(never_F, never_F))
            copies[e] = CopyPair(top_neurons(expert, size, sums.both), top_neurons(expert, size, sums.even))
        errors = layer.accumulate(
            pruned, lambda rows: copy_errors(copies[rows.expert], rows.x_SD, rows.y_SD, rows.block_S)
        )
        return Replacements({e: with_residual_bias(copies[e], errors.get(e)) for e in pruned})
