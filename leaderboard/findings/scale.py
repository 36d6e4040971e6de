"""The trained-scale rule: rerouting at the router's trained gate scale against the other one (Table 1, §5.1, §5.3)."""

from __future__ import annotations

from typing import Final

from leaderboard.findings.evidence import CRITERIA, OTHER, SUITES, TRAINED, Evidence, Suite, pruned
from leaderboard.findings.text import (
    Section,
    Summary,
    claims,
    columns_of,
    contrasts_in,
    grid_table,
    prose,
    suite_grid,
    tallies,
    titles_of,
)
from leaderboard.findings.verdicts import Cell, direction, judged

from prunebench.analysis.bootstrap import Sampled

__all__ = ["trained_scale"]

_CLAIMS: Final = {
    "0.25": "Seen on OLMoE (+4.50 points, nine choice tasks) and DeepSeek-V2-Lite (+0.79); "
    "not detectable on Moonlight (-0.17) and Granite (+0.28).",
    "0.5": "Seen on all four routers: OLMoE +3.39, DeepSeek-V2-Lite +4.67, Moonlight +1.68, Granite +2.08 points.",
    "0.75": "Seen on OLMoE (+3.09), DeepSeek-V2-Lite (+8.47) and Moonlight (+1.60); not detectable on Granite (+0.27).",
}
_OTHER_MASKS: Final = "REAP's mask, 50 %: OLMoE +1.88, DeepSeek-V2-Lite +3.88 points."


def trained_scale(evidence: Evidence) -> Section:
    """Trained minus other scale on MoNE's mask, and on the mean of the other masks."""

    def on_mone(model: str, ratio: str, suite: Suite) -> Cell:
        difference = _difference(evidence, model, ratio, suite, CRITERIA[0])
        return judged(difference, claimed=suite.better, digits=suite.digits)

    def on_others(model: str, ratio: str, suite: Suite) -> Cell:
        single = [_difference(evidence, model, ratio, suite, criterion) for criterion in CRITERIA[1:]]
        mean = judged(Sampled.macro_mean(single), claimed=suite.better, digits=suite.digits)
        counts = [sum(direction(one) == side * suite.better for one in single) for side in (1, -1, 0)]
        return Cell(f"{mean.text} ({' / '.join(map(str, counts))})", mean.verdict, contrasts=1 + len(single))

    columns = columns_of(SUITES)
    own, others = suite_grid(evidence, on_mone), suite_grid(evidence, on_others)
    finding = "Rerouting does better at the gate scale that the router was trained with"
    summaries = (
        Summary(f"{finding} (MoNE's mask)", claims(_CLAIMS), tallies(own, titles_of(SUITES))),
        Summary(f"{finding} (mean of the other masks)", _OTHER_MASKS, tallies(others, titles_of(SUITES))),
    )
    blocks = (
        prose("""
            Rerouting at the trained scale minus rerouting at the other scale, on the same mask (general draw A). The
            trained scale of each router stands behind its model. Claimed: above zero; for perplexity below zero.
        """),
        "On MoNE's mask:",
        grid_table(own, columns),
        prose(f"""
            On the other masks ({", ".join(CRITERIA[1:])}), averaged in one paired contrast. In parentheses: on how
            many of them alone the interval is on the claimed side / on the other side / contains zero.
        """),
        grid_table(others, columns),
    )
    return Section("The trained-scale rule (Table 1, §5.1, §5.3)", blocks, summaries, contrasts_in(own, others))


def _difference(evidence: Evidence, model: str, ratio: str, suite: Suite, criterion: str) -> Sampled:
    one, other = (pruned(model, ratio, operator, criterion=criterion) for operator in (TRAINED, OTHER))
    return evidence.contrast(one, other, suite)
