"""`prunebench validate`, `reproduce`, `recompute` and `pack`: runs that are there already."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from prunebench.cli.shared import Progress, Result
from prunebench.errors import PrerequisiteError

__all__ = [
    "add_pack",
    "add_recompute",
    "add_reproduce",
    "add_validate",
    "run_pack",
    "run_recompute",
    "run_reproduce",
    "run_validate",
]


def add_validate(validate: argparse.ArgumentParser) -> None:
    """Options of `prunebench validate`."""
    validate.add_argument(
        "paths", type=Path, nargs="*", metavar="PATH", help="run folders or folders of them (default: the committed)"
    )


def add_pack(pack: argparse.ArgumentParser) -> None:
    """Options of `prunebench pack`."""
    pack.add_argument("records", type=Path, metavar="RECORDS", help="folder of run folders")
    pack.add_argument("--unpack", action="store_true", help="the reverse, of a folder or of one run to be copied alone")


def add_recompute(recompute: argparse.ArgumentParser) -> None:
    """Options of `prunebench recompute`."""
    recompute.add_argument("run", type=Path, metavar="RUN", help="run folder")


def add_reproduce(again: argparse.ArgumentParser) -> None:
    """Options of `prunebench reproduce`."""
    again.add_argument("run", type=Path, metavar="RUN", help="run folder")
    again.add_argument("--model", help="where its model is, if not under the name in the record")
    again.add_argument("--suite", action="append", default=[], metavar="NAME[=SOURCE]", help="as for run, where needed")
    again.add_argument("--device", help="such as cuda:1; of the kind that the run had")
    again.add_argument("--out", type=Path, help="records folder for the new run (default: one that is removed again)")
    again.add_argument(
        "--against", type=Path, metavar="FILE", help="run nothing; hold the run against what papers report of it"
    )


def run_validate(options: argparse.Namespace) -> Result:
    """Hold records against their evidence; exit 1 with findings."""
    from prunebench.loader import content_root, file_digests
    from prunebench.run.stored import documents_of
    from prunebench.validation import validate_records

    paths = options.paths or [content_root() / "leaderboard" / "records"]
    with Progress() as progress:
        methods = file_digests("methods")
        result = validate_records(paths, methods=methods, documents=documents_of(), progress=progress.step)
    lines = [*map(str, result.findings), *(f"note: {note}" for note in result.notes)]
    count = f"{result.runs} runs, {len(result.findings)} findings"
    return 1 if result.findings else 0, result.to_json(), "\n".join([*lines, count])


def run_reproduce(options: argparse.Namespace) -> Result:
    """Make a run again; exit 1 if it is another one."""
    from prunebench.board.reported import held_against, read_reported
    from prunebench.record import read_run

    if options.against is not None:
        held = held_against(read_run(options.run), read_reported(options.against))
        return 0 if held.agrees else 1, held.to_json(), held.to_text()
    from prunebench.moe import quiet_libraries
    from prunebench.run.reproduce import reproduce

    quiet_libraries()
    more = {"model": options.model, "suites": tuple(options.suite), "device": options.device}
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress())
        out = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prunebench-")))
        found = reproduce(options.run, out, **more, progress=progress.step)
    return 0 if found.agrees else 1, found.to_json(), found.to_text()


def run_recompute(options: argparse.Namespace) -> Result:
    """Decide items again; exit 1 if one differs."""
    from prunebench.analysis.recompute import recompute
    from prunebench.record import read_run
    from prunebench.run.stored import stored_documents

    run = read_run(options.run)
    report = recompute(run, stored_documents(run))
    return 0 if report.agrees else 1, report.to_json(), report.to_text()


def run_pack(options: argparse.Namespace) -> Result:
    """Pack or unpack records; exit 3 if there was none that could be."""
    from prunebench.packing import pack, unpack

    result = (unpack if options.unpack else pack)(options.records)
    for one in result.left_out:
        print(f"left out {one}", file=sys.stderr)
    word = "unpacked" if options.unpack else "packed"
    sizes = " to ".join(f"{size / 1e6:.2f}" for size in (result.bytes_before, result.bytes_after))
    text = f"{result.changed} runs {word}, {result.kept} already, {result.tables} tables of questions; {sizes} MB"
    nothing = result.left_out and not (result.changed or result.kept)
    return PrerequisiteError.exit_code if nothing else 0, result.to_json(), text
