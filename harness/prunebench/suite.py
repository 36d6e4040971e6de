"""What a suite is: a named set of tasks that turns one model into item outcomes.

A suite is one file `suites/<name>.py` that defines a module-level `SUITE`, its task files `suites/tasks/*.yaml` in
lm-eval's own format, and the data files that those name, relative to the suites folder. This module knows the shape of
a suite and the identity of its content; it runs nothing and imports neither torch nor lm-eval.
"""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from prunebench.errors import PrerequisiteError, UsageError

if TYPE_CHECKING:
    from prunebench.evaluate import Evaluation
    from prunebench.record import Item

__all__ = ["Suite", "TaskFile", "suite_content"]


@dataclass(frozen=True)
class TaskFile:
    """One task in lm-eval's YAML format, with local data.

    Args:
        path: the YAML file; its folder's parent is the suites folder.
    """

    path: Path

    @property
    def config(self) -> dict[str, Any]:
        """The YAML's content.

        Raises:
            UsageError: if the file is no mapping with a `task` and local `dataset_kwargs: {data_files: {split: path}}`.
        """
        import yaml

        try:
            config = yaml.safe_load(self.path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PrerequisiteError("cannot read the task file", where=str(self.path), fix=str(error)) from error
        except yaml.YAMLError as error:
            raise UsageError("the task file is no plain YAML", where=str(self.path), fix=str(error)) from error
        if not isinstance(config, dict) or "task" not in config or not self._files_of(config):
            raise UsageError(
                "not a local lm-eval task",
                where=str(self.path),
                expected="a mapping with task and dataset_kwargs: {data_files: {test: data/NAME.jsonl}}",
            )
        return config

    @staticmethod
    def _files_of(config: Mapping[str, Any]) -> Mapping[str, str]:
        files = (config.get("dataset_kwargs") or {}).get("data_files")
        return files if isinstance(files, dict) else {}

    @property
    def data_files(self) -> dict[str, Path]:
        """Data file of each split."""
        return {split: self.path.parent.parent / name for split, name in self._files_of(self.config).items()}


class Suite(ABC):
    """A named set of tasks and what to record of them.

    Attributes:
        name: the suite's name, that of its file.
        version: raised whenever an outcome could change.
        tasks: names of its task files, `tasks/<task>.yaml` beside the suite's file.
        headline: the (task, filter, metric) whose macro mean is the suite's number.
        needs_dense: whether `run` compares with the unpruned model.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    tasks: ClassVar[tuple[str, ...]]
    headline: ClassVar[tuple[tuple[str, str, str], ...]]
    needs_dense: ClassVar[bool] = False

    @property
    def file(self) -> Path:
        """The Python file that defines the suite."""
        return Path(inspect.getfile(type(self)))

    def task_file(self, task: str) -> TaskFile:
        """The task file of this name."""
        return TaskFile(self.file.parent / "tasks" / f"{task}.yaml")

    @abstractmethod
    def run(self, evaluation: Evaluation) -> list[Item]:
        """Ask every item of every task and return its outcomes, in the tasks' and the documents' order."""


def suite_content(suite: Suite) -> str:
    """16 hex digits over the suite's Python file, its task files and their data: all that can change an outcome.

    Raises:
        PrerequisiteError: if one of the files is missing.
    """
    task_files = [suite.task_file(task) for task in suite.tasks]
    paths = [suite.file, *(file.path for file in task_files)]
    paths += [path for file in task_files for _, path in sorted(file.data_files.items())]
    digest = hashlib.sha256()
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise PrerequisiteError("a file of the suite is missing", where=str(path), fix=str(error)) from error
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
