"""One growing continuation: what it may draw from, when it ends, and what is left of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from prunebench.errors import UsageError

__all__ = ["Decoding", "Finish", "Generation", "Prompt", "Sampling", "draw", "next_tokens", "prompt_of"]

Finish = Literal["stop", "eos", "length", "invalid"]
"""Why a continuation ended: a stop string, an end token, no more room, or logits that were NaN or infinite."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, where they are: transformers' rules, in its order.

    Args:
        temperature: divides the logits; above 0.
        top_p: only the likeliest tokens whose probability together reaches this; 1 for all.
        top_k: only so many of the likeliest tokens; 0 for all.
        n: samples per prompt.
        seed: with the prompt and the sample's number, decides every draw; batches do not matter.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for wrong, what, expected in (
            (
                not 0 < self.temperature < float("inf"),
                f"temperature {self.temperature}",
                "above 0; greedy is the default",
            ),
            (not 0 < self.top_p <= 1, f"top_p {self.top_p}", "above 0, at most 1"),
            (self.top_k < 0, f"top_k {self.top_k}", "0 for all tokens, or more"),
            (self.n < 1, f"n {self.n}", "at least 1 sample per item"),
            (self.seed < 0, f"seed {self.seed}", "0 or more"),
        ):
            if wrong:
                raise UsageError(f"{what} is impossible", where="sampling", expected=expected)

    @classmethod
    def parse(cls, text: str) -> Sampling:
        """From `temperature=0.7,top_p=0.95,top_k=20,n=16,seed=0`; what is left out has its default.

        Raises:
            UsageError: for an unknown or repeated name, or a value that is none.
        """
        kinds: dict[str, Any] = {one.name: type(one.default) for one in fields(cls)}
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if name not in kinds or not equals or name in values:
                raise UsageError(
                    f"sampling {part!r}", expected=", ".join(f"{known}=…" for known in kinds) + ", each once"
                )
            try:
                values[name] = kinds[name](value)
            except ValueError as error:
                raise UsageError(f"sampling {part!r} is no {kinds[name].__name__}", fix=str(error)) from error
        return cls(**values)

    def to_json(self) -> dict[str, float | int]:
        """As an identity states it."""
        return asdict(self)


class Prompt(NamedTuple):
    """A text to continue until a stop string, the end token or `max_tokens`; greedily unless a sampling is given."""

    text: str
    until: tuple[str, ...]
    max_tokens: int
    name: str = "request"
    sampling: Sampling | None = None
    sample: int = 0


class Generation(NamedTuple):
    """A continuation, cut before the earliest stop string; why it ended; and the tokens that were generated."""

    text: str
    finish: Finish
    tokens: int


def prompt_of(text: str, settings: Mapping[str, Any], name: str) -> Prompt:
    """A prompt from lm-eval's `generation_kwargs`; sampling, where it is asked for, with its `seed` or 0.

    Raises:
        UsageError: for impossible settings of sampling.
    """
    until = settings.get("until") or []
    stops = (until,) if isinstance(until, str) else tuple(until)
    prompt = Prompt(text, stops, int(settings.get("max_gen_toks", 256)), name)
    temperature = float(settings.get("temperature") or 0)
    if not (settings.get("do_sample") or temperature > 0):
        return prompt
    kinds: dict[str, Any] = {"top_p": float, "top_k": int, "seed": int}
    given = {key: kind(settings[key]) for key, kind in kinds.items() if key in settings}
    return prompt._replace(sampling=Sampling(temperature=temperature or 1.0, **given))


@dataclass
class Decoding:
    """One growing continuation; tokens pushed after the end are ignored."""

    tokenizer: Any
    inputs: list[int]
    stops: tuple[str, ...]
    limit: int
    end_tokens: frozenset[int]
    sampling: Sampling | None = None
    stream: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    text: str = ""

    def __post_init__(self) -> None:
        # A stop string of n bytes ends in the newest token and spans at most n; two more keep decoders that
        # treat a first token specially from hiding it.
        self._window = max((len(stop.encode()) for stop in self.stops), default=0) + 2

    def push(self, token: int) -> None:
        """Take the next token."""
        if self.finish is not None:
            return
        if token in self.end_tokens:
            self._end("eos")
            return
        self.tokens.append(token)
        if self._stopped():
            return
        if len(self.tokens) == self.limit:
            self._end("length")

    def _stopped(self) -> bool:
        """Whether the newest token completes a stop string; if so, the end has been made.

        Special tokens are no part of the text, but one that spells a stop string ends it, as in lm-eval: the end of a
        turn, of a model whose end token is another.
        """
        if not self.stops:
            return False
        newest = self.tokens[-self._window :]
        for special in (False, True):
            # The newest tokens alone may read otherwise than behind all others.
            if self._earliest_stop(self._text_of(newest, special=special)) is None:
                continue
            text = self._text_of(self.tokens, special=special)
            if (cut := self._earliest_stop(text)) is not None:
                self.text, self.finish = self._text_of(self.tokens) if special else text[:cut], "stop"
                return True
        return False

    def fail(self) -> None:
        """End where the model's logits were no numbers; the text so far stays."""
        if self.finish is None:
            self._end("invalid")

    def uniform(self) -> float:
        """The next draw in [0, 1): a function of the seed, the prompt, the sample's number and the place."""
        assert self.sampling is not None
        key = f"{self.sampling.seed}\0{self.stream}\0{len(self.tokens)}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64

    def _end(self, finish: Finish) -> None:
        self.text, self.finish = self._text_of(self.tokens), finish

    def _text_of(self, tokens: list[int], *, special: bool = False) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not special))

    def _earliest_stop(self, text: str) -> int | None:
        return min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=None)

    def result(self) -> Generation:
        """What became of it."""
        assert self.finish is not None
        return Generation(self.text, self.finish, len(self.tokens))


def next_tokens(decodings: Sequence[Decoding], logits_BV: Tensor) -> Tensor:
    """The next token of each continuation (B,); those whose logits hold a NaN or +∞ end as invalid.

    Args:
        decodings: the continuations; those that have ended get some token too.
        logits_BV: at their last positions, float32.
    """
    # Comparisons with NaN are false; -∞ only says that a token is impossible.
    for row in (~(logits_BV < torch.inf).all(-1)).nonzero()[:, 0].tolist():
        decodings[row].fail()
    token_B = logits_BV.argmax(-1)
    for row, decoding in enumerate(decodings):
        if decoding.sampling is not None and decoding.finish is None:
            token_B[row] = draw(logits_BV[row], decoding.sampling, decoding.uniform())
    return token_B


def draw(logits_V: Tensor, sampling: Sampling, uniform: float) -> int:
    """A token by inverse transform: the first, from the likeliest on, whose cumulative probability exceeds `uniform`.

    Temperature, then top-k, then top-p, as transformers' warpers do it: of top-p, the fewest of the likeliest tokens
    that together reach it. Equally likely tokens stand in the order of their ids.

    Args:
        logits_V: finite or -∞.
        sampling: the rules.
        uniform: in [0, 1).
    """
    sorted_V, order_V = (logits_V.double() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        sorted_V = sorted_V[: sampling.top_k]
    cumulative = sorted_V.softmax(-1).cumsum(-1)
    kept = min(int((cumulative < sampling.top_p).sum()) + 1, len(cumulative))
    mass = cumulative[:kept]
    place = int((mass <= uniform * mass[-1]).sum())
    # Where rounding takes the draw to the very end: the last token that has any probability.
    return int(order_V[min(place, int((mass < mass[-1]).sum()))])
