"""The tables of the page, each from answers or from scored arms; a number that cannot be had is said to be missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from leaderboard.findings.text import Table, percent
from leaderboard.statistics.arms import CONSTANT, OTHER, TRAINED, Grid

from prunebench.analysis import Answer, Found, Shelf
from prunebench.analysis.bootstrap import Sampled
from prunebench.analysis.choices import (
    Choices,
    accuracy,
    area,
    best_threshold,
    choices_of,
    flips,
    has_fixed_answers,
    predicted_shares,
    prior_matched,
)
from prunebench.analysis.metrics import Cell
from prunebench.analysis.report import shown_adjusted, shown_bound, shown_difference, shown_draws, shown_p
from prunebench.analysis.scores import Scores
from prunebench.analysis.shares import Share, above_chance, chance, mean_chance, recovered
from prunebench.record import Run

__all__ = [
    "CHOICE",
    "LOSS",
    "accuracy_table",
    "answer_bias_table",
    "chance_level",
    "chance_table",
    "equivalence_table",
    "gate_scale_table",
    "holm_table",
    "recovered_table",
]

CHOICE: Final = "multiple_choice"
LOSS: Final = "perplexity"
NONE: Final = "—"
_BIAS_RATIO: Final = "0.5"


def gate_scale_table(grid: Grid, answers: Sequence[Answer], family: str) -> Table:
    """Table 1's shape: trained minus other scale, a row per model, a column per ratio."""
    found = {}
    for answer in answers:
        (_, a), (_, b) = answer.question.terms[:2]
        if answer.question.family == family and (a.operator, b.operator) == (TRAINED, OTHER):
            found[a.model, a.ratio] = answer
    rows = [
        (
            model,
            grid.models[model],
            *(shown_difference(found[model, r]) if (model, r) in found else NONE for r in grid.ratios),
        )
        for model in grid.models
    ]
    return Table(("model", "trained scale", *map(percent, grid.ratios)), tuple(rows))


def accuracy_table(grid: Grid, scores: Scores) -> Table:
    """Table 4's shape: accuracy of every operator, the highest of a row in bold, significant or not."""
    rows = []
    for model, ratio in _places(grid):
        values = [_score(scores, grid.arm(model, ratio, operator)) for operator in grid.operators]
        best = max((one.value for one in values if one is not None), default=None)
        shown = (NONE if one is None else _strong(f"{one.value:.2f}", one.value == best) for one in values)
        dense = _score(scores, grid.dense.get(model))
        rows.append((percent(ratio), grid.title(model), NONE if dense is None else f"{dense.value:.2f}", *shown))
    return Table(("pruned", "model", "dense", *grid.operators), tuple(rows))


def holm_table(answers: Sequence[Answer]) -> Table:
    """Table H.1's shape: every declared contrast."""
    head = ("family", "comparison", "Δ [95 %]", "p", "Holm, family", "Holm, all", "verdict", "every draw")
    rows = (
        (
            one.question.family,
            one.question.label,
            shown_difference(one),
            shown_p(one.p),
            shown_adjusted(one.holm_family),
            shown_adjusted(one.holm_all),
            str(one.verdict),
            shown_draws(one),
        )
        for one in answers
        if not one.question.exploratory
    )
    return Table(head, tuple(rows))


def equivalence_table(answers: Sequence[Answer]) -> Table:
    """Table H.2's shape: every declared contrast whose 95 % interval contains zero."""
    head = ("family", "comparison", "Δ [95 %]", "90 %", "not ruled out up to", "would be found from")
    rows = (
        (
            one.question.family,
            one.question.label,
            shown_difference(one),
            f"[{one.interval90[0]:+z.2f}, {one.interval90[1]:+z.2f}]",
            shown_bound(one.bound, 2),
            shown_bound(one.detectable, 2),
        )
        for one in answers
        if not one.question.exploratory and not one.excludes_zero
    )
    return Table(head, tuple(rows))


def recovered_table(grid: Grid, scores: Scores, suite: str) -> Table:
    """Table 7's shape: the share of the constant's damage that each operator takes back, in percent."""
    operators = [name for name in grid.operators if name != CONSTANT]

    def cell(model: str, ratio: str, operator: str) -> str:
        arms = (grid.arm(model, ratio, operator), grid.arm(model, ratio, CONSTANT), grid.dense.get(model))
        own, constant, dense = (_score(scores, arm, suite) for arm in arms)
        kept = None if own is None or constant is None or dense is None else recovered(own, constant, dense)
        return _share(kept, "no damage detected")

    rows = [(percent(r), grid.title(m), *(cell(m, r, name) for name in operators)) for m, r in _places(grid)]
    return Table(("pruned", "model", *operators), tuple(rows))


