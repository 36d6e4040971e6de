"""Arithmetic word problems in GSM8K's form: a worked answer that ends in `#### n`.

strict wants the `#### n`, flexible takes the last number; both by lm-eval's GSM8K filters and exact match.
"""

from __future__ import annotations

from prunebench import Answer, Evaluation, Generation, Item, Suite

UNPARSED = "[invalid]"
"""What lm-eval's regex filter returns when nothing matches."""


class Arithmetic(Suite):
    """The tiny world's word problems."""

    name = "arithmetic"
    version = 1
    tasks = ("tiny_arithmetic",)
    headline = (("tiny_arithmetic", "strict", "exact_match"),)

    def run(self, evaluation: Evaluation) -> list[Item]:
        """One row per document and filter."""
        return [row for task in self.tasks for answer in evaluation.ask(self, task) for row in rows(answer)]


def rows(answer: Answer) -> list[Item]:
    """exact_match under each filter."""
    (generation,) = answer.responses
    assert isinstance(generation, Generation)
    items = []
    for name, metrics in answer.metrics.items():
        extracted = str(answer.filtered[name])
        detail = {**generation._asdict(), "extracted": None if extracted == UNPARSED else extracted}
        value = float(metrics["exact_match"])
        items.append(answer.item("exact_match", value, state(value, generation, extracted), detail, filter_name=name))
    return items


def state(value: float, generation: Generation, extracted: str) -> str:
    """ok if right; else what is the matter, the most basic first: empty, unparsed (truncated if cut short), wrong."""
    if value:
        return "ok"
    if not generation.text.strip():
        return "empty"
    if extracted == UNPARSED:
        return "truncated" if generation.finish == "length" else "unparsed"
    return "wrong"


SUITE = Arithmetic()
