"""Answers as a forest plot (2610.41366 Figure 3): one Vega-Lite specification, drawn as SVG and as a page.

A row per contrast: its interval, a marker that is filled if the interval excludes zero, a hollow one else, the mark
of what survives correction, small dots for other calibration draws. The page asks nothing of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from prunebench.analysis.contrasts import Answer
from prunebench.errors import PrerequisiteError
from prunebench.mask import write_atomically

__all__ = ["draw", "forest", "library", "write_forest"]

_ROW: Final = 20  # pixels per contrast
_WIDTH: Final = 380
_LETTER: Final = 5.8  # pixels: room for labels by their length, the same on every machine, whatever its fonts
_NEAR, _FAR = "#1f4e79", "#9a9a9a"


def forest(answers: Sequence[Answer], *, title: str = "") -> dict[str, Any]:
    """The specification: a panel per family, in the order given; deterministic.

    Args:
        answers: what to draw; panels of points and of ln perplexity have axes of their own.
        title: above all panels.

    Raises:
        PrerequisiteError: without altair.
    """
    alt = library("altair")
    families = list(dict.fromkeys(one.question.family for one in answers))
    room = int(_LETTER * max(len(one.question.label) for one in answers)) + 10
    panels = [_panel(alt, name, [one for one in answers if one.question.family == name], room) for name in families]
    chart = alt.vconcat(*panels, spacing=14).resolve_scale(x="independent")
    if title:
        chart = chart.properties(title=alt.TitleParams(title, anchor="start", fontSize=14))
    chart = chart.configure(font="sans-serif", background="white", padding=8).configure_view(stroke=None)
    specification: dict[str, Any] = chart.to_dict(validate=False)
    return specification


def _panel(alt: Any, family: str, answers: Sequence[Answer], room: int) -> Any:
    rows = [_row(one) for one in answers]
    order = [row["contrast"] for row in rows]
    loss = answers[0].lower_is_better
    unit = "ln perplexity, below zero is better" if loss else "points"
    status = " (exploratory)" if answers[0].question.exploratory else ""
    y = alt.Y("contrast:N", sort=order, title=None).axis(
        labelLimit=room, minExtent=room, maxExtent=room, ticks=False, domain=False, grid=False
    )
    x = alt.X("low:Q", title=unit).scale(zero=True, nice=True)
    told = [
        alt.Tooltip(f"{field}:N") for field in ("contrast", "difference", "p", "Holm family", "Holm all", "verdict")
    ]
    base = alt.Chart(alt.Data(values=rows))
    shade = alt.condition("datum.excludes", alt.value(_NEAR), alt.value(_FAR))
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(strokeDash=[3, 3], color="#555").encode(x="zero:Q")
    dots = [{"contrast": one.question.label, "draw": value} for one in answers for value in one.replicates]
    layers = [
        zero,
        base.mark_rule(strokeWidth=1.6).encode(y=y, x=x, x2="high:Q", color=shade, tooltip=told),
        base.mark_point(size=46, strokeWidth=1.5).encode(
            y=y,
            x="estimate:Q",
            stroke=shade,
            fill=alt.condition("datum.excludes", alt.value(_NEAR), alt.value("white")),
            opacity=alt.value(1),
            tooltip=told,
        ),
        base.mark_text(align="left", dx=5, dy=-1, fontSize=12).encode(y=y, x="high:Q", text="mark:N"),
    ]
    if dots:
        small = alt.Chart(alt.Data(values=dots)).mark_circle(size=13, color="#c55a11", opacity=1, yOffset=5)
        layers.append(small.encode(y=y, x="draw:Q"))
    title = alt.TitleParams(family + status, anchor="start", fontSize=12)
    return alt.layer(*layers).properties(width=_WIDTH, height=_ROW * len(rows), title=title)


def _row(answer: Answer) -> dict[str, Any]:
    from prunebench.analysis.report import shown_adjusted, shown_difference, shown_p

    d = answer.difference
    return {
        "contrast": answer.question.label,
        "estimate": d.value,
        "low": d.low,
        "high": d.high,
        "excludes": answer.excludes_zero,
        "mark": answer.mark if answer.mark != "*" else "",
        "difference": shown_difference(answer),
        "p": shown_p(answer.p),
        "Holm family": shown_adjusted(answer.holm_family),
        "Holm all": shown_adjusted(answer.holm_all),
        "verdict": str(answer.verdict or "exploratory"),
    }


def draw(specification: dict[str, Any], kind: str) -> str:
    """A specification as `svg` or `html`.

    Raises:
        PrerequisiteError: without vl-convert-python.
    """
    convert = library("vl_convert")
    if kind == "svg":
        svg: str = convert.vegalite_to_svg(specification)
        return svg + "\n"
    page: str = convert.vegalite_to_html(specification, bundle=True)
    return page + "\n"


def write_forest(
    answers: Sequence[Answer], folder: Path, *, title: str = "", name: str = "forest"
) -> tuple[Path, Path]:
    """Write `forest.svg` and `forest.html`, both from one specification.

    Raises:
        PrerequisiteError: without the extra `plots`.
        UsageError: if the folder is not writable.
    """
    specification = forest(answers, title=title)
    paths = tuple(folder / f"{name}.{kind}" for kind in ("svg", "html"))
    for path in paths:
        write_atomically(path, draw(specification, path.suffix[1:]).encode())
    return paths[0], paths[1]


def library(name: str) -> Any:
    """A library of the extra `plots`."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PrerequisiteError(
            f"{name} is not installed", expected="the extra plots", fix="pip install 'prunebench[plots]'"
        ) from error
