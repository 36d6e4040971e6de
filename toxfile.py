"""Inline tox plug-in: a runner whose environments may share one folder.

tox rebuilds an environment whenever another name used its folder last. All of ours install the same things, and torch
is large, so the name is left out of that comparison. Everything else (requirements, constraints, Python) still counts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from tox.plugin import impl
from tox.tox_env.api import ToxEnv
from tox.tox_env.info import Info
from tox.tox_env.python.virtual_env.runner import VirtualEnvRunner
from tox.tox_env.register import ToxEnvRegister


class NamelessInfo(Info):
    """What tox remembers of an environment, less the environment's name."""

    def compare(
        self, value: Any, section: str, sub_section: str | None = None
    ) -> AbstractContextManager[tuple[bool, Any | None]]:
        """As tox does, but every name is the same name."""
        if section == ToxEnv.__name__:
            value = {**value, "name": "shared"}
        return super().compare(value, section, sub_section)


class SharedRunner(VirtualEnvRunner):
    """A virtual environment that several tox environments use in turn (not in parallel)."""

    @staticmethod
    def id() -> str:
        """The name for `runner =` in tox.ini."""
        return "shared"

    @property
    def cache(self) -> Info:
        """The remembered state of the last set-up."""
        return NamelessInfo(self.env_dir)


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    """Make the runner known to tox."""
    register.add_run_env(SharedRunner)
