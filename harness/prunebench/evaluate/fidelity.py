"""Fidelity suites: fixed responses behind fixed contexts, read by the pruned and by the unpruned model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

from prunebench.documents import DATA_FOLDER, file_state, read_rows, source_or_default
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.evaluate.engine import Divergence, Evaluation, Pair
from prunebench.evaluate.reading import finite_or_stop
from prunebench.mask import canonical_json
from prunebench.record import Item, content_hash
from prunebench.suite import Suite, TaskFile

__all__ = ["BATCHES", "PairSuite", "batch_of", "divergence_items", "turns_of"]

BATCHES: Final = 6
"""Batches of an axis that are drawn together (2609.30465 App. E.2)."""


class PairSuite(Suite):
    """A suite that reads fixed responses; its axes are those of its data.

    Attributes:
        metrics: of every axis; the first is the headline's.
        source: a file of rows, as said; by default the suite's name in the data folder.
    """

    bos = "tokenizer"
    tasks = ("fidelity",)
    headline = ()
    metrics: ClassVar[tuple[str, ...]]
    source: str | None = None

    def __init__(self) -> None:
        self._read: dict[Any, Mapping[str, list[dict[str, Any]]]] = {}

    def scored_by(self, asked: str | None) -> str:
        """Batched, whatever is asked for: both models read the same batch."""
        del asked
        return "batched"

    @abstractmethod
    def document(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row of the source as a document without its `id`."""

    def with_source(self, source: str) -> Self:
        """This suite on the data of a source (`prunebench.documents`)."""
        other = type(self)()
        other.source = source
        return other

    @property
    def task_files(self) -> tuple[TaskFile, ...]:
        """None: there is no lm-eval task of this kind."""
        return ()

    @property
    def cells(self) -> tuple[tuple[str, str, str], ...]:
        """The first metric on every axis."""
        axes = {str(doc["axis"]): filter_of(doc) for doc in self.all_documents()}
        return tuple((axis, covered, self.metrics[0]) for axis, covered in sorted(axes.items()))

    def all_documents(self) -> list[dict[str, Any]]:
        """The documents, in the data's order."""
        return self.documents(self.tasks[0])["test"]

    def documents(self, task: str) -> Mapping[str, list[dict[str, Any]]]:
        """The documents, with their places on their axes as ids.

        Raises:
            PrerequisiteError: if there is no data, or it cannot be read.
            UsageError: if its rows are not those of this suite.
        """
        where = source_or_default(self.source, self.name, "")
        if not where:
            raise PrerequisiteError(
                f"suite {self.name} has no data",
                expected="a file of rows: axis, covered, and context and continuation, or messages",
                fix=f"give --suite {self.name}=FILE, or {self.name}.jsonl in the folder {DATA_FOLDER}",
            )
        key = (where, file_state(where))
        if key not in self._read:
            self._read.clear()
            self._read[key] = {"test": self._placed(where)}
        return self._read[key]

    def _placed(self, where: str) -> list[dict[str, Any]]:
        places: dict[str, int] = {}
        covered: dict[str, str] = {}
        documents = []
        for row in read_rows(where):
            try:
                document = self.document(row)
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(
                    f"a row is not of suite {self.name} ({type(error).__name__}: {error})",
                    where=where,
                    expected="axis, covered, and context and continuation, or messages",
                ) from error
            axis = str(document["axis"])
            if covered.setdefault(axis, filter_of(document)) != filter_of(document):
                raise UsageError(f"axis {axis} is both covered and held out", where=where, expected="one of them")
            places[axis] = places.get(axis, -1) + 1
            documents.append({"id": str(places[axis]), **document})
        return documents


def filter_of(document: Mapping[str, Any]) -> str:
    """`covered` or `held-out`: whether the calibration has the document's kind of task."""
    return "covered" if document["covered"] else "held-out"


def batch_of(place: int, count: int) -> int:
    """Which of an axis's `BATCHES` equal runs of documents a place belongs to; with fewer documents, each is one."""
    return place * BATCHES // count if count > BATCHES else place


