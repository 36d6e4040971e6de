"""The scorer `batched`: every request on its own, in padded batches.

The model is called normally, `model(input_ids=…, attention_mask=…)`, so that whatever hooks are installed see every
token and its mask. Scoring pads on the right. Generation pads on the left, with explicit position ids; a row that has
finished stays in its batch until all have.

Suffixes: B rows of a batch, T tokens, V vocabulary, S scored positions of a batch, s some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunebench.evaluate.decoding import Decoding, Generation, next_tokens
from prunebench.evaluate.sharing import device_of, forward_names, new_cache

__all__ = ["continue_batch", "diverge", "score_batch"]

SOFTMAX_ROWS = 2048
"""Positions whose float32 log-softmax is held at once."""

DIVERGENCE_ROWS = 256
"""Positions whose two float64 log-softmaxes are held at once."""

Tokens = Sequence[Sequence[int]]


def score_batch(model: Any, inputs: Tokens, targets: Tokens) -> list[list[Any]]:
    """Score a batch.

    Args:
        model: a transformers causal language model.
        inputs: what is fed for each request.
        targets: what each one's last positions predict.

    Returns:
        Of all targets in their order: log-probabilities in nats, from a float32 log-softmax, and whether each is the
        argmax.
    """
    logits_BTV, index_3S = _logits_at_targets(model, inputs, targets)
    parts = []
    for first in range(0, index_3S.shape[1], SOFTMAX_ROWS):
        rows_s, positions_s, targets_s = index_3S[:, first : first + SOFTMAX_ROWS]
        logprob_sV = logits_BTV[rows_s, positions_s].float().log_softmax(-1)
        chosen_s = logprob_sV.gather(1, targets_s[:, None])[:, 0]
        parts.append(torch.stack([chosen_s, (logprob_sV.argmax(-1) == targets_s).float()]))
    scored_2S = torch.cat(parts, dim=1).cpu().numpy().astype(np.float64)
    return [scored_2S[0].tolist(), (scored_2S[1] > 0).tolist()]


def diverge(
    model: Any, inputs: Tokens, targets: Tokens, dense: Callable[[], AbstractContextManager[Any]]
) -> list[list[float]]:
    """Per request: Σ D(q ‖ p), Σ −ln q and Σ −ln p of its targets, in float64.

    Args:
        model: as `score_batch`.
        inputs: as `score_batch`.
        targets: as `score_batch`.
        dense: while its context is entered, the model is the unpruned one.
    """
    with dense():
        dense_BTV, index_3S = _logits_at_targets(model, inputs, targets)
    dense_SV = dense_BTV[index_3S[0], index_3S[1]]
    del dense_BTV
    logits_BTV, _ = _logits_at_targets(model, inputs, targets)
    sums_B3 = torch.zeros(len(inputs), 3, dtype=torch.float64, device=dense_SV.device)
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


def continue_batch(model: Any, decodings: Sequence[Decoding]) -> list[Generation]:
    """Continue all rows of a batch until every one has finished."""
    device = device_of(model)
    lengths = [len(decoding.inputs) for decoding in decodings]
    width, steps = max(lengths), max(decoding.limit for decoding in decodings)
    ids_BT, mask_BT = _padded([decoding.inputs for decoding in decodings], width, left=True)
    mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(lengths), steps)], dim=1).to(device)
    position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    cache = new_cache(model, config=model.config)
    step_BT = ids_BT.to(device)
    for seen in range(width, width + steps):
        logits_B1V = _forward(
            model,
            keep=1,
            input_ids=step_BT,
            attention_mask=mask_BT[:, :seen],
            position_ids=position_BT[:, seen - step_BT.shape[1] : seen],
            use_cache=True,
            **cache,
        )
        step_BT = next_tokens(decodings, logits_B1V[:, -1].float())[:, None].to(device)
        for decoding, token in zip(decodings, step_BT[:, 0].tolist(), strict=True):
            decoding.push(token)
        if all(decoding.finish for decoding in decodings):
            break
    return [decoding.result() for decoding in decodings]


def _forward(model: Any, *, keep: int, **inputs: Any) -> Tensor:
    """The model's logits at the last `keep` positions at least."""
    if "logits_to_keep" in forward_names(model):
        inputs["logits_to_keep"] = keep
    logits: Tensor = model(**inputs).logits
    return logits[:, -keep:]


def _logits_at_targets(model: Any, inputs: Tokens, targets: Tokens) -> tuple[Tensor, Tensor]:
    """The batch's logits, and (row, position, target) of each scored position (3, S)."""
    width = max(map(len, inputs))
    starts = [len(fed) - len(own) for fed, own in zip(inputs, targets, strict=True)]
    ids_BT, mask_BT = _padded(inputs, width, left=False)
    keep = width - min(starts)
    row_S = np.repeat(np.arange(len(inputs)), [len(own) for own in targets])
    position_S = np.concatenate([np.arange(start, len(fed)) for start, fed in zip(starts, inputs, strict=True)])
    target_S = np.concatenate(targets)
    device = device_of(model)
    logits_BTV = _forward(
        model, keep=keep, input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device), use_cache=False
    )
    index_3S = torch.from_numpy(np.stack([row_S, position_S - (width - keep), target_S])).to(logits_BTV.device)
    return logits_BTV, index_3S


def _padded(rows: Tokens, width: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64, rows padded with id 0 to `width`."""
    ids_BT, mask_BT = np.zeros((2, len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids_BT[index, place], mask_BT[index, place] = row, 1
    return torch.from_numpy(ids_BT), torch.from_numpy(mask_BT)
