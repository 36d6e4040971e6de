"""The page: what was read, what every word means, one line per finding, then the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leaderboard.findings.budgets import budgets
from leaderboard.findings.crossing import crossing
from leaderboard.findings.domain import in_domain
from leaderboard.findings.drift import mask_drift
from leaderboard.findings.evidence import Evidence, gather
from leaderboard.findings.fits import fits
from leaderboard.findings.generation import generative_damage, operator_ranks
from leaderboard.findings.limits import not_measurable
from leaderboard.findings.noise import calibration_noise
from leaderboard.findings.order import operator_order
from leaderboard.findings.refits import refits
from leaderboard.findings.replacement import replacement
from leaderboard.findings.routing import gate_mass
from leaderboard.findings.scale import trained_scale
from leaderboard.findings.survivors import survivors
from leaderboard.findings.text import Section, Table, escaped, prose
from leaderboard.findings.verdicts import CONTRAST_RULE, TALLY_RULE

from prunebench.analysis import RESAMPLES, SEED
from prunebench.errors import PrerequisiteError
from prunebench.mask import write_atomically

__all__ = ["Written", "results_page", "write_results"]

_SECTIONS = (
    trained_scale,
    operator_order,
    generative_damage,
    mask_drift,
    in_domain,
    crossing,
    calibration_noise,
    operator_ranks,
    gate_mass,
    replacement,
    budgets,
    survivors,
    fits,
    refits,
    not_measurable,
)


@dataclass(frozen=True)
class Written:
    """The page that was written, how many runs are behind it, how many cells have none, and what was left out."""

    path: Path
    runs: int
    gaps: int
    left_out: tuple[str, ...]


def write_results(records: Path, out: Path) -> Written:
    """Write the page for all whole runs under a folder.

    Raises:
        PrerequisiteError: if there is no whole run.
        UsageError: if there is no such folder, or `out` is not writable.
    """
    evidence = gather(records)
    if not evidence.read:
        detail = f"left out: {evidence.left_out[0]}" if evidence.left_out else "make some with prunebench grid"
        raise PrerequisiteError("no complete run to read", where=str(records), fix=detail)
    page = results_page(evidence)
    write_atomically(out, page.encode(errors="replace"))
    return Written(out, evidence.read, page.count("not measurable: "), tuple(map(str, evidence.left_out)))


def results_page(evidence: Evidence) -> str:
    """The page as Markdown."""
    sections = [make(evidence) for make in _SECTIONS]
    rows = [
        (f"{number}", summary.finding, summary.claim, summary.verdict)
        for number, section in enumerate(sections, start=1)
        for summary in section.summaries
    ]
    parts = [
        "# Results: findings of arXiv 2610.41366 on the models at hand",
        _introduction(evidence, sections),
        Table(("section", "finding", "in the paper", "here"), tuple(rows)).markdown(),
        *(section.markdown(number) for number, section in enumerate(sections, start=1)),
        *_left_out(evidence),
    ]
    return "\n\n".join(parts) + "\n"


def _introduction(evidence: Evidence, sections: Sequence[Section]) -> str:
    contrasts = sum(section.contrasts for section in sections)
    models = escaped(", ".join(map(str, evidence.models)))
    points = {
        "Numbers": """
            computed again from per-item outcomes. Accuracies and their differences are in points, perplexity is its
            natural logarithm (lower is better). Suites of several tasks: the mean over tasks.
        """,
        "Intervals": f"""
            paired, task-stratified item bootstrap (B = {RESAMPLES:,}, seed {SEED}, 95 % percentiles). They cover the
            choice of test items only: not the calibration text, and not the training of a model.
        """,
        "No correction": f"""
            the page holds intervals against zero {contrasts:,} times, one by one, some in several places. It is
            exploratory: where nothing differs, one in twenty would still exclude zero. Where the paper's rule "same
            sign on every draw" is applied, it says so.
        """,
        "A case": f"{CONTRAST_RULE}. Other rules are stated at their table.",
        "A finding": f"{TALLY_RULE}.",
    }
    return "\n".join(
        [
            f"Written by `python -m leaderboard.findings` from {evidence.read} runs. Do not edit: run it again.",
            "",
            f"Models, with the gate scale that each router was trained with: {models}.",
            "",
            *(f"- **{term}**: {prose(meaning)}" for term, meaning in points.items()),
        ]
    )


def _left_out(evidence: Evidence) -> list[str]:
    if not evidence.left_out:
        return []
    rows = tuple((one.path.as_posix(), one.reason) for one in evidence.left_out)
    return ["## Left out", Table(("folder", "why"), rows).markdown()]
