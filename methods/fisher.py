"""Fisher: prune the experts whose weights the model's loss depends on least, by the gradients of whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunebench import Budget, Fisher, LayerView, Mask, Method, Statistic, TrueFisher, UsageError, prune_lowest


@dataclass(frozen=True)
class FisherExpert(Method):
    """Score F_e = mean over sequences of ‖∇_e ℓ‖₂²; keep high, per layer; a never-routed expert scores 0.

    ℓ is a sequence's mean next-token loss, ∇_e its gradient with respect to all of expert e's matrices. Token set: all
    calibration sequences; one that is not routed to e adds 0 to its mean. This is the scalar of COMPEL's compensation
    and the target of its fitted selection scores, which rank alike within a layer once fitted; COMPEL's layer-adaptive
    budgets, for which too little is public, are not here. F depends on how a weight is scaled against the next one
    and on the length of the sequences. Alone it reroutes at the scale that the router was trained with (ours: the
    paper prunes by keep or renorm).

    Args:
        labels: `data`, the text's own (the empirical Fisher, as in the paper), or `sampled`, drawn from the model's
            distribution (the true one, as 2610.41366 App. E.6 draws them).
        seed: of the sampled labels.

    Source: Yoon & Choi 2026 (COMPEL), Eq. 5, in the form of 2610.41366 App. H.6; ranking by it alone is ours.
    """

    name = "fisher"
    reference = "Yoon & Choi 2026"

    labels: str = "data"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.labels not in ("data", "sampled"):
            raise UsageError(f"unknown labels {self.labels!r}", where=self.name, expected="data or sampled")

    def select_needs(self) -> tuple[Statistic, ...]:
        return (Fisher() if self.labels == "data" else TrueFisher(self.seed),)

    def select(self, layers: Sequence[LayerView], budget: Budget, *, rng: np.random.Generator) -> Mask:
        [needed] = self.select_needs()
        return prune_lowest(layers, budget, lambda layer: layer.stats[needed.name], name=self.name)