def turns_of(document: Mapping[str, Any], evaluation: Evaluation) -> list[tuple[str, str]]:
    """(context, response) of everything that is scored of a document.

    Raises:
        UsageError: if a chat does not end on the assistant, the tokenizer has no chat template, or the template changes
            what the assistant says.
    """
    if "messages" not in document:
        return [(str(document["context"]), str(document["continuation"]))]
    where = f"axis {document['axis']}, document {document['id']}"
    messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in document["messages"]]
    if not messages or messages[-1]["role"] != "assistant":
        raise UsageError("the chat does not end on the assistant", where=where, expected="messages that do")
    if not getattr(evaluation.tokenizer, "chat_template", None):
        raise UsageError("the tokenizer has no chat template", where=where, expected="rows of context and continuation")
    turns = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = (
            # Without thinking, as App. B.2 renders chats: templates that know no such switch leave it aside.
            str(
                evaluation.tokenizer.apply_chat_template(
                    part, tokenize=False, add_generation_prompt=asks, enable_thinking=False
                )
            )
            for part, asks in ((messages[:place], True), (messages[: place + 1], False))
        )
        if not after.startswith(before + message["content"]):
            raise UsageError(
                "the chat template changes what the assistant says", where=where, fix="give context and continuation"
            )
        turns.append((before, message["content"]))
    return turns


def divergence_items(suite: PairSuite, evaluation: Evaluation) -> list[Item]:
    """One row per document and metric: its sum over the response's tokens, to be divided by their number.

    With a limit, the first so many documents of each axis.

    Raises:
        IntegrityError: if a distribution is none: a fidelity without one of its texts would be another one.
    """
    documents = suite.all_documents()
    counts: dict[str, int] = {}
    for doc in documents:
        counts[doc["axis"]] = counts.get(doc["axis"], 0) + 1
    asked = [doc for doc in documents if evaluation.limit is None or int(doc["id"]) < evaluation.limit]
    part, parts = evaluation.shard
    asked = [doc for doc in asked if int(doc["id"]) % parts == part]
    turns = [turns_of(doc, evaluation) for doc in asked]
    pairs = [
        Pair(context, response, f"axis {doc['axis']}, document {doc['id']}")
        for doc, own in zip(asked, turns, strict=True)
        for context, response in own
    ]
    found = iter(evaluation.under(suite).fidelity(pairs))
    items = []
    for doc, own in zip(asked, turns, strict=True):
        items += _items(suite, doc, own, [next(found) for _ in own], counts[doc["axis"]])
    return items


def _items(
    suite: PairSuite, doc: Mapping[str, Any], turns: list[tuple[str, str]], parts: list[Divergence], count: int
) -> list[Item]:
    axis = str(doc["axis"])
    kl, nll, dense_nll, tokens = (sum(part[at] for part in parts) for at in range(4))
    finite_or_stop([kl, nll, dense_nll], f"axis {axis}, document {doc['id']}")
    detail: dict[str, Any] = {
        "reverse_kl": kl,
        "nll": nll,
        "dense_nll": dense_nll,
        "tokens": int(tokens),
        "cluster": f"{axis}, batch {batch_of(int(doc['id']), count)}",
    }
    if any(part.spans for part in parts):
        detail["spans"] = True
    if dropped := max(part.dropped for part in parts):
        detail["dropped"] = dropped
    values = {"reverse_kl": kl, "delta_nll": nll - dense_nll, "excess_ppl": nll - dense_nll}
    return [
        Item(
            suite=suite.name,
            task=axis,
            filter=filter_of(doc),
            item=str(doc["id"]),
            doc_hash=content_hash(canonical_json(doc)),
            prompt_hash=content_hash(canonical_json(turns)),
            metric=metric,
            value=values[metric],
            weight=float(tokens),
            detail=canonical_json(detail),
        )
        for metric in suite.metrics
    ]
