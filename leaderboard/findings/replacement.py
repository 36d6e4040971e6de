"""What answers for a pruned expert: every operator on one mask, and which is best (§4.1, §4.2, Figures 3 and 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from leaderboard.findings.evidence import (
    MULTIPLE_CHOICE,
    RATIOS,
    SUITES,
    Evidence,
    Model,
    NotMeasurableError,
    Suite,
    dense,
    pruned,
)
from leaderboard.findings.operators import ANSWERING, CONSTANT, SLOT_FILLING, SURVIVORS, TILT, TRAINED
from leaderboard.findings.ranks import rank_correlation
from leaderboard.findings.settings import HELD, MASKS, Setting, every_setting, settings_of
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
    starred,
    suite_grid,
    tallies,
    titles_of,
)
from leaderboard.findings.verdicts import Cell, Tally, Verdict, attempt, direction, judged

__all__ = ["replacement"]

_OTHERS: Final = (*SLOT_FILLING, *SURVIVORS)  # beside the constant and rerouting
_THREE: Final = (CONSTANT, TILT, TRAINED)  # those that the paper crosses with masks
_TIE: Final = 1e-9  # points: scores this near are one score
_MANY: Final = 3  # operators of one score are named up to here, else counted
_LARGE, _SMALL = 10.0, 3.0  # points of damage between which the paper's gains are significant or not

_TILT_CLAIMS: Final = {
    "0.25": "OLMoE +1.83 and Granite +1.29; not detectable on DeepSeek-V2-Lite and Moonlight.",
    "0.5": "OLMoE +3.45, Moonlight +1.37, Granite +3.36; not detectable on DeepSeek-V2-Lite (+0.48).",
    "0.75": "On all: OLMoE +2.80, DeepSeek-V2-Lite +1.23, Moonlight +3.27, Granite +1.58.",
}
_DAMAGE_CLAIM: Final = prose("""
    Where the constant loses more than 10 points every gain is significant; below 3 points none is. Rank correlation of
    damage and gain 0.73 over nine settings.
""")
_BEST_CLAIM: Final = prose("""
    Rerouting at the trained scale is best on DeepSeek-V2-Lite, the tilt on Moonlight and, at 50 %, on OLMoE (with the
    neuron copy not detectably different).
