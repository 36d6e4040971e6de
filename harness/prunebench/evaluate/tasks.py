"""lm-eval tasks, asked by our engine.

lm-eval gives what a task means: prompts, choices, filters, per-document metrics. Its own requests, filters and
`process_results` are used as they are. Documents are read from the local data file into memory each time, so that no
cache of `datasets` can serve an old version of the file, and nothing looks at the network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.evaluate.engine import Evaluation, Generation, Pair, Passage, PassageScore, Score, prompt_of
from prunebench.mask import canonical_json
from prunebench.record import Item, content_hash
from prunebench.suite import Suite, TaskFile

__all__ = ["Answer", "ask", "load_task"]

Response = Score | Generation | PassageScore


@dataclass(frozen=True)
class Answer:
    """What the model answered to one document.

    Attributes:
        suite, task: names.
        doc: the document, as in the data file.
        prompt_hash: over everything that was sent to the model for it.
        responses: one per request: one per choice, or one.
        filtered: for each of the task's filters, what it made of the (first) response.
        metrics: for each filter, lm-eval's metrics of the document.
    """

    suite: str
    task: str
    doc: Mapping[str, Any]
    prompt_hash: int
    responses: tuple[Response, ...]
    filtered: Mapping[str, Any]
    metrics: Mapping[str, Mapping[str, Any]]

    def item(
        self,
        metric: str,
        value: float,
        state: str,
        detail: Mapping[str, Any],
        *,
        filter_name: str = "none",
        weight: float = 1.0,
    ) -> Item:
        """The outcome of one metric as a row of the record."""
        return Item(
            suite=self.suite,
            task=self.task,
            filter=filter_name,
            item=str(self.doc["id"]),
            doc_hash=content_hash(canonical_json(self.doc)),
            prompt_hash=self.prompt_hash,
            metric=metric,
            value=float(value),
            weight=float(weight),
            state=state,
            detail=canonical_json(detail),
        )


def _read_documents(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PrerequisiteError("a suite's data file is missing", where=str(path), fix=str(error)) from error
    try:
        docs: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
        ids = [str(doc["id"]) for doc in docs]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"not a data file ({error!r})", where=str(path), expected='one JSON object with an "id" per line'
        ) from error
    if not docs or len(set(ids)) != len(ids):
        raise UsageError("no documents, or repeated ids", where=str(path), expected="documents, each with its own id")
    return docs


@cache
def _local_task_class() -> Any:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    class LocalTask(ConfigurableTask):  # type: ignore[misc]
        """lm-eval's task over documents in memory."""

        def __init__(self, config: dict[str, Any], documents: Mapping[str, list[dict[str, Any]]]) -> None:
            self._documents = documents
            super().__init__(config=config)

        def download(self, dataset_kwargs: Any = None, **_: Any) -> None:
            """Put the documents where lm-eval's loader would have put them."""
            del dataset_kwargs
            self.dataset = {split: Dataset.from_list(docs) for split, docs in self._documents.items()}

        def build(self, limit: int | None) -> list[list[Any]]:
            """The requests of each document; `build_all_requests` without its progress bar and caches."""
            groups = []
            for doc_id, doc in self.doc_iterator(limit=limit):
                context = self.fewshot_context(
                    doc, num_fewshot=self.config.num_fewshot or 0, gen_prefix=self.doc_to_prefix(doc)
                )
                built = self.construct_requests(
                    doc=doc, ctx=context, metadata=(self.config.task, doc_id, self.config.repeats)
                )
                groups.append(built if isinstance(built, list) else [built])
            self._instances = [instance for group in groups for instance in group]
            return groups

    return LocalTask


def load_task(file: TaskFile, documents: Mapping[str, list[dict[str, Any]]] | None = None) -> Any:
    """The lm-eval task of a task file, with its documents in memory: those given, or those of its data files."""
    if documents is None:
        documents = {split: _read_documents(path) for split, path in file.data_files.items()}
    task = _local_task_class()(file.config, documents)
    task.set_fewshot_seed(1234)
    return task


def respond(evaluation: Evaluation, instances: list[Any], kind: str) -> list[Response]:
    """Answer lm-eval's requests of one kind: loglikelihood, loglikelihood_rolling or generate_until."""
    named = [(f"{instance.task_name}, document {instance.doc_id}", instance.args) for instance in instances]
    if kind == "loglikelihood":
        return [*evaluation.loglikelihood([Pair(context, rest, name) for name, (context, rest) in named])]
    if kind == "loglikelihood_rolling":
        return [*evaluation.rolling([Passage(text, name) for name, (text,) in named])]
    return [*evaluation.generate([prompt_of(text, settings, name) for name, (text, settings) in named])]


def as_lm_eval(response: Response) -> Any:
    """A response in lm-eval's own form."""
    match response:
        case Score(loglikelihood, is_greedy, _):
            return loglikelihood, is_greedy
        case PassageScore(loglikelihood, _):
            return loglikelihood
        case Generation(text, _, _):
            return text


def ask(evaluation: Evaluation, suite: Suite, task: str) -> list[Answer]:
    """Ask one task of a suite, or its first `evaluation.limit` documents, in the data file's order."""
    lm_task = load_task(suite.task_file(task), suite.documents(task))
    groups = lm_task.build(evaluation.limit)
    instances = [instance for group in groups for instance in group]
    responses = respond(evaluation, instances, instances[0].request_type)
    for instance, response in zip(instances, responses, strict=True):
        instance.resps = [as_lm_eval(response)]
    lm_task.apply_filters()
    remaining = iter(responses)
    answers = []
    for group in groups:
        doc = group[0].doc
        filters = list(group[0].filtered_resps)
        results = {name: [instance.filtered_resps[name] for instance in group] for name in filters}
        answers.append(
            Answer(
                suite=suite.name,
                task=task,
                doc=doc,
                prompt_hash=content_hash(canonical_json([list(instance.args) for instance in group])),
                responses=tuple(next(remaining) for _ in group),
                filtered={name: result[0] for name, result in results.items()},
                metrics={name: lm_task.process_results(doc, result) for name, result in results.items()},
            )
        )
    return answers
