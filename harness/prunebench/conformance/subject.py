"""A method under test: what it selects and answers on a case, tried once and shared by all checks that ask.

A trial runs the method's own code as `run` does (passes, `select`, a plan, the plan installed from its saved form),
but notes what goes in and out of each verb, what the code does beside, and what it leaves behind. What it leaves
behind is put back, so that the next trial starts as the first did.
"""

from __future__ import annotations

import ast
import copy
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from prunebench.calibration import CalibrationSpec, CalibrationTokens, ScoreResult, Statistic, by_pass
from prunebench.calibration.score import distinct, settings_of
from prunebench.conformance.cases import CONVENTIONS, EXPERTS, HOMES, Case, case
from prunebench.conformance.left import left_behind, same
from prunebench.conformance.result import Fault, NotApplicable, Refusal, Result, of_method
from prunebench.conformance.watch import Act, watching
from prunebench.errors import PruneBenchError, UsageError
from prunebench.install import installed
from prunebench.loader import MODULE_PREFIX, Source, source_of
from prunebench.mask import Budget, Mask
from prunebench.method import LayerView, Method, Statistics
from prunebench.moe import MoEModel
from prunebench.parameters import make
from prunebench.plan import Plan, fit_plan, layer_views, make_plan
from prunebench.testing import score, select

__all__ = [
    "HALF",
    "Call",
    "Limits",
    "Subject",
    "Trial",
    "forget_passes",
    "planned",
    "required",
    "scores_of",
    "selected",
]

_Value = TypeVar("_Value")
HALF = Budget(keep=EXPERTS // 2)
VERBS = ("select", "replace", "route")
# Where prunebench judges what a method answers; its other errors are about the model that it is asked for.
_ABOUT_ANSWERS = ("plan.py", "mask.py")


@dataclass(frozen=True)
class Limits:
    """What a method may take on a tiny model of two layers and sixteen experts.

    Args:
        seconds: CPU time of all its verbs together.
        megabytes: memory beyond what was there before.
    """

    seconds: float = 20.0
    megabytes: float = 512.0


@dataclass
class Call:
    """One call of a verb.

    Args:
        verb: select, replace or route.
        asked: names of statistics that were read.
        changed: what it was given and came back changed.
        seconds: CPU time.
        answer: what it returned.
    """

    verb: str
    asked: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    answer: Any = None


@dataclass
class Trial:
    """What happened when a method ran: calls of its verbs, acts beside them, and what it left changed.

    Args:
        calls: in order.
        acts: what its code did beside computing.
        generators: names of global random generators that moved.
        settings: names of process-wide settings that changed.
        weights: names of the model's tensors that changed.
    """

    calls: list[Call] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    generators: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)


