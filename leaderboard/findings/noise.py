"""Calibration noise: the constant fitted anew on a held mask (§3, App. A.4), and the whole method on other draws."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from leaderboard.findings.evidence import (
    CONSTANT,
    DRAWS,
    GENERAL,
    IN_DOMAIN,
    OTHER,
    RATIOS,
    SUITES,
    TRAINED,
    Arm,
    Draw,
    Evidence,
    NotMeasurableError,
    Suite,
    pruned,
)
from leaderboard.findings.text import (
    Grid,
    Section,
    Summary,
    columns_of,
    contrasts_in,
    grid_table,
    percent,
    prose,
    suite_grid,
)
from leaderboard.findings.verdicts import Cell, Tally, Verdict, attempt, direction, on_every_draw, shown

__all__ = ["calibration_noise"]

_HELD: Final = "0.5"  # the ratio at which the constant is fitted anew
_TEXTS: Final = (GENERAL, IN_DOMAIN)


def calibration_noise(evidence: Evidence) -> Section:
    """Spreads over draws, and whether reroute against constant keeps its sign on every draw of the fit."""
    refits = suite_grid(evidence, partial(_refitted, evidence), ratios=[_HELD])
    signs: Grid = {
        (_HELD, f"{model}, {operator}", suite.name): attempt(partial(_signs, evidence, model.name, operator, suite))
        for model in evidence.models
        for operator in (TRAINED, OTHER)
        for suite in SUITES
    }
    whole: Grid = {
        (ratio, f"{model}, {text.removeprefix('world:')}", suite.name): attempt(
            partial(_whole, evidence, model.name, ratio, text, suite)
        )
        for ratio in RATIOS
        for model in evidence.models
        for text in _TEXTS
        for suite in SUITES
    }
    larger = suite_grid(evidence, partial(_larger, evidence), ratios=[_HELD])
    columns, scores = columns_of(SUITES), columns_of(SUITES, "%")
    summaries = (
        Summary(
            f"Reroute against constant keeps its sign on every draw of the fit, {percent(_HELD)} pruned",
            "An effect is called established only if it has one sign on every draw; the tilt's gains have.",
            "\n".join(f"{suite.title}: {_kept(signs, suite)}" for suite in SUITES),
        ),
        Summary(
            f"Drawing mask and fit anew moves scores more than fitting anew alone, {percent(_HELD)} pruned",
            prose("""
                The paper holds the mask, and says that its spread (at most 0.20 points of the tilt's gain at 50 %) is
                not that of the whole pipeline.
            """),
            "\n".join(
                f"{suite.title}: {Tally.of(cell for key, cell in larger.items() if key[2] == suite.name).short}"
                for suite in SUITES
            ),
        ),
    )
    blocks = (
        prose(f"""
            MoNE's mask of general draw A, {percent(_HELD)} pruned, the constant fitted on general draws A / B / C:
            scores and their spread (largest minus smallest). In parentheses: of the differences B − A and C − A, how
            many are detectable on the test items.
        """),
        grid_table(refits, scores),
        prose("""
            Rerouting minus the constant of each fit, A / B / C; rerouting fits nothing and is one run. seen: one sign
            on every draw; not seen: the sign changes; not detectable: a difference is zero. * where the interval of
            draw A excludes zero.
        """),
        grid_table(signs, columns, row="model, operator", unit="arms"),
        "The whole method on other draws: mask and constant from draws A / B / C of one text, scores and spread.",
        grid_table(whole, scores, row="model, text"),
        prose(f"""
            Spread of the whole method minus spread of the fit alone (general draws, {percent(_HELD)} pruned). Spreads
            of three draws have no interval here: seen means larger, reversed smaller, by point estimates.
        """),
        grid_table(larger, columns),
        f"Whether the order of rerouting and the constant outlasts a new mask: {_outlasting(evidence)}.",
    )
    title = "Calibration noise (§3, §4.1, App. A.4)"
    return Section(title, blocks, summaries, contrasts_in(refits, signs))


def _outlasting(evidence: Evidence) -> str:
    """The first rerouting arm on another draw's mask that is not there; this page asks for no more of them."""
    arms = [
        pruned(model.name, _HELD, operator, mask=Draw(GENERAL, name))
        for model in evidence.models
        for name in DRAWS[1:]
        for operator in (TRAINED, OTHER)
    ]
    try:
        for arm in arms:
            evidence.find(arm)
    except NotMeasurableError as gap:
        return f"not measurable: {gap}"
    return "there are runs for it, which this page does not read"


def _refit(model: str, name: str) -> Arm:
    return pruned(model, _HELD, CONSTANT, fit=Draw(GENERAL, name))


def _redrawn(model: str, ratio: str, text: str, name: str) -> Arm:
    return pruned(model, ratio, CONSTANT, mask=Draw(text, name))


def _values(evidence: Evidence, arms: Sequence[Arm], suite: Suite) -> list[float]:
    """Scores on the same items."""
    return [evidence.both(arm, arms[0], suite)[0].mean.value for arm in arms]


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _listed(values: Sequence[float], suite: Suite) -> str:
    scores = " / ".join(f"{value:.{suite.digits}f}" for value in values)
    return f"{scores}, spread {_spread(values):.{suite.digits}f}"


def _refitted(evidence: Evidence, model: str, _ratio: str, suite: Suite) -> Cell:
    arms = [_refit(model, name) for name in DRAWS]
    differences = [evidence.contrast(arm, arms[0], suite) for arm in arms[1:]]
    detectable = sum(map(abs, map(direction, differences)))
    text = f"{_listed(_values(evidence, arms, suite), suite)} ({detectable} of {len(differences)})"
    return Cell(text, contrasts=len(differences))


def _signs(evidence: Evidence, model: str, operator: str, suite: Suite) -> Cell:
    reroute = pruned(model, _HELD, operator)
    differences = [evidence.contrast(reroute, _refit(model, name), suite) for name in DRAWS]
    values = [difference.value for difference in differences]
    signs = {on_every_draw([value], claimed=1) for value in values}
    verdict = Verdict.OPEN if Verdict.OPEN in signs else Verdict.SEEN if len(signs) == 1 else Verdict.ABSENT
    star = "*" * abs(direction(differences[0]))
    rest = " / ".join(f"{value:+z.{suite.digits}f}" for value in values[1:])
    return Cell(f"{shown(differences[0], suite.digits)}{star} / {rest}", verdict, contrasts=1)


def _kept(signs: Grid, suite: Suite) -> str:
    """All arms; then those whose difference is detectable on draw A."""
    own = [cell for key, cell in signs.items() if key[2] == suite.name]
    detectable = [cell for cell in own if "*" in cell.text]
    among = f"; of those detectable on draw A: {Tally.of(detectable).short}" if detectable else ""
    return f"{Tally.of(own).short}{among}"


def _whole(evidence: Evidence, model: str, ratio: str, text: str, suite: Suite) -> Cell:
    arms = [_redrawn(model, ratio, text, name) for name in DRAWS]
    evidence.require_one_budget(*arms)
    return Cell(_listed(_values(evidence, arms, suite), suite))


def _larger(evidence: Evidence, model: str, ratio: str, suite: Suite) -> Cell:
    whole, alone = (
        _spread(_values(evidence, arms, suite))
        for arms in ([_redrawn(model, ratio, GENERAL, name) for name in DRAWS], [_refit(model, name) for name in DRAWS])
    )
    return Cell(f"{whole - alone:+z.{suite.digits}f}", on_every_draw([whole - alone], claimed=1))
