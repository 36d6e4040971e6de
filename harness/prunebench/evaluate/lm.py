"""Our engine as an lm-eval model, for lm-eval's own `simple_evaluate`.

Suites do not need it (`tasks.ask` keeps finish reasons and token counts); it lets anybody run any lm-eval task on a
pruned model, and lets the tests hold our pipeline against that of lm-eval.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.model import LM

from prunebench.evaluate.engine import Evaluation
from prunebench.evaluate.tasks import as_lm_eval, respond

__all__ = ["EngineLM"]


class EngineLM(LM):  # type: ignore[misc]
    """An lm-eval `LM` that answers with an `Evaluation`; its `limit` is lm-eval's business here."""

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__()
        self.evaluation = evaluation

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of each (context, continuation)."""
        return [as_lm_eval(response) for response in respond(self.evaluation, requests, "loglikelihood")]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Log-likelihood of each text."""
        return [as_lm_eval(response) for response in respond(self.evaluation, requests, "loglikelihood_rolling")]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Greedy continuation of each (context, settings)."""
        return [as_lm_eval(response) for response in respond(self.evaluation, requests, "generate_until")]
