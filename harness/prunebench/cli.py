"""The command line: `prunebench VERB`; `prunebench --help` lists the verbs.

Results go to standard output, progress to standard error; `--json` prints one JSON document instead of text. Exit
codes: 0 done, 1 a check failed, 2 bad input, 3 something that is needed is missing. Heavy imports happen inside the
verbs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import prunebench
from prunebench.bytes_cli import add_bytes, run_bytes
from prunebench.cost_cli import add_cost, run_cost
from prunebench.errors import PrerequisiteError, PruneBenchError, UsageError
from prunebench.export_cli import add_export, add_verify, run_export, run_verify
from prunebench.mask import write_atomically
from prunebench.mask_cli import add_mask_verbs, add_selection, run_mask_verb
from prunebench.mask_studies import Result, add_calibration

if TYPE_CHECKING:
    from prunebench.run.arm import PreparedArm

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Argument errors as one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        print(f"prunebench: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="prunebench", description="Benchmark training-free pruning of Mixture-of-Experts language models."
    )
    parser.add_argument("--version", action="version", version=f"prunebench {prunebench.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)

    def verb(name: str, summary: str, description: str | None = None) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=summary.replace("%", "%%"), description=description or summary)
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        return sub

    verb("list", "what is shipped: models, methods, operators, suites, tracks")
    inspect = verb("inspect", "a model's MoE layers: what its routers compute, what can be pruned, and a self-check")
    inspect.add_argument("model", metavar="MODEL", help="zoo name, folder with config.json, or hub id")
    inspect.add_argument("--config-only", action="store_true", help="read no weights, and make no self-check")
    inspect.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default %(default)s)")
    inspect.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default %(default)s)")
    _add_run(verb("run", "run one arm: calibrate, prune, prove, evaluate, record"))
    _add_grid(verb("grid", "run all arms of a track; resumes where it was stopped"))
    add_mask_verbs(verbs.add_parser("mask", help="choose masks without running them, and look at them"))

    _add_compare(
        verb(
            "compare",
            "paired difference of two runs on the same items, or of declared families of runs, with 95 % intervals",
        )
    )

    params = verb("params", "what operators store on a pruned model, counted from its configuration alone")
    params.add_argument("model", metavar="MODEL", help="zoo name, folder with config.json, or hub id")
    params.add_argument("--ratio", help="share of each layer's experts to prune, such as 0.5")
    params.add_argument("--keep", type=int, help="experts to keep in each layer, instead of --ratio")
    params.add_argument("--operator", action="append", help="only this operator (may be repeated; default: all)")
    params.add_argument(
        "--rank", type=int, default=32, help="of the tilt, whose 2rd values also set the copies' budget (default 32)"
    )
    params.add_argument("--times", type=int, default=1, help="the copies' budget in tilts, 1 or 4 in the paper")

    add_bytes(verb("bytes", "stored bytes by part, pruned and quantized, from files or a configuration, and the gaps"))

    add_cost(verb("cost", "stored bytes and eager timings of operators on one mask, relative to the dense model"))

    _add_board(
        verb("board", "write the leaderboard of all complete runs: Markdown, JSON, and a site that needs no server")
    )

    _add_submission(
        verb("submission", "whether what this checkout adds to a base may be merged: runs, or a method file")
    )
    _add_reproduce(verb("reproduce", "make a run again and compare: equal decisions outside a margin of 1e-4"))
    _add_nightly(verb("nightly", "a track's night: run what is missing, validate, make the board, say what changed"))

    validate = verb("validate", "hold records against their evidence: items, digests, bytes, dates, checks; no model")
    validate.add_argument(
        "paths", type=Path, nargs="*", metavar="PATH", help="run folders or folders of them (default: the committed)"
    )

    pack = verb("pack", "make a records folder smaller: what its runs share is kept once; they read as before")
    pack.add_argument("records", type=Path, metavar="RECORDS", help="folder of run folders")
    pack.add_argument("--unpack", action="store_true", help="the reverse, of a folder or of one run to be copied alone")

    recompute = verb("recompute", "decide every item of a run again from what it stores, without a model; must agree")
    recompute.add_argument("run", type=Path, metavar="RUN", help="run folder")
    check = verb("check", "whether a method keeps the rules, on tiny random models (docs/add-a-method.md)")
    check.add_argument("methods", nargs="+", metavar="FILE", help="method by path or name")
    check.add_argument("--param", action="append", default=[], metavar="NAME=VALUE", help="parameter of the method")
    check.add_argument("--only", action="append", default=[], metavar="CHECK", help="only this check (may be repeated)")
    check.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="CHECK=REASON",
        help="a check that fails, and why that is right",
    )
    check.add_argument("--markdown", action="store_true", help="print the method's card, to paste into a pull request")
    check.add_argument(
        "--cards", type=Path, metavar="FOLDER", help="write the card of each method there, and of several an index"
    )

    new = verb("new-method", "write a commented method that passes the checks, to start from")
    new.add_argument("name", metavar="NAME", help="small letters, digits and hyphens")
    new.add_argument("--folder", type=Path, help="where to (default: methods, if it is here, else here)")
    add_export(verb("export", "write a pruned run's model for other tools, or say why a format cannot hold it"))
    add_verify(verb("verify", "whether an export's files compute what their source does"))

    verb("check-env", "whether everything that prunebench needs is installed, and what is optional")
    return parser


def _add_submission(submission: argparse.ArgumentParser) -> None:
    submission.add_argument("base", metavar="BASE", help="commit or branch, such as origin/main")
    submission.add_argument("--reproduce", type=int, default=0, metavar="N", help="make N of the added runs again")
    submission.add_argument("--checkout", type=Path, help="the checkout (default: this one)")


def _add_reproduce(again: argparse.ArgumentParser) -> None:
    again.add_argument("run", type=Path, metavar="RUN", help="run folder")
    again.add_argument("--model", help="where its model is, if not under the name in the record")
    again.add_argument("--suite", action="append", default=[], metavar="NAME[=SOURCE]", help="as for run, where needed")
    again.add_argument("--device", help="such as cuda:1; of the kind that the run had")
    again.add_argument("--out", type=Path, help="records folder for the new run (default: one that is removed again)")
    again.add_argument(
        "--against", type=Path, metavar="FILE", help="run nothing; hold the run against what papers report of it"
    )


def _add_nightly(nightly: argparse.ArgumentParser) -> None:
    nightly.add_argument("track", metavar="TRACK", help="track by name, or a TOML file")
    nightly.add_argument("--out", type=Path, help="records folder (default leaderboard/records/NAME of the checkout)")
    nightly.add_argument("--board", type=Path, help="the board's folder (default results/NAME/board)")
    nightly.add_argument("--jobs", type=int, default=1, help="worker processes, one model each (default %(default)s)")
    _add_machine(nightly)


def _add_board(board: argparse.ArgumentParser) -> None:
    board.add_argument("records", type=Path, metavar="RECORDS", help="folder of run folders")
    board.add_argument("--out", type=Path, help="folder for board.md, board.json and the site (index.html)")
    board.add_argument(
        "--track", help="track by name or file: its families of contrasts and the scores that papers report"
    )
    board.add_argument("--data", type=Path, metavar="FILE", help="write the board's JSON there too")
    board.add_argument(
        "--update",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="put the board's Markdown between its markers in this file (may be repeated)",
    )
    board.add_argument(
        "--check", action="store_true", help="write nothing; fail if --data or --update files are not what they must be"
    )


def _add_compare(compare: argparse.ArgumentParser) -> None:
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


def _add_run(run: argparse.ArgumentParser) -> None:
    add_selection(run)
    run.add_argument("--mask", metavar="FILE", help="a mask file, or a run's folder, instead of the method's selection")
    run.add_argument("--operator", help="file that says what answers pruned slots; the method's own by default")
    run.add_argument(
        "--operator-param", action="append", default=[], metavar="NAME=VALUE", help="parameter of the operator"
    )
    run.add_argument(
        "--operator-layers", metavar="I,J", help="only in these layers; in the others the constant answers"
    )
    run.add_argument(
        "--scale", help="gate scale where slots are refilled: trained, other, keep, renorm, interp:A or ref:K2"
    )
    run.add_argument(
        "--groups",
        default="frozen",
        choices=["frozen", "reselect"],
        help="who chooses a group-limited router's groups: the unpruned router (default), or its rule among survivors",
    )
    add_calibration(run)
    fit = run.add_argument_group("another calibration for what the operator is fitted on (default: the mask's)")
    fit.add_argument("--fit-text", help="as --text")
    fit.add_argument("--fit-blocks", type=int, help="as --blocks")
    fit.add_argument("--fit-length", type=int, help="as --length")
    fit.add_argument("--fit-draw", help="as --draw")
    quant = run.add_argument_group("quantization, of what all else has made")
    quant.add_argument(
        "--quantize",
        metavar="SETTING",
        help="w4, w3, w2: every decoder linear at so many bits, by GPTQ; e3a4: routed experts at 3, the others at 4; "
        "mc3a4: experts at 2, 3 or 4, 3 on average; with parameters as in 'w4(group=64, zeros=bits)'",
    )
    quant.add_argument(
        "--match",
        metavar="SETTING",
        help="instead of --ratio or --keep: keep as many experts per layer as store most nearly what the unpruned "
        "model does under this setting, such as e3a4",
    )
    quant.add_argument("--quant-text", help="what the quantizer sees, as --text (default: the mask's, and so below)")
    quant.add_argument("--quant-blocks", type=int, help="as --blocks")
    quant.add_argument("--quant-length", type=int, help="as --length")
    quant.add_argument("--quant-draw", help="as --draw")
    run.add_argument(
        "--suite",
        action="append",
        metavar="NAME[=SOURCE]",
        help="suite by name or path (may be repeated; default: the tiny world's); SOURCE of data that are not shipped: "
        "a file, hub:ID[@REV] or evalplus:NAME",
    )
    run.add_argument("--out", type=Path, default=Path("results"), help="records folder (default %(default)s)")
    _add_machine(run)


def _add_grid(grid: argparse.ArgumentParser) -> None:
    grid.add_argument("track", metavar="TRACK", help="track by name, or a TOML file")
    grid.add_argument("--out", type=Path, default=Path("results"), help="records folder (default %(default)s)")
    grid.add_argument("--jobs", type=int, default=1, help="worker processes, one model each (default %(default)s)")
    _add_machine(grid)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, help="only the first N items of each task; the run is marked partial")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default %(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default %(default)s)")
    parser.add_argument("--device-map", choices=["auto"], help="spread the model over devices (needs accelerate)")
    parser.add_argument(
        "--experts-implementation", help="of transformers: eager (default on cpu), grouped_mm (elsewhere) or batched_mm"
    )
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per forward (default %(default)s)")
    parser.add_argument(
        "--unsafe-local",
        action="store_true",
        help="run generated programs without the sandbox; recorded, and never on the board",
    )
    parser.add_argument(
        "--sampling",
        metavar="NAME=VALUE,…",
        help="draw generations: temperature=0.7,top_p=0.95,top_k=20,n=16,seed=0, any of them (default: greedy)",
    )
    parser.add_argument(
        "--truncate", action="store_true", help="cut prompts that do not fit; counted (default: an error)"
    )
    parser.add_argument("--chat-template", action="store_true", help="put prompts into the tokenizer's chat template")
    parser.add_argument(
        "--scorer",
        choices=["batched", "prefix"],
        help="batched: each request on its own; prefix: what requests begin with once (default: each suite's own)",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything and say what would run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show α is no reason to fail
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as ended:  # with an error of its own, or after --help and --version
        _write()
        return int(ended.code or 0)
    verbs = {
        "list": _list,
        "inspect": _inspect,
        "mask": _mask,
        "params": _params,
        "bytes": run_bytes,
        "cost": _cost,
        "run": _run,
        "grid": _grid,
        "compare": _compare,
        "board": _board,
        "nightly": _nightly,
        "reproduce": _reproduce,
        "submission": _submission,
        "validate": _validate,
        "pack": _pack,
        "recompute": _recompute,
        "check": _check,
        "new-method": _new_method,
        "export": _export,
        "verify": run_verify,
        "check-env": _check_env,
    }
    try:
        # What a method or a library prints is not the result.
        with contextlib.redirect_stdout(sys.stderr):
            code, data, text = verbs[options.verb](options)
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


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    names = (
        *("limit", "device", "dtype", "device_map", "experts_implementation", "batch_tokens", "unsafe_local"),
        *("sampling", "truncate", "chat_template", "scorer"),
    )
    return {name: getattr(options, name) for name in names}


class _Progress:
    """Progress bars on a terminal; silence elsewhere, where lines per arm must do."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: Any = None
        self._what = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def step(self, what: str, done: int, total: int) -> None:
        """Move the bar of `what`."""
        if self._task is None or what != self._what:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task, self._what = self._bars.add_task(what, total=total), what
        self._bars.update(self._task, completed=done, total=total)

    def say(self, line: str) -> None:
        """One line above the bars."""
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)


