"""Every check bites: the honest method passes all, and each broken twin fails its check and nothing else."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from prunebench import load_method
from prunebench.conformance import CHECKS, report_of


def _beside(name: str):
    """A helper file of these tests; `tests/` is no package."""
    spec = importlib.util.spec_from_file_location(f"conformance_{name}", Path(__file__).parent / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


twins = _beside("twins")
# What, where, expected, both ways out, and the command that shows it again.
PARTS = re.compile(r".+; in .+; expected .+; fix: .+; or .+; reproduce: prunebench check .+", re.DOTALL)
# Enough for the twin that is told by its router; what a method does on all of them, test_methods asks.
ROUTERS = ("olmoe", "nemotron_h")


def method_of(text: str, folder: Path):
    path = folder / "honest.py"
    path.write_text(text, encoding="utf-8")
    return load_method(str(path))


def test_the_honest_method_passes_every_check(tmp_path):
    report = report_of(method_of(twins.HONEST, tmp_path))
    assert report.ok, report.to_text()
    assert not report.of("not run")
    assert not report.of("not applicable")


@pytest.mark.parametrize("twin", twins.TWINS, ids=lambda twin: f"{twin.check}: {twin.does}")
def test_a_twin_fails_its_check_and_nothing_else(tmp_path, twin):
    report = report_of(method_of(twin.text, tmp_path), limits=twin.limits, routers=ROUTERS)
    assert [one.check for one in report.of("failed")] == [twin.check], report.to_text()
    message = report.of("failed")[0].message
    assert PARTS.fullmatch(message), message
    assert message.endswith(f" --only {twin.check}")


def test_every_check_has_a_twin():
    assert {twin.check for twin in twins.TWINS} == set(CHECKS)


def test_what_one_method_replaces_does_not_blind_the_checks_of_the_next(tmp_path):
    by_what = {twin.does: twin for twin in twins.TWINS}
    for does in ("puts its own function in the place of torch's", "is a mean of batch means"):
        twin = by_what[does]
        report = report_of(method_of(twin.text, tmp_path), routers=ROUTERS)
        assert [one.check for one in report.of("failed")] == [twin.check], report.to_text()
