"""The scoring engine: log-likelihoods, rolling log-likelihoods and greedy generation of one in-process model.

The model is called normally, `model(input_ids=…, attention_mask=…)`, so that whatever hooks are installed see every
token and its mask. Scoring pads on the right. Generation pads on the left, with explicit position ids; a row that has
finished stays in its batch until all have, so that batch composition depends on the requests alone and dense and
pruned runs can be compared. Log-softmax is taken in float32 (lm-eval's `softmax_dtype="float32"`) at the scored
positions only, and summed in float64.

What this is not: it does not share prefixes between requests, sample, or truncate; what does not fit is an error.

Suffixes: B rows of a batch, T tokens, V vocabulary, S scored positions of a batch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from prunebench.errors import UsageError
from prunebench.evaluate.batches import plan_batches
from prunebench.sandbox import OPEN, Box, Case, Verdict, boxed, run_case, run_cases

if TYPE_CHECKING:
    from prunebench.evaluate.tasks import Answer
    from prunebench.suite import Suite

__all__ = [
    "ENGINE_VERSION",
    "Evaluation",
    "Generation",
    "Pair",
    "Passage",
    "PassageScore",
    "Prompt",
    "Score",
    "bos_policy",
]

ENGINE_VERSION = 1
"""Raised whenever a scoring rule changes; part of a run's identity."""

PROGRAM_CPU_SECONDS = 2
"""Of a program of the tiny world, which takes none worth mentioning."""

SOFTMAX_ROWS = 2048
"""Positions whose float32 log-softmax is held at once."""

Finish = Literal["stop", "eos", "length"]


class Pair(NamedTuple):
    """A continuation to score after a context; `name` is for error messages."""

    context: str
    continuation: str
    name: str = "request"


class Score(NamedTuple):
    """Log-likelihood of a continuation in nats, whether greedy decoding would produce it, and its tokens."""

    loglikelihood: float
    is_greedy: bool
    tokens: int


class Passage(NamedTuple):
    """A text whose every token is scored; `name` is for error messages."""

    text: str
    name: str = "request"


class PassageScore(NamedTuple):
    """Log-likelihood of a whole text in nats, and its tokens."""

    loglikelihood: float
    tokens: int


class Prompt(NamedTuple):
    """A text to continue greedily until a stop string, the end token or `max_tokens`."""

    text: str
    until: tuple[str, ...]
    max_tokens: int
    name: str = "request"


class Generation(NamedTuple):
    """A continuation, cut before the earliest stop string; why it ended; and the tokens that were generated."""

    text: str
    finish: Finish
    tokens: int


class _Row(NamedTuple):
    """Tokens to feed, and the targets that their last positions predict."""

    inputs: list[int]
    targets: list[int]


