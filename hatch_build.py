"""Build hook: a wheel carries the content folders as `prunebench/_shipped`, an editable install carries nothing.

It runs for `version == "standard"` only. A static `force-include` would also copy the files into an editable install,
where they would go stale while the checkout moves on; there `prunebench.loader` finds the checkout itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIPPED = ("methods", "suites", "fixtures", "leaderboard/tracks")


def is_shipped(path: Path) -> bool:
    """Whether a file, relative to the checkout, belongs into a wheel: no hidden folder (`.work`) and no cache."""
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and "__pycache__" not in path.parts


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Add every content file to a standard wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a build; `version` is "standard" or "editable"."""
        if version != "standard":
            return
        root = Path(self.root)
        for folder in SHIPPED:
            for file in sorted((root / folder).rglob("*")):
                name = file.relative_to(root)
                if file.is_file() and is_shipped(name):
                    build_data["force_include"][str(file)] = f"prunebench/_shipped/{name.as_posix()}"