# --- verbs: each returns its exit code, its result as JSON data, and as text


def _list(_options: argparse.Namespace) -> Result:
    from prunebench.loader import available, load_method_class, plugins

    classes = {name: load_method_class(name) for name in available("methods")}
    for name in plugins():
        try:
            classes[name] = load_method_class(name)
        except UsageError as error:  # somebody else's distribution must not hide what works
            print(f"prunebench list: left out {error}", file=sys.stderr)
    kinds = {name: "criterion" if cls.selects() else "operator" for name, cls in classes.items()}
    data: dict[str, list[str]] = {
        "models": available("models"),
        "criteria": [name for name, kind in kinds.items() if kind == "criterion"],
        "operators": [name for name, kind in kinds.items() if kind == "operator"],
        "suites": available("suites"),
        "tracks": available("tracks"),
    }
    return 0, data, "\n".join(f"{kind:10} {', '.join(names)}" for kind, names in data.items())


def _inspect(options: argparse.Namespace) -> Result:
    from prunebench.loader import resolve_model
    from prunebench.moe import inspect_model, quiet_libraries
    from prunebench.run.sources import ModelFiles

    quiet_libraries()
    folder = ModelFiles.of(resolve_model(options.model)).folder
    report = inspect_model(
        options.model, folder, weights=not options.config_only, device=options.device, dtype=options.dtype
    )
    return 1 if report.self_check == "fail" else 0, report.to_json(), report.to_text()


