"""What a budget buys: a tilt, a partial copy, more of either, or one more expert per layer (§4.3, App. B.6, C, H.4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from leaderboard.findings.evidence import RATIOS, SUITES, Arm, Draw, Evidence, NotMeasurableError, Suite, pruned
from leaderboard.findings.operators import (
    CONSTANT,
    LARGER_NEURONS,
    LARGER_SVD,
    NEURONS,
    SMALL_TILT,
    SVD,
    TILT,
    WHITENED,
)
from leaderboard.findings.settings import HELD, MASKS, Setting, settings_of
from leaderboard.findings.text import (
    Grid,
    Section,
    Summary,
    Table,
    columns_of,
    contrasts_in,
    grid_table,
    percent,
    prose,
    summed_up,
    titles_of,
)
from leaderboard.findings.verdicts import Cell, attempt, compared, judged

from prunebench.analysis.bootstrap import Sampled
from prunebench.mask import Mask

__all__ = ["budgets", "one_more_kept"]

_MORE: Final = "one more expert per layer"
_BOUND_LEVEL: Final = 0.90  # of the interval that two one-sided tests at 5 % ask for


@dataclass(frozen=True)
class _Pair:
    """Two arms of one mask.

    Args:
        one: an operator.
        other: the one subtracted, or one more expert with the constant.
        claimed: 1 if the paper puts the first above; 0 if it calls them close, or neither above.
        bounded: whether a difference is also bounded, as the paper does where it calls two close.
    """

    one: str
    other: str
    claimed: int = 0
    bounded: bool = False

    def __str__(self) -> str:
        return f"{self.one} − {self.other}"


_CLOSE: Final = _Pair(NEURONS, TILT, bounded=True)
_BEHIND: Final = (_Pair(TILT, SVD, 1), _Pair(TILT, WHITENED, 1))
_NO_HELP: Final = (_Pair(SVD, CONSTANT), _Pair(WHITENED, CONSTANT))
_RANK: Final = _Pair(TILT, SMALL_TILT, 1)
_LARGER: Final = _Pair(LARGER_NEURONS, TILT, 1)
_LARGER_SVD: Final = _Pair(LARGER_SVD, CONSTANT)
_EXTRA: Final = _Pair(TILT, _MORE, 1)
_EVERYWHERE: Final = (_CLOSE, *_BEHIND, *_NO_HELP, _RANK)
_PAIRS: Final = (*_EVERYWHERE, _LARGER, _LARGER_SVD, _EXTRA)
_FINDINGS: Final = (
    (
        "A copy of the top neurons differs from the tilt at its budget",
        (_CLOSE,),
        "Not on OLMoE and DeepSeek-V2-Lite (beyond 0.81 and 0.73 points); behind the tilt on Moonlight (-0.66).",
    ),
    (
        "The tilt beats SVD copies of its budget",
        _BEHIND,
        "OLMoE: whitened SVD +3.78 points; plain SVD near the constant.",
    ),
    (
        "SVD copies beat the constant, at the tilt's budget or four times it",
        (*_NO_HELP, _LARGER_SVD),
        "Not detectably, even at four times the budget.",
    ),
    (
        "A higher rank helps the tilt",
        (_RANK,),
        "On OLMoE it rises with rank (8, 32, 64, 128); rank 8 has most of the gain there and little elsewhere.",
    ),
    (
        "At four times the budget the neuron copy overtakes the tilt",
        (_LARGER,),
        "On OLMoE: +1.50 over the rank-32 tilt; level with the tilt of rank 128.",
    ),
    (
        "The tilt beats one more expert kept per layer",
        (_EXTRA,),
        prose("""
            Rank 8 on OLMoE +1.65, at a sixth of the parameters; rank 32 on Moonlight +0.84 and not detectable on
            DeepSeek-V2-Lite (-0.37), at half.
        """),
    ),
)


def budgets(evidence: Evidence) -> Section:
    """Pairs of arms of one mask, with what they store."""
    held: Grid = {
        (str(pair), str(model), column): attempt(partial(_cell, evidence, pair, Setting(model), column))
        for pair in _PAIRS
        for model in evidence.models
        for column in ("stored", *(suite.name for suite in SUITES))
    }
    elsewhere = {
        (pair, criterion, ratio, suite): [
            attempt(partial(_difference, evidence, pair, setting, suite))
            for setting in settings_of(evidence, ratio, criterion)
        ]
        for pair in _EVERYWHERE
        for ratio in RATIOS
        for criterion in MASKS
        if (criterion, ratio) != ("mone", HELD)
        for suite in SUITES
    }

    def of(pairs: Iterable[_Pair], suite: Suite) -> str:
        cells = [held[str(pair), str(model), suite.name] for pair in pairs for model in evidence.models]
        return f"{suite.title}: {summed_up(cells, 'cases')}"

    summaries = tuple(
        Summary(f"{finding}, {percent(HELD)} pruned", claim, "\n".join(of(pairs, suite) for suite in SUITES))
        for finding, pairs, claim in _FINDINGS
    )
    blocks = (
        prose(f"""
            MoNE's mask of general draw A, {percent(HELD)} pruned, the fits from the same draw. A copy is named by the
            tilt whose two maps its factors fit under, times=4 at four times that. Stored: bytes of the two checkpoints
            beyond the constant's, fills in the dtype of the experts. Claimed, where seen or reversed is said: above
            zero; for perplexity below zero. Where the paper calls two close there is no claim but better or worse, and
            ± bounds what the items leave open: the difference lies within it by two one-sided tests at 5 % (the 90 %
            interval).
        """),
        grid_table(held, {"stored": "stored (kB)"} | columns_of(SUITES), group="pair"),
        prose("""
            The same pairs on the other masks and ratios, counted over the models.
        """),
        _elsewhere_table(elsewhere),
    )
    contrasts = contrasts_in(held) + sum(cell.contrasts for cells in elsewhere.values() for cell in cells)
    return Section("What a budget buys (§4.3, App. B.6, C.2, H.4)", blocks, summaries, contrasts)


def one_more_kept(evidence: Evidence, setting: Setting) -> Arm:
    """The constant on the mask of the same criterion that keeps one more expert in every layer."""
    model = setting.model.name
    mask = evidence.mask(model, setting.ratio, Draw(), setting.criterion).mask
    counts = {layer.index: layer.experts for layer in mask.layers}
    share = (mask.pruned_count - len(counts)) / sum(counts.values())
    arm = pruned(model, f"{share:.6g}", CONSTANT, criterion=setting.criterion)
    found = Mask.from_json(evidence.find(arm).record["mask"])
    if any(len(found.pruned_of(index)) + 1 != len(mask.pruned_of(index)) for index in counts):
        raise NotMeasurableError(f"{arm} does not keep one more expert in every layer")
    return arm


def _arms(evidence: Evidence, pair: _Pair, setting: Setting) -> tuple[Arm, Arm]:
    other = one_more_kept(evidence, setting) if pair.other == _MORE else setting.arm(pair.other)
    return setting.arm(pair.one), other


def _cell(evidence: Evidence, pair: _Pair, setting: Setting, column: str) -> Cell:
    if column == "stored":
        constant = evidence.stored_bytes(setting.arm(CONSTANT))
        stored = [evidence.stored_bytes(arm) - constant for arm in _arms(evidence, pair, setting)]
        return Cell(" / ".join(f"{more / 1000:+.1f}" for more in stored))
    return _difference(evidence, pair, setting, next(suite for suite in SUITES if suite.name == column))


def _difference(evidence: Evidence, pair: _Pair, setting: Setting, suite: Suite) -> Cell:
    difference = evidence.contrast(*_arms(evidence, pair, setting), suite)
    if pair.claimed:
        return judged(difference, claimed=pair.claimed * suite.better, digits=suite.digits)
    cell = compared(difference, better=suite.better, digits=suite.digits)
    bound = f" ±{_bound(difference):.{suite.digits}f}" if pair.bounded else ""
    return Cell(f"{cell.text}{bound}", side=cell.side, contrasts=cell.contrasts)


def _bound(difference: Sampled) -> float:
    """The smallest δ such that the 90 % interval lies within ±δ (App. H.2)."""
    interval = difference.interval(_BOUND_LEVEL)
    return max(abs(interval.low), abs(interval.high))


def _elsewhere_table(elsewhere: dict[tuple[_Pair, str, str, Suite], list[Cell]]) -> Table:
    settings = dict.fromkeys(key[:3] for key in elsewhere)
    rows = tuple(
        (
            str(pair),
            criterion,
            percent(ratio),
            *(summed_up(elsewhere[pair, criterion, ratio, suite], "models") for suite in SUITES),
        )
        for pair, criterion, ratio in settings
    )
    return Table(("pair", "mask", "pruned", *titles_of(SUITES).values()), rows)
