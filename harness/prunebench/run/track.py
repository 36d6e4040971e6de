"""A track: a TOML file that names the arms of a leaderboard.

    [track]
    name = "demo"
    models = ["tiny-olmoe"]
    ratios = ["0.5"]                       # or keep = [16]
    masks = ["mone", "reap", "random"]     # criteria by name or path
    operators = ["constant", "reroute@trained", "reroute@other"]
    suites = ["multiple_choice", "arithmetic", "code", "perplexity"]
    calibration = { text = "world:general", blocks = 256, length = 128, draws = ["A"] }

Every model also gets its dense arm, first, unless the records of another track hold it (`dense = false`).
`operator@scale` sets the gate scale, and `name(parameter=value, …)` the parameters of a criterion or operator, as in
`tilt(rank=8)`. A track that is no single product of ratios, masks and operators has grids, which take from the track
what they do not say themselves (their `models` are some of the track's):

    [[grid]]                               # the mask held, the operator fitted anew
    masks = ["mone"]
    operators = ["constant"]
    fit = { draws = ["B", "C"] }           # text, blocks and length too, where they differ from the mask's
    quantize = ["w4"]                      # each arm of the grid quantized; `none` is among them if it is wanted too
    quant = { text = "world:arithmetic" }  # what the quantizer sees, where that differs from the mask's text

    [[grid]]                               # another budget: scope, and protect or spare, as `prunebench run` takes them
    masks = ["frequency"]
    operators = ["constant"]
    scope = "global"
    protect = "super"

`masks = ["dense"]` in a grid with `quantize` stands for the unpruned model, quantized, whatever
ratios and operators there are.
"""

from __future__ import annotations

import difflib
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunebench.errors import UsageError
from prunebench.run.spec import DEFAULT_SUITES, ArmSpec

__all__ = ["Track", "read_entry", "read_track"]

_GRID: dict[str, type] = {
    "models": list,
    "ratios": list,
    "keep": list,
    "masks": list,
    "operators": list,
    "calibration": dict,
    "fit": dict,
    "scope": str,
    "protect": str,
    "spare": str,
    "quantize": list,
    "quant": dict,
}
_BUDGET = ("scope", "protect", "spare")
# Of each, a grid says one: its own stands in place of the track's other.
_EITHER = ({"ratios", "keep"}, {"protect", "spare"})
_TRACK: dict[str, type] = {"name": str, "suites": list, "seed": int, "dense": bool, **_GRID}
DENSE = "dense"
_CALIBRATION: dict[str, type] = {"text": str, "blocks": int, "length": int, "draws": list}


@dataclass(frozen=True)
class Track:
    """A named list of arms; dense ones, if any, first within each model."""

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
        if not isinstance(value, keys[key]) or isinstance(value, bool) != (keys[key] is bool):
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
    if not set(data) <= {"track", "grid"} or not isinstance(data.get("track"), dict):
        raise UsageError("not a track", where=where, expected="one table [track], and tables [[grid]] if it needs them")
    track = _checked(data["track"], _TRACK, where)
    if missing := [key for key in ("name", "models") if key not in track]:
        raise UsageError(f"the track lacks {', '.join(missing)}", where=where)
    shared: dict[str, Any] = {
        **({"seed": track["seed"]} if "seed" in track else {}),
        "suites": tuple(track.get("suites", DEFAULT_SUITES)),
        **options,
    }
    grids = [_inherited(track, grid, place) for grid, place in _grids(data, where)]
    arms = []
    for model in track["models"]:
        if track.get("dense", True):
            arms.append(ArmSpec(model=model, **_sizes(track.get("calibration", {})), **shared))
        own = (grid for grid in grids if model in grid["models"])
        arms += [ArmSpec(model=model, **arm, **shared) for grid in own for arm in _product(grid)]
    _check_distinct(arms, where)
    return Track(track["name"], tuple(arms))


