"""Time and memory on a tiny model."""

from __future__ import annotations

from prunebench.conformance.cases import case
from prunebench.conformance.fresh import in_fresh_process
from prunebench.conformance.registry import check
from prunebench.conformance.result import Fault, NotApplicable
from prunebench.conformance.subject import Subject

__all__: list[str] = []


@check("limits", after=("runs",))
def check_time(subject: Subject) -> None:
    """The verbs take seconds on sixteen experts, not minutes."""
    subject.plan("wide")
    seconds = sum(call.seconds for call in subject.trial("wide").calls)
    if seconds > subject.limits.seconds:
        raise Fault(
            f"the verbs took {seconds:.1f} s of CPU time",
            where=case("wide", subject.home).words,
            expected=f"at most {subject.limits.seconds:g} s: real models have 64 experts or more",
            fix="look for a loop over subsets of experts",
            instead="refuse large models by a UsageError in one line",
        )


@check("limits", after=("runs", "fresh_process"))
def check_memory(subject: Subject) -> None:
    """The verbs take some megabytes on eight experts."""
    megabytes = in_fresh_process(subject).megabytes
    if megabytes is None:
        raise NotApplicable("this system does not tell a process's peak memory")
    if megabytes > subject.limits.megabytes:
        raise Fault(
            f"memory grew by {megabytes:.0f} MB",
            where=case("plain", subject.home).words,
            expected=f"at most {subject.limits.megabytes:g} MB",
            fix="work on one expert at a time",
        )
