"""Findings of the paper that these records cannot speak to, and what they lack for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from leaderboard.findings.evidence import Evidence
from leaderboard.findings.text import Section, Summary, Table, prose

__all__ = ["not_measurable"]


@dataclass(frozen=True)
class _Limit:
    """A finding out of reach: what the paper says, with its place, and what would show it."""

    finding: str
    needs: str


_LIMITS: Final = (
    _Limit(
        "The tilt's gain is less mask-dependent than rerouting's; SGE's and frequency's masks (§4.2, Table 5)",
        "runs of the tilt on masks of SGE and frequency",
    ),
    _Limit("The tilt goes on rising with rank, to 128 (§4.3)", "runs of higher ranks"),
    _Limit(
        "Two more experts kept per layer; whitened SVD at four times the budget; the tilt at it (§4.3, App. C)",
        "runs of them",
    ),
    _Limit(
        "The tilt in one layer only; a map shared by a layer; co-routed residuals (App. B.3, B.4)",
        "runs of the operator in single layers, and second moments, which a record does not hold",
    ),
    _Limit("The fit needs a thousand sequences (App. B.5)", "runs on smaller calibration texts"),
    _Limit("COMPEL and MoRA on masks of their own (App. D, H.7)", "their selections, of which no code is public"),
    _Limit("Fitted gains survive quantization and rerouting's erode; matched storage (§6.5)", "quantized runs"),
    _Limit(
        "Renormalization lowers ranking ability; answer bias on fixed-answer tasks (§5.1, §6.2, App. A.10)",
        "AUC and prior-matched accuracy, which this page does not compute",
    ),
    _Limit("Gains hold at five shots and under other scoring (§4.4)", "suites of the same tasks with five shots"),
    _Limit("The share of language-modelling damage recovered is stable over corpora (§4.5)", "a second corpus"),
    _Limit("One super expert explains frequency's failure (App. E.8)", "masks of single experts, and models with one"),
    _Limit(
        "Criteria that average over routed tokens are stable over draws (App. E.2)", "other criteria on draws B and C"
    ),
    _Limit("Rerouting gives up the prefill saving (§7, App. F.1)", "timings, which a record calls volatile"),
)


def not_measurable(_evidence: Evidence) -> Section:
    """A table of what is out of reach of this page, whatever the records."""
    rows = tuple((limit.finding, limit.needs) for limit in _LIMITS)
    blocks = (
        prose("""
            What the paper finds and this page does not measure, being not in these records or not read from them, and
            what would be needed.
        """),
        Table(("finding", "needs"), rows),
    )
    summary = Summary(
        f"{len(_LIMITS)} further findings", "Listed in the last section.", "**not measurable**: see there"
    )
    return Section("Not measurable here", blocks, (summary,))
