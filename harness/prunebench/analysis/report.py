"""Answers as a text table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import tabulate

from prunebench.analysis.bootstrap import LEVEL, RESAMPLES, SEED
from prunebench.analysis.contrasts import Answer, Gap
from prunebench.analysis.declared import Declaration

__all__ = ["LEGEND", "Report", "shown_adjusted", "shown_bound", "shown_difference", "shown_draws", "shown_p"]

LEGEND: Final = (
    "‡ survives Holm over all, † within its family only, * by itself only. bound: the largest difference not ruled out "
    "(90 %). detects: what would be found with power 0.8. every draw: whether the sign is one on every calibration draw"
)


def shown_p(p: float) -> str:
    """A p-value as 2610.41366 prints it: three decimals, below 0.001 two digits, and 1 as it is."""
    return "1" if p >= 0.9995 else f"{p:.3f}" if p >= 0.001 else f"{p:.1e}".replace("e-0", "e-")


def shown_adjusted(p: float | None) -> str:
    """An adjusted p-value: three decimals, and 1 as it is; nothing where nothing was corrected."""
    return "—" if p is None else "1" if p >= 0.9995 else f"{p:.3f}"


def shown_bound(bound: float | None, digits: int) -> str:
    """A bound, or that there is none."""
    return "—" if bound is None else f"{bound:.{digits}f}"


def shown_difference(answer: Answer) -> str:
    """Estimate, interval and mark."""
    d, digits = answer.difference, 3 if answer.lower_is_better else 2
    return f"{d.value:+z.{digits}f} [{d.low:+z.{digits}f}, {d.high:+z.{digits}f}]{answer.mark}"


def shown_draws(answer: Answer) -> str:
    """Whether the sign is one on every calibration draw (2610.41366 §3: "established")."""
    if answer.missing:
        return f"{len(answer.missing)} missing"
    return {None: "one draw", True: "same sign", False: "sign changes"}[answer.established]


@dataclass(frozen=True)
class Report:
    """What came of a declaration on some records.

    Args:
        declaration: the file.
        answers: of declared contrasts and exploratory ones.
        gaps: what could not be answered.
    """

    declaration: Declaration
    answers: Sequence[Answer]
    gaps: Sequence[Gap]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        method = "paired, task-stratified item bootstrap, percentile interval; Holm within families and over all"
        return {
            "declaration": self.declaration.to_json(),
            "method": method,
            "resamples": RESAMPLES,
            "seed": SEED,
            "level": LEVEL,
            "contrasts": [answer.to_json() for answer in self.answers],
            "not_measured": [
                {"family": gap.question.family, "label": gap.question.label, "reason": gap.reason} for gap in self.gaps
            ],
        }

    def counts(self) -> str:
        """How many contrasts there are, and how many are significant alone and after each correction."""
        declared = [answer for answer in self.answers if not answer.question.exploratory]
        verdicts = [str(answer.verdict) for answer in declared]
        kept = verdicts.count("both") + verdicts.count("table")
        return (
            f"{len(declared)} declared contrasts: {len(verdicts) - verdicts.count('n.s.')} significant by themselves, "
            f"{kept} after Holm within their family, {verdicts.count('both')} after Holm over all; "
            f"{len(self.answers) - len(declared)} exploratory, {len(self.gaps)} not measured"
        )

    def text(self) -> str:
        """The table, with the file, its date and its hash."""
        d = self.declaration
        head = ["family", "contrast", "Δ [95 % CI]", "p", "Holm family", "Holm all", "verdict", "bound", "detects"]
        head += ["every draw"]
        rows = [_row(answer) for answer in self.answers]
        align = ["left", "left", "right", "right", "right", "right", "left", "right", "right", "left"]
        table = tabulate.tabulate(rows, head, tablefmt="simple", disable_numparse=True, colalign=align)
        lines = [f"families: {d.name}, {d.date.isoformat()}, sha256 {d.sha256}"] + [d.note] * bool(d.note)
        lines += ["", table, "", self.counts(), LEGEND]
        for family in dict.fromkeys(gap.question.family for gap in self.gaps):
            own = [gap for gap in self.gaps if gap.question.family == family]
            lines.append(f"not measured: {family}: {len(own)}, such as {own[0].question.label} ({own[0].reason})")
        return "\n".join(lines)


def _row(answer: Answer) -> list[str]:
    digits = 3 if answer.lower_is_better else 2
    return [
        answer.question.family,
        answer.question.label,
        shown_difference(answer),
        shown_p(answer.p),
        shown_adjusted(answer.holm_family),
        shown_adjusted(answer.holm_all),
        str(answer.verdict) if answer.verdict else "exploratory",
        shown_bound(answer.bound, digits),
        shown_bound(answer.detectable, digits),
        shown_draws(answer),
    ]
