"""Which requests share a forward pass: a pure function of their lengths and the token budget, never of the answers."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["plan_batches"]


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Pack requests into padded batches, longest first.

    Args:
        lengths: tokens of each request, everything that it will ever hold counted.
        batch_tokens: rows x longest row of a batch stay within this, but a batch has at least one row.

    Returns:
        Indices into `lengths`, each exactly once; equal lengths keep their order.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batches and (len(batches[-1]) + 1) * longest <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches
