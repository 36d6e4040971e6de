"""Outcomes of questions, one row per item and metric, and the parquet files that hold them.

A run's file holds everything. Where many runs answer the same questions, what they share may stand in a table of
questions instead, once for all of them, named by the sha256 of its bytes. The run's file is then packed: it keeps
values, states and what its details say otherwise than the table's, and names the table, which is looked for in the
folders above. Either form reads as the same `ItemTable`. Nothing heavy is imported before a file is touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import canonical_json

__all__ = [
    "QUESTIONS",
    "STATES",
    "Item",
    "ItemTable",
    "LostQuestionsError",
    "Outcomes",
    "Questions",
    "content_hash",
    "items_to_table",
    "locate_questions",
    "questions_bytes",
    "questions_named",
    "read_items",
    "read_outcomes",
    "read_questions",
    "write_items",
]

STATES: Final = ("ok", "wrong", "unparsed", "empty", "truncated", "timeout", "error", "invalid")
QUESTIONS: Final = "questions"
"""The folder of question tables, in a records folder."""
LEVELS: Final = 4
"""How many folders above a run's own may hold its table: a track, a model and its run are three names."""

Text: TypeAlias = NDArray[np.str_]
Floats: TypeAlias = NDArray[np.float64]
Hashes: TypeAlias = NDArray[np.uint64]


def content_hash(text: str) -> int:
    """64-bit blake2b of a text: how items of two runs are known to be the same."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Item:
    """The outcome of one question under one metric.

    Args:
        suite: name of the suite.
        task: name of the task inside the suite.
        filter: answer extraction used; "none" if the task has none.
        item: stable id inside the task.
        doc_hash: `content_hash` of the document.
        prompt_hash: `content_hash` of the prompt as sent to the model.
        metric: acc, acc_norm, exact_match, pass@1, nll, ….
        value: the outcome; for nll the summed negative log-likelihood in nats.
        weight: 1.0; for nll the number of scored tokens.
        state: one of `STATES`.
        detail: JSON text for people: choice log-likelihoods, generated text, finish reason.
    """

    suite: str
    task: str
    filter: str
    item: str
    doc_hash: int
    prompt_hash: int
    metric: str
    value: float
    weight: float = 1.0
    state: str = "ok"
    detail: str = "{}"

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise UsageError(f"unknown item state {self.state!r}", where=self.where, expected=", ".join(STATES))
        if not (math.isfinite(self.value) and math.isfinite(self.weight) and self.weight > 0):
            raise UsageError(
                f"value {self.value} with weight {self.weight}", where=self.where, expected="finite, weight above 0"
            )
        for name in ("doc_hash", "prompt_hash"):
            if not 0 <= getattr(self, name) < 2**64:
                raise UsageError(f"{name} {getattr(self, name)}", where=self.where, expected="a 64-bit hash")
        for name in ("suite", "task", "filter", "item", "metric"):
            if not getattr(self, name):
                raise UsageError(f"empty {name}", where=self.where, expected='a name ("none" for no filter)')
        try:
            json.loads(self.detail)
        except ValueError as error:
            raise UsageError("detail is not JSON", where=self.where, fix=str(error)) from error

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What a row is unique and sorted by."""
        return (self.suite, self.task, self.filter, self.item, self.metric)

    @property
    def where(self) -> str:
        """The row, for an error line."""
        return f"item {'/'.join(self.key)}"


