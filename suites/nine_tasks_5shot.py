"""The nine choice tasks of 2610.41366 with five examples each (Table C.6), and the metrics of the zero-shot ones.

Examples are lm-eval's own draws: seed 1234, from the training split over all documents in order; MMLU's are the first
of its subject. The suite's number is the unweighted mean. Data: lm-eval's data sets, by pinned revision, or files.
"""

from __future__ import annotations

from prunebench import ChoiceSuite

NORMALIZED = ("arc_challenge", "arc_easy", "openbookqa", "piqa")


class NineTasksFiveShot(ChoiceSuite):
    """ARC-c, ARC-e, BoolQ, COPA, MMLU, OpenBookQA, PIQA, RTE and WinoGrande."""

    name = "nine_tasks_5shot"
    version = 1
    tasks = ("arc_challenge", "arc_easy", "boolq", "copa", "mmlu", "openbookqa", "piqa", "rte", "winogrande")
    headline = tuple((task, "none", "acc_norm" if task in NORMALIZED else "acc") for task in tasks)
    shots = 5


SUITE = NineTasksFiveShot()
