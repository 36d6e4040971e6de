"""What a suite is: a named set of tasks that turns one model into item outcomes.

A suite is one file `suites/<name>.py` that defines a module-level `SUITE`, its task files `suites/tasks/*.yaml` in
lm-eval's own format, and the data files that those name, relative to the suites folder. This module knows the shape of
a suite and the identity of its content; it runs nothing and imports neither torch nor lm-eval.

The data of a `DataSuite` are not shipped: they come from a file, the hub or evalplus (`prunebench.documents`), are
made into documents by the suite, and are part of its identity by their content, wherever they came from.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from prunebench.documents import Rows, file_state, hub_source, read_rows, source_or_default
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import canonical_json

if TYPE_CHECKING:
    from prunebench.evaluate import Evaluation
    from prunebench.record import Item

__all__ = ["SCORERS", "BosRule", "DataSuite", "Suite", "TaskFile", "suite_content"]


BosRule = Literal["always", "tokenizer"]
SCORERS = ("batched", "prefix")
"""How requests share forward passes: in padded batches, each on its own; or what they begin with together once."""


@dataclass(frozen=True)
class TaskFile:
    """One task in lm-eval's YAML format, with local data, or naming a data set of the hub.

    Args:
        path: the YAML file; its folder's parent is the suites folder.
    """

    path: Path

    @property
    def config(self) -> dict[str, Any]:
        """The YAML's content.

        Raises:
            UsageError: if the file is no mapping with a `task` and local `dataset_kwargs: {data_files: {split:
                path}}` or a `dataset_path` on the hub.
        """
        import yaml

        try:
            config = yaml.safe_load(self.path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PrerequisiteError("cannot read the task file", where=str(self.path), fix=str(error)) from error
        except yaml.YAMLError as error:
            raise UsageError("the task file is no plain YAML", where=str(self.path), fix=str(error)) from error
        if not isinstance(config, dict) or "task" not in config or not (self._files_of(config) or _on_hub(config)):
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
        """Data file of each split; none if the data are on the hub."""
        return {split: self.path.parent.parent / name for split, name in self._files_of(self.config).items()}


_RUNNERS = ("run_program", "run_cases", "base_and_plus")
"""What hands programs to the sandbox."""


def _on_hub(config: Mapping[str, Any]) -> bool:
    return "/" in str(config.get("dataset_path", ""))


class Suite(ABC):
    """A named set of tasks and what to record of them.

    Attributes:
        name: the suite's name, that of its file.
        version: raised whenever an outcome could change.
        tasks: names of its task files, `tasks/<task>.yaml` beside the suite's file.
        headline: the (task, filter, metric) whose macro mean is the suite's number.
        shots: few-shot examples of every task, instead of what its file says; None to leave it at that.
        needs_dense: whether `run` compares with the unpruned model.
        bos: `always`, one BOS before every text if the tokenizer has one; or `tokenizer`, only where the tokenizer
            itself puts one before a text, as lm-eval does.
        scorer: of `SCORERS`, unless a run asks for another; with `prefix`, an architecture that does not take it is
            scored by `batched`.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    tasks: ClassVar[tuple[str, ...]]
    headline: ClassVar[tuple[tuple[str, str, str], ...]]
    shots: ClassVar[int | None] = None
    needs_dense: ClassVar[bool] = False
    bos: ClassVar[BosRule] = "always"
    scorer: ClassVar[str] = "batched"

    def shots_of(self, config: Mapping[str, Any]) -> int:
        """How many few-shot examples a task has."""
        return int(config.get("num_fewshot") or 0) if self.shots is None else self.shots

    def scored_by(self, asked: str | None) -> str:
        """The scorer under which the suite is asked, where a run may ask for another than its own."""
        return asked or self.scorer

    @property
    def file(self) -> Path:
        """The Python file that defines the suite."""
        return Path(inspect.getfile(type(self)))

    def task_file(self, task: str) -> TaskFile:
        """The task file of this name."""
        return TaskFile(self.file.parent / "tasks" / f"{task}.yaml")

    @property
    def task_files(self) -> tuple[TaskFile, ...]:
        """The task file of each task."""
        return tuple(self.task_file(task) for task in self.tasks)

    @property
    def cells(self) -> tuple[tuple[str, str, str], ...]:
        """The headline, where only the data say which tasks there are."""
        return self.headline

    @property
    def runs_programs(self) -> bool:
        """Whether the suite runs what a model wrote, going by its file."""
        text = self.file.read_text(encoding="utf-8")
        return any(name in text for name in _RUNNERS)

    def documents(self, task: str) -> Mapping[str, list[dict[str, Any]]] | None:
        """The documents of each split of a task; None if they are those of its data files."""
        del task
        return None

    def with_source(self, source: str) -> Suite:
        """This suite on other data.

        Raises:
            UsageError: if its data are its own.
        """
        raise UsageError(
            f"suite {self.name} has its data with it", where=source, fix=f"give --suite {self.name} without a source"
        )

    @abstractmethod
    def run(self, evaluation: Evaluation) -> list[Item]:
        """Ask every item of every task and return its outcomes, in the tasks' and the documents' order."""


