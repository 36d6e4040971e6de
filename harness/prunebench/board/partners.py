"""Whom a run is compared with: its dense model, the constant on its mask, and the other gate scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prunebench.board.entries import Entry
from prunebench.mask import canonical_json

__all__ = ["arm_key", "budget_key", "constant_of", "constants", "dense_of", "scale_partners"]

_CHOOSES: Final = ("budget", "method", "seed")
_RUNS: Final = ("dtype", "device", "experts_implementation", "batch_tokens", "engine")


def budget_key(entry: Entry) -> str:
    """How much is pruned, and how it was executed: what rows have to share to be ranked together."""
    identity = entry.record["identity"]
    return canonical_json([round(entry.record["arm"]["ratio"] or 0.0, 9), *(identity[key] for key in _RUNS)])


def dense_of(entry: Entry, dense: Sequence[Entry]) -> Entry | str:
    """The unpruned arm on the same weights, executed alike, or why there is none to compare with."""
    if entry.dense:
        return "dense"
    alike = [one for one in dense if all(_identity(one)[key] == _identity(entry)[key] for key in _RUNS)] or dense
    if len(alike) == 1:
        return alike[0]
    return "several dense runs" if alike else "no dense run"


def _identity(entry: Entry) -> Mapping[str, Any]:
    identity: Mapping[str, Any] = entry.record["identity"]
    return identity


def arm_key(entry: Entry, suite: str) -> str:
    """All that a constant arm shares with an arm that differs from it in the operator alone, as far as a suite goes.

    Left out of the identity are the operator; what chose the mask (method, budget, seed, calibration), as the digest
    says which experts are gone; the fit's calibration, which `_fitted_alike` judges; what the weights are called; and
    the other suites, which do not touch this one's items.
    """
    identity = _identity(entry)
    shared = {key: value for key, value in identity.items() if key not in {"operator", "calibration", *_CHOOSES}}
    shared["model"] = {key: value for key, value in identity["model"].items() if key != "name"}
    shared["mask"] = (identity["mask"] or {}).get("digest")
    shared["suites"] = identity["suites"].get(suite)
    return canonical_json([suite, shared])


def constants(entries: Sequence[Entry]) -> Mapping[str, list[Entry]]:
    """The constant arms by their key, under each suite they ran."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.record["arm"]["operator"] == "constant":
            for suite in entry.record["headline"]:
                found.setdefault(arm_key(entry, suite), []).append(entry)
    return found


def constant_of(entry: Entry, suite: str, by_key: Mapping[str, list[Entry]]) -> Entry | str:
    """The arm that differs in nothing but its constant operator, or why there is none to compare with."""
    if entry.dense:
        return "dense"
    if entry.record["arm"]["operator"] == "constant":
        return "is the constant"
    found = [other for other in by_key.get(arm_key(entry, suite), []) if _fitted_alike(entry, other)]
    # A given mask carries no budget or method of its own; among several constants, the one asked for alike is meant.
    found = [other for other in found if other.calibration("mask") == entry.calibration("mask")] or found
    for field in (*_CHOOSES, "suites"):
        wanted = _identity(entry)[field]
        found = [other for other in found if _identity(other)[field] == wanted] or found
    # A criterion of its own operator may be constant too (such as mone); the house's own file is the reference.
    found = [other for other in found if _identity(other)["operator"]["name"] == "constant"] or found
    if len(found) == 1:
        return found[0]
    return "several constant arms" if found else "no constant arm"


def _fitted_alike(entry: Entry, constant: Entry) -> bool:
    """Whether a constant was fitted on what the arm was fitted on, or else on what the mask was chosen on."""
    wanted = entry.calibration("fit") or entry.calibration("mask") or constant.calibration("mask")
    return wanted is None or constant.calibration("fit") == wanted


def scale_partners(entries: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Pairs of arms that differ in their gate scale alone: the one at the scale of training, the one at the other."""
    found: dict[str, dict[str, list[Entry]]] = {}
    for entry in entries:
        resolved = entry.record["arm"]["resolved_scale"]
        if resolved in ("keep", "renorm"):
            found.setdefault(_but_for_scale(entry), {}).setdefault(resolved, []).append(entry)
    for pair in found.values():
        if set(pair) == {"keep", "renorm"} and all(len(side) == 1 for side in pair.values()):
            trained = "keep" if "no renorm" in pair["keep"][0].record["arm"]["convention"] else "renorm"
            other = {"keep": "renorm", "renorm": "keep"}[trained]
            yield pair[trained][0], pair[other][0]


def _but_for_scale(entry: Entry) -> str:
    """The identity without the scale; how the mask was chosen is in its digest."""
    identity = _identity(entry)
    operator = {key: value for key, value in identity["operator"].items() if key != "scale"}
    given = operator.get("parameters") or {}
    operator["parameters"] = {key: value for key, value in given.items() if key != "scale"}
    return canonical_json({**identity, "operator": operator})
