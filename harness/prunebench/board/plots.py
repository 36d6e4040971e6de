"""Accuracy against stored bytes, a panel per suite: every run with its interval, and the front of the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from prunebench.analysis.forest import library
from prunebench.board.html import page, text_html
from prunebench.board.svg import GRID, INK, PALETTE, inline_svg
from prunebench.board.table import Row, SuiteColumn, Table, shown

__all__ = ["pareto", "plots_page", "scatter"]

_SHAPES: Final = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "cross",
    "triangle-down",
    "triangle-right",
    "triangle-left",
)
_WIDTH, _HEIGHT = 330, 230


def plots_page(table: Table) -> str:
    """The page of plots, a section per model.

    Raises:
        PrerequisiteError: without the extra `plots`.
    """
    parts = [
        "<h1>Score against stored bytes</h1>",
        (
            '<p class="lead">Points are runs, whiskers 95 % intervals; the line is the Pareto front: unbeaten on '
            "both. Point at a mark for its run.</p>"
        ),
    ]
    models: dict[str, list[Row]] = {}
    for row in table.rows:
        models.setdefault(row.cells["model"].visible, []).append(row)
    for model, rows in models.items():
        suites = [suite for suite in table.suites if any(suite.has(row.entry) for row in rows)]
        if suites:
            label = text_html(f"{model}: score of every run against its stored bytes, one panel per suite")
            parts += [f"<h2>{text_html(model)}</h2>", inline_svg(scatter(rows, suites), label)]
    return page("Plots", "\n".join(parts), here="plots.html", script=True)


def pareto(points: Sequence[tuple[float, float]], *, lower_is_better: bool = False) -> list[int]:
    """The numbers of the points (bytes, score) that no other point beats: none stores no more and scores better."""
    sign = -1.0 if lower_is_better else 1.0
    order = sorted(range(len(points)), key=lambda at: (points[at][0], -sign * points[at][1]))
    front: list[int] = []
    for at in order:
        if not front or sign * points[at][1] > sign * points[front[-1]][1]:
            front.append(at)
    return front


def scatter(rows: Sequence[Row], suites: Sequence[SuiteColumn]) -> dict[str, Any]:
    """The specification of one model's panels; deterministic."""
    alt = library("altair")
    operators = sorted({_operator(row) for row in rows})
    # Data are put in at the end: altair would check and copy every row several times.
    data: dict[str, Any] = {}
    panels = [_panel(alt, rows, suite, operators, data) for suite in suites]
    chart = alt.concat(*panels, columns=2, spacing=22).resolve_scale(color="shared", shape="shared")
    chart = chart.configure(font="sans-serif", background="transparent", padding=6)
    chart = chart.configure_view(stroke=None)
    chart = chart.configure_axis(
        labelColor=INK, titleColor=INK, gridColor=GRID, domainColor=GRID, tickColor=GRID, titleFontWeight="normal"
    )
    chart = chart.configure_legend(
        labelColor=INK, titleColor=INK, orient="bottom", columns=5, symbolStrokeWidth=1.5, symbolOpacity=1
    )
    chart = chart.configure_title(color=INK, anchor="start", fontSize=13)
    return {**chart.to_dict(validate=False), "datasets": data}


def _panel(alt: Any, rows: Sequence[Row], suite: SuiteColumn, operators: Sequence[str], data: dict[str, Any]) -> Any:
    """A suite's panel; what it shows goes into `data`."""
    own = [row for row in rows if suite.has(row.entry)]
    factor = 100.0 if suite.percent else 1.0
    values = []
    for row in own:
        numbers = row.numbers[suite.name]
        size = row.entry.record["storage"]["total"] / 1e6
        said = ", ".join(row.cells[key].visible for key in ("method", "operator", "ratio"))
        score, low, high = (shown(getattr(numbers, key), suite) for key in ("value", "low", "high"))
        values.append(
            {
                "stored": size,
                "score": factor * numbers.value,
                "low": factor * numbers.low,
                "high": factor * numbers.high,
                "operator": _operator(row),
                "told": f"{said}: {score} [{low}, {high}], {size:.2f} MB",
            }
        )
    front = [values[at] for at in pareto([(v["stored"], v["score"]) for v in values], lower_is_better=suite.loss)]
    data |= {f"runs of {suite.label}": values, f"front of {suite.label}": front}
    unit = "%" if suite.percent else "lower is better" if suite.loss else ""
    x = alt.X("stored:Q", title="stored MB").scale(zero=False, nice=True)
    title = f"{suite.label}, {unit}" if unit else suite.label
    scale = alt.Scale(type="log", nice=True) if suite.logarithmic else alt.Scale(zero=False, nice=True)
    y = alt.Y("score:Q", title=title).scale(scale).axis(tickCount=5)
    base = alt.Chart(alt.NamedData(name=f"runs of {suite.label}"))
    colors = [PALETTE[at % len(PALETTE)] for at in range(len(operators))]
    shapes = [_SHAPES[(at + at // len(PALETTE)) % len(_SHAPES)] for at in range(len(operators))]
    color = alt.Color("operator:N", title=None).scale(domain=list(operators), range=colors)
    shape = alt.Shape("operator:N", title=None).scale(domain=list(operators), range=shapes)
    line = alt.Chart(alt.NamedData(name=f"front of {suite.label}")).mark_line(
        interpolate="step-after", color=INK, strokeWidth=1.2, opacity=0.65
    )
    return alt.layer(
        base.mark_rule(strokeWidth=0.8, opacity=0.3, aria=False).encode(
            x=x, y=alt.Y("low:Q").scale(scale), y2="high:Q", color=color
        ),
        line.encode(x=x, y=y),
        base.mark_point(size=34, strokeWidth=1.3, opacity=0.95).encode(
            x=x, y=y, color=color, shape=shape, description="told:N"
        ),
    ).properties(width=_WIDTH, height=_HEIGHT, title=suite.label)


def _operator(row: Row) -> str:
    arm = row.entry.record["arm"]
    if arm["dense"]:
        return "dense"
    return f"{arm['operator']} {arm['resolved_scale']}" if arm["resolved_scale"] else str(arm["operator"])