@dataclass(frozen=True, eq=False)
class ItemTable:
    """All items of one run as columns of length N, sorted by (suite, task, filter, item, metric)."""

    suite: Text
    task: Text
    filter: Text
    item: Text
    doc_hash: Hashes
    prompt_hash: Hashes
    metric: Text
    value: Floats
    weight: Floats
    state: Text
    detail: NDArray[np.object_]

    def __len__(self) -> int:
        return len(self.item)

    def equals(self, other: ItemTable) -> bool:
        """Whether another table has the same rows."""
        return all(np.array_equal(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))

    @property
    def digest(self) -> str:
        """Sha256 (hex) of all rows, whatever file they are in."""
        rows = zip(*(getattr(self, field.name).tolist() for field in fields(self)), strict=True)
        text = json.dumps(list(rows), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()

    def rows(self, suite: str, task: str, filter_name: str, metric: str) -> ItemTable:
        """The items of one cell, in the table's order."""
        chosen = (
            (self.suite == suite) & (self.task == task) & (self.filter == filter_name) & (self.metric == metric)
        ).nonzero()[0]
        return ItemTable(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def cells(self) -> list[tuple[str, str, str, str]]:
        """Every (suite, task, filter, metric) present, sorted."""
        columns = (self.suite, self.task, self.filter, self.metric)
        return sorted(set(zip(*(column.tolist() for column in columns), strict=True)))

    def items(self) -> Iterator[Item]:
        """The rows back as `Item`s."""
        columns = (getattr(self, field.name).tolist() for field in fields(self))
        return (Item(*row) for row in zip(*columns, strict=True))


def items_to_table(items: Iterable[Item]) -> ItemTable:
    """Sort items into columns; two rows with one key are a `UsageError`."""
    ordered = sorted(items, key=lambda item: item.key)
    for one, other in itertools.pairwise(ordered):
        if one.key == other.key:
            raise UsageError("two outcomes for one item", where=one.where, expected="one row per item and metric")
    dtypes: dict[str, Any] = {"doc_hash": np.uint64, "prompt_hash": np.uint64, "value": float, "weight": float}
    dtypes["detail"] = object
    columns: dict[str, Any] = {
        field.name: np.array([getattr(item, field.name) for item in ordered], dtype=dtypes.get(field.name, np.str_))
        for field in fields(Item)
    }
    return ItemTable(**columns)


# --- files

_COLUMNS: Final = tuple(field.name for field in fields(Item))
_ASKED: Final = ("suite", "task", "filter", "item", "doc_hash", "prompt_hash", "metric", "weight")
_TABLE: Final = (*_ASKED, "detail")
_PACKED: Final = ("value", "state", "detail", "numbers")
_NAMES_TABLE: Final = "prunebench.questions"
# Hashes, ids and details hardly repeat: a dictionary would add to them.
_REPEATING: Final = frozenset({"suite", "task", "filter", "metric", "state"})


class LostQuestionsError(PrerequisiteError):
    """A packed run whose table is missing or damaged: nothing is wrong with the run, so it is not to be made again."""


@dataclass(frozen=True, eq=False)
class Questions:
    """A table of questions.

    Args:
        digest: sha256 of its file, which is also the file's name.
        asked: the columns that runs of the same questions share, each of length N.
        details: N details, of some run; a packed run states what its own say otherwise.
    """

    digest: str
    asked: Mapping[str, list[Any]]
    details: tuple[str, ...]

    def asks(self, table: ItemTable) -> bool:
        """Whether these are a table's questions, with the same weights."""
        return all(self.asked[name] == getattr(table, name).tolist() for name in _ASKED)


def write_items(path: Path, items: Iterable[Item] | ItemTable, questions: Questions | None = None) -> None:
    """Write items as parquet; the same items in any order give the same bytes (for one pyarrow version).

    Args:
        path: of the file.
        items: the outcomes.
        questions: what to leave out of the file; it must be their own (`Questions.asks`).
    """
    table = items if isinstance(items, ItemTable) else items_to_table(items)
    columns = {name: getattr(table, name).tolist() for name in _COLUMNS}
    if questions is None:
        path.write_bytes(_parquet(columns))
        return
    if not questions.asks(table):
        raise UsageError("the items answer other questions", where=str(path), expected=f"those of {questions.digest}")
    texts, numbers = _without_numbers(_differences(columns["detail"], questions.details))
    packed = {"value": columns["value"], "state": columns["state"], "detail": texts, "numbers": numbers}
    path.write_bytes(_parquet(packed, {_NAMES_TABLE: questions.digest}))


def questions_bytes(table: ItemTable) -> bytes:
    """The file of a table's questions, with its details for others to differ from; to be named by its sha256."""
    return _parquet({name: getattr(table, name).tolist() for name in _TABLE})


def _parquet(columns: Mapping[str, list[Any]], metadata: Mapping[str, str] | None = None) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types: dict[str, Any] = {**dict.fromkeys(("doc_hash", "prompt_hash"), pa.uint64()), "numbers": pa.list_(pa.int32())}
    types |= dict.fromkeys(("value", "weight"), pa.float64())
    schema = pa.schema([pa.field(name, types.get(name, pa.string()), nullable=False) for name in columns])
    arrays = [pa.array(values, schema.field(name).type) for name, values in columns.items()]
    file = io.BytesIO()
    # Boards of hundreds of runs are kept in git.
    with pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=19,
        use_dictionary=[name for name in columns if name in _REPEATING],
        column_encoding={"numbers.list.element": "BYTE_STREAM_SPLIT"} if "numbers" in columns else None,
        store_schema=False,
        data_page_version="1.0",
    ) as writer:
        writer.write_table(pa.table(arrays, schema=schema))
        if metadata is not None:  # a schema's own would go with store_schema
            writer.add_key_value_metadata(metadata)
    return file.getvalue()


def read_items(path: Path) -> ItemTable:
    """Read `write_items`' file, and where it is packed its table of questions.

    Raises:
        PrerequisiteError: naming the file, if it is damaged or foreign.
        LostQuestionsError: if its table is missing or not what it was.
    """
    import pyarrow as pa

    try:
        columns, digest = _read_parquet(path.read_bytes())
        if tuple(columns) not in {_COLUMNS, _PACKED} or (tuple(columns) == _PACKED) is (digest is None):
            raise PrerequisiteError("not an items file", where=str(path), expected=f"columns {', '.join(_COLUMNS)}")
        if digest is not None:
            columns = _unpacked(columns, read_questions(locate_questions(path, digest)), path)
        return items_to_table(Item(*row) for row in zip(*(columns[name] for name in _COLUMNS), strict=True))
    except (OSError, pa.ArrowException, TypeError, ValueError) as error:
        raise PrerequisiteError("cannot read the items", where=str(path), fix=f"run it again ({error})") from error


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What a run's numbers need of its items.

    Args:
        value_N: the outcomes, in the order of the questions.
        asked: the questions with their weights, metrics and details, as a table that runs may share; its values are not
            this run's.
    """

    value_N: Floats
    asked: ItemTable


def read_outcomes(path: Path) -> Outcomes:
    """Read the numbers of `write_items`' file; of a packed one not the details, which is many times faster.

    Raises:
        PrerequisiteError: as `read_items`.
    """
    digest = questions_named(path)
    if digest is None:
        table = read_items(path)
        return Outcomes(table.value, table)
    asked = _asked(locate_questions(path, digest))
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq

        value_N = pq.ParquetFile(path).read(["value"], use_threads=False).column(0).to_numpy().astype(float)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise PrerequisiteError("cannot read the items", where=str(path), fix=f"run it again ({error})") from error
    if len(value_N) != len(asked) or not np.isfinite(value_N).all():
        raise PrerequisiteError(
            f"{len(value_N)} outcomes for {len(asked)} questions", where=str(path), expected="one finite one each"
        )
    return Outcomes(value_N, asked)


@lru_cache(maxsize=8)
def _asked(path: Path) -> ItemTable:
    """A table of questions as items without outcomes."""
    questions = read_questions(path)
    columns = {**questions.asked, "detail": list(questions.details)}
    none = {"value": itertools.repeat(0.0), "state": itertools.repeat("ok")}
    rows = zip(*({**columns, **none}[name] for name in _COLUMNS), strict=False)
    return items_to_table(Item(*row) for row in rows)


def _read_parquet(data: bytes) -> tuple[dict[str, list[Any]], str | None]:
    """The columns of a file, and the table of questions that it names."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(io.BytesIO(data))
    table = file.read(use_threads=False)
    named = (file.metadata.metadata or {}).get(_NAMES_TABLE.encode())
    return {name: table.column(name).to_pylist() for name in table.column_names}, named and named.decode()


def _unpacked(columns: Mapping[str, list[Any]], questions: Questions, path: Path) -> dict[str, list[Any]]:
    """All columns of a packed file."""
    asked, answered = len(questions.details), len(columns["detail"])
    if asked != answered:
        raise PrerequisiteError(
            f"{answered} outcomes for {asked} questions", where=str(path), expected="one each", fix="run it again"
        )
    told = _with_numbers(columns["detail"], columns["numbers"])
    return {**questions.asked, **columns, "detail": _details(told, questions.details)}


def questions_named(path: Path) -> str | None:
    """The table of questions that an items file names; None if it holds them itself. Reads no more than its footer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        named = (pq.read_metadata(path).metadata or {}).get(_NAMES_TABLE.encode())
    except (OSError, pa.ArrowException) as error:
        raise PrerequisiteError("cannot read the items", where=str(path), fix=f"run it again ({error})") from error
    return None if named is None else str(named.decode())


def locate_questions(path: Path, digest: str) -> Path:
    """Where the table stands that the items file `path` names: `questions/DIGEST.parquet` in a folder above its run's.

    Raises:
        LostQuestionsError: if it is in none of the nearest `LEVELS`.
    """
    for folder in path.resolve().parent.parents[:LEVELS]:
        table = folder / QUESTIONS / f"{digest}.parquet"
        if table.is_file():
            return table
    raise LostQuestionsError(
        "the items are packed, and their questions are not here",
        where=str(path),
        expected=f"{QUESTIONS}/{digest}.parquet in a folder above the run's",
        fix="copy it from the records that the run is from, or unpack the run there (prunebench pack --unpack)",
    )


def read_questions(path: Path) -> Questions:
    """Read a table of questions; one whose bytes are not those of its name is a `LostQuestionsError`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LostQuestionsError("cannot read the questions", where=str(path), fix=str(error)) from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != path.stem:
        raise LostQuestionsError(
            f"the questions have been damaged: their sha256 is {digest}",
            where=str(path),
            expected="that of the file's name",
            fix="restore the file; no other one can take its place",
        )
    return _questions(data, digest)


@lru_cache(maxsize=8)  # the runs of one model come one after the other
def _questions(data: bytes, digest: str) -> Questions:
    columns, _ = _read_parquet(data)
    if tuple(columns) != _TABLE:
        raise PrerequisiteError(
            "not a table of questions", where=f"{QUESTIONS}/{digest}.parquet", expected=f"columns {', '.join(_TABLE)}"
        )
    details = tuple(columns.pop("detail"))
    return Questions(digest, columns, details)


# --- a packed detail: empty for that of the row before, or "=" and itself, or the fields that are not the table's


def _differences(details: Sequence[str], references: Sequence[str]) -> list[str]:
    """What details say otherwise than the table's, so that `_details` gives them back to the letter."""
    told = [_difference(detail, reference) for detail, reference in zip(details, references, strict=True)]
    return ["" if one == before else one for before, one in itertools.pairwise(["", *told])]


def _difference(detail: str, reference: str) -> str:
    own, shared = json.loads(detail), json.loads(reference)
    if isinstance(own, dict) and isinstance(shared, dict):
        missing = object()
        with contextlib.suppress(ValueError):  # NaN, which is no JSON, but which json.loads takes
            text = canonical_json({key: value for key, value in own.items() if shared.get(key, missing) != value})
            if _detail(text, reference) == detail:
                return text
    return f"={detail}"


def _details(told: Sequence[str], references: Sequence[str]) -> list[str]:
    details, before = [], ""
    for one, reference in zip(told, references, strict=True):
        before = one or before
        details.append(_detail(before, reference))
    return details


@lru_cache(maxsize=2**14)  # two metrics of one answer, and runs that answer alike
def _detail(told: str, reference: str) -> str:
    if told.startswith("="):
        return told[1:]
    return canonical_json({**json.loads(reference), **json.loads(told)})


# --- most of what is left are log-likelihoods, which as text are half as large again

_PLACE: Final = "\x01"
"""Stands for a number; no JSON text has it, as it would be escaped."""
_NUMBER: Final = re.compile(r"-?\d+\.\d{1,6}(?!\d)")


def _without_numbers(told: Sequence[str]) -> tuple[list[str], list[list[int]]]:
    """Texts with their decimals taken out, and those, in millionths."""
    numbers: list[list[int]] = [[] for _ in told]

    def taken(match: re.Match[str], out: list[int]) -> str:
        millionths = round(float(match[0]) * 1e6)
        if abs(millionths) >= 2**31 or repr(millionths / 1e6) != match[0]:
            return match[0]
        out.append(millionths)
        return _PLACE

    texts = [_NUMBER.sub(partial(taken, out=out), text) for text, out in zip(told, numbers, strict=True)]
    return texts, numbers


def _with_numbers(texts: Sequence[str], numbers: Sequence[Sequence[int]]) -> list[str]:
    told = []
    for text, millionths in zip(texts, numbers, strict=True):
        first, *others = text.split(_PLACE)
        told.append(first + "".join(f"{m / 1e6!r}{other}" for m, other in zip(millionths, others, strict=True)))
    return told
