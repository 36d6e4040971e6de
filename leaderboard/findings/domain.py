"""In-domain calibration: what it gives on its own task, and what it costs on multiple choice (§6.4, App. A.8)."""

from __future__ import annotations

from functools import partial
from typing import Final

from leaderboard.findings.evidence import (
    ARITHMETIC,
    CONSTANT,
    DRAWS,
    GENERAL,
    IN_DOMAIN,
    MULTIPLE_CHOICE,
    OPERATORS,
    RATIOS,
    Arm,
    Draw,
    Evidence,
    pruned,
)
from leaderboard.findings.generation import share_kept
from leaderboard.findings.text import (
    Grid,
    Section,
    Summary,
    claims,
    contrasts_in,
    grid_table,
    prose,
    tallies,
)
from leaderboard.findings.verdicts import Cell, attempt, compared, judged, on_every_draw

__all__ = ["in_domain"]

_COLUMNS: Final = {
    "gain": "arithmetic (points)",
    "kept": "dense arithmetic kept, general → in-domain (%)",
    "price": "multiple choice (points)",
}
_CLAIMS: Final = {
    "0.25": "In-domain masks keep essentially all of dense GSM8K (46.3, 37.8 and 73.8 against 45.5, 37.5 and 73.8).",
    "0.5": "OLMoE rerouted at the trained scale keeps 97 % of dense GSM8K (44.28 of 45.49); its constant 21.6, "
    "Moonlight's constant 70.4 of 73.8.",
    "0.75": "Not in the paper.",
}
_PRICE: Final = prose("""
    Depends on the model: DeepSeek-V2-Lite loses multiple choice at 25 % and 50 %; OLMoE and Moonlight lose
    commonsense and gain MMLU at 50 %.
""")


def in_domain(evidence: Evidence) -> Section:
    """In-domain minus general calibration of mask and fit: arithmetic, and its price on multiple choice."""
    grid: Grid = {
        (ratio, f"{model}, {operator}", column): attempt(
            partial(_calibrated, evidence, model.name, ratio, operator, column)
        )
        for ratio in RATIOS
        for model in evidence.models
        for operator in OPERATORS
        for column in _COLUMNS
    }
    draws: Grid = {
        (ratio, str(model), name): attempt(partial(_on_draw, evidence, model.name, ratio, name))
        for ratio in RATIOS
        for model in evidence.models
        for name in (*DRAWS, "every")
    }
    head = {**{name: f"draw {name} (points)" for name in DRAWS}, "every": "on every draw"}
    arms = "model × operator arms"
    gain = {"gain": "arithmetic, model × operator"}
    every = {"every": "constant, one sign on every draw"}
    price = {"price": "multiple choice, model × operator"}
    summaries = (
        Summary(
            "In-domain calibration rescues arithmetic",
            claims(_CLAIMS),
            f"{tallies(grid, gain)}\n{tallies(draws, every)}",
        ),
        Summary("In-domain calibration costs multiple choice", _PRICE, tallies(grid, price)),
    )
    blocks = (
        prose("""
            MoNE calibrated on arithmetic draw A minus MoNE calibrated on general draw A, mask and fit alike, on as
            many tokens. Claimed: above zero on arithmetic, below zero on multiple choice (the price).
        """),
        grid_table(grid, _COLUMNS, row="model, operator", unit=arms),
        prose("""
            The constant on arithmetic, each arithmetic draw minus the general draw of the same letter. Last column:
            seen if above zero on every draw, reversed if below on every draw, else not detectable (the paper's rule
            of one sign on every draw, by point estimates).
        """),
        grid_table(draws, head),
    )
    title = "In-domain calibration (§6.4, App. A.8)"
    return Section(title, blocks, summaries, contrasts_in(grid, draws))


def _arms(model: str, ratio: str, operator: str, name: str = "A") -> tuple[Arm, Arm]:
    own, general = (pruned(model, ratio, operator, mask=Draw(text, name)) for text in (IN_DOMAIN, GENERAL))
    return own, general


def _calibrated(evidence: Evidence, model: str, ratio: str, operator: str, column: str) -> Cell:
    own, general = _arms(model, ratio, operator)
    evidence.require_one_budget(own, general)
    if column == "kept":
        before, after = (share_kept(evidence, arm, ARITHMETIC).interval() for arm in (general, own))
        return Cell(" → ".join(f"{x.value:.1f} [{x.low:.1f}, {x.high:.1f}]" for x in (before, after)))
    suite, claimed = {"gain": (ARITHMETIC, 1), "price": (MULTIPLE_CHOICE, -1)}[column]
    return judged(evidence.contrast(own, general, suite), claimed=claimed)


def _on_draw(evidence: Evidence, model: str, ratio: str, name: str) -> Cell:
    if name == "every":
        gains = [evidence.contrast(*_arms(model, ratio, CONSTANT, draw), ARITHMETIC).value for draw in DRAWS]
        return Cell("", on_every_draw(gains, claimed=1))
    return compared(evidence.contrast(*_arms(model, ratio, CONSTANT, name), ARITHMETIC), better=1)
