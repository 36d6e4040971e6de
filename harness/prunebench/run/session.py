"""Executing arms on one loaded model: calibrate, select, plan, prove, evaluate, record.

A `Session` holds the model that was loaded last and what is true of it (score passes, the empty-mask proof), so one
dense load and one score pass serve every arm on it. Score passes are also kept on disk beside the records, keyed by
content, so an interrupted grid resumes without repeating them.
"""

from __future__ import annotations

import copy
import fcntl
import importlib.metadata
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import prunebench
from prunebench.analysis import metrics_from_items
from prunebench.calibration import CalibrationTokens, ScoreResult, Statistic, score_pass
from prunebench.calibration.score import with_built_in
from prunebench.errors import PruneBenchError, UsageError
from prunebench.evaluate import Evaluation, bos_policy
from prunebench.install import installed
from prunebench.integrity import Check, check_before_evaluation, check_counters, check_empty_mask, demand
from prunebench.loader import content_root, source_of
from prunebench.mask import Mask, canonical_json
from prunebench.method import Method
from prunebench.moe import LoadedModel, load_model
from prunebench.plan import Plan, layer_views, make_plan
from prunebench.record import SCHEMA, Item, Run, items_to_table, read_run, run_id, write_run
from prunebench.replacement import Constant, Zero
from prunebench.run.arm import DEFAULT_SUITES, ArmSpec, PreparedArm, calibration_tokens, matches, prepare, same_torch
from prunebench.storage import part_of, pruned_bytes, read_headers, stored_bytes
from prunebench.suite import Suite

__all__ = ["Outcome", "Session", "check_writable", "finished", "run"]

REPEATED_ITEMS = 8
PACKAGES = ("torch", "transformers", "lm-eval", "numpy", "tokenizers", "safetensors")
CACHE = ".cache"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outcome:
    """What became of an arm: its run folder, the run, and whether it had been there already."""

    folder: Path
    run: Run
    reused: bool


def finished(arm: PreparedArm, out: Path) -> Run | None:
    """The arm's finished run under `out`, if there is one: whole, and of an identity that agrees with the request."""
    folder = out / arm.spec.folder
    try:
        run = read_run(folder)
    except PruneBenchError:
        return None
    return run if matches(run.record["identity"], arm.known) else None


