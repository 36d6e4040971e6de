"""The mask: original ids, exactly the budget, enough survivors, and only what was declared read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from prunebench.conformance.cases import EXPERTS, case
from prunebench.conformance.registry import check
from prunebench.conformance.result import Fault, NotApplicable, Refusal
from prunebench.conformance.subject import HALF, Subject, required
from prunebench.errors import UsageError
from prunebench.mask import Budget, LayerShape, Mask, Scope, model_shape_text

__all__: list[str] = []

_INDEXED = "deepseek_v3"  # its MoE layers begin at index 1
_GROUPED = "deepseek_v3.groups"


def _counts(mask: Mask) -> list[int]:
    return [len(layer.pruned) for layer in mask.layers]


@check("selection", of="mask", after=("runs",))
def check_original_ids(subject: Subject) -> None:
    """The mask names layers by the model's own indices and experts by their original ids."""
    shapes, mask = case("plain", _INDEXED).moe.shapes, subject.mask(family=_INDEXED)
    found, wanted = [layer.index for layer in mask.layers], [shape.index for shape in shapes]
    if found != wanted or mask.model_shape != model_shape_text(shapes):
        raise Fault(
            f"a mask of layers {found}, for {mask.model_shape}",
            where=f"{type(subject.method).__name__}.select",
            expected=f"layers {wanted}, for {model_shape_text(shapes)}",
            fix="return Mask.for_shapes([layer.shape for layer in layers], {layer.index: ids})",
        )


@check("selection", of="mask", after=("runs",))
def check_exact_budget(subject: Subject) -> None:
    """Exactly as many experts go as the budget says, in every layer."""
    shapes = case("plain", subject.home).moe.shapes
    for budget in (HALF, Budget(keep=EXPERTS - 1), Budget.of_ratio("0.3")):
        mask = required(partial(subject.mask, budget=budget))
        wanted = [budget.pruned_count(shape) for shape in shapes]
        if _counts(mask) != wanted:
            raise Fault(
                f"{_counts(mask)} experts are pruned, by layer",
                where=f"{type(subject.method).__name__}.select, {budget.to_json()} of {EXPERTS}",
                expected=f"{wanted}",
                fix="ask budget.pruned_count(layer.shape), or use prune_lowest",
            )


@check("selection", of="mask", after=("exact_budget", "protected"))
def check_whole_budget(subject: Subject) -> None:
    """Counted over router groups or the whole model, as many go as the budget says, or it refuses in one line."""
    scopes: tuple[tuple[Scope, int], ...] = (("group", 6), ("global", 7))  # 0.45 of 8 twice, and of 16
    for scope, wanted in scopes:
        budget = Budget.of_ratio("0.45", scope=scope)
        try:
            counts = _counts(subject.mask(budget=budget))
        except Refusal:
            continue
        if sum(counts) != wanted or (scope == "group" and len(set(counts)) > 1):
            raise Fault(
                f"{counts} experts are pruned, by layer",
                where=f"{type(subject.method).__name__}.select, {budget.to_json()}",
                expected=f"{wanted} in all",
                fix="use prune_lowest, or refuse the scope by a UsageError",
            )


@check("selection", of="mask", after=("exact_budget",))
def check_fills_top_k(subject: Subject) -> None:
    """At the largest budget, every router group keeps what its tokens need to fill their slots."""
    shapes: Sequence[LayerShape] = case("plain", _GROUPED).moe.shapes
    budget = Budget(keep=shapes[0].fewest_survivors())
    mask = subject.mask(family=_GROUPED, budget=budget)
    try:
        mask.check_fits(shapes)
    except UsageError as error:
        raise Fault(
            error.what,
            where=f"{error.where}; {budget.to_json()} of {EXPERTS} in {shapes[0].groups} router groups",
            expected=error.expected,
            fix="spread the pruned experts over router groups (LayerShape.group_of), as prune_lowest does",
        ) from error


@check("selection", of="mask", after=("exact_budget", "same_seed"))
def check_protected(subject: Subject) -> None:
    """Protected experts stay, and others go in their place."""
    first = subject.mask()
    guarded = {layer.index: frozenset(layer.pruned[:2]) for layer in first.layers}
    budget = Budget(keep=EXPERTS // 2, protected=guarded)
    mask = required(lambda: subject.mask(budget=budget))
    for layer in mask.layers:
        if set(layer.pruned) & guarded[layer.index] or len(layer.pruned) != EXPERTS // 2:
            raise Fault(
                f"experts {layer.pruned} are pruned",
                where=f"layer {layer.index}, with {sorted(guarded[layer.index])} protected",
                expected=f"{EXPERTS // 2} others",
                fix="leave out budget.protected[layer.index], or use prune_lowest",
            )


@check("selection", of="mask", after=("runs",))
def check_reads_what_it_declares(subject: Subject) -> None:
    """select reads the statistics of select_needs, and asks for no other."""
    subject.mask()
    declared = {one.name for one in subject.method.select_needs()}
    asked = {name for call in subject.trial().calls if call.verb == "select" for name in call.asked}
    if undeclared := sorted(asked - declared):
        raise Fault(
            f"it asks for the statistic {undeclared[0]}",
            where=f"{type(subject.method).__name__}.select",
            expected=f"one of {', '.join(sorted(declared)) or 'none'}",
            fix=f"add {undeclared[0]} to select_needs",
        )


@check("selection", of="mask", after=("exact_budget",))
def check_full_budget(subject: Subject) -> None:
    """A budget that keeps every expert prunes none: it is refused, or the mask is empty."""
    try:
        mask = subject.mask(budget=Budget(keep=EXPERTS))
    except (Refusal, UsageError):
        return
    if mask.pruned_count:
        raise Fault(
            f"{mask.pruned_count} experts are pruned",
            where=f"{type(subject.method).__name__}.select, keep {EXPERTS} of {EXPERTS}",
            expected="none",
            fix="ask budget.pruned_count(layer.shape), which refuses such a budget",
        )


@check("selection", of="mask", after=("exact_budget", "same_seed"))
def check_nested(subject: Subject) -> None:
    """Claimed by `nested = True`: a larger budget prunes the same experts and more."""
    if not type(subject.method).nested:
        raise NotApplicable("it does not claim nested = True")
    less, more = subject.mask(budget=Budget(keep=6)), subject.mask(budget=Budget(keep=3))
    for one, other in zip(less.layers, more.layers, strict=True):
        if lost := sorted(set(one.pruned) - set(other.pruned)):
            raise Fault(
                f"expert {lost[0]} goes when 6 are kept, and stays when 3 are",
                where=f"layer {one.index}",
                expected="masks that grow",
                fix="prune by one ranking",
                instead="drop the claim nested = True",
            )
