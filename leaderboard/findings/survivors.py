"""Handing a pruned expert's work to survivors: remapped slots, proxies, compensated weights (§5.2, App. D.3, H.6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

import numpy as np
from leaderboard.findings.evidence import RATIOS, SUITES, Evidence, Model, NotMeasurableError, Suite
from leaderboard.findings.operators import (
    COMPEL,
    COMPEL_OTHER,
    CONSTANT,
    FUNCTIONAL,
    MORA,
    NEAREST,
    OTHER,
    SURVIVORS,
    TRAINED,
)
from leaderboard.findings.settings import HELD, MASKS, Setting, settings_of
from leaderboard.findings.text import (
    Grid,
    Section,
    Summary,
    Table,
    columns_of,
    contrasts_in,
    grid_table,
    percent,
    prose,
    summed_up,
    titles_of,
)
from leaderboard.findings.verdicts import Cell, Tally, Verdict, attempt, compared, judged

__all__ = ["survivors"]

_OUTCOMES: Final = ("functional", "nearest already best", "folds disagree", "empty fold")
_QUANTILES: Final = (0, 50, 90, 100)
_FEW: Final = 0.05  # proxies that are almost none; one of 32 pruned experts is 0.03
_PAIRS: Final = {operator: OTHER if operator == COMPEL_OTHER else TRAINED for operator in SURVIVORS}
_CLAIMED_BELOW_CONSTANT: Final = (NEAREST, FUNCTIONAL)
_REROUTE_CLAIMS: Final = {
    MORA: "Channel-wise proxies change accuracy by at most +0.19 points, not detectably.",
    NEAREST: "50 %: below on every model: OLMoE -6.05, DeepSeek-V2-Lite -3.04, Moonlight -1.15, Granite -3.51.",
    FUNCTIONAL: "50 %: below on OLMoE (-4.01), DeepSeek-V2-Lite (-3.84) and Moonlight (-1.86).",
    COMPEL: "50 %: OLMoE -3.26; not detectable on DeepSeek-V2-Lite (+0.39) and Moonlight (-0.61).",
    COMPEL_OTHER: "50 %, both at the other scale: OLMoE -1.86; not detectable on DeepSeek-V2-Lite (+0.07).",
}
_REMAPS: Final = {
    "slots": "slots",
    NEAREST: "nearest: survivors / most on one",
    FUNCTIONAL: "functional: survivors / most on one",
    "changed": "changed",
    "outcomes": "functional / nearest best / disagree / empty",
    "verdict": "fewer survivors",
}
_PROXIES: Final = {
    "accepted": "accepted",
    "verdict": "claim",
    "quantiles": "R²: lowest, median, 90 %, highest",
    "untested": "without tokens",
}


def survivors(evidence: Evidence) -> Section:
    """Survivor operators against rerouting and the constant, and what they did."""
    held: Grid = {
        (f"{one} − {other}", str(model), suite.name): attempt(
            partial(_difference, evidence, (one, other), Setting(model), suite)
        )
        for one, other in (*_PAIRS.items(), (FUNCTIONAL, NEAREST))
        for model in evidence.models
        for suite in SUITES
    }
    pairs = [*_PAIRS.items(), *((operator, CONSTANT) for operator in SURVIVORS)]
    counted = {
        (ratio, one, other, suite): [
            attempt(partial(_difference, evidence, (one, other), setting, suite))
            for criterion in MASKS
            for setting in settings_of(evidence, ratio, criterion)
        ]
        for ratio in RATIOS
        for one, other in pairs
        for suite in SUITES
    }
    remaps = _grid(evidence, _REMAPS, partial(_remap, evidence))
    proxies = _grid(evidence, _PROXIES, partial(_proxy, evidence))

    def tallied(operator: str) -> str:
        lines = []
        for suite in SUITES:
            parts = (
                f"{percent(ratio)} {summed_up(counted[ratio, operator, _PAIRS[operator], suite], 'cases')}"
                for ratio in RATIOS
            )
            lines.append(f"{suite.title}: {', '.join(parts)}")
        return "\n".join(lines)

    summaries = (
        *(
            Summary(f"{operator} falls below {_PAIRS[operator]} (both masks)", claim, tallied(operator))
            for operator, claim in _REROUTE_CLAIMS.items()
        ),
        Summary(
            "Almost no survivor predicts a pruned expert's output",
            "At most 3 of 832 pruned experts have a proxy above MoRA's threshold (DeepSeek-V2-Lite, Moonlight).",
            _by_ratio(proxies),
        ),
        Summary(
            "The functional choice puts the slots on fewer survivors than the nearest",
            "50 %: OLMoE 170 survivors instead of 200; about half of the slots change.",
            _by_ratio(remaps),
        ),
    )
    blocks = (
        prose(f"""
            MoNE's mask of general draw A, {percent(HELD)} pruned, fits from the same draw: each operator minus
            rerouting at the scale at which it refills slots itself (remapping refills none, and is held against the
            trained scale). Claimed: below zero; for perplexity above zero. Of functional minus nearest nothing is
            claimed.
        """),
        grid_table(held, columns_of(SUITES), group="pair"),
        prose("""
            The same at every ratio on MoNE's and REAP's masks, counted over models and masks; then against the
            constant, where below zero is claimed of the two remappings only.
        """),
        Table(
            ("pruned", "pair", *titles_of(SUITES).values()),
            tuple(
                (
                    percent(ratio),
                    f"{one} − {other}",
                    *(summed_up(counted[ratio, one, other, suite], "cases") for suite in SUITES),
                )
                for one, other in pairs
                for ratio in RATIOS
            ),
        ),
        prose("""
            Whom the slots of pruned experts went to, MoNE's mask / REAP's mask. Changed: slots for which the functional
            choice is not the nearest. Then how the functional rule decided. Counts of experts: no interval. seen: the
            functional choice uses fewer survivors on both masks; reversed: more on both; not detectable: otherwise.
        """),
        grid_table(remaps, _REMAPS),
        prose("""
            MoRA's proxies, MoNE's mask / REAP's mask: pruned experts with a survivor whose held-out R² exceeds the
            threshold, of all pruned; R² of the best survivor of each expert that has tokens. seen: on both masks fewer
            than one in twenty are accepted; else not seen.
        """),
        grid_table(proxies, _PROXIES),
    )
    contrasts = contrasts_in(held) + sum(cell.contrasts for cells in counted.values() for cell in cells)
    title = "Handing the work to survivors (§5.2, App. D.3, H.6)"
    return Section(title, blocks, summaries, contrasts)


def _grid(evidence: Evidence, columns: Mapping[str, str], cell: Callable[[Model, str, str], Cell]) -> Grid:
    return {
        (ratio, str(model), column): attempt(partial(cell, model, ratio, column))
        for ratio in RATIOS
        for model in evidence.models
        for column in columns
    }


def _by_ratio(grid: Grid) -> str:
    def judging(ratio: str) -> Iterator[Cell]:
        return (cell for key, cell in grid.items() if (key[0], key[2]) == (ratio, "verdict"))

    return ", ".join(f"{percent(ratio)} {Tally.of(judging(ratio)).short}" for ratio in RATIOS)


def _difference(evidence: Evidence, pair: tuple[str, str], setting: Setting, suite: Suite) -> Cell:
    one, other = pair
    difference = evidence.contrast(setting.arm(one), setting.arm(other), suite)
    if _PAIRS[one] == other or (other == CONSTANT and one in _CLAIMED_BELOW_CONSTANT):
        return judged(difference, claimed=-suite.better, digits=suite.digits)
    return compared(difference, better=suite.better, digits=suite.digits)


def _remap(evidence: Evidence, model: Model, ratio: str, column: str) -> Cell:
    texts: list[str] = []
    moves: set[int] = set()
    for criterion in MASKS:
        nearest, functional = (
            evidence.part(Setting(model, ratio, criterion).arm(operator), "remap") for operator in (NEAREST, FUNCTIONAL)
        )
        if any(
            targets.keys() != functional["layers"].get(layer, {}).keys() for layer, targets in nearest["layers"].items()
        ):
            raise NotMeasurableError(f"{NEAREST} and {FUNCTIONAL} of {model.name} answer for other experts")
        moves.add(int(np.sign(functional["targets"] - nearest["targets"])))
        pairs = [
            (target, functional["layers"][layer][expert])
            for layer, targets in nearest["layers"].items()
            for expert, target in targets.items()
        ]
        texts.append(
            {
                "slots": f"{nearest['slots']}",
                NEAREST: f"{nearest['targets']}, {nearest['most']}",
                FUNCTIONAL: f"{functional['targets']}, {functional['most']}",
                "changed": f"{sum(one != other for one, other in pairs)}",
                "outcomes": " · ".join(f"{functional['outcomes'].get(kind, 0)}" for kind in _OUTCOMES),
                "verdict": "",
            }[column]
        )
    if column == "verdict":
        return Cell("", {-1: Verdict.SEEN, 1: Verdict.REVERSED}.get(sum(moves) if len(moves) == 1 else 0, Verdict.OPEN))
    return Cell(" / ".join(texts))


def _proxy(evidence: Evidence, model: Model, ratio: str, column: str) -> Cell:
    texts, shares = [], []
    for criterion in MASKS:
        layers = evidence.part(Setting(model, ratio, criterion).arm(MORA), "fit")["layers"].values()
        tested = [
            value
            for layer in layers
            for value in layer.get("held_out_share", [None] * len(layer["experts"]))
            if value is not None
        ]
        experts = sum(len(layer["experts"]) for layer in layers)
        accepted = sum(outcome == "proxy" for layer in layers for outcome in layer.get("outcome", ()))
        shares.append(accepted / experts)
        quantiles = ", ".join(f"{value:.2f}" for value in np.percentile(tested, _QUANTILES)) if tested else "none"
        texts.append(
            {
                "accepted": f"{accepted} of {experts}",
                "quantiles": quantiles,
                "untested": f"{experts - len(tested)}",
                "verdict": "",
            }[column]
        )
    if column == "verdict":
        return Cell("", Verdict.SEEN if max(shares) < _FEW else Verdict.ABSENT)
    return Cell(" / ".join(texts))
