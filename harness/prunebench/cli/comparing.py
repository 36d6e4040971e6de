"""`prunebench compare`: two runs on the same items, or declared families of runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from prunebench.cli.shared import Result
from prunebench.errors import PrerequisiteError, UsageError

__all__ = ["add_compare", "run_compare"]


def add_compare(compare: argparse.ArgumentParser) -> None:
    """Options of `prunebench compare`."""
    compare.add_argument("run_a", type=Path, metavar="RUN_A", help="run folder; with --families, the records folder")
    compare.add_argument("run_b", type=Path, nargs="?", metavar="RUN_B", help="run folder; differences are A minus B")
    compare.add_argument("--suite", action="append", help="only this suite (may be repeated)")
    compare.add_argument("--families", type=Path, metavar="FILE", help="TOML file of contrasts to correct together")
    compare.add_argument(
        "--plot", type=Path, metavar="FOLDER", help="with --families: forest.svg and forest.html there"
    )
    compare.add_argument("--robustness", action="store_true", help="one suite of choices under several protocols")
    compare.add_argument("--few-shot", metavar="SUITE", help="with --robustness: the suite that asks it with examples")
    compare.add_argument(
        "--fixed-answer",
        action="append",
        default=[],
        metavar="TASK",
        help="with --robustness: a task whose answers are the same for every item (may be repeated)",
    )


def run_compare(options: argparse.Namespace) -> Result:
    """Compare two runs, or declared families of runs."""
    from prunebench.analysis import compare, comparison_table, robustness
    from prunebench.record import read_run

    _check_compare(options)
    if options.families is not None:
        return _compare_families(options)
    runs = read_run(options.run_a), read_run(options.run_b)
    if options.robustness:
        result = robustness(*runs, options.suite[0], few_shot=options.few_shot, fixed=options.fixed_answer)
        return 0, result.to_json(), result.text()
    comparison = compare(*runs, suites=options.suite)
    return 0, comparison.to_json(), comparison_table(comparison)


def _check_compare(options: argparse.Namespace) -> None:
    """Which options go together."""
    families = options.families is not None
    wrong = {
        "RUN_B is missing": options.run_b is None and not families,
        "RUN_B with --families": options.run_b is not None and families,
        "--suite with --families": bool(options.suite) and families,
        "--robustness with --families": options.robustness and families,
        "--plot without --families": options.plot is not None and not families,
        "--robustness without one --suite": options.robustness and len(options.suite or ()) != 1,
        "--few-shot without --robustness": options.few_shot is not None and not options.robustness,
        "--fixed-answer without --robustness": bool(options.fixed_answer) and not options.robustness,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise UsageError(what, expected="RUN_A RUN_B, or RECORDS --families FILE", fix="see compare --help")


def _compare_families(options: argparse.Namespace) -> Result:
    from prunebench.analysis import Report, Shelf, answers, read_declaration, write_forest

    declaration = read_declaration(options.families)
    shelf = Shelf.of(options.run_a)
    for one in shelf.left_out:
        print(f"left out {one}", file=sys.stderr)
    found, gaps = answers(shelf, declaration.questions)
    if not found:
        raise PrerequisiteError(
            f"none of {len(gaps)} contrasts can be measured", where=str(options.families), fix=gaps[0].reason
        )
    report = Report(declaration, found, gaps)
    data, text = report.to_json(), report.text()
    if options.plot is not None:
        paths = write_forest(found, options.plot, title=declaration.name)
        data["plots"] = [str(path) for path in paths]
        text += "".join(f"\n{path}" for path in paths)
    return 0, data, text
