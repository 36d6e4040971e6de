"""The nine zero-shot choice tasks of 2610.41366 (MoNE's protocol): acc_norm for ARC, OpenBookQA and PIQA, else acc.

The suite's number is their unweighted mean; records also hold the big-5 mean, which two small tasks cannot sway, and
with suite hellaswag beside it the mean over MoRA's nine tasks. Data: lm-eval's data sets, by pinned revision, or files.
"""

from __future__ import annotations

from prunebench import ChoiceSuite

NORMALIZED = ("arc_challenge", "arc_easy", "openbookqa", "piqa")


class NineTasks(ChoiceSuite):
    """ARC-c, ARC-e, BoolQ, COPA, MMLU, OpenBookQA, PIQA, RTE and WinoGrande."""

    name = "nine_tasks"
    version = 1
    tasks = ("arc_challenge", "arc_easy", "boolq", "copa", "mmlu", "openbookqa", "piqa", "rte", "winogrande")
    headline = tuple((task, "none", "acc_norm" if task in NORMALIZED else "acc") for task in tasks)
    shots = 0


SUITE = NineTasks()
