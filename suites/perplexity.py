"""Perplexity per token on held-out texts; bytes and words are kept beside, for figures that compare tokenizers."""

from __future__ import annotations

import math

from prunebench import Answer, Evaluation, IntegrityError, Item, PassageScore, Suite


class Perplexity(Suite):
    """The tiny world's held-out texts."""

    name = "perplexity"
    version = 1
    tasks = ("tiny_perplexity",)
    headline = (("tiny_perplexity", "none", "nll"),)

    def run(self, evaluation: Evaluation) -> list[Item]:
        """One row per document: its negative log-likelihood in nats, weighted by its tokens."""
        return [row(answer) for task in self.tasks for answer in evaluation.ask(self, task)]


def row(answer: Answer) -> Item:
    """The document's nll.

    Raises:
        IntegrityError: if it is not finite.
    """
    (score,) = answer.responses
    assert isinstance(score, PassageScore)
    if not math.isfinite(score.loglikelihood):
        raise IntegrityError(
            f"the log-likelihood is {score.loglikelihood}",
            where=f"{answer.task}, document {answer.doc['id']}",
            expected="a finite number",
            fix="look for NaN or overflow in the model's logits",
        )
    text = str(answer.doc["text"])
    detail = {"tokens": score.tokens, "bytes": len(text.encode()), "words": len(text.split())}
    return answer.item("nll", -score.loglikelihood, "ok", detail, weight=score.tokens)


SUITE = Perplexity()
