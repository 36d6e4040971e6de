"""`prunebench run` and `prunebench grid`: one arm, or all arms of a track."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunebench.cli.mask_studies import add_calibration
from prunebench.cli.masks import add_selection
from prunebench.cli.shared import Progress, Result, add_evaluation, evaluation_of

if TYPE_CHECKING:
    from prunebench.run.arm import PreparedArm
    from prunebench.storage import Match

__all__ = ["add_grid", "add_run", "dry_run", "run_arm", "run_grid"]


def add_run(run: argparse.ArgumentParser) -> None:
    """Options of `prunebench run`."""
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
    add_evaluation(run)


def add_grid(grid: argparse.ArgumentParser) -> None:
    """Options of `prunebench grid`."""
    grid.add_argument("track", metavar="TRACK", help="track by name, or a TOML file")
    grid.add_argument("--out", type=Path, default=Path("results"), help="records folder (default %(default)s)")
    grid.add_argument("--jobs", type=int, default=1, help="worker processes, one model each (default %(default)s)")
    add_evaluation(grid)


def run_arm(options: argparse.Namespace) -> Result:
    """Run one arm, or say what would run."""
    from prunebench.moe import quiet_libraries
    from prunebench.run import ArmSpec, Session
    from prunebench.run.arm import prepare
    from prunebench.run.spec import DEFAULT_SUITES

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
        **evaluation_of(options),
    )
    found: Match[int] | None = None
    if options.match is not None:
        from prunebench.run.matching import matched

        spec, found = matched(spec, options.match)
    arm = prepare(spec)
    near, said = _near(options.match, found)
    if options.dry_run:
        data: dict[str, Any] = {"folder": str(options.out / spec.folder), "identity": arm.known, **near}
        return 0, data, f"{said}would run {options.out / spec.folder}\n{json.dumps(arm.known, indent=1)}"
    with Progress() as progress:
        outcome = Session(options.out, progress=progress.step).execute(arm)
    record = outcome.run.record
    if found is not None:  # what is stored in the end: an operator may answer fewer experts than it might
        near, said = _near(options.match, replace(found, total=record["storage"]["total"]))
    data = {"folder": str(outcome.folder), "reused": outcome.reused, "record": record, **near}
    return 0, data, said + _run_text(record, outcome.folder, reused=outcome.reused)


def _near(setting: str | None, found: Match[int] | None) -> tuple[dict[str, Any], str]:
    """A match as data and as a line; nothing of none."""
    if found is None:
        return {}, ""
    data = {"match": {"setting": setting, "keep": found.setting, **found.to_json()}}
    return data, f"keep {found.setting} against {setting}: {found.text()}\n"


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


def run_grid(options: argparse.Namespace) -> Result:
    """Run a track's arms, or say which would run."""
    from prunebench.loader import resolve_track
    from prunebench.moe import quiet_libraries
    from prunebench.run import grid, prepare_all, read_track

    quiet_libraries()
    track = read_track(resolve_track(options.track), **evaluation_of(options))
    if options.dry_run:
        return dry_run(track.name, prepare_all(track), options.out)
    with Progress() as progress:
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


def dry_run(name: str, arms: Sequence[PreparedArm], records: Path) -> Result:
    """What a track would run, and what it would cost."""
    from prunebench.run.estimates import estimates, estimates_text

    costs = estimates(arms, records)
    folders = [arm.spec.folder for arm in arms]
    data = {"track": name, "arms": folders, "estimates": [one.to_json() for one in costs]}
    return 0, data, "\n".join([*(f"would run {folder}" for folder in folders), estimates_text(costs)])
