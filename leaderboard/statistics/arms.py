"""Which operators the records hold on MoNE's masks of one draw, by model and ratio; all of them are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from leaderboard.findings.evidence import GENERAL, trained_scale

from prunebench.analysis import Found, Shelf
from prunebench.mask import canonical_json

__all__ = ["CONSTANT", "DRAW", "MASK", "OTHER", "TRAINED", "Grid"]

MASK: Final = "mone"
DRAW: Final = "A"
CONSTANT: Final = "constant"
TRAINED: Final = "reroute@trained"
OTHER: Final = "reroute@other"


@dataclass(frozen=True)
class Grid:
    """The arms on one criterion's masks, mask and fit of one draw.

    Args:
        models: name to the gate scale that the router was trained with, in words.
        ratios: as typed, increasing.
        operators: labels, the constant and rerouting first.
        dense: by model.
        arms: by model, ratio and operator.
    """

    models: dict[str, str]
    ratios: tuple[str, ...]
    operators: tuple[str, ...]
    dense: dict[str, Found]
    arms: dict[tuple[str, str, str], Found]

    @classmethod
    def of(cls, shelf: Shelf) -> Grid:
        """Everything that the shelf has."""
        own = [run for run in shelf.runs if _belongs(run)]
        labels = _labels(own)
        arms: dict[tuple[str, str, str], Found] = {}
        for run, label in zip(own, labels, strict=True):
            arms[run.record["arm"]["model"], str(run.ratio), label] = run
        first = [CONSTANT, TRAINED, OTHER]
        operators = [name for name in first if name in labels] + sorted(set(labels) - set(first))
        dense = {run.record["arm"]["model"]: run for run in shelf.runs if run.record["arm"]["dense"]}
        runs = [*dense.values(), *own]
        trained = {run.record["arm"]["model"]: trained_scale(run.record["arm"]) for run in runs}
        models = dict(sorted(trained.items(), key=lambda entry: (entry[1], entry[0])))
        ratios = sorted({str(run.ratio) for run in own}, key=float)
        return cls(models, tuple(ratios), tuple(operators), dense, arms)

    def arm(self, model: str, ratio: str, operator: str) -> Found | None:
        """The run of an operator, if there is one."""
        return self.arms.get((model, ratio, operator))

    def title(self, model: str) -> str:
        """A model with its trained scale."""
        return f"{model} ({self.models[model]})"


def _belongs(run: Found) -> bool:
    arm, identity = run.record["arm"], run.record["identity"]
    if arm["dense"] or arm["mask"] != MASK or run.ratio is None or identity["mask"]["source"] == "file":
        return False
    if identity.get("operator_layers") or (identity["operator"] or {}).get("name") == MASK:
        return False
    drawn = (run.calibration(part) for part in ("mask", "fit"))
    return all(one is None or (one["text"], one["draw"]) == (GENERAL, DRAW) for one in drawn)


def _labels(runs: Sequence[Found]) -> list[str]:
    """The operator of each run, with the parameters in which runs of it differ, and what else tells two runs apart."""
    varying = {
        name: {
            key
            for run in runs
            if run.operator == name
            for key, value in run.parameters.items()
            if any(_differs(other.parameters, key, value) for other in runs if other.operator == name)
        }
        for name in {run.operator for run in runs}
    }
    labels = [_label(run, sorted(varying[run.operator])) for run in runs]
    places = [(run.record["arm"]["model"], run.ratio, label) for run, label in zip(runs, labels, strict=True)]
    return [
        label if places.count(place) == 1 else f"{label} [{run.record['run_id']}]"
        for run, label, place in zip(runs, labels, places, strict=True)
    ]


def _differs(parameters: dict[str, Any], key: str, value: object) -> bool:
    return canonical_json([parameters.get(key)]) != canonical_json([value])


def _label(run: Found, varying: Iterable[str]) -> str:
    stated = ", ".join(f"{key}={run.parameters[key]}" for key in varying if key in run.parameters)
    return f"{run.operator} {stated}".strip()
