"""Numbers from items: metrics with intervals, paired comparisons, and what may be said of many of them. Numpy only.

`bootstrap` resamples, `metrics` turns one run's items into its published numbers, `pairing` says what two runs must
share. `compare` contrasts two runs, `robustness` does so under several protocols. `declared` reads families of
contrasts, `arms` finds their runs, `scores` scores them, `contrasts` answers, `multiplicity` corrects, `report` and
`forest` show. `resolution` says what data can tell apart, `mcnemar` tests flips, `choices` takes answer bias from
ability, `shares` holds scores against guessing and damage, `agreement` compares selections, `generations` sampled
texts, and `diagnostics` sums what a run's routers did.
"""

from prunebench.analysis.arms import Found, Selector, Shelf
from prunebench.analysis.bootstrap import LEVEL, RESAMPLES, SEED, Interval, confidence_interval
from prunebench.analysis.compare import Comparison, Contrast, compare, comparison_table
from prunebench.analysis.contrasts import Answer, Gap, answers
from prunebench.analysis.declared import Declaration, Question, read_declaration
from prunebench.analysis.diagnostics import ReroutingSummary, rerouting_summary
from prunebench.analysis.forest import write_forest
from prunebench.analysis.metrics import (
    PERCENT,
    headline_cells,
    is_loss,
    lower_is_better,
    metrics_from_items,
    published,
)
from prunebench.analysis.report import Report
from prunebench.analysis.robustness import Robustness, robustness

__all__ = [
    "LEVEL",
    "PERCENT",
    "RESAMPLES",
    "SEED",
    "Answer",
    "Comparison",
    "Contrast",
    "Declaration",
    "Found",
    "Gap",
    "Interval",
    "Question",
    "Report",
    "ReroutingSummary",
    "Robustness",
    "Selector",
    "Shelf",
    "answers",
    "compare",
    "comparison_table",
    "confidence_interval",
    "headline_cells",
    "is_loss",
    "lower_is_better",
    "metrics_from_items",
    "published",
    "read_declaration",
    "rerouting_summary",
    "robustness",
    "write_forest",
]
