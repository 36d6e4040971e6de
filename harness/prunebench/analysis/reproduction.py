"""A run and the same run made again: which decisions differ, and whether a hair's breadth explains it.

Other processors round otherwise, so numbers may differ in their last digits; decisions may not, unless the two choices
were closer than `MARGIN` in either run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import tabulate

from prunebench.analysis.metrics import PERCENT
from prunebench.record import Item, Run, comparable

__all__ = ["MARGIN", "Reproduction", "reproduction"]

MARGIN: Final = 1e-4


@dataclass(frozen=True)
class Reproduction:
    """What came of it.

    Args:
        run: the original's name.
        items: outcomes that both runs have.
        equal: those that are the same.
        within: those that differ where the choice was closer than the margin, or losses that differ by less than it.
        differing: the others, and outcomes that one run lacks.
        parts: by what is compared as a whole (mask, stored bytes, integrity, every byte), whether it is the same.
        metrics: by name, the value before and after, where they differ.
    """

    run: str
    items: int
    equal: int
    within: int
    differing: tuple[str, ...]
    parts: dict[str, bool]
    metrics: dict[str, tuple[float, float]]

    @property
    def agrees(self) -> bool:
        """Whether all decisions are the same outside the margin, on the same mask, bytes and checks."""
        return not self.differing and all(self.parts[name] for name in ("mask", "stored bytes", "integrity"))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**asdict(self), "agrees": self.agrees}

    def to_text(self) -> str:
        """For people."""
        lines = [f"{name}: {'the same' if same else 'DIFFERENT'}" for name, same in self.parts.items()]
        counts = f"{self.equal} equal, {self.within} within {MARGIN:g}, {len(self.differing)} different"
        lines.append(f"{self.items} outcomes: {counts}")
        lines += [f"  {one}" for one in self.differing[:10]]
        if self.metrics:
            rows = [[name, *pair] for name, pair in sorted(self.metrics.items())]
            lines.append(tabulate.tabulate(rows, ["metric", "before", "again"], tablefmt="plain", floatfmt=".6g"))
        lines.append(f"{self.run}: {'reproduced' if self.agrees else 'NOT reproduced'}")
        return "\n".join(lines)


def reproduction(original: Run, again: Run) -> Reproduction:
    """Compare a run with the same run made again, item by item."""
    before, after = ({item.key: item for item in run.items.items()} for run in (original, again))
    equal = within = 0
    differing = [f"{'/'.join(key)} is in one run only" for key in sorted(before.keys() ^ after.keys())]
    for key in sorted(before.keys() & after.keys()):
        one, other = before[key], after[key]
        if (one.value, one.state, one.doc_hash, one.prompt_hash) == (
            other.value,
            other.state,
            other.doc_hash,
            other.prompt_hash,
        ):
            equal += 1
        elif _within(one, other):
            within += 1
        else:
            differing.append(f"{'/'.join(key)}: {one.value} ({one.state}), again {other.value} ({other.state})")
    records = original.record, again.record
    parts = {
        "mask": records[0]["mask"] == records[1]["mask"],
        "stored bytes": records[0]["storage"] == records[1]["storage"],
        "integrity": _marks(original) == _marks(again),
        "stored tensors": records[0]["tensors"] == records[1]["tensors"],
        "every number": _same_words(*records) and original.items.equals(again.items),
    }
    numbers = [{name: metric["value"] for name, metric in record["metrics"].items()} for record in records]
    moved = {
        name: (numbers[0][name], numbers[1][name])
        for name in numbers[0].keys() & numbers[1].keys()
        if not math.isclose(numbers[0][name], numbers[1][name], rel_tol=1e-9)
    }
    return Reproduction(original.name, len(before.keys() & after.keys()), equal, within, tuple(differing), parts, moved)


def _same_words(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two records say the same, but for what is not about numbers, and for fields that only newer ones have."""
    left_out = {"seal", "provenance", "schema", "integrity"}
    mine, theirs = comparable(one), comparable(other)
    return all(mine[key] == theirs[key] for key in mine.keys() & theirs.keys() - left_out)


def _marks(run: Run) -> list[tuple[str, str]]:
    return sorted((str(entry["check"]), str(entry["status"])) for entry in run.record["integrity"])


def _within(one: Item, other: Item) -> bool:
    """Whether two outcomes of one question are of one hair's breadth."""
    if (one.doc_hash, one.prompt_hash) != (other.doc_hash, other.prompt_hash):
        return False
    if one.metric not in PERCENT:
        return one.state == other.state and math.isclose(one.value, other.value, rel_tol=MARGIN, abs_tol=MARGIN)
    return min(_closeness(one), _closeness(other)) < MARGIN


def _closeness(item: Item) -> float:
    """How far the best choice is ahead of the second; infinite where nothing was chosen."""
    detail = json.loads(item.detail)
    scores = detail.get("loglikelihoods") if isinstance(detail, dict) else None
    if not isinstance(scores, list) or len(scores) < 2 or None in scores:
        return math.inf
    lengths = detail.get("characters") if item.metric == "acc_norm" else None
    order = sorted((score / (lengths[at] if lengths else 1) for at, score in enumerate(scores)), reverse=True)
    return float(order[0] - order[1])
