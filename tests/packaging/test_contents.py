"""Content files import only what is promised to stay, and the package only what it declares."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from prunebench.conformance.checks.interface import foreign_imports
from prunebench.testing import FAMILIES

ROOT = Path(__file__).parents[2]
CONTENT = [*sorted((ROOT / "methods").glob("*.py")), *sorted((ROOT / "suites").glob("*.py"))]
PACKAGE = sorted((ROOT / "harness/prunebench").rglob("*.py"))
DISTRIBUTION_OF = {"yaml": "pyyaml", "vl-convert": "vl-convert-python"}  # others differ by a hyphen at most


def imports(file: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names) of every import statement, wherever it stands; `import x` has no names."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ".", tuple(alias.name for alias in node.names)


@pytest.mark.parametrize("file", CONTENT, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_content_files_import_public_names_torch_numpy_and_the_standard_library(file):
    assert not list(foreign_imports(ast.parse(file.read_text(encoding="utf-8"))))


def test_every_third_party_import_of_the_package_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = project["dependencies"] + [
        r for extra in ("code", "gpu", "plots", "test") for r in project["optional-dependencies"][extra]
    ]
    declared = {re.split(r"[<>=!~ \[]", requirement)[0] for requirement in requirements}
    used = {module.partition(".")[0]: file.relative_to(ROOT) for file in PACKAGE for module, _ in imports(file)}
    third_party = {top: file for top, file in used.items() if top not in sys.stdlib_module_names | {"prunebench"}}
    needed = {DISTRIBUTION_OF.get(top, top).replace("_", "-"): file for top, file in third_party.items()}
    missing = {name: file for name, file in needed.items() if name not in declared}
    assert not missing, f"not declared in pyproject.toml: {missing}"


def test_the_page_of_families_names_every_family_and_every_column_of_its_command():
    text = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {row.split("|")[1].strip() for row in rows[2:]} == set(FAMILIES)
    reasons = set(re.findall(r"\[(\d+)\]", text))
    assert reasons == set(re.findall(r"^(\d+)\. \S", text, flags=re.MULTILINE)), "every no has its reason"
