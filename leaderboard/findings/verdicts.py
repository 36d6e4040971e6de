"""From numbers to words, by stated rules: a cell's verdict from its interval, a finding's from the cells' counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from leaderboard.findings.evidence import NotMeasurableError

from prunebench.analysis.bootstrap import Sampled

__all__ = [
    "CONTRAST_RULE",
    "TALLY_RULE",
    "Cell",
    "Tally",
    "Verdict",
    "attempt",
    "compared",
    "direction",
    "judged",
    "on_every_draw",
    "shown",
    "sides",
]

_ROUNDING: Final = 1e-9  # an end of an interval this near to zero is zero

_SIDES: Final = {1: "better", -1: "worse", 0: "not detectable"}

CONTRAST_RULE: Final = (
    "seen: the 95 % interval lies on the side that the paper claims. reversed: it lies on the other side. "
    "not detectable: it contains zero, which is no evidence that two arms are equal. "
    "not measurable: an arm is missing, and named"
)
TALLY_RULE: Final = (
    "seen or reversed: so in every measured case. partly: so in some, and nothing else is detectable in the others. "
    "mixed: seen in some and reversed in others. not seen: neither in any. not measurable: no case could be measured"
)


class Verdict(StrEnum):
    """What one case says of a claim."""

    SEEN = "seen"
    REVERSED = "reversed"
    ABSENT = "not seen"
    OPEN = "not detectable"
    MISSING = "not measurable"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: the numbers, or why there are none.
        verdict: of a case of a claim; None for a cell that judges no claim.
        side: where nothing is claimed, 1 if better, -1 if worse, 0 if not detectable; None where that is not asked.
        contrasts: intervals that were held against zero for it.
    """

    text: str
    verdict: Verdict | None = None
    side: int | None = None
    contrasts: int = 0

    def __str__(self) -> str:
        if self.verdict is Verdict.MISSING:
            return f"not measurable: {self.text}"
        word = _SIDES[self.side] if self.side is not None else self.verdict or ""
        return f"{self.text} {word}".strip()


@dataclass(frozen=True)
class Tally:
    """How many cases of a claim got which verdict.

    Args:
        verdicts: of all cases.
        unit: what a case is, in the plural.
    """

    verdicts: tuple[Verdict, ...]
    unit: str = "models"

    @classmethod
    def of(cls, cells: Iterable[Cell], unit: str = "models") -> Tally:
        """The tally of all cells that judge a claim."""
        return cls(tuple(cell.verdict for cell in cells if cell.verdict is not None), unit)

    @property
    def word(self) -> str:
        """The finding in a word, as `TALLY_RULE` says."""
        kinds = set(self.verdicts) - {Verdict.MISSING}
        if not kinds:
            return "not measurable"
        if {Verdict.SEEN, Verdict.REVERSED} <= kinds:
            return "mixed"
        for kind in (Verdict.SEEN, Verdict.REVERSED):
            if kind in kinds:
                return str(kind) if len(kinds) == 1 else f"partly {kind}"
        return "not seen"

    @property
    def short(self) -> str:
        """The word with the counts that it rests on, for the page's first table."""
        counts = Counter(self.verdicts)
        missing = counts.pop(Verdict.MISSING, 0)
        if not counts:
            return f"**{self.word}**"
        reversals = f", reversed {counts[Verdict.REVERSED]}" if counts[Verdict.REVERSED] else ""
        gaps = f", {missing} not measurable" if missing else ""
        return f"**{self.word}** (seen {counts[Verdict.SEEN]}{reversals} of {counts.total()}{gaps})"

    def __str__(self) -> str:
        counts = Counter(self.verdicts)
        missing = counts.pop(Verdict.MISSING, 0)
        measured = counts.total()
        if not measured:
            return f"**{self.word}**"
        parts = [f"{kind} on {counts[kind]}" for kind in Verdict if counts[kind]]
        parts[0] += f" of {measured} {self.unit}"
        return f"**{self.word}** ({', '.join(parts + [f'not measurable on {missing}'] * bool(missing))})"


def attempt(compute: Callable[[], Cell]) -> Cell:
    """A cell, or the reason why it cannot be had."""
    try:
        return compute()
    except NotMeasurableError as gap:
        return Cell(str(gap), Verdict.MISSING)


def direction(difference: Sampled) -> int:
    """1 above zero, -1 below, 0 if the 95 % interval contains zero."""
    interval = difference.interval()
    return int(interval.low > _ROUNDING) - int(interval.high < -_ROUNDING)


def shown(difference: Sampled, digits: int) -> str:
    """A difference with its interval."""
    interval = difference.interval()
    value, low, high = (f"{number:+z.{digits}f}" for number in (interval.value, interval.low, interval.high))
    return f"{value} [{low}, {high}]"


def judged(difference: Sampled, *, claimed: int, digits: int = 2) -> Cell:
    """A difference against the side of zero that a claim puts it on: 1 above, -1 below."""
    found = direction(difference) * claimed
    verdict = {1: Verdict.SEEN, -1: Verdict.REVERSED, 0: Verdict.OPEN}[found]
    return Cell(shown(difference, digits), verdict, contrasts=1)


def compared(difference: Sampled, *, better: int, digits: int = 2) -> Cell:
    """A difference of which nothing is claimed: better, worse, or neither detectable."""
    return Cell(shown(difference, digits), side=direction(difference) * better, contrasts=1)


def on_every_draw(values: Sequence[float], *, claimed: int) -> Verdict:
    """The paper's rule for calibration noise: an effect has one sign on every draw, or is not established."""
    signs = {(int(value > _ROUNDING) - int(value < -_ROUNDING)) * claimed for value in values}
    return {frozenset({1}): Verdict.SEEN, frozenset({-1}): Verdict.REVERSED}.get(frozenset(signs), Verdict.OPEN)


def sides(cells: Iterable[Cell], unit: str = "models") -> str:
    """How many cells that judge no claim are better, worse, or neither."""
    counts = Counter(cell.side for cell in cells if cell.side is not None)
    if not counts:
        return "**not measurable**"
    parts = [f"{word} on {counts[side]}" for side, word in _SIDES.items() if counts[side]]
    parts[0] += f" of {counts.total()} {unit}"
    return ", ".join(parts)
