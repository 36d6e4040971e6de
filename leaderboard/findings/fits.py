"""How well fills fit the experts that they answer for, and whether that orders them (App. B.3, B.4, C.3, §4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import fsum
from typing import Any, Final

from leaderboard.findings.evidence import (
    MULTIPLE_CHOICE,
    PERPLEXITY,
    RATIOS,
    Arm,
    Evidence,
    Model,
    NotMeasurableError,
    Suite,
)
from leaderboard.findings.operators import (
    CONSTANT,
    FUNCTIONAL,
    LARGER,
    LARGER_NEURONS,
    MORA,
    NEURONS,
    SLOT_FILLING,
    SVD,
    TILT,
    WHITENED,
)
from leaderboard.findings.ranks import exact_p, rank_correlation
from leaderboard.findings.settings import HELD, MASKS, Setting
from leaderboard.findings.text import Grid, Section, Summary, Table, grid_table, percent, prose
from leaderboard.findings.verdicts import Cell, Tally, Verdict, attempt

__all__ = ["Shares", "fits"]

_FITTED: Final = (*SLOT_FILLING, MORA, FUNCTIONAL)
_ORDER: Final = (TILT, NEURONS, WHITENED, SVD)
_ALPHA: Final = 0.05
_RANKED: Final = {
    f"{criterion}-{suite.name}": f"{title}, {suite.title}"
    for suite in (PERPLEXITY, MULTIPLE_CHOICE)
    for criterion, title in MASKS.items()
}
_CLAIMS: Final = {
    "last": "the last layer fits best",
    "order": "tilt > neurons > whitened > plain SVD",
    "larger": "neurons at four times > tilt",
}


@dataclass(frozen=True)
class Shares:
    """Of the constant's squared error, the share that a fill removes; None where nothing has weight.

    Args:
        plain: in-sample, errors added up over tokens and experts.
        gated: in-sample, an expert weighted by n·E[G²]·tr Σ.
        held_out: with the same weights, fitted on even calibration blocks and scored on odd ones.
    """

    plain: float | None
    gated: float | None
    held_out: float | None

    @classmethod
    def of(cls, layer: Mapping[str, Any]) -> Shares:
        """Of one layer's columns, as `plan.FittedPlan.to_json` has them."""
        count = len(layer["experts"])
        constant, left, gates, held = (
            layer.get(name, [None] * count)
            for name in ("constant_squared_error", "squared_error", "gate_square", "held_out_share")
        )
        fitted = [(c, 1.0, 1 - s / c) for c, s in zip(constant, left, strict=True) if c and s is not None]
        gated = [
            (c, g, 1 - s / c)
            for c, s, g in zip(constant, left, gates, strict=True)
            if c and s is not None and g is not None
        ]
        scored = [
            (c, g, h) for c, g, h in zip(constant, gates, held, strict=True) if c and g is not None and h is not None
        ]
        return cls(*map(_weighted, (fitted, gated, scored)))

    @classmethod
    def over(cls, layers: Sequence[Shares]) -> Shares:
        """The mean over layers, those left out where nothing has weight."""
        columns = ([getattr(own, name) for own in layers] for name in ("plain", "gated", "held_out"))
        return cls(*map(_mean, columns))

    def __str__(self) -> str:
        return " / ".join("–" if x is None else f"{100 * x:z.1f}" for x in (self.plain, self.gated, self.held_out))


def _weighted(rows: Iterable[tuple[float, float, float]]) -> float | None:
    """Mean of shares weighted by the product of the other two."""
    weighed = [(one * other, share) for one, other, share in rows]
    total = fsum(weight for weight, _ in weighed)
    return fsum(weight * share for weight, share in weighed) / total if total else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if known else None


