"""One generator of checks behind three doors: a plain function, a decorator for pytest, and `prunebench check`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import prunebench.conformance.checks  # noqa: F401  puts them on the list
from prunebench.conformance.cases import CONVENTIONS
from prunebench.conformance.registry import CHECKS, Check
from prunebench.conformance.result import Fault, NotApplicable, Report, Result, of_method
from prunebench.conformance.subject import Limits, Subject
from prunebench.errors import PruneBenchError, UsageError
from prunebench.loader import load_method, source_of
from prunebench.method import Method

__all__ = [
    "BoundCheck",
    "check_method",
    "judged",
    "known",
    "parametrize_with_checks",
    "report_of",
    "told",
]


def report_of(
    method: Method | str,
    *,
    expected_failures: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    limits: Limits | None = None,
    routers: Sequence[str] = CONVENTIONS,
    progress: Callable[[str, int, int], None] | None = None,
    found: Callable[[Result], None] | None = None,
) -> Report:
    """Run the checks and say what came out.

    Args:
        method: an instance, with the parameters that it is checked with; or a name or path.
        expected_failures: check -> why it is right that it fails.
        only: names of checks; by default all.
        limits: of time and memory.
        routers: families of models that it is tried on, of `prunebench.testing.FAMILIES`.
        progress: called with (check, done, total).
        found: called with each result.

    Raises:
        UsageError: an unknown check, or an expected failure without a reason.
    """
    subject = Subject(load_method(method) if isinstance(method, str) else method, limits, routers)
    expected = _expected(expected_failures or {})
    names = known(only) or list(CHECKS)
    results = []
    for number, name in enumerate(names):
        if progress is not None:
            progress(name, number, len(names))
        results.append(judged(outcome(subject, name), expected))
        if found is not None:
            found(results[-1])
    source = subject.source
    return Report(
        str(subject.method.name), source.path.name, source.sha256, subject.method.parameters(), tuple(results)
    )


def check_method(method: Method | str, **options: Any) -> Report:
    """`report_of`, for tests: raises if a check fails.

    Raises:
        ConformanceError: with every failure, and `report`.
    """
    return report_of(method, **options).demand()


def outcome(subject: Subject, name: str) -> Result:
    """One check's result, found once; checks that it builds on are run first."""
    if name not in subject.results:
        subject.results[name] = _outcome(subject, CHECKS[name])
    return subject.results[name]


def _outcome(subject: Subject, check: Check) -> Result:
    for earlier in check.after:
        if outcome(subject, earlier).outcome in {"failed", "not run"}:
            return Result(check.name, check.group, "not run", f"{earlier} failed")
    kind = type(subject.method)
    if check.of == "mask" and not kind.selects():
        return Result(check.name, check.group, "not applicable", "it selects no experts")
    if check.of == "answers" and not kind.replaces():
        return Result(check.name, check.group, "not applicable", "it fills no slots")
    try:
        check.run(subject)
    except NotApplicable as reason:
        return Result(check.name, check.group, "not applicable", str(reason))
    except BaseException as error:  # a method's code may raise anything, wherever it is asked
        if not of_method(error):
            raise
        fault = error if isinstance(error, PruneBenchError) else subject.named(error)
        return Result(check.name, check.group, "failed", told(subject.method, check, fault))
    return Result(check.name, check.group, "passed", _refusals(subject) if check.name == "every_router" else "")


def told(method: Method, check: Check, fault: Exception) -> str:
    """What, where, expected, both ways out, and the command that shows it again; what a fault leaves out is added."""
    if not isinstance(fault, PruneBenchError):  # a refusal where none is allowed
        fault = Fault(str(fault))
    whole = Fault(
        fault.what,
        where=fault.where or f"class {type(method).__name__}",
        expected=fault.expected or check.rule,
        fix=fault.fix or "change what breaks the rule",
        instead="" if getattr(fault, "instead", "") else f"--expect {check.name}=REASON, if it is right that it fails",
    )
    return f"{whole}; reproduce: {_command(method, check.name)}"


