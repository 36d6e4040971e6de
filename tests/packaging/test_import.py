"""`import prunebench`: light, and every public name is there."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

import pytest

import prunebench

HEAVY = {"torch", "transformers", "lm_eval", "datasets", "pyarrow", "numpy", "rich", "tabulate"}


def loaded_by(code: str) -> set[str]:
    """Top-level modules of third parties in sys.modules after `code` in a fresh interpreter."""
    shown = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}\n{shown}"],
        check=True,
        capture_output=True,
        text=True,
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_import_prunebench_takes_no_heavy_package():
    assert not loaded_by("import prunebench; prunebench.__version__; dir(prunebench)") & HEAVY


def test_the_errors_take_no_heavy_package():
    assert not loaded_by("import prunebench; prunebench.PruneBenchError") & HEAVY


@pytest.mark.parametrize("module", ["record", "items", "packing", "storage", "mask", "analysis", "board"])
def test_records_and_tables_take_no_torch(module):
    assert not loaded_by(f"import prunebench.{module}") & {"torch", "transformers", "lm_eval", "datasets"}


def test_listing_contents_takes_no_torch():
    code = (
        "from prunebench import loader\nfor kind in ('methods', 'suites', 'models', 'tracks'): loader.available(kind)"
    )
    assert not loaded_by(code) & HEAVY


@pytest.mark.parametrize("name", prunebench.__all__)
def test_every_public_name_resolves(name):
    value = getattr(prunebench, name)
    assert value is not None
    assert not isinstance(value, ModuleType)


def test_the_public_names_of_the_type_checker_are_those_of_the_interpreter():
    import ast
    from pathlib import Path

    tree = ast.parse(Path(prunebench.__file__).read_text(encoding="utf-8"))
    for_type_checkers = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert for_type_checkers == {name: f"prunebench.{module}" for name, module in prunebench._MODULE_OF.items()}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'prune_harder'"):
        _ = prunebench.prune_harder


def test_dir_names_everything_public():
    assert set(prunebench.__all__) <= set(dir(prunebench))


def test_run_is_the_function_even_after_its_module_was_imported():
    code = "import prunebench.run, prunebench\nassert callable(prunebench.run), prunebench.run"
    loaded_by(code)
