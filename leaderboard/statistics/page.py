"""The page and its plot: declared contrasts with their corrections, then what every operator of the records does."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from leaderboard.findings.evidence import GENERAL
from leaderboard.findings.text import Table, escaped, prose
from leaderboard.statistics.arms import CONSTANT, DRAW, MASK, Grid
from leaderboard.statistics.tables import (
    CHOICE,
    LOSS,
    accuracy_table,
    answer_bias_table,
    chance_level,
    chance_table,
    equivalence_table,
    gate_scale_table,
    holm_table,
    recovered_table,
)

from prunebench.analysis import RESAMPLES, SEED, Answer, Gap, Report, Selector, Shelf, answers, read_declaration
from prunebench.analysis.arms import UnfoundError
from prunebench.analysis.contrasts import runs_of
from prunebench.analysis.declared import Declaration, Question
from prunebench.analysis.forest import draw, forest
from prunebench.analysis.report import shown_bound, shown_difference, shown_p
from prunebench.analysis.scores import Scores
from prunebench.mask import write_atomically

__all__ = ["PAGE", "PLOT", "Statistics", "Written", "statistics", "write_statistics"]

PAGE: Final = "statistics.md"
PLOT: Final = "operators.svg"
GATE_SCALE: Final = "gate scale"
EXPLORATORY: Final = "others against the constant"
PLOTTED: Final = (GATE_SCALE, "operators", "masks", EXPLORATORY)


@dataclass(frozen=True)
class Written:
    """What was written, in a line, and what was left out."""

    page: Path
    plot: Path
    summary: str
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Statistics:
    """The page as Markdown, the answers that are plotted, and a line on them."""

    markdown: str
    plotted: tuple[Answer, ...]
    summary: str
    left_out: tuple[str, ...]


def write_statistics(records: Path, families: Path, out: Path) -> Written:
    """Write page and plot for all whole runs under a folder.

    Raises:
        PrerequisiteError: if there is no whole run, or no library to draw with.
        UsageError: if there is no such folder, the families cannot be read, or `out` is not writable.
    """
    found = statistics(records, families)
    plot = draw(forest(found.plotted), "svg")
    write_atomically(out / PLOT, plot.encode())
    write_atomically(out / PAGE, found.markdown.encode(errors="replace"))
    return Written(out / PAGE, out / PLOT, found.summary, found.left_out)


def statistics(records: Path, families: Path) -> Statistics:
    """Everything but the drawing."""
    declaration = read_declaration(families)
    shelf = Shelf.of(records)
    grid = Grid.of(shelf)
    questions = [*declaration.questions, *_exploratory(shelf, grid, declaration)]
    wanted = runs_of(shelf, questions)
    arms = [*grid.arms.values(), *grid.dense.values()]
    for suite in (CHOICE, LOSS):
        wanted.setdefault(suite, []).extend(run for run in arms if suite in run.record["headline"])
    scores = Scores(shelf, wanted)
    found, gaps = answers(shelf, questions, scores=scores)
    report = Report(declaration, found, gaps)
    plotted = tuple(one for one in found if one.question.family in PLOTTED)
    markdown = _markdown(report, shelf, grid, scores)
    return Statistics(markdown, plotted, report.counts(), tuple(map(str, shelf.left_out)))


def _exploratory(shelf: Shelf, grid: Grid, declaration: Declaration) -> list[Question]:
    """Every operator against the constant, where that is not declared."""
    declared = _declared_pairs(shelf, declaration)
    questions = []
    for ratio in grid.ratios:
        for model in grid.models:
            constant = grid.arm(model, ratio, CONSTANT)
            for operator in grid.operators:
                run = grid.arm(model, ratio, operator)
                if run is None or constant is None or run is constant or (run.folder, constant.folder) in declared:
                    continue
                terms = ((1.0, Selector(run=run.folder)), (-1.0, Selector(run=constant.folder)))
                label = f"{model} {ratio} {operator} - constant"
                questions.append(Question(label, CHOICE, terms, EXPLORATORY, exploratory=True))
    return questions


def _declared_pairs(shelf: Shelf, declaration: Declaration) -> set[tuple[str, ...]]:
    """The folders of every declared difference of two runs on the choice tasks."""
    pairs = set()
    for question in declaration.questions:
        if question.suite == CHOICE and not question.tasks and [w for w, _ in question.terms] == [1.0, -1.0]:
            with contextlib.suppress(UnfoundError):
                pairs.add(tuple(shelf.find(arm).folder for _, arm in question.terms))
    return pairs


def _markdown(report: Report, shelf: Shelf, grid: Grid, scores: Scores) -> str:
    level = chance_level(shelf, grid, scores)
    sections = [
        ("The gate scale (Table 1)", _gate_scale(report, grid)),
        ("Operators (Figure 3, Table 4)", _operators(report, grid, scores)),
        ("Every declared contrast, corrected (Table H.1)", _corrected(report)),
        ("What the undetected differences may still be (Table H.2)", _equivalence(report)),
        ("Recovered shares (Table 7)", _recovered(grid, scores)),
        ("Above chance (Table A.9)", _above_chance(grid, scores, level)),
        ("Answer bias against ability (Table A.13)", _bias(shelf, grid, scores)),
        ("Declared and not measured", _not_measured(report.gaps)),
    ]
    parts = ["# Statistics: paired tests of arXiv 2610.41366 on the models at hand", _introduction(report, shelf, grid)]
    for number, (title, blocks) in enumerate(sections, start=1):
        shown = [block.markdown() if isinstance(block, Table) else block for block in blocks]
        parts += [f"## {number}. {title}", *shown]
    return "\n\n".join(parts) + "\n"


def _introduction(report: Report, shelf: Shelf, grid: Grid) -> str:
    d = report.declaration
    lines = {
        "Families": f"`{d.name}`, declared {d.date.isoformat()}, sha256 `{d.sha256}`. {prose(escaped(d.note))}",
        "Arms": f"""
            {MASK}'s masks, mask and fit of {GENERAL.removeprefix("world:")} draw {DRAW}, unless a contrast says
            otherwise; operators of the records: {escaped(", ".join(grid.operators))}.
        """,
        "Intervals": f"""
            paired, task-stratified item bootstrap (B = {RESAMPLES:,}, seed {SEED}, 95 % percentiles), on the same
            resamples for all contrasts. They cover the choice of test items only.
        """,
        "Marks": """
            \\* the interval excludes zero, † survives Holm within its family, ‡ over all declared contrasts. A contrast
            that is not measured does not count.
        """,
        "Every draw": """
            same sign: on every calibration draw that was run, which is all that "established" means. one draw: nothing
            is known of calibration noise.
        """,
        "Counts": f"{report.counts()}.",
    }
    head = f"Written by `python -m leaderboard.statistics` from {len(shelf.runs)} runs. Do not edit: run it again."
    return "\n".join([head, "", *(f"- **{term}**: {prose(text)}" for term, text in lines.items())])


Blocks = tuple[str | Table, ...]


def _gate_scale(report: Report, grid: Grid) -> Blocks:
    text = "Rerouting at the trained scale minus rerouting at the other, multiple choice, points [95 %]."
    return text, gate_scale_table(grid, report.answers, GATE_SCALE)


def _operators(report: Report, grid: Grid, scores: Scores) -> Blocks:
    exploratory = [one for one in report.answers if one.question.exploratory]
    rows = tuple(
        (one.question.label, shown_difference(one), shown_p(one.p), shown_bound(one.bound, 2)) for one in exploratory
    )
    return (
        f"![Forest plot]({PLOT})",
        prose("""
            Multiple choice, points. Filled: the 95 % interval excludes zero. Small dots: other calibration draws, where
            they were run. The last panel holds every other operator of the records against the constant: exploratory.
        """),
        "Accuracy (%); bold: highest of the row among the operators, significant or not:",
        accuracy_table(grid, scores),
        "Exploratory, corrected for nothing:",
        Table(("comparison", "Δ [95 %]", "p", "not ruled out up to"), rows),
    )


def _corrected(report: Report) -> Blocks:
    return (
        prose("""
            p: two-sided bootstrap, at least 2/B. Verdict: both = survives both corrections; table = its family's only;
            lost = significant by itself, not within its family; n.s. = not significant by itself.
        """),
        holm_table(report.answers),
    )


def _equivalence(report: Report) -> Blocks:
    return (
        prose("""
            Declared contrasts whose interval contains zero, which is no evidence that two arms are equal. The bound of
            the 90 % interval is the smallest margin that two one-sided tests at 0.05 would accept; no margin was set
            before. Last column: the difference that would be found with power 0.8. —: no item differs, so that
            resampling these says nothing of others.
        """),
        equivalence_table(report.answers),
    )


def _recovered(grid: Grid, scores: Scores) -> Blocks:
    return (
        prose("""
            Share of the constant's damage that an operator takes back, percent [95 %]: (constant − operator) /
            (constant − dense). Below zero it adds damage. Without detectable damage there is no share.
        """),
        "ln perplexity:",
        recovered_table(grid, scores, LOSS),
        "Multiple choice:",
        recovered_table(grid, scores, CHOICE),
    )


def _above_chance(grid: Grid, scores: Scores, level: float | None) -> Blocks:
    if level is None:
        return ("Not measurable: no dense run.",)
    text = f"""
        Share of the dense multiple-choice accuracy above chance that is kept, percent [95 %]. Chance: {level:.2f} %,
        the commoner answer where two answers are the same for every item, else one over the number of options.
    """
    return prose(text), chance_table(grid, scores, level)


def _bias(shelf: Shelf, grid: Grid, scores: Scores) -> Blocks:
    return (
        prose("""
            Two-choice tasks of fixed answers at 50 %. AUC of the log-likelihood margin: ability to rank, whatever the
            threshold. Prior-matched: with as many items of each answer as are right. Gap: points against the constant,
            as evaluated and after matching; a gap that closes was answer bias.
        """),
        answer_bias_table(shelf, grid, scores),
    )


def _not_measured(gaps: Sequence[Gap]) -> Blocks:
    if not gaps:
        return ("Nothing.",)
    families = dict.fromkeys(gap.question.family for gap in gaps)
    rows = []
    for family in families:
        own = [gap for gap in gaps if gap.question.family == family]
        rows.append((family, str(len(own)), f"{own[0].question.label}: {own[0].reason}"))
    return (Table(("family", "contrasts", "the first of them"), tuple(rows)),)
