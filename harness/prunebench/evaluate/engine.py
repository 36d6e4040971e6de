"""The scoring engine: log-likelihoods, rolling log-likelihoods and greedy generation of one in-process model.

The model is called normally, `model(input_ids=…, attention_mask=…)`, so that whatever hooks are installed see every
token and its mask. Scoring pads on the right. Generation pads on the left, with explicit position ids; a row that has
finished stays in its batch until all have, so that batch composition depends on the requests alone and dense and
pruned runs can be compared. Log-softmax is taken in float32 (lm-eval's `softmax_dtype="float32"`) at the scored
positions only, and summed in float64.

Tokens may be drawn instead (`decoding.Sampling`), by a seed that knows nothing of batches. What does not fit is an
error; where truncation is asked for, the beginning of the context is cut off behind its BOS, and counted. A
continuation whose logits are no numbers has a log-likelihood that is none, and a generation ends as invalid.

What this is not: it does not share prefixes between requests.

Suffixes: B rows of a batch, T tokens, V vocabulary, S scored positions of a batch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from prunebench.errors import UsageError
from prunebench.evaluate.batches import plan_batches
from prunebench.evaluate.decoding import Decoding, Generation, Prompt, Sampling, next_tokens
from prunebench.evaluate.journal import Journal
from prunebench.sandbox import OPEN, Box, Case, Verdict, boxed, run_case, run_cases

if TYPE_CHECKING:
    from prunebench.evaluate.tasks import Answer
    from prunebench.suite import BosRule, Suite

__all__ = [
    "ENGINE_VERSION",
    "Divergence",
    "Evaluation",
    "Generation",
    "Pair",
    "Passage",
    "PassageScore",
    "Prompt",
    "Sampling",
    "Score",
    "bos_policy",
    "end_tokens",
]

ENGINE_VERSION = 1
"""Raised whenever a scoring rule changes; part of a run's identity."""

PROGRAM_CPU_SECONDS = 2
"""Of a program of the tiny world, which takes none worth mentioning."""

SOFTMAX_ROWS = 2048
"""Positions whose float32 log-softmax is held at once."""

DIVERGENCE_ROWS = 256
"""Positions whose two float64 log-softmaxes are held at once."""


class Pair(NamedTuple):
    """A continuation to score after a context; `name` is for error messages."""

    context: str
    continuation: str
    name: str = "request"


class Score(NamedTuple):
    """Log-likelihood of a continuation in nats, whether greedy decoding would produce it, and its tokens.

    `spans` says that a token of the whole text reaches from the context into the continuation, so that the two are not
    tokenised as they would be together; `dropped` counts tokens cut off the context, where truncation was asked for.
    """

    loglikelihood: float
    is_greedy: bool
    tokens: int
    spans: bool = False
    dropped: int = 0


class Passage(NamedTuple):
    """A text whose every token is scored, in windows of `window` tokens (None: the model's length)."""

    text: str
    name: str = "request"
    window: int | None = None


class PassageScore(NamedTuple):
    """Log-likelihood of a whole text in nats, and its tokens."""

    loglikelihood: float
    tokens: int


class Divergence(NamedTuple):
    """How far the model is from the unpruned one on a continuation: sums over its tokens, in nats.

    Attributes:
        reverse_kl: Σ D(q ‖ p) of the next token, from this model's q and the unpruned one's p (2609.30465 §3.1).
        nll: Σ −ln q of the tokens that stand there.
        dense_nll: Σ −ln p of them.
        tokens: how many they are.
        spans: see `Score`.
        dropped: see `Score`.
    """

    reverse_kl: float
    nll: float
    dense_nll: float
    tokens: int
    spans: bool = False
    dropped: int = 0


class _Row(NamedTuple):
    """Tokens to feed, and the targets that their last positions predict."""

    inputs: list[int]
    targets: list[int]
    dropped: int = 0


def bos_policy(tokenizer: Any, rule: BosRule = "always") -> str:
    """How texts begin, for the record: with no BOS or exactly one, added by us and never by the tokenizer."""
    if tokenizer.bos_token_id is None or not adds_bos(tokenizer, rule):
        return "no bos"
    return f"one bos (id {tokenizer.bos_token_id}) before every text"


def adds_bos(tokenizer: Any, rule: BosRule) -> bool:
    """Whether texts get a BOS: wherever there is one, or where the tokenizer itself puts one before a text."""
    if tokenizer.bos_token_id is None:
        return False
    return rule == "always" or list(tokenizer("a")["input_ids"])[:1] == [tokenizer.bos_token_id]


