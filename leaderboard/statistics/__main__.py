"""`python -m leaderboard.statistics RECORDS --out docs/results`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from leaderboard.statistics.page import write_statistics

from prunebench.errors import PruneBenchError

FAMILIES = Path(__file__).parents[1] / "families" / "tiny.toml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages and return an exit code: 0 done, 2 bad input, 3 no runs, or no library to draw with."""
    parser = argparse.ArgumentParser(
        prog="python -m leaderboard.statistics",
        description="Write paired tests, corrections and recovered shares of some runs (2610.41366).",
    )
    parser.add_argument("records", type=Path, metavar="RECORDS", help="folder of run folders")
    parser.add_argument("--families", type=Path, default=FAMILIES, help="declared contrasts (default: tiny.toml)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, such as docs/results")
    options = parser.parse_args(arguments)
    try:
        written = write_statistics(options.records, options.families, options.out)
    except PruneBenchError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    for one in written.left_out:
        sys.stderr.write(f"left out {one}\n")
    sys.stdout.write(f"{written.page}, {written.plot}: {written.summary}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
