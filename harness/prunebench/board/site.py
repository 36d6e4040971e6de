"""The board as a folder of pages that needs no server: the table, plots, contrasts, and a page per run.

Where scripts are off it is still tables. Files are replaced one by one, each whole; pages of runs that are gone go too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prunebench.board.contrasts import contrasts_page
from prunebench.board.declared import Declared
from prunebench.board.html import cell_html, page, text_html
from prunebench.board.legend import LEGEND, TITLE
from prunebench.board.markdown import card_name
from prunebench.board.naming import Cell, Column
from prunebench.board.plots import plots_page
from prunebench.board.reported import ReportedScore
from prunebench.board.runpage import run_page
from prunebench.board.scoring import ScalePair
from prunebench.board.table import Row, Table
from prunebench.errors import UsageError
from prunebench.record import RECORD_FILE, LeftOut

__all__ = ["Site", "write_site"]


@dataclass(frozen=True)
class Site:
    """All that the pages are made from; `cards` is the folder of method cards, if there is one."""

    title: str
    table: Table
    scales: Sequence[ScalePair]
    declared: Declared | None
    reported: Sequence[ReportedScore]
    left_out: Sequence[LeftOut]
    cards: Path | None = None


def write_site(site: Site, out: Path) -> None:
    """Write all pages below a folder.

    Raises:
        PrerequisiteError: without the extra `plots`.
        UsageError: if the folder cannot be written.
    """
    known = {
        name: site.cards / f"{name}.md"
        for name in sorted({name for row in site.table.rows for name in _files(row)})
        if site.cards is not None and (site.cards / f"{name}.md").is_file()
    }
    pages = {
        "index.html": index_page(site, known),
        "plots.html": plots_page(site.table),
        "contrasts.html": contrasts_page(site.table, site.scales, site.declared, site.reported),
    }
    try:
        for name, text in pages.items():
            _write(out / name, text)
        for name, card in known.items():
            _write(out / "methods" / f"{name}.html", _card_page(name, card.read_text(encoding="utf-8")))
        for row in site.table.rows:
            _write(out / "runs" / f"{row.entry.id}.html", run_page(row, site.table, known))
            _copy(row.entry.path / RECORD_FILE, out / "records" / f"{row.entry.id}.json")
        _remove_others(out, {row.entry.id for row in site.table.rows}, set(known))
    except OSError as error:
        raise UsageError(
            "cannot write the site", where=str(out), expected="a writable folder", fix=str(error)
        ) from error


def _files(row: Row) -> Iterator[str]:
    for role in ("method", "operator"):
        name = (row.entry.record["identity"][role] or {}).get("name")
        if card_name(name):
            yield str(name)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, but not to outlast a power cut: a site is made again in seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _remove_others(out: Path, runs: set[str], cards: set[str]) -> None:
    """Pages that an earlier board made, of runs and cards that are no more, and what killed writers left."""
    for folder in ("", "runs", "records", "methods"):
        for left in (out / folder).glob(".*.tmp"):
            left.unlink()
    for folder, suffix, kept in (("runs", ".html", runs), ("records", ".json", runs), ("methods", ".html", cards)):
        for path in (out / folder).glob(f"*{suffix}"):
            if path.stem not in kept and not path.name.startswith("."):
                path.unlink()


def index_page(site: Site, cards: Iterable[str]) -> str:
    """The table: sortable and filterable, every row with links to its page and its method's card."""
    table, cards = site.table, set(cards)
    models = dict.fromkeys(row.cells["model"].visible for row in table.rows)
    ratios = sorted({row.cells["ratio"].text for row in table.rows}, key=float)
    groups = _column_groups(table)
    head = "".join(_head(column, groups) for column in table.columns)
    body = "\n".join(_row(table.columns, row, cards, groups) for row in table.rows)
    notes = "\n".join(f"<dt>{text_html(term)}</dt><dd>{text_html(meaning)}</dd>" for term, meaning in LEGEND)
    missing = "\n".join(f"<li>{text_html(one)}</li>" for one in site.left_out)
    tail = f"<h2>Left out</h2>\n<ul>\n{missing}\n</ul>\n" if site.left_out else ""
    text = f"""\
<h1>{text_html(site.title)}</h1>
<p class="lead">Scores, intervals and differences are computed anew of per-item outcomes.
<b>Bold</b> differences exclude zero; <b>bold</b> scores are in the group that cannot be told apart at the top.</p>
{_form(models, ratios, len(table.rows))}
<div class="scroll" role="region" aria-labelledby="caption" tabindex="0">
<table id="board">
<caption id="caption">Pruned models and their dense originals, every score from per-item outcomes.
Column titles sort; the address links to that order.</caption>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>
<h2>Legend</h2>
<dl>
{notes}
</dl>
{tail}"""
    return page(site.title or TITLE, text, here="index.html", script=True)


