"""Deciding every item of a run again, from what its rows store, and every number of its record from the items.

No model, no lm-eval and no suite's code is asked: the rules stand here a second time. What a row does not hold itself,
the reference of the tiny world's word problems, is taken from the documents that the caller has. Verdicts on programs
are believed, as only a sandbox can make them again; they are counted apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import tabulate

from prunebench.analysis.deciding import (
    UNPARSED,
    flexible_answer,
    lm_eval_exact_match,
    numeric_answer,
    predicted,
    strict_answer,
)
from prunebench.analysis.metrics import metrics_from_items
from prunebench.record import Item, Run

__all__ = ["CellReport", "Recomputed", "recompute"]

Documents = Mapping[tuple[str, str, str], Mapping[str, Any]]
"""(suite, task, item) -> the document, for suites that ship theirs."""

ROUNDING: Final = 2e-6
"""How far two stored log-likelihoods may be apart where the tiny world decided before it rounded."""

_READINGS: Final[Mapping[str, Callable[[str], str]]] = {
    "strict": strict_answer,
    "strict-match": strict_answer,
    "flexible": flexible_answer,
    "flexible-extract": flexible_answer,
}


@dataclass(frozen=True)
class CellReport:
    """One cell: its rows, those decided again with the same outcome, those believed, and the first that differs."""

    cell: str
    rows: int
    agree: int
    believed: int
    first: str = ""


@dataclass(frozen=True)
class Recomputed:
    """What came of it."""

    run: str
    cells: tuple[CellReport, ...]
    numbers: int
    differing: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether every row and every number is what it should be."""
        return not self.differing and all(one.agree + one.believed == one.rows for one in self.cells)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "agrees": self.agrees}

    def to_text(self) -> str:
        """A table, and one line on the record's numbers."""
        head = ["cell", "rows", "agree", "believed", "first that differs"]
        table = tabulate.tabulate([[*asdict(one).values()] for one in self.cells], head, tablefmt="plain")
        wrong = f", {len(self.differing)} differ: {self.differing[0]}" if self.differing else ""
        return f"{table}\n{self.numbers} numbers of the record computed again{wrong}\n{self.run}: " + (
            "agrees" if self.agrees else "DIFFERS"
        )


def recompute(run: Run, documents: Documents | None = None) -> Recomputed:
    """Decide a run's items again, and compute its record's numbers from them.

    Args:
        run: as read.
        documents: those of suites that ship them.
    """
    by_cell: dict[str, list[tuple[Item, str | None]]] = {}
    for item in run.items.items():
        document = (documents or {}).get((item.suite, item.task, item.item.partition("#")[0]))
        cell = f"{item.suite}/{item.task}/{item.filter}/{item.metric}"
        try:
            fault = _fault(item, document)
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # a detail that no run writes
            fault = f"its detail cannot be decided ({type(error).__name__}: {error})"
        by_cell.setdefault(cell, []).append((item, fault))
    cells = []
    for cell, rows in sorted(by_cell.items()):
        decided = any(fault is not None for _, fault in rows)  # a cell is decided whole, or not at all
        missing = "its detail has nothing to decide by, as others' have" if decided else ""
        faults = [(item, fault or missing) for item, fault in rows if fault or (fault is None and decided)]
        believed = 0 if decided else len(rows)
        first = f"{faults[0][0].item}: {faults[0][1]}" if faults else ""
        cells.append(CellReport(cell, len(rows), len(rows) - believed - len(faults), believed, first))
    stated = run.record["metrics"]
    computed = metrics_from_items(run.items, run.record["headline"])
    differing = [
        name for name in sorted(stated.keys() | computed.keys()) if not _same(stated.get(name), computed.get(name))
    ]
    return Recomputed(run.name, tuple(cells), len(computed), tuple(differing))


def _same(one: Mapping[str, float] | None, other: Mapping[str, float] | None) -> bool:
    if one is None or other is None:
        return False
    return all(math.isclose(one[key], other[key], rel_tol=1e-9, abs_tol=1e-9) for key in ("value", "low", "high", "n"))