def fits(evidence: Evidence) -> Section:
    """Fit shares by layer and in the mean, fallbacks, and rank correlation with scores."""
    shares: Grid = {
        (ratio, str(model), operator): attempt(partial(_mean_shares, evidence, Setting(model, ratio), operator))
        for ratio in RATIOS
        for model in evidence.models
        for operator in (*_FITTED, *_CLAIMS)
    }
    fallbacks: Grid = {
        (ratio, str(model), operator): attempt(partial(_fallbacks, evidence, model, ratio, operator))
        for ratio in RATIOS
        for model in evidence.models
        for operator in _FITTED
    }
    ranked: Grid = {
        (ratio, str(model), column): attempt(partial(_ranked, evidence, model, ratio, column))
        for ratio in RATIOS
        for model in evidence.models
        for column in _RANKED
    }

    def said(grid: Grid, column: str, ratios: Sequence[str] = RATIOS) -> str:
        parts = (
            f"{percent(ratio)} "
            + Tally.of(cell for key, cell in grid.items() if (key[0], key[2]) == (ratio, column)).short
            for ratio in ratios
        )
        return ", ".join(parts)

    summaries = (
        Summary(
            "The last MoE layer is where the tilt fits best",
            "50 %, in-sample: so on OLMoE (0.34), DeepSeek-V2-Lite (0.30) and Moonlight (0.31).",
            said(shares, "last"),
        ),
        Summary(
            "At one budget the tilt fits best, then neurons, whitened SVD, plain SVD",
            "50 %: so on every model, in-sample.",
            said(shares, "order"),
        ),
        Summary(
            "At four times the budget the neurons fit better than the tilt",
            "50 %: so on every model, in-sample.",
            said(shares, "larger", [HELD]),
        ),
        Summary(
            "Held-out fit orders fills as their scores do",
            "Within one kind of copy more fit brings more accuracy; across kinds fit does not by itself predict it.",
            "\n".join(f"{title}: {said(ranked, column)}" for column, title in _RANKED.items()),
        ),
    )
    blocks = (
        prose("""
            Share of the constant's squared error on calibration tokens that a fill removes (%): in-sample / in-sample,
            experts weighted by n·E[G²]·tr Σ / the same held out, fitted on even blocks and scored on odd ones. Only
            experts that a fill answers for have weight: of MoRA's, those with a proxy. Where the even blocks alone have
            too few tokens for a tilt, its held-out share is 0, however well it fits on all. conmoe-functional chooses,
            and fits nothing that could be held out; its negative shares say that a survivor is further off than the
            mean. Of calibration tokens, not test items: no interval. A dash: nothing has weight.
        """),
        f"By layer, MoNE's mask of general draw A, {percent(HELD)} pruned:",
        _layer_table(evidence),
        prose(f"""
            Mean over layers, MoNE's mask. The last layer fits best: seen if {TILT} has its highest in-sample share
            there. The order at one budget: seen if the four in-sample shares fall in it; reversed in the opposite one.
            Neurons at four times the budget have runs at {percent(HELD)} only.
        """),
        grid_table(shares, {operator: operator for operator in _FITTED} | _CLAIMS),
        prose("""
            Experts for which no fit could be used, of all pruned, MoNE's mask / REAP's mask: a tilt of rank r needs
            more than 4·r routed tokens, a copy and a remap some, MoRA an accepted proxy. The constant (for a tilt or a
            copy), the nearest survivor or rerouting answers in its place.
        """),
        grid_table(fallbacks, {operator: operator for operator in _FITTED}),
        prose(f"""
            Spearman's ρ between held-out shares (mean over layers) and scores, over n operators of one mask: the
            constant, whose share is 0 by definition, and {", ".join(SLOT_FILLING)}; on MoNE's mask at
            {percent(HELD)} also {" and ".join(LARGER)}. ρ is above zero where more fit goes with lower perplexity, or
            more multiple choice. seen or reversed: two-sided p of the exact permutation test below {_ALPHA:g}, which
            treats the points as exchangeable though some are one operator at two sizes; else not detectable.
        """),
        grid_table(ranked, _RANKED),
    )
    return Section("How well fills fit, and what that says (App. B.3, B.4, C.3)", blocks, summaries)


def _by_layer(evidence: Evidence, arm: Arm) -> dict[int, Shares]:
    layers = {int(index): Shares.of(layer) for index, layer in evidence.part(arm, "fit")["layers"].items()}
    return dict(sorted(layers.items()))


