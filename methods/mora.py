"""The operator `mora`: a survivor's output, rescaled by channel, answers where it predicts well; else rerouting."""

from __future__ import annotations

from dataclasses import dataclass

from prunebench import (
    AffineSurvivor,
    ExpertRows,
    Fitted,
    Folds,
    LayerView,
    Method,
    PairMoments,
    Replacements,
    Routing,
    Scale,
    UsageError,
    best_proxy,
)


@dataclass(frozen=True)
class Mora(Method):
    """N_i(x) = a ⊙ f_j(x) + b of the survivor j with the highest held-out R², used only if that exceeds the threshold.

    a and b by weighted ridge regression, each channel for itself, on the expert's routed tokens of even calibration
    blocks; R² on those of odd ones. Token weights are the unpruned router's probability of the expert. Slots of experts
    without a proxy are refilled by survivors; router rows and the other gates are unchanged.

    MoRA's biases, by which it selects, are not here: this is its approximation, on any mask. Its code is not released;
    the ridge, its token set (routed tokens) and the baseline of R² (the mean of the held-out rows) are our choices.

    Args:
        threshold: q_min; R² must exceed it.
        ridge: λ, relative to each channel's variance.
        scale: gate scale where slots are refilled; MoRA's own is renorm.

    Source: MoRA (arXiv:2610.00367) as re-implemented in 2610.41366 §3 and App. D.
    """

    name = "mora"
    reference = "arXiv:2610.00367"
    visits = True

    threshold: float = 0.4
    ridge: float = 1e-6
    scale: str = "trained"

    def __post_init__(self) -> None:
        Scale.parse(self.scale)
        if not self.threshold < 1:
            raise UsageError(f"a threshold of {self.threshold} for R²", expected="less than 1")
        if not self.ridge >= 0:
            raise UsageError(f"ridge {self.ridge}", expected="0 or more")

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        survivors = layer.survivors(pruned)

        def measure(rows: ExpertRows) -> Folds[PairMoments]:
            sources = [layer.expert(survivor, rows.x_SD) for survivor in survivors]
            return Folds.of(
                rows.block_S,
                lambda fold_S: PairMoments.of(
                    rows.y_SD[fold_S], [y_SD[fold_S] for y_SD in sources], rows.score_S[fold_S]
                ),
            )

        moments = layer.accumulate(pruned, measure)
        return Replacements({e: self._fitted(moments.get(e), survivors) for e in pruned})

    def _fitted(self, moments: Folds[PairMoments] | None, survivors: tuple[int, ...]) -> Fitted:
        if moments is None:
            return Fitted(None, 0, "no routed tokens, rerouted")
        tokens = moments.even.count + moments.odd.count
        proxy = best_proxy(moments.even, moments.odd, survivors, threshold=self.threshold, ridge=self.ridge)
        if not proxy.accepted:
            return Fitted(None, tokens, "no proxy, rerouted", held_out_share=proxy.r2)
        return Fitted(
            AffineSurvivor.of(proxy.survivor, proxy.a_D, proxy.b_D),
            tokens,
            squared_error=proxy.squared_error,
            constant_squared_error=proxy.constant_squared_error,
            held_out_share=proxy.r2,
            outcome="proxy",
        )

    def route(self, layer: LayerView, pruned: tuple[int, ...]) -> Routing:
        return Routing(self.scale)
