"""The scorer `prefix`: what requests begin with together is computed once, and logits only where something is scored.

A walk (`walks`) is fed piece by piece as one row: each token attends to its ancestors alone, by a 4-D mask and explicit
positions, and the keys and values of those that the next piece needs stay in a cache. There is no padding, so whatever
counts tokens counts each one that was computed. The model's own `logits_to_keep` picks the scored positions before its
head. Values are those of a request on its own up to rounding, as they are with any other batch.

Not every architecture takes that: `refusal` says why one does not, by name, and the others are tried on a few tokens.

N nodes of a piece, A ancestors, S scored nodes of a piece, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from prunebench.evaluate.walks import Numbers, Piece, Trie, pieces, sees, trie_of

__all__ = ["Read", "device_of", "forward_names", "new_cache", "piece_tokens", "read", "refusal", "score_walk"]

PIECE_TOKENS = {"cpu": 512}
"""Tokens fed at once, by device: few where attention to other requests' tokens costs more than a call does."""
ELSEWHERE_TOKENS = 4096
SOFTMAX_ROWS = 1024
"""Positions whose float32 log-softmax is held at once."""
MASKED_BY_US = ("eager", "sdpa")
"""Attention implementations that take a mask as it is."""
EXPLAINED = {torch.float32: 1e-3, torch.float64: 1e-3}
"""How much of what the mask does may be left unexplained on trial, by dtype."""
ROUNDED = 0.25


def piece_tokens(device: torch.device) -> int:
    """Tokens fed at once on a device."""
    return PIECE_TOKENS.get(device.type, ELSEWHERE_TOKENS)


def forward_names(model: Any) -> frozenset[str]:
    """Names of the arguments of a model's forward."""
    return _names_of(type(model).forward)


@cache
def _names_of(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def new_cache(model: Any, config: Any = None) -> dict[str, Any]:
    """An empty cache under the name that the model's forward has for it.

    Args:
        model: whose forward is asked.
        config: what each layer keeps follows from it; without, all keys and values are kept.
    """
    from transformers import DynamicCache

    # transformers 5.24 renamed `past_key_values` to `cache`; the object is updated in place.
    return {"cache" if "cache" in forward_names(model) else "past_key_values": DynamicCache(config=config)}


def device_of(model: Any) -> torch.device:
    """Where a model takes its ids."""
    device: torch.device = model.get_input_embeddings().weight.device
    return device


# --- walking


class _Fed(NamedTuple):
    """A piece that was fed.

    Attributes:
        piece: which.
        held: the nodes whose keys and values the cache has now, increasing.
        cache: it.
        scored: the nodes of the piece that logits are of, increasing.
        logits_SV: those.
    """

    piece: Piece
    held: Numbers
    cache: Any
    scored: Numbers
    logits_SV: Tensor


def _walk(model: Any, trie: Trie, scored: Numbers, size: int) -> Iterator[_Fed]:
    """Feed a trie, `size` nodes at once, with logits at some of its nodes (increasing)."""
    named = new_cache(model)
    (cache,) = named.values()
    held = np.zeros(0, dtype=np.int64)
    for piece in pieces(trie, size):
        if len(held) > len(piece.ancestors):
            columns = torch.from_numpy(np.searchsorted(held, piece.ancestors))
            for layer in cache.layers:
                layer.keys, layer.values = (kept_columns(one, columns) for one in (layer.keys, layer.values))
        first, last = np.searchsorted(scored, (piece.first, piece.last))
        logits_SV = _feed(model, trie, piece, named, scored[first:last])
        held = np.concatenate([piece.ancestors, np.arange(piece.first, piece.last)])
        yield _Fed(piece, held, cache, scored[first:last], logits_SV)


def _feed(model: Any, trie: Trie, piece: Piece, cache: dict[str, Any], scored: Numbers) -> Tensor:
    """Logits at some nodes of a piece [S, V], behind the ancestors that the cache holds."""
    device, dtype = device_of(model), model.dtype
    rows = np.arange(piece.first, piece.last)
    seen_NA = torch.from_numpy(sees(trie, rows, np.concatenate([piece.ancestors, rows]))).to(device)
    mask_NA = torch.zeros(seen_NA.shape, dtype=dtype, device=device).masked_fill_(~seen_NA, torch.finfo(dtype).min)
    # Where nothing is scored, one position all the same: a head may not take none.
    keep = torch.from_numpy(scored - piece.first if len(scored) else np.zeros(1, dtype=np.int64))
    logits_1SV: Tensor = model(
        input_ids=torch.from_numpy(trie.token_N[None, piece.first : piece.last]).to(device),
        attention_mask=mask_NA[None, None],
        position_ids=torch.from_numpy(trie.depth_N[None, piece.first : piece.last]).to(device),
        logits_to_keep=keep.to(device),
        use_cache=True,
        **cache,
    ).logits
    return logits_1SV[0, : len(scored)]


def kept_columns(states_BHTD: Tensor, columns: Tensor) -> Tensor:
    """Some columns of keys or values."""
    return states_BHTD.index_select(2, columns.to(states_BHTD.device))


# --- scoring and reading


def score_walk(
    model: Any, inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], size: int
) -> list[list[list[float]]]:
    """Score the requests of a walk.

    Args:
        model: that `refusal` has nothing against.
        inputs: what is fed for each request, sorted.
        targets: what each one's last positions predict.
        size: tokens fed at once.

    Returns:
        Per request: log-probability of each target in nats, from a float32 log-softmax, and 1 where it is the argmax.
    """
    trie = trie_of(inputs, [len(own) for own in targets])
    nodes = np.concatenate(trie.scored)
    order = np.argsort(nodes, kind="stable")
    node_S = nodes[order]
    target_S = np.concatenate([np.array(own, dtype=np.int64) for own in targets])[order]
    results = np.zeros((2, len(nodes)))
    for fed in _walk(model, trie, np.unique(nodes), size):
        first, last = np.searchsorted(node_S, (fed.piece.first, fed.piece.last))
        if last > first:
            place_S = np.searchsorted(fed.scored, node_S[first:last])
            results[:, order[first:last]] = _scored(fed.logits_SV, place_S, target_S[first:last])
    ends = np.cumsum([len(own) for own in targets])[:-1]
    return [own.tolist() for own in np.split(results, ends, axis=1)]


