"""What the board's words mean."""

from __future__ import annotations

from typing import Final

__all__ = ["LEGEND", "TITLE"]

TITLE: Final = "prunebench board"
LEGEND: Final = (
    ("scores", "each score, interval and difference is computed again from the per-item outcomes of the runs, each ratio from the mask. Stored bytes, integrity and calls rerouted are as the record has them: they cannot be had without the weights."),  # noqa: E501
    ("model", "dtype, device and implementation of the experts are named where they differ, or are not float32, cpu and eager. No two runs read the same: where all else agrees, what differs is named, as in any other cell."),  # noqa: E501
    ("method (mask)", "the criterion that chose the pruned experts, with its parameters, and its seed if that is not 0. Given mask: it came from a file or from another run."),  # noqa: E501
    ("operator", "what answers a slot whose expert is gone: constant (the expert's mean output), zero (nothing), reroute (the slot goes to the best survivor)."),  # noqa: E501
    ("scale", "the divisor Z of the survivors' gates when slots are rerouted. keep: that of the unpruned router, so that survivors keep their gates. renorm: gates rescaled for the experts that are left. trained: keep or renorm, whichever the router was trained with; other: the one it was not."),  # noqa: E501
    ("convention", "what the router computes: its scores, and whether it was trained with top-k renormalization."),
    ("mask chosen on", "text and draw of the statistics that chose the mask, and number and length of blocks where these differ; none for a given mask, or one chosen without statistics."),  # noqa: E501
    ("operator fitted on", "text and draw that what answers pruned slots was fitted on; none where nothing is fitted, as in rerouting."),  # noqa: E501
    ("stored MB", "millions of bytes of all saved tensors, replacements included, tied ones once."),
    ("calls rerouted", "share of token-layer calls whose unpruned top-k held an expert that cannot be routed to; over those calls, the mean of the gates' total under keep over that under renorm; and the share of all calls where that ratio exceeds 1 (2610.41366 §5.3)."),  # noqa: E501
    ("[95 % CI]", "item bootstrap: B = 10,000 resamples of the items of each task, seed 0, percentiles 2.5 and 97.5; it covers the choice of test items, not of calibration text. Suites of several tasks show the mean over tasks; a run without a suite has a gap there, and nothing is averaged over gaps."),  # noqa: E501
    ("− dense", "paired difference from the unpruned model of the same weights, executed alike; over the same items and resamples."),  # noqa: E501
    ("− constant", "paired difference from the arm that differs in its operator alone, constant: same weights, tokenizer, mask, fit (where the arm fits nothing: a constant fitted on what the mask was chosen on), execution and suite; over the same items and resamples."),  # noqa: E501
    ("bold, †, ‡", "a bold difference excludes zero, and is corrected for nothing: exploratory. Of the contrasts that were declared in a file before they were looked at, † survives Holm within its family, and ‡ over all of them."),  # noqa: E501
    ("group", "runs of one model and one share pruned that cannot be told apart: group 1 is the best and all whose paired difference from it has p > 0.05, group 2 the best of the others and those alike, and so on. Exploratory; none where a task has fewer than 30 items."),  # noqa: E501
    ("perplexity", "lower is better, and so is a difference below zero; differences are of its logarithm."),
    ("integrity", "checks passed of those that apply; failed ones are named."),
)  # fmt: skip