class Session:
    """Executes arms, keeping the last model loaded.

    Args:
        out: records folder; score passes are cached below it, in a hidden folder.
        progress: called with (what, done, total).
    """

    def __init__(self, out: Path, *, progress: Progress | None = None) -> None:
        self.out = out
        self.progress = progress
        self.score_passes = 0
        self._loaded: tuple[tuple[Any, ...], LoadedModel] | None = None
        self._passes: dict[str, ScoreResult] = {}
        self._proofs: dict[str, Check] = {}

    def execute(self, arm: PreparedArm) -> Outcome:
        """Run an arm to a run folder, or return the finished run that is there.

        Raises:
            UsageError: bad input, an unwritable or occupied folder.
            IntegrityError: a check failed; nothing is written.
        """
        folder = self.out / arm.spec.folder
        if (run := finished(arm, self.out)) is not None:
            return Outcome(folder, run, reused=True)
        check_writable(folder.parent)
        self._check_free(folder)
        with _naming_the_file(arm):
            return self._execute(arm, folder)

    def _execute(self, arm: PreparedArm, folder: Path) -> Outcome:
        started, clock = datetime.now(UTC), time.monotonic()
        loaded = self._model(arm)
        tokens = arm.tokens or calibration_tokens(arm.calibration, loaded.tokenizer)
        plan, mask_source = self._plan(arm, loaded, tokens)
        checks = [self._empty_mask_proof(loaded, tokens)]
        if plan is not None:
            checks += check_before_evaluation(loaded.moe, plan, tokens.ids_BL)
        demand(checks)
        items, evaluated, counters = self._evaluate(arm, loaded, plan)
        checks += evaluated
        record = _record_of(
            arm,
            plan,
            tokens=tokens,
            mask_source=mask_source,
            items=items,
            checks=checks,
            routing={"bos": bos_policy(loaded.tokenizer), "layers": _routing_of(counters, plan)},
        )
        record["volatile"] = {
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - clock, 3),
            "host": platform.node(),
            "processor": platform.processor() or platform.machine(),
            "threads": _threads(),
        }
        write_run(folder, record, items)
        return Outcome(folder, read_run(folder), reused=False)

    # --- steps

    def _report(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)

    def _check_free(self, folder: Path) -> None:
        """Find out now, not after the evaluation, that another run is in the way."""
        try:
            other = read_run(folder)
        except PruneBenchError:
            return
        raise UsageError(
            f"the folder holds another run ({other.record['run_id']})",
            where=str(folder),
            expected="an empty place, or the same request",
            fix="give another --out, or move that run away",
        )

    def _model(self, arm: PreparedArm) -> LoadedModel:
        spec = arm.spec
        key = (arm.folder, spec.device, spec.dtype, spec.device_map, arm.known["experts_implementation"])
        if self._loaded is None or self._loaded[0] != key:
            # Let go of the old model first: two may not fit.
            self._loaded = None
            self._passes.clear()
            self._proofs.clear()
            self._report(f"load {spec.model}", 0, 1)
            loaded = load_model(
                spec.model,
                arm.folder,
                device=spec.device,
                dtype=spec.dtype,
                device_map=spec.device_map,
                experts_implementation=arm.known["experts_implementation"],
            )
            self._loaded = (key, loaded)
        return self._loaded[1]

    def _plan(self, arm: PreparedArm, loaded: LoadedModel, tokens: CalibrationTokens) -> tuple[Plan | None, str | None]:
        """The arm's plan and where its mask is from; (None, None) if dense."""
        if arm.operator is None:
            return None, None
        needs = (*(arm.method.select_needs() if arm.method and arm.mask is None else ()), *arm.operator.replace_needs())
        scores = self._scores(arm, loaded, tokens, needs) if needs else None
        if arm.mask is not None:
            mask, source = arm.mask, "file"
        else:
            assert arm.method is not None
            with same_torch():
                mask, source = self._select(arm, arm.method, loaded, copy.deepcopy(scores)), arm.method.name
        # Copies: what a method does to its statistics must not reach the next arm.
        with same_torch():
            return make_plan(loaded.moe, mask, arm.operator, copy.deepcopy(scores), scale=arm.scale), source

    def _select(self, arm: PreparedArm, method: Method, loaded: LoadedModel, scores: ScoreResult | None) -> Mask:
        assert arm.budget is not None
        declared = tuple(statistic.name for statistic in method.select_needs())
        views = layer_views(loaded.moe, scores, declared, f"{method.name}.select_needs")
        mask = method.select(views, arm.budget, rng=np.random.default_rng(arm.spec.seed))
        if not isinstance(mask, Mask):
            raise UsageError(
                f"select returned a {type(mask).__name__}", where=f"method {method.name}", expected="a prunebench.Mask"
            )
        mask.check_fits(loaded.moe.shapes, where=f"{method.name}.select")
        for layer, shape in zip(mask.layers, loaded.moe.shapes, strict=True):
            if len(layer.pruned) != arm.budget.pruned_count(shape):
                raise UsageError(
                    f"select pruned {len(layer.pruned)} experts",
                    where=f"method {method.name}, layer {layer.index}",
                    expected=f"{arm.budget.pruned_count(shape)}, as the budget says",
                )
        return mask

    def _scores(
        self, arm: PreparedArm, loaded: LoadedModel, tokens: CalibrationTokens, needs: Sequence[Statistic]
    ) -> ScoreResult:
        """The score pass that holds these statistics: from memory, from disk, or run now by one process only."""
        statistics = with_built_in(needs)
        key = canonical_json(
            [
                *(arm.known[name] for name in ("model", "dtype", "device", "experts_implementation", "batch_tokens")),
                tokens.fingerprint,
                {s.name: [type(s).__module__, s.version] for s in statistics},
            ]
        )
        if key not in self._passes:
            path = self.out / CACHE / f"scores-{sha256(key.encode()).hexdigest()[:16]}.safetensors"
            with _lock(path):
                scores = ScoreResult.load(path, key, statistics)
                if scores is None:
                    self.score_passes += 1
                    scores = score_pass(
                        loaded.moe,
                        tokens,
                        statistics,
                        batch_tokens=arm.spec.batch_tokens,
                        progress=lambda done, total: self._report("score pass", done, total),
                    )
                    scores.save(path, key)
            self._passes[key] = scores
        return self._passes[key]

    def _empty_mask_proof(self, loaded: LoadedModel, tokens: CalibrationTokens) -> Check:
        """Check 1, once per loaded model and calibration text."""
        if tokens.fingerprint not in self._proofs:
            self._proofs[tokens.fingerprint] = check_empty_mask(loaded.moe, tokens.ids_BL[:8])
        return self._proofs[tokens.fingerprint]

    def _evaluate(
        self, arm: PreparedArm, loaded: LoadedModel, plan: Plan | None
    ) -> tuple[list[Item], list[Check], dict[int, dict[str, float]]]:
        """All items, the checks that need an evaluation, and the counters by layer."""
        spec = arm.spec
        evaluation = Evaluation(loaded.moe.model, loaded.tokenizer, spec.batch_tokens, spec.limit, self.progress)
        # The dense model runs without any hook: what the others are compared with is not touched at all.
        context = installed(loaded.moe, plan) if plan is not None else nullcontext()
        with context as instrument:
            items = [item for suite in arm.suites for item in suite.run(evaluation)]
            checks = [_repeated(arm.suites, replace(evaluation, limit=REPEATED_ITEMS, progress=None))]
        if plan is None or instrument is None:
            return items, demand(checks), {}
        counters = {index: counted.read() for index, counted in sorted(instrument.counters.items())}
        return items, demand([*checks, *check_counters(plan, counters)]), counters


