"""For tests of methods and of prunebench itself: random tiny models of every supported router convention.

`prunebench.testing.strategies` draws them, and masks, budgets, router calls and token batches, with hypothesis;
everything else here does without it. docs/testing.md shows how to test a method.
"""

from prunebench.testing.batches import batch_of, measured, relabel_batch, router_call, shape_of, split_batch
from prunebench.testing.models import CORE, FAMILIES, Family, random_ids, random_model
from prunebench.testing.opened import opened_model, relabel_model, score, select

__all__ = [
    "CORE",
    "FAMILIES",
    "Family",
    "batch_of",
    "measured",
    "opened_model",
    "random_ids",
    "random_model",
    "relabel_batch",
    "relabel_model",
    "router_call",
    "score",
    "select",
    "shape_of",
    "split_batch",
]
