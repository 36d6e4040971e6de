"""Whether a run's words for itself (`arm`), which tables print, are what its identity, its mask and its fills are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prunebench.errors import UsageError
from prunebench.mask import Budget, LayerShape

__all__ = ["said_otherwise"]

_NAMED: Final = ("trained", "other", "keep", "renorm")


def said_otherwise(record: Mapping[str, Any]) -> Iterator[str]:
    """What an arm says of itself against its own evidence, in a line each; nothing of a dense one."""
    if record["arm"]["dense"]:
        return
    yield from _operator(record)
    yield from _scale(record)
    yield from _budget(record)


def _operator(record: Mapping[str, Any]) -> Iterator[str]:
    """The operator is the file's name, or the house's word for what its fills are (`run.recording`)."""
    said, refilled = record["arm"]["operator"], bool(record["arm"]["resolved_scale"])
    name = record["identity"]["operator"]["name"]
    kinds = {group["fill"] for groups in record["tensors"].values() for group in groups}
    evident = {
        "reroute": refilled and not kinds,
        "constant": not refilled and kinds == {"Constant"},
        "zero": not refilled and not kinds,  # stores nothing
    }
    if said != name and not evident.get(said, False):
        stored = ", ".join(sorted(kinds)) or "nothing"
        yield f"operator {said}, of the file {name}, that stores {stored} and refills {'' if refilled else 'no '}slots"


def _scale(record: Mapping[str, Any]) -> Iterator[str]:
    """The scale is the one that was asked for, and what that is for a router of this convention."""
    identity, arm = record["identity"], record["arm"]
    if "operator_layers" in identity:
        return  # two operators, each with a scale of its own
    asked = identity["operator"].get("scale")
    asked = asked if asked is not None else (identity["operator"].get("parameters") or {}).get("scale")
    if asked in _NAMED and arm["resolved_scale"] and arm["scale"] != asked:
        yield f"scale {arm['scale']}; its identity asks for {asked}"
    trained = "keep" if "no renorm" in arm["convention"] else "renorm"
    other = {"keep": "renorm", "renorm": "keep"}[trained]
    wanted = {"trained": trained, "other": other, "keep": "keep", "renorm": "renorm"}.get(arm["scale"])
    if wanted and arm["resolved_scale"] != wanted:
        yield f"scale {arm['scale']} is {arm['resolved_scale']}; a router with {arm['convention']} makes it {wanted}"


def _budget(record: Mapping[str, Any]) -> Iterator[str]:
    """The mask removes as many experts as were asked for, where the budget is the same for every layer."""
    budget = record["identity"]["budget"] or {}
    if set(budget) not in ({"ratio"}, {"keep"}):
        return
    shapes = [LayerShape(layer["index"], layer["E"], top_k=1) for layer in record["mask"]["layers"]]
    try:
        asked = Budget.of_ratio(budget["ratio"]) if "ratio" in budget else Budget(keep=budget["keep"])
        wanted = sum(asked.pruned_count(shape) for shape in shapes)
    except UsageError as error:
        yield f"budget: {error}"
        return
    gone = sum(len(layer["pruned"]) for layer in record["mask"]["layers"])
    if gone != wanted:
        total = sum(shape.experts for shape in shapes)
        yield f"the mask removes {gone} experts; {asked.asked} of {total} is {wanted}"
