"""lm-eval tasks, asked by our engine.

lm-eval gives what a task means: prompts, choices, filters, per-document metrics. Its own requests, filters and
`process_results` are used as they are. Documents are read from the local data file into memory each time, so that no
cache of `datasets` can serve an old version of the file, and nothing looks at the network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.evaluate.decoding import Generation, prompt_of
from prunebench.evaluate.engine import Evaluation, Pair, Passage, PassageScore, Score
from prunebench.mask import canonical_json
from prunebench.record import Item, content_hash
from prunebench.suite import Suite, TaskFile

__all__ = ["Answer", "ask", "common_detail", "load_task"]

FEWSHOT_SEED = 1234
"""lm-eval's own."""
MULTITURN = {"fewshot_as_multiturn": True}
"""Examples are turns of their own in a chat, which is what lm-eval's command line does by default."""

Response = Score | Generation | PassageScore
Chat = Callable[..., str]
"""A tokenizer's chat template: messages, and whether the answer begins, as text."""


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
        target: what lm-eval holds the answer against, as text: the gold choice's number, the reference, the passage.
        choices: the choices of a choice task, as lm-eval counts their lengths.
        sample: number of the sample, where several were drawn.
        dropped: tokens that were cut off the beginning of the prompt, where truncation was asked for.
    """

    suite: str
    task: str
    doc: Mapping[str, Any]
    prompt_hash: int
    responses: tuple[Response, ...]
    filtered: Mapping[str, Any]
    metrics: Mapping[str, Mapping[str, Any]]
    target: str = ""
    choices: tuple[str, ...] = ()
    sample: int | None = None
    dropped: int = 0

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
            item=str(self.doc["id"]) if self.sample is None else f"{self.doc['id']}#{self.sample}",
            doc_hash=content_hash(canonical_json(self.doc)),
            prompt_hash=self.prompt_hash,
            metric=metric,
            value=float(value),
            weight=float(weight),
            state=state,
            detail=canonical_json(detail),
        )


def common_detail(answer: Answer) -> Mapping[str, Any]:
    """What every row's detail says of its question: the hash of the target, and tokens cut off if any were."""
    stated: dict[str, Any] = {"target_hash": f"{content_hash(answer.target):016x}"}
    if answer.dropped:
        stated["dropped"] = answer.dropped
    return stated


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

        def build(
            self, limit: int | None, *, shard: tuple[int, int] = (0, 1), chat: Chat | None = None
        ) -> list[list[Any]]:
            """The requests of each document; `build_all_requests` without its progress bar and caches."""
            groups = _requests(self, limit, shard, chat)
            self._instances = [instance for group in groups for instance in group]
            return groups

    return LocalTask


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """What lm-eval cannot make of a document, whatever it raises then, as one line that says which."""
    from jinja2 import TemplateError

    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, TemplateError) as error:
        raise UsageError(
            f"lm-eval can make no request of the data ({type(error).__name__}: {error})",
            where=where,
            expected="documents with what the task's file asks for, of one type in all rows, and enough examples",
        ) from error


def _check_gold(task: Any, doc: Mapping[str, Any], where: str) -> None:
    """Refuse a choice task's document without a right choice, such as one of an unlabelled test split."""
    if task.config.output_type != "multiple_choice":
        return
    count, gold = len(_choices_of(task, doc)), _gold_of(task, doc)
    if count < 2 or int(gold) not in range(count):
        raise UsageError(
            f"choice {gold} of {count} is the right one",
            where=where,
            expected="two or more choices, and the number of one of them, from 0",
            fix="give a split with labels",
        )


