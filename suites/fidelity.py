"""Predictive fidelity: how far a pruned model's next-token distributions are from the unpruned one's.

Per axis, over all tokens of its responses behind their fixed prefixes (2609.30465 §3.1, App. B.2): reverse KL D(q ‖ p)
of pruned q and unpruned p, the change of the tokens' NLL, and relative excess perplexity exp(ΔNLL) − 1. The suite's
number weighs axes equally. Axes that a calibration covers and those held out from it are told apart by the filter.
Intervals resample an axis's batches, six equal runs of its documents (App. E.2), the same ones for all arms.

Data: a file of rows `axis`, `covered` (true or false), and `context` and `continuation`, or `messages` (role and
content) that end on the assistant, for the tokenizer's chat template: every assistant turn is scored behind what is
before it, without role headers and terminators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prunebench import Evaluation, Item, PairSuite, divergence_items


class Fidelity(PairSuite):
    """Whatever axes the data have."""

    name = "fidelity"
    version = 1
    metrics = ("reverse_kl", "delta_nll", "excess_ppl")
    needs_dense = True

    def document(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(row["covered"], bool):
            raise TypeError(f"covered is {row['covered']!r}, expected true or false")
        chat = "messages" in row
        texts = {} if chat else {field: row[field] for field in ("context", "continuation")}
        said = [message[part] for message in row["messages"] for part in ("role", "content")] if chat else []
        for text in (row["axis"], *texts.values(), *said):
            if not isinstance(text, str):
                raise TypeError(f"{text!r} is no text")
        if not row["axis"]:
            raise ValueError("the axis has no name")
        return {"axis": row["axis"], "covered": row["covered"], **({"messages": row["messages"]} if chat else texts)}

    def run(self, evaluation: Evaluation) -> list[Item]:
        """Three rows per document."""
        return divergence_items(self, evaluation)


SUITE = Fidelity()
