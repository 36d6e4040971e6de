"""What rerouting does to the gates, per arm: displaced calls and keep's mass (§5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

from leaderboard.findings.evidence import (
    CRITERIA,
    GENERAL,
    IN_DOMAIN,
    OTHER,
    RATIOS,
    TRAINED,
    Draw,
    Evidence,
    Model,
    NotMeasurableError,
    pruned,
)
from leaderboard.findings.text import Grid, Section, Summary, Table, grid_table, prose
from leaderboard.findings.verdicts import Cell, Tally, Verdict, attempt

from prunebench.analysis import ReroutingSummary, rerouting_summary

__all__ = ["gate_mass"]

_MOONLIGHT: Final = (("25 %", "55", "0.96", "9.9"), ("50 %", "97", "0.71", "5.2"), ("75 %", "100", "0.42", "0.8"))
_COLUMNS: Final = {
    "displaced": "calls displaced (%)",
    "ratio": "keep ÷ renorm, displaced calls",
    "trained": "keep ÷ trained, all calls",
    "above": "above 1 (%)",
}
_TRENDS: Final = {"displaced": "calls displaced", "mass": "keep's mass", "above": "above 1"}


class _Origin(NamedTuple):
    """What chose a mask, and on what."""

    criterion: str
    draw: Draw

    def __str__(self) -> str:
        return f"{self.criterion} ({self.draw})"


_MONE: Final = _Origin(CRITERIA[0], Draw(GENERAL, "A"))
_MASKS: Final = (
    *(_Origin(criterion, Draw(GENERAL, "A")) for criterion in CRITERIA),
    _Origin(CRITERIA[0], Draw(IN_DOMAIN, "A")),
)


def gate_mass(evidence: Evidence) -> Section:
    """The diagnostics of every rerouting arm, and their trends over the ratios."""
    grid: Grid = {
        (ratio, f"{model}, {mask}", column): attempt(partial(_cell, evidence, model, ratio, mask, column))
        for ratio in RATIOS
        for model in evidence.models
        for mask in _MASKS
        for column in _COLUMNS
    }
    trends = {
        (column, model): attempt(partial(_trend, evidence, model, column))
        for column in _TRENDS
        for model in evidence.models
    }

    def tally(column: str, models: Sequence[Model]) -> str:
        return Tally.of(trends[column, model] for model in models).short

    biased = [model for model in evidence.models if model.biased]
    summaries = (
        Summary(
            "The more is pruned, the more calls are displaced and the less mass keep gives",
            "Moonlight at 25, 50 and 75 %: 55, 97 and 100 % of calls; keep's mass 0.96, 0.71 and 0.42 of the trained.",
            f"{_TRENDS['displaced']}: {tally('displaced', evidence.models)}\n"
            f"{_TRENDS['mass']}: {tally('mass', evidence.models)}",
        ),
        Summary(
            "Where a bias steers the choice, keep gives more mass than the trained scale on some calls",
            "Moonlight at 25, 50 and 75 %: 9.9, 5.2 and 0.8 % of calls.",
            f"{tally('above', biased)}; no other router here has such a bias" if biased else "**not measurable**",
        ),
    )
    blocks = (
        prose("""
            Counted over every token and MoE layer of an arm's whole evaluation (trained-scale arm / other-scale arm).
            Displaced: the unpruned top-k held a pruned expert. The ratio is that of the gates' totals under the two
            scales. For routers trained with renormalization the two agree on all other calls, so the mean over all
            calls is keep's mass over the trained mass; for the others keep is the trained scale, and there is nothing
            to divide. Above 1: of all calls. Counts of calls, not of test items: no interval. They are as the records
            have them, and cannot be had again without the weights.
        """),
        "The paper's Moonlight-16B-A3B, MoNE's masks:",
        Table(("pruned", "calls displaced (%)", "keep ÷ trained, all calls", "above 1 (%)"), _MOONLIGHT),
        "Here:",
        grid_table(grid, _COLUMNS, row="model, mask"),
        prose("""
            Trends on MoNE's mask of general draw A, other-scale arm, from 25 to 75 %. Displaced calls: seen if the
            share rises at each step. Keep's mass (over the trained mass where the router was trained with
            renormalization, else over renorm's on displaced calls): seen if it falls at each step. Above 1: seen if it
            is above zero at each ratio.
        """),
        Table(
            ("model", *_TRENDS.values()),
            tuple((str(model), *(str(trends[column, model]) for column in _TRENDS)) for model in evidence.models),
        ),
    )
    return Section("What the gate scales do to the gates (§5.3)", blocks, summaries)


def _summary(evidence: Evidence, model: str, ratio: str, operator: str, mask: _Origin) -> ReroutingSummary:
    arm = pruned(model, ratio, operator, criterion=mask.criterion, mask=mask.draw)
    summary = rerouting_summary(evidence.routing(arm))
    if summary is None:
        raise NotMeasurableError(f"the run of {arm} counted no call that was rerouted")
    return summary


def _cell(evidence: Evidence, model: Model, ratio: str, mask: _Origin, column: str) -> Cell:
    both = [_summary(evidence, model.name, ratio, operator, mask) for operator in (TRAINED, OTHER)]
    if column == "trained" and model.trained != "renorm":
        return Cell("keep is trained")
    texts = {
        "displaced": [f"{100 * one.displaced_share:.1f}" for one in both],
        "ratio": [f"{one.keep_over_renorm:.3f}" for one in both],
        "trained": [f"{one.keep_over_trained:.3f}" for one in both],
        "above": [f"{100 * one.above_one_share:.1f}" for one in both],
    }
    return Cell(" / ".join(texts[column]))


def _trend(evidence: Evidence, model: Model, column: str) -> Cell:
    found = [_summary(evidence, model.name, ratio, OTHER, _MONE) for ratio in RATIOS]
    values = {
        "displaced": [one.displaced_share for one in found],
        "mass": [-(one.keep_over_trained if model.trained == "renorm" else one.keep_over_renorm) for one in found],
        "above": [one.above_one_share for one in found],
    }[column]
    holds = all(value > 0 for value in values) if column == "above" else all(a < b for a, b in pairwise(values))
    return Cell("", Verdict.SEEN if holds else Verdict.ABSENT)
