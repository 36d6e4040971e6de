"""What a track will cost before it is run: bytes of each model's weights, and hours where runs are there to go by."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from prunebench.record import RECORD_FILE
from prunebench.run.arm import PreparedArm
from prunebench.storage import read_headers

__all__ = ["Estimate", "estimates", "estimates_text"]

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Estimate:
    """One model's part of a track.

    Args:
        model: its name.
        arms: all of them.
        missing: those without a run folder.
        weights: bytes of the dense model in the dtype asked for; statistics and activations come on top.
        seconds: for the missing arms, from the median of this model's recorded runs; None where there is none.
    """

    model: str
    arms: int
    missing: int
    weights: int
    seconds: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def estimates(arms: Sequence[PreparedArm], out: Path) -> list[Estimate]:
    """What is left of a track, model by model.

    Args:
        arms: the track's, checked.
        out: records folder; its runs say how long an arm takes on this machine.
    """
    by_model: dict[str, list[PreparedArm]] = {}
    for arm in arms:
        by_model.setdefault(arm.known["model"]["name"], []).append(arm)
    found = []
    for model, own in by_model.items():
        folders = [out / arm.spec.folder for arm in own]
        took = [seconds for folder in folders if (seconds := _seconds(folder)) is not None]
        missing = sum(not (folder / RECORD_FILE).is_file() for folder in folders)
        values = sum(math.prod(tensor.shape) for tensor in read_headers(own[0].folder).values())
        seconds = missing * statistics.median(took) if took else 0.0 if not missing else None
        found.append(Estimate(model, len(own), missing, values * _BYTES[own[0].spec.dtype], seconds))
    return found


def _seconds(folder: Path) -> float | None:
    """How long a recorded run took."""
    try:
        volatile = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))["volatile"]
        return float(volatile["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def estimates_text(found: Sequence[Estimate]) -> str:
    """A line per model."""
    return "\n".join(
        f"{one.model}: {one.missing} of {one.arms} arms to run, weights {one.weights / 1e9:.3g} GB, "
        + ("time unknown before its first run" if one.seconds is None else f"about {one.seconds / 3600:.1f} h")
        for one in found
    )
