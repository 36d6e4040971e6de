"""HellaSwag, zero-shot: the likeliest of four endings.

With nine_tasks in the same run, a record holds the MoRA-9 mean, which has it instead of COPA (2610.41366 App. D). Data:
Rowan/hellaswag's validation split, 10,042 items (MIT), or a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prunebench import ChoiceSuite


class HellaSwag(ChoiceSuite):
    """One task."""

    name = "hellaswag"
    version = 1
    tasks = ("hellaswag",)
    headline = (("hellaswag", "none", "acc_norm"),)
    shots = 0

    def document(self, task: str, row: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(row["endings"], list):
            raise TypeError("endings are no list")
        for field in ("activity_label", "ctx_a", "ctx_b"):
            if not isinstance(row[field], str):
                raise TypeError(f"{field} is no text")
        context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
        return {
            "query": cleaned(f"{row['activity_label']}: {context}"),
            "choices": [cleaned(ending) for ending in row["endings"]],
            "label": int(row["label"]),
        }


def cleaned(text: str) -> str:
    """Without the marks that WikiHow's texts carry, as lm-eval does it."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


SUITE = HellaSwag()
