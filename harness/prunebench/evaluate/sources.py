"""Suites of lm-eval tasks whose data are not shipped: from a folder, one file, or the hub at a pinned revision.

A task's file (`suites/tasks/NAME.yaml`) is the same for either: it names the data set, its revision and its splits as
lm-eval's own does, and in `metadata` the fields that a document has with their kinds (`fields`), the data's file name
(`data`, else the task's name), and the field that files may have above their rows (`group`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from prunebench.documents import (
    DATA_FOLDER,
    ENDINGS,
    HUB,
    Rows,
    file_in,
    file_state,
    hub_source,
    read_rows,
    source_or_default,
)
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.suite import Suite

__all__ = ["TaskSuite", "splits_of"]


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_labelled(value: Any) -> bool:
    parts: list[Any] = [value.get(part) for part in ("text", "label")] if isinstance(value, Mapping) else [None]
    return all(map(_is_texts, parts)) and len({len(part) for part in parts}) == 1


KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a text", lambda value: isinstance(value, str)),
    "number": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "texts": ("a list of texts", _is_texts),
    "labelled": ("text and label, two lists of as many texts", _is_labelled),
}
"""What a field of a document may be, in words: a template prints whatever it is given, a list in brackets too."""


def splits_of(config: Mapping[str, Any], shots: int) -> tuple[str, ...]:
    """The split that a task asks, and with few-shot examples the one that lm-eval draws them from."""
    asked = config.get("test_split") or config.get("validation_split")
    if not shots or "samples" in (config.get("fewshot_config") or {}):
        return (str(asked),)
    names = ("fewshot_split", "training_split", "validation_split", "test_split")
    pool = next((config[name] for name in names if config.get(name)), asked)
    return (str(asked),) if pool == asked else (str(asked), str(pool))


class TaskSuite(Suite):
    """A suite of lm-eval tasks on data that are not shipped.

    Without a source, each split is the file of its name in the data folder (`PRUNEBENCH_DATA`) if it is there, else the
    data set of the task's file on the hub. The first split's file is named as the data, any other one `DATA-SPLIT`.

    Attributes:
        source: what was said: a folder, a file, `hub:` for the task files' own data sets, or `hub:ID[@REV]`; or None.
    """

    bos = "tokenizer"
    scorer = "prefix"
    source: str | None = None

    def __init__(self) -> None:
        self._read: dict[str, tuple[Any, Mapping[str, list[dict[str, Any]]]]] = {}
        self._fields: dict[str, Mapping[str, str]] = {}

    def with_source(self, source: str) -> Self:
        """This suite on the data of a source."""
        other = type(self)()
        other.source = source
        return other

    def document(self, task: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row of the source as a document without its `id`: the fields that the task's file names."""
        kinds = self._fields[task]
        for field, kind in kinds.items():
            expected, fits = KINDS[kind]
            if row[field] is not None and not fits(row[field]):
                raise TypeError(f"{field} is {reprlib.repr(row[field])}, expected {expected}")
        return {field: row[field] for field in kinds}

    def prepared(self, task: str, rows: Rows) -> Rows:
        """The rows of a source as rows of documents, where they are not that already."""
        del task
        return rows

    def documents(self, task: str) -> Mapping[str, list[dict[str, Any]]]:
        """The documents of each split that is needed, with their places as ids; a changed file is read anew.

        Raises:
            PrerequisiteError: if a source cannot be read.
            UsageError: if its rows are not those of this data set.
        """
        config = self.task_file(task).config
        places = {split: self._place(config, split) for split in splits_of(config, self.shots_of(config))}
        key = [(where, file_state(where)) for where in places.values()]
        if task not in self._read or self._read[task][0] != key:
            self._read[task] = (key, {split: self._documents(task, where, split) for split, where in places.items()})
        return self._read[task][1]

    def _place(self, config: Mapping[str, Any], split: str) -> str:
        """Where a split of a task is read from."""
        stated: Mapping[str, Any] = config.get("metadata") or {}
        name = str(stated.get("data", config["task"]))
        first = split == splits_of(config, 0)[0]
        hub = hub_source(config)
        # A file with groups holds all splits.
        file = name if first or "group" in stated else f"{name}-{split}"
        if self.source is None:
            return source_or_default(None, file, hub)
        if self.source.startswith(HUB):
            return hub if self.source == HUB else self.source
        folder = Path(self.source).expanduser()
        if not folder.exists():
            raise PrerequisiteError(
                "no such file or folder",
                where=f"--suite {self.name}={self.source}",
                expected=f"a folder of data files, a file, {HUB} or {HUB}ID[@REV]",
            )
        if folder.is_dir():
            if (found := file_in(folder, file)) is None:
                raise PrerequisiteError(
                    f"no data for split {split} of {config['task']}",
                    where=self.source,
                    expected=f"{file} with one of the endings {', '.join(ENDINGS)}",
                    fix=f"give {HUB} to fetch the data set, or set {DATA_FOLDER}",
                )
            return found
        if len(self.tasks) > 1:
            raise UsageError(
                f"suite {self.name} has {len(self.tasks)} tasks", where=self.source, expected="a folder of data files"
            )
        return str(folder) if first else self._beside(folder, split, str(config["task"]))

    def _beside(self, file: Path, split: str, task: str) -> str:
        """The file of another split, beside that of the first."""
        stem = file.name.partition(".")[0]
        if (found := file_in(file.parent, f"{stem}-{split}")) is None:
            raise PrerequisiteError(
                f"no data for split {split} of {task}, from which its examples are drawn",
                where=str(file.parent),
                expected=f"{stem}-{split}{ENDINGS[0]}, or with another ending",
            )
        return found

    def _documents(self, task: str, where: str, split: str) -> list[dict[str, Any]]:
        config = self.task_file(task).config
        stated: Mapping[str, Any] = config.get("metadata") or {}
        self._fields[task] = stated.get("fields", {})
        group = stated.get("group")
        rows = read_rows(where, config=config.get("dataset_name"), split=split, group=group)
        documents: list[dict[str, Any]] = []
        try:
            for row in self.prepared(task, rows):
                document = self.document(task, row)
                if missing := [field for field, value in document.items() if value is None]:
                    raise ValueError(f"{missing[0]} is null")
                documents.append({"id": str(len(documents)), **document})
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise UsageError(
                f"a row is not of this data set ({type(error).__name__}: {error})",
                where=f"suite {self.name}, {where}, behind {len(documents)} good rows",
                expected=f"the rows of {task}",
            ) from error
        if not documents:
            raise UsageError("no documents", where=f"suite {self.name}, {where}", expected=f"the rows of {task}")
        return documents
