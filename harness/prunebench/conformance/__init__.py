"""Conformance: does a stranger's method keep the rules that every method keeps?

`check_method` and `parametrize_with_checks` for tests, `prunebench check FILE` for the shell. The checks are small
functions in `checks`, each with a broken twin in tests/conformance that fails it and nothing else. They run on tiny
random models and say nothing about whether a method is any good, or whether its formula is the one that was meant.
"""

from prunebench.conformance.card import card, index, rules
from prunebench.conformance.new import write_template
from prunebench.conformance.registry import CHECKS, GROUPS, Check
from prunebench.conformance.result import ConformanceError, Fault, Report, Result
from prunebench.conformance.runner import check_method, parametrize_with_checks, report_of
from prunebench.conformance.subject import Limits

__all__ = [
    "CHECKS",
    "GROUPS",
    "Check",
    "ConformanceError",
    "Fault",
    "Limits",
    "Report",
    "Result",
    "card",
    "check_method",
    "index",
    "parametrize_with_checks",
    "report_of",
    "rules",
    "write_template",
]
