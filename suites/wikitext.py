"""WikiText-2 in windows of 2,048 tokens: lm-eval's word perplexity, with perplexity per token and per byte beside it.

A page is read as lm-eval's wikitext task reads it: its tokenisation undone, one BOS before it, disjoint windows; words
and bytes are counted before that is undone. Data: Salesforce/wikitext's lines, cut into pages at their titles, a file
of those, or a file or data set of rows that are a `page` each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from prunebench import Evaluation, Item, TaskSuite, reading_items

_REPLACED = (
    *(("s '", "s'"), (r"/' [0-9]/", r"/'[0-9]/"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" : ", ": ")),
    *((" ; ", "; "), (" . ", ". "), (" ! ", "! "), (" ? ", "? "), (" , ", ", ")),
    *((r"\(\s*([^\)]*?)\s*\)", r"(\1)"), (r"\[\s*([^\]]*?)\s*\]", r"[\1]"), (r"{\s*([^}]*?)\s*}", r"{\1}")),
    *((r"\"\s*([^\"]*?)\s*\"", r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'")),
    *(("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (f" {chr(176)} ", chr(176))),
    *((" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
)
"""lm-eval's rules in its order; those with a backslash or a bracket of digits are patterns."""


class WikiText(TaskSuite):
    """The pages of the test split."""

    name = "wikitext"
    version = 1
    tasks = ("wikitext",)
    headline = (("wikitext", "none", "word_nll"),)

    def prepared(self, task: str, rows: Any) -> list[Mapping[str, Any]]:
        return list(rows) if "page" in rows[0] else [{"page": page} for page in pages(row["text"] for row in rows)]

    def document(self, task: str, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"page": str(row["page"]), "text": detokenized(str(row["page"]))}

    def run(self, evaluation: Evaluation) -> list[Item]:
        """Three rows per page: its nats by words, by bytes and by tokens."""
        items = []
        for answer in evaluation.ask(self, "wikitext"):
            page = str(answer.doc["page"])
            words, size = len(re.split(r"\s+", page)), len(page.encode())
            (score,) = answer.responses
            weights = {"word_nll": words, "byte_nll": size, "nll": score.tokens}
            items += reading_items(answer, weights, {"words": words, "bytes": size})
        return items


def pages(lines: Iterator[str]) -> Iterator[str]:
    """Lines as pages: one begins at a title of the first order, `= Title =`."""
    page: list[str] = []
    for ended in lines:
        line = ended.removesuffix("\n")
        mark = line.replace("= = =", "===").replace("= =", "==").strip()
        if mark.startswith("= ") and mark.endswith(" =") and page:
            if "".join(page).strip():
                yield "\n".join(page)
            page = []
        page.append(line)
    if "".join(page).strip():
        yield "\n".join(page)


def detokenized(page: str) -> str:
    """A page as it is read, as lm-eval does it."""
    for old, new in _REPLACED:
        pattern = "\\" in old or "[0-9]" in old or old.startswith("{")
        page = re.sub(old, new, page) if pattern else page.replace(old, new)
    return page


SUITE = WikiText()
