"""How far the calibration text moves MoNE's mask: another domain against another draw of one (§6.4, App. A.9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Final, Self

import numpy as np
from leaderboard.findings.evidence import DRAWS, GENERAL, IN_DOMAIN, RATIOS, Chosen, Draw, Evidence, NotMeasurableError
from leaderboard.findings.text import Grid, Section, Summary, Table, claims, grid_table, percent, prose, tallies
from leaderboard.findings.verdicts import Cell, Verdict, attempt

from prunebench.analysis import drift
from prunebench.analysis.drift import mean_share, splits_as_far
from prunebench.errors import UsageError
from prunebench.mask import Mask

__all__ = ["Drifts", "mask_drift", "share_differing", "splits_as_far"]

_BY_LAYER: Final = "0.5"
_COLUMNS: Final = {
    "general": "general draws (%)",
    "arithmetic": "arithmetic draws (%)",
    "domain": "arithmetic − general (%)",
    "ratio": "domain ÷ general draws",
    "splits": "splits as far apart",
    "verdict": "claim",
}
_CLAIMS: Final = {
    "0.25": "4.9, 9.3 and 3.9 times as far (OLMoE, DeepSeek-V2-Lite, Moonlight), at a matched token budget.",
    "0.5": "4.9, 5.9 and 5.9 times as far (OLMoE, DeepSeek-V2-Lite, Moonlight), at a matched token budget.",
    "0.75": "Not in the paper.",
}


def share_differing(one: Mask, other: Mask, layer: int | None = None) -> Fraction:
    """The share of the pruned experts of one mask that the other keeps; of one layer, or of all together.

    Raises:
        NotMeasurableError: for masks of different models or different counts, or that prune nothing there.
    """
    try:
        return drift.share_differing(one, other, layer)
    except UsageError as error:
        raise NotMeasurableError(error.what) from error


@dataclass(frozen=True)
class Drifts(drift.Drifts):
    """Shares that differ between the masks of two groups of draws, and what they say of the claim."""

    @classmethod
    def of(cls, first: Sequence[Mask], second: Sequence[Mask], layer: int | None = None) -> Self:
        """All pairs of masks within and across two groups.

        Raises:
            NotMeasurableError: as `share_differing`.
        """
        try:
            return super().of(first, second, layer)
        except UsageError as error:
            raise NotMeasurableError(error.what) from error

    @property
    def verdict(self) -> Verdict:
        """Whether every pair across differs more than every pair within."""
        return {1: Verdict.SEEN, 0: Verdict.OPEN, -1: Verdict.REVERSED}[self.apart]


def mask_drift(evidence: Evidence) -> Section:
    """Mask drift at every ratio, and by layer at one."""
    grid: Grid = {
        (ratio, str(model), column): attempt(partial(_cell, evidence, model.name, ratio, column))
        for ratio in RATIOS
        for model in evidence.models
        for column in _COLUMNS
    }
    times = (
        f"{percent(ratio)}, times as far: "
        + ", ".join(f"{model.name} {grid[ratio, str(model), 'ratio']}" for model in evidence.models)
        for ratio in RATIOS
    )
    summary = Summary(
        "The calibration domain moves the mask more than resampling",
        claims(_CLAIMS),
        "\n".join([tallies(grid, {"verdict": "every pair across against every pair within"}), *times]),
    )
    unrelated = ", ".join(f"{percent(f'{1 - float(ratio):g}')} at {percent(ratio)}" for ratio in RATIOS)
    blocks = (
        prose(f"""
            Share of pruned experts that differ between two MoNE masks: mean over the pairs of draws, and their range.
            Three draws of each text, all of one size, give three pairs within each domain and nine across. Masks that
            have nothing to do with each other would differ by {unrelated}.
        """),
        grid_table(grid, _COLUMNS),
        prose("""
            There are no test items here, so no item interval. seen: every pair across the domains differs more than
            every pair within one; reversed: less than every one; not detectable: the ranges overlap. Splits as far
            apart: of all ways to split the draws into two groups as large as the domains, how many have an excess
            (mean across − mean within) at least as large as the domains' own. Divided by the number of splits, that
            is the p of an exact one-sided permutation test of draws that are exchangeable. Six draws have ten such
            splits, so it cannot be below 0.1: it can support the claim and not establish it. The models share the
            text of their draws, so their p must not be multiplied.
        """),
        f"By layer, {percent(_BY_LAYER)} pruned: mean share across the domains / between general draws (%).",
        _layer_table(evidence),
    )
    return Section("Calibration domain moves the mask more than resampling (§6.4, App. A.9)", blocks, (summary,))


def _masks(evidence: Evidence, model: str, ratio: str, text: str) -> list[Mask]:
    """The masks of the three draws of a text, of which no two are one text and all are of the general draws' size."""
    reference = evidence.mask(model, ratio, Draw(GENERAL, DRAWS[0])).tokens
    chosen: list[Chosen] = []
    for name in DRAWS:
        own = evidence.mask(model, ratio, Draw(text, name))
        if own.tokens != reference:
            raise NotMeasurableError(f"{model} {Draw(text, name)} has {own.tokens} tokens, others {reference}")
        if own.fingerprint in {other.fingerprint for other in chosen}:
            raise NotMeasurableError(f"{model} {Draw(text, name)} is the same text as another draw")
        chosen.append(own)
    return [own.mask for own in chosen]


def _cell(evidence: Evidence, model: str, ratio: str, column: str) -> Cell:
    general = _masks(evidence, model, ratio, GENERAL)
    if column == "general":
        return Cell(_range(Drifts.of(general, general).first))
    arithmetic = _masks(evidence, model, ratio, IN_DOMAIN)
    drifts = Drifts.of(general, arithmetic)
    if column == "ratio":
        times = drifts.times
        return Cell("no drift between general draws" if times is None else f"{float(times):.1f} ×")
    if column == "splits":
        return Cell("{} of {}".format(*splits_as_far(general, arithmetic)))
    if column == "verdict":
        return Cell("", drifts.verdict)
    return Cell(_range({"arithmetic": drifts.second, "domain": drifts.across}[column]))


def _range(shares: Sequence[Fraction]) -> str:
    mean, low, high = (f"{100 * float(share):.1f}" for share in (mean_share(shares), min(shares), max(shares)))
    return f"{mean} ({low} to {high})"


def _layer_table(evidence: Evidence) -> Table:
    rows = []
    for model in evidence.models:
        try:
            masks = [_masks(evidence, model.name, _BY_LAYER, text) for text in (GENERAL, IN_DOMAIN)]
            indices = [layer.index for layer in masks[0][0].layers]
            by_layer = ((index, Drifts.of(masks[0], masks[1], index)) for index in indices)
            parts = [f"layer {index}: {_percent(own.across)} / {_percent(own.first)}" for index, own in by_layer]
            rows.append((str(model), ", ".join(parts)))
        except NotMeasurableError as gap:
            rows.append((str(model), f"not measurable: {gap}"))
    return Table(("model", "layers"), tuple(rows))


def _percent(shares: Sequence[Fraction]) -> str:
    return f"{100 * float(np.mean([float(share) for share in shares])):.0f}"
