"""Sections and tables as Markdown. All text that comes from a record is escaped here."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from leaderboard.findings.evidence import RATIOS, SUITES, Evidence, Suite
from leaderboard.findings.verdicts import Cell, Tally, Verdict, attempt, direction, sides

from prunebench.analysis.bootstrap import Sampled

__all__ = [
    "Grid",
    "Section",
    "Summary",
    "Table",
    "claims",
    "columns_of",
    "contrasts_in",
    "escaped",
    "grid_table",
    "percent",
    "prose",
    "starred",
    "suite_grid",
    "summed_up",
    "tallies",
    "titles_of",
]

Grid = Mapping[tuple[str, str, str], Cell]
"""Cells by ratio, row and column."""


def prose(text: str) -> str:
    """A paragraph from a text written over several lines."""
    return " ".join(text.split())


@dataclass(frozen=True)
class Table:
    """A table: its head and its rows; a line break in a cell stays one."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table, without padding, so that one changed cell changes one line."""
        rule = "| --- " * len(self.head) + "|"
        return "\n".join([_row(self.head), rule, *map(_row, self.rows)])


@dataclass(frozen=True)
class Summary:
    """A row of the page's first table: the finding, what the paper says, what is seen here."""

    finding: str
    claim: str
    verdict: str


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        title: of the part.
        blocks: paragraphs and tables, in order.
        summaries: its rows of the page's first table.
        contrasts: how many intervals it held against zero.
    """

    title: str
    blocks: tuple[str | Table, ...]
    summaries: tuple[Summary, ...]
    contrasts: int = 0

    def markdown(self, number: int) -> str:
        """The part under its number."""
        blocks = [block.markdown() if isinstance(block, Table) else escaped(block) for block in self.blocks]
        return "\n\n".join([f"## {number}. {escaped(self.title)}", *blocks])


def percent(ratio: str) -> str:
    """A ratio as typed, in percent."""
    return f"{100 * float(ratio):g} %"


def columns_of(suites: Iterable[Suite], unit: str = "points") -> dict[str, str]:
    """Suites as columns: name to title with unit."""
    return {suite.name: suite.title if suite.better < 0 else f"{suite.title} ({unit})" for suite in suites}


def titles_of(suites: Iterable[Suite]) -> dict[str, str]:
    """Suites as columns without unit."""
    return {suite.name: suite.title for suite in suites}


def suite_grid(
    evidence: Evidence,
    cell: Callable[[str, str, Suite], Cell],
    *,
    ratios: Sequence[str] = RATIOS,
    suites: Sequence[Suite] = SUITES,
) -> Grid:
    """A cell for every ratio, model and suite; `cell` gets the model's name, the ratio and the suite."""
    return {
        (ratio, str(model), suite.name): attempt(partial(cell, model.name, ratio, suite))
        for ratio in ratios
        for model in evidence.models
        for suite in suites
    }


def contrasts_in(*grids: Grid) -> int:
    """How many intervals were held against zero for grids."""
    return sum(cell.contrasts for grid in grids for cell in grid.values())


def grid_table(
    grid: Grid, columns: Mapping[str, str], *, group: str = "pruned", row: str = "model", unit: str = "models"
) -> Table:
    """A grid with a line under each ratio, or other first key under another `group`, that counts its verdicts."""
    rows: list[tuple[str, ...]] = []
    for first in dict.fromkeys(key[0] for key in grid):
        shown = percent(first) if group == "pruned" else first
        names = list(dict.fromkeys(key[1] for key in grid if key[0] == first))
        rows += [(shown, name, *(str(grid[first, name, column]) for column in columns)) for name in names]
        counts = [_counted([grid[first, name, column] for name in names], unit) for column in columns]
        if any(counts):
            rows.append((f"**{shown}**", "**all**", *counts))
    return Table((group, row, *columns.values()), tuple(rows))


def _counted(cells: Sequence[Cell], unit: str) -> str:
    """The tally of a column; nothing where a claim is judged nowhere, as a gap alone does not make one."""
    judged = any(cell.verdict not in (None, Verdict.MISSING) for cell in cells)
    return str(Tally.of(cells, unit)) if judged else ""


def summed_up(cells: Sequence[Cell], unit: str) -> str:
    """Cells in one: the tally where a claim is judged, else how many are better and worse; gaps as such."""
    if any(cell.side is not None for cell in cells):
        return sides(cells, unit)
    return Tally.of(cells, unit).short


def starred(difference: Sampled, suite: Suite) -> str:
    """A difference without its interval; * where that excludes zero."""
    return f"{difference.value:+z.{suite.digits}f}" + "*" * abs(direction(difference))


def claims(by_ratio: Mapping[str, str]) -> str:
    """What the paper says at each ratio, one line each."""
    return "\n".join(f"{percent(ratio)}: {claim}" for ratio, claim in by_ratio.items())


def tallies(grid: Grid, columns: Mapping[str, str]) -> str:
    """What a grid says: one line per column that judges a claim, with its ratios side by side."""
    ratios = dict.fromkeys(key[0] for key in grid)
    lines = []
    for column, title in columns.items():
        counts = {
            ratio: Tally.of(cell for key, cell in grid.items() if (key[0], key[2]) == (ratio, column))
            for ratio in ratios
        }
        if any(count.verdicts for count in counts.values()):
            lines.append(f"{title}: " + ", ".join(f"{percent(ratio)} {count.short}" for ratio, count in counts.items()))
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Text that Markdown and its inline HTML show as it is; our own ** stay. A bracket alone makes no link."""
    return html.escape(re.sub(r"([\\`|]|\](?=[(\[:]))", r"\\\1", text), quote=False)


def _row(cells: Sequence[str]) -> str:
    shown = (escaped(cell).replace("\n", "<br>") for cell in cells)
    return f"| {' | '.join(' '.join(cell.split()) for cell in shown)} |"