def bos_policy(tokenizer: Any) -> str:
    """How texts begin, for the record: exactly one BOS where the tokenizer has one, added by us and never by it."""
    return "no bos" if tokenizer.bos_token_id is None else f"one bos (id {tokenizer.bos_token_id}) before every text"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A model that can be asked.

    Args:
        model: a transformers causal language model in evaluation mode, on any device.
        tokenizer: its tokenizer.
        batch_tokens: padded tokens per forward pass; part of a run's identity.
        limit: ask only the first `limit` documents of each task.
        progress: called with (what, done, total) after each batch.
        unsafe_local: run generated programs without the sandbox.
        code_workers: programs at a time, as many as there are cores by default; changes no verdict.
    """

    model: nn.Module
    tokenizer: Any
    batch_tokens: int = 8192
    limit: int | None = None
    progress: Callable[[str, int, int], None] | None = None
    unsafe_local: bool = False
    code_workers: int | None = None
    _asserted: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.model.training:
            raise UsageError("the model is in training mode", where="evaluation", fix="call model.eval()")
        if self.batch_tokens < 1:
            raise UsageError(f"batch_tokens {self.batch_tokens} is impossible", expected="at least 1")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit {self.limit} is impossible", expected="at least 1 document per task")

    # --- what suites ask

    def ask(self, suite: Suite, task: str) -> list[Answer]:
        """Ask one lm-eval task of a suite, or its first `limit` documents, in the data file's order."""
        from prunebench.evaluate.tasks import ask

        answers = ask(self, suite, task)
        for answer in answers:
            if "test" in answer.doc and "entry_point" in answer.doc:
                self._asserted[str(answer.doc["test"])] = str(answer.doc["entry_point"])
        return answers

    def run_program(self, program: str) -> Verdict:
        """Run a program that ends in the assertions (`test`) of a document that was asked, in the sandbox.

        The assertions are taken off: they run outside, where the program's function is asked for values. Where several
        documents' assertions fit, the longest are those meant; whatever a model wrote, only a document's are believed.

        Raises:
            UsageError: if no document that was asked ends so.
        """
        fitting = [test for test in self._asserted if program.endswith(test)]
        if not fitting:
            raise UsageError(
                "the program ends in no document's test", expected="the `test` of a document that was asked"
            )
        test = max(fitting, key=len)
        entry = self._asserted[test]
        case = Case(
            entry,
            program.removesuffix(test),
            test,
            {entry: entry},
            followed_by=re.sub(r"==[^\n]*", "== ...", test),
            cpu_seconds=PROGRAM_CPU_SECONDS,
        )
        return run_case(case, self._tried_box)

    def run_cases(self, cases: Sequence[Case], canary: Case) -> list[Verdict]:
        """Run programs with their tests in the sandbox, in parallel; equal cases once.

        Raises:
            IntegrityError: if the canary, a case with a reference solution, fails, or passes with an empty program.
        """
        distinct = list({(case.name, case.program): case for case in cases}.values())

        def report(done: int, total: int) -> None:
            self.report("run programs", done, total)

        verdicts = run_cases(distinct, self.box, canary=canary, workers=self.code_workers, progress=report)
        table = {(case.name, case.program): verdict for case, verdict in zip(distinct, verdicts, strict=True)}
        return [table[case.name, case.program] for case in cases]

    @cached_property
    def box(self) -> Box:
        """Where generated programs run."""
        return OPEN if self.unsafe_local else boxed()

    @cached_property
    def _tried_box(self) -> Box:
        """The box, after a program that must pass has passed in it, and one that must not has not."""
        run_cases([], self.box)
        return self.box

    def report(self, what: str, done: int, total: int) -> None:
        """Tell whoever watches how far things are."""
        if self.progress is not None:
            self.progress(what, done, total)

    # --- what tasks ask

    @torch.inference_mode()
    def loglikelihood(self, pairs: Sequence[Pair]) -> list[Score]:
        """Score each continuation after its context.

        Context and continuation are tokenised together and split at the context's token count, as lm-eval does; spaces
        that end a context belong to the continuation.

        Raises:
            UsageError: if a request is empty or longer than the model takes; it is named.
        """
        split = zip(pairs, self._split(pairs), strict=True)
        scores = self._score([self._row(context, targets, pair.name) for pair, (context, targets) in split])
        return [Score(float(logprobs.sum()), bool(greedy.all()), len(logprobs)) for logprobs, greedy in scores]

    @torch.inference_mode()
    def rolling(self, passages: Sequence[Passage]) -> list[PassageScore]:
        """Score every token of each text after one BOS (or else the end token), in windows of the model's length.

        Windows are lm-eval's: each token is predicted once; the last window has as much context as fits.

        Raises:
            UsageError: if a text is empty.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        rows: list[_Row] = []
        owners: list[int] = []
        for owner, (passage, tokens) in enumerate(zip(passages, self._encode([p.text for p in passages]), strict=True)):
            if not tokens:
                raise UsageError("a text to score is empty", where=passage.name)
            for window in get_rolling_token_windows(tokens, self._first_token, self.max_length, context_len=1):
                context, targets = make_disjoint_window(window)
                rows.append(self._row(context, targets, passage.name))
            owners += [owner] * (len(rows) - len(owners))
        totals, counts = np.zeros(len(passages)), np.zeros(len(passages), dtype=int)
        for owner, (logprobs, _) in zip(owners, self._score(rows), strict=True):
            totals[owner] += logprobs.sum()
            counts[owner] += len(logprobs)
        return [PassageScore(float(total), int(count)) for total, count in zip(totals, counts, strict=True)]

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt]) -> list[Generation]:
        """Continue each prompt greedily; a tie goes to the lowest token id that argmax finds first.

        A prompt may use the model's whole length; generation then ends with finish "length".

        Raises:
            UsageError: if a prompt leaves no room for one token; it is named.
        """
        decodings: list[_Decoding] = []
        for prompt, tokens in zip(prompts, self._encode([prompt.text for prompt in prompts]), strict=True):
            inputs = self._with_bos(tokens)
            room = self.max_length - len(inputs) + 1
            if not inputs or room < 1 or prompt.max_tokens < 1:
                raise self._misfit(prompt.name, len(inputs))
            stops = tuple(stop for stop in prompt.until if stop)
            decodings.append(_Decoding(self.tokenizer, inputs, stops, min(room, prompt.max_tokens), self._end_tokens))
        batches = plan_batches([len(d.inputs) + d.limit for d in decodings], self.batch_tokens)
        done = 0
        for batch in batches:
            self._decode([decodings[index] for index in batch])
            done += len(batch)
            self.report("generate", done, len(prompts))
        return [decoding.result() for decoding in decodings]

    # --- tokens

    @property
    def max_length(self) -> int:
        """Positions that the model takes."""
        config: Any = self.model.config
        return int(config.get_text_config().max_position_embeddings)

    @property
    def _first_token(self) -> int:
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return int(eos if bos is None else bos)

    @cached_property
    def _end_tokens(self) -> frozenset[int]:
        """The tokenizer's and the model's own end tokens."""
        configured: Any = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        listed = configured if isinstance(configured, list) else [configured]
        return frozenset(int(token) for token in [*listed, self.tokenizer.eos_token_id] if token is not None)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids without any special token; equal texts are tokenised once."""
        distinct = list(dict.fromkeys(text for text in texts if text))
        encoded = self.tokenizer(distinct, add_special_tokens=False)["input_ids"] if distinct else []
        table: dict[str, list[int]] = dict(zip(distinct, encoded, strict=True))
        return [table.get(text, []) for text in texts]

    def _with_bos(self, tokens: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        return tokens if bos is None or tokens[:1] == [bos] else [bos, *tokens]

    def _split(self, pairs: Sequence[Pair]) -> list[tuple[list[int], list[int]]]:
        contexts = [pair.context.rstrip() for pair in pairs]
        tails = [pair.context[len(head) :] + pair.continuation for pair, head in zip(pairs, contexts, strict=True)]
        wholes = self._encode([head + tail for head, tail in zip(contexts, tails, strict=True)])
        heads = self._encode(contexts)
        rests = [whole[len(head) :] for whole, head in zip(wholes, heads, strict=True)]
        # A token that spans the join would leave nothing to score: then the continuation is tokenised alone.
        alone = iter(self._encode([tail for tail, rest in zip(tails, rests, strict=True) if not rest]))
        return [
            (self._with_bos(head) or [self._first_token], rest or next(alone))
            for head, rest in zip(heads, rests, strict=True)
        ]

    def _row(self, context: list[int], targets: list[int], name: str) -> _Row:
        inputs = [*context, *targets[:-1]]
        if not targets:
            raise UsageError("a continuation has no tokens", where=name, expected="some text to score")
        if len(inputs) > self.max_length:
            raise self._misfit(name, len(inputs))
        return _Row(inputs, targets)

    def _misfit(self, name: str, tokens: int) -> UsageError:
        return UsageError(
            f"a request of {tokens} tokens does not fit the model",
            where=name,
            expected=f"1 to {self.max_length} tokens and room for the answer (nothing is truncated silently)",
            fix="use a model with a longer context, or leave the task out",
        )

    # --- forward passes

    @cached_property
    def _forward_names(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.model.forward).parameters)

    @cached_property
    def _device(self) -> torch.device:
        embeddings: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        device: torch.device = embeddings.weight.device
        return device

    def _forward(self, *, keep: int, **inputs: Any) -> torch.Tensor:
        """The model's logits at the last `keep` positions at least."""
        if "logits_to_keep" in self._forward_names:
            inputs["logits_to_keep"] = keep
        logits: torch.Tensor = self.model(**inputs).logits
        return logits[:, -keep:]

    def _score(self, rows: Sequence[_Row]) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Per row: float64 log-probability of each target, and whether the target is the argmax."""
        results: list[Any] = [None] * len(rows)
        done = 0
        for batch in plan_batches([len(row.inputs) for row in rows], self.batch_tokens):
            members = [rows[index] for index in batch]
            counts = [len(row.targets) for row in members]
            logprob_S, greedy_S = self._score_batch(members)
            ends = np.cumsum(counts)[:-1]
            for index, logprobs, greedy in zip(batch, np.split(logprob_S, ends), np.split(greedy_S, ends), strict=True):
                results[index] = (logprobs, greedy)
            done += len(batch)
            self.report("score", done, len(rows))
        return results

    def _score_batch(self, rows: Sequence[_Row]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        width = max(len(row.inputs) for row in rows)
        starts = [len(row.inputs) - len(row.targets) for row in rows]
        ids_BT, mask_BT = _padded([row.inputs for row in rows], width, left=False)
        keep = width - min(starts)
        row_S = np.repeat(np.arange(len(rows)), [len(row.targets) for row in rows])
        position_S = np.concatenate([np.arange(s, len(row.inputs)) for s, row in zip(starts, rows, strict=True)])
        target_S = np.concatenate([row.targets for row in rows])
        logits_BTV = self._forward(
            keep=keep, input_ids=ids_BT.to(self._device), attention_mask=mask_BT.to(self._device), use_cache=False
        )
        index_3S = torch.from_numpy(np.stack([row_S, position_S - (width - keep), target_S])).to(logits_BTV.device)
        parts = []
        for first in range(0, index_3S.shape[1], SOFTMAX_ROWS):
            rows_s, positions_s, targets_s = index_3S[:, first : first + SOFTMAX_ROWS]
            logprob_sV = logits_BTV[rows_s, positions_s].float().log_softmax(-1)
            chosen_s = logprob_sV.gather(1, targets_s[:, None])[:, 0]
            parts.append(torch.stack([chosen_s, (logprob_sV.argmax(-1) == targets_s).float()]))
        scored = torch.cat(parts, dim=1).cpu().numpy().astype(np.float64)
        return scored[0], scored[1] > 0

    def _decode(self, decodings: Sequence[_Decoding]) -> None:
        """Continue all rows of a batch until every one has finished."""
        from transformers import DynamicCache

        lengths = [len(decoding.inputs) for decoding in decodings]
        width, steps = max(lengths), max(decoding.limit for decoding in decodings)
        ids_BT, mask_BT = _padded([decoding.inputs for decoding in decodings], width, left=True)
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(lengths), steps)], dim=1).to(self._device)
        position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
        config: Any = self.model.config
        # transformers 5.24 renamed `past_key_values` to `cache`; the object is updated in place.
        cache = {"cache" if "cache" in self._forward_names else "past_key_values": DynamicCache(config=config)}
        step_BT = ids_BT.to(self._device)
        for seen in range(width, width + steps):
            logits_B1V = self._forward(
                keep=1,
                input_ids=step_BT,
                attention_mask=mask_BT[:, :seen],
                position_ids=position_BT[:, seen - step_BT.shape[1] : seen],
                use_cache=True,
                **cache,
            )
            step_BT = logits_B1V[:, -1].float().argmax(-1, keepdim=True).to(self._device)
            for decoding, token in zip(decodings, step_BT[:, 0].tolist(), strict=True):
                decoding.push(token)
            if all(decoding.finish for decoding in decodings):
                return


def _padded(rows: Sequence[Sequence[int]], width: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, int64, rows padded with id 0 to `width`."""
    ids_BT, mask_BT = np.zeros((2, len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids_BT[index, place], mask_BT[index, place] = row, 1
    return torch.from_numpy(ids_BT), torch.from_numpy(mask_BT)


@dataclass
class _Decoding:
    """One growing continuation; tokens pushed after the end are ignored."""

    tokenizer: Any
    inputs: list[int]
    stops: tuple[str, ...]
    limit: int
    end_tokens: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    text: str = ""

    def __post_init__(self) -> None:
        # A stop string of n bytes ends in the newest token and spans at most n; two more keep decoders that
        # treat a first token specially from hiding it.
        self._window = max((len(stop.encode()) for stop in self.stops), default=0) + 2

    def push(self, token: int) -> None:
        if self.finish is not None:
            return
        if token in self.end_tokens:
            self._end("eos")
            return
        self.tokens.append(token)
        if self.stops and self._earliest_stop(self._text_of(self.tokens[-self._window :])) is not None:
            text = self._text_of(self.tokens)
            if (cut := self._earliest_stop(text)) is not None:
                self.text, self.finish = text[:cut], "stop"
                return
        if len(self.tokens) == self.limit:
            self._end("length")

    def _end(self, finish: Finish) -> None:
        self.text, self.finish = self._text_of(self.tokens), finish

    def _text_of(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _earliest_stop(self, text: str) -> int | None:
        return min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=None)

    def result(self) -> Generation:
        assert self.finish is not None
        return Generation(self.text, self.finish, len(self.tokens))


def prompt_of(text: str, settings: Mapping[str, Any], name: str) -> Prompt:
    """A prompt from lm-eval's `generation_kwargs`.

    Raises:
        UsageError: if sampling is asked for.
    """
    if settings.get("do_sample") or float(settings.get("temperature") or 0) > 0:
        raise UsageError("the task asks for sampling", where=name, expected="greedy decoding: do_sample: false")
    until = settings.get("until") or []
    stops = (until,) if isinstance(until, str) else tuple(until)
    return Prompt(text, stops, int(settings.get("max_gen_toks", 256)), name)
