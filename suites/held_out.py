"""Nats per token on blocks of a held-out text, with nats per byte beside them, which compare across tokenizers.

A block is a run of whole lines of at least 4,096 characters (the last one may be shorter), read after one BOS in
windows of at most 2,048 tokens. Data: WikiText-2's validation split, or any file of lines or of rows with a `text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prunebench import Evaluation, Item, TaskSuite, reading_items

CHARACTERS = 4096


class HeldOut(TaskSuite):
    """The blocks of one text."""

    name = "held_out"
    version = 1
    tasks = ("held_out",)
    headline = (("held_out", "none", "nats"),)

    def prepared(self, task: str, rows: Any) -> list[Mapping[str, Any]]:
        return [{"text": block} for block in blocks(row["text"] for row in rows)]

    def document(self, task: str, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"text": str(row["text"])}

    def run(self, evaluation: Evaluation) -> list[Item]:
        """Two rows per block."""
        items = []
        for answer in evaluation.ask(self, "held_out"):
            (score,) = answer.responses
            size = len(str(answer.doc["text"]).encode())
            items += reading_items(answer, {"nats": score.tokens, "nats_per_byte": size}, {"bytes": size})
        return items


def blocks(texts: Iterable[str]) -> Iterator[str]:
    """Lines joined until they are long enough; what is left at the end is a block too, if there is text in it."""
    block = ""
    for text in texts:
        for line in text.removesuffix("\n").split("\n"):
            block += f"{line}\n"
            if len(block) >= CHARACTERS:
                yield block
                block = ""
    if block.strip():
        yield block


SUITE = HeldOut()
