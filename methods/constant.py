"""The operator `constant`: answer each pruned slot with the pruned expert's mean output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prunebench import Constant as ConstantFill
from prunebench import LayerView, Method, OutputMoments, Replacements, Statistic


@dataclass(frozen=True)
class Constant(Method):
    """N_i(x) = μ_i, the mean of f_i over the calibration tokens routed to i; router and gates unchanged.

    A never-routed expert has μ = 0. Source: 2610.41366 §3, "Constant (MoNE)".
    """

    name = "constant"
    reference = "arXiv:2610.41366"

    def replace_needs(self) -> tuple[Statistic, ...]:
        return (OutputMoments(),)

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        mean_ED = torch.from_numpy(layer.stats["output_moments"].mean_ED).float()
        return Replacements({expert: ConstantFill.of(mean_ED[expert]) for expert in pruned})
