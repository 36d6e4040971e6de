"""The board as Markdown: one whole table, or sections between markers in other files; all text is escaped here."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import tabulate

from prunebench.board.legend import LEGEND, TITLE
from prunebench.board.naming import Cell, Column
from prunebench.board.reporting import ITEMS
from prunebench.board.table import Row, SuiteColumn, Table, shown
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.record import LeftOut

__all__ = ["Links", "card_name", "sections", "summary", "to_markdown", "with_board"]

_SECTION = ("method", "operator", "scale", "ratio", "calibration", "fit", "stored", "rerouted")


@dataclass(frozen=True)
class Links:
    """Where method cards and run folders are, seen from the file that links to them."""

    cards: str
    records: str

    def card(self, name: str) -> str:
        """The card of a method; nothing for a name that no file of ours can have."""
        return f"{self.cards}/{name}.md" if card_name(name) else ""

    def run(self, folder: str) -> str:
        """A run's record."""
        return quote(f"{self.records}/{folder}/record.json", safe="/")


def card_name(name: object) -> bool:
    """Whether a name is one that a method file of ours can have."""
    return isinstance(name, str) and re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name) is not None


def to_markdown(table: Table, left_out: Sequence[LeftOut]) -> str:
    """The whole board as one table, for a pull request or a terminal."""
    text = _table(table.columns, table.rows)
    return f"# {TITLE}\n\n{text}\n\n## Legend\n\n{_notes()}\n{_missing(left_out)}"


def sections(table: Table, left_out: Sequence[LeftOut], links: Links) -> str:
    """The whole board as one table per model, each row with links to its record and its method card."""
    parts = []
    for model, rows in _by_model(table).items():
        own = [column for column in table.columns if column.key in _SECTION or _is_score(column, table)]
        keys = [column for column in own if any(row.cells[column.key].text != "—" for row in rows)]
        conventions = sorted({row.cells["convention"].text for row in rows})
        head = f"### {escaped(model)}\n\nRouter: {escaped('; '.join(conventions))}. {len(rows)} runs.\n\n"
        parts.append(
            head
            + _table([*keys, *(c for c in table.columns if c.key in ("reported", "integrity", "run"))], rows, links)
        )
    return "\n\n".join([*parts, f"### Legend\n\n{_notes()}"]) + f"\n{_missing(left_out, '###')}"


def summary(table: Table, links: Links) -> str:
    """Per model and share pruned: the dense score, the best arm, and how many cannot be told from it."""
    suites = table.suites
    head = ["model", "pruned", "runs", *(escaped(suite.label) for suite in suites)]
    body = []
    for model, rows in _by_model(table).items():
        dense = [row for row in rows if row.entry.dense]
        body.append([escaped(model), "0", str(len(dense)), *(_dense_score(dense, suite) for suite in suites)])
        for ratio in sorted({row.cells["ratio"].visible for row in rows if not row.entry.dense}):
            own = [row for row in rows if row.cells["ratio"].visible == ratio and not row.entry.dense]
            cells = [_best(own, suite, links) for suite in suites]
            body.append([escaped(model), escaped(ratio), str(len(own)), *cells])
    note = (
        "Per suite the dense score, then the best run of each budget with its 95 % interval; in parentheses how many "
        "runs cannot be told apart from it (paired, uncorrected). Best of many is optimistic: see the contrasts."
    )
    return _thin(tabulate.tabulate(body, head, tablefmt="github", disable_numparse=True)) + f"\n\n{note}"


def _dense_score(rows: Sequence[Row], suite: SuiteColumn) -> str:
    own = [row for row in rows if suite.has(row.entry)]
    return shown(own[0].numbers[suite.name].value, suite) if len(own) == 1 else "—"


def _best(rows: Sequence[Row], suite: SuiteColumn, links: Links) -> str:
    own = [row for row in rows if suite.has(row.entry)]
    first = [row for row in own if row.numbers[suite.name].group == 1]
    if not first:
        return "—"
    best = (min if suite.loss else max)(first, key=lambda row: row.numbers[suite.name].value)
    numbers = best.numbers[suite.name]
    value, low, high = (shown(getattr(numbers, key), suite) for key in ("value", "low", "high"))
    arm = " ".join(best.cells[key].text for key in ("method", "operator"))
    others = f" ({len(first) - 1} alike)" if len(first) > 1 else ""
    return f"{value} [{low}, {high}] [{escaped(arm)}]({links.run(best.entry.folder)}){others}"