def _mask(options: argparse.Namespace) -> Result:
    with _Progress() as progress:
        return run_mask_verb(options, progress.step)


def _cost(options: argparse.Namespace) -> Result:
    with _Progress() as progress:
        return run_cost(options, progress.step)


def _export(options: argparse.Namespace) -> Result:
    with _Progress() as progress:
        return run_export(options, progress.step)


def _params(options: argparse.Namespace) -> Result:
    from tabulate import tabulate

    from prunebench.fit import OPERATORS, cost, extra_experts, model_size
    from prunebench.loader import resolve_model
    from prunebench.moe import quiet_libraries
    from prunebench.moe.load import empty_model
    from prunebench.run.arm import budget_of
    from prunebench.run.sources import ModelFiles

    quiet_libraries()
    if (budget := budget_of(options.ratio, options.keep)) is None:
        raise UsageError("nothing says how many experts go", fix="give --ratio, such as 0.5, or --keep")
    for name in ("rank", "times"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} {getattr(options, name)} is impossible", expected="a whole number from 1 on")
    size = model_size(empty_model(ModelFiles.of(resolve_model(options.model)).folder))
    size.pruned(budget)  # an impossible budget is no operator's fault
    costs, impossible = [], {}
    for name in dict.fromkeys(options.operator or OPERATORS):
        try:
            costs.append(cost(size, budget, name, rank=options.rank, times=options.times))
        except UsageError as error:
            if options.operator:
                raise
            impossible[name] = str(error)
    pruned, constant_model = costs[0].pruned, costs[0].constant_model
    data = {
        "model": options.model,
        "dense": size.total,
        "pruned_experts": pruned,
        "constant_model": constant_model,
        "one_more_expert_per_layer": extra_experts(size),
        "operators": [one.to_json() for one in costs],
        "impossible": impossible,
    }
    rows = [
        [one.operator, one.per_expert, one.stored, one.added, f"{100 * one.added_share:.2f} %", one.total]
        for one in costs
    ]
    headers = ["operator", "per expert", "stored", "added", "of the constant model", "total"]
    experts = f"{pruned} of {size.layers * size.experts} experts pruned"
    text = [
        tabulate(rows, headers=headers, tablefmt="plain", intfmt=","),
        *(f"{name}: {reason}" for name, reason in impossible.items()),
        f"{options.model}: {size.total:,} values; {experts}; the constant model has {constant_model:,}",
        "added: over the constant model, which stores a mean per pruned expert; every router row counted",
        f"one more expert per layer: {extra_experts(size):,} values",
    ]
    return 0, data, "\n".join(text)


