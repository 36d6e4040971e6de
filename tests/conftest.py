"""For all tests: hypothesis profiles, no network and one thread even outside tox, and the float64 oracle."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch or a hub client; tox.ini sets the same.
for variable, value in {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(variable, value)

# No deadlines: a first call into torch takes seconds on a loaded machine and says nothing about the rule under test.
_SLOW_IS_FINE = [HealthCheck.too_slow]
settings.register_profile("dev", deadline=None, max_examples=20, suppress_health_check=_SLOW_IS_FINE)
# The same examples on every run: a red build is then about the change, and can be repeated.
settings.register_profile(
    "ci", deadline=None, max_examples=40, derandomize=True, print_blob=True, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile(
    "nightly", deadline=None, max_examples=500, print_blob=True, suppress_health_check=_SLOW_IS_FINE
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


def _module(path: str) -> ModuleType:
    """A helper file of the tests, as a module; `tests/` is no package."""
    name = f"prunebench_tests_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_report_header() -> str:
    """The first lines of a run say where generated programs run: there is no test of the sandbox that skips."""
    from prunebench.errors import PrerequisiteError
    from prunebench.sandbox import boxed

    try:
        return f"sandbox: {boxed().name}"
    except PrerequisiteError as error:
        return f"sandbox: MISSING, its tests will fail ({error})"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The last lines say it again: quiet runs have no header."""
    terminalreporter.write_line(pytest_report_header())


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """What routers, experts and statistics compute, in float64, without prunebench."""
    return _module("routing/oracle.py")


@pytest.fixture(scope="session")
def factory() -> ModuleType:
    """Synthetic runs."""
    return _module("record/factory.py")
