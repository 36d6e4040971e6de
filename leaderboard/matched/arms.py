"""The arms of the page: the unpruned model and MoNE's masks, at 16 bits and quantized, of one calibration text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from prunebench.analysis import Found, Selector, Shelf
from prunebench.analysis.arms import UnfoundError

__all__ = ["ARITHMETIC", "GENERAL", "MODELS", "OPERATORS", "RATIOS", "SETTINGS", "Arm", "arms_of", "front"]

MODELS: Final = ("tiny-olmoe", "tiny-deepseek-v2", "tiny-moonlight", "tiny-granite")
RATIOS: Final = ("0.25", "0.5")
OPERATORS: Final = ("constant", "reroute@trained", "tilt")
PARAMETERS: Final = {"tilt": (("rank", 8),)}
SETTINGS: Final = (None, "w4", "w3", "mc3a4", "e3a4", "e2a4", "w2")
"""None is 16 bits; the unpruned model has all of them, pruned arms the first three."""
GENERAL: Final = "world:general"
ARITHMETIC: Final = "world:arithmetic"


@dataclass(frozen=True)
class Arm:
    """One arm with its run.

    Args:
        model: its name.
        ratio: pruned, as typed; None for the unpruned model.
        operator: with scale; None for the unpruned model.
        quantize: setting, or None for 16 bits.
        run: its record.
    """

    model: str
    ratio: str | None
    operator: str | None
    quantize: str | None
    run: Found

    @property
    def bytes(self) -> int:
        """Of its checkpoint, without padding."""
        return int(self.run.record["storage"]["total"])

    @property
    def name(self) -> str:
        """In words."""
        pruned = "" if self.ratio is None else f"{100 * float(self.ratio):g} % {self.operator}"
        return " ".join(filter(None, [pruned or "unpruned", self.quantize or "16 bits"]))


def arms_of(shelf: Shelf, model: str, text: str = GENERAL) -> list[Arm]:
    """A model's arms that the records hold, calibrated on one text: the unpruned ones first."""
    arms = []
    for setting in SETTINGS:
        wanted = Selector(model=model, dense=True, quantize=setting, text=text)
        arms += [Arm(model, None, None, setting, run) for run in _found(shelf, wanted)]
    for ratio in RATIOS:
        for operator in OPERATORS:
            for setting in SETTINGS[:3]:
                wanted = Selector(
                    model=model,
                    mask="mone",
                    ratio=ratio,
                    operator=operator,
                    parameters=PARAMETERS.get(operator, ()),
                    text=text,
                    draw="A",
                    quantize=setting,
                )
                arms += [Arm(model, ratio, operator, setting, run) for run in _found(shelf, wanted)]
    return arms


def _found(shelf: Shelf, wanted: Selector) -> Iterable[Found]:
    try:
        yield shelf.find(wanted)
    except UnfoundError:
        return


def front(points: Sequence[tuple[int, float]]) -> list[bool]:
    """Which of (bytes, score) nobody beats: no other has at most the bytes and at least the score, and one of both."""
    return [
        not any(
            (b <= own_bytes and s >= own_score) and (b < own_bytes or s > own_score)
            for other, (b, s) in enumerate(points)
            if other != at
        )
        for at, (own_bytes, own_score) in enumerate(points)
    ]