def _run(options: argparse.Namespace) -> Result:
    from prunebench.moe import quiet_libraries
    from prunebench.run import ArmSpec, Session
    from prunebench.run.arm import DEFAULT_SUITES, prepare

    quiet_libraries()
    spec = ArmSpec(
        model=options.model,
        method=options.method,
        parameters=tuple(options.param),
        mask=options.mask,
        operator=options.operator,
        operator_parameters=tuple(options.operator_param),
        operator_layers=options.operator_layers,
        scale=options.scale,
        groups=options.groups,
        ratio=options.ratio,
        keep=options.keep,
        scope=options.scope,
        protect=options.protect,
        spare=options.spare,
        text=options.text,
        blocks=options.blocks,
        length=options.length,
        draw=options.draw,
        fit_text=options.fit_text,
        fit_blocks=options.fit_blocks,
        fit_length=options.fit_length,
        fit_draw=options.fit_draw,
        quantize=options.quantize,
        quant_text=options.quant_text,
        quant_blocks=options.quant_blocks,
        quant_length=options.quant_length,
        quant_draw=options.quant_draw,
        suites=tuple(options.suite or DEFAULT_SUITES),
        seed=options.seed,
        **_machine(options),
    )
    near: dict[str, Any] = {}
    said = ""
    if options.match is not None:
        from prunebench.run.matching import matched

        spec, found = matched(spec, options.match)
        near = {"match": {"setting": options.match, "keep": found.setting, **found.to_json()}}
        said = f"keep {found.setting} against {options.match}: {found.text()}\n"
    arm = prepare(spec)
    if options.dry_run:
        data: dict[str, Any] = {"folder": str(options.out / spec.folder), "identity": arm.known, **near}
        return 0, data, f"{said}would run {options.out / spec.folder}\n{json.dumps(arm.known, indent=1)}"
    with _Progress() as progress:
        outcome = Session(options.out, progress=progress.step).execute(arm)
    record = outcome.run.record
    data = {"folder": str(outcome.folder), "reused": outcome.reused, "record": record, **near}
    return 0, data, said + _run_text(record, outcome.folder, reused=outcome.reused)


