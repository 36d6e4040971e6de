"""Executing arms on one loaded model: calibrate, select, plan, prove, evaluate, record.

A `Session` holds the model that was loaded last and what is true of it (score and gradient passes, the empty-mask
proof), so one dense load and one pass of each serve every arm on it. These passes are also kept on disk beside the
records, keyed by content, so an interrupted grid resumes without repeating them.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunebench.calibration import (
    CalibrationSpec,
    CalibrationTokens,
    OutputMax,
    ScoreResult,
    Statistic,
    by_pass,
    find_super_experts,
    gradient_pass,
    score_pass,
    split_gradient,
)
from prunebench.calibration.score import distinct, settings_of, with_built_in
from prunebench.calibration.stream import Checkpoint
from prunebench.errors import PruneBenchError, UsageError
from prunebench.evaluate import Evaluation, bos_policy, end_tokens
from prunebench.evaluate.journal import Journal
from prunebench.evaluate.sharing import device_of, piece_tokens
from prunebench.install import installed, programs_of
from prunebench.integrity import (
    Check,
    check_before_evaluation,
    check_counters,
    check_empty_mask,
    check_quantized,
    demand,
)
from prunebench.items import LostQuestionsError
from prunebench.mask import Mask, canonical_json
from prunebench.method import Float64, Method, collected_scores
from prunebench.moe import LoadedModel, load_model
from prunebench.plan import FittedPlan, Plan, fit_plan, make_plan
from prunebench.quantize import QuantizedModel, quantize_model
from prunebench.record import Item, Run, read_run, write_run
from prunebench.run.arm import PreparedArm, matches, prepare
from prunebench.run.foreign import naming_the_file, same_torch
from prunebench.run.recording import git_state, record_of, routing_of
from prunebench.run.selection import choose_mask
from prunebench.run.sources import calibration_tokens
from prunebench.run.spec import ArmSpec
from prunebench.sandbox import OPEN, boxed
from prunebench.suite import Suite

__all__ = ["CACHE", "Outcome", "Session", "check_writable", "finished", "run"]

REPEATED_ITEMS = 8
CACHE = ".cache"
"""Below the records folder: passes that later arms need again."""

Progress = Callable[[str, int, int], None]
_Suspending = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Outcome:
    """What became of an arm: its run folder, the run, and whether it had been there already."""

    folder: Path
    run: Run
    reused: bool


def finished(arm: PreparedArm, out: Path) -> Run | None:
    """The arm's finished run under `out`, if there is one: whole, and of an identity that agrees with the request.

    Raises:
        LostQuestionsError: if one is there, packed, without its table.
    """
    folder = out / arm.spec.folder
    try:
        run = read_run(folder)
    except LostQuestionsError:
        raise
    except PruneBenchError:
        return None
    return run if matches(run.record["identity"], arm.known) else None


class Session:
    """Executes arms, keeping the last model loaded.

    Args:
        out: records folder; score and gradient passes are cached below it, in a hidden folder.
        progress: called with (what, done, total).
    """

    def __init__(self, out: Path, *, progress: Progress | None = None) -> None:
        self.out = out
        self.progress = progress
        self.score_passes = 0
        self.gradient_passes = 0
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
        with naming_the_file(arm.method_files, frozenset(str(suite.file) for suite in arm.suites)):
            return self._execute(arm, folder)

    def choose(self, arm: PreparedArm) -> Mask:
        """The arm's mask, and nothing else; its `report` says how it came about.

        Raises:
            UsageError: bad input, or an arm without a criterion.
        """
        if arm.mask is not None or arm.method is None:
            raise UsageError("no criterion to choose a mask by", fix="give a method that selects")
        with naming_the_file(arm.method_files, frozenset()):
            loaded = self._model(arm)
            text = None if arm.calibration is None else self._tokens(arm, loaded)[arm.calibration]
            needs = _choosing(arm)
            scores = None if text is None or not needs else self._scores(arm, loaded, text, needs)
            with same_torch():
                return self._select(arm, arm.method, loaded, scores, text)

    def rank(self, arm: PreparedArm) -> dict[int, Float64]:
        """What the arm's criterion ranks experts by: layer index -> [E] scores, high is kept.

        Raises:
            UsageError: as `choose`; a criterion that does not rank single experts.
        """
        with collected_scores() as scores:
            self.choose(arm)
        if not scores:
            raise UsageError(
                f"{arm.spec.method} gives experts no scores of their own",
                expected="a criterion that ranks single experts (prunebench.prune_lowest)",
            )
        return scores

    def open(self, arm: PreparedArm) -> LoadedModel:
        """The arm's model, loaded if another one was."""
        return self._model(arm)

    def measured(self, arm: PreparedArm, tokens: CalibrationTokens, needs: Sequence[Statistic]) -> ScoreResult:
        """These statistics of a score or gradient pass over a text, from memory or disk if they are there."""
        return self._scores(arm, self._model(arm), tokens, needs)

    def plan(self, arm: PreparedArm) -> Plan | None:
        """The arm's plan, None if dense; nothing is evaluated or written.

        Raises:
            UsageError: bad input.
        """
        return self._made(arm)[2]

    def quantized(self, arm: PreparedArm, plan: Plan | None) -> QuantizedModel | None:
        """The integers of the arm's plan, None if it is not quantized; nothing is evaluated or written."""
        loaded = self._model(arm)
        return self._quantize(arm, loaded, plan, self._tokens(arm, loaded))

    def planned(self, arm: PreparedArm) -> tuple[LoadedModel, Plan | None, Tensor]:
        """The arm's model, its plan if it is not dense, and [B, L] calibration tokens; proven, and not evaluated.

        Raises:
            UsageError: bad input.
            IntegrityError: a check failed.
        """
        loaded, probe, plan = self._made(arm)
        self._prove(arm, loaded, plan, probe, None)
        return loaded, plan, probe.ids_BL

    def _made(self, arm: PreparedArm) -> tuple[LoadedModel, CalibrationTokens, Plan | None]:
        """The arm's model, the tokens that it is calibrated on, and its plan if it is not dense."""
        with naming_the_file(arm.method_files, frozenset()):
            loaded = self._model(arm)
            tokens = self._tokens(arm, loaded)
            plan, _, fitted = self._plan(arm, loaded, tokens)
        if fitted is not None and fitted.checkpoint is not None:
            fitted.checkpoint.forget()
        return loaded, tokens[arm.spec.calibration], plan

    def _execute(self, arm: PreparedArm, folder: Path) -> Outcome:
        started, clock = datetime.now(UTC), time.monotonic()
        loaded = self._model(arm)
        tokens = self._tokens(arm, loaded)
        plan, mask_source, fitted = self._plan(arm, loaded, tokens)
        quantized = self._quantize(arm, loaded, plan, tokens)
        with quantized.installed(loaded.moe) if quantized is not None else nullcontext(nullcontext) as unquantized:
            deployed = plan
            if plan is not None and quantized is not None:
                deployed = replace(plan, edits=quantized.unquantized(loaded.moe, plan.edits))
            checks = self._prove(arm, loaded, deployed, tokens[arm.spec.calibration], quantized)
            journal = self._journal(arm, plan, quantized)
            try:
                items, evaluated, counters, fell_back = self._evaluate(arm, loaded, deployed, journal, unquantized)
            finally:
                if journal is not None:
                    journal.close()
        checks += evaluated
        record = record_of(
            arm,
            plan,
            tokens=tokens,
            mask_source=mask_source,
            items=items,
            checks=checks,
            routing={"bos": _bos(arm, loaded), "layers": routing_of(counters, plan, arm.convention)},
            fitted=fitted,
            protocol=_protocol(arm, loaded, fell_back),
            quantized=quantized,
        )
        record["volatile"] = {
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - clock, 3),
            "host": platform.node(),
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "git": git_state(),
            **self._executor(arm),
        }
        write_run(folder, record, items)
        if journal is not None:
            journal.forget()
        if fitted is not None and fitted.checkpoint is not None:
            fitted.checkpoint.forget()
        return Outcome(folder, read_run(folder), reused=False)

    # --- steps

    def _executor(self, arm: PreparedArm) -> dict[str, Any]:
        """Where programs ran, if any did. It is no part of the identity: the sandbox's version changes no verdict."""
        if not any(suite.runs_programs for suite in arm.suites):
            return {}
        box = OPEN if arm.spec.unsafe_local else boxed()
        return {"sandbox": box.name, "python": platform.python_version()}

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

    def _tokens(self, arm: PreparedArm, loaded: LoadedModel) -> dict[CalibrationSpec, CalibrationTokens]:
        """The tokens of every calibration of the arm, and of the one that its proofs run on."""
        wanted = (arm.spec.calibration, arm.calibration, arm.fit, arm.quant)
        return {
            one: arm.tokens[one] if one in arm.tokens else calibration_tokens(one, loaded.tokenizer)
            for one in dict.fromkeys(wanted)
            if one is not None
        }

    def _plan(
        self, arm: PreparedArm, loaded: LoadedModel, tokens: Mapping[CalibrationSpec, CalibrationTokens]
    ) -> tuple[Plan | None, str | None, FittedPlan | None]:
        """The arm's plan, where its mask is from, and how a fit pass went; nothing if dense.

        A fit pass is one operator's on one mask, so nothing of it is kept for other arms; the other passes are.
        """
        if arm.operator is None:
            return None, None, None
        needs: dict[CalibrationSpec, list[Statistic]] = {}
        fit_needs = by_pass(arm.operator.replace_needs())
        fitting = (*fit_needs.score, *fit_needs.gradient, *(arm.elsewhere.replace_needs() if arm.elsewhere else ()))
        for one, wanted in ((arm.calibration, _choosing(arm)), (arm.fit, fitting)):
            if one is not None and wanted:
                needs.setdefault(one, []).extend(wanted)
        scores = {one: self._scores(arm, loaded, tokens[one], wanted) for one, wanted in needs.items()}
        chosen_on = scores.get(arm.calibration) if arm.calibration is not None else None
        fitted_on = scores.get(arm.fit) if arm.fit is not None else None
        if arm.mask is not None:
            mask, source = arm.mask, "file"
        else:
            assert arm.method is not None
            with same_torch():
                text = tokens[arm.calibration] if arm.calibration is not None else None
                mask, source = self._select(arm, arm.method, loaded, chosen_on, text), arm.method.name
        with same_torch():
            plan, fitted = self._answers(arm, arm.operator, loaded, mask, fitted_on, tokens)
            if arm.elsewhere is not None:
                plan = plan.only_in(arm.spec.only_in, make_plan(loaded.moe, mask, arm.elsewhere, fitted_on))
        return plan, source, fitted

    def _answers(  # noqa: PLR0917  what a plan is made of
        self,
        arm: PreparedArm,
        operator: Method,
        loaded: LoadedModel,
        mask: Mask,
        scores: ScoreResult | None,
        tokens: Mapping[CalibrationSpec, CalibrationTokens],
    ) -> tuple[Plan, FittedPlan | None]:
        """The operator's plan, from statistics that are there or in a fit pass, which a killed run resumes."""
        if arm.fit is None or not operator.in_fit_pass():
            return make_plan(loaded.moe, mask, operator, scores, scale=arm.scale), None
        key = canonical_json([arm.known, mask.digest, tokens[arm.fit].fingerprint])
        folder = self.out / CACHE / f"fit-{sha256(key.encode()).hexdigest()[:16]}"
        fitted = fit_plan(
            loaded.moe,
            mask,
            operator,
            scores,
            tokens[arm.fit],
            batch_tokens=arm.spec.batch_tokens,
            scale=arm.scale,
            layers=arm.spec.only_in or None,
            checkpoint=Checkpoint(folder, key),
            progress=self._report,
        )
        return fitted.plan, fitted

    def _select(
        self,
        arm: PreparedArm,
        method: Method,
        loaded: LoadedModel,
        scores: ScoreResult | None,
        tokens: CalibrationTokens | None,
    ) -> Mask:
        assert arm.budget is not None
        budget, found = arm.budget, None
        if arm.protects is not None:
            assert tokens is not None
            assert scores is not None
            found = find_super_experts(
                loaded.moe,
                tokens,
                scores,
                arm.protects,
                batch_tokens=arm.spec.batch_tokens,
                progress=lambda done, total: self._report("super experts", done, total),
            )
            budget = replace(budget, protected=found.protected)
            budget.check(loaded.moe.shapes)
        mask = choose_mask(
            loaded.moe,
            method,
            budget,
            needs=arm.select_needs,
            scores=scores if arm.select_needs else None,
            tokens=tokens,
            rng=np.random.default_rng(arm.spec.seed),
            batch_tokens=arm.spec.batch_tokens,
            policy=arm.policy,
            progress=self._report,
        )
        return (
            mask if found is None else replace(mask, report={**(mask.report or {}), "super_experts": found.to_json()})
        )

    def _scores(
        self, arm: PreparedArm, loaded: LoadedModel, tokens: CalibrationTokens, needs: Sequence[Statistic]
    ) -> ScoreResult:
        """What holds these statistics: a score pass, a gradient pass, or both."""
        others, gradient = split_gradient(needs)
        # One sequence at a time, so a gradient pass does not depend on the batch.
        basis = [arm.known[name] for name in ("model", "dtype", "device", "experts_implementation")]
        found: list[ScoreResult] = []

        def score() -> ScoreResult:
            self.score_passes += 1
            return score_pass(
                loaded.moe,
                tokens,
                with_built_in(others),
                batch_tokens=arm.spec.batch_tokens,
                progress=lambda done, total: self._report("score pass", done, total),
            )

        def differentiate() -> ScoreResult:
            self.gradient_passes += 1
            return gradient_pass(
                loaded.moe,
                tokens,
                split_gradient(distinct(gradient))[1],
                progress=lambda done, total: self._report("gradient pass", done, total),
            )

        if others:
            key = [*basis, arm.known["batch_tokens"], tokens.fingerprint]
            found.append(self._kept("scores", key, with_built_in(others), score))
        if gradient:
            found.append(self._kept("gradients", [*basis, tokens.fingerprint], distinct(gradient), differentiate))
        return found[0] if len(found) == 1 else found[0].joined(found[1])

    def _kept(
        self, kind: str, basis: Sequence[Any], statistics: Sequence[Statistic], measure: Callable[[], ScoreResult]
    ) -> ScoreResult:
        """A pass: from memory, from disk, or run now by one process only."""
        key = canonical_json([*basis, {s.name: [type(s).__module__, s.version, settings_of(s)] for s in statistics}])
        name = f"{kind}-{sha256(key.encode()).hexdigest()[:16]}.safetensors"
        if name not in self._passes:
            path = self.out / CACHE / name
            with _lock(path):
                scores = ScoreResult.load(path, key, statistics)
                if scores is None:
                    scores = measure()
                    scores.save(path, key)
            self._passes[name] = scores
        return self._passes[name]

    def _quantize(
        self,
        arm: PreparedArm,
        loaded: LoadedModel,
        plan: Plan | None,
        tokens: Mapping[CalibrationSpec, CalibrationTokens],
    ) -> QuantizedModel | None:
        """The quantized model that the arm asks for; pruned, filled and edited before."""
        if arm.quantize is None:
            return None
        assert arm.quant is not None
        return quantize_model(
            loaded.moe,
            arm.quantize,
            tokens[arm.quant],
            programs=None if plan is None else programs_of(plan, policy=arm.policy),
            batch_tokens=arm.spec.batch_tokens,
            progress=lambda what, done, total: self._report(f"quantize, {what}", done, total),
        )

    def _prove(
        self,
        arm: PreparedArm,
        loaded: LoadedModel,
        plan: Plan | None,
        probe: CalibrationTokens,
        quantized: QuantizedModel | None,
    ) -> list[Check]:
        """The checks before the evaluation; those of a quantized model are made on its weights."""
        if quantized is None:
            checks = [self._empty_mask_proof(loaded, probe)]
        else:
            checks = [check_empty_mask(loaded.moe, probe.ids_BL[:8]), check_quantized(loaded.moe, plan, quantized)]
        if plan is not None:
            checks += check_before_evaluation(loaded.moe, plan, probe.ids_BL, policy=arm.policy)
        return demand(checks)

    def _empty_mask_proof(self, loaded: LoadedModel, tokens: CalibrationTokens) -> Check:
        """Check 1, once per loaded model and calibration text."""
        if tokens.fingerprint not in self._proofs:
            self._proofs[tokens.fingerprint] = check_empty_mask(loaded.moe, tokens.ids_BL[:8])
        return self._proofs[tokens.fingerprint]

    def _journal(self, arm: PreparedArm, plan: Plan | None, quantized: QuantizedModel | None) -> Journal | None:
        """Where the arm's finished batches are kept until its run is written; None if another process is at it."""
        about = None if plan is None else [plan.to_json(), plan.manifest(), plan.edit_manifest()]
        key = canonical_json([arm.known, about, *([] if quantized is None else [quantized.digest()])])
        try:
            return Journal(self.out / CACHE / f"answers-{sha256(key.encode()).hexdigest()[:16]}.jsonl", key)
        except BlockingIOError:
            return None

    def _evaluate(
        self,
        arm: PreparedArm,
        loaded: LoadedModel,
        plan: Plan | None,
        journal: Journal | None,
        unquantized: _Suspending,
    ) -> tuple[list[Item], list[Check], dict[int, dict[str, float]], dict[str, list[str]]]:
        """All items, the checks that need an evaluation, the counters by layer, and suites' reasons for a fallback."""
        spec = arm.spec
        evaluation = Evaluation(
            loaded.moe.model,
            loaded.tokenizer,
            spec.batch_tokens,
            spec.limit,
            self.progress,
            unsafe_local=spec.unsafe_local,
            sampling=spec.drawn,
            truncate=spec.truncate,
            chat_template=spec.chat_template,
            scorer=spec.scorer,
            dense=unquantized,
            journal=journal,
        )
        # The dense model runs without any hook: what the others are compared with is not touched at all.
        context = installed(loaded.moe, plan, policy=arm.policy) if plan is not None else nullcontext()
        with context as instrument:
            if instrument is not None:
                evaluation = replace(evaluation, dense=partial(_both, instrument.suspended, unquantized))
                if journal is not None:
                    journal.counting = instrument
            items: list[Item] = []
            fell_back: dict[str, list[str]] = {}
            for suite in arm.suites:
                items += suite.run(replace(evaluation, fell_back=fell_back.setdefault(suite.name, [])))
            # What is asked again has to be computed again.
            again = replace(evaluation, limit=REPEATED_ITEMS, progress=None, journal=None)
            checks = [_repeated(arm.suites, again)]
        if plan is None or instrument is None:
            return items, demand(checks), {}, fell_back
        counters = {index: counted.read() for index, counted in sorted(instrument.counters.items())}
        return items, demand([*checks, *check_counters(plan, counters)]), counters, fell_back