def _grids(data: Mapping[str, Any], where: str) -> list[tuple[Mapping[str, Any], str]]:
    """Every grid with its place in the file; a track without any is one itself."""
    if "grid" not in data:
        return [({}, where)]
    grids = data["grid"]
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        raise UsageError("grid is no list of tables", where=where, expected="[[grid]]")
    places = [f"{where}, grid {number}" for number in range(1, len(grids) + 1)]
    return [(_checked(grid, _GRID, place), place) for grid, place in zip(grids, places, strict=True)]


def _inherited(track: Mapping[str, Any], grid: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A grid with what it takes from its track; a grid's own `keep` stands in place of the track's `ratios`."""
    replaced = {key for either in _EITHER if either & set(grid) for key in either}
    taken = {key: track[key] for key in _GRID if key in track and key not in replaced}
    whole = {**taken, **grid}
    if unknown := [model for model in whole["models"] if model not in track["models"]]:
        raise UsageError(f"{unknown[0]} is no model of the track", where=where, expected=", ".join(track["models"]))
    for key in ("calibration", "fit", "quant"):
        own = {**track.get(key, {}), **grid.get(key, {})}
        whole[key] = _checked(own, _CALIBRATION, f"{where}, {key}")
    if DENSE in whole.get("masks", ()) and (whole["masks"] != [DENSE] or "quantize" not in whole):
        raise UsageError(
            f"{DENSE} is no criterion", where=where, expected=f'masks = ["{DENSE}"] alone, in a grid with quantize'
        )
    if missing := [key for key in ("masks", "operators") if key not in whole]:
        raise UsageError(f"the track lacks {', '.join(missing)}", where=where)
    if ("ratios" in whole) == ("keep" in whole):
        raise UsageError("the track needs exactly one of ratios and keep", where=where)
    return whole


def _sizes(calibration: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What a calibration says but for its draws, as fields of `ArmSpec`."""
    return {f"{prefix}{key}": value for key, value in calibration.items() if key != "draws"}


def _product(grid: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arms of a grid but for their model, as fields of `ArmSpec`."""
    amounts = [{"ratio": str(x)} for x in grid.get("ratios", [])] + [{"keep": x} for x in grid.get("keep", [])]
    quantized = [None if name == "none" else name for name in grid.get("quantize", ["none"])]
    quant_draws = grid["quant"].get("draws", [None])
    quant_sizes = _sizes(grid["quant"], "quant_")
    if grid["masks"] == [DENSE]:
        own = {**_sizes(grid["calibration"]), **quant_sizes}
        for draw, name, quant_draw in itertools.product(
            grid["calibration"].get("draws", ["A"]), quantized, quant_draws
        ):
            yield {"quantize": name, "draw": draw, "quant_draw": quant_draw, **own}
        return
    axes = (
        grid["calibration"].get("draws", ["A"]),
        grid["fit"].get("draws", [None]),
        amounts,
        grid["masks"],
        grid["operators"],
        quantized,
        quant_draws,
    )
    sizes = {**_sizes(grid["calibration"]), **_sizes(grid["fit"], "fit_")}
    budget = {key: grid[key] for key in _BUDGET if key in grid}
    for draw, fit_draw, amount, mask, entry, name, quant_draw in itertools.product(*axes):
        operator, operator_parameters, scale = read_entry(entry)
        method, parameters, _ = read_entry(mask)
        yield {
            "method": method,
            "parameters": parameters,
            "operator": operator,
            "operator_parameters": operator_parameters,
            "scale": scale,
            "draw": draw,
            "fit_draw": fit_draw,
            **amount,
            **budget,
            **sizes,
            **({} if name is None else {"quantize": name, "quant_draw": quant_draw, **quant_sizes}),
        }


def read_entry(text: str) -> tuple[str, tuple[str, ...], str | None]:
    """Name, parameters and scale of `name(parameter=value, …)@scale`; a path may hold parentheses of its own."""
    name, _, scale = text.partition("@")
    parameters: tuple[str, ...] = ()
    if (match := re.fullmatch(r"(.+)\((\w+=[^()]*)\)", name)) is not None:
        name, parameters = match[1], tuple(part.strip() for part in match[2].split(","))
    return name, parameters, scale or None


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