def chance_level(shelf: Shelf, grid: Grid, scores: Scores) -> float | None:
    """What guessing scores, in percent; the items are the same for every arm."""
    for run in grid.dense.values():
        read = shelf.read(run)
        tasks = {cell[0]: chance(_choices(read, cell)) for cell in scores.cells(run, CHOICE)}
        return 100.0 * mean_chance(tasks)
    return None


def chance_table(grid: Grid, scores: Scores, level: float) -> Table:
    """Table A.9's shape: the share of the dense accuracy above chance that is kept, in percent."""

    def cell(model: str, ratio: str, operator: str) -> str:
        own, dense = (_score(scores, arm) for arm in (grid.arm(model, ratio, operator), grid.dense.get(model)))
        kept = None if own is None or dense is None else above_chance(own, dense, level)
        return _share(kept, "dense at chance", "z")

    rows = [(percent(r), grid.title(m), *(cell(m, r, name) for name in grid.operators)) for m, r in _places(grid)]
    return Table(("pruned", "model", *grid.operators), tuple(rows))


def answer_bias_table(shelf: Shelf, grid: Grid, scores: Scores) -> Table:
    """Table A.13's shape: two-choice tasks of fixed answers, at one ratio, every operator against the constant."""
    head = (
        *("model", "task", "operator", "accuracy", "AUC [95 %]", "prior-matched", "best threshold"),
        "second answer chosen / right",
        "gap",
        "gap, prior-matched",
        "AUC change [95 %]",
        "flips to first / second",
    )
    rows: list[tuple[str, ...]] = []
    for model in grid.models:
        runs = {name: grid.arm(model, _BIAS_RATIO, name) for name in grid.operators}
        read = {name: shelf.read(run) for name, run in runs.items() if run is not None}
        for cell in scores.cells(next(run for run in runs.values() if run), CHOICE) if read else ():
            tasks = {name: _choices(run, cell) for name, run in read.items()}
            own = next(iter(tasks.values()))
            if has_fixed_answers(own) and (own.options_N == 2).all():
                rows += _bias_rows(grid.title(model), cell[0], tasks)
    return Table(head, tuple(rows))


def _bias_rows(model: str, task: str, tasks: Mapping[str, Choices]) -> list[tuple[str, ...]]:
    areas = {name: area(own) for name, own in tasks.items()}

    def points(statistic: Callable[..., Sampled], own: Choices) -> float:
        return 100.0 * statistic(own, resamples=1).value

    rows: list[tuple[str, ...]] = []
    for name, own in tasks.items():
        constant = tasks.get(CONSTANT)
        change = [NONE] * 4
        if constant is not None and name != CONSTANT:
            gaps = [points(one, own) - points(one, constant) for one in (accuracy, prior_matched)]
            moved = flips(own, constant)
            change = [f"{gap:+z.2f}" for gap in gaps]
            change += [_interval(areas[name].minus(areas[CONSTANT]), "+z"), f"{moved.to_first} / {moved.to_second}"]
        rows.append(
            (
                *(model, task, name, f"{points(accuracy, own):.2f}", _interval(areas[name])),
                *(f"{points(one, own):.2f}" for one in (prior_matched, best_threshold)),
                f"{100 * predicted_shares(own)[1]:.0f} / {100 * own.gold_N.mean():.0f} %",
                *change,
            )
        )
    return rows


def _choices(run: Run, cell: Cell) -> Choices:
    return choices_of(run.items.rows(CHOICE, *cell))


def _interval(sampled: Sampled, sign: str = "") -> str:
    interval = sampled.interval()
    value, low, high = (f"{one:{sign}.3f}" for one in (interval.value, interval.low, interval.high))
    return f"{value} [{low}, {high}]"


def _places(grid: Grid) -> list[tuple[str, str]]:
    return [(model, ratio) for ratio in grid.ratios for model in grid.models]


def _score(scores: Scores, run: Found | None, suite: str = CHOICE) -> Sampled | None:
    return None if run is None or suite not in run.record["headline"] else scores.score(run, suite)


def _share(share: Share | None, undefined: str, sign: str = "+z") -> str:
    if share is None:
        return NONE
    if share.value is None:
        return undefined
    if share.low is None or share.high is None:
        return f"{100 * share.value:{sign}.0f} (no interval)"
    return f"{100 * share.value:{sign}.0f} [{100 * share.low:{sign}.0f}, {100 * share.high:{sign}.0f}]"


def _strong(text: str, strong: bool) -> str:
    return f"**{text}**" if strong else text
