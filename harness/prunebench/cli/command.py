"""The command line itself: all verbs, and what becomes of their results and errors."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import prunebench
from prunebench.cli.arms import add_grid, add_run, run_arm, run_grid
from prunebench.cli.boards import add_board, add_nightly, add_submission, run_board, run_nightly, run_submission
from prunebench.cli.comparing import add_compare, run_compare
from prunebench.cli.content import add_inspect, add_params, run_check_env, run_inspect, run_list, run_params
from prunebench.cli.cost import add_cost, run_cost
from prunebench.cli.export import add_export, add_verify, run_export, run_verify
from prunebench.cli.masks import add_mask_verbs, run_mask_verb
from prunebench.cli.methods import add_check, add_new_method, run_check, run_new_method
from prunebench.cli.records import (
    add_pack,
    add_recompute,
    add_reproduce,
    add_validate,
    run_pack,
    run_recompute,
    run_reproduce,
    run_validate,
)
from prunebench.cli.shared import Result
from prunebench.cli.stored import add_bytes, run_bytes
from prunebench.errors import PruneBenchError

__all__ = ["main", "parser"]

_Add = Callable[[argparse.ArgumentParser], None]
_Run = Callable[[argparse.Namespace], Result]


def _nothing(_parser: argparse.ArgumentParser) -> None:
    """A verb without options of its own."""


# name, options, what it runs, and what --help says of it
_VERBS: Final[tuple[tuple[str, _Add, _Run, str], ...]] = (
    ("list", _nothing, run_list, "what is shipped: models, methods, operators, suites, tracks"),
    (
        "inspect",
        add_inspect,
        run_inspect,
        "a model's MoE layers: what its routers compute, what can be pruned, and a self-check",
    ),
    ("run", add_run, run_arm, "run one arm: calibrate, prune, prove, evaluate, record"),
    ("grid", add_grid, run_grid, "run all arms of a track; resumes where it was stopped"),
    ("mask", add_mask_verbs, run_mask_verb, "choose masks without running them, and look at them"),
    (
        "compare",
        add_compare,
        run_compare,
        "paired difference of two runs on the same items, or of declared families of runs, with 95 % intervals",
    ),
    ("params", add_params, run_params, "what operators store on a pruned model, counted from its configuration alone"),
    (
        "bytes",
        add_bytes,
        run_bytes,
        "stored bytes by part, pruned and quantized, from files or a configuration, and the gaps",
    ),
    (
        "cost",
        add_cost,
        run_cost,
        "stored bytes and eager timings of operators on one mask, relative to the dense model",
    ),
    (
        "board",
        add_board,
        run_board,
        "write the leaderboard of all complete runs: Markdown, JSON, and a site that needs no server",
    ),
    (
        "submission",
        add_submission,
        run_submission,
        "whether what this checkout adds to a base may be merged: runs, or a method file",
    ),
    (
        "reproduce",
        add_reproduce,
        run_reproduce,
        "make a run again and compare: equal decisions outside a margin of 1e-4",
    ),
    (
        "nightly",
        add_nightly,
        run_nightly,
        "a track's night: run what is missing, validate, make the board, say what changed",
    ),
    (
        "validate",
        add_validate,
        run_validate,
        "hold records against their evidence: items, digests, bytes, dates, checks; no model",
    ),
    (
        "pack",
        add_pack,
        run_pack,
        "make a records folder smaller: what its runs share is kept once; they read as before",
    ),
    (
        "recompute",
        add_recompute,
        run_recompute,
        "decide every item of a run again from what it stores, without a model; must agree",
    ),
    ("check", add_check, run_check, "whether a method keeps the rules, on tiny random models (docs/add-a-method.md)"),
    ("new-method", add_new_method, run_new_method, "write a commented method that passes the checks, to start from"),
    (
        "export",
        add_export,
        run_export,
        "write a pruned run's model for other tools, or say why a format cannot hold it",
    ),
    ("verify", add_verify, run_verify, "whether an export's files compute what their source does"),
    (
        "check-env",
        _nothing,
        run_check_env,
        "whether everything that prunebench needs is installed, and what is optional",
    ),
)


class _Parser(argparse.ArgumentParser):
    """Argument errors as one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        print(f"prunebench: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    """All verbs with their options."""
    whole = _Parser(
        prog="prunebench", description="Benchmark training-free pruning of Mixture-of-Experts language models."
    )
    whole.add_argument("--version", action="version", version=f"prunebench {prunebench.__version__}")
    verbs = whole.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    for name, add, _, summary in _VERBS:
        one = verbs.add_parser(name, help=summary.replace("%", "%%"), description=summary)
        if add is not add_mask_verbs:  # whose own verbs have it
            one.add_argument("--json", action="store_true", help="print one JSON document")
        add(one)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show α is no reason to fail
    try:
        options = parser().parse_args(arguments)
    except SystemExit as ended:  # with an error of its own, or after --help and --version
        _write()
        return int(ended.code or 0)
    runs = {name: run for name, _, run, _ in _VERBS}
    try:
        # What a method or a library prints is not the result.
        with contextlib.redirect_stdout(sys.stderr):
            code, data, text = runs[options.verb](options)
    except PruneBenchError as error:
        print(f"prunebench {options.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"prunebench {options.verb}: interrupted; finished runs are kept", file=sys.stderr)
        return 130
    _write(json.dumps(data, indent=1, ensure_ascii=False) if options.json else text)
    return code


def _write(*texts: str) -> None:
    """Print and flush; that the reader of our output has gone is no fault of ours."""
    try:
        print(*texts, sep="\n", end="\n" if texts else "", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
