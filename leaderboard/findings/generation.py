"""What multiple choice does not show: damage to generation (§6.1), and another order of operators (§6.1, §6.3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Final

from leaderboard.findings.evidence import (
    ARITHMETIC,
    CODE,
    CONSTANT,
    CRITERIA,
    MULTIPLE_CHOICE,
    OPERATORS,
    OTHER,
    PERPLEXITY,
    RATIOS,
    TRAINED,
    Arm,
    Evidence,
    NotMeasurableError,
    Suite,
    dense,
    pruned,
)
from leaderboard.findings.text import Grid, Section, Summary, claims, contrasts_in, grid_table, percent, prose, tallies
from leaderboard.findings.verdicts import Cell, Verdict, attempt, direction, judged

from prunebench.analysis.bootstrap import Sampled

__all__ = ["generative_damage", "operator_ranks", "share_kept"]

_DAMAGE_RATIOS: Final = RATIOS[:2]
_DAMAGE_CLAIMS: Final = {
    "0.25": "The constant keeps 92-97 % of dense multiple choice (79-93 % of the margin above chance), "
    "but 5-65 % of GSM8K and 0-17 % of code (MBPP, HumanEval).",
    "0.5": "The constant keeps at most about 10 % of dense GSM8K; every operator scores zero on HumanEval.",
}
_SHARES: Final = {
    "raw": "multiple choice, kept (%)",
    "above": "above chance, kept (%)",
    "arithmetic": "arithmetic, kept (%)",
    "code": "code, kept (%)",
}
_GAPS: Final = {
    "raw-arithmetic": "multiple choice − arithmetic",
    "raw-code": "multiple choice − code",
    "above-arithmetic": "above chance − arithmetic",
    "above-code": "above chance − code",
}


def share_kept(evidence: Evidence, arm: Arm, suite: Suite, *, above_chance: bool = False) -> Sampled:
    """Percent of the dense score that an arm keeps; of its margin over guessing if `above_chance`.

    Raises:
        NotMeasurableError: if an arm is missing, guessing is unknown, or the dense score leaves nothing to keep.
    """
    score, whole = evidence.both(arm, dense(arm.model), suite)
    floor = score.chance if above_chance else 0.0
    if floor is None:
        raise NotMeasurableError(f"the items of {suite.name} do not say between how many choices they are")
    kept, all_of_it = (Sampled(s.mean.value - floor, s.mean.draws_B - floor, s.mean.n) for s in (score, whole))
    if min(all_of_it.value, float(all_of_it.draws_B.min())) <= 0:
        raise NotMeasurableError(f"on some resample {dense(arm.model)} has nothing to keep on {suite.name}")
    share = kept.over(all_of_it)
    return Sampled(100.0 * share.value, 100.0 * share.draws_B, share.n)


def generative_damage(evidence: Evidence) -> Section:
    """Shares of the dense scores that the constant keeps, and how far those of generation fall behind."""
    grid: Grid = {
        (ratio, str(model), column): attempt(partial(_share, evidence, model.name, ratio, column))
        for ratio in _DAMAGE_RATIOS
        for model in evidence.models
        for column in _SHARES | _GAPS
    }
    summary = Summary("Multiple choice hides generative damage", claims(_DAMAGE_CLAIMS), tallies(grid, _GAPS))
    floors = "; ".join(f"{model.name} {_floor(evidence, model.name)}" for model in evidence.models)
    blocks = (
        prose(f"""
            Share of the dense score that the constant keeps (MoNE's mask, general draw A). Above chance: (arm −
            chance) / (dense − chance), where chance is uniform guessing over the choices of each item ({floors}).
            Generation has no such floor.
        """),
        grid_table(grid, _SHARES),
        prose("""
            Shares subtracted, in points of share. The suites have different items, so each is resampled on its own.
            Claimed: above zero.
        """),
        grid_table(grid, _GAPS),
    )
    return Section("Multiple choice hides generative damage (§6.1, App. A.6)", blocks, (summary,), contrasts_in(grid))


def _share(evidence: Evidence, model: str, ratio: str, column: str) -> Cell:
    arm = pruned(model, ratio, CONSTANT)

    def kept(name: str) -> Sampled:
        suite = {"raw": MULTIPLE_CHOICE, "above": MULTIPLE_CHOICE, "arithmetic": ARITHMETIC, "code": CODE}[name]
        return share_kept(evidence, arm, suite, above_chance=name == "above")

    first, _, second = column.partition("-")
    if second:
        return judged(kept(first).minus(kept(second)), claimed=1, digits=1)
    interval = kept(first).interval()
    return Cell(f"{interval.value:.1f} [{interval.low:.1f}, {interval.high:.1f}]")


def _floor(evidence: Evidence, model: str) -> str:
    try:
        chance = evidence.score(dense(model), MULTIPLE_CHOICE).chance
    except NotMeasurableError as gap:
        return f"not measurable: {gap}"
    return "not known" if chance is None else f"{chance:.2f} %"


@dataclass(frozen=True)
class _Orders:
    """How often two suites order pairs of operators.

    Args:
        opposite: detectably, and oppositely.
        alike: detectably, and alike.
        one: detectably on one of the suites only.
        neither: on neither.
    """

    opposite: int = 0
    alike: int = 0
    one: int = 0
    neither: int = 0

    @classmethod
    def of(cls, signs: Iterable[tuple[int, int]]) -> _Orders:
        """Counted over pairs of signs, one per suite."""
        kinds = [
            "neither" if a == b == 0 else "one" if 0 in (a, b) else "alike" if a == b else "opposite" for a, b in signs
        ]
        return cls(*(kinds.count(kind) for kind in ("opposite", "alike", "one", "neither")))

    def cell(self, *, claimed: str) -> Cell:
        """The counts, with a verdict on the claim that some pair is ordered as `claimed` says."""
        other = {"opposite": self.alike, "alike": self.opposite}[claimed]
        found = {"opposite": self.opposite, "alike": self.alike}[claimed]
        if claimed == "alike" and other:
            verdict = Verdict.REVERSED
        else:
            verdict = Verdict.SEEN if found else Verdict.ABSENT if other else Verdict.OPEN
        counts = (self.opposite, self.alike, self.one, self.neither)
        return Cell(" / ".join(map(str, counts)), verdict, contrasts=2 * sum(counts))


_RANKS: Final = {
    "arithmetic": "arithmetic",
    "code": "code",
    "all-arithmetic": "arithmetic, five masks",
    "all-code": "code, five masks",
}
_AGAINST_PERPLEXITY: Final = {
    "multiple_choice": "multiple choice",
    "arithmetic": "arithmetic",
    "code": "code",
    "moving": "multiple choice, both moved alike",
}
_RANK_CLAIM: Final = prose("""
    On Moonlight at 25 % rerouting gains ten points of GSM8K over the constant and nothing detectable on multiple
    choice; at 50 % generation has collapsed, and ranks nothing.