def _scored(logits_SV: Tensor, place_S: Numbers, target_S: Numbers) -> np.ndarray[Any, Any]:
    """Log-probabilities and argmax flags [2, …] of targets at places, which do not decrease."""
    parts = []
    for rows, logits_sV in enumerate(logits_SV.split(SOFTMAX_ROWS)):
        own = place_S // SOFTMAX_ROWS == rows
        logprob_sV = logits_sV.float().log_softmax(-1)
        places = torch.from_numpy(place_S[own] % SOFTMAX_ROWS).to(logprob_sV.device)
        targets = torch.from_numpy(target_S[own]).to(logprob_sV.device)
        greedy = logprob_sV.argmax(-1)[places] == targets
        parts.append(torch.stack([logprob_sV[places, targets], greedy.float()]))
    return torch.cat(parts, dim=1).cpu().numpy().astype(np.float64)


class Read(NamedTuple):
    """A prompt that was read: keys and values of each layer [H, L, D], and the logits behind it [V]."""

    states: list[tuple[Tensor, Tensor]]
    logits_V: Tensor


def read(model: Any, inputs: Sequence[Sequence[int]], size: int) -> Iterator[Read]:
    """Read prompts, no more of them than is asked for; what several begin with is computed once.

    Args:
        model: that `refusal` has nothing against.
        inputs: sorted.
        size: tokens fed at once.
    """
    trie = trie_of(inputs, [1] * len(inputs))
    ends = np.concatenate(trie.scored)
    done = 0
    for fed in _walk(model, trie, np.unique(ends), size):
        while done < len(ends) and ends[done] < fed.piece.last:
            columns = torch.from_numpy(np.searchsorted(fed.held, trie.path(int(ends[done]))))
            states = [
                (kept_columns(layer.keys, columns)[0], kept_columns(layer.values, columns)[0])
                for layer in fed.cache.layers
            ]
            yield Read(states, fed.logits_SV[int(np.searchsorted(fed.scored, ends[done]))])
            done += 1


# --- which models


_TRIED: WeakKeyDictionary[nn.Module, dict[Any, str | None]] = WeakKeyDictionary()


def refusal(model: Any, longest: int, alone: Callable[[], AbstractContextManager[Any]]) -> str | None:
    """Why a model's requests are not scored together, in words; None if they are.

    Args:
        model: in evaluation mode.
        longest: tokens of the longest request.
        alone: while its context is entered, the model is the unpruned one, and nobody counts.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    names = forward_names(model)
    lacking = {"position_ids", "attention_mask", "logits_to_keep"} - names
    lacking |= set() if {"cache", "past_key_values"} & names else {"cache"}
    if lacking:
        return f"the model's forward takes no {' and no '.join(sorted(lacking))}"
    if (attention := model.config._attn_implementation) not in MASKED_BY_US:  # noqa: SLF001  transformers' own way
        return f"attention {attention} takes no mask of ours"
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) is DynamicSlidingWindowLayer:
            if longest > layer.sliding_window:
                return f"attention in a window or chunk of {layer.sliding_window} tokens, shorter than {longest}"
        elif type(layer) is not DynamicLayer:
            return f"a layer's cache is not one of keys and values alone ({type(layer).__name__})"
    tried = _TRIED.setdefault(model, {})
    key = (attention, model.dtype)
    if key not in tried:
        with alone():
            tried[key] = _trial(model)
    return tried[key]


@torch.inference_mode()
def _trial(model: Any) -> str | None:
    """Score two short requests together, and apart: what the mask changes must be what it is meant to change."""
    words = [int(word) for word in torch.arange(5, 29) % model.get_input_embeddings().weight.shape[0]]
    stem, one, other = words[:12], words[12:18], words[18:]
    trie = trie_of([[*stem, *one], [*stem, *other]], [1, 1])
    fed = _walk(model, trie, np.arange(len(trie.token_N)), size=10)
    found = torch.cat([part.logits_SV for part in fed])[-len(other) :].float()
    right, wrong = (
        model(input_ids=torch.tensor([ids], device=device_of(model)), use_cache=False).logits[0, -len(other) :].float()
        for ids in ([*stem, *other], words)
    )
    finite = right.isfinite() & wrong.isfinite()  # a head may exclude tokens
    unexplained = float((found - right)[finite].norm() / (wrong - right)[finite].norm())
    if unexplained <= EXPLAINED.get(model.dtype, ROUNDED):
        return None
    return f"on trial, {unexplained:.1%} of what masked attention does was not what it should do"
