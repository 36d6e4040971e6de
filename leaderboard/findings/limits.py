"""Findings of the paper that these records cannot speak to, and what they lack for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from leaderboard.findings.evidence import Evidence
from leaderboard.findings.text import Section, Summary, Table

__all__ = ["not_measurable"]


@dataclass(frozen=True)
class _Limit:
    """A finding out of reach.

    Args:
        finding: what the paper says, with its place.
        needs: what would show it.
        operators: names of operators of which a run would be needed, if that is what is missing.
    """

    finding: str
    needs: str
    operators: tuple[str, ...] = ()


_LIMITS: Final = (
    _Limit(
        "The tilt beats the constant where damage is left; no operator is best everywhere (§4.1, §4.2)",
        "runs of the tilt",
        ("tilt",),
    ),
    _Limit(
        "A copy of the top neurons equals the tilt at its budget; SVD copies do not help (§4.3, App. C)",
        "runs of partial copies",
        ("copy", "neurons", "svd"),
    ),
    _Limit(
        "More experts kept buy less than the tilt (§4.3)",
        "runs of the tilt, and masks that keep one or two more",
        ("tilt",),
    ),
    _Limit(
        "Slot remapping, weight compensation and proxies do not reach rerouting (§5.2)",
        "runs of ConMoE, COMPEL and MoRA",
        ("conmoe", "compel", "mora"),
    ),
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


def not_measurable(evidence: Evidence) -> Section:
    """A table of what is out of reach; it says so where runs of a missing operator have appeared."""
    present = evidence.operators_of()
    rows = tuple((limit.finding, limit.needs, _state(limit, present)) for limit in _LIMITS)
    blocks = (
        "What the paper finds and this page does not measure, and what would be needed.",
        Table(("finding", "needs", "records"), rows),
    )
    summary = Summary(
        f"{len(_LIMITS)} further findings", "Listed in the last section.", "**not measurable**: see there"
    )
    return Section("Not measurable here", blocks, (summary,))


def _state(limit: _Limit, present: frozenset[str]) -> str:
    if not limit.operators:
        return "not in these records, or not read by this page"
    found = sorted(name for name in limit.operators if name in present)
    missing = sorted(set(limit.operators) - set(found))
    parts = [f"there are runs of {', '.join(found)}, which this page does not read"] * bool(found)
    return "; ".join(parts + [f"no run of {', '.join(missing)}"] * bool(missing))
