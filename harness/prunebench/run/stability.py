"""How far a criterion's masks hang on its calibration text: on how much of it there is, and on which.

`shard_agreement` cuts a text into disjoint shards, measures each once, and adds up statistics of any of them, so that
masks of many sizes and subsets cost one pass over the text (2609.30465 App. D.1). `text_drift` chooses masks on
the draws of several texts at one token budget (2610.41366 App. A.9).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations
from typing import Any

import numpy as np
import torch

from prunebench.analysis.bootstrap import LEVEL
from prunebench.analysis.drift import Drifts, splits_as_far
from prunebench.analysis.masks import Overlap, overlap
from prunebench.calibration import CalibrationTokens, ScoreResult, Statistic
from prunebench.errors import UsageError
from prunebench.mask import Mask
from prunebench.run.arm import PreparedArm
from prunebench.run.foreign import naming_the_file, same_torch
from prunebench.run.selection import choose_mask
from prunebench.run.session import Session, check_writable
from prunebench.run.sources import calibration_tokens

__all__ = ["Agreement", "Spread", "TextDrift", "add_up", "shard_agreement", "shards_of", "text_drift"]


@dataclass(frozen=True)
class Spread:
    """A share over orderings of the shards: its mean, and where the middle 95 % of them are.

    Orderings share shards, so this is how much hangs on which shards there are; it is no confidence interval of a text.
    """

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, shares: Sequence[float]) -> Spread:
        """Of one share per ordering."""
        low, high = np.quantile(shares, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return cls(float(np.mean(shares)), float(low), float(high), len(shares))


@dataclass(frozen=True)
class Agreement:
    """A criterion's masks from so many shards.

    Args:
        shards: how many.
        tokens: how many those hold.
        with_all: `pruned` and `kept`: the share of the mask's set that the mask of all shards has too; None if these
            are all.
        between: the same between masks of so many shards and of as many others; None if there are not.
    """

    shards: int
    tokens: int
    with_all: Mapping[str, Spread] | None
    between: Mapping[str, Spread] | None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        both = {"with_all": self.with_all, "between": self.between}
        plain = {
            key: None if of is None else {name: dict(vars(one)) for name, one in of.items()} for key, of in both.items()
        }
        return {"shards": self.shards, "tokens": self.tokens, **plain}


def shards_of(tokens: CalibrationTokens, count: int) -> list[CalibrationTokens]:
    """A draw cut into equal disjoint parts, in order.

    Raises:
        UsageError: parts that would not be equal, or fewer than 2.
    """
    blocks = len(tokens.ids_BL)
    if count < 2 or blocks % count:
        raise UsageError(
            f"{count} shards of {blocks} blocks", expected="at least 2, of as many blocks each", fix="change --shards"
        )
    parts = tokens.ids_BL.split(blocks // count)
    return [
        CalibrationTokens(tokens.spec, ids_BL.clone(), sha256(ids_BL.numpy().tobytes()).hexdigest()[:16])
        for ids_BL in parts
    ]


def add_up(parts: Sequence[ScoreResult], names: Sequence[str]) -> ScoreResult:
    """These statistics of passes over disjoint texts, as one pass over all of them has them."""
    layers: dict[int, dict[str, Statistic]] = {}
    for index, first in parts[0].layers.items():
        layers[index] = {name: copy.deepcopy(first[name]) for name in names}
        for part in parts[1:]:
            for name, one in layers[index].items():
                one.merge(part.layers[index][name])
    return ScoreResult(sum(part.tokens for part in parts), layers)


def _check_additive(name: str, arm: PreparedArm) -> None:
    """Refuse, by name, a criterion whose statistics of two texts are not those of both."""
    assert arm.method is not None
    what = f"{name} cannot be added up from shards"
    if arm.method.schedule != "one_shot":
        raise UsageError(f"{what}: it measures the whole text layer by layer", expected="a criterion of one pass")
    if not arm.select_needs:
        raise UsageError(f"{what}: it reads no calibration text", expected="a criterion with statistics")
    for statistic in arm.select_needs:
        one, other = copy.deepcopy(statistic), copy.deepcopy(statistic)
        for stream in (one, other):
            stream.start(2, 2, torch.device("cpu"))
        try:
            one.merge(other)
        except UsageError as error:
            raise UsageError(f"{what}: {error.what}", expected=error.expected) from error


def shard_agreement(
    session: Session, criteria: Mapping[str, PreparedArm], *, shards: int, orderings: int, seed: int = 0
) -> dict[str, list[Agreement]]:
    """Agreement of masks from 1, 2, 4, … shards with that of all, and between disjoint halves.

    In each random ordering of the shards the first s are compared with all (nested sizes), and with the next s.

    Args:
        session: loads the model, and keeps the passes over single shards.
        criteria: name -> an arm that chooses by it; all of one model and text.
        shards: of the arms' calibration text.
        orderings: how many.
        seed: of the orderings.

    Returns:
        Criterion -> its agreement by size; the last size is all shards.

    Raises:
        UsageError: a criterion that cannot be added up, and what `shards_of` refuses.
    """
    if orderings < 1:
        raise UsageError(f"{orderings} orderings", expected="at least 1")
    for name, arm in criteria.items():
        with same_torch(), naming_the_file(arm.method_files, frozenset()):
            _check_additive(name, arm)
    check_writable(session.out)
    first = next(iter(criteria.values()))
    loaded = session.open(first)
    spec = first.spec.calibration
    parts = shards_of(first.tokens.get(spec) or calibration_tokens(spec, loaded.tokenizer), shards)
    needs = [statistic for arm in criteria.values() for statistic in arm.select_needs]
    measured = [session.measured(first, part, needs) for part in parts]
    rng = np.random.default_rng(seed)
    orders = [tuple(rng.permutation(shards).tolist()) for _ in range(orderings)]
    found = {}
    for done, (name, arm) in enumerate(criteria.items()):
        with same_torch(), naming_the_file(arm.method_files, frozenset()):
            chooser = _Chooser(session, arm, measured)
            found[name] = [_agreement(chooser, size, orders, parts[0].ids_BL.numel()) for size in _sizes(shards)]
        if session.progress is not None:
            session.progress("criteria", done + 1, len(criteria))
    return found


def _sizes(shards: int) -> Iterator[int]:
    size = 1
    while size < shards:
        yield size
        size *= 2
    yield shards


class _Chooser:
    """Masks of one criterion from any of the shards, each made once."""

    def __init__(self, session: Session, arm: PreparedArm, measured: Sequence[ScoreResult]) -> None:
        self.moe, self.arm, self.measured = session.open(arm).moe, arm, measured
        self._made: dict[tuple[int, ...], Mask] = {}

    def mask(self, shards: Sequence[int]) -> Mask:
        """The mask from these shards, in whatever order."""
        key = tuple(sorted(shards))
        if key not in self._made:
            arm = self.arm
            assert arm.method is not None
            assert arm.budget is not None
            self._made[key] = choose_mask(
                self.moe,
                arm.method,
                arm.budget,
                needs=arm.select_needs,
                scores=add_up([self.measured[i] for i in key], [one.name for one in arm.select_needs]),
                tokens=None,
                rng=np.random.default_rng(arm.spec.seed),
            )
        return self._made[key]


def _agreement(chooser: _Chooser, size: int, orders: Sequence[tuple[int, ...]], tokens: int) -> Agreement:
    shards = len(orders[0])
    with_all, between = None, None
    if size < shards:
        everything = chooser.mask(range(shards))
        with_all = _spread([overlap(chooser.mask(order[:size]), everything) for order in orders])
    if 2 * size <= shards:
        between = _spread([
            overlap(chooser.mask(order[:size]), chooser.mask(order[size : 2 * size])) for order in orders
        ])  # fmt: skip
    return Agreement(size, size * tokens, with_all, between)


def _spread(found: Sequence[Overlap]) -> dict[str, Spread]:
    return {name: Spread.of([float(getattr(one, name)) for one in found]) for name in ("pruned", "kept")}


@dataclass(frozen=True)
class TextDrift:
    """How far one criterion's masks on two texts are apart.

    Args:
        texts: the two.
        tokens: of each draw of either.
        drifts: shares that differ, between draws of the first text, of the second, and across.
        splits: of all ways to split the draws into two groups, how many are as far apart, and how many there are.
    """

    texts: tuple[str, str]
    tokens: int
    drifts: Drifts
    splits: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"texts": self.texts, "tokens": self.tokens, **self.drifts.to_json(), "splits_as_far": self.splits}


def text_drift(
    session: Session, criteria: Mapping[str, Mapping[str, Sequence[PreparedArm]]]
) -> dict[str, list[TextDrift]]:
    """Choose a mask on every draw of every text, and compare domain drift with sampling drift.

    Args:
        session: loads the model and keeps passes.
        criteria: name -> text -> an arm for each of its draws; all of one model, budget, and number of tokens.

    Returns:
        Criterion -> every pair of texts.

    Raises:
        UsageError: a criterion that reads no text, and draws that are the same.
    """
    for name, texts in criteria.items():
        for arms in texts.values():
            if any(arm.calibration is None for arm in arms):
                raise UsageError(f"{name} reads no calibration text, so none can move its mask")
    check_writable(session.out)
    found = {}
    for name, texts in criteria.items():
        masks: dict[str, list[Mask]] = {}
        seen: dict[str, str] = {}
        sizes = set()
        for text, arms in texts.items():
            for arm in arms:
                spec = arm.spec.calibration
                tokens = arm.tokens.get(spec) or calibration_tokens(spec, session.open(arm).tokenizer)
                sizes.add(tokens.ids_BL.numel())
                place = f"{text}, draw {spec.draw}"
                if (other := seen.setdefault(tokens.fingerprint, place)) != place:
                    raise UsageError(f"{place} is the same text as {other}", expected="disjoint texts")
            masks[text] = [session.choose(arm) for arm in arms]
        [size] = sizes
        found[name] = [
            TextDrift((one, other), size, Drifts.of(masks[one], masks[other]), splits_as_far(masks[one], masks[other]))
            for one, other in combinations(masks, 2)
        ]
    return found