class _Read(Statistics):
    """A method's statistics that remember what was read, and how it looked."""

    def __init__(self, inner: Statistics, asked: list[str]) -> None:
        self.inner, self.asked, self.handed = inner, asked, dict[str, tuple[Any, Any]]()

    def __getitem__(self, name: str) -> Any:
        self.asked.append(name)
        value = self.inner[name]
        self.handed[f"{name}/{len(self.handed)}"] = value, copy.deepcopy(value)
        return value

    def with_own(self, own: Mapping[str, Statistic]) -> _Read:
        return _Read(self.inner.with_own(own), self.asked)

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Subject:
    """One method, and all that was found out about it.

    Args:
        method: with the parameters that it is checked with.
        limits: of time and memory.
        routers: families that it is tried on.
    """

    def __init__(self, method: Method, limits: Limits | None = None, routers: Sequence[str] = CONVENTIONS) -> None:
        self.method, self.limits, self.routers = method, limits or Limits(), routers
        self.results: dict[str, Result] = {}
        self.refused: dict[str, str] = {}
        self.kept: dict[tuple[Any, ...], Any] = {}
        self._trials: dict[tuple[Any, ...], Trial] = {}

    # --- the file

    @cached_property
    def source(self) -> Source:
        """The file that defines it.

        Raises:
            UsageError: it was typed into a prompt.
        """
        return source_of(type(self.method))

    @cached_property
    def files(self) -> frozenset[str]:
        """The method's files, as they are named in tracebacks: its own, and its package's if it has one."""
        path = self.source.path
        if (path.parent / "__init__.py").is_file():
            return frozenset(str(file) for file in path.parent.rglob("*.py"))
        return frozenset({str(path)})

    @cached_property
    def trees(self) -> Mapping[Path, ast.Module]:
        """The code of its files: of one, or of the package that a plug-in is part of."""
        paths = [self.source.path]
        if not type(self.method).__module__.startswith(MODULE_PREFIX):
            paths += [Path(file) for file in sorted(self.files) if Path(file) != self.source.path]
        return {path: ast.parse(path.read_bytes()) for path in paths}

    def is_own(self, kind: type) -> bool:
        """Whether a class stands in the method's file."""
        return kind.__module__ == type(self.method).__module__

    @property
    def criterion(self) -> bool:
        """Whether it selects."""
        return type(self.method).selects()

    @property
    def in_its_file(self) -> type[Method]:
        """Its class, if that can be found in the file again.

        Raises:
            NotApplicable: it is defined inside a function.
        """
        if "<locals>" in type(self.method).__qualname__:
            raise NotApplicable("its class is defined inside a function, so that no other process can load it")
        return type(self.method)

    # --- where it runs

    @cached_property
    def home(self) -> str:
        """The family on which checks run that need one model.

        Raises:
            Fault: it refuses all of them.
        """
        refused = []
        for family in HOMES:
            try:
                self.mask("plain", family=family)
                self.plan("plain", family=family)
            except Refusal as reason:
                refused.append(f"{family}: {reason}")
            except BaseException as error:  # checks will say which and why
                if not of_method(error):
                    raise
                return family
            else:
                return family
        raise Fault("it refuses plain routers", where="; ".join(refused), expected="a method for one of them at least")

    def trial(self, kind: str = "plain", **options: Any) -> Trial:
        """What happened when `mask` and `plan` ran on this case."""
        return self._trials.setdefault(self._key(kind, options), Trial())

    def mask(
        self,
        kind: str = "plain",
        *,
        family: str | None = None,
        budget: Budget = HALF,
        seed: int = 0,
        again: int = 0,
        change: Callable[[LayerView], LayerView] | None = None,
    ) -> Mask:
        """The mask that it selects; an operator is given every other expert.

        Args:
            kind: of the case.
            family: of the case; by default `home`.
            budget: how many go.
            seed: of the generator that `select` is handed.
            again: another number asks anew.
            change: what is done to each view before it is handed to the method.

        Raises:
            Refusal: by the method, of this router.
        """
        family = family or self.home
        where = case(kind, family)
        if not self.criterion:
            return _every_other(where.moe, budget)
        key = self._key(kind, {"family": family, "budget": budget, "seed": seed, "again": again, "change": change})
        trial = self._trials.setdefault(key, Trial())
        watched = self._watched(trial, change)
        return self._once(("mask", *key), trial, where, lambda: selected(watched, where, budget, seed))

    def plan(
        self,
        kind: str = "plain",
        *,
        family: str | None = None,
        mask: Mask | None = None,
        again: int = 0,
    ) -> Plan:
        """What the method answers on a mask, by default its own.

        Raises:
            Refusal: by the method, of this router.
        """
        family = family or self.home
        where, given = case(kind, family), mask
        mask = self.mask(kind, family=family, again=again) if mask is None else mask
        key = self._key(kind, {"family": family, "again": again})
        trial = self._trials.setdefault(key, Trial())
        watched = self._watched(trial)
        memo = ("plan", given.digest if given else "", *key)

        def work() -> Plan:
            make(type(self.method), self.method.parameters())  # what it does while it is made counts, too
            return planned(watched, where, mask)

        return self._once(memo, trial, where, work)

    def logits(self, kind: str = "plain", **options: Any) -> tuple[Tensor, Mapping[int, Mapping[str, float]]]:
        """The pruned model's logits on the case's text, and what its layers counted."""
        plan = self.plan(kind, **options)
        where = case(kind, options.get("family") or self.home)
        key = self._key(kind, options)
        memo = ("logits", plan.mask.digest, *key)
        trial = self._trials.setdefault(key, Trial())
        return self._once(memo, trial, where, lambda: _run(where.moe, plan, where.ids_BL))

    def alone(self) -> list[Mask]:
        """The masks of the plain case's layers, each selected as if it were the only one.

        Raises:
            NotApplicable: it is asked one layer at a time anyway.
        """
        if self.method.schedule != "one_shot":
            raise NotApplicable("it is asked about one layer at a time anyway")
        where = case("plain", self.home)
        with left_behind(Trial(), where.moe):
            views = _views(where, self.method)
            return [self.method.select([view], HALF, rng=np.random.default_rng(0)) for view in views]

    @property
    def width(self) -> int:
        """D of the plain case."""
        return case("plain", self.home).moe.layers[0].width

    # --- machinery

    def _key(self, kind: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
        usual = {"budget": HALF, "seed": 0, "again": 0, "change": None}
        given = {name: options.get(name, value) for name, value in usual.items()}
        return (kind, options.get("family") or self.home, repr(given))

    def _once(self, key: tuple[Any, ...], trial: Trial, where: Case, work: Callable[[], _Value]) -> _Value:
        """Do it once; what it returned or raised stays. It is watched closely where acts are looked for."""
        if key not in self.kept:
            closely = any(where is case("plain", family) for family in HOMES)
            with left_behind(trial, where.moe, closely=closely), watching(self.files, closely=closely) as acts:
                try:
                    self.kept[key] = work(), None
                except BaseException as error:  # a method may raise anything
                    if not of_method(error):
                        raise
                    self.kept[key] = None, self.named(error)
            trial.acts += acts
        value, failure = self.kept[key]
        if failure is not None:
            raise failure
        found: _Value = value
        return found

    def named(self, error: BaseException) -> Exception:
        """Whatever the method raised, as a refusal or a fault with its line."""
        lines = [one for one in traceback.extract_tb(error.__traceback__) if one.filename in self.files]
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename).name
        if isinstance(error, UsageError) and (lines or last not in _ABOUT_ANSWERS):
            return Refusal(str(error))
        if isinstance(error, PruneBenchError):
            return error
        place = f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else "prunebench, for this method"
        return Fault(
            f"{type(error).__name__}: {error}".rstrip(": "),
            where=place,
            expected="no error, or a UsageError of one line",
            fix="find what the line takes for granted",
            instead="raise a UsageError that says what the method is not for",
        )

    def _watched(self, trial: Trial, change: Callable[[LayerView], LayerView] | None = None) -> Method:
        """The same method, whose verbs note their calls."""
        kind = type(self.method)
        verbs = {
            name: _noting(name, getattr(kind, name), trial, change)
            for name in VERBS
            if getattr(kind, name) is not getattr(Method, name)
        }
        namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **verbs}
        twin: Method = object.__new__(type(kind.__name__, (kind,), namespace))
        for name in {*vars(self.method), *self.method.parameters()}:
            object.__setattr__(twin, name, getattr(self.method, name))
        return twin


