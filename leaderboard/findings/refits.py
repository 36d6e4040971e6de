"""Operators fitted anew on other draws, the mask held: which effects keep their sign (§3, §4.1, Table H.10)."""

from __future__ import annotations

from functools import partial
from typing import Final

from leaderboard.findings.evidence import DRAWS, GENERAL, SUITES, Draw, Evidence, Suite, pruned
from leaderboard.findings.operators import COMPEL, CONSTANT, FUNCTIONAL, MORA, SLOT_FILLING, TILT, TRAINED
from leaderboard.findings.settings import HELD
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
    starred,
    titles_of,
)
from leaderboard.findings.verdicts import Cell, Tally, Verdict, attempt, direction, on_every_draw, shown

from prunebench.analysis.bootstrap import Sampled

__all__ = ["refits"]

_REFERENCES: Final = {**dict.fromkeys(SLOT_FILLING, CONSTANT), **dict.fromkeys((MORA, FUNCTIONAL, COMPEL), TRAINED)}
_SURVIVORS: Final = (FUNCTIONAL, COMPEL)  # those of which Table H.10 refits both
_CLAIMS: Final = (
    (
        "The tilt's gain keeps its sign on every draw of the fit",
        (TILT,),
        "So on every model, nine tasks; it moves by at most 0.20 points.",
    ),
    (
        "conmoe-functional and compel against rerouting keep their sign on every draw of the fit",
        _SURVIVORS,
        "OLMoE, draws A and B: compel -3.26 and -3.13, functional -4.01 and -4.24 points.",
    ),
)


def refits(evidence: Evidence) -> Section:
    """Effects on each draw, whether they keep their sign, and how far they move beside their size."""
    effects = {
        (operator, model, suite): attempt(partial(_effect, evidence, model.name, operator, suite))
        for operator in _REFERENCES
        for model in evidence.models
        for suite in SUITES
    }
    grid: Grid = {
        (_titled(operator), str(model), suite.name): cell for (operator, model, suite), cell in effects.items()
    }
    sizes = {
        (operator, suite): [attempt(partial(_smaller, evidence, m.name, operator, suite)) for m in evidence.models]
        for operator in _REFERENCES
        for suite in SUITES
    }

    def of(operators: tuple[str, ...], suite: Suite, *, detectable: bool = False) -> str:
        own = [cell for (operator, _, s), cell in effects.items() if operator in operators and s == suite]
        return Tally.of(cell for cell in own if not detectable or "]*" in cell.text).short

    def line(operators: tuple[str, ...], suite: Suite) -> str:
        return f"{suite.title}: {of(operators, suite)}; of those detectable on draw A: " + of(
            operators, suite, detectable=True
        )

    summaries = tuple(
        Summary(f"{finding}, {percent(HELD)} pruned", claim, "\n".join(line(operators, suite) for suite in SUITES))
        for finding, operators, claim in _CLAIMS
    )
    blocks = (
        prose(f"""
            MoNE's mask of general draw A, {percent(HELD)} pruned, the operator fitted on general draws A / B / C.
            Those that fill slots: minus the constant fitted on the same draw. Those of survivors: minus rerouting at
            the trained scale, which fits nothing. * where the interval of a draw excludes zero; range: largest minus
            smallest effect. seen: one sign on every draw; not seen: the sign changes; not detectable: an effect is
            zero.
        """),
        grid_table(grid, columns_of(SUITES), group="effect"),
        prose("""
            Is the range over draws smaller than the smallest effect on a draw? Counted over the models: seen if
            smaller, not seen if not, by point estimates; not detectable: all effects are zero.
        """),
        Table(
            ("effect", *titles_of(SUITES).values()),
            tuple(
                (_titled(operator), *(Tally.of(sizes[operator, suite]).short for suite in SUITES))
                for operator in _REFERENCES
            ),
        ),
    )
    title = "Operators fitted on other draws (§3, §4.1, Table H.10)"
    return Section(title, blocks, summaries, contrasts_in(grid))


def _titled(operator: str) -> str:
    return f"{operator} − {_REFERENCES[operator]}"


def _effects(evidence: Evidence, model: str, operator: str, suite: Suite) -> list[Sampled]:
    found = []
    for name in DRAWS:
        draw = Draw(GENERAL, name)
        one, other = (pruned(model, HELD, who, fit=draw) for who in (operator, _REFERENCES[operator]))
        found.append(evidence.contrast(one, other, suite))
    return found


def _range(values: list[float]) -> float:
    return max(values) - min(values)


def _effect(evidence: Evidence, model: str, operator: str, suite: Suite) -> Cell:
    effects = _effects(evidence, model, operator, suite)
    values = [effect.value for effect in effects]
    signs = {on_every_draw([value], claimed=1) for value in values}
    verdict = Verdict.OPEN if Verdict.OPEN in signs else Verdict.SEEN if len(signs) == 1 else Verdict.ABSENT
    first = shown(effects[0], suite.digits) + "*" * abs(direction(effects[0]))
    text = " / ".join([first, *(starred(effect, suite) for effect in effects[1:])])
    return Cell(f"{text}, range {_range(values):.{suite.digits}f}", verdict, contrasts=len(effects))


def _smaller(evidence: Evidence, model: str, operator: str, suite: Suite) -> Cell:
    values = [effect.value for effect in _effects(evidence, model, operator, suite)]
    if on_every_draw([max(map(abs, values))], claimed=1) is Verdict.OPEN:
        return Cell("", Verdict.OPEN)
    return Cell("", Verdict.SEEN if _range(values) < min(map(abs, values)) else Verdict.ABSENT)