def _by_model(table: Table) -> Mapping[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in table.rows:
        found.setdefault(row.cells["model"].visible, []).append(row)
    return found


def _is_score(column: Column, table: Table) -> bool:
    return any(column.key in (s.label, f"{s.label}-loss", f"{s.label}-gain") for s in table.suites)


def _table(columns: Sequence[Column], rows: Iterable[Row], links: Links | None = None) -> str:
    head = [_text(column.title, column.detail) for column in columns]
    body = [[_linked(row, column.key, links) for column in columns] for row in rows]
    align = ["right" if column.numeric else "left" for column in columns]
    return _thin(tabulate.tabulate(body, head, tablefmt="github", disable_numparse=True, colalign=align))


def _thin(table: str) -> str:
    """Without the padding, which a renderer does not need: hundreds of rows are kept in git."""
    return "\n".join(
        re.sub(r" +\|", " |", re.sub(r"\| +", "| ", re.sub("-{4,}", "---", line))) for line in table.splitlines()
    )


def _linked(row: Row, key: str, links: Links | None) -> str:
    cell = row.cells[key]
    if links is not None and key == "run":
        return f"[{escaped(cell.text)}]({links.run(row.entry.folder)})"
    if links is not None and key in ("method", "operator"):
        part = row.entry.record["identity"][key] or {}
        address = links.card(part.get("name", ""))
        if address and not (key == "method" and cell.text == "—"):
            return f"[{escaped(cell.text)}]({address})" + (f" {_detail(cell.detail)}" if cell.detail else "")
    if links is not None and cell.text == "—":
        return "—"  # the site says why
    return _cell(cell)


def _cell(cell: Cell) -> str:
    return _text(cell.text, cell.detail, strong=cell.strong)


def escaped(text: str) -> str:
    """Text that Markdown and its inline HTML show as it is, on one line. A bracket alone makes no link."""
    shown_text = re.sub(r"([\\`*|]|\](?=[(\[:]))", r"\\\1", " ".join(text.split()))
    # An address alone would become a link.
    return html.escape(re.sub(r"(?i)\b(https?|ftp|www)(?=[:.])", r"\1&#8203;", shown_text), quote=False).replace(
        "&amp;#8203;", "&#8203;"
    )


def _text(text: str, detail: str, *, strong: bool = False) -> str:
    """A text with its second part in parentheses; an interval has its brackets already."""
    main = f"**{escaped(text)}**" if strong else escaped(text)
    return f"{main} {_detail(detail)}" if detail else main


def _detail(detail: str) -> str:
    return escaped(detail if detail.startswith("[") else f"({detail})")


def _notes() -> str:
    five = "; ".join(f"{number} {item}" for number, item in enumerate(ITEMS, 1))
    notes = [f"- **{escaped(term)}**: {escaped(meaning)}" for term, meaning in LEGEND]
    return "\n".join([*notes, f"- **reported**: of the five items of 2610.41366 §7, those that are there: {five}."])


def _missing(left_out: Sequence[LeftOut], level: str = "##") -> str:
    lines = "".join(f"- {escaped(str(one))}\n" for one in left_out)
    return f"\n{level} Left out\n\n{lines}" if left_out else ""


_MARKER = "<!-- board {}: made by `prunebench board`, not by hand -->"
_END = "<!-- end of the board -->"


def with_board(path: Path, made: Mapping[str, str]) -> str:
    """A file's text with what stands between its markers put anew.

    Args:
        path: a file with `<!-- board KIND: … -->` and `<!-- end of the board -->`, each in a line of its own.
        made: the Markdown by kind.

    Raises:
        PrerequisiteError: if there is no such file.
        UsageError: without a pair of markers.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PrerequisiteError("cannot read the file", where=str(path), fix=str(error)) from error
    changed = False
    for kind, content in made.items():
        start, end = _MARKER.format(kind), _END
        if start in text:
            before, _, rest = text.partition(start)
            if end not in rest:
                raise UsageError("the board has no end", where=path.name, expected=f"a line {end}")
            text = f"{before}{start}\n\n{content.strip()}\n\n{end}{rest.partition(end)[2]}"
            changed = True
    if not changed:
        raise UsageError(
            "no place for the board", where=path.name, expected=f"{_MARKER.format('|'.join(made))} … {_END}"
        )
    return text
