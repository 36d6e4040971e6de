"""Data at the edge: experts without tokens, ties, zeros, huge outputs, one survivor."""

from __future__ import annotations

from prunebench.conformance.cases import EXPERTS, case
from prunebench.conformance.registry import check
from prunebench.conformance.result import Fault
from prunebench.conformance.subject import HALF, Subject, required
from prunebench.mask import Budget

__all__: list[str] = []


def _holds(subject: Subject, kind: str, what: str, *, budget: Budget = HALF, fix: str) -> None:
    """Raise unless mask and plan are there, as many as the budget says, with finite logits."""
    mask = required(lambda: subject.mask(kind, budget=budget))
    wanted = budget.pruned_count(case(kind, subject.home).moe.shapes[0])
    if any(len(layer.pruned) != wanted for layer in mask.layers):
        counts = [len(layer.pruned) for layer in mask.layers]
        raise Fault(f"{counts} experts are pruned, by layer", where=what, expected=f"{wanted} of each", fix=fix)
    logits, _ = required(lambda: subject.logits(kind, mask=mask))
    if not logits.isfinite().all():
        raise Fault("logits are not finite", where=what, expected="numbers", fix=fix)


@check("edge", after=("runs_installed", "exact_budget"))
def check_never_routed(subject: Subject) -> None:
    """Experts that no token was routed to have a stated score and answer."""
    _holds(subject, "few", "two tokens of text", fix="divide by np.maximum(count, 1); say what such experts get")


@check("edge", after=("runs_installed", "never_routed"))
def check_tied(subject: Subject) -> None:
    """Experts of equal statistics still give exactly the budget."""
    _holds(subject, "tied", "experts that are all alike", fix="break ties by id; do not divide by max - min")


@check("edge", after=("runs_installed", "tied"))
def check_zero_outputs(subject: Subject) -> None:
    """Experts that answer zero on every token are scored and replaced like others."""
    _holds(subject, "zero", "experts whose output is zero", fix="guard divisions by a norm or a sum")


@check("edge", after=("runs_installed", "exact_budget"))
def check_huge_outputs(subject: Subject) -> None:
    """Outputs a million times as large do not overflow."""
    _holds(subject, "huge", "outputs times 1e6", fix="work in float64, and with logarithms instead of exponentials")


@check("edge", after=("runs_installed", "never_routed"))
def check_single_survivor(subject: Subject) -> None:
    """A layer may keep one expert."""
    _holds(
        subject,
        "one",
        f"keep 1 of {EXPERTS}, top-1",
        budget=Budget(keep=1),
        fix="do not take a second survivor for granted",
    )
