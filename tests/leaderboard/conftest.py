"""The page's program, which is no part of the package, and a synthetic track for it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
MODULES = (
    "page",
    "evidence",
    "verdicts",
    "drift",
    "text",
    "generation",
    "operators",
    "ranks",
    "fits",
    "budgets",
    "settings",
    "__main__",
)


def _module(name):
    """A helper file of these tests, as a module."""
    spec = importlib.util.spec_from_file_location(f"prunebench_tests_{name}", Path(__file__).parent / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def findings():
    """Modules of `leaderboard.findings`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield SimpleNamespace(**{name: importlib.import_module(f"leaderboard.findings.{name}") for name in MODULES})


@pytest.fixture(scope="session")
def maker():
    """Synthetic runs whose content a test can ask for."""
    return _module("maker")


@pytest.fixture(scope="session")
def quick():
    """Runs here need not outlast a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _handle: None)
        yield


@pytest.fixture(scope="session")
def records(maker, quick, tmp_path_factory):
    """The whole track on two models."""
    folder = tmp_path_factory.mktemp("records")
    for model in maker.MODELS:
        for spec in maker.track(model):
            maker.write(folder, spec)
    return folder


@pytest.fixture(scope="session")
def evidence(findings, records):
    return findings.evidence.gather(records)


@pytest.fixture(scope="session")
def page(findings, evidence):
    return findings.page.results_page(evidence)


@pytest.fixture(scope="session")
def reading():
    """A page as tables."""
    return _module("reading")


@pytest.fixture(scope="session")
def sections(page, hand, reading):
    """The tables of the page by section."""
    return reading.sections(page, hand.Same)


@pytest.fixture(scope="session")
def hand():
    """The same numbers by hand."""
    return _module("by_hand")
