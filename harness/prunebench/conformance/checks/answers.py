"""What replace and route answer: fills that are what they declare, edits that are said, a plan that runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from prunebench.conformance.cases import case
from prunebench.conformance.fresh import in_fresh_process, probe_rows
from prunebench.conformance.registry import check
from prunebench.conformance.result import Fault, NotApplicable, Refusal
from prunebench.conformance.subject import Subject
from prunebench.errors import PruneBenchError
from prunebench.fit import Fitted
from prunebench.install import installed
from prunebench.integrity import check_before_evaluation, check_counters, demand
from prunebench.mask import Mask
from prunebench.method import Replacements
from prunebench.plan import make_plan
from prunebench.replacement import Fill, Survivor

__all__: list[str] = []

_MOST_NUMBERS = 16  # in a fill's configuration; more are values


def _answers(subject: Subject) -> list[Replacements]:
    subject.plan()
    return [call.answer for call in subject.trial().calls if isinstance(call.answer, Replacements)]


def _fills(subject: Subject) -> Iterator[tuple[str, Fill]]:
    """(place, fill) of every fill of modules that the method returned for the plain case."""
    for number, answer in enumerate(_answers(subject)):
        for expert, given in sorted(answer.fills.items()):
            fill = given.fill if isinstance(given, Fitted) else given
            if fill is not None and not isinstance(fill, Survivor):
                yield f"{type(fill).__name__} of expert {expert}, layer {number + 1} of those pruned", fill


def _answer(fill: Fill, x_SD: Tensor, where: str) -> Tensor:
    try:
        with torch.inference_mode():
            y_SD = fill(x_SD.clone())
    except Exception as error:
        raise Fault(
            f"{type(error).__name__}: {error}", where=f"{where}, {len(x_SD)} rows", expected="answers"
        ) from error
    if not isinstance(y_SD, Tensor) or y_SD.shape != x_SD.shape:
        shape = list(y_SD.shape) if isinstance(y_SD, Tensor) else type(y_SD).__name__
        raise Fault(
            f"it answers rows of shape {list(x_SD.shape)} by {shape}",
            where=where,
            expected="a row for a row, also where there are none",
            fix="return a tensor of x_SD's shape",
        )
    return y_SD


@check("answers", of="answers", after=("runs",))
def check_fill_shapes(subject: Subject) -> None:
    """A fill answers each row by a row of the same width, and no rows by no rows."""
    for where, fill in _fills(subject):
        for rows in (5, 1, 0):
            _answer(fill, probe_rows(subject.width)[:rows], where)


@check("answers", of="answers", after=("fill_shapes",))
def check_fill_rows_alone(subject: Subject) -> None:
    """A row's answer does not depend on the other rows, which are other tokens of other texts."""
    for where, fill in _fills(subject):
        x_SD = probe_rows(subject.width)
        together, alone = _answer(fill, x_SD, where), torch.cat([_answer(fill, row[None], where) for row in x_SD])
        if not torch.allclose(together, alone, rtol=1e-3, atol=1e-5):
            raise Fault(
                f"answers to rows differ by {float((together - alone).abs().max()):.2g} when they come alone",
                where=where,
                expected="one row's answer from that row",
                fix="do not take means, maxima or norms over rows",
            )


@check("answers", of="answers", after=("fill_shapes",))
def check_fill_finite(subject: Subject) -> None:
    """A fill answers any input by numbers, also zeros and outliers."""
    for where, fill in _fills(subject):
        for factor in (0.0, 1.0, 1e4):
            if not _answer(fill, factor * probe_rows(subject.width), where).isfinite().all():
                raise Fault(
                    f"NaN or infinity on inputs of size {factor:g}",
                    where=where,
                    expected="numbers",
                    fix="guard divisions; clip what grows",
                )


@check("answers", of="answers", after=("fill_shapes",))
def check_fill_only_looks(subject: Subject) -> None:
    """A fill leaves its inputs as they are: survivors read them, too."""
    for where, fill in _fills(subject):
        x_SD = probe_rows(subject.width)
        with torch.inference_mode():
            fill(x_SD)
        if not torch.equal(x_SD, probe_rows(subject.width)):
            raise Fault("it changes its input", where=where, expected="x_SD as it was", fix="use x = x + …, not x += …")


