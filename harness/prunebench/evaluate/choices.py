"""Choice tasks: the rows of an answer, and suites that ask nothing else."""

from __future__ import annotations

from typing import Any

from prunebench.analysis.deciding import is_tie, predicted, rounded
from prunebench.evaluate.engine import Evaluation, Score
from prunebench.evaluate.sources import TaskSuite
from prunebench.evaluate.tasks import Answer, common_detail
from prunebench.record import Item

__all__ = ["ChoiceSuite", "choice_items"]


def choice_items(answer: Answer) -> list[Item]:
    """One row per metric of the task's file, by lm-eval's rules.

    The prediction is made from the log-likelihoods as they are stored. If one of them is not finite, the item is
    invalid and counts as wrong; it is never a choice.
    """
    scores = [score for score in answer.responses if isinstance(score, Score)]
    loglikelihoods = [rounded(score.loglikelihood) for score in scores]
    finite = [one for one in loglikelihoods if one is not None]
    gold = int(answer.target)
    lengths = {
        "characters": [len(choice) for choice in answer.choices],
        "bytes": [len(choice.encode()) for choice in answer.choices],
    }
    detail: dict[str, Any] = {
        "loglikelihoods": loglikelihoods,
        "greedy": [score.is_greedy for score in scores],
        **lengths,
        "tokens": [score.tokens for score in scores],
        "gold": gold,
        **common_detail(answer),
    }
    if any(score.spans for score in scores):
        detail["spans"] = [score.spans for score in scores]
    valid = len(finite) == len(loglikelihoods)
    if valid and is_tie(finite):
        detail["tie"] = True
    items = []
    for metric in answer.metrics["none"]:
        prediction = predicted(finite, lengths["characters"] if metric == "acc_norm" else None) if valid else None
        value = float(prediction == gold)
        state = ("ok" if value else "wrong") if valid else "invalid"
        items.append(answer.item(metric, value, state, {**detail, "prediction": prediction}))
    return items


class ChoiceSuite(TaskSuite):
    """A suite of choice tasks."""

    def run(self, evaluation: Evaluation) -> list[Item]:
        """One row per document and metric."""
        return [row for task in self.tasks for answer in evaluation.ask(self, task) for row in choice_items(answer)]