def run(*, out: str | Path = "results", progress: Progress | None = None, **options: Any) -> Outcome:
    """Run one arm, as `prunebench run` does.

    Args:
        out: records folder.
        progress: called with (what, done, total).
        options: fields of `ArmSpec`; `model` is required. `ratio` may be a number, files may be paths, and parameters
            a mapping.

    Example:
        >>> prunebench.run(model="tiny-olmoe", method="reap", ratio=0.5)  # doctest: +SKIP
    """
    for name in ("model", "method", "mask", "operator", "ratio", "suites"):
        if isinstance(options.get(name), Path | float | Decimal):
            options[name] = str(options[name])
    for name in ("suites", "parameters", "operator_parameters"):
        given = options.get(name)
        if isinstance(given, Mapping):
            options[name] = tuple(f"{key}={value}" for key, value in given.items())
        elif isinstance(given, str):
            options[name] = (given,)
        elif isinstance(given, Iterable):
            options[name] = tuple(str(part) if isinstance(part, Path) else part for part in given)
    if not isinstance(out, str | Path):
        raise UsageError(f"out is {out!r}", expected="a folder")
    try:
        spec = ArmSpec(**options)
    except TypeError as error:
        raise UsageError(f"run: {error}", expected=", ".join(ArmSpec.__dataclass_fields__)) from error
    return Session(Path(out), progress=progress).execute(prepare(spec))


