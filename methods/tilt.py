"""The operator `tilt`: a pruned expert's mean output, leaning with its input along a few fitted directions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prunebench import (
    Fitted,
    InputOutputMoments,
    LayerView,
    Method,
    Replacements,
    Statistic,
    UsageError,
    fit_tilt,
    held_out_share,
)


@dataclass(frozen=True)
class Tilt(Method):
    """N_i(x) = μ_i + U clip(V x − φ̄, ±c), a reduced-rank ridge regression of f_i on its routed tokens.

    Exactly App. B.1: ridge relative to each channel's variance, rank truncated in the ridged metric, features about
    their mean and clipped. At 4·rank routed tokens or fewer the constant answers. Router and gates are unchanged.

    Args:
        rank: r ≥ 1; 32 in the paper. Tiny models are better served by 4 or 8.
        ridge: λ.
        clip: c, in standard deviations of each feature.

    Source: 2610.41366 §3 and App. B.1.
    """

    name = "tilt"
    reference = "arXiv:2610.41366"

    rank: int = 32
    ridge: float = 1e-2
    clip: float = 4.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(
                f"rank {self.rank} is no tilt", expected="at least 1", fix="for rank 0 use the operator constant"
            )
        if not (self.ridge >= 0 and self.clip > 0):
            raise UsageError(f"ridge {self.ridge} and clip {self.clip}", expected="0 or more, and more than 0")

    def replace_needs(self) -> tuple[Statistic, ...]:
        return (InputOutputMoments(folds=2),)

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        moments = layer.stats["input_output_moments"]

        def fit(expert: int) -> Fitted:
            even, odd = moments.fold(expert, 0), moments.fold(expert, 1)
            fitted = fit_tilt(even + odd, self.rank, ridge=self.ridge, clip=self.clip)
            return replace(fitted, held_out_share=held_out_share(even, odd, self.rank, ridge=self.ridge))

        return Replacements({e: fit(e) for e in pruned})
