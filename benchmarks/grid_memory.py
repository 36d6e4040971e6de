"""Is a grid's memory flat over its arms? `python benchmarks/grid_memory.py TRACK [--model NAME] [--limit N]`.

Runs the arms of a track one after another in this process, as one worker of `prunebench grid` does, and prints the
resident memory after each. The first arm of a model loads it, and the first of a calibration adds a score pass; from
then on nothing should be added. The last line gives the growth from the middle arm to the last.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from prunebench.loader import resolve_track
from prunebench.moe import quiet_libraries
from prunebench.run import Session, read_track
from prunebench.run.arm import prepare


def resident_mb() -> float:
    """Resident memory of this process, in millions of bytes (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024 / 1e6


def main() -> None:
    """Run the arms and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("track")
    parser.add_argument("--model", help="only this model's arms")
    parser.add_argument("--limit", type=int, default=16, help="items per task (default %(default)s)")
    options = parser.parse_args()
    quiet_libraries()
    track = read_track(resolve_track(options.track), limit=options.limit)
    arms = [arm for arm in track.arms if options.model in (None, arm.model)]
    with tempfile.TemporaryDirectory() as out:
        session = Session(Path(out))
        used = []
        for number, arm in enumerate(arms, start=1):
            session.execute(prepare(arm))
            used.append(resident_mb())
            print(f"{number:4} {used[-1]:8.1f} MB  {arm.folder}", flush=True)
    middle = used[len(used) // 2]
    print(f"{len(arms)} arms, {session.score_passes} score passes")
    print(f"from {middle:.1f} MB at the middle to {used[-1]:.1f} MB at the end")


if __name__ == "__main__":
    main()