# --- helpers


@contextmanager
def _both(one: _Suspending, other: _Suspending) -> Iterator[None]:
    """Two contexts as one."""
    with one(), other():
        yield


def _bos(arm: PreparedArm, loaded: LoadedModel) -> str:
    """How texts began, where rules differ suite by suite."""
    by_suite = {suite.name: bos_policy(loaded.tokenizer, suite.bos) for suite in arm.suites}
    rules = set(by_suite.values())
    return rules.pop() if len(rules) == 1 else "; ".join(f"{name}: {rule}" for name, rule in by_suite.items())


def _protocol(arm: PreparedArm, loaded: LoadedModel, fell_back: Mapping[str, list[str]]) -> dict[str, Any] | None:
    """How texts were put to the model, for suites whose data are not shipped; the tiny world has one way by default."""
    shipped = all(suite.documents(task) is None for suite in arm.suites for task in suite.tasks)
    if shipped and "scorer" not in arm.known:
        return None
    tokenizer: Any = loaded.tokenizer
    template = getattr(tokenizer, "chat_template", None) if arm.spec.chat_template else None
    return {
        "bos": _bos(arm, loaded),
        "end_tokens": end_tokens(loaded.moe.model, tokenizer),
        "pad": "masked, id 0",
        "chat_template": None if template is None else sha256(str(template).encode()).hexdigest(),
        "decoding": "greedy" if arm.spec.drawn is None else arm.spec.drawn.to_json(),
        "too_long": "truncated" if arm.spec.truncate else "an error",
        **_scorers(arm, loaded, fell_back),
    }