class DataSuite(Suite):
    """A suite of one task whose data are not shipped.

    Attributes:
        data_name: the data's file in the data folder, without `.jsonl` or `.jsonl.gz`.
        default_source: where they come from if nothing is said; the task file's data set on the hub by default.
        source: what was said, or None.
    """

    bos = "tokenizer"
    scorer = "prefix"
    data_name: ClassVar[str]
    default_source: ClassVar[str] = ""
    source: str | None = None

    def __init__(self) -> None:
        self._read: dict[Any, Mapping[str, list[dict[str, Any]]]] = {}

    def with_source(self, source: str) -> Self:
        """This suite on the data of a source (`prunebench.documents`)."""
        other = copy.copy(self)
        DataSuite.__init__(other)
        other.source = source
        return other

    @abstractmethod
    def document(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """A row of the source as a document with an `id`; None if the row is of no concern."""

    def documents(self, task: str) -> Mapping[str, list[dict[str, Any]]]:
        """The documents of the task's test split; a file is read anew when it has changed.

        Raises:
            PrerequisiteError: if the source cannot be read.
            UsageError: if its rows are not those of this data set.
        """
        config = self.task_file(task).config
        split = str(config["test_split"])
        where = source_or_default(self.source, self.data_name, self.default_source or hub_source(config))
        key = (where, file_state(where))
        if key not in self._read:
            rows = read_rows(where, config=config.get("dataset_name"), split=split)
            self._read.clear()
            self._read[key] = {split: self._documents(rows, where)}
        return self._read[key]

    def _documents(self, rows: Rows, where: str) -> list[dict[str, Any]]:
        try:
            documents = [document for row in rows if (document := self.document(row)) is not None]
        except (KeyError, TypeError, ValueError, SyntaxError) as error:
            raise UsageError(
                f"a row is not of this data set ({type(error).__name__}: {error})",
                where=f"suite {self.name}, {where}",
                expected=f"the rows of {self.data_name}",
            ) from error
        if not documents or len({document["id"] for document in documents}) != len(documents):
            raise UsageError("no documents, or repeated ids", where=f"suite {self.name}, {where}")
        return documents


def suite_content(suite: Suite) -> str:
    """16 hex digits over the suite's Python file, its task files and their data: all that can change an outcome.

    Data that are not shipped count by their documents, so that one data set is one identity, wherever it came from.
    A rule for BOS counts where it is not the tiny world's, whose suites' digests are of their files alone.

    Raises:
        PrerequisiteError: if one of the files is missing.
        UsageError: if a document holds NaN or infinity.
    """
    paths = [suite.file, *(file.path for file in suite.task_files)]
    paths += [path for file in suite.task_files for _, path in sorted(file.data_files.items())]
    digest = hashlib.sha256()
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise PrerequisiteError("a file of the suite is missing", where=str(path), fix=str(error)) from error
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    for task in suite.tasks:
        if (documents := suite.documents(task)) is not None:
            try:
                content = canonical_json(documents).encode(errors="surrogatepass")
            except ValueError as error:  # Python reads NaN and Infinity, and MBPP+ has them in texts of inputs
                raise UsageError(
                    "a document holds NaN or infinity",
                    where=f"suite {suite.name}, task {task}",
                    expected="numbers that JSON has",
                    fix="give data without them",
                ) from error
            digest.update(f"{task}\0{len(content)}\0".encode() + content)
    if suite.bos != Suite.bos:
        digest.update(f"bos\0{suite.bos}\0".encode())
    return digest.hexdigest()[:16]
