"""What answers for a pruned expert, by the names that a track file gives it: `tilt(rank=8)`, `compel@other`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = [
    "ANSWERING",
    "COMPEL",
    "COMPEL_OTHER",
    "CONSTANT",
    "FUNCTIONAL",
    "LARGER",
    "LARGER_NEURONS",
    "LARGER_SVD",
    "MORA",
    "NEAREST",
    "NEURONS",
    "OPERATORS",
    "OTHER",
    "SLOT_FILLING",
    "SMALL_TILT",
    "SURVIVORS",
    "SVD",
    "TILT",
    "TRAINED",
    "UNFITTED",
    "USUAL",
    "WHITENED",
    "called",
]

CONSTANT: Final = "constant"
TRAINED: Final = "reroute@trained"
OTHER: Final = "reroute@other"
OPERATORS: Final = (CONSTANT, TRAINED, OTHER)
"""Those of every mask of the track."""

SMALL_TILT: Final = "tilt(rank=4)"
TILT: Final = "tilt(rank=8)"
NEURONS: Final = "neurons(tilt_rank=8)"
SVD: Final = "svd(tilt_rank=8)"
WHITENED: Final = "svd-whitened(tilt_rank=8)"
SLOT_FILLING: Final = (SMALL_TILT, TILT, NEURONS, SVD, WHITENED)
"""Those that store something of each pruned expert."""

MORA: Final = "mora"
NEAREST: Final = "conmoe-nearest"
FUNCTIONAL: Final = "conmoe-functional"
COMPEL: Final = "compel"
COMPEL_OTHER: Final = "compel@other"
SURVIVORS: Final = (MORA, NEAREST, FUNCTIONAL, COMPEL, COMPEL_OTHER)
"""Those that hand a pruned expert's work to survivors, otherwise than by rerouting alone."""

LARGER_NEURONS: Final = "neurons(tilt_rank=8, times=4)"
LARGER_SVD: Final = "svd(tilt_rank=8, times=4)"
LARGER: Final = (LARGER_NEURONS, LARGER_SVD)

ANSWERING: Final = (*OPERATORS, *SLOT_FILLING, *SURVIVORS)
"""Those that are compared on one mask at every ratio."""

UNFITTED: Final = (TRAINED, OTHER, NEAREST)

USUAL: Final[Mapping[str, Mapping[str, Any]]] = {
    "tilt": {"rank": 32, "ridge": 1e-2, "clip": 4.0},
    "neurons": {"tilt_rank": 32, "times": 1},
    "svd": {"tilt_rank": 32, "times": 1},
    "svd-whitened": {"tilt_rank": 32, "times": 1, "damping": 1e-6},
    "mora": {"threshold": 0.4, "ridge": 1e-6, "scale": "trained"},
    "conmoe-nearest": {},
    "conmoe-functional": {"candidates": 4, "states": 64, "seed": 0},
    "compel": {"gamma": 0.1, "epsilon": 1e-12, "scale": "trained"},
}
"""What each operator's parameters are where nothing was asked for."""


def called(name: str, parameters: Mapping[str, Any], scale: str | None) -> str:
    """An operator of `USUAL` with every parameter that is not as usual, and its gate scale where that is another.

    Args:
        name: of the operator.
        parameters: as the record has them, all of them.
        scale: that was asked for in place of the operator's own, if any was.
    """
    usual = USUAL[name]
    own = {key: value for key, value in parameters.items() if key != "scale"}
    order = [*(key for key in usual if key in own), *sorted(set(own) - set(usual))]
    told = [f"{key}={own[key]}" for key in order if key not in usual or own[key] != usual[key]]
    scale = scale or parameters.get("scale")
    at = f"@{scale}" if scale not in (None, usual.get("scale")) else ""
    return f"{name}({', '.join(told)}){at}" if told else f"{name}{at}"