def _overall(evidence: Evidence, arm: Arm) -> Shares:
    return Shares.over(list(_by_layer(evidence, arm).values()))


def _plain(evidence: Evidence, arm: Arm) -> float:
    share = _overall(evidence, arm).plain
    if share is None:
        raise NotMeasurableError(f"{arm} fits nothing")
    return share


def _mean_shares(evidence: Evidence, setting: Setting, column: str) -> Cell:
    if column == "last":
        shares = [own.plain or 0.0 for own in _by_layer(evidence, setting.arm(TILT)).values()]
        return Cell("", Verdict.SEEN if shares[-1] > max(shares[:-1], default=0.0) else Verdict.ABSENT)
    if column == "order":
        shares = [_plain(evidence, setting.arm(operator)) for operator in _ORDER]
        falls = {_greater(one, other) for one, other in pairwise(shares)}
        return Cell("", falls.pop() if len(falls) == 1 else Verdict.ABSENT)
    if column == "larger":
        if setting.ratio != HELD:
            return Cell("")
        larger, tilt = (_plain(evidence, setting.arm(operator)) for operator in (LARGER_NEURONS, TILT))
        return Cell(f"{100 * larger:.1f} against {100 * tilt:.1f}", _greater(larger, tilt))
    return Cell(str(_overall(evidence, setting.arm(column))))


def _greater(one: float, other: float) -> Verdict:
    return Verdict.SEEN if one > other else Verdict.REVERSED if one < other else Verdict.OPEN


def _layer_table(evidence: Evidence) -> Table:
    rows = []
    for model in evidence.models:
        columns = [_layers_or_gap(evidence, Setting(model).arm(operator)) for operator in _FITTED]
        indices = sorted({index for column in columns if not isinstance(column, str) for index in column})
        if not indices:
            rows.append((str(model), "", *map(str, columns)))
        rows += [
            (
                str(model),
                str(index),
                *(column if isinstance(column, str) else str(column.get(index, "")) for column in columns),
            )
            for index in indices
        ]
    return Table(("model", "layer", *_FITTED), tuple(rows))


def _layers_or_gap(evidence: Evidence, arm: Arm) -> dict[int, Shares] | str:
    """An arm's shares by layer, or why there are none."""
    try:
        return _by_layer(evidence, arm)
    except NotMeasurableError as gap:
        return f"not measurable: {gap}"


def _fallbacks(evidence: Evidence, model: Model, ratio: str, operator: str) -> Cell:
    texts = []
    for criterion in MASKS:
        layers = evidence.part(Setting(model, ratio, criterion).arm(operator), "fit")["layers"].values()
        without, experts = (sum(len(layer[key]) for layer in layers) for key in ("fallbacks", "experts"))
        texts.append(f"{without} of {experts}")
    return Cell(" / ".join(texts))


def _ranked(evidence: Evidence, model: Model, ratio: str, column: str) -> Cell:
    criterion, _, name = column.partition("-")
    suite: Suite = {suite.name: suite for suite in (PERPLEXITY, MULTIPLE_CHOICE)}[name]
    operators = (*SLOT_FILLING, *(LARGER if (criterion, ratio) == ("mone", HELD) else ()))
    setting = Setting(model, ratio, criterion)
    constant = setting.arm(CONSTANT)
    shares, scores = [0.0], [suite.better * evidence.score(constant, suite).mean.value]
    for operator in operators:
        arm = setting.arm(operator)
        share = _overall(evidence, arm).held_out
        if share is None:
            raise NotMeasurableError(f"nothing of {arm} is held out")
        shares.append(share)
        scores.append(suite.better * evidence.both(arm, constant, suite)[0].mean.value)
    rho, p = rank_correlation(shares, scores), exact_p(shares, scores)
    verdict = Verdict.OPEN if p >= _ALPHA else Verdict.SEEN if rho > 0 else Verdict.REVERSED
    return Cell(f"{rho:+z.2f}, n = {len(shares)}, p = {p:.3f}", verdict)