def run(*, out: str | Path = "results", progress: Progress | None = None, **options: Any) -> Outcome:
    """Run one arm, as `prunebench run` does.

    Args:
        out: records folder.
        progress: called with (what, done, total).
        options: fields of `ArmSpec`; `model` is required. `ratio` may be a number, and files may be paths.

    Example:
        >>> prunebench.run(model="tiny-olmoe", method="reap", ratio=0.5)  # doctest: +SKIP
    """
    for name in ("model", "method", "mask", "operator", "ratio"):
        if options.get(name) is not None:
            options[name] = str(options[name])
    for name in ("suites", "parameters", "operator_parameters"):
        if name in options:
            given = options[name]
            options[name] = (given,) if isinstance(given, str) else tuple(map(str, given))
    options.setdefault("suites", DEFAULT_SUITES)
    try:
        spec = ArmSpec(**options)
    except TypeError as error:
        raise UsageError(f"run: {error}", expected=", ".join(ArmSpec.__dataclass_fields__)) from error
    return Session(Path(out), progress=progress).execute(prepare(spec))


# --- parts of the record


def _record_of(
    arm: PreparedArm,
    plan: Plan | None,
    *,
    tokens: CalibrationTokens,
    mask_source: str | None,
    items: Sequence[Item],
    checks: Sequence[Check],
    routing: dict[str, Any],
) -> dict[str, Any]:
    """The record of an arm but for its volatile fields."""
    spec = arm.spec
    identity = {
        **arm.known,
        "calibration": None if plan is None else tokens.to_json(),
        "mask": None if plan is None else {"digest": plan.mask.digest, "source": mask_source},
    }
    headline = {suite.name: [list(cell) for cell in suite.headline] for suite in arm.suites}
    return {
        "schema": SCHEMA,
        "status": "complete" if spec.limit is None else "partial",
        "run_id": run_id(identity),
        "identity": identity,
        "arm": {
            "model": arm.known["model"]["name"],
            "convention": arm.convention.describe(),
            "mask": None if plan is None else Path(spec.mask).stem if spec.mask else mask_source,
            "operator": _operator_name(arm, plan),
            "scale": _asked_scale(arm, plan),
            "resolved_scale": ", ".join(plan.scales) or None if plan is not None else None,
            "ratio": None if plan is None else _pruned_share(plan),
            "keep": spec.keep,
            "draw": None if plan is None else spec.draw,
            "dense": plan is None,
        },
        "metrics": metrics_from_items(items_to_table(items), headline),
        "headline": headline,
        "integrity": [check.to_json() for check in checks],
        "storage": _storage(arm.folder, plan),
        "routing": routing,
        "mask": None if plan is None else plan.mask.to_json(),
        "tensors": {} if plan is None else plan.manifest(),
        "provenance": _provenance(),
    }


def _repeated(suites: Sequence[Suite], evaluation: Evaluation) -> Check:
    """Check 8: the first items of each suite, asked twice, have equal outcomes."""
    for suite in suites:
        first, second = suite.run(evaluation), suite.run(evaluation)
        for one, other in zip(first, second, strict=True):
            if one != other:
                return Check("repeated items are equal", "fail", f"{one.where}: {one.value} and {other.value}")
    return Check("repeated items are equal", "pass", f"first {REPEATED_ITEMS} of each task, twice")


def _operator_name(arm: PreparedArm, plan: Plan | None) -> str | None:
    """What the arm does with pruned slots, in the house's words where they apply; else the file's name."""
    if plan is None:
        return None
    assert arm.operator is not None
    if plan.fills_nothing:
        return "reroute"
    kinds = {fill.kind for layer in plan.layers for fill in layer.fills.values() if fill.file is None}
    own = {Constant.__name__: "constant", Zero.__name__: "zero"}
    return own[kinds.pop()] if plan.keeps_slots and len(kinds) == 1 else arm.operator.name


