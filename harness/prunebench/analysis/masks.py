"""Looking at masks: a map of what each layer keeps, how far masks agree, and where two differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from prunebench.analysis.agreement import expected_agreement
from prunebench.errors import UsageError
from prunebench.mask import Mask

__all__ = ["Overlap", "difference", "heat_map", "overlap", "overlaps"]

KEPT, PRUNED = "█", "·"


@dataclass(frozen=True)
class Overlap:
    """How far two masks agree, over all layers.

    Pruned and kept sets give different numbers for the same two masks, and the literature reports both: each is the
    share of one mask's set that is in the other's too.

    Args:
        pruned: of the experts that the first prunes, those that the second prunes.
        kept: of the experts that the first keeps, those that the second keeps.
        by_chance: what `pruned` would be on average against random masks of the first's counts.
    """

    pruned: Fraction
    kept: Fraction
    by_chance: Fraction

    def to_json(self) -> dict[str, float]:
        """Plain numbers."""
        return {name: float(value) for name, value in vars(self).items()}


def overlap(one: Mask, other: Mask) -> Overlap:
    """How far two masks of one model agree; with unequal counts the shares are of the first.

    Raises:
        UsageError: for masks of different models, or one that prunes nothing.
    """
    _check_alike(one, other)
    pruned = [{(layer.index, expert) for layer in mask.layers for expert in layer.pruned} for mask in (one, other)]
    kept = [{(layer.index, expert) for layer in mask.layers for expert in layer.survivors} for mask in (one, other)]
    if not pruned[0] or not kept[0]:
        raise UsageError("a mask that prunes nothing", expected="at least one expert pruned")
    return Overlap(
        Fraction(len(pruned[0] & pruned[1]), len(pruned[0])),
        Fraction(len(kept[0] & kept[1]), len(kept[0])),
        expected_agreement(one),
    )


def overlaps(named: Mapping[str, Mask]) -> list[tuple[str, str, Overlap]]:
    """Every pair of named masks, in their order."""
    return [(one, other, overlap(named[one], named[other])) for one, other in combinations(named, 2)]


def difference(one: Mask, other: Mask) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """By layer that differs: the experts that only the first prunes, and those that only the second does."""
    _check_alike(one, other)
    found = {}
    for layer in one.layers:
        mine, theirs = set(layer.pruned), set(other.pruned_of(layer.index))
        if mine != theirs:
            found[layer.index] = (tuple(sorted(mine - theirs)), tuple(sorted(theirs - mine)))
    return found


def heat_map(masks: Sequence[Mask]) -> str:
    """Layers as lines, experts as columns in the order of their ids: kept or pruned.

    Of several masks of one model each cell is the number of them that keep the expert, up to 9, or `+`.
    """
    first = masks[0]
    for other in masks[1:]:
        _check_alike(first, other)
    lines = []
    for layer in first.layers:
        counts = [sum(expert not in mask.pruned_of(layer.index) for mask in masks) for expert in range(layer.experts)]
        if len(masks) == 1:
            cells = "".join(KEPT if count else PRUNED for count in counts)
        else:
            cells = "".join(PRUNED if not count else str(count) if count < 10 else "+" for count in counts)
        kept = layer.experts - len(layer.pruned)
        lines.append(f"{layer.index:>5}  {cells}" + (f"  {kept} of {layer.experts} kept" if len(masks) == 1 else ""))
    return "\n".join(lines)


def _check_alike(one: Mask, other: Mask) -> None:
    if one.model_shape != other.model_shape:
        raise UsageError(f"masks of different shapes ({one.model_shape} and {other.model_shape})")
