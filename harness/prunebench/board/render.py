"""The board's table as Markdown and as one self-contained page. All text from records is escaped here."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from importlib import resources
from typing import Final

import tabulate

from prunebench.board.naming import Cell, Column
from prunebench.board.table import Table
from prunebench.record import LeftOut

__all__ = ["LEGEND", "to_html", "to_markdown"]

TITLE: Final = "prunebench board"
LEGEND: Final = (
    ("scores", "each score, interval and difference is computed again from the per-item outcomes of the runs, each ratio from the mask. Stored bytes, integrity and calls rerouted are as the record has them: they cannot be had without the weights."),  # noqa: E501
    ("model", "dtype, device and implementation of the experts are named where they differ, or are not float32, cpu and eager. No two runs read the same: where all else agrees, what differs is named, as in any other cell."),  # noqa: E501
    ("method (mask)", "the criterion that chose the pruned experts, with its parameters, and its seed if that is not 0. Given mask: it came from a file or from another run."),  # noqa: E501
    ("operator", "what answers a slot whose expert is gone: constant (the expert's mean output), zero (nothing), reroute (the slot goes to the best survivor)."),  # noqa: E501
    ("scale", "the divisor Z of the survivors' gates when slots are rerouted. keep: that of the unpruned router, so that survivors keep their gates. renorm: gates rescaled for the experts that are left. trained: keep or renorm, whichever the router was trained with; other: the one it was not."),  # noqa: E501
    ("convention", "what the router computes: its scores, and whether it was trained with top-k renormalization."),
    ("mask chosen on", "text and draw of the statistics that chose the mask, and number and length of blocks where these differ; none for a given mask, or one chosen without statistics."),  # noqa: E501
    ("operator fitted on", "text and draw that what answers pruned slots was fitted on; none where nothing is fitted, as in rerouting."),  # noqa: E501
    ("stored MB", "millions of bytes of all saved tensors, replacements included, tied ones once."),
    ("calls rerouted", "share of token-layer calls whose unpruned top-k held an expert that cannot be routed to; over those calls, the mean of the gates' total under keep over that under renorm; and the share of all calls where that ratio exceeds 1 (2610.41366 §5.3)."),  # noqa: E501
    ("[95 % CI]", "item bootstrap: B = 10,000 resamples of the items of each task, seed 0, percentiles 2.5 and 97.5; it covers the choice of test items, not of calibration text. Suites of several tasks show the mean over tasks."),  # noqa: E501
    ("− constant", "paired difference from the arm that differs in its operator alone, constant: same weights, tokenizer, mask, fit (where the arm fits nothing: a constant fitted on what the mask was chosen on), execution and suite; over the same items and resamples. Bold: the interval excludes zero (no correction for multiple comparisons)."),  # noqa: E501
    ("perplexity", "lower is better, and so is a difference below zero."),
    ("integrity", "checks passed of those that apply; failed ones are named."),
)  # fmt: skip
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"


def to_markdown(table: Table, left_out: Sequence[LeftOut]) -> str:
    """The board for a README or a pull request."""
    head = [_markdown_text(column.title, column.detail) for column in table.columns]
    body = [[_markdown_text(cell.text, cell.detail, strong=cell.strong) for cell in row] for row in table.rows]
    align = ["right" if column.numeric else "left" for column in table.columns]
    text = tabulate.tabulate(body, head, tablefmt="github", disable_numparse=True, colalign=align)
    notes = "\n".join(f"- **{_markdown(term)}**: {_markdown(meaning)}" for term, meaning in LEGEND)
    missing = "".join(f"- {_markdown(str(one))}\n" for one in left_out)
    tail = f"\n## Left out\n\n{missing}" if left_out else ""
    return f"# {TITLE}\n\n{text}\n\n## Legend\n\n{notes}\n{tail}"


def _markdown(text: str) -> str:
    """Text that Markdown and its inline HTML show as it is, on one line. A bracket alone makes no link."""
    escaped = re.sub(r"([\\`*|]|\](?=[(\[:]))", r"\\\1", " ".join(text.split()))
    return html.escape(escaped, quote=False)


def _markdown_text(text: str, detail: str, *, strong: bool = False) -> str:
    """A text with its second part in parentheses; an interval has its brackets already."""
    main = f"**{_markdown(text)}**" if strong else _markdown(text)
    if not detail:
        return main
    return f"{main} {_markdown(detail if detail.startswith('[') else f'({detail})')}"


def to_html(table: Table, left_out: Sequence[LeftOut]) -> str:
    """One page without outside parts: sortable, filterable, and still a table where scripts are off."""
    files = resources.files("prunebench.board")
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    head = "\n".join(_html_head(column) for column in table.columns)
    body = "\n".join(_html_row(table.columns, row) for row in table.rows)
    notes = "\n".join(f"<dt>{_html(term)}</dt><dd>{_html(meaning)}</dd>" for term, meaning in LEGEND)
    missing = "\n".join(f"<li>{_html(str(one))}</li>" for one in left_out)
    tail = f"<h2>Left out</h2>\n<ul>\n{missing}\n</ul>\n" if left_out else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{TITLE}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{TITLE}</h1>
<form role="search">
<label for="filter">Filter rows</label> <input id="filter" type="search" autocomplete="off" spellcheck="false">
<output id="count" for="filter">{len(table.rows)} rows</output>
</form>
<div class="scroll" role="region" aria-labelledby="caption" tabindex="0">
<table id="board">
<caption id="caption">Pruned models and their dense originals, every score from per-item outcomes.
Column titles sort; the address then links to that order.</caption>
<thead>
<tr>
{head}
</tr>
</thead>
<tbody>
{body}
</tbody>
</table>
</div>
<h2>Legend</h2>
<dl>
{notes}
</dl>
{tail}</main>
<script>
{script}</script>
</body>
</html>
"""


def _html(text: str) -> str:
    return html.escape(text, quote=True)


def _html_head(column: Column) -> str:
    kind = ' class="number"' if column.numeric else ""
    detail = f"<small>{_html(column.detail)}</small>" if column.detail else ""
    return (
        f'<th scope="col" aria-sort="none" data-key="{_html(column.key)}"{kind}>'
        f'<button type="button">{_html(column.title)}</button>{detail}</th>'
    )


def _html_row(columns: Sequence[Column], row: Sequence[Cell]) -> str:
    cells = (_html_cell(*pair, first=i == 0) for i, pair in enumerate(zip(columns, row, strict=True)))
    return f"<tr>{''.join(cells)}</tr>"


def _html_cell(column: Column, cell: Cell, *, first: bool) -> str:
    main = f"<strong>{_html(cell.text)}</strong>" if cell.strong else _html(cell.text)
    detail = f"<small>{_html(cell.detail)}</small>" if cell.detail else ""
    if column.numeric:
        key = "" if cell.sort is None else f' data-sort="{_html(repr(cell.sort))}"'
        return f'<td class="number"{key}>{main}{detail}</td>'
    return f'<th scope="row">{main}{detail}</th>' if first else f"<td>{main}{detail}</td>"