""")
_MISJUDGED_CLAIM: Final = (
    "DeepSeek-V2-Lite, 50 %: renormalized rerouting improves perplexity (22.74 to 19.70) and lowers accuracy."
)
_ALIKE_CLAIM: Final = "So in all of its runs (keep against renormalized rerouting, tilt against rerouting)."
_BY_NAME: Final[Mapping[str, Suite]] = {suite.name: suite for suite in (MULTIPLE_CHOICE, ARITHMETIC, CODE)}


def operator_ranks(evidence: Evidence) -> Section:
    """Pairs of operators that two suites order detectably and oppositely."""
    models = [(ratio, model) for ratio in RATIOS for model in evidence.models]
    ranks: Grid = {
        (ratio, str(model), column): attempt(partial(_rank, evidence, model.name, ratio, column))
        for ratio, model in models
        for column in _RANKS
    }
    losses: Grid = {
        (ratio, str(model), column): attempt(partial(_against_perplexity, evidence, model.name, ratio, column))
        for ratio, model in models
        for column in _AGAINST_PERPLEXITY
    }
    against = {column: title for column, title in _AGAINST_PERPLEXITY.items() if column != "moving"}
    moving = {"moving": _AGAINST_PERPLEXITY["moving"]}
    summaries = (
        Summary("Generation ranks operators differently from multiple choice", _RANK_CLAIM, tallies(ranks, _RANKS)),
        Summary(
            "Perplexity misjudges whether an operator beats the constant", _MISJUDGED_CLAIM, tallies(losses, against)
        ),
        Summary(
            "Perplexity orders the two reroutes as accuracy does where both moved alike",
            _ALIKE_CLAIM,
            tallies(losses, moving),
        ),
    )
    blocks = (
        prose("""
            The three pairs of constant, reroute@trained and reroute@other on one mask, ordered by a suite if the
            interval of their difference excludes zero. Counts: ordered oppositely / alike / by one suite only / by
            neither, each suite against multiple choice. On MoNE's mask (3 pairs) and on all five (15 pairs). seen: at
            least one pair is ordered oppositely. not seen: none is, though some are ordered alike. not detectable: no
            pair is ordered by both.
        """),
        grid_table(ranks, _RANKS),
        prose("""
            Perplexity against each suite on whether a reroute beats the constant, the same counts over all five masks
            (10 pairs); and, in the last column, on the order of the two reroutes where both are detectably on one
            side of the constant by perplexity and by multiple choice. There seen means: some pair ordered alike, none
            oppositely.
        """),
        grid_table(losses, _AGAINST_PERPLEXITY),
    )
    return Section(
        "Does generation rank operators as multiple choice does? (§6.1, §6.3)",
        blocks,
        summaries,
        contrasts_in(ranks, losses),
    )


def _sign(evidence: Evidence, one: Arm, other: Arm, suite: Suite) -> int:
    """1 if one arm is detectably better than another on a suite, -1 if worse, else 0."""
    return direction(evidence.contrast(one, other, suite)) * suite.better


def _rank(evidence: Evidence, model: str, ratio: str, column: str) -> Cell:
    scope, _, name = column.rpartition("-")
    suites = (MULTIPLE_CHOICE, _BY_NAME[name])
    signs = []
    for criterion in CRITERIA if scope else CRITERIA[:1]:
        arms = [pruned(model, ratio, operator, criterion=criterion) for operator in OPERATORS]
        signs += [_signs(evidence, one, other, suites) for one, other in combinations(arms, 2)]
    return _Orders.of(signs).cell(claimed="opposite")


def _signs(evidence: Evidence, one: Arm, other: Arm, suites: Sequence[Suite]) -> tuple[int, int]:
    first, second = (_sign(evidence, one, other, suite) for suite in suites)
    return first, second


def _against_perplexity(evidence: Evidence, model: str, ratio: str, column: str) -> Cell:
    suites = (PERPLEXITY, _BY_NAME.get(column, MULTIPLE_CHOICE))
    beats, between = [], []
    for criterion in CRITERIA:
        constant, trained, other = (
            pruned(model, ratio, operator, criterion=criterion) for operator in (CONSTANT, TRAINED, OTHER)
        )
        moves = [_signs(evidence, arm, constant, suites) for arm in (trained, other)]
        beats += moves
        if moves[0] == moves[1] and moves[0][0] == moves[0][1] != 0:
            between.append(_signs(evidence, trained, other, suites))
    if column == "moving":
        if not between:
            raise NotMeasurableError(f"on no mask of {model} at {percent(ratio)} did both reroutes move alike")
        return _Orders.of(between).cell(claimed="alike")
    return _Orders.of(beats).cell(claimed="opposite")
