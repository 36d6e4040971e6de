"""`python -m leaderboard.findings RECORDS --out docs/results.md`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from leaderboard.findings.page import write_results

from prunebench.errors import PruneBenchError


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and return an exit code: 0 done, 2 bad input, 3 no runs."""
    parser = argparse.ArgumentParser(
        prog="python -m leaderboard.findings", description="Write which findings of arXiv 2610.41366 some runs show."
    )
    parser.add_argument("records", type=Path, metavar="RECORDS", help="folder of run folders")
    parser.add_argument("--out", type=Path, required=True, help="Markdown file to write, such as docs/results.md")
    options = parser.parse_args(arguments)
    try:
        written = write_results(options.records, options.out)
    except PruneBenchError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    for one in written.left_out:
        sys.stderr.write(f"left out {one}\n")
    sys.stdout.write(f"{written.path}: {written.runs} runs, {written.gaps} cells not measurable\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
