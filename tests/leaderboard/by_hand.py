"""What the page's numbers must be, from the maker's outcomes alone: float64 and the documented random stream."""

from __future__ import annotations

import hashlib
import math
import re
from functools import cache
from itertools import combinations

import numpy as np

from prunebench.record import content_hash

B = 10_000


@cache
def resamples(suite, task, n):
    """The documented stream: PCG64 keyed by seed, suite and task; an index is a 32-bit draw times n, high half."""
    key = hashlib.blake2b(f"0\0{suite}\0{task}".encode(), digest_size=16).digest()
    raw = np.random.PCG64(int.from_bytes(key, "big")).random_raw(B * n // 2)
    return ((raw.astype("<u8").view("<u4").astype(np.uint64) * np.uint64(n)) >> np.uint64(32)).reshape(B, n).astype(int)


@cache
def statistic(maker, spec, suite):
    """A suite's number in the page's units: (on the items, on each resample)."""
    values, draws = [], []
    for task, _, metric, _ in maker.CELLS[suite]:
        by_doc = sorted(range(maker.N), key=lambda number: content_hash(f"doc {task} {number}"))
        outcomes = maker.outcomes(spec, suite, task)[by_doc]
        index = resamples(suite, task, maker.N)
        if metric == "nll":
            weights = maker.weights(task)[by_doc]
            values.append(math.log(math.exp(outcomes.sum() / weights.sum())))
            draws.append(outcomes[index].sum(1) / weights[index].sum(1))
        else:
            values.append(100 * sum(outcomes) / maker.N)
            draws.append(100 * outcomes[index].sum(1) / maker.N)
    return sum(values) / len(values), sum(draws) / len(draws)


def interval(draws):
    """2.5th and 97.5th percentile, linear between order statistics."""
    ordered = sorted(draws.tolist())
    ends = []
    for share in (0.025, 0.975):
        place = share * (len(ordered) - 1)
        below = math.floor(place)
        ends.append(ordered[below] + (place - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below]))
    return ends


@cache
def difference(maker, one, other, suite):
    """(value, draws) of one arm minus another."""
    (a, draws_a), (b, draws_b) = (statistic(maker, spec, suite) for spec in (one, other))
    return a - b, draws_a - draws_b


def side(draws):
    """1 above zero, -1 below, 0 if the interval contains it."""
    low, high = interval(draws)
    return 1 if low > 1e-9 else -1 if high < -1e-9 else 0


def text(value, draws, digits):
    """As the page writes a difference."""
    numbers = [f"{round(number, 12) + 0.0:+.{digits}f}" for number in (value, *interval(draws))]
    value, low, high = (number.replace("-0.00", "+0.00") if float(number) == 0 else number for number in numbers)
    return f"{value} [{low}, {high}]"


class Same(str):
    """A text equal to one of the same words and decimals, to a unit of the last digit: ties round either way."""

    __slots__ = ()
    _NUMBER = re.compile(r"([-+]?\d+\.\d+)")

    def __eq__(self, other):
        mine, theirs = (self._NUMBER.split(str(one)) for one in (self, other))
        if len(mine) != len(theirs) or mine[::2] != theirs[::2]:
            return False
        pairs = list(zip(mine[1::2], theirs[1::2], strict=True))
        return all(abs(float(a) - float(b)) < 1.01 * 10.0 ** -len(a.partition(".")[2]) for a, b in pairs)

    __hash__ = None


def word(draws, claimed):
    """The verdict of a difference that is claimed above (1) or below (-1) zero."""
    return {1: "seen", -1: "reversed", 0: "not detectable"}[side(draws) * claimed]


def digits(suite):
    return 3 if suite == "perplexity" else 2


def better(suite):
    return -1 if suite == "perplexity" else 1


def tally(words, unit):
    """The aggregate of verdicts, in the page's words."""
    order = ("seen", "reversed", "not seen", "not detectable")
    kinds = set(words)
    name = "not seen"
    if {"seen", "reversed"} <= kinds:
        name = "mixed"
    elif "seen" in kinds or "reversed" in kinds:
        main = "seen" if "seen" in kinds else "reversed"
        name = main if kinds == {main} else f"partly {main}"
    counts = [f"{kind} on {words.count(kind)}" for kind in order if kind in kinds]
    counts[0] += f" of {len(words)} {unit}"
    return f"**{name}** ({', '.join(counts)})"


def drift(one, other):
    """Share of pruned experts of one mask that another keeps."""
    gone = [(layer, expert) for layer, ids in one.items() for expert in ids]
    return sum(expert not in other[layer] for layer, expert in gone) / len(gone)


def drifts(first, second):
    """(within the first, within the second, across)."""
    within = [[drift(a, b) for a, b in combinations(group, 2)] for group in (first, second)]
    return (*within, [drift(a, b) for a in first for b in second])


def mean(numbers):
    return sum(numbers) / len(numbers)
