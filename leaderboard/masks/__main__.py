"""`python -m leaderboard.masks RECORDS --out docs/results/masks.md --export fixtures/masks`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from leaderboard.masks import export, page, read_masks

from prunebench.errors import PruneBenchError
from prunebench.mask import write_atomically


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what is asked for and return an exit code: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m leaderboard.masks", description="The masks of some records.")
    parser.add_argument("records", type=Path, metavar="RECORDS", help="folder of run folders")
    parser.add_argument("--out", type=Path, metavar="FILE", help="page to write, such as docs/results/masks.md")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="folder for the masks, such as fixtures/masks")
    options = parser.parse_args(arguments)
    try:
        masks = read_masks(options.records)
        if options.out is not None:
            write_atomically(options.out, page(masks).encode())
        exported = export(masks, options.export) if options.export is not None else 0
    except PruneBenchError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{len(masks)} masks, {exported} exported\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
