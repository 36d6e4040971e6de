"""`python -m leaderboard.matched RECORDS --out docs/results`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from leaderboard.matched.page import write_matched

from prunebench.errors import PruneBenchError

FAMILIES = Path(__file__).parents[1] / "families" / "matched.toml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and return an exit code: 0 done, 2 bad input, 3 no runs."""
    parser = argparse.ArgumentParser(
        prog="python -m leaderboard.matched",
        description="Write how pruned arms compare with quantized ones at the same stored bytes (2610.41366 App. F).",
    )
    parser.add_argument("records", type=Path, metavar="RECORDS", help="folder of run folders, 16-bit and quantized")
    parser.add_argument("--families", type=Path, default=FAMILIES, help="declared contrasts (default: matched.toml)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, such as docs/results")
    options = parser.parse_args(arguments)
    try:
        page, summary = write_matched(options.records, options.families, options.out)
    except PruneBenchError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{page}: {summary}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
