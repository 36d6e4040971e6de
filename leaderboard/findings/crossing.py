"""The calibration domain of the mask and of the fit, crossed: which of the two carries it (§6.4, Table 15)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from leaderboard.findings.evidence import (
    ARITHMETIC,
    CONSTANT,
    GENERAL,
    IN_DOMAIN,
    MULTIPLE_CHOICE,
    SUITES,
    Draw,
    Evidence,
    Suite,
    pruned,
)
from leaderboard.findings.text import Grid, Section, Summary, columns_of, contrasts_in, grid_table, percent, prose
from leaderboard.findings.verdicts import Cell, Tally, attempt, compared, judged, sides

__all__ = ["crossing"]

_RATIO: Final = "0.5"
_GENERAL: Final = Draw(GENERAL, "A")
_OWN: Final = Draw(IN_DOMAIN, "A")


@dataclass(frozen=True)
class _Effect:
    """A difference of two cells of the crossed table; a cell is (what the mask was chosen on, what the fit was).

    Args:
        title: of the effect.
        one: the cell.
        other: the one subtracted.
        claimed: side of zero that the paper puts it on in multiple choice; 0 for none.
    """

    title: str
    one: tuple[Draw, Draw]
    other: tuple[Draw, Draw]
    claimed: int = 0


_FIT: Final = (
    _Effect("fit, on the general mask", (_GENERAL, _OWN), (_GENERAL, _GENERAL), -1),
    _Effect("fit, on the arithmetic mask", (_OWN, _OWN), (_OWN, _GENERAL), -1),
)
_MASK: Final = (
    _Effect("mask, with the general fit", (_OWN, _GENERAL), (_GENERAL, _GENERAL), 1),
    _Effect("mask, with the arithmetic fit", (_OWN, _OWN), (_GENERAL, _OWN), 1),
)
_LEAD: Final = (_Effect("mask alone − fit alone", (_OWN, _GENERAL), (_GENERAL, _OWN)),)
_CLAIMS: Final = (
    ("fit", _FIT, "In-domain fits lower nine-task accuracy on either mask (OLMoE, constant: -0.98 and -2.80 points)."),
    ("mask", _MASK, "In-domain masks raise nine-task accuracy (OLMoE, constant, general fit: +2.64 points)."),
)


def crossing(evidence: Evidence) -> Section:
    """Effects of the domain of the mask and of the fit, the other held."""
    cells = {
        (model, effect, suite): attempt(partial(_effect, evidence, model.name, effect, suite))
        for model in evidence.models
        for effect in (*_FIT, *_MASK, *_LEAD)
        for suite in SUITES
    }
    grid: Grid = {
        (_RATIO, f"{model}: {effect.title}", suite.name): cell for (model, effect, suite), cell in cells.items()
    }

    def of(effects: tuple[_Effect, ...], suite: Suite) -> list[Cell]:
        return [cell for (_, effect, own), cell in cells.items() if effect in effects and own == suite]

    summaries = tuple(
        Summary(
            f"The domain of the {kind} shows where the other is held, {percent(_RATIO)} pruned",
            claim,
            f"multiple choice: {Tally.of(of(effects, MULTIPLE_CHOICE), 'cases').short}\n"
            f"arithmetic, of which nothing is claimed: {sides(of(effects, ARITHMETIC), 'cases')}",
        )
        for kind, effects, claim in _CLAIMS
    )
    blocks = (
        prose(f"""
            MoNE's mask and the constant's fit, each from either domain (draw A), {percent(_RATIO)} pruned. Each
            effect is arithmetic minus general of the one, the other held. The paper claims something of multiple
            choice only: fit effects below zero, mask effects above (seen, reversed or not detectable). Elsewhere:
            better, worse or not detectable. Last row of a model: arithmetic mask with general fit minus general mask
            with arithmetic fit; better means that the mask alone does more than the fit alone.
        """),
        grid_table(grid, columns_of(SUITES), row="model: effect", unit="cases"),
    )
    return Section("Crossing mask and fit (§6.4, Table 15)", blocks, summaries, contrasts_in(grid))


def _effect(evidence: Evidence, model: str, effect: _Effect, suite: Suite) -> Cell:
    one, other = (pruned(model, _RATIO, CONSTANT, mask=mask, fit=fit) for mask, fit in (effect.one, effect.other))
    evidence.require_one_budget(one, other)
    difference = evidence.contrast(one, other, suite)
    if effect.claimed and suite == MULTIPLE_CHOICE:
        return judged(difference, claimed=effect.claimed)
    return compared(difference, better=suite.better, digits=suite.digits)
