"""docs/results.md: which findings of arXiv 2610.41366 the runs at hand show, written from their records alone.

`evidence` reads runs, `operators` names what answers in them, `verdicts` turns intervals into words, each of `scale`,
`order`, `generation`, `drift`, `domain`, `crossing`, `noise`, `routing`, `replacement`, `budgets`, `survivors`, `fits`,
`refits` and `limits` answers for one part of the paper, `page` puts them together. No number is taken from a
record that its items, masks or counters can give; nothing is filled in where an arm is missing.

    python -m leaderboard.findings RECORDS --out docs/results.md
"""

from leaderboard.findings.page import Written, results_page, write_results

__all__ = ["Written", "results_page", "write_results"]