def _run_text(record: dict[str, Any], folder: Path, *, reused: bool) -> str:
    from tabulate import tabulate

    from prunebench.analysis import PERCENT

    rows = []
    for name, numbers in sorted(record["metrics"].items()):
        metric = name.rpartition("/")[2] if "/" in name else record["headline"][name][0][2]
        scale, digits, unit = (100, 1, " %") if metric in PERCENT else (1, 3, "")
        low, value, high = (f"{scale * numbers[key]:.{digits}f}" for key in ("low", "value", "high"))
        rows.append([name, value + unit, f"[{low}, {high}]", numbers["n"]])
    table = tabulate(rows, headers=["metric", "value", "95 % CI", "n"], disable_numparse=True, tablefmt="plain")
    checks = [check for check in record["integrity"] if check["status"] == "pass"]
    state = "already there" if reused else f"{record['volatile']['seconds']:.1f} s"
    megabytes = record["storage"]["total"] / 1e6
    summary = f"{len(checks)} integrity checks passed, {megabytes:.2f} MB stored, {record['status']}, {state}"
    for suite, counts in record.get("evaluation", {}).get("items", {}).items():
        summary += f"\n{suite}: " + ", ".join(f"{count} {what}" for what, count in counts.items())
    if "sandbox" in record["volatile"]:
        summary += f"\nprograms ran in: {record['volatile']['sandbox']}"
    return f"{table}\n{summary}\n{folder}"