def _requests(task: Any, limit: int | None, shard: tuple[int, int], chat: Chat | None) -> list[list[Any]]:
    """A task's requests, document by document.

    Examples are drawn for every document in order, asked or not, so that a document's prompt is the same in any part of
    the data; each draw is lm-eval's own.

    Args:
        task: lm-eval's.
        limit: only the first so many documents.
        shard: (i, n) for every n-th of them, from the i-th on.
        chat: the chat template that prompts are put into.
    """
    groups = []
    shots = task.config.num_fewshot or 0
    options = {} if chat is None else {"apply_chat_template": True, "chat_template": chat, **MULTITURN}
    pools = _pools(task) if shots else None
    part, parts = shard
    for doc_id, doc in task.doc_iterator(limit=limit):
        where = f"{task.config.task}, document {doc_id}"
        with _naming(where):
            if doc_id % parts != part:
                if shots:
                    own_split = task.fewshot_cfg.split == task.config.test_split
                    task.sampler.sample(n=shots, eval_doc=doc if own_split else None)
                continue
            _check_gold(task, doc, where)
            if pools is not None:
                task.sampler.replace_df(pools[doc[_group(task)]])
            context = task.fewshot_context(doc, num_fewshot=shots, gen_prefix=task.doc_to_prefix(doc), **options)
            built = task.construct_requests(
                doc=doc,
                ctx=context,
                metadata=(task.config.task, doc_id, task.config.repeats),
                apply_chat_template=chat is not None,
            )
            groups.append(built if isinstance(built, list) else [built])
    return groups


def _group(task: Any) -> str | None:
    """The field whose values have examples of their own, such as MMLU's subject."""
    return (task.config.metadata or {}).get("group")


def _pools(task: Any) -> dict[str, list[dict[str, Any]]] | None:
    """The examples of each group of documents, where a group has its own."""
    field = _group(task)
    if field is None:
        return None
    if task.fewshot_cfg.sampler != "first_n":
        # A draw by chance would depend on what was drawn for other groups before.
        raise UsageError("examples by group are drawn by chance", where=task.config.task, expected="sampler: first_n")
    pools: dict[str, list[dict[str, Any]]] = {}
    for doc in task.fewshot_docs():
        pools.setdefault(doc[field], []).append(doc)
    return pools


def _choices_of(task: Any, doc: Mapping[str, Any]) -> tuple[str, ...]:
    """A document's choices; none if it has none."""
    return tuple(task.doc_to_choice(doc)) if task.config.output_type == "multiple_choice" else ()


def _gold_of(task: Any, doc: Mapping[str, Any]) -> str:
    """What lm-eval holds an answer against, as text; of a choice task the gold choice's number."""
    gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    if task.config.output_type == "multiple_choice" and isinstance(gold, str):
        gold = task.doc_to_choice(doc).index(gold)
    return str(gold)


def load_task(
    file: TaskFile, documents: Mapping[str, list[dict[str, Any]]] | None = None, shots: int | None = None
) -> Any:
    """The lm-eval task of a task file, with its documents in memory: those given, or those of its data files.

    Args:
        file: the task file.
        documents: of every split that is needed.
        shots: few-shot examples, instead of what the file says.
    """
    if documents is None:
        documents = {split: _read_documents(path) for split, path in file.data_files.items()}
    config = file.config
    if shots is not None:
        config["num_fewshot"] = shots
    # lm-eval looks at splits that it has no use for; those that are not there it takes for none.
    for name in ("fewshot_split", "training_split", "validation_split", "test_split"):
        if config.get(name) not in documents:
            config[name] = None
    task = _local_task_class()(config, documents)
    task.set_fewshot_seed(FEWSHOT_SEED)
    return task


def respond(
    evaluation: Evaluation, instances: list[Any], kind: str, window: int | None = None, sample: int | None = None
) -> list[Response]:
    """Answer lm-eval's requests of one kind: loglikelihood, loglikelihood_rolling or generate_until.

    Args:
        evaluation: who answers.
        instances: the requests.
        kind: their kind.
        window: most tokens of a rolling window; the model's length if None.
        sample: number of the sample, where generations are sampled.
    """
    named = [(f"{instance.task_name}, document {instance.doc_id}", instance.args) for instance in instances]
    if kind == "loglikelihood":
        return [*evaluation.loglikelihood([Pair(context, rest, name) for name, (context, rest) in named])]
    if kind == "loglikelihood_rolling":
        return [*evaluation.rolling([Passage(text, name, window) for name, (text,) in named])]
    prompts = [prompt_of(text, settings, name) for name, (text, settings) in named]
    if evaluation.sampling is not None:
        prompts = [prompt._replace(sampling=evaluation.sampling) for prompt in prompts]
    return [*evaluation.generate([prompt._replace(sample=sample or 0) for prompt in prompts])]


