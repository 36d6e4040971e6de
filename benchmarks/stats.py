"""What a paper's tests cost: 111 contrasts over the nine tasks, corrected, against a loop that resamples each anew.

    python benchmarks/stats.py [--contrasts N] [--arms N] [--resamples B] [--loop N] [--limits]

Simulated right and wrong answers to the nine tasks (24,842 items). The one way scores every arm once on shared
resamples and takes contrasts and interactions from its draws; the other draws and sums for each contrast anew. Both
give the same numbers, which is checked. One thread, CPU seconds; peak is resident memory above what Python and numpy
take. `--limits` fails above 20 CPU seconds or 2 GB.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from prunebench.analysis.bootstrap import Sampled, sampled
from prunebench.analysis.multiplicity import holm
from prunebench.analysis.resolution import equivalence_bound, minimum_detectable
from prunebench.analysis.scores import Stratum, suite_scores
from prunebench.analysis.shares import NINE_TASKS

SECONDS, GIGABYTES = 20.0, 2.0
SUITE = "nine"


def simulated(arms: int) -> dict[str, np.ndarray[Any, Any]]:
    """Right and wrong answers per task, (N, A): items of differing difficulty, arms of differing skill."""
    rng = np.random.default_rng(0)
    skill_A = rng.uniform(-0.15, 0.15, arms)
    return {
        task: (rng.random((n, arms)) < np.clip(rng.random((n, 1)) + skill_A, 0, 1)).astype(np.float64)
        for task, n in NINE_TASKS.items()
    }


def chosen(contrasts: int, arms: int) -> np.ndarray[Any, Any]:
    """Weights of arms, (C, A): plain differences, and every fourth a difference of differences."""
    rng = np.random.default_rng(1)
    weights_CA = np.zeros((contrasts, arms))
    for number, own in enumerate(weights_CA):
        a, b, c, d = rng.choice(arms, 4, replace=False)
        own[[a, b]] = 1, -1
        if number % 4 == 3:
            own[[c, d]] = -1, 1
    return weights_CA


def together(tasks: dict[str, Any], weights_CA: np.ndarray[Any, Any], resamples: int) -> list[Sampled]:
    """Every arm scored once, contrasts from its draws."""
    strata = {(task, "none", "acc"): Stratum(values_NA) for task, values_NA in tasks.items()}
    scores = suite_scores(strata, SUITE, resamples=resamples)
    return [_weighed(scores, own) for own in weights_CA]


def _weighed(scores: list[Sampled], own: np.ndarray[Any, Any]) -> Sampled:
    parts = [(weight, scores[at]) for at, weight in enumerate(own) if weight]
    draws_B = np.sum([weight * part.draws_B for weight, part in parts], axis=0)
    return Sampled(sum(weight * part.value for weight, part in parts), draws_B, parts[0][1].n)


def one_by_one(tasks: dict[str, Any], weights_CA: np.ndarray[Any, Any], resamples: int) -> list[Sampled]:
    """The items of each contrast, resampled for it alone."""
    found = []
    for own in weights_CA:
        parts = [
            sampled(values_NA @ own, suite=SUITE, task=task, resamples=resamples) for task, values_NA in tasks.items()
        ]
        found.append(Sampled.macro_mean(parts).times(100.0))
    return found


def judged(contrasts: list[Sampled]) -> list[float]:
    """All that a table shows of contrasts; returns the adjusted p."""
    for one in contrasts:
        one.interval()
        equivalence_bound(one)
        minimum_detectable(one)
    return list(holm([one.p_value() for one in contrasts]))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """A result and its CPU seconds."""
    start = time.process_time()
    return work(), time.process_time() - start


def main() -> int:
    """Print times, their ratio and the peak."""
    parser = argparse.ArgumentParser(description="What the tests of a paper cost.")
    parser.add_argument("--contrasts", type=int, default=111)
    parser.add_argument("--arms", type=int, default=111)
    parser.add_argument("--resamples", type=int, default=10_000)
    parser.add_argument("--loop", type=int, default=5, help="contrasts that are also made one by one; 0 for all")
    parser.add_argument("--limits", action="store_true", help="fail above the limits")
    options = parser.parse_args()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tasks, weights_CA = simulated(options.arms), chosen(options.contrasts, options.arms)
    items = sum(map(len, tasks.values()))
    found, seconds = timed(lambda: together(tasks, weights_CA, options.resamples))
    adjusted, judging = timed(lambda: judged(found))
    seconds += judging
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
    count = options.loop or options.contrasts
    alone, loop = timed(lambda: one_by_one(tasks, weights_CA[:count], options.resamples))
    for one, other in zip(found, alone, strict=False):
        np.testing.assert_allclose(one.draws_B, other.draws_B, atol=1e-9)
    whole = loop / count * options.contrasts
    print(f"{options.contrasts} contrasts of {options.arms} arms, {items:,} items, B = {options.resamples:,}")
    print(f"together    {seconds:7.1f} CPU s, peak {peak:.2f} GB ({sum(p < 0.05 for p in adjusted)} survive Holm)")
    print(f"one by one  {whole:7.1f} CPU s ({count} measured)")
    print(f"ratio       {whole / seconds:7.1f}")
    if options.limits and (seconds > SECONDS or peak > GIGABYTES):
        print(f"over the limits of {SECONDS:g} CPU s and {GIGABYTES:g} GB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
