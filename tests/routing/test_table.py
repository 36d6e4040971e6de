"""The table against transformers' source: classes of one row compute the same, and each class named exists."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
import transformers

from prunebench.routing.convention import REFUSED, ROUTERS, UNPRUNABLE


@cache
def routers() -> dict[str, ast.ClassDef]:
    """Every class named in the table, as transformers' modeling files define it."""
    wanted = {*ROUTERS, *REFUSED, *UNPRUNABLE}
    found: dict[str, ast.ClassDef] = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(f"class {name}(" in text for name in wanted):
            continue
        found |= {n.name: n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name in wanted}
    return found


class Plain(ast.NodeTransformer):
    """Drops what does not compute: annotations, docstrings, names of locals that are only returned."""

    def visit_FunctionDef(self, node):
        node.returns = None
        node.decorator_list = []
        if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            node.body = node.body[1:]
        return self.generic_visit(node)

    def visit_arg(self, node):
        node.annotation = None
        return node


def statements(name: str) -> str:
    """What a router class computes: its methods but `__init__`, without what does not compute."""
    methods = [n for n in routers()[name].body if isinstance(n, ast.FunctionDef) and n.name != "__init__"]
    return "\n".join(ast.unparse(Plain().visit(method)) for method in methods)


ROWS: dict[int, list[str]] = {}
for _name, _row in ROUTERS.items():
    ROWS.setdefault(id(_row), []).append(_name)


def test_every_class_of_the_table_exists():
    assert sorted({*ROUTERS, *REFUSED, *UNPRUNABLE} - set(routers())) == []


@pytest.mark.parametrize("names", [names for names in ROWS.values() if len(names) > 1], ids=lambda names: names[0])
def test_classes_of_one_row_compute_the_same_statement_for_statement(names):
    first = statements(names[0])
    assert [name for name in names[1:] if statements(name) != first] == []
