"""Sampled generations: how diverse, how long, how they end (2609.30465 App. E.5 and E.6).

Diversity is computed per question over its samples and averaged over questions; rates are over all completions. Every
interval resamples questions, so that samples of one prompt stay together, and speaks of these very generations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np

from prunebench.analysis.bootstrap import RESAMPLES, SEED, Sampled, item_counts, sampled
from prunebench.analysis.metrics import paired_order
from prunebench.errors import UsageError
from prunebench.record import ItemTable

__all__ = [
    "LOOP_ORDER",
    "LOOP_SHARE",
    "Completion",
    "Questions",
    "distinct",
    "fenced",
    "jaccard_distance",
    "loop_share",
    "loops",
    "median",
    "question_mean",
    "questions_of",
    "rate",
    "relative_change",
    "stray_delimiter",
]

LOOP_ORDER: Final = 4
LOOP_SHARE: Final = 0.25

Gram = tuple[Hashable, ...]


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    Args:
        tokens: in the model family's own tokens, without prompt and padding.
        finish: why it ended, as the decoder says; "length" at the limit.
        text: as decoded.
    """

    tokens: tuple[Hashable, ...]
    finish: str
    text: str = ""

    @property
    def limited(self) -> bool:
        """Whether it ended at the length limit."""
        return self.finish == "length"

    def prefix(self, length: int) -> Completion:
        """The first tokens only, to compare diversity at one length."""
        return Completion(self.tokens[:length], self.finish, self.text)


Questions = Sequence[Sequence[Completion]]
"""The completions of each question; in the same order for runs that are to be paired."""


def questions_of(rows: ItemTable, tokenize: Callable[[str], Sequence[Hashable]]) -> list[list[Completion]]:
    """The generations of one cell's rows, those of one document together, in paired order.

    Args:
        rows: whose details have `text` and `finish`.
        tokenize: the model family's own tokenizer; records keep texts, not tokens.

    Raises:
        UsageError: for a row without them.
    """
    rows = paired_order(rows)
    found: dict[int, list[Completion]] = {}
    for doc, item, detail in zip(rows.doc_hash.tolist(), rows.item, rows.detail, strict=True):
        stated = json.loads(str(detail))
        if not (isinstance(stated, dict) and isinstance(stated.get("text"), str) and "finish" in stated):
            raise UsageError("an item without its generation", where=f"item {item}", expected="text and finish")
        text = stated["text"]
        found.setdefault(doc, []).append(Completion(tuple(tokenize(text)), str(stated["finish"]), text))
    return list(found.values())


def stray_delimiter(completion: Completion) -> bool:
    """Whether the text closes a thinking block at least once, which its prompt had closed already."""
    return "</think>" in completion.text


def fenced(completion: Completion) -> bool:
    """Whether some line opens or closes a code fence."""
    return any(line.lstrip().startswith("```") for line in completion.text.splitlines())


def grams(tokens: Sequence[Hashable], n: int) -> list[Gram]:
    """All n-grams of one response."""
    return [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]


def distinct(completions: Sequence[Completion], n: int) -> float:
    """Distinct-n of one question: different n-grams over all of them, pooled over its samples, none across two.

    Raises:
        UsageError: if no sample has n tokens.
    """
    pooled = [gram for one in completions for gram in grams(one.tokens, n)]
    if not pooled:
        raise UsageError(f"no sample has {n} tokens", expected="longer samples", fix="leave the question out")
    return len(set(pooled)) / len(pooled)


def jaccard_distance(completions: Sequence[Completion], n: int = 4) -> float:
    """Mean over pairs of samples of 1 − |G_i ∩ G_j| / |G_i ∪ G_j|, G the set of n-grams; two empty sets are equal.

    Raises:
        UsageError: for fewer than two samples.
    """
    sets = [set(grams(one.tokens, n)) for one in completions]
    if len(sets) < 2:
        raise UsageError(f"{len(sets)} sample of a question", expected="at least two to compare")
    pairs = [1 - len(a & b) / len(a | b) if a | b else 0.0 for a, b in combinations(sets, 2)]
    return float(np.mean(pairs))


def loops(completion: Completion) -> bool:
    """Whether fewer than a quarter of the token 4-grams are different; too short a response does not loop."""
    own = grams(completion.tokens, LOOP_ORDER)
    return bool(own) and len(set(own)) / len(own) < LOOP_SHARE


def question_mean(questions: Questions, metric: Callable[[Sequence[Completion]], float], **how: Any) -> Sampled:
    """A per-question metric averaged over questions; `how` is the key of `bootstrap.sampled`."""
    return sampled([metric(own) for own in questions], **how)


def relative_change(run: Sampled, reference: Sampled) -> Sampled:
    """100 (M / M_reference − 1), paired over questions."""
    ratio = run.over(reference)
    return Sampled(100 * (ratio.value - 1), 100 * (ratio.draws_B - 1), ratio.n)


def rate(questions: Questions, event: Callable[[Completion], float], **how: Any) -> Sampled:
    """The mean of something over all completions, such as length or ending at the limit; questions are resampled."""
    values = [event(one) for own in questions for one in own]
    clusters = [at for at, own in enumerate(questions) for _ in own]
    return sampled(values, clusters=clusters, **how)


def median(questions: Questions, number: Callable[[Completion], float], **how: Any) -> Sampled:
    """The median of something over all completions, such as their length; questions are resampled."""
    values = np.array([number(one) for own in questions for one in own], dtype=np.float64)
    clusters = np.array([at for at, own in enumerate(questions) for _ in own])
    order = np.argsort(values, kind="stable")

    def of(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        below = np.cumsum(counts[:, order], axis=1, dtype=np.int64)
        middle = [(below <= at[:, None]).sum(axis=1) for at in ((below[:, -1] - 1) // 2, below[:, -1] // 2)]
        return np.asarray((values[order][middle[0]] + values[order][middle[1]]) / 2)

    draws = np.concatenate([of(counts) for counts in item_counts(clusters, **how)])
    return Sampled(float(of(np.ones((1, len(values)), dtype=np.int64))[0]), draws, len(values))


def loop_share(
    questions: Questions, *, suite: str = "", task: str = "", seed: int = SEED, resamples: int = RESAMPLES
) -> Sampled:
    """The share of completions at the length limit that loop; 0 on a resample without any at the limit.

    Raises:
        UsageError: if none is at the limit.
    """
    limited = np.array([sum(one.limited for one in own) for own in questions], dtype=np.float64)
    looping = np.array([sum(one.limited and loops(one) for one in own) for own in questions], dtype=np.float64)
    if not limited.sum():
        raise UsageError("no completion ended at the length limit", where=f"{suite}/{task}", expected="at least one")
    key: dict[str, Any] = {"suite": suite, "task": task, "seed": seed, "resamples": resamples}
    blocks = [counts.astype(np.float64) for counts in item_counts(np.arange(len(limited)), **key)]
    draws = np.concatenate([counts @ looping / np.maximum(counts @ limited, 1) for counts in blocks])
    return Sampled(float(looping.sum() / limited.sum()), draws, int(limited.sum()))
