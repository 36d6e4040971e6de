"""docs/results/statistics.md and its plot: the tests of 2610.41366 on the runs at hand, from their records alone.

The contrasts that are corrected for are declared in `leaderboard/families/tiny.toml`; every other operator that the
records hold is shown as exploratory. `arms` finds the runs, `tables` makes the tables, `page` puts them together.

    python -m leaderboard.statistics RECORDS --families FILE --out docs/results
"""

from leaderboard.statistics.page import Written, write_statistics

__all__ = ["Written", "write_statistics"]