def _asked_scale(arm: PreparedArm, plan: Plan | None) -> str | None:
    if plan is None or not plan.scales:
        return None
    if arm.scale is not None:
        return str(arm.scale)
    return str(arm.operator.parameters().get("scale", plan.scales[0])) if arm.operator else None


def _pruned_share(plan: Plan) -> float:
    return plan.mask.pruned_count / sum(layer.experts for layer in plan.mask.layers)


def _storage(folder: Path, plan: Plan | None) -> dict[str, Any]:
    """Bytes of the arm's checkpoint.

    Fills are stored in the dtype of the experts, and rerouting at renorm alone lets the pruned experts' router rows go
    (2610.41366 §3).
    """
    headers = read_headers(folder)
    if plan is None:
        return {name: value for name, value in stored_bytes(headers).items() if name in ("total", "parts")}
    expert = next(tensor for name, tensor in headers.items() if part_of(name) == "experts")
    value_bytes = expert.bytes // max(1, int(np.prod(expert.shape)))
    keep_rows = not (plan.fills_nothing and plan.scales == ("renorm",))
    return pruned_bytes(
        headers, plan.mask, fill_values_bytes=plan.values_stored * value_bytes, keep_router_rows=keep_rows
    )


def _routing_of(counters: dict[int, dict[str, float]], plan: Plan | None) -> dict[str, dict[str, float]]:
    """Per layer: how often a slot was asked of a pruned expert, and how far the two scales are apart (2610.41366 §5.3).

    `displaced_share` is the share of token-layer calls whose unpruned top-k held an unroutable expert; over those,
    `keep_over_renorm` is the mean ratio of the gates' totals under the two scales and `above_one_share` how often it
    exceeds 1.
    """
    if plan is None:
        return {}
    result = {}
    for index, counted in counters.items():
        displaced = counted["displaced"]
        result[str(index)] = {
            "calls": counted["calls"],
            "filled_share": counted["asked"] / counted["slots"] if counted["slots"] else 0.0,
            "displaced_share": displaced / counted["calls"] if counted["calls"] else 0.0,
            "keep_over_renorm": counted["ratio_sum"] / displaced if displaced else 1.0,
            "above_one_share": counted["ratio_above_one"] / displaced if displaced else 0.0,
        }
    return result


def _provenance() -> dict[str, Any]:
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "unknown"
    return {"prunebench": prunebench.__version__, "packages": packages, "git": _git()}


def _git() -> dict[str, Any] | None:
    """Revision of the checkout that runs, and whether tracked files differ from it; None outside a checkout."""
    root = content_root()

    def ask(*command: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True)  # noqa: S607
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    revision = ask("rev-parse", "HEAD")
    return None if revision is None else {"revision": revision, "dirty": bool(ask("status", "--porcelain", "-uno"))}


def _threads() -> int:
    import torch

    return torch.get_num_threads()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold `path`'s lock among processes; a killed holder lets go."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_writable(folder: Path) -> None:
    """Find out now, not after the evaluation, that nothing can be written; makes the folder.

    Raises:
        UsageError: with the system's reason.
    """
    probe = folder / f".{os.getpid()}.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> UsageError:
    return UsageError("cannot write there", where=str(folder), expected="a writable folder", fix=str(error))


@contextmanager
def _naming_the_file(arm: PreparedArm) -> Iterator[None]:
    """Whatever an arm's method, operator or suite raises becomes one line with its file and line number.

    An error that passed through a method's or an operator's code is theirs; one that passed through a suite is the
    suite's unless it came up in prunebench itself, which then shows its traceback: a bug of ours.
    """
    try:
        yield
    except PruneBenchError:
        raise
    except (Exception, SystemExit) as error:
        methods = {str(source_of(type(method)).path) for method in (arm.method, arm.operator) if method is not None}
        suites = {str(suite.file) for suite in arm.suites}
        package = str(Path(prunebench.__file__).parent)
        frames = traceback.extract_tb(error.__traceback__)
        places = [frame for frame in frames if frame.filename in methods]
        if not places:
            known = [frame for frame in frames if frame.filename in suites or frame.filename.startswith(package)]
            places = [frame for frame in known[-1:] if frame.filename in suites]
        if not places:
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(
            f"{type(error).__name__} in {places[-1].name}: {reason}", where=f"{places[-1].filename}:{places[-1].lineno}"
        ) from error