def _noting(
    verb: str, original: Callable[..., Any], trial: Trial, change: Callable[[LayerView], LayerView] | None
) -> Callable[..., Any]:
    """The verb, with a note of each call."""

    def noted(method: Method, views: Any, given: Any, **more: Any) -> Any:
        call = Call(verb)
        trial.calls.append(call)
        one = isinstance(views, LayerView)
        read = [_Read(view.stats, call.asked) for view in ([views] if one else views)]
        shown = [_replace(view, stats) for view, stats in zip([views] if one else views, read, strict=True)]
        disguised = [change(view) for view in shown] if change is not None else list(shown)
        facts = [(view.shape, view.convention) for view in shown]
        before = copy.deepcopy((given, facts))
        started = time.process_time()
        try:
            call.answer = original(method, disguised[0] if one else disguised, given, **more)
        finally:
            call.seconds = time.process_time() - started
            call.changed += [
                name for stats in read for name, (now, then) in stats.handed.items() if not same(now, then)
            ]
            if not same(given, before[0]):
                call.changed.append("budget" if verb == "select" else "pruned")
            if not same(facts, before[1]):
                call.changed.append("shape or convention")
        if change is not None and isinstance(call.answer, Mask):
            pruned = [layer.pruned for layer in call.answer.layers]
            return Mask.for_shapes(
                [view.shape for view in shown], {view.index: ids for view, ids in zip(shown, pruned, strict=True)}
            )
        return call.answer

    return noted


def _replace(view: LayerView, stats: Statistics) -> LayerView:
    """The view with other statistics, and facts of its own: what a method does to them must not reach the next."""
    twin = copy.copy(view)
    facts = {"stats": stats, "shape": copy.deepcopy(view.shape), "convention": copy.deepcopy(view.convention)}
    for name, value in facts.items():
        object.__setattr__(twin, name, value)
    return twin