def as_lm_eval(response: Response) -> Any:
    """A response in lm-eval's own form."""
    match response:
        case Score(loglikelihood, is_greedy):
            return loglikelihood, is_greedy
        case PassageScore(loglikelihood, _):
            return loglikelihood
        case Generation(text, _, _):
            return text


def ask(evaluation: Evaluation, suite: Suite, task: str) -> list[Answer]:
    """Ask one task of a suite, or the part of it that the evaluation is limited to, in the documents' order.

    With n samples per item there are n answers per document, which follow each other.
    """
    documents = suite.documents(task)
    with _naming(f"suite {suite.name}, task {task}"):
        lm_task = load_task(suite.task_file(task), documents, suite.shots)
    groups = lm_task.build(evaluation.limit, shard=evaluation.shard, chat=evaluation.chat)
    instances = [instance for group in groups for instance in group]
    if not instances:
        return []
    kind = instances[0].request_type
    samples: list[int | None] = [None]
    if kind == "generate_until" and evaluation.sampling is not None and evaluation.sampling.n > 1:
        samples = [*range(evaluation.sampling.n)]
    window = (lm_task.config.metadata or {}).get("max_length")
    by_sample = [
        _answers(evaluation, suite, task, lm_task, groups, respond(evaluation, instances, kind, window, sample), sample)
        for sample in samples
    ]
    return [answer for answers in zip(*by_sample, strict=True) for answer in answers]


def _answers(  # noqa: PLR0917  what an answer is made of
    evaluation: Evaluation,
    suite: Suite,
    task: str,
    lm_task: Any,
    groups: list[list[Any]],
    responses: list[Response],
    sample: int | None,
) -> list[Answer]:
    """The requests' responses as lm-eval reads them, document by document."""
    instances = [instance for group in groups for instance in group]
    for instance, response in zip(instances, responses, strict=True):
        instance.resps, instance.filtered_resps = [as_lm_eval(response)], {}
    lm_task.apply_filters()
    remaining = iter(responses)
    answers = []
    for group in groups:
        doc = group[0].doc
        filters = list(group[0].filtered_resps)
        results = {name: [instance.filtered_resps[name] for instance in group] for name in filters}
        own = tuple(next(remaining) for _ in group)
        asked: list[Any] = [list(instance.args) for instance in group]
        if evaluation.sampling is not None and group[0].request_type == "generate_until":
            asked.append(evaluation.sampling.to_json())
        answers.append(
            Answer(
                suite=suite.name,
                task=task,
                doc=doc,
                prompt_hash=content_hash(canonical_json(asked)),
                responses=own,
                filtered={name: result[0] for name, result in results.items()},
                metrics={name: _metrics(lm_task, doc, result) for name, result in results.items()},
                target=_gold_of(lm_task, doc),
                choices=_choices_of(lm_task, doc),
                sample=sample,
                dropped=_dropped(evaluation, group[0], own),
            )
        )
    return answers


def _metrics(task: Any, doc: Mapping[str, Any], result: list[Any]) -> dict[str, Any]:
    # What is no number makes lm-eval's softmax complain; suites see to it that it decides nothing.
    with np.errstate(invalid="ignore"):
        metrics: dict[str, Any] = task.process_results(doc, result)
    return metrics


def _dropped(evaluation: Evaluation, request: Any, responses: tuple[Response, ...]) -> int:
    """The most tokens that were cut off one of a document's contexts."""
    if request.request_type == "generate_until":
        text, settings = request.args
        return evaluation.dropped(prompt_of(text, settings, ""))
    return max((response.dropped for response in responses if isinstance(response, Score)), default=0)
