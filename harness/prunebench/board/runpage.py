"""A run's own page: what it reports, its numbers, its mask layer by layer, its checks, bytes and origin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from prunebench.analysis.shares import Share
from prunebench.board.html import cell_html, page, text_html
from prunebench.board.scoring import Difference
from prunebench.board.table import Row, SuiteColumn, Table, shown, shown_difference
from prunebench.mask import canonical_json

__all__ = ["mask_map", "run_page", "simple_table"]

_CELL: Final = 12  # pixels of an expert in a mask map
_WIDE: Final = 64  # experts in a line of a mask map


def run_page(row: Row, table: Table, cards: Iterable[str]) -> str:
    """The page of one run."""
    entry, record = row.entry, row.entry.record
    arm = record["arm"]
    name = " ".join(str(part) for part in (arm["model"], arm["mask"] or "dense", arm["operator"] or "") if part)
    parts = [
        f"<h1>{text_html(name)}</h1>",
        (
            f'<p class="lead">Run {entry.id} in {text_html(entry.folder)}: '
            f'<a href="../records/{entry.id}.json">its record</a>{_cards(record["identity"], set(cards))}.</p>'
        ),
        _facts(row, table),
        _five(row),
        f"<h2>Scores</h2>\n{_scores(row, table)}",
        _mask(record),
        _routing(record["routing"]),
        f"<h2>Integrity</h2>\n{simple_table(('check', 'status', 'detail'), _checks(record))}",
        f"<h2>Stored bytes</h2>\n{simple_table(('part', 'bytes'), _bytes(record['storage']), numeric=(1,))}",
        f"<h2>Identity</h2>\n{_pairs(record['identity'])}",
        f"<h2>Origin</h2>\n{_pairs({**record['provenance'], **record['volatile']})}",
    ]
    return page(f"{name}: run {entry.id}", "\n".join(filter(None, parts)), up="../")


def simple_table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already, in a frame that scrolls."""
    kinds = [' class="n"' if at in numeric else "" for at in range(len(head))]
    top = "".join(f'<th scope="col"{kind}>{text_html(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )


def _cards(identity: Mapping[str, Any], cards: set[str]) -> str:
    stated = ((identity[key] or {}).get("name") for key in ("method", "operator"))
    names = dict.fromkeys(name for name in stated if isinstance(name, str))
    links = [f'<a href="../methods/{name}.html">card of {name}</a>' for name in names if name in cards]
    return "".join(f", {link}" for link in links)


def _facts(row: Row, table: Table) -> str:
    named = {column.key: column.title for column in table.columns}
    keys = ("model", "method", "operator", "scale", "convention", "ratio", "calibration", "fit", "stored", "rerouted")
    pairs = [(named[key], row.cells[key]) for key in keys]
    inner = "".join(f"<dt>{text_html(name)}</dt><dd>{cell_html(cell.text, cell.detail)}</dd>" for name, cell in pairs)
    return f'<dl class="facts">{inner}</dl>'


def _five(row: Row) -> str:
    if not row.reported:
        return ""
    items = "".join(
        f"<li><b>{text_html(one.item)}</b>: "
        + (text_html(one.text) if one.text else '<span class="missing">missing</span>')
        + "</li>"
        for one in row.reported
    )
    return f"<h2>Reported (2610.41366 §7)</h2>\n<ol>{items}</ol>"


def _scores(row: Row, table: Table) -> str:
    rows = []
    for suite in table.suites:
        if not suite.has(row.entry):
            rows.append([text_html(suite.label), "—<small>not run</small>", "", "", "", "", ""])
            continue
        numbers = row.numbers[suite.name]
        value, low, high = (shown(getattr(numbers, key), suite) for key in ("value", "low", "high"))
        rows.append(
            [
                text_html(suite.label),
                cell_html(value, f"[{low}, {high}]"),
                str(numbers.n),
                difference_html(numbers.dense, suite),
                difference_html(numbers.constant, suite),
                share_html(numbers.recovered),
                str(numbers.group or "—"),
            ]
        )
    head = ("suite", "score [95 % CI]", "n", "− dense", "− constant", "damage recovered", "group")
    tasks = [
        [text_html(name), *(f"{numbers[key]:.4g}" for key in ("value", "low", "high")), str(numbers["n"])]
        for name, numbers in sorted(row.entry.record["metrics"].items())
        if "/" in name
    ]
    own = simple_table(("task / filter / metric", "value", "low", "high", "n"), tasks, numeric=(1, 2, 3, 4))
    numeric = (1, 2, 3, 4, 5, 6)
    return f"{simple_table(head, rows, numeric)}\n<details><summary>Every task</summary>{own}</details>"


def difference_html(difference: Difference | str, suite: SuiteColumn) -> str:
    """A difference with its interval, or why there is none."""
    if isinstance(difference, str):
        return cell_html("—", difference)
    value, low, high = (shown_difference(getattr(difference, key), suite) for key in ("value", "low", "high"))
    mark = "" if difference.mark == "*" else difference.mark
    return cell_html(value + mark, f"[{low}, {high}]", strong=difference.excludes_zero)


def share_html(share: Share | None) -> str:
    """A share of damage in percent, or a dash."""
    if share is None or share.value is None:
        return cell_html("—", "" if share is None else "no damage to recover")
    ends = "" if share.low is None or share.high is None else f"[{100 * share.low:z.0f}, {100 * share.high:z.0f}]"
    return cell_html(f"{100 * share.value:z.0f} %", ends)


def _mask(record: Mapping[str, Any]) -> str:
    mask = record["mask"]
    if mask is None:
        return ""
    rows = []
    for layer in mask["layers"]:
        gone = ", ".join(map(str, layer["pruned"])) or "none"
        count = f"{len(layer['pruned'])} of {layer['E']}"
        label = f"Layer {layer['index']}: {count} experts pruned: {gone}"
        rows.append([str(layer["index"]), mask_map(layer["E"], layer["pruned"], label), count])
    head = ("layer", "experts by original id (filled: pruned)", "pruned")
    return f"<h2>Mask</h2>\n<p>Digest {text_html(mask['digest'])}.</p>\n{simple_table(head, rows)}"


def mask_map(experts: int, pruned: Sequence[int], label: str) -> str:
    """A layer's experts as squares, in lines of 64; pruned ones are filled, so that it shows without colour."""
    lines = -(-experts // _WIDE)
    width, height = min(experts, _WIDE) * _CELL, lines * _CELL
    gone = set(pruned)
    cells = []
    for expert in range(experts):
        x, y = expert % _WIDE * _CELL, expert // _WIDE * _CELL
        if expert in gone:
            cells.append(f'<path class="gone" d="M{x + 1} {y + 1}h{_CELL - 2}v{_CELL - 2}h-{_CELL - 2}z"/>')
        else:
            cells.append(f'<path class="kept" d="M{x + 1.5} {y + 1.5}h{_CELL - 3}v{_CELL - 3}h-{_CELL - 3}z"/>')
    title = f"<title>{text_html(label)}</title>"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg class="mask" role="img" {size}>{title}{"".join(cells)}</svg>'


def _routing(routing: Mapping[str, Any]) -> str:
    layers = routing.get("layers", {})
    if not layers:
        return ""
    keys = sorted({key for layer in layers.values() for key in layer})
    rows = [
        [text_html(index), *(_count_or_share(layer[key]) if key in layer else "—" for key in keys)]
        for index, layer in layers.items()
    ]
    table = simple_table(("layer", *(key.replace("_", " ") for key in keys)), rows, numeric=range(1, len(keys) + 1))
    return f"<h2>Routing</h2>\n{table}"


def _count_or_share(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _checks(record: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    for entry in record["integrity"]:
        yield [
            text_html(entry["check"]),
            cell_html(entry["status"], strong=entry["status"] == "fail"),
            text_html(entry["detail"]),
        ]


def _bytes(storage: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    for part, size in storage["parts"].items():
        yield [text_html(part), f"{size:,}"]
    yield ["<b>total</b>", f"<b>{storage['total']:,}</b>"]


def _pairs(data: Mapping[str, Any]) -> str:
    rows = (
        f"<dt>{text_html(key)}</dt><dd><code>{text_html(_said(value))}</code></dd>"
        for key, value in sorted(data.items())
    )
    return f'<dl class="facts">{"".join(rows)}</dl>'


def _said(value: object) -> str:
    return value if isinstance(value, str) else canonical_json(value)
