"""A track: a TOML file that names the arms of a grid.

    [track]
    name = "demo"
    models = ["tiny-olmoe"]
    ratios = ["0.5"]                       # or keep = [16]
    masks = ["mone", "reap", "random"]     # criteria by name or path
    operators = ["constant", "reroute@trained", "reroute@other"]
    suites = ["multiple_choice", "arithmetic", "code", "perplexity"]
    calibration = { text = "world:general", blocks = 256, length = 128, draws = ["A"] }

Every model also gets its dense arm, first. `operator@scale` sets the gate scale.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunebench.errors import UsageError
from prunebench.run.arm import DEFAULT_SUITES, ArmSpec

__all__ = ["Track", "read_track"]

_KEYS: dict[str, type] = {
    "name": str,
    "models": list,
    "ratios": list,
    "keep": list,
    "masks": list,
    "operators": list,
    "suites": list,
    "calibration": dict,
    "seed": int,
}
_CALIBRATION: dict[str, type] = {"text": str, "blocks": int, "length": int, "draws": list}


@dataclass(frozen=True)
class Track:
    """A named list of arms, dense ones first within each model."""

    name: str
    arms: tuple[ArmSpec, ...]


def _checked(data: Mapping[str, Any], keys: Mapping[str, type], where: str) -> Mapping[str, Any]:
    for key, value in data.items():
        if key not in keys:
            close = difflib.get_close_matches(key, keys, n=1)
            raise UsageError(
                f"unknown key {key!r}",
                where=where,
                expected=", ".join(keys),
                fix=f"did you mean {close[0]}?" if close else "",
            )
        if not isinstance(value, keys[key]) or isinstance(value, bool):
            raise UsageError(f"{key} is a {type(value).__name__}", where=where, expected=f"a {keys[key].__name__}")
        if isinstance(value, list):
            _check_entries(key, value, where)
    return data


def _check_entries(key: str, entries: list[Any], where: str) -> None:
    if not entries:
        raise UsageError(f"{key} is empty", where=where, expected="at least one entry")
    kinds: tuple[type, ...] = {"keep": (int,), "ratios": (str, int, float)}.get(key, (str,))
    for entry in entries:
        if not isinstance(entry, kinds) or isinstance(entry, bool):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise UsageError(f"{key} holds {entry!r}", where=where, expected=f"entries of type {names}")


def read_track(path: Path, **options: Any) -> Track:
    """Read a track file and expand it to arms.

    Args:
        path: the TOML file.
        options: `ArmSpec` fields for every arm that a track does not set, such as device, dtype, limit.

    Raises:
        UsageError: unreadable, not TOML, unknown or missing keys.
    """
    where = str(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError("cannot read the track", where=where, fix=str(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError("the track is not TOML", where=where, fix=str(error)) from error
    if set(data) != {"track"} or not isinstance(data["track"], dict):
        raise UsageError("not a track", where=where, expected="one table [track]")
    track = _checked(data["track"], _KEYS, where)
    if missing := [key for key in ("name", "models", "masks", "operators") if key not in track]:
        raise UsageError(f"the track lacks {', '.join(missing)}", where=where)
    if ("ratios" in track) == ("keep" in track):
        raise UsageError("the track needs exactly one of ratios and keep", where=where)
    calibration = _checked(track.get("calibration", {}), _CALIBRATION, f"{where}, calibration")
    shared: dict[str, Any] = {
        **{key: value for key, value in calibration.items() if key != "draws"},
        **({"seed": track["seed"]} if "seed" in track else {}),
        "suites": tuple(track.get("suites", DEFAULT_SUITES)),
        **options,
    }
    amounts = [{"ratio": str(x)} for x in track.get("ratios", [])] + [{"keep": x} for x in track.get("keep", [])]
    arms = []
    for model in track["models"]:
        arms.append(ArmSpec(model=model, **shared))
        for draw in calibration.get("draws", ["A"]):
            for amount in amounts:
                for mask in track["masks"]:
                    for entry in track["operators"]:
                        operator, _, scale = entry.partition("@")
                        arms.append(
                            ArmSpec(
                                model=model,
                                method=mask,
                                operator=operator,
                                scale=scale or None,
                                draw=draw,
                                **amount,
                                **shared,
                            )
                        )
    _check_distinct(arms, where)
    return Track(track["name"], tuple(arms))


def _check_distinct(arms: list[ArmSpec], where: str) -> None:
    """Refuse an arm that is there already, and two arms whose runs would be written to one folder."""
    first: dict[str, ArmSpec] = {}
    for arm in arms:
        other = first.setdefault(arm.folder, arm)
        if other is arm:
            continue
        if other == arm:
            raise UsageError(f"the track names {arm.folder} twice", where=where)
        one, two = (f"{x.model} with {x.method}, {x.operator}" for x in (other, arm))
        raise UsageError(
            f"two arms would share the folder {arm.folder}",
            where=where,
            expected="files and models of different names",
            fix=f"rename one: {one}; {two}",
        )
