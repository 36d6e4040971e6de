"""Rows of a data set that is not shipped: from a file, from the hub, or by evalplus's own loader.

    humaneval.jsonl.gz                     a file: JSON lines, gzipped or not, or one JSON list
    wikitext2-test.txt.gz                  plain text, gzipped or not: one row `text` per line
    hub:openai/openai_humaneval[@REV]      through `datasets`; config and split are the task file's
    evalplus:humaneval | evalplus:mbpp     evalplus's release, as its loader gives it (extra `code`)

Nothing is fetched unless the second or third form is asked for, or no source is given at all.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prunebench.errors import PrerequisiteError, UsageError

__all__ = [
    "DATA_FOLDER",
    "ENDINGS",
    "HUB",
    "Rows",
    "file_in",
    "file_state",
    "hub_source",
    "read_rows",
    "source_or_default",
    "typed_inputs",
]

DATA_FOLDER = "PRUNEBENCH_DATA"
"""Environment variable: a folder of data files, looked into before the hub."""

ENDINGS = (".jsonl.gz", ".jsonl", ".json.gz", ".json", ".txt.gz", ".txt")
"""Of data files, in the order in which they are looked for."""

HUB = "hub:"
"""Before a data set's id; alone, the task file's own data set."""

Rows = Sequence[Mapping[str, Any]]


def source_or_default(source: str | None, file: str, default: str) -> str:
    """What a suite reads: what was asked for, else `file` in the data folder if there is one, else its default.

    Args:
        source: as asked for, or None.
        file: the data's name in the data folder; looked for with each of `ENDINGS`.
        default: a source for machines with a network.
    """
    if source:
        return source
    folder = os.environ.get(DATA_FOLDER)
    return (file_in(Path(folder), file) if folder else None) or default


def hub_source(config: Mapping[str, Any]) -> str:
    """The data set that a task file names, at the revision that it names."""
    revision = (config.get("dataset_kwargs") or {}).get("revision")
    return f"{HUB}{config['dataset_path']}" + (f"@{revision}" if revision else "")


def file_in(folder: Path, file: str) -> str | None:
    """The path of a data file in a folder, by its name without ending; None if it is not there."""
    return next((str(path) for ending in ENDINGS if (path := folder / f"{file}{ending}").is_file()), None)


def file_state(source: str) -> tuple[int, int] | None:
    """What changes when a source that is a file does; None for any other."""
    path = Path(source)
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else None


def read_rows(source: str, *, config: str | None = None, split: str = "test", group: str | None = None) -> Rows:
    """All rows of a source, in its order.

    Args:
        source: a path, `hub:…` or `evalplus:…`.
        config: of a hub data set.
        split: of a hub data set, or of a file with groups.
        group: the field that a file may have above its rows: `{value of the field: {split: [row, …]}, …}`.

    Raises:
        PrerequisiteError: if it cannot be read or fetched, or the extra `code` is missing.
        UsageError: if it is none of the three, or not made of JSON objects.
    """
    kind, _, rest = source.partition(":")
    if kind == "hub":
        return _from_hub(rest, config, split)
    if kind == "evalplus":
        return _from_evalplus(rest)
    return _from_file(Path(source).expanduser(), split, group)


def _from_file(path: Path, split: str = "test", group: str | None = None) -> Rows:
    try:
        content = path.read_bytes()
        # As other systems write texts: a mark at the beginning, and line ends of two characters.
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise PrerequisiteError("cannot read the data", where=str(path), fix=str(error)) from error
    if ".txt" in path.suffixes:
        return [{"text": line} for line in text.split("\n")]
    if group is not None and path.name.endswith((".json", ".json.gz")):
        return _grouped(text, path, split, group)
    if text.lstrip().startswith("["):
        rows = _parsed(text, str(path))
    else:
        # Not splitlines(): JSON strings may hold other line separators than \n.
        lines = enumerate(text.split("\n"), start=1)
        rows = [_parsed(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError("the data has no rows", where=str(path), expected="one JSON object per line")
    return list(rows)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError("the data is no JSON", where=where, expected="JSON lines", fix=str(error)) from error


def _grouped(text: str, path: Path, split: str, group: str) -> Rows:
    """The rows of one split of every group, in the file's order, each with its group's name."""
    try:
        groups = json.loads(text)
        rows = [{group: name, **row} for name, splits in groups.items() for row in splits[split]]
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise UsageError(
            f"not data by {group} ({error!r})", where=str(path), expected=f'{{{group}: {{"{split}": [row, …]}}, …}}'
        ) from error
    if not rows:
        raise UsageError("the data has no rows", where=str(path), expected=f"rows of split {split}")
    return rows


def _from_hub(name: str, config: str | None, split: str) -> Rows:
    from datasets import load_dataset

    repository, _, revision = name.partition("@")
    if not repository:
        raise UsageError("no data set is named", where=f"hub:{name}", expected="hub:ID[@REV]")
    try:
        return [dict(row) for row in load_dataset(repository, config, split=split, revision=revision or None)]
    except (OSError, ValueError, RuntimeError) as error:
        raise PrerequisiteError(
            f"cannot fetch the data ({type(error).__name__})",
            where=f"hub:{name}",
            expected="a data set that can be reached, or is in the cache of datasets",
            fix=f"give a file, as --suite NAME=FILE, or set {DATA_FOLDER} to a folder that has it",
        ) from error


def _from_evalplus(name: str) -> Rows:
    if name not in {"humaneval", "mbpp"}:
        raise UsageError(f"evalplus has no {name!r}", expected="evalplus:humaneval or evalplus:mbpp")
    try:
        from evalplus.data.humaneval import _ready_human_eval_plus_path
        from evalplus.data.mbpp import _ready_mbpp_plus_path
    except ImportError as error:
        raise _no_evalplus(error) from error
    ready = {"humaneval": _ready_human_eval_plus_path, "mbpp": _ready_mbpp_plus_path}[name]
    try:
        # Its loader finds or downloads the release; the rows are read here, as its reader changes the inputs' types.
        return _from_file(Path(ready()))
    except OSError as error:
        raise PrerequisiteError(
            f"evalplus cannot fetch its data ({type(error).__name__})",
            where=f"evalplus:{name}",
            fix=f"give a file, as --suite NAME=FILE, or set {DATA_FOLDER} to a folder that has it",
        ) from error


def typed_inputs(task: str, inputs: list[Any]) -> list[Any]:
    """MBPP+'s inputs with the types that JSON has no words for (tuples, sets, complex numbers), as evalplus reads them.

    Raises:
        PrerequisiteError: without the extra `code`.
    """
    try:
        from evalplus.data.mbpp import mbpp_deserialize_inputs
    except ImportError as error:
        raise _no_evalplus(error) from error
    typed: list[Any] = mbpp_deserialize_inputs(task, inputs)
    return typed


def _no_evalplus(error: ImportError) -> PrerequisiteError:
    return PrerequisiteError(
        "evalplus is not installed", where=str(error), fix="pip install 'prunebench[code]', for HumanEval+ and MBPP+"
    )
