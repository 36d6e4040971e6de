"""What a check says: a `Fault`, a reason for which it does not apply, or nothing; and a method's report."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prunebench.errors import PruneBenchError

__all__ = ["ConformanceError", "Fault", "NotApplicable", "Outcome", "Refusal", "Report", "Result", "of_method"]

Outcome = Literal["passed", "failed", "not applicable", "not run", "expected failure", "stale"]
_BAD: tuple[Outcome, ...] = ("failed", "stale")


class Fault(PruneBenchError):  # noqa: N818  it is the method's, not ours
    """A method breaks a rule.

    Args:
        what: what it does.
        where: the verb, layer, line.
        expected: the rule.
        fix: how to keep it.
        instead: the other way out, if it is meant.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", expected: str = "", fix: str = "", instead: str = "") -> None:
        self.instead = instead
        super().__init__(what, where=where, expected=expected, fix=f"{fix}; or {instead}" if instead else fix)


class NotApplicable(Exception):  # noqa: N818  not an error
    """The rule says nothing about this method; the text says why."""


class Refusal(NotApplicable):
    """A method, or prunebench on its behalf, says in one line that it is not for this router."""


def of_method(error: BaseException) -> bool:
    """Whether an error is a method's: Ctrl-C is not where it can arrive, nor is a test runner's way to end a test."""
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return not type(error).__module__.startswith(("_pytest.", "pytest"))


class ConformanceError(PruneBenchError):
    """A method does not keep the rules; `report` has all of its results."""

    exit_code = 1

    def __init__(self, report: Report) -> None:
        self.report = report
        bad = [f"{one.check}: {one.message}" for one in report.results if one.outcome in _BAD]
        super().__init__(f"{report.name} fails {len(bad)} checks; " + " | ".join(bad))


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Args:
        check: its name.
        group: what it is about.
        outcome: passed; failed; not applicable; not run, because a check that it builds on failed; expected failure;
            stale: expected to fail, but it passed.
        message: why, and for a failure how to get out of it; empty if it passed.
    """

    check: str
    group: str
    outcome: Outcome
    message: str = ""


@dataclass(frozen=True)
class Report:
    """All results of one method.

    Args:
        name: the method's.
        file: its file's name, without folders.
        sha256: of that file.
        parameters: the values that it was checked with.
        results: in the order of the checks.
    """

    name: str
    file: str
    sha256: str
    parameters: Mapping[str, Any]
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether something was checked, nothing failed and no expectation is stale."""
        return bool(self.results) and not any(one.outcome in _BAD for one in self.results)

    def demand(self) -> Report:
        """The report, if all is well.

        Raises:
            ConformanceError: with every failure.
        """
        if not self.ok:
            raise ConformanceError(self)
        return self

    def of(self, *outcomes: Outcome) -> Sequence[Result]:
        """The results with one of these outcomes."""
        return [one for one in self.results if one.outcome in outcomes]

    def summary(self) -> str:
        """Counts in a line."""
        counts = Counter(one.outcome for one in self.results)
        return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "parameters": dict(self.parameters), "ok": self.ok}

    def to_text(self) -> str:
        """For a terminal: what did not pass, and counts."""
        lines = [f"{one.outcome:16} {one.check}: {one.message}" for one in self.results if one.outcome != "passed"]
        return "\n".join([*lines, f"{self.name} ({self.file}): {self.summary()}"])