def _grid(options: argparse.Namespace) -> Result:
    from prunebench.loader import resolve_track
    from prunebench.moe import quiet_libraries
    from prunebench.run import grid, prepare_all, read_track

    quiet_libraries()
    track = read_track(resolve_track(options.track), **_machine(options))
    if options.dry_run:
        return _dry_run(track.name, prepare_all(track), options.out)
    with _Progress() as progress:
        result = grid(track, options.out, jobs=options.jobs, announce=progress.say, progress=progress.step)
    data = {
        "done": result.done,
        "reused": result.reused,
        "failed": dict(result.failed),
        "score_passes": result.score_passes,
    }
    counts = f"{len(result.done)} done, {len(result.reused)} already there, {len(result.failed)} failed"
    text = f"{track.name}: {counts}, {result.score_passes} score passes"
    return 1 if result.failed else 0, data, text


def _dry_run(name: str, arms: Sequence[PreparedArm], records: Path) -> Result:
    """What a track would run, and what it would cost."""
    from prunebench.run.estimates import estimates, estimates_text

    costs = estimates(arms, records)
    folders = [arm.spec.folder for arm in arms]
    data = {"track": name, "arms": folders, "estimates": [one.to_json() for one in costs]}
    return 0, data, "\n".join([*(f"would run {folder}" for folder in folders), estimates_text(costs)])


def _compare(options: argparse.Namespace) -> Result:
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


def _board(options: argparse.Namespace) -> Result:
    from prunebench.board import build_board, build_track_board, committed, stale, write_board
    from prunebench.loader import content_root, resolve_track

    if options.out is None and options.data is None and not options.update:
        raise UsageError("nothing says where the board goes", fix="give --out, --data or --update")
    if options.check and options.data is None and not options.update:
        raise UsageError("nothing to check", fix="give --data or --update with --check")
    board = (
        build_board(options.records)
        if options.track is None
        else build_track_board(options.records, resolve_track(options.track))
    )
    cards = content_root() / "docs" / "methods"
    for one in board.left_out:
        print(f"left out {one}", file=sys.stderr)
    wanted = committed(board, options.data, options.update, cards)
    if options.check:
        old = [str(path) for path in stale(wanted)]
        text = "\n".join([f"stale: {path}" for path in old] or [f"{len(wanted)} files are what the records give"])
        return 1 if old else 0, {"stale": old}, text
    for path, content in wanted.items():
        write_atomically(path, content)
    data = {"rows": len(board.table.rows), "left_out": [str(one) for one in board.left_out]}
    files = [str(path) for path in wanted]
    if options.out is not None:
        result = write_board(board, options.out, cards=cards)
        data |= {"markdown": str(result.markdown), "json": str(result.json), "html": str(result.html)}
        files += [str(result.markdown), str(result.json), str(result.html)]
    return 0, data, "\n".join([f"{len(board.table.rows)} rows", *files])


def _submission(options: argparse.Namespace) -> Result:
    import tempfile

    from prunebench.loader import content_root
    from prunebench.moe import quiet_libraries
    from prunebench.run.submission import check_submission

    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="prunebench-") as out:
        root = options.checkout or content_root()
        found = check_submission(root, options.base, Path(out), sample=options.reproduce)
    return 1 if found.findings else 0, found.to_json(), found.to_text()


def _reproduce(options: argparse.Namespace) -> Result:
    import tempfile

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
        progress = stack.enter_context(_Progress())
        out = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prunebench-")))
        found = reproduce(options.run, out, **more, progress=progress.step)
    return 0 if found.agrees else 1, found.to_json(), found.to_text()


