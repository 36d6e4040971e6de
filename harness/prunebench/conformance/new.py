"""A new method from the template, which passes the checks as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from prunebench.errors import UsageError
from prunebench.mask import write_atomically

__all__ = ["write_template"]


def write_template(name: str, folder: Path) -> Path:
    """Write `folder/NAME.py`.

    Args:
        name: small letters, digits and hyphens, such as `gate-entropy`.
        folder: where to; it must exist.

    Raises:
        UsageError: an impossible name, no such folder, or a file that is there.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UsageError(
            f"method name {name!r}", expected="small letters, digits and single hyphens, such as gate-entropy"
        )
    if not folder.is_dir():
        raise UsageError("no such folder", where=str(folder), expected="a folder for the file", fix="give --folder")
    path = folder / f"{name}.py"
    if path.exists():
        raise UsageError("the file is there already", where=str(path), fix="choose another name, or remove it")
    text = Path(__file__).with_name("template.py").read_text(encoding="utf-8")
    text = text.replace("class Template(", f"class {name.title().replace('-', '')}(")
    text = text.replace('name = "template"', f'name = "{name}"').replace('"""Template:', f'"""{name}:', 1)
    write_atomically(path, text.encode())
    return path