def _refusals(subject: Subject) -> str:
    """On which routers a method does not work by its own word, by reason."""
    families: dict[str, list[str]] = {}
    for family, why in subject.refused.items():
        families.setdefault(why, []).append(family)
    return "; ".join(f"not on {', '.join(names)}: {why}" for why, names in families.items())


def _command(method: Method, check: str) -> str:
    """The command line that repeats a check."""
    try:
        file = str(source_of(type(method)).path)
    except UsageError:
        return f"check_method(…, only=[{check!r}])"
    defaults = {field.name: field.default for field in type(method).__dataclass_fields__.values()}
    parameters = [
        f"--param {shlex.quote(f'{name}={_text(value)}')}"
        for name, value in method.parameters().items()
        if value != defaults[name]
    ]
    return " ".join(["prunebench check", shlex.quote(file), *parameters, "--only", check])


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _expected(failures: Mapping[str, str]) -> Mapping[str, str]:
    known(failures)
    for name, reason in failures.items():
        if not str(reason).strip():
            raise UsageError(
                f"the expected failure of {name} has no reason",
                expected="check: why it is right that it fails",
                fix=f'write {{"{name}": "…"}}',
            )
    return failures


def known(names: Iterable[str]) -> list[str]:
    """Names of checks, each once.

    Raises:
        UsageError: there is no such check.
    """
    names = list(names)
    if wrong := [name for name in names if name not in CHECKS]:
        raise UsageError(f"unknown check {wrong[0]!r}", expected=f"one of {', '.join(CHECKS)}")
    return list(dict.fromkeys(names))


def judged(result: Result, expected: Mapping[str, str]) -> Result:
    """The result, in the light of what was expected to fail."""
    if result.check not in expected:
        return result
    if result.outcome in {"failed", "not run"}:
        return Result(result.check, result.group, "expected failure", expected[result.check])
    message = f"expected to fail ({expected[result.check]}), but {result.outcome}; fix: drop the expectation"
    return Result(result.check, result.group, "stale", message)


class BoundCheck:
    """A check as a test calls it: `check(method)`."""

    def __init__(self, name: str, subject: Subject) -> None:
        self.name, self.subject = name, subject

    def __repr__(self) -> str:
        return self.name

    def __call__(self, method: Method) -> None:
        """Run it; a check that does not apply, or that builds on one that failed, skips the test.

        Raises:
            Fault: the method breaks the rule.
        """
        import pytest

        if method is not self.subject.method:
            raise UsageError("the check is of another method", fix="call check(method) with the test's own method")
        result = outcome(self.subject, self.name)
        if result.outcome == "failed":
            raise Fault(result.message)
        if result.outcome in {"not applicable", "not run"}:
            pytest.skip(f"{result.outcome}: {result.message}")


def parametrize_with_checks(
    methods: Sequence[Method | str],
    *,
    expected_failures: Mapping[str, Mapping[str, str]] | None = None,
    limits: Limits | None = None,
) -> Callable[[Any], Any]:
    """A decorator for `def test_mine(method, check): check(method)`: one test per method and check.

    Args:
        methods: instances, names or paths.
        expected_failures: method's name -> check -> why it is right that it fails; passing is then a failure.
        limits: of time and memory.
    """
    import pytest

    parameters = []
    for given in methods:
        subject = Subject(load_method(given) if isinstance(given, str) else given, limits)
        expected = _expected((expected_failures or {}).get(subject.method.name, {}))
        for name in CHECKS:
            marks = [pytest.mark.xfail(reason=expected[name], strict=True)] if name in expected else []
            identity = f"{subject.method.name}-{name}"
            parameters.append(pytest.param(subject.method, BoundCheck(name, subject), marks=marks, id=identity))
    return pytest.mark.parametrize(("method", "check"), parameters)
