"""The five things that comparisons of pruned experts should report (2610.41366 §7), row by row; missing is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prunebench.board.entries import Entry
from prunebench.storage import TOLERANCE

__all__ = ["ITEMS", "Reported", "reporting"]

ITEMS: Final = (
    "router convention and gate semantics",
    "operators compared on a fixed mask",
    "a generative task beside multiple choice",
    "calibration text and tokens of mask and fit",
    "a quantized model at the same storage",
)
_CHOICE: Final = frozenset({"acc", "acc_norm"})
_GENERATIVE: Final = frozenset({"exact_match", "pass@1"})


@dataclass(frozen=True)
class Reported:
    """One of the five for one run: what is reported, or an empty text if it is missing."""

    item: str
    text: str


def reporting(entries: Sequence[Entry]) -> dict[str, tuple[Reported, ...]]:
    """The five items of every pruned run, by run id; dense ones have none to report."""
    by_mask: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if not entry.dense:
            by_mask.setdefault(_mask(entry), []).append(entry)
    quantized = [entry for entry in entries if "quantize" in entry.record["identity"] and entry.record["mask"] is None]
    found = {}
    for entry in entries:
        if entry.dense:
            continue
        texts = (
            _semantics(entry.record["arm"]),
            _on_this_mask(entry, by_mask[_mask(entry)]),
            _tasks(entry.record["headline"]),
            _calibrations(entry),
            _quantized(entry, quantized),
        )
        found[entry.id] = tuple(Reported(item, text) for item, text in zip(ITEMS, texts, strict=True))
    return found


def _mask(entry: Entry) -> tuple[str, str]:
    return entry.weights, str(entry.record["identity"]["mask"]["digest"])


def _semantics(arm: Mapping[str, Any]) -> str:
    scale = arm["resolved_scale"]
    return f"{arm['convention']}; " + (
        f"survivors at {scale}" if scale else "slots kept, gates as the router made them"
    )


def _on_this_mask(entry: Entry, alike: Sequence[Entry]) -> str:
    named = sorted({_operator(other) for other in alike} - {_operator(entry)})
    if not named:
        return ""
    shown = ", ".join(named[:4]) + (", …" if len(named) > 4 else "")
    return f"{len(named)} other operators on this mask: {shown}" if len(named) > 1 else f"one other operator: {shown}"


def _operator(entry: Entry) -> str:
    arm = entry.record["arm"]
    return f"{arm['operator']} @ {arm['resolved_scale']}" if arm["resolved_scale"] else str(arm["operator"])


def _tasks(headline: Mapping[str, Sequence[Sequence[str]]]) -> str:
    cells = [cell for suite in headline.values() for cell in suite]
    generative = sorted({task for task, _, metric in cells if metric in _GENERATIVE})
    if not generative or not any(metric in _CHOICE for _, _, metric in cells):
        return ""
    return ", ".join(generative)


def _calibrations(entry: Entry) -> str:
    texts = []
    for part in ("mask", "fit"):
        stated = entry.calibration(part)
        if stated is None:
            texts.append(f"{part}: none")
        else:
            blocks, length = stated["blocks"], stated["length"]
            # What a record says here is only checked to be there.
            known = type(blocks) is int and type(length) is int
            size = f"{blocks * length:,} tokens" if known else f"{blocks} × {length} tokens"
            texts.append(f"{part}: {stated['text']} {stated['draw']}, {size}")
    return "; ".join(texts)


def _quantized(entry: Entry, quantized: Sequence[Entry]) -> str:
    size = entry.record["storage"]["total"]
    near = [
        other
        for other in quantized
        if other.record["arm"]["model"] == entry.record["arm"]["model"]
        and abs(other.record["storage"]["total"] - size) <= TOLERANCE * size
    ]
    return "" if not near else f"{near[0].folder}, {near[0].record['storage']['total']:,} bytes"
