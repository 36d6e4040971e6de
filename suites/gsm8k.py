"""GSM8K with five examples: lm-eval's strict and flexible match, and a numeric one.

strict-match wants `#### n`, flexible-extract takes the last number; both are lm-eval's own filters and exact match.
numeric compares values: the first number behind the first `####`, or else the last one, without currency, grouping and
trailing zeros. Where it decides otherwise than lm-eval, its row says what lm-eval decided. Data: openai/gsm8k (MIT), or
files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prunebench import UNPARSED, Answer, Evaluation, Generation, Item, TaskSuite, common_detail, numeric_answer


class Gsm8k(TaskSuite):
    """The 1,319 problems of the test split."""

    name = "gsm8k"
    version = 1
    tasks = ("gsm8k",)
    headline = (("gsm8k", "strict-match", "exact_match"),)
    shots = 5

    def document(self, task: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
        document = super().document(task, row)
        if document["answer"] is not None and numeric_answer(document["answer"]) is None:
            raise ValueError("the answer holds no number")
        return document

    def run(self, evaluation: Evaluation) -> list[Item]:
        """Three rows per generation."""
        return [row for task in self.tasks for answer in evaluation.ask(self, task) for row in rows(answer)]


def rows(answer: Answer) -> list[Item]:
    """exact_match under lm-eval's two filters and by value."""
    (generation,) = answer.responses
    assert isinstance(generation, Generation)
    common = {**generation._asdict(), "target": answer.target, **common_detail(answer)}
    verdicts = {name: float(metrics["exact_match"]) for name, metrics in answer.metrics.items()}
    items = []
    for name, value in verdicts.items():
        found = str(answer.filtered[name])
        extracted = None if found == UNPARSED else found
        items.append(row(answer, name, value, {**common, "extracted": extracted}))
    number, gold = numeric_answer(generation.text), numeric_answer(answer.target)
    value = float(number is not None and number == gold)
    others = {name: verdict for name, verdict in verdicts.items() if verdict != value}
    beside = {"lm_eval": others} if others else {}
    extracted = None if number is None else f"{number:f}"
    return [*items, row(answer, "numeric", value, {**common, "extracted": extracted, **beside})]


def row(answer: Answer, name: str, value: float, detail: dict[str, Any]) -> Item:
    """One reading of a generation; none of an invalid one is right."""
    value = 0.0 if detail["finish"] == "invalid" else value
    return answer.item("exact_match", value, state(value, detail), detail, filter_name=name)


def state(value: float, detail: dict[str, Any]) -> str:
    """ok, or what is the matter, the most basic first: invalid, empty, unparsed (truncated if cut short), wrong."""
    if value:
        return "ok"
    if detail["finish"] == "invalid":
        return "invalid"
    if not str(detail["text"]).strip():
        return "empty"
    if detail["extracted"] is None:
        return "truncated" if detail["finish"] == "length" else "unparsed"
    return "wrong"


SUITE = Gsm8k()
