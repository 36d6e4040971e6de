"""Generation under the scorer `prefix`: rows that end make room for the next prompts.

Prompts are read by a walk (`sharing.read`), so that common beginnings, and the one prompt of several samples, are
computed once; their keys and values join those of the rows that are being continued. All rows end at the same column,
and begin where they are long; a row that has ended leaves, so nothing is computed for it any more.

B rows, T columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from prunebench.evaluate.decoding import Decoding, Generation, next_tokens
from prunebench.evaluate.sharing import Read, device_of, new_cache, read

__all__ = ["continue_all"]

ROOM = 63
"""Free columns that are made at once."""
IDLE = 4
"""Prompts are read as soon as one in so many places is free."""


def continue_all(model: Any, decodings: Sequence[Decoding], *, places: int, size: int) -> list[Generation]:
    """Continue prompts until all have ended.

    Args:
        model: that `sharing.refusal` has nothing against.
        decodings: sorted by their inputs.
        places: rows continued at a time.
        size: tokens of prompts fed at once.
    """
    prompts = zip(decodings, read(model, [decoding.inputs for decoding in decodings], size), strict=True)
    rows = _Rows(model)
    waiting = len(decodings)
    while waiting or rows.decodings:
        free = places - len(rows.decodings)
        if waiting and (free * IDLE >= places or not rows.decodings):
            waiting -= rows.admit(prompts, min(free, waiting))
        if rows.decodings:
            rows.step()
    return [decoding.result() for decoding in decodings]


@cache
def _with_room() -> Any:
    from transformers.cache_utils import DynamicLayer

    class WithRoom(DynamicLayer):
        """A cache's layer with free columns behind, so that a step writes one column and does not copy all others."""

        def hold(self, keys_BHTD: Tensor, values_BHTD: Tensor) -> None:
            """Hold these alone."""
            if not self.is_initialized:
                self.lazy_initialization(keys_BHTD, values_BHTD)
            self.keys, self.values = keys_BHTD, values_BHTD
            self.whole: tuple[Tensor, ...] = (keys_BHTD, values_BHTD)

        def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_more: Any) -> tuple[Tensor, Tensor]:
            """Take one more column or several."""
            assert self.keys is not None
            seen, new = self.keys.shape[2], key_states.shape[2]
            if self.whole[0].shape[2] < seen + new:
                self.whole = tuple(pad(one[:, :, :seen], (0, 0, 0, new + ROOM)) for one in self.whole)
            for whole, states in zip(self.whole, (key_states, value_states), strict=True):
                whole[:, :, seen : seen + new] = states
            self.keys, self.values = (whole[:, :, : seen + new] for whole in self.whole)
            return self.keys, self.values

    return WithRoom


class _Rows:
    """The rows that are being continued: the last of their T columns are their tokens', but for the newest token."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.decodings: list[Decoding] = []
        self._named = new_cache(model)
        (self._cache,) = self._named.values()

    def admit(self, prompts: Iterator[tuple[Decoding, Read]], count: int) -> int:
        """Take in the next prompts with their first tokens."""
        taken = [next(prompts) for _ in range(count)]
        _push([decoding for decoding, _ in taken], torch.stack([prompt.logits_V for _, prompt in taken]))
        new = [(decoding, prompt) for decoding, prompt in taken if decoding.finish is None]
        if not new:
            return count
        before = len(self.decodings)
        self.decodings += [decoding for decoding, _ in new]
        width = max(self._lengths)
        if not before:
            self._cache.layers = [_with_room()() for _ in new[0][1].states]
        for index, layer in enumerate(self._cache.layers):
            old = (layer.keys, layer.values) if before else (None, None)
            own = zip(*(prompt.states[index] for _, prompt in new), strict=True)
            layer.hold(*(_joined(rows, more, width) for rows, more in zip(old, own, strict=True)))
        return count

    def step(self) -> None:
        """One more token of every row; rows that have ended leave."""
        device = device_of(self.model)
        length_B = torch.tensor(self._lengths, device=device)
        width = int(length_B.max()) + 1
        logits_B1V: Tensor = self.model(
            input_ids=torch.tensor([[decoding.tokens[-1]] for decoding in self.decodings], device=device),
            attention_mask=(torch.arange(width, device=device) >= width - 1 - length_B[:, None]).long(),
            position_ids=length_B[:, None],
            logits_to_keep=1,
            use_cache=True,
            **self._named,
        ).logits
        _push(self.decodings, logits_B1V[:, -1])
        staying = [row for row, decoding in enumerate(self.decodings) if decoding.finish is None]
        if len(staying) < len(self.decodings):
            self.decodings = [self.decodings[row] for row in staying]
            self._leave(staying, width)

    @property
    def _lengths(self) -> list[int]:
        """Tokens of each row that keys and values are there of: all but the newest."""
        return [len(decoding.inputs) + len(decoding.tokens) - 1 for decoding in self.decodings]

    def _leave(self, staying: list[int], width: int) -> None:
        """Let go of the other rows, and of the columns that none is left in."""
        if not staying:
            return
        first = width - max(self._lengths)
        for layer in self._cache.layers:
            places = torch.tensor(staying, device=layer.keys.device)
            layer.hold(*(one[:, :, first:].index_select(0, places) for one in (layer.keys, layer.values)))


def _push(decodings: list[Decoding], logits_BV: Tensor) -> None:
    token_B = next_tokens(decodings, logits_BV.float())
    for decoding, token in zip(decodings, token_B.tolist(), strict=True):
        decoding.push(token)


def _joined(old_BHTD: Tensor | None, new: Sequence[Tensor], width: int) -> Tensor:
    """Rows that were there and new ones [H, L, D], all ending at column `width`."""
    parts = [] if old_BHTD is None else [pad(old_BHTD, (0, 0, width - old_BHTD.shape[2], 0))]
    parts += [pad(one_HLD, (0, 0, width - one_HLD.shape[1], 0))[None] for one_HLD in new]
    return torch.cat(parts)
