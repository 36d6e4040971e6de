"""Gives tests the shared material of runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "prunebench_run_material"

if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).parents[1] / "run" / "material.py")
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])

_shared = sys.modules[_NAME]
material, model, suite, spec = _shared.material, _shared.model, _shared.suite, _shared.spec
