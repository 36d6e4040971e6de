"""The order of constant and reroute, whether the gate scale turns it, whether the mask changes the best (§4.2, §5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Final

from leaderboard.findings.evidence import (
    CONSTANT,
    CRITERIA,
    OPERATORS,
    OTHER,
    SUITES,
    TRAINED,
    Evidence,
    NotMeasurableError,
    Suite,
    pruned,
)
from leaderboard.findings.text import (
    Grid,
    Section,
    Summary,
    Table,
    claims,
    columns_of,
    contrasts_in,
    grid_table,
    percent,
    prose,
    suite_grid,
    tallies,
    titles_of,
)
from leaderboard.findings.verdicts import Cell, Tally, Verdict, attempt, direction, judged

__all__ = ["operator_order"]

_TIE: Final = 1e-9  # points: scores this near are one score
_CROSSED: Final = "0.5"  # the ratio at which the paper crosses masks and operators
_PAPERS: Final = CRITERIA[:4]  # the masks that it crosses; random is ours

_TRAINED_CLAIMS: Final = {
    "0.25": "OLMoE +1.46; not detectable on DeepSeek-V2-Lite (+0.26) and Moonlight (+0.05).",
    "0.5": "OLMoE +2.38 and DeepSeek-V2-Lite +1.35; not detectable on Moonlight (-0.18); Granite 46.74 against 45.27.",
    "0.75": "OLMoE +1.90, DeepSeek-V2-Lite +4.21, Moonlight +1.59.",
}
_OTHER_CLAIM: Final = prose("""
    At 50 % below the constant on all four routers (points: OLMoE -1.01, DeepSeek-V2-Lite -3.32, Granite -0.62,
    Moonlight -1.86); on OLMoE and DeepSeek-V2-Lite at every ratio.
""")
_FLIP_CLAIM: Final = (
    "On the two routers trained without renormalization, the scale reverses whether rerouting beats the constant."
)
_BEST_CLAIM: Final = prose("""
    On OLMoE and DeepSeek-V2-Lite, the best of constant, tilt and trained-scale rerouting is the same on all four masks.