def _nightly(options: argparse.Namespace) -> Result:
    from prunebench.loader import content_root, resolve_track
    from prunebench.moe import quiet_libraries
    from prunebench.run import prepare_all, read_track
    from prunebench.run.nightly import nightly

    quiet_libraries()
    path = resolve_track(options.track)
    track = read_track(path, **_machine(options))
    records = options.out or content_root() / "leaderboard" / "records" / track.name
    board = options.board or Path("results") / track.name / "board"
    if options.dry_run:
        return _dry_run(track.name, prepare_all(track), records)
    with _Progress() as progress:
        night = nightly(track, path, records, board, jobs=options.jobs, announce=progress.say, progress=progress.step)
    lines = [f"FAILED {folder}: {reason}" for folder, reason in night.grid.failed]
    lines += [f"finding: {one}" for one in night.findings]
    if night.changes is None:
        lines.append(f"no new board: {len(night.findings)} findings")
    else:
        lines += [night.changes.markdown().rstrip(), str(board / "index.html")]
    return 0 if night.fine else 1, night.to_json(), "\n".join(lines)


def _validate(options: argparse.Namespace) -> Result:
    from prunebench.loader import content_root, file_digests
    from prunebench.run.stored import documents_of
    from prunebench.validation import validate_records

    paths = options.paths or [content_root() / "leaderboard" / "records"]
    with _Progress() as progress:
        methods = file_digests("methods")
        result = validate_records(paths, methods=methods, documents=documents_of(), progress=progress.step)
    lines = [*map(str, result.findings), *(f"note: {note}" for note in result.notes)]
    count = f"{result.runs} runs, {len(result.findings)} findings"
    return 1 if result.findings else 0, result.to_json(), "\n".join([*lines, count])


def _pack(options: argparse.Namespace) -> Result:
    from prunebench.packing import pack, unpack

    result = (unpack if options.unpack else pack)(options.records)
    for one in result.left_out:
        print(f"left out {one}", file=sys.stderr)
    word = "unpacked" if options.unpack else "packed"
    sizes = " to ".join(f"{size / 1e6:.2f}" for size in (result.bytes_before, result.bytes_after))
    text = f"{result.changed} runs {word}, {result.kept} already, {result.tables} tables of questions; {sizes} MB"
    return 0, result.to_json(), text


def _recompute(options: argparse.Namespace) -> Result:
    from prunebench.analysis.recompute import recompute
    from prunebench.record import read_run
    from prunebench.run.stored import stored_documents

    run = read_run(options.run)
    report = recompute(run, stored_documents(run))
    return 0 if report.agrees else 1, report.to_json(), report.to_text()


def _check(options: argparse.Namespace) -> Result:
    """Each method's report; exit 1 if a check of one failed."""
    from prunebench.conformance import card, index, report_of
    from prunebench.loader import load_method, load_method_class, parse_parameters
    from prunebench.mask import write_atomically
    from prunebench.moe import quiet_libraries

    quiet_libraries()
    expected = _expectations(options.expect)
    # Whatever is wrong with the request is said before minutes of checks.
    methods = [load_method(name, parse_parameters(load_method_class(name), options.param)) for name in options.methods]
    names = [type(method).name for method in methods]
    _check_cards(options, names)
    reports = []
    with _Progress() as progress:
        for method in methods:
            one = report_of(method, expected_failures=expected, only=options.only, progress=progress.step)
            reports.append(one)
    found = list(zip(methods, reports, strict=True))
    cards = [card(*one) for one in found]
    if options.cards is not None:
        for name, text in zip(names, cards, strict=True):
            write_atomically(options.cards / f"{name}.md", text.encode())
        if len(found) > 1:  # one method's card is no index
            write_atomically(options.cards / "README.md", index(found).encode())
    data = [report.to_json() for report in reports]
    texts = cards if options.markdown else [report.to_text() for report in reports]
    code = 0 if all(report.ok for report in reports) else 1
    return code, data[0] if len(data) == 1 else data, "\n".join(texts)


