"""Multiple choice: recalled facts, a yes/no question on a text, and the likelier continuation.

acc takes the choice of highest log-likelihood, acc_norm that of highest log-likelihood per character; lm-eval's rules.
"""

from __future__ import annotations

import math

from prunebench import Answer, Evaluation, Item, Score, Suite


class MultipleChoice(Suite):
    """The tiny world's three choice tasks."""

    name = "multiple_choice"
    version = 1
    tasks = ("tiny_recall", "tiny_yes_no", "tiny_continuation")
    headline = tuple((task, "none", "acc") for task in tasks)

    def run(self, evaluation: Evaluation) -> list[Item]:
        """Two rows per document: acc and acc_norm."""
        return [row for task in self.tasks for answer in evaluation.ask(self, task) for row in rows(answer)]


def rows(answer: Answer) -> list[Item]:
    """acc and acc_norm; an answer with a log-likelihood that is not finite is an error and never a choice."""
    scores = [score for score in answer.responses if isinstance(score, Score)]
    finite = all(math.isfinite(score.loglikelihood) for score in scores)
    detail = {
        "loglikelihoods": [round(s.loglikelihood, 6) if math.isfinite(s.loglikelihood) else None for s in scores],
        "greedy": [score.is_greedy for score in scores],
        "characters": [len(choice) for choice in answer.doc["choices"]],
        "bytes": [len(choice.encode()) for choice in answer.doc["choices"]],
        "tokens": [score.tokens for score in scores],
        "gold": answer.doc["label"],
    }
    items = []
    for metric in ("acc", "acc_norm"):
        value = float(answer.metrics["none"][metric]) if finite else 0.0
        state = ("ok" if value else "wrong") if finite else "error"
        items.append(answer.item(metric, value, state, detail))
    return items


SUITE = MultipleChoice()