def end_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """The tokenizer's and the model's own end tokens, which end a generation."""
    configured: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return sorted({int(token) for token in [*listed, tokenizer.eos_token_id] if token is not None})


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
        sampling: how generations are drawn; greedily if None, or as a task's file says.
        truncate: cut the beginning of a context that does not fit, instead of refusing it.
        chat_template: put prompts into the tokenizer's chat template, examples as turns of their own.
        shard: (i, n) to ask every n-th document of each task, from the i-th on.
        dense: while its context is entered, the model is the unpruned one; for suites that compare with it.
        journal: where finished batches are kept.
        bos: which texts begin with a BOS; a suite's own rule holds while it is asked.
    """

    model: nn.Module
    tokenizer: Any
    batch_tokens: int = 8192
    limit: int | None = None
    progress: Callable[[str, int, int], None] | None = None
    unsafe_local: bool = False
    code_workers: int | None = None
    sampling: Sampling | None = None
    truncate: bool = False
    chat_template: bool = False
    shard: tuple[int, int] = (0, 1)
    dense: Callable[[], AbstractContextManager[Any]] | None = None
    journal: Journal | None = None
    bos: BosRule = "always"
    _asserted: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.model.training:
            raise UsageError("the model is in training mode", where="evaluation", fix="call model.eval()")
        if self.batch_tokens < 1:
            raise UsageError(f"batch_tokens {self.batch_tokens} is impossible", expected="at least 1")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit {self.limit} is impossible", expected="at least 1 document per task")
        if not 0 <= self.shard[0] < self.shard[1]:
            raise UsageError(
                f"shard {self.shard[0]} of {self.shard[1]} is impossible", expected="(i, n) with 0 <= i < n"
            )

    # --- what suites ask

    def under(self, suite: Suite) -> Evaluation:
        """This evaluation under a suite's rule for BOS."""
        return self if self.bos == suite.bos else replace(self, bos=suite.bos)

    @cached_property
    def chat(self) -> Callable[..., str] | None:
        """The chat template as lm-eval calls it: messages, and whether the answer begins, as text.

        Raises:
            UsageError: if one is asked for, and the tokenizer has none.
        """
        if not self.chat_template:
            return None
        if not getattr(self.tokenizer, "chat_template", None):
            raise UsageError("the tokenizer has no chat template", fix="leave --chat-template out")

        def rendered(messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        return rendered

    def ask(self, suite: Suite, task: str) -> list[Answer]:
        """Ask one lm-eval task of a suite, or its first `limit` documents, in the data file's order."""
        from prunebench.evaluate.tasks import ask

        answers = ask(self.under(suite), suite, task)
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
        rows, spans = self._rows(pairs)
        scores = self._score(rows)
        return [
            Score(float(logprobs.sum()), bool(greedy.all()), len(logprobs), spanning, row.dropped)
            for (logprobs, greedy), spanning, row in zip(scores, spans, rows, strict=True)
        ]

    @torch.inference_mode()
    def fidelity(self, pairs: Sequence[Pair]) -> list[Divergence]:
        """Compare the next-token distributions with the unpruned model's, at every token of each continuation.

        Both models read one batch after the other, so that no logits outlive their batch.

        Raises:
            UsageError: if there is no unpruned model, a request is empty or does not fit; it is named.
        """
        if self.dense is None:
            raise UsageError("nothing to compare with", expected="a suite that says needs_dense, in a run")
        rows, spans = self._rows(pairs)
        results: list[Any] = [None] * len(rows)
        done = 0
        for batch in plan_batches([len(row.inputs) for row in rows], self.batch_tokens):
            members = [rows[index] for index in batch]
            sums = self._through("fidelity", members, partial(self._diverge, members))
            for index, own in zip(batch, sums, strict=True):
                results[index] = own
            done += len(batch)
            self.report("compare", done, len(rows))
        return [
            Divergence(own[0], own[1], own[2], len(row.targets), spanning, row.dropped)
            for own, row, spanning in zip(results, rows, spans, strict=True)
        ]

    @torch.inference_mode()
    def rolling(self, passages: Sequence[Passage]) -> list[PassageScore]:
        """Score every token of each text after one BOS (or else the end token), in windows of the model's length.

        Windows are lm-eval's: each token is predicted once; the last window has as much context as fits. They are as
        long as the passage says, and never longer than the model takes.

        Raises:
            UsageError: if a text is empty.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        rows: list[_Row] = []
        owners: list[int] = []
        for owner, (passage, tokens) in enumerate(zip(passages, self._encode([p.text for p in passages]), strict=True)):
            if not tokens:
                raise UsageError("a text to score is empty", where=passage.name)
            length = min(passage.window or self.max_length, self.max_length)
            for window in get_rolling_token_windows(tokens, self._first_token, length, context_len=1):
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
        """Continue each prompt; greedily, a tie goes to the lowest token id that argmax finds first.

        A prompt may use the model's whole length; generation then ends with finish "length". Where truncation is asked
        for, a prompt leaves room for all its tokens, as lm-eval's do.

        Raises:
            UsageError: if a prompt leaves no room for one token; it is named.
        """
        decodings: list[Decoding] = []
        for prompt, tokens in zip(prompts, self._encode([prompt.text for prompt in prompts]), strict=True):
            inputs, _ = self._fitted(self._with_bos(tokens), self.max_length - prompt.max_tokens)
            room = self.max_length - len(inputs) + 1
            if not inputs or room < 1 or prompt.max_tokens < 1:
                raise self._misfit(prompt.name, len(inputs))
            stops = tuple(stop for stop in prompt.until if stop)
            limit = min(room, prompt.max_tokens)
            stream = f"{prompt.text}\0{prompt.sample}" if prompt.sampling is not None else ""
            decodings.append(Decoding(self.tokenizer, inputs, stops, limit, self._end_tokens, prompt.sampling, stream))
        batches = plan_batches([len(d.inputs) + d.limit for d in decodings], self.batch_tokens)
        results: list[Any] = [None] * len(prompts)
        done = 0
        for batch in batches:
            members = [decodings[index] for index in batch]
            asked = [
                [d.inputs, d.stops, d.limit, d.sampling.to_json() if d.sampling else None, d.stream] for d in members
            ]
            generated = self._through("generate", asked, partial(self._decode, members))
            for index, own in zip(batch, generated, strict=True):
                results[index] = Generation(*own)
            done += len(batch)
            self.report("generate", done, len(prompts))
        return results

    def _through(self, kind: str, asked: Any, compute: Callable[[], Any]) -> Any:
        return compute() if self.journal is None else self.journal.through([kind, asked], compute)

    # --- tokens

    @property
    def max_length(self) -> int:
        """Positions that the model takes."""
        config: Any = self.model.config
        return int(config.get_text_config().max_position_embeddings)

    @property
    def _first_token(self) -> int:
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is None and eos is None:
            raise UsageError(
                "the tokenizer has neither a BOS nor an end token",
                where="a text that begins with nothing before it",
                fix="set one of them in the tokenizer's config",
            )
        return int(eos if bos is None else bos)

    @cached_property
    def _end_tokens(self) -> frozenset[int]:
        return frozenset(end_tokens(self.model, self.tokenizer))

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids without any special token; equal texts are tokenised once."""
        distinct = list(dict.fromkeys(text for text in texts if text))
        encoded = self.tokenizer(distinct, add_special_tokens=False)["input_ids"] if distinct else []
        table: dict[str, list[int]] = dict(zip(distinct, encoded, strict=True))
        return [table.get(text, []) for text in texts]

    @cached_property
    def _adds_bos(self) -> bool:
        return adds_bos(self.tokenizer, self.bos)

    def _with_bos(self, tokens: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        return tokens if not self._adds_bos or tokens[:1] == [bos] else [bos, *tokens]

    def _rows(self, pairs: Sequence[Pair]) -> tuple[list[_Row], list[bool]]:
        """What is fed for each pair, and whether a token spans its join."""
        split = self._split(pairs)
        rows = [
            self._row(context, targets, pair.name) for pair, (context, targets, _) in zip(pairs, split, strict=True)
        ]
        return rows, [spans for _, _, spans in split]

    def _split(self, pairs: Sequence[Pair]) -> list[tuple[list[int], list[int], bool]]:
        contexts = [pair.context.rstrip() for pair in pairs]
        tails = [pair.context[len(head) :] + pair.continuation for pair, head in zip(pairs, contexts, strict=True)]
        wholes = self._encode([head + tail for head, tail in zip(contexts, tails, strict=True)])
        heads = self._encode(contexts)
        rests = [whole[len(head) :] for whole, head in zip(wholes, heads, strict=True)]
        # A token that spans the join would leave nothing to score: then the continuation is tokenised alone.
        alone = iter(self._encode([tail for tail, rest in zip(tails, rests, strict=True) if not rest]))
        return [
            (self._with_bos(head) or [self._first_token], rest or next(alone), whole[: len(head)] != head or not rest)
            for head, rest, whole in zip(heads, rests, wholes, strict=True)
        ]

    def _row(self, context: list[int], targets: list[int], name: str) -> _Row:
        if not targets:
            raise UsageError("a continuation has no tokens", where=name, expected="some text to score")
        context, dropped = self._fitted(context, self.max_length - len(targets) + 1)
        inputs = [*context, *targets[:-1]]
        if len(inputs) > self.max_length or not context:
            raise self._misfit(name, len(inputs))
        return _Row(inputs, targets, dropped)

    def _fitted(self, context: list[int], room: int) -> tuple[list[int], int]:
        """A context, and where truncation is asked for at most `room` tokens of it: its BOS and its end; what went."""
        if not self.truncate or len(context) <= room:
            return context, 0
        bos = context[:1] if context[0] == self.tokenizer.bos_token_id else []
        kept = room - len(bos)
        return ([*bos, *context[-kept:]] if kept > 0 else []), len(context) - max(room, 0)

    def dropped(self, prompt: Prompt) -> int:
        """How many tokens `generate` cuts off the beginning of a prompt."""
        if not self.truncate:
            return 0
        (tokens,) = self._encode([prompt.text])
        return self._fitted(self._with_bos(tokens), self.max_length - prompt.max_tokens)[1]

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
            columns = self._through("score", members, partial(self._score_lists, members))
            logprob_S, greedy_S = (np.array(column) for column in columns)
            ends = np.cumsum(counts)[:-1]
            for index, logprobs, greedy in zip(batch, np.split(logprob_S, ends), np.split(greedy_S, ends), strict=True):
                results[index] = (logprobs, greedy)
            done += len(batch)
            self.report("score", done, len(rows))
        return results

    def _logits_at_targets(self, rows: Sequence[_Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch's logits, and (row, position, target) of each scored position (3, S)."""
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
        return logits_BTV, index_3S

    def _score_lists(self, rows: Sequence[_Row]) -> list[list[Any]]:
        return [column.tolist() for column in self._score_batch(rows)]

    def _score_batch(self, rows: Sequence[_Row]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        logits_BTV, index_3S = self._logits_at_targets(rows)
        parts = []
        for first in range(0, index_3S.shape[1], SOFTMAX_ROWS):
            rows_s, positions_s, targets_s = index_3S[:, first : first + SOFTMAX_ROWS]
            logprob_sV = logits_BTV[rows_s, positions_s].float().log_softmax(-1)
            chosen_s = logprob_sV.gather(1, targets_s[:, None])[:, 0]
            parts.append(torch.stack([chosen_s, (logprob_sV.argmax(-1) == targets_s).float()]))
        scored = torch.cat(parts, dim=1).cpu().numpy().astype(np.float64)
        return scored[0], scored[1] > 0

    def _diverge(self, rows: Sequence[_Row]) -> list[list[float]]:
        """Per row: Σ D(q ‖ p), Σ −ln q and Σ −ln p of its targets, in float64."""
        assert self.dense is not None
        with self.dense():
            dense_BTV, index_3S = self._logits_at_targets(rows)
        dense_SV = dense_BTV[index_3S[0], index_3S[1]]
        del dense_BTV
        logits_BTV, _ = self._logits_at_targets(rows)
        sums_B3 = torch.zeros(len(rows), 3, dtype=torch.float64, device=dense_SV.device)
        for first in range(0, index_3S.shape[1], DIVERGENCE_ROWS):
            rows_s, positions_s, targets_s = index_3S[:, first : first + DIVERGENCE_ROWS]
            q_sV = logits_BTV[rows_s, positions_s].double().log_softmax(-1)
            p_sV = dense_SV[first : first + DIVERGENCE_ROWS].double().log_softmax(-1)
            # A token that q excludes adds nothing.
            kl_s = torch.where(q_sV > -torch.inf, q_sV.exp() * (q_sV - p_sV), 0.0).sum(-1)
            nlls_s = (-chosen_sV.gather(1, targets_s[:, None])[:, 0] for chosen_sV in (q_sV, p_sV))
            sums_B3.index_add_(0, rows_s, torch.stack([kl_s, *nlls_s], dim=1))
        result: list[list[float]] = sums_B3.cpu().tolist()
        return result

    def _decode(self, decodings: list[Decoding]) -> list[Generation]:
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
            step_BT = next_tokens(decodings, logits_B1V[:, -1].float())[:, None].to(self._device)
            for decoding, token in zip(decodings, step_BT[:, 0].tolist(), strict=True):
                decoding.push(token)
            if all(decoding.finish for decoding in decodings):
                break
        return [decoding.result() for decoding in decodings]


def _padded(rows: Sequence[Sequence[int]], width: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, int64, rows padded with id 0 to `width`."""
    ids_BT, mask_BT = np.zeros((2, len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids_BT[index, place], mask_BT[index, place] = row, 1
    return torch.from_numpy(ids_BT), torch.from_numpy(mask_BT)