def _fault(item: Item, document: Mapping[str, Any] | None) -> str | None:
    """What is wrong with a row; "" if nothing is; None if it cannot be decided here."""
    detail = json.loads(item.detail)
    if item.metric in {"acc", "acc_norm"}:
        return _choice_fault(item, detail)
    if item.metric == "exact_match":
        target = detail.get("target", (document or {}).get("answer"))
        return None if target is None else _generation_fault(item, detail, str(target))
    if item.metric in _WEIGHTS:
        return _reading_fault(item, detail)
    if item.metric in _DIVERGENCES:
        value = _DIVERGENCES[item.metric](detail)
        return _differs(item, value, float(detail["tokens"]), "ok")
    return None


def _differs(item: Item, value: float, weight: float, state: str) -> str:
    for what, own, wanted in (
        ("value", item.value, value),
        ("weight", item.weight, weight),
        ("state", item.state, state),
    ):
        if own != wanted:
            return f"{what} {own}, should be {wanted}"
    return ""


def _choice_fault(item: Item, detail: Mapping[str, Any]) -> str | None:
    if "loglikelihoods" not in detail:
        return None
    scores, gold = detail["loglikelihoods"], int(detail["gold"])
    if any(score is None for score in scores):
        return _differs(item, 0.0, 1.0, "invalid" if item.state == "invalid" else "error")
    lengths = detail["characters"] if item.metric == "acc_norm" else None
    prediction = predicted(scores, lengths)
    if "prediction" in detail:
        if prediction != detail["prediction"]:
            return f"prediction {detail['prediction']}, should be {prediction}"
    elif item.value != float(prediction == gold) and _undecided(scores, lengths, gold, prediction):
        # The tiny world decides before it rounds: both outcomes are right here.
        return _differs(item, item.value, 1.0, "ok" if item.value else "wrong")
    right = prediction == gold
    return _differs(item, float(right), 1.0, "ok" if right else "wrong")


def _undecided(scores: list[float], lengths: list[int] | None, gold: int, prediction: int) -> bool:
    """Whether rounding may have changed which of two choices is ahead."""
    one, other = (scores[at] / (lengths[at] if lengths else 1) for at in (gold, prediction))
    return abs(one - other) <= ROUNDING


def _generation_fault(item: Item, detail: Mapping[str, Any], target: str) -> str | None:
    text = str(detail["text"])
    if item.filter == "numeric":
        number = numeric_answer(text)
        right, extracted = (
            number is not None and number == numeric_answer(target),
            None if number is None else f"{number:f}",
        )
    elif item.filter in _READINGS:
        answer = _READINGS[item.filter](text)
        right, extracted = bool(lm_eval_exact_match(answer, target)), None if answer == UNPARSED else answer
    else:
        return None
    if extracted != detail["extracted"]:
        return f"extracted {detail['extracted']!r}, should be {extracted!r}"
    right = right and detail["finish"] != "invalid"
    state = "ok" if right else _what_is_wrong(text, extracted, str(detail["finish"]))
    return _differs(item, float(right), 1.0, state)


def _what_is_wrong(text: str, extracted: str | None, finish: str) -> str:
    if finish == "invalid":
        return "invalid"
    if not text.strip():
        return "empty"
    if extracted is None:
        return "truncated" if finish == "length" else "unparsed"
    return "wrong"


_WEIGHTS: Final = {
    "nll": "tokens",
    "nats": "tokens",
    "word_nll": "words",
    "byte_nll": "bytes",
    "nats_per_byte": "bytes",
}

_DIVERGENCES: Final[Mapping[str, Callable[[Mapping[str, float]], float]]] = {
    "reverse_kl": lambda detail: detail["reverse_kl"],
    "delta_nll": lambda detail: detail["nll"] - detail["dense_nll"],
    "excess_ppl": lambda detail: detail["nll"] - detail["dense_nll"],
}


def _reading_fault(item: Item, detail: Mapping[str, Any]) -> str:
    # The tiny world's rows hold the log-likelihood as their value only.
    value = -detail["loglikelihood"] if "loglikelihood" in detail else item.value
    return _differs(item, value, float(detail[_WEIGHTS[item.metric]]), "ok")
