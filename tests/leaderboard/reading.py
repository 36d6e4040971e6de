"""A page of Markdown as tables."""

from __future__ import annotations

import re


def tables(text):
    """Every table: its rows of cells, the head first."""
    blocks = re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE)
    rows = [[line.strip().strip("|").split("|") for line in block.strip().split("\n")] for block in blocks]
    return [[[cell.strip() for cell in row] for number, row in enumerate(table) if number != 1] for table in rows]


def sections(page, same):
    """By number, the tables of a section: each (ratio, row title) -> cells, or plain rows where there is no ratio."""
    parts = re.split(r"^## (\d+)\. .*$", page, flags=re.MULTILINE)
    return {int(parts[at]): [_rows(table, same) for table in tables(parts[at + 1])] for at in range(1, len(parts), 2)}


def _rows(table, same):
    if table[0][0] != "pruned" or table[0][1] == "pair":
        return table[1:]
    return {(row[0].strip("*"), row[1].strip("*")): [same(text) for text in row[2:]] for row in table[1:]}
