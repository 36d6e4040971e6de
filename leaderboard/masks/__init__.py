"""The records' masks: `python -m leaderboard.masks RECORDS --out docs/results/masks.md --export fixtures/masks`.

The page says how far criteria agree with each other and with themselves on other draws and another domain; the export
writes every mask of a criterion that the records hold, on general draw A, to a file of its own. numpy is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prunebench.analysis.masks import Overlap, overlap
from prunebench.errors import UsageError
from prunebench.mask import Mask, write_atomically
from prunebench.record import RECORD_FILE, runs_under

__all__ = ["Chosen", "export", "page", "read_masks"]

GENERAL, DRAW = "world:general", "A"
REFERENCES = ("mone", "reap", "frequency")
TITLE = "# Masks: how far criteria agree"
EXPLAINED = """Each cell: of the experts that the first mask prunes / keeps, the share (%) that the other prunes / \
keeps too, over all layers. Criteria are defined in [criteria.md](../criteria.md); masks are of general draw A unless \
said otherwise, and are files in [fixtures/masks](../../fixtures/masks). At 50 % the two shares are equal, as both \
sets are."""


@dataclass(frozen=True)
class Chosen:
    """A mask of the records, and what chose it.

    Args:
        model: its name.
        criterion: name and parameters.
        amount: the ratio as asked for, or `keep n`.
        text: what it was calibrated on; None if on nothing.
        draw: of that.
        mask: the mask.
    """

    model: str
    criterion: str
    amount: str
    text: str | None
    draw: str | None
    mask: Mask

    @property
    def is_plain(self) -> bool:
        """Of general draw A, or of no text at all."""
        return (self.text, self.draw) in {(GENERAL, DRAW), (None, None)}


def read_masks(records: Path) -> list[Chosen]:
    """Every different mask of the records that a criterion chose, in the order of models, criteria and amounts."""
    found: dict[tuple[str, ...], Chosen] = {}
    for folder in runs_under(records).runs:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        identity = record["identity"]
        if record["mask"] is None or identity["mask"]["source"] == "file":
            continue
        given = {name: value for name, value in sorted(identity["method"]["parameters"].items()) if value is not None}
        criterion = " ".join([identity["method"]["name"], *(f"{name}={value}" for name, value in given.items())])
        budget = identity["budget"]
        amount = str(budget["ratio"]) if "ratio" in budget else f"keep {budget['keep']}"
        on = (identity["calibration"] or {}).get("mask") or {"text": None, "draw": None}
        mask = Mask.from_json(record["mask"], where=str(folder))
        chosen = Chosen(record["arm"]["model"], criterion, amount, on["text"], on["draw"], mask)
        key = (chosen.model, criterion, amount, str(chosen.text), str(chosen.draw))
        other = found.setdefault(key, chosen)
        if other.mask != mask:
            raise UsageError("one criterion chose two masks", where=str(folder), expected=other.mask.digest)
    if not found:
        raise UsageError("no masks", where=str(records), expected="pruned runs")
    return [found[key] for key in sorted(found)]


def _percent(found: Overlap) -> str:
    return f"{100 * float(found.pruned):.0f} / {100 * float(found.kept):.0f}"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def page(masks: Sequence[Chosen]) -> str:
    """The page in Markdown."""
    models = list(dict.fromkeys(one.model for one in masks))
    ratios = [amount for amount in dict.fromkeys(sorted(one.amount for one in masks)) if not amount.startswith("keep")]
    plain = {(one.model, one.criterion, one.amount): one.mask for one in masks if one.is_plain}
    criteria = list(dict.fromkeys(one.criterion for one in masks if one.is_plain))
    lines = [
        TITLE,
        "",
        f"Written by `python -m leaderboard.masks` from {len(masks)} masks. Do not edit: run it again.",
        "",
        EXPLAINED,
    ]
    for ratio in ratios:
        for reference in REFERENCES:
            if not any((model, reference, ratio) in plain for model in models):
                continue
            rows = []
            for criterion in (name for name in criteria if name != reference):
                cells = [
                    _percent(overlap(plain[model, criterion, ratio], plain[model, reference, ratio]))
                    if (model, criterion, ratio) in plain and (model, reference, ratio) in plain
                    else ""
                    for model in models
                ]
                if any(cells):
                    rows.append([criterion, *cells])
            chance = [
                f"{100 * float(overlap(plain[model, reference, ratio], plain[model, reference, ratio]).by_chance):.0f}"
                if (model, reference, ratio) in plain
                else ""
                for model in models
            ]
            rows.append(["*by chance, pruned*", *chance])
            lines += ["", f"## {float(ratio):.0%} pruned, against `{reference}`".replace("%", " %"), ""]
            lines += _table(["criterion", *models], rows)
    lines += ["", *_stability(masks, models, ratios)]
    return "\n".join(lines) + "\n"


def _stability(masks: Sequence[Chosen], models: Sequence[str], ratios: Sequence[str]) -> list[str]:
    """Agreement of one criterion with itself on other draws and texts (2610.41366 §6.4, App. A.9)."""
    by_text: dict[tuple[str, str, str], dict[tuple[str, str], Mask]] = {}
    for one in masks:
        if one.text is not None and one.draw is not None:
            by_text.setdefault((one.criterion, one.model, one.amount), {})[one.text, one.draw] = one.mask
    rows = []
    for criterion in dict.fromkeys(key[0] for key in by_text):
        for model in models:
            for ratio in ratios:
                of = by_text.get((criterion, model, ratio), {})
                if len(of) > 1:
                    within = [_mean(_pairs(of, text, text)) for text in sorted({text for text, _ in of})]
                    texts = sorted({text for text, _ in of})
                    across = _mean(_pairs(of, *texts)) if len(texts) == 2 else ""
                    named = "; ".join(f"{text}: {share}" for text, share in zip(texts, within, strict=True) if share)
                    rows.append([criterion, model, ratio, named, across])
    if not rows:
        return []
    return [
        "## The same criterion on other draws, and on another domain",
        "",
        "Mean over all pairs of draws of one text, and over all pairs of draws of two texts.",
        "",
        *_table(["criterion", "model", "ratio", "draws of one text", "across the texts"], rows),
    ]


def _pairs(of: Mapping[tuple[str, str], Mask], one: str, other: str) -> list[Overlap]:
    keys = [(a, b) for a in sorted(of) for b in sorted(of) if (a[0], b[0]) == (one, other)]
    return [overlap(of[a], of[b]) for a, b in keys if one != other or a < b]


def _mean(found: Sequence[Overlap]) -> str:
    if not found:
        return ""
    pruned, kept = (sum(float(getattr(one, name)) for one in found) / len(found) for name in ("pruned", "kept"))
    return f"{100 * pruned:.0f} / {100 * kept:.0f}"


def export(masks: Sequence[Chosen], folder: Path) -> int:
    """Write each mask of general draw A, or of no text, to `model/criterion-ratio.json`; how many there are."""
    plain = [one for one in masks if one.is_plain]
    for one in plain:
        name = f"{one.criterion} {one.amount}".replace(" ", "-")
        (folder / one.model).mkdir(parents=True, exist_ok=True)
        text = json.dumps(one.mask.to_json(), sort_keys=True)
        write_atomically(folder / one.model / f"{name}.json", f"{text}\n".encode())
    return len(plain)
