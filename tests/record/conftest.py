"""Gives tests the factory of synthetic runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def factory() -> ModuleType:
    path = Path(__file__).parents[1] / "record" / "factory.py"
    spec = importlib.util.spec_from_file_location("prunebench_record_factory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