""")
_MASK_CLAIM: Final = (
    "The same on all four masks: the tilt on OLMoE, rerouting on DeepSeek-V2-Lite. Here two of the masks have a tilt."
)
_DAMAGE: Final = {
    "large": f"above {_LARGE:g} points",
    "middle": f"{_SMALL:g} to {_LARGE:g}",
    "small": f"below {_SMALL:g}",
    "rank": "rank correlation of damage and gain",
    "verdict": "claim",
}


@dataclass(frozen=True)
class _Best:
    """The operators of a setting that score best, and those that are detectably below them."""

    best: tuple[str, ...]
    below: frozenset[str]
    near: int

    @property
    def leads(self) -> bool:
        """Whether all others, of which there are some, are detectably below."""
        return not self.near and bool(self.below)

    def __str__(self) -> str:
        names = " = ".join(self.best) if len(self.best) <= _MANY else f"{len(self.best)} with one score"
        return f"{names} (+{self.near})" if self.near else names + "*" * self.leads


def replacement(evidence: Evidence) -> Section:
    """The tilt against the constant, every operator against both references, and the best of all."""
    columns, plain = columns_of(SUITES), titles_of(SUITES)
    gains = {criterion: _tilt_gains(evidence, criterion) for criterion in MASKS}
    damage: Grid = {
        ("", MASKS[criterion], column): attempt(partial(_damage, evidence, criterion, column))
        for criterion in MASKS
        for column in _DAMAGE
    }
    settings = every_setting(evidence)
    moves = {
        (setting, operator, suite): attempt(partial(_move, evidence, setting, operator, suite))
        for suite in SUITES
        for setting in settings
        for operator in _OTHERS
    }
    best = {(setting, suite): _best(evidence, setting, suite) for setting in settings for suite in SUITES}
    same: Grid = {
        (HELD, str(model), suite.name): attempt(partial(_same, evidence, model, suite))
        for model in evidence.models
        for suite in SUITES
    }
    everywhere = {suite: _everywhere([best[setting, suite] for setting in settings]) for suite in SUITES}
    summaries = (
        Summary(f"{TILT} beats the constant (MoNE's mask)", claims(_TILT_CLAIMS), tallies(gains["mone"], plain)),
        Summary(
            f"{TILT} beats the constant (REAP's mask)",
            "50 %: OLMoE +3.89; not detectable on DeepSeek-V2-Lite (+0.03).",
            tallies(gains["reap"], plain),
        ),
        Summary(
            "The tilt's gain follows the damage that the constant leaves, multiple choice",
            _DAMAGE_CLAIM,
            Tally.of(damage.values()).short.replace(")", " masks)"),
        ),
        Summary(
            "No operator is best everywhere",
            _BEST_CLAIM,
            "\n".join(f"{suite.title}: {everywhere[suite]}" for suite in SUITES),
        ),
        Summary(
            f"The best of constant, tilt and trained-scale rerouting does not depend on the mask, "
            f"{percent(HELD)} pruned",
            _MASK_CLAIM,
            "\n".join(
                f"{suite.title}: {Tally.of(cell for key, cell in same.items() if key[2] == suite.name).short}"
                for suite in SUITES
            ),
        ),
    )
    blocks = (
        prose(f"""
            General draw A chooses the mask and fits the operator. {TILT} minus the constant on MoNE's mask. Claimed:
            above zero; for perplexity below zero.
        """),
        grid_table(gains["mone"], columns),
        prose(f"""
            Where does it gain? Of the models and ratios whose damage (dense minus constant, multiple choice) is in
            each range: in how many the interval of the gain is above zero. Claimed: in all above {_LARGE:g} points, in
            none below {_SMALL:g}; not seen: otherwise.
        """),
        Table(
            ("mask", *_DAMAGE.values()),
            tuple(
                (row, *(str(damage["", row, column]) for column in _DAMAGE))
                for row in dict.fromkeys(key[1] for key in damage)
            ),
        ),
        prose("""
            Every operator minus the constant / minus rerouting at the trained scale on the same mask. * where the
            interval excludes zero. compel@other reroutes at the other scale.
        """),
        *(block for suite in SUITES for block in _moves_blocks(settings, moves, suite)),
        prose(f"""
            The best of all {len(ANSWERING)} operators by point estimate. * if all others are detectably below it; else,
            in parentheses, how many others are not. The best was picked on the same items, so it looks better than it
            is.
        """),
        _best_table(settings, best),
        prose("""
            Of the settings of that table: in how many an operator is best or ties for best, and in how many it is
            detectably below the best. No operator is best everywhere: seen if each one is detectably below the best in
            some setting; reversed if one is best or ties for best in all; else not detectable.
        """),
        _everywhere_table(settings, best, everywhere),
        prose(f"""
            The best of constant, tilt and trained-scale rerouting on MoNE's / REAP's mask, {percent(HELD)} pruned;
            * where all others are detectably below. seen: one is best, or ties for best, on both. reversed: the
            best differ, both with *. not detectable: the best differ otherwise.
        """),
        grid_table(same, plain),
    )
    leads = sum(len(ANSWERING) - 1 for one in best.values() if isinstance(one, _Best))
    contrasts = contrasts_in(*gains.values(), damage, same) + sum(cell.contrasts for cell in moves.values()) + leads
    return Section("What answers for a pruned expert (§4.1, §4.2)", blocks, summaries, contrasts)


def _tilt_gains(evidence: Evidence, criterion: str) -> Grid:
    def cell(model: str, ratio: str, suite: Suite) -> Cell:
        tilt, constant = (pruned(model, ratio, operator, criterion=criterion) for operator in (TILT, CONSTANT))
        return judged(evidence.contrast(tilt, constant, suite), claimed=suite.better, digits=suite.digits)

    return suite_grid(evidence, cell)


def _damage(evidence: Evidence, criterion: str, column: str) -> Cell:
    found = []
    for setting in (own for ratio in RATIOS for own in settings_of(evidence, ratio, criterion)):
        tilt, constant = setting.arm(TILT), setting.arm(CONSTANT)
        left = evidence.contrast(dense(setting.model.name), constant, MULTIPLE_CHOICE).value
        found.append((left, evidence.contrast(tilt, constant, MULTIPLE_CHOICE)))
    gained = {
        "large": [direction(gain) > 0 for left, gain in found if left > _LARGE],
        "middle": [direction(gain) > 0 for left, gain in found if _SMALL <= left <= _LARGE],
        "small": [direction(gain) > 0 for left, gain in found if left < _SMALL],
    }
    if column == "rank":
        return Cell(f"{rank_correlation([x for x, _ in found], [x.value for _, x in found]):+.2f}, n = {len(found)}")
    if column != "verdict":
        return Cell(f"{sum(gained[column])} of {len(gained[column])}")
    if not (gained["large"] and gained["small"]):
        raise NotMeasurableError(f"no model has damage above {_LARGE:g} points, or none below {_SMALL:g}")
    holds = all(gained["large"]) and not any(gained["small"])
    return Cell("", Verdict.SEEN if holds else Verdict.ABSENT)


def _move(evidence: Evidence, setting: Setting, operator: str, suite: Suite) -> Cell:
    moves = [
        evidence.contrast(setting.arm(operator), setting.arm(reference), suite) for reference in (CONSTANT, TRAINED)
    ]
    return Cell(" / ".join(starred(move, suite) for move in moves), contrasts=len(moves))


def _moves_blocks(
    settings: Sequence[Setting], moves: Mapping[tuple[Setting, str, Suite], Cell], suite: Suite
) -> tuple[str, Table]:
    title = suite.title if suite.better < 0 else f"{suite.title} (points)"
    rows = tuple((*_told(setting), *(str(moves[setting, name, suite]) for name in _OTHERS)) for setting in settings)
    return f"{title[0].upper()}{title[1:]}:", Table(("mask", "pruned", "model", *_OTHERS), rows)


def _told(setting: Setting) -> tuple[str, str, str]:
    return setting.criterion, percent(setting.ratio), str(setting.model)


def _ranked(evidence: Evidence, setting: Setting, suite: Suite, operators: Sequence[str]) -> _Best:
    values = {name: suite.better * evidence.score(setting.arm(name), suite).mean.value for name in operators}
    top = max(values.values())
    best = tuple(name for name in operators if top - values[name] < _TIE)
    below = frozenset(
        name
        for name in operators
        if direction(evidence.contrast(setting.arm(best[0]), setting.arm(name), suite)) * suite.better > 0
    )
    return _Best(best, below, len(operators) - len(best) - len(below))


def _best(evidence: Evidence, setting: Setting, suite: Suite) -> _Best | str:
    try:
        return _ranked(evidence, setting, suite, ANSWERING)
    except NotMeasurableError as gap:
        return f"not measurable: {gap}"


def _best_table(settings: Sequence[Setting], best: Mapping[tuple[Setting, Suite], _Best | str]) -> Table:
    rows = tuple((*_told(setting), *(str(best[setting, suite]) for suite in SUITES)) for setting in settings)
    return Table(("mask", "pruned", "model", *titles_of(SUITES).values()), rows)


def _everywhere(best: Sequence[_Best | str]) -> str:
    """The verdict on "no operator is best everywhere" over settings of which some may be gaps."""
    found = [one for one in best if isinstance(one, _Best)]
    gaps = f", {len(best) - len(found)} not measurable" if len(found) < len(best) else ""
    if not found:
        return f"**{Verdict.MISSING}**"
    beaten = sum(any(name in one.below for one in found) for name in ANSWERING)
    always = any(all(name in one.best for one in found) for name in ANSWERING)
    verdict = Verdict.REVERSED if always else Verdict.SEEN if beaten == len(ANSWERING) else Verdict.OPEN
    return f"**{verdict}** ({beaten} of {len(ANSWERING)} operators below the best of some setting{gaps})"


def _everywhere_table(
    settings: Sequence[Setting],
    best: Mapping[tuple[Setting, Suite], _Best | str],
    everywhere: Mapping[Suite, str],
) -> Table:
    def counted(name: str, suite: Suite) -> str:
        found = [one for one in (best[setting, suite] for setting in settings) if isinstance(one, _Best)]
        top, below = sum(name in one.best for one in found), sum(name in one.below for one in found)
        return f"best {top}, below {below} of {len(found)}"

    rows = [(name, *(counted(name, suite) for suite in SUITES)) for name in ANSWERING]
    return Table(
        ("operator", *titles_of(SUITES).values()), (*rows, ("**all**", *(everywhere[suite] for suite in SUITES)))
    )


def _same(evidence: Evidence, model: Model, suite: Suite) -> Cell:
    leaders = [_ranked(evidence, Setting(model, HELD, criterion), suite, _THREE) for criterion in MASKS]
    text = " / ".join(" = ".join(one.best) + "*" * one.leads for one in leaders)
    contrasts = len(leaders) * (len(_THREE) - 1)
    if frozenset.intersection(*(frozenset(one.best) for one in leaders)):
        return Cell(text, Verdict.SEEN, contrasts=contrasts)
    apart = all(one.leads for one in leaders)
    return Cell(text, Verdict.REVERSED if apart else Verdict.OPEN, contrasts=contrasts)