""")


def operator_order(evidence: Evidence) -> Section:
    """Both reroutes against the constant at every ratio, and the best of the three on every mask at one."""
    columns = columns_of(SUITES)
    trained = _against_constant(evidence, TRAINED, 1)
    other = _against_constant(evidence, OTHER, -1)
    flips = suite_grid(evidence, partial(_flip, evidence))
    plain = titles_of(SUITES)
    best = {(model.name, suite): _Best.of(evidence, model.name, suite) for model in evidence.models for suite in SUITES}
    summaries = (
        Summary("Rerouting at the trained scale beats the constant", claims(_TRAINED_CLAIMS), tallies(trained, plain)),
        Summary("Rerouting at the other scale falls below the constant", _OTHER_CLAIM, tallies(other, plain)),
        Summary("The gate scale turns the verdict on rerouting", _FLIP_CLAIM, tallies(flips, plain)),
        Summary(
            f"The best of constant and both reroutes does not depend on the mask, {percent(_CROSSED)} pruned",
            _BEST_CLAIM,
            "\n".join(
                f"{suite.title}: {Tally.of(best[model.name, suite].cell for model in evidence.models).short}"
                for suite in SUITES
            ),
        ),
    )
    blocks = (
        prose("""
            MoNE's mask of general draw A; the constant is fitted on the same draw. Rerouting at the trained scale
            minus the constant. Claimed: above zero; for perplexity below zero.
        """),
        grid_table(trained, columns),
        "Rerouting at the other scale minus the constant. Claimed: below zero; for perplexity above zero.",
        grid_table(other, columns),
        prose("""
            Does the verdict on rerouting turn with the scale? seen: above the constant at the trained scale and below
            it at the other, both detectably. reversed: the other way round. not seen: both detectable on one side.
            Not detectable: at least one of the two intervals contains zero.
        """),
        grid_table(flips, plain),
        prose(f"""
            The best of the three on each mask, {percent(_CROSSED)} pruned (general draw A), by point estimate; *
            where its lead over the second is detectable. seen: one operator is best, or ties for best, on all of the
            paper's four masks. reversed: two masks have different operators with a detectable lead. not detectable:
            the best differs, but no two detectable leads do. The random mask is shown and not counted.
        """),
        _best_table(evidence, best),
    )
    contrasts = contrasts_in(trained, other) + sum(one.cell.contrasts for one in best.values())
    return Section("Constant against reroute (§4.2, §5.1, §5.3)", blocks, summaries, contrasts)


def _against_constant(evidence: Evidence, operator: str, claimed: int) -> Grid:
    """An operator minus the constant, claimed to be better (1) or worse (-1)."""

    def cell(model: str, ratio: str, suite: Suite) -> Cell:
        difference = evidence.contrast(pruned(model, ratio, operator), pruned(model, ratio, CONSTANT), suite)
        return judged(difference, claimed=claimed * suite.better, digits=suite.digits)

    return suite_grid(evidence, cell)


def _flip(evidence: Evidence, model: str, ratio: str, suite: Suite) -> Cell:
    """Whether each scale is better or worse than the constant, and whether they differ."""
    constant = pruned(model, ratio, CONSTANT)
    sides = [
        direction(evidence.contrast(pruned(model, ratio, operator), constant, suite)) * suite.better
        for operator in (TRAINED, OTHER)
    ]
    words = " / ".join({1: "better", -1: "worse", 0: "?"}[side] for side in sides)
    if 0 in sides:
        verdict = Verdict.OPEN
    elif sides[0] == sides[1]:
        verdict = Verdict.ABSENT
    else:
        verdict = Verdict.SEEN if sides[0] > 0 else Verdict.REVERSED
    return Cell(words, verdict)


@dataclass(frozen=True)
class _Leader:
    """The best operators of one mask (several if they tie), and whether the lead over the rest is detectable."""

    operators: frozenset[str]
    leads: bool

    def __str__(self) -> str:
        names = [operator for operator in OPERATORS if operator in self.operators]
        return " = ".join(names) + "*" * self.leads


@dataclass(frozen=True)
class _Best:
    """Per mask its leader, or why there is none; and what that says of the claim."""

    leaders: Mapping[str, _Leader | str]
    cell: Cell

    @classmethod
    def of(cls, evidence: Evidence, model: str, suite: Suite) -> _Best:
        leaders: dict[str, _Leader | str] = {}
        for criterion in CRITERIA:
            try:
                leaders[criterion] = _leader(evidence, model, criterion, suite)
            except NotMeasurableError as gap:
                leaders[criterion] = f"not measurable: {gap}"
        return cls(leaders, attempt(lambda: _same_best(leaders)))


def _leader(evidence: Evidence, model: str, criterion: str, suite: Suite) -> _Leader:
    arms = {operator: pruned(model, _CROSSED, operator, criterion=criterion) for operator in OPERATORS}
    values = {operator: suite.better * evidence.score(arm, suite).mean.value for operator, arm in arms.items()}
    first, second, _ = sorted(OPERATORS, key=lambda operator: -values[operator])
    best = frozenset(operator for operator in OPERATORS if values[first] - values[operator] < _TIE)
    lead = evidence.contrast(arms[first], arms[second], suite)
    return _Leader(best, direction(lead) * suite.better > 0)


def _same_best(leaders: Mapping[str, _Leader | str]) -> Cell:
    found = []
    for criterion in _PAPERS:
        leader = leaders[criterion]
        if isinstance(leader, str):
            raise NotMeasurableError(leader.removeprefix("not measurable: "))
        found.append(leader)
    leading = [leader.operators for leader in found if leader.leads]
    text = f"{len(leading)} of {len(found)} leads detectable"
    if frozenset.intersection(*(leader.operators for leader in found)):
        return Cell(text, Verdict.SEEN, contrasts=len(found))
    differ = any(one != other for one, other in combinations(leading, 2))
    return Cell(text, Verdict.REVERSED if differ else Verdict.OPEN, contrasts=len(found))


def _best_table(evidence: Evidence, best: Mapping[tuple[str, Suite], _Best]) -> Table:
    rows = [
        (
            str(model),
            suite.title,
            *map(str, best[model.name, suite].leaders.values()),
            str(best[model.name, suite].cell),
        )
        for suite in SUITES
        for model in evidence.models
    ]
    return Table(("model", "suite", *CRITERIA, "same on the paper's four"), tuple(rows))