def _form(models: Iterable[str], ratios: Iterable[str], rows: int) -> str:
    boxes = "".join(
        f'<label><input type="checkbox" data-group="{key}" checked> {name}</label>'
        for key, name in (("s", "scores"), ("d", "− dense"), ("c", "− constant"), ("x", "how it was made"))
    )
    search = '<input id="filter" type="search" autocomplete="off" spellcheck="false" placeholder="reap reroute">'
    return f"""<form role="search">
<label>Filter {search}</label>
<label>Model <select id="model"><option value="">all</option>{_options(models)}</select></label>
<label>Pruned <select id="pruned"><option value="">all</option>{_options(ratios)}</select></label>
<fieldset><legend>Columns</legend>{boxes}</fieldset>
<output id="count" for="filter">{rows} rows</output>
<button type="button" id="more" hidden>Show all</button>
</form>"""


def _options(values: Iterable[str]) -> str:
    return "".join(f'<option value="{text_html(one)}">{text_html(one)}</option>' for one in values)


def _column_groups(table: Table) -> Mapping[str, str]:
    """Which columns are shown and hidden together."""
    found = dict.fromkeys(("scale", "convention", "calibration", "fit", "rerouted"), "x")
    for suite in table.suites:
        found |= {suite.label: "s", f"{suite.label}-loss": "d", f"{suite.label}-gain": "c"}
    return found


def _classes(column: Column, groups: Mapping[str, str]) -> str:
    names = " ".join(filter(None, ("n" if column.numeric else "", groups.get(column.key, ""))))
    return f' class="{names}"' if names else ""


def _head(column: Column, groups: Mapping[str, str]) -> str:
    detail = f"<small>{text_html(column.detail)}</small>" if column.detail else ""
    return (
        f'<th scope="col" aria-sort="none" data-key="{text_html(column.key)}"{_classes(column, groups)}>'
        f'<button type="button">{text_html(column.title)}</button>{detail}</th>'
    )


def _row(columns: Sequence[Column], row: Row, cards: set[str], groups: Mapping[str, str]) -> str:
    cells = "".join(
        _cell(column, row.cells[column.key], _address(column.key, row, cards), groups, first=number == 0)
        for number, column in enumerate(columns)
    )
    return f"<tr>{cells}</tr>"


def _address(key: str, row: Row, cards: set[str]) -> str:
    if key == "run":
        return f"runs/{row.entry.id}.html"
    if key in ("method", "operator"):
        name = (row.entry.record["identity"][key] or {}).get("name")
        return f"methods/{name}.html" if card_name(name) and name in cards else ""
    return ""


def _cell(column: Column, cell: Cell, address: str, groups: Mapping[str, str], *, first: bool) -> str:
    inner = cell_html(cell.text, "" if address else cell.detail, strong=cell.strong)
    if address:
        inner = f'<a href="{text_html(address)}">{inner}</a>' + cell_html("", cell.detail)
    if first:
        return f'<th scope="row">{inner}</th>'
    key = f' data-sort="{text_html(_key(cell.sort))}"' if column.numeric and cell.sort is not None else ""
    return f"<td{_classes(column, groups)}{key}>{inner}</td>"


def _key(sort: float | str) -> str:
    return f"{sort:.9g}" if isinstance(sort, float) else str(sort)


def _card_page(name: str, text: str) -> str:
    return page(
        f"{name}: method card", f"<h1>{text_html(name)}</h1>\n<pre class=card>{text_html(text)}</pre>", up="../"
    )