@check("answers", of="answers", after=("fill_shapes",))
def check_declared_values(subject: Subject) -> None:
    """A fill declares as many values as it stores, and stores none in its configuration."""
    for where, fill in _fills(subject):
        stored = sum(tensor.numel() for tensor in fill.state_dict().values())
        hidden = len([one for one in _leaves(json.loads(json.dumps(fill.to_json()))) if type(one) in {int, float}])
        if fill.values_stored() != stored or hidden > _MOST_NUMBERS:
            raise Fault(
                f"{fill.values_stored()} values declared, {stored} stored, {hidden} numbers in to_json",
                where=where,
                expected="what is declared, and sizes only in to_json",
                fix="register_buffer what is stored, and leave values_stored as it is",
            )


def _leaves(value: Any) -> Iterator[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if parts is None:
        yield value
    else:
        for part in parts:
            yield from _leaves(part)


@check("answers", of="answers", after=("fill_shapes",))
def check_saved_form(subject: Subject) -> None:
    """A fill that is rebuilt from class, configuration and state answers as the one that was returned."""
    x_SD = probe_rows(subject.width)
    for where, fill in _fills(subject):
        try:
            twin = type(fill)(**json.loads(json.dumps(fill.to_json())))
            twin.load_state_dict(fill.state_dict())
        except (TypeError, RuntimeError, ValueError) as error:
            raise Fault(
                f"it cannot be rebuilt: {error}", where=where, expected="cls(**fill.to_json())", fix="see Fill"
            ) from error
        if not torch.equal(_answer(fill, x_SD, where), _answer(twin, x_SD, where)):
            raise Fault(
                "rebuilt from its saved form, it answers otherwise",
                where=where,
                expected="every tensor in state_dict, everything else in to_json",
                fix="register_buffer each tensor; keep none in an attribute or a closure",
            )


@check("answers", of="answers", after=("saved_form", "fresh_process"))
def check_saved_form_elsewhere(subject: Subject) -> None:
    """So does one that is rebuilt in a process in which the method never ran."""
    found = in_fresh_process(subject).answers
    x_SD = probe_rows(subject.width)
    for number, (where, fill) in enumerate(_fills(subject)):
        if isinstance(found, str):
            raise Fault(found, where=where, expected="a fill that its saved form says all of")
        if not torch.equal(found[number], _answer(fill, x_SD, where)):
            raise Fault(
                "in another process, it answers otherwise",
                where=where,
                expected="answers from state_dict and to_json alone",
                fix="keep no tensors in globals or closures: what is not in state_dict is not counted",
            )


@check("answers", after=("runs",))
def check_empty_mask(subject: Subject) -> None:
    """On an empty mask, nothing changes, bit for bit."""
    where = case("plain", subject.home)
    try:
        plan = make_plan(where.moe, Mask.for_shapes(where.moe.shapes, {}), subject.method, None)
    except Exception as error:
        raise Fault(
            f"{type(error).__name__}: {error}",
            where="route, asked of a layer of which nothing is pruned",
            expected="a Routing",
            fix="do not take pruned ids or statistics for granted in route",
        ) from error
    with torch.inference_mode():
        plain = where.moe.model(input_ids=where.ids_BL, use_cache=False).logits
        with installed(where.moe, plan):
            masked = where.moe.model(input_ids=where.ids_BL, use_cache=False).logits
    if plan.tensors or plan.edits or not torch.equal(plain, masked):
        raise Fault("logits or weights change", where="an empty mask", expected="the model as it was")


@check("answers", after=("runs", "fill_shapes", "declared_values"))
def check_runs_installed(subject: Subject) -> None:
    """Installed, the pruned model passes the integrity checks of a run, with finite logits."""
    where, plan = case("plain", subject.home), subject.plan()
    logits, counters = subject.logits()
    demand([*check_before_evaluation(where.moe, plan, where.ids_BL), *check_counters(plan, counters)])
    if not logits.isfinite().all():
        raise Fault("logits are not finite", where=where.words, expected="numbers", fix="look at fills and edits")


@check("answers", after=("runs_installed", "original_ids", "fills_top_k"))
def check_every_router(subject: Subject) -> None:
    """It works on a model of every router convention, or says in one line why not."""
    refused = {}
    for family in subject.routers:
        try:
            logits, _ = subject.logits(family=family)
        except Refusal as reason:
            refused[family] = str(reason)
            continue
        except PruneBenchError as fault:
            raise Fault(
                fault.what,
                where=f"{fault.where}, on {case('plain', family).words}",
                expected="an answer, or a UsageError that says what it cannot do",
                fix="ask LayerView for what differs: convention, weights, shape",
            ) from fault
        if not logits.isfinite().all():
            raise Fault("logits are not finite", where=case("plain", family).words, expected="numbers")
    if len(refused) == len(subject.routers):
        raise NotApplicable("; ".join(f"{family}: {reason}" for family, reason in refused.items()))
    subject.refused.update(refused)
