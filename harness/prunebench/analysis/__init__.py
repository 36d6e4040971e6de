"""Numbers from items: metrics with intervals, and paired comparisons of two runs. Numpy only.

`bootstrap` resamples, `metrics` turns one run's items into its published numbers, `compare` contrasts two runs,
`diagnostics` sums what a run's routers did.
"""

from prunebench.analysis.bootstrap import LEVEL, RESAMPLES, SEED, Interval, confidence_interval
from prunebench.analysis.compare import Comparison, Contrast, compare, comparison_table
from prunebench.analysis.diagnostics import ReroutingSummary, rerouting_summary
from prunebench.analysis.metrics import (
    PERCENT,
    headline_cells,
    is_loss,
    lower_is_better,
    metrics_from_items,
    published,
)

__all__ = [
    "LEVEL",
    "PERCENT",
    "RESAMPLES",
    "SEED",
    "Comparison",
    "Contrast",
    "Interval",
    "ReroutingSummary",
    "compare",
    "comparison_table",
    "confidence_interval",
    "headline_cells",
    "is_loss",
    "lower_is_better",
    "metrics_from_items",
    "published",
    "rerouting_summary",
]