def _scorers(arm: PreparedArm, loaded: LoadedModel, fell_back: Mapping[str, list[str]]) -> dict[str, Any]:
    """Which suites were to share what their requests begin with, in which pieces, and why some did not."""
    if "scorer" not in arm.known:
        return {}
    reasons = {name: own for name, own in fell_back.items() if own}
    pieces = min(arm.spec.batch_tokens, piece_tokens(device_of(loaded.moe.model)))
    return {
        "scorer": {
            "suites": arm.known["scorer"],
            "piece_tokens": pieces,
            **({"batched_because": reasons} if reasons else {}),
        }
    }


def _choosing(arm: PreparedArm) -> tuple[Statistic, ...]:
    """The statistics that a score or gradient pass measures for the mask."""
    at_once = arm.select_needs if arm.method is None or arm.method.schedule == "one_shot" else ()
    return (*at_once, *([OutputMax()] if arm.protects is not None else []))


def _repeated(suites: Sequence[Suite], evaluation: Evaluation) -> Check:
    """Check 8: the first items of each suite, asked twice, have equal outcomes."""
    for suite in suites:
        first, second = suite.run(evaluation), suite.run(evaluation)
        for one, other in zip(first, second, strict=True):
            if one != other:
                return Check("repeated items are equal", "fail", f"{one.where}: {one.value} and {other.value}")
    return Check("repeated items are equal", "pass", f"first {REPEATED_ITEMS} of each task, twice")


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