def _every_other(moe: MoEModel, budget: Budget) -> Mask:
    """A mask for operators: of the experts in the order 1, 3, 5, …, 0, 2, …, as many as the budget says."""
    pruned = {}
    for shape in moe.shapes:
        size = shape.experts // shape.groups
        of_group = [*range(1, size, 2), *range(0, size, 2)][: budget.pruned_count(shape) // shape.groups]
        pruned[shape.index] = [group * size + e for group in range(shape.groups) for e in of_group]
    return Mask.for_shapes(moe.shapes, pruned)


_PASSES: dict[tuple[Any, ...], Statistic] = {}


def scores_of(where: Case, needs: Sequence[Statistic]) -> ScoreResult | None:
    """What holds these statistics; prunebench's own are measured once per case, a method's own every time."""
    layers: dict[int, dict[str, Statistic]] = {layer.index: {} for layer in where.moe.layers}
    text = tuple(where.ids_BL.flatten().tolist())
    keys = {one.name: (id(where.moe), text, type(one), repr(settings_of(one))) for one in distinct(needs)}
    needed = {one.name: one for one in needs}
    missing = [one for name, one in needed.items() if any((*keys[name], index) not in _PASSES for index in layers)]
    found = score(where.moe, missing, ids_BL=where.ids_BL).layers if missing else {}
    for name, one in needed.items():
        for index, of_layer in layers.items():
            measured = found[index][name] if one in missing else _PASSES[*keys[name], index]
            if type(one).__module__.startswith("prunebench."):
                _PASSES[*keys[name], index] = measured
            of_layer[name] = _tied(measured) if where.tied else measured
    return ScoreResult(where.ids_BL.numel(), layers) if needed else None


def forget_passes() -> None:
    """Measure everything anew from here on."""
    _PASSES.clear()


def _tied(statistic: Statistic) -> Statistic:
    """The statistic as if all experts were alike: each has what the first one has."""
    twin = copy.deepcopy(statistic)
    for name, value in twin.state.items():
        if value.ndim and value.shape[0] == EXPERTS:
            twin.state[name] = value[:1].expand_as(value).clone()
    return twin


def required(work: Callable[[], _Value]) -> _Value:
    """What the method gives where it may not refuse."""
    try:
        return work()
    except Refusal as reason:
        raise Fault(
            f"it refuses: {reason}", expected="an answer", fix="state what such data score, and answer"
        ) from reason


def _views(where: Case, method: Method) -> list[LayerView]:
    needs = method.select_needs()
    declared = tuple(one.name for one in needs)
    return layer_views(where.moe, scores_of(where, needs), declared, f"{method.name}.select_needs")


def selected(method: Method, where: Case, budget: Budget, seed: int) -> Mask:
    """The mask that a method selects on a case, as `run` has it."""
    method.check_model(where.moe.shapes, where.moe.convention, budget)
    if method.schedule != "one_shot":
        return _a_mask(select(method, where.moe, budget, ids_BL=where.ids_BL, seed=seed), method)
    return _a_mask(method.select(_views(where, method), budget, rng=np.random.default_rng(seed)), method)


def _a_mask(answer: object, method: Method) -> Mask:
    if not isinstance(answer, Mask):
        raise Fault(
            f"it returns a {type(answer).__name__}",
            where=f"{method.name}.select",
            expected="a prunebench.Mask",
            fix="return prune_lowest(…) or Mask.for_shapes(…)",
        )
    return answer


def planned(method: Method, where: Case, mask: Mask) -> Plan:
    """The plan, from statistics that are there or in a fit pass, as `run` has it."""
    needs = by_pass(method.replace_needs())
    scores = scores_of(where, (*needs.score, *needs.gradient))
    if not method.in_fit_pass():
        return make_plan(where.moe, mask, method, scores)
    tokens = CalibrationTokens(CalibrationSpec("file:random", *where.ids_BL.shape), where.ids_BL, "random")
    return fit_plan(where.moe, mask, method, scores, tokens).plan


def _run(moe: MoEModel, plan: Plan, ids_BL: Tensor) -> tuple[Tensor, Mapping[int, Mapping[str, float]]]:
    with torch.inference_mode(), installed(moe, plan) as instrument:
        logits: Tensor = moe.model(input_ids=ids_BL, use_cache=False).logits
    return logits, {index: counted.read() for index, counted in instrument.counters.items()}
