"""A method's card: what it is, and what the checks say of it, as Markdown."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence

from prunebench.calibration import Statistic
from prunebench.conformance.registry import CHECKS, GROUPS
from prunebench.conformance.result import Report
from prunebench.method import Method

__all__ = ["card", "index", "rules"]

_CLAIMS = ("nested", "independent_layers")


def card(method: Method, report: Report) -> str:
    """The card, the same on every machine."""
    kind = type(method)
    facts = [
        ("kind", _kind(kind)),
        ("source", str(kind.reference)),
        ("version", str(kind.version)),
        ("`select` reads", _needs(method.select_needs()) if kind.selects() else "–"),
        ("`replace` reads", _needs(method.replace_needs()) if kind.replaces() else "–"),
        ("parameters", _parameters(method)),
        (
            "claims",
            ", ".join(f"`{name}`" for name in ("nested", "independent_layers") if getattr(kind, name)) or "none",
        ),
        ("file", f"`{report.file}`, sha256 `{report.sha256[:16]}`"),
    ]
    lines = [f"# {report.name}", "", inspect.cleandoc(kind.__doc__ or ""), "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {_cell(text)} |" for name, text in facts]
    lines += ["", "## Checks", "", f"`prunebench check {report.file}`: {report.summary()}.", ""]
    by_group = [
        (group, words, [one for one in report.results if one.group == group]) for group, words in GROUPS.items()
    ]
    lines += ["| group | passed | not passed |", "| --- | --- | --- |"]
    for group, words, results in by_group:
        if results:
            passed = [f"`{one.check}`" for one in results if one.outcome == "passed"]
            others = [f"`{one.check}`: {one.outcome}" for one in results if one.outcome != "passed"]
            lines.append(f"| {group}: {words} | {', '.join(passed) or '–'} | {', '.join(others) or '–'} |")
    alike: dict[tuple[str, str], list[str]] = {}
    for one in report.results:
        if one.message:
            alike.setdefault((one.outcome, one.message), []).append(f"`{one.check}`")
    said = [f"- {', '.join(names)}, {outcome}: {message}" for (outcome, message), names in alike.items()]
    return "\n".join([*lines, "", *said]).rstrip() + "\n"


def index(methods: Sequence[tuple[Method, Report]]) -> str:
    """A table of methods, each with its card beside it."""
    lines = [
        "# Methods",
        "",
        "One card per file of `methods/`, written by `prunebench check methods/*.py --cards docs/methods`; a test",
        "compares them with what the checks say now.",
        "",
        "| method | kind | source | checks |",
        "| --- | --- | --- | --- |",
    ]
    for method, report in sorted(methods, key=lambda one: one[1].name):
        kind = type(method)
        lines.append(
            f"| [{report.name}]({report.name}.md) | {_kind(kind)} | {_cell(str(kind.reference))} | {report.summary()} |"
        )
    return "\n".join(lines) + "\n"


def rules() -> str:
    """Every check and its rule, as a Markdown table."""
    lines = ["| check | rule |", "| --- | --- |"]
    for group, words in GROUPS.items():
        lines.append(f"| **{group}** | *{words}* |")
        lines += [f"| `{one.name}` | {one.rule} |" for one in CHECKS.values() if one.group == group]
    return "\n".join(lines) + "\n"


def _kind(kind: type[Method]) -> str:
    if not kind.selects():
        return "operator"
    return "criterion with fills" if kind.replaces() else "criterion, rerouted"


def _needs(statistics: Sequence[Statistic]) -> str:
    return ", ".join(f"`{type(one).__name__}` ({one.measured_in} pass)" for one in statistics) or "no statistics"


def _parameters(method: Method) -> str:
    fields = dataclasses.fields(method)
    return ", ".join(f"`{one.name}: {one.type} = {getattr(method, one.name)!r}`" for one in fields) or "none"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
