"""What a board of 2,000 runs costs: seconds to build and write it, bytes of its first page, seconds to open that.

    python benchmarks/board.py [--rows 2000] [--check]

The runs are made from the committed ones: packed, under other names of the model, each with an identity of its own.
With `--check` it fails where a limit is missed: 30 s for the board, 5 MB and 2 s for the page, on an idle machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from prunebench.board import build_board, write_board
from prunebench.record import run_id, runs_under

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "leaderboard" / "records" / "tiny"


def copies(out: Path, rows: int) -> None:
    """So many runs: the committed ones again and again, as other models."""
    shutil.copytree(RECORDS / "questions", out / "questions")
    paths = runs_under(RECORDS).runs
    for number in range(rows):
        source = paths[number % len(paths)]
        again = number // len(paths)
        record = json.loads((source / "record.json").read_text(encoding="utf-8"))
        if again:
            name = f"{record['arm']['model']}-{again}"
            record["identity"]["model"] |= {
                "name": name,
                "weights_sha256": f"{again}{record['identity']['model']['weights_sha256'][1:]}",
            }
            record["arm"]["model"] = name
            record["run_id"] = run_id(record["identity"])
        folder = out / record["arm"]["model"] / source.name
        folder.mkdir(parents=True)
        shutil.copyfile(source / "items.parquet", folder / "items.parquet")
        (folder / "record.json").write_text(json.dumps(record), encoding="utf-8")


def opened(page: Path) -> float:
    """Seconds from asking for a page until its rows can be used, in the browser of the tests; the better of two."""
    spec = importlib.util.spec_from_file_location("browser", ROOT / "tests" / "board" / "browser.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = module.Browser(profile)
        seconds = []
        for _ in range(2):
            browser.open(page.as_uri())
            timing = "performance.getEntriesByType('navigation')[0]"
            browser.until(f"{timing}.loadEventEnd > 0")
            seconds.append(browser.look(f"{timing}.loadEventEnd") / 1000)
        browser.close()
    return min(seconds)


def main() -> None:
    """Measure, and say it in a few lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records, out = Path(folder) / "records", Path(folder) / "out"
        copies(records, options.rows)
        wall, cpu = time.perf_counter(), time.process_time()
        board = build_board(records)
        built = time.perf_counter() - wall, time.process_time() - cpu
        write_board(board, out)
        whole = time.perf_counter() - wall, time.process_time() - cpu
        size = (out / "index.html").stat().st_size
        seconds = opened(out / "index.html")
    print(f"{len(board.table.rows)} runs: built in {built[0]:.1f} s ({built[1]:.1f} s of CPU)")
    print(f"with its site {whole[0]:.1f} s ({whole[1]:.1f} s of CPU)")
    print(f"first page {size / 1e6:.2f} MB, opened in {seconds:.2f} s")
    if options.check and (built[0] > 30 or size > 5e6 or seconds > 2):
        sys.exit("a limit is missed: 30 s for the board, 5 MB and 2 s for its first page")


if __name__ == "__main__":
    main()
