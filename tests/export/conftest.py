"""Gives tests of exports their material."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _module(name: str, path: Path) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_here = Path(__file__).parent
_module("export_material", _here / "material.py")
_module("vllm_reader", _here / "vllm_reader.py")
_runs = _module("prunebench_run_material", _here.parent / "run" / "material.py")
material, model, suite, spec = _runs.material, _runs.model, _runs.suite, _runs.spec


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    """`bases(family)` is the folder of a random checkpoint of that family."""
    root, made = tmp_path_factory.mktemp("bases"), {}

    def base(family: str, **options) -> Path:
        key = f"{family}-{'-'.join(f'{name}={value}' for name, value in sorted(options.items()))}"
        if key not in made:
            made[key] = sys.modules["export_material"].write_base(root / key, family, **options)
        return made[key]

    return base
