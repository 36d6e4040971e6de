"""Texts that are read: the rows of a passage's log-likelihood."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from prunebench.errors import IntegrityError
from prunebench.evaluate.engine import PassageScore
from prunebench.evaluate.tasks import Answer, common_detail
from prunebench.record import Item

__all__ = ["finite_or_stop", "reading_items"]


def reading_items(answer: Answer, weights: Mapping[str, int], detail: Mapping[str, Any]) -> list[Item]:
    """One row per metric: the passage's nats, to be divided by the metric's weight.

    Args:
        answer: to a passage.
        weights: of each metric: tokens for `nll`, words for `word_nll`, bytes for `byte_nll`, ….
        detail: what else is stored.

    Raises:
        IntegrityError: if the log-likelihood is not finite: a perplexity without one of its texts would be another one.
    """
    (score,) = answer.responses
    assert isinstance(score, PassageScore)
    (nats,) = finite_or_stop([-score.loglikelihood], f"{answer.task}, document {answer.doc['id']}")
    stated = {"tokens": score.tokens, "loglikelihood": score.loglikelihood, **common_detail(answer), **detail}
    return [answer.item(metric, nats, "ok", stated, weight=weight) for metric, weight in weights.items()]


def finite_or_stop(values: Sequence[float], where: str) -> Sequence[float]:
    """The values, if all are finite.

    Raises:
        IntegrityError: else.
    """
    for value in values:
        if not math.isfinite(value):
            raise IntegrityError(
                f"the log-likelihood is {-value}",
                where=where,
                expected="a finite number",
                fix="look for NaN or overflow in the model's logits",
            )
    return values
