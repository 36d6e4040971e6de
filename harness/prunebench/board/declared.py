"""The declared contrasts of a track, answered on a board's runs, and the marks that they leave on its differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prunebench.analysis import Answer, Declaration, Found, Gap, Shelf, answers, read_declaration
from prunebench.analysis.arms import UnfoundError
from prunebench.board.entries import Entry
from prunebench.board.scoring import Difference, Numbers, Scored

__all__ = ["Declared", "answer_declared", "with_marks"]


@dataclass(frozen=True)
class Declared:
    """What a track's file of families says of these records."""

    declaration: Declaration
    answers: tuple[Answer, ...]
    gaps: tuple[Gap, ...]
    pairs: Mapping[tuple[str, str, str], str]
    """(folder, folder, suite) → mark, of the contrasts that are a plain difference of two runs."""


def answer_declared(records: Path, entries: Sequence[Entry], families: Path) -> Declared:
    """Answer the contrasts of a file from the runs of a board.

    Raises:
        UsageError: for a broken file, or arms that cannot be subtracted.
    """
    declaration = read_declaration(families)
    shelf = Shelf(records, (), [Found(entry.folder, entry.record) for entry in entries])
    found, gaps = answers(shelf, declaration.questions)
    pairs = {}
    for answer in found:
        terms = answer.question.terms
        if [weight for weight, _ in terms] == [1.0, -1.0] and not answer.question.tasks:
            try:
                folders = [shelf.find(selector).folder for _, selector in terms]
            except UnfoundError:  # pragma: no cover - an answered contrast has its arms
                continue
            pairs[folders[0], folders[1], answer.question.suite] = answer.mark
    return Declared(declaration, found, gaps, pairs)


def with_marks(scored: Scored, entries: Sequence[Entry], pairs: Mapping[tuple[str, str, str], str]) -> Scored:
    """The same numbers, with the marks of the contrasts that were declared."""
    numbers = {}
    for entry in entries:
        own: dict[str, Numbers] = {}
        for suite, one in scored.numbers[entry.id].items():
            own[suite] = replace(one, constant=_marked(one.constant, pairs.get((entry.folder, one.against, suite), "")))
        numbers[entry.id] = own
    scales = [
        replace(
            pair,
            differences={
                suite: _marked(one, pairs.get((pair.trained.folder, pair.other.folder, suite), ""))
                for suite, one in pair.differences.items()
            },
        )
        for pair in scored.scales
    ]
    return Scored(numbers, scales)


def _marked(difference: Difference | str, mark: str) -> Difference | str:
    return difference if isinstance(difference, str) else replace(difference, mark=mark)
