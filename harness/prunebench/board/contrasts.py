"""The page of contrasts: gate scales, declared families as forest plots, damage recovered, and what papers report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prunebench.analysis import Answer, Interval, Question, rerouting_summary
from prunebench.analysis.forest import forest
from prunebench.board.declared import Declared
from prunebench.board.html import cell_html, page, text_html
from prunebench.board.reported import ReportedScore
from prunebench.board.runpage import difference_html, share_html, simple_table
from prunebench.board.scoring import Difference, ScalePair
from prunebench.board.svg import GRID, INK, inline_svg
from prunebench.board.table import Row, Table

__all__ = ["contrasts_page", "exploratory_answers"]

_ARM: Final = {
    "model": "model",
    "method": "method",
    "operator": "operator",
    "scale": "scale",
    "ratio": "pruned",
    "calibration": "mask chosen on",
    "fit": "operator fitted on",
}
"""What tells one arm from another: a column's key, and its title here."""
_DRAWN = 60  # contrasts of a family that are drawn; the tables have all


def contrasts_page(
    table: Table, scales: Sequence[ScalePair], declared: Declared | None, reported: Sequence[ReportedScore]
) -> str:
    """The page.

    Raises:
        PrerequisiteError: without the extra `plots`.
    """
    parts = [
        "<h1>Contrasts</h1>",
        (
            '<p class="lead">Paired differences on the same items and resamples, with 95 % intervals. Bold excludes 0. '
            "† survives Holm within its declared family, ‡ over all of them; what was not declared is exploratory.</p>"
        ),
        "<h2>Gate scale alone</h2>",
        "<p>Rerouting at the scale that the router was trained with, minus the other scale, on one mask.</p>",
        _scales(table, scales),
        _forests(table, scales, declared),
        "<h2>Damage recovered</h2>",
        (
            "<p>(operator − constant) ÷ (dense − constant) on one mask, in percent; of perplexities in logarithms. "
            "Without detectable damage there is nothing to recover.</p>"
        ),
        _recovered(table),
        _reported(reported),
    ]
    return page("Contrasts", "\n".join(filter(None, parts)), here="contrasts.html", script=True)


def _arm(row: Row) -> Sequence[str]:
    return [cell_html(row.cells[key].text, row.cells[key].detail) for key in _ARM]


def _scales(table: Table, scales: Sequence[ScalePair]) -> str:
    rows = {row.entry.id: row for row in table.rows}
    body = []
    for pair in scales:
        row = rows[pair.trained.id]
        summary = rerouting_summary(pair.trained.record["routing"])
        moved = "—" if summary is None else f"{100 * summary.displaced_share:.1f} %"
        differences = [
            difference_html(pair.differences.get(s.name, "not run") if s.has(pair.trained) else "not run", s)
            for s in table.suites
        ]
        body.append([*_arm(row), moved, *differences])
    if not body:
        return "<p>No two runs here differ in their gate scale alone.</p>"
    head = (*_ARM.values(), "calls rerouted", *(s.label for s in table.suites))
    return simple_table(head, body, numeric=range(len(_ARM), len(_ARM) + 1 + len(table.suites)))


def _forests(table: Table, scales: Sequence[ScalePair], declared: Declared | None) -> str:
    if declared is None:
        found: Sequence[Answer] = exploratory_answers(table, scales)
        head = "<p>No families of contrasts are declared for this board; these are exploratory.</p>"
    else:
        found = declared.answers
        date = declared.declaration.date.isoformat()
        head = f"<p>{len(found)} contrasts, declared {date} ({text_html(declared.declaration.name)}).</p>"
        head += f"<blockquote>{text_html(declared.declaration.note)}</blockquote>" if declared.declaration.note else ""
        gaps = "".join(f"<li>{text_html(gap.question.label)}: {text_html(gap.reason)}</li>" for gap in declared.gaps)
        head += (
            f"<details><summary>{len(declared.gaps)} cannot be answered here</summary><ul>{gaps}</ul></details>"
            if gaps
            else ""
        )
    families = dict.fromkeys(one.question.family for one in found)
    parts: list[str] = []
    for family in families:
        own = [one for one in found if one.question.family == family][:_DRAWN]
        left = sum(one.question.family == family for one in found) - len(own)
        note = f"<p>{left} more are in the tables.</p>" if left else ""
        svg = inline_svg(_themed(forest(own)), text_html(f"Forest plot of {family}"))
        parts.append(
            f"<details{' open' if not parts else ''}><summary>{text_html(family)} ({len(own)})</summary>"
            f"{svg}{note}</details>"
        )
    return f"<h2>Forest plots</h2>\n{head}\n" + "\n".join(parts)


def _themed(specification: dict[str, object]) -> dict[str, object]:
    """A drawing for a page of either theme: no background, and ink that the style can turn."""
    config = dict(specification["config"])  # type: ignore[call-overload]
    axis = {"labelColor": INK, "titleColor": INK, "gridColor": GRID, "domainColor": GRID, "tickColor": GRID}
    config |= {"background": "transparent", "axis": axis, "title": {"color": INK}, "text": {"color": INK}}
    return {**specification, "config": config}


def exploratory_answers(table: Table, scales: Sequence[ScalePair]) -> list[Answer]:
    """Where nothing is declared: every pair of scales, and every run against its constant, corrected for nothing."""
    found = []
    for suite in table.suites:
        for pair in scales:
            row = next(row for row in table.rows if row.entry.id == pair.trained.id)
            family = f"gate scale, {suite.label}: trained − other"
            found += _answer(
                f"{_label(row)}", family, suite.name, pair.differences.get(suite.name), row, loss=suite.loss
            )
        for row in table.rows:
            if suite.has(row.entry):
                difference = row.numbers[suite.name].constant
                found += _answer(
                    _label(row), f"{suite.label}: operator − constant", suite.name, difference, row, loss=suite.loss
                )
    return found


def _label(row: Row) -> str:
    """All that tells one arm from another, as a drawing puts what is called alike in one line."""
    return " ".join(visible for key in _ARM if (visible := row.cells[key].visible) != "—")


def _answer(label: str, family: str, suite: str, difference: object, row: Row, *, loss: bool) -> list[Answer]:
    if not isinstance(difference, Difference):
        return []
    interval = Interval(difference.value, difference.low, difference.high, row.numbers[suite].n)
    question = Question(label, suite, (), family, exploratory=True)
    return [Answer(question, interval, (difference.low, difference.high), None, None, difference.p, loss)]


def _recovered(table: Table) -> str:
    body = []
    for row in table.rows:
        shares = {s.name: row.numbers[s.name].recovered for s in table.suites if s.has(row.entry)}
        if any(share is not None and share.value is not None for share in shares.values()):
            body.append([*_arm(row), *(share_html(shares.get(suite.name)) for suite in table.suites)])
    if not body:
        return "<p>No run here has both a dense and a constant arm to be held against.</p>"
    head = (*_ARM.values(), *(suite.label for suite in table.suites))
    return simple_table(head, body, numeric=range(len(_ARM), len(_ARM) + len(table.suites)))


def _reported(reported: Sequence[ReportedScore]) -> str:
    if not reported:
        return ""
    body = [
        [*map(text_html, (one.model, one.arm, one.metric)), f"{one.value:g}", text_html(one.source)] for one in reported
    ]
    head = ("model", "arm", "metric", "value", "source")
    return (
        "<h2>Reported by papers, not run here</h2>\n<p>Printed numbers, for orientation. Nothing of it was measured by "
        f"this board, and no interval of ours covers it.</p>\n{simple_table(head, body, numeric=(3,))}"
    )