def _expectations(texts: Sequence[str]) -> dict[str, str]:
    """Reasons by check, as typed: CHECK=REASON."""
    expected: dict[str, str] = {}
    for text in texts:
        name, _, reason = text.partition("=")
        if not reason.strip():
            raise UsageError(f"--expect {text} gives no reason", expected="CHECK=REASON: why it is right that it fails")
        if name in expected:
            raise UsageError(f"two reasons are given for {name}", expected="one --expect for each check")
        expected[name] = reason
    return expected


def _check_cards(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise unless every method gets a whole card and a file of its own."""
    if options.cards is None:
        return
    if options.only:
        raise UsageError("--cards with --only", expected="cards of all checks", fix="leave --only out")
    for name in names:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
            raise UsageError(f"method name {name!r}", expected='name = "my-method": a card is named after it')
        if names.count(name) > 1:
            raise UsageError(f"two methods are named {name}", expected="a card each", fix="write them to two folders")
    try:
        options.cards.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=options.cards):
            pass
    except OSError as error:
        raise UsageError(
            "cannot write cards", where=str(options.cards), expected="a writable folder", fix=str(error)
        ) from error


def _new_method(options: argparse.Namespace) -> Result:
    from prunebench.conformance.new import write_template
    from prunebench.loader import available

    if options.name in available("methods"):
        raise UsageError(f"method {options.name!r} is there already", fix="choose another name")
    folder = options.folder or (Path("methods") if Path("methods").is_dir() else Path())
    path = write_template(options.name, folder)
    return 0, {"file": str(path)}, f"{path}\nnext: prunebench check {path}"


def _check_env(_options: argparse.Namespace) -> Result:
    """Each requirement with its state; exit 3 if a needed one is missing."""
    needed = {
        **{name: name for name in ("torch", "transformers", "datasets", "numpy", "pyarrow", "safetensors")},
        "lm_eval": "lm-eval",
        "huggingface_hub": "huggingface-hub",
        "yaml": "pyyaml",
        **{name: name for name in ("tabulate", "rich")},
    }
    optional = {
        "evalplus": "extra code",
        "compressed_tensors": "extra ct, for export --format ct",
        "accelerate": "extra gpu, for --device-map",
        "altair": "extra plots, for compare --plot",
        "vl_convert": "extra plots, for compare --plot",
    }
    distributions = {**needed, "vl_convert": "vl-convert-python", "compressed_tensors": "compressed-tensors"}
    rows: list[dict[str, str]] = [{"what": "python", "state": platform.python_version(), "need": "needed"}]
    missing = []
    for name in (*needed, *optional):
        found = importlib.util.find_spec(name) is not None
        state = importlib.metadata.version(distributions.get(name, name)) if found else "missing"
        rows.append({"what": name, "state": state, "need": "needed" if name in needed else optional[name]})
        if not found and name in needed:
            missing.append(name)
    if "torch" not in missing:
        import torch

        cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        rows.append({"what": "CUDA device", "state": cuda, "need": "optional"})
        rows.append(
            {"what": "torch threads", "state": str(torch.get_num_threads()), "need": "OMP_NUM_THREADS=1 advised"}
        )
    rows.append({"what": "sandbox", "state": _sandbox_state(), "need": "for suites that run programs"})
    rows.append({"what": "chromium", "state": shutil.which("chromium") or "missing", "need": "optional, for tests"})
    text = "\n".join(f"{row['what']:14} {row['state']:24} {row['need']}" for row in rows)
    if not missing:
        return 0, rows, text
    error = PrerequisiteError(f"missing: {', '.join(missing)}", fix="pip install prunebench")
    print(f"prunebench check-env: {error}", file=sys.stderr)
    return error.exit_code, rows, text


def _sandbox_state() -> str:
    """The sandbox's name and versions, or why there is none."""
    from prunebench.sandbox import boxed

    try:
        return boxed().name
    except PrerequisiteError as error:
        return f"missing: {error.what}"


if __name__ == "__main__":
    sys.exit(main())
