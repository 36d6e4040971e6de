"""Asking a method which experts go: once for all layers, or of one layer after the other.

A layer-by-layer method is asked while the whole text stands before the layer (`calibration.stream`). Under `sequential`
the layers before it are pruned by then: they run what the method's own `replace` and `route` say, fitted on the text as
it reaches them, so that the mask depends on the method alone and any operator can be run on it afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from prunebench.calibration import CalibrationTokens, LayerVisit, ScoreResult, Statistic, by_pass, stream_layers
from prunebench.calibration.score import batches_of
from prunebench.calibration.statistics import Count
from prunebench.errors import UsageError
from prunebench.install import programs_of
from prunebench.mask import Budget, GroupPolicy, Mask
from prunebench.method import LayerView, Method
from prunebench.moe import LayerProgram, MoELayer, MoEModel
from prunebench.moe.decoder import Proof
from prunebench.plan import layer_views, plan_layer

__all__ = ["choose_mask"]

Progress = Callable[[str, int, int], None]


def choose_mask(
    moe: MoEModel,
    method: Method,
    budget: Budget,
    *,
    needs: Sequence[Statistic],
    scores: ScoreResult | None,
    tokens: CalibrationTokens | None,
    rng: np.random.Generator,
    batch_tokens: int = 8192,
    policy: GroupPolicy = "frozen",
    progress: Progress | None = None,
) -> Mask:
    """The method's mask, checked against the model and the budget, with a report of how it came about.

    Args:
        moe: the opened, untouched model.
        method: gives `select`.
        budget: how many go.
        needs: `method.select_needs()`.
        scores: the pass that holds them, for a one-shot method that has any.
        tokens: what a layer-by-layer method is shown.
        rng: handed to the method.
        batch_tokens: tokens per forward.
        policy: who chooses the groups of a group-limited router while earlier layers are pruned.
        progress: called with (what, done, total).

    Raises:
        UsageError: an answer that is no mask, does not fit the model, or does not spend the budget; a global budget of
            a method that sees one layer at a time.
    """
    views = layer_views(moe, scores, tuple(one.name for one in needs), f"{method.name}.select_needs")
    report: dict[str, Any] = {"schedule": method.schedule}
    if method.schedule == "one_shot":
        mask = _checked(method.select(views, budget, rng=rng), method)
        unrouted = {} if scores is None else {index: _never_routed(found) for index, found in scores.layers.items()}
    else:
        if budget.scope == "global":
            raise UsageError(
                f"{method.name} sees one layer at a time",
                expected="a budget per layer or group",
                fix="leave --scope global out",
            )
        assert tokens is not None
        by_index = {view.index: view for view in views}
        course = _Course(moe, method, budget, tuple(needs), by_index, rng, policy)
        mask, proof = course.run(tokens, batch_tokens, progress)
        unrouted = course.unrouted
        report["proof"] = proof.to_json()
    mask.check_fits(moe.shapes, where=f"{method.name}.select")
    budget.check_mask(mask, moe.shapes, where=f"method {method.name}")
    report |= mask.report or {}
    report["layers"] = _with_unrouted(report.get("layers", {}), unrouted, mask)
    return dataclasses.replace(mask, report=report)


def _checked(mask: object, method: Method) -> Mask:
    if not isinstance(mask, Mask):
        raise UsageError(
            f"select returned a {type(mask).__name__}", where=f"method {method.name}", expected="a prunebench.Mask"
        )
    return mask


def _never_routed(statistics: Mapping[str, Statistic]) -> list[int]:
    if Count.name not in statistics:
        return []
    ids: list[int] = np.flatnonzero(statistics[Count.name].value() == 0).tolist()
    return ids


def _with_unrouted(
    layers: Mapping[str, Mapping[str, Any]], unrouted: Mapping[int, Sequence[int]], mask: Mask
) -> dict[str, dict[str, Any]]:
    """The report's layers, each with its experts that no calibration token was routed to, and how many of them go."""
    found = {index: dict(layer) for index, layer in layers.items()}
    for index, ids in unrouted.items():
        if ids:
            gone = len(set(ids) & set(mask.pruned_of(index)))
            found.setdefault(str(index), {}).update({"never_routed": list(ids), "never_routed_pruned": gone})
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


@dataclass
class _Course:
    """One pass over the layers, in which each is selected from in turn."""

    moe: MoEModel
    method: Method
    budget: Budget
    needs: tuple[Statistic, ...]
    views: Mapping[int, LayerView]
    rng: np.random.Generator
    policy: GroupPolicy
    masks: dict[int, Mask] = field(default_factory=dict)
    programs: dict[int, LayerProgram] = field(default_factory=dict)
    unrouted: dict[int, list[int]] = field(default_factory=dict)

    def run(self, tokens: CalibrationTokens, batch_tokens: int, progress: Progress | None) -> tuple[Mask, Proof]:
        """Go through the layers; the mask of them all."""
        result = stream_layers(
            self.moe,
            [{"input_ids": ids_BL} for ids_BL in batches_of(tokens, batch_tokens)],
            self._work,
            change=self._change if self.method.schedule == "sequential" else None,
            progress=progress,
        )
        pruned = {index: mask.pruned_of(index) for index, mask in self.masks.items()}
        reports = [mask.report or {} for mask in self.masks.values()]
        report: dict[str, Any] = {key: value for one in reports for key, value in one.items() if key != "layers"}
        report["layers"] = {index: layer for one in reports for index, layer in one.get("layers", {}).items()}
        mask = Mask.for_shapes(self.moe.shapes, pruned)
        return dataclasses.replace(mask, report=report), result.proof

    def _work(self, visit: LayerVisit) -> Mapping[str, Tensor]:
        index = visit.layer.index
        counted = (*self.needs, *([] if any(one.name == Count.name for one in self.needs) else [Count()]))
        own = visit.measure(counted)
        self.unrouted[index] = _never_routed(own)
        view = self.views[index].in_fit(own, visit.tokens, visit)
        mask = _checked(self.method.select([view], self.budget, rng=self.rng), self.method)
        self.masks[index] = mask
        if self.method.schedule == "sequential":
            self.programs[index] = self._program(visit, mask.pruned_of(index))
        return {}

    def _program(self, visit: LayerVisit, pruned: tuple[int, ...]) -> LayerProgram:
        """What the layer runs from here on, by the method's own operator."""
        needs = by_pass(self.method.replace_needs())
        if needs.gradient:
            raise UsageError(
                f"{self.method.name} needs gradients of a model that is being pruned",
                where=f"{self.method.name}.replace_needs",
                expected="statistics of a score or a fit pass",
                fix="write schedule = 'one_shot', or leave them out",
            )
        own = visit.measure(needs.score) if needs.score else {}
        own |= visit.measure(needs.fit, experts=pruned) if needs.fit else {}
        mask = Mask.for_shapes(self.moe.shapes, {visit.layer.index: pruned})
        plan = plan_layer(self.moe, mask, self.method, visit, own)
        return next(
            program for index, program in programs_of(plan, policy=self.policy).items() if index == visit.layer.index
        )

    def _change(self, layer: MoELayer, _kept: Mapping[str, Tensor]) -> LayerProgram:
        return self.programs[layer.index]
