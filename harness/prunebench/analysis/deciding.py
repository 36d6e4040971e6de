"""Reading answers, without a model: predictions from log-likelihoods, numbers from texts.

Suites decide by these functions and by lm-eval's own filters; `recompute` decides again from what a record stores.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

__all__ = [
    "PLACES",
    "UNPARSED",
    "first_match",
    "flexible_answer",
    "is_tie",
    "last_match",
    "lm_eval_exact_match",
    "numeric_answer",
    "predicted",
    "rounded",
    "strict_answer",
]

PLACES: Final = 6
"""Decimals of a stored log-likelihood. Predictions are made from the stored numbers, so that they can be made again."""

UNPARSED: Final = "[invalid]"
"""What lm-eval's regex filter returns when nothing matches."""


def predicted(loglikelihoods: Sequence[float], lengths: Sequence[int] | None = None) -> int:
    """The choice of highest log-likelihood, or of highest one per unit of length; the first of several, as lm-eval's.

    Args:
        loglikelihoods: one per choice, finite.
        lengths: in characters or bytes; None to leave them aside.
    """
    scores = list(loglikelihoods) if lengths is None else [a / b for a, b in zip(loglikelihoods, lengths, strict=True)]
    return scores.index(max(scores))


def is_tie(loglikelihoods: Sequence[float]) -> bool:
    """Whether two choices share the highest log-likelihood, as it is stored."""
    return sorted(loglikelihoods)[-2:].count(max(loglikelihoods)) > 1


# --- GSM8K

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")

# A sign counts where it cannot be a minus between two numbers; commas group digits by three.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]])[-+−]\s?)?(?:\$\s?)?(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)"
)


def first_match(pattern: re.Pattern[str], text: str) -> str:
    """What lm-eval's regex filter takes by default."""
    found = pattern.findall(text)
    return _group(found[0]) if found else UNPARSED


def last_match(pattern: re.Pattern[str], text: str) -> str:
    """What it takes with `group_select: -1`."""
    found = pattern.findall(text)
    return _group(found[-1]) if found else UNPARSED


def _group(found: str | tuple[str, ...]) -> str:
    if isinstance(found, tuple):
        filled = [part for part in found if part]
        found = filled[0] if filled else UNPARSED
    return found.strip()


def strict_answer(text: str) -> str:
    """GSM8K's strict match: the number behind the first `####`."""
    return first_match(_STRICT, text)


def flexible_answer(text: str) -> str:
    """GSM8K's flexible match: the last number."""
    return last_match(_FLEXIBLE, text)


def lm_eval_exact_match(answer: str, reference: str) -> float:
    """lm-eval's exact_match with GSM8K's settings: case and `_IGNORED` aside."""

    def plain(text: str) -> str:
        for pattern in _IGNORED:
            text = re.sub(pattern, "", text)
        return text.lower()

    return float(plain(answer) == plain(reference))


def numeric_answer(text: str) -> Decimal | None:
    """The number that a solution gives: the first one behind the first `####`, if any is there, else the last.

    `$29.00` is 29, `29.` is 29, `1,234` is 1234, `+3` is 3; what follows the answer, such as another problem, does not
    count.
    """
    head, marker, rest = text.partition("####")
    if marker and (found := _NUMBER.search(rest)):
        return _value(found)
    numbers = list(_NUMBER.finditer(head if marker else text))
    return _value(numbers[-1]) if numbers else None


def _value(found: re.Match[str]) -> Decimal:
    number = Decimal(found["digits"].replace(",", ""))
    return -number if (found["sign"] or "")[:1] in {"-", "−"} and number else number


def rounded(value: float) -> float | None:
    """A log-likelihood as it is stored; None if it is not finite."""
    return round(value, PLACES) if math.isfinite(value) else None
