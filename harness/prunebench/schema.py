"""What `record.json` holds: the fields and types of today's schema, and where parts of it must agree.

Only what the record alone can tell is checked here. What its items, its peers and files beside it say is `validation`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from prunebench.errors import UsageError
from prunebench.mask import Mask, canonical_json
from prunebench.storage import ALL_PARTS
from prunebench.versions import SCHEMA

__all__ = ["UNSAFE_LOCAL", "run_id", "validate"]

UNSAFE_LOCAL: Final = "unsafe-local"
"""`identity.executor` of a run whose programs had no sandbox; a run in the sandbox states no executor."""

_TOP: Final[Mapping[str, tuple[type, ...]]] = {
    "schema": (int,),
    "status": (str,),
    "run_id": (str,),
    "seal": (dict, type(None)),
    "identity": (dict,),
    "arm": (dict,),
    "metrics": (dict,),
    "headline": (dict,),
    "integrity": (list,),
    "storage": (dict,),
    "routing": (dict,),
    "mask": (dict, type(None)),
    "tensors": (dict,),
    "provenance": (dict,),
    "volatile": (dict,),
}
_OPTIONAL: Final[Mapping[str, tuple[type, ...]]] = dict.fromkeys(
    ("fit", "remap", "edits", "selection", "evaluation", "quantization"), (dict,)
)
"""How a fit pass went, which survivors answer for whom, which are edited, how the mask was chosen, how texts were put
to the model where there are several ways, how it was quantized; runs without do not have it."""
_IDENTITY: Final = (
    *("engine", "model", "method", "operator", "budget", "mask", "calibration", "suites"),
    *("dtype", "device", "experts_implementation", "batch_tokens", "limit", "seed"),
)
_ARM: Final = (
    *("model", "convention", "mask", "operator", "scale", "resolved_scale"),
    *("ratio", "keep", "dense"),
)
_CALIBRATION: Final = ("text", "blocks", "length", "draw", "fingerprint")
_MODEL: Final = ("name", "weights_sha256", "tokenizer_sha256", "shape")
_TENSORS: Final = ("experts", "fill", "sha256", "tensors")
_ARM_TEXTS: Final = ("mask", "operator", "scale", "resolved_scale")
_CHECK_STATUS: Final = ("pass", "fail", "not applicable")


def run_id(identity: Mapping[str, Any]) -> str:
    """16 hex digits of everything that can change a run's numbers."""
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:16]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(condition: bool, what: str, where: str, expected: str) -> None:
    if not condition:
        raise UsageError(what, where=where, expected=expected)


def _require_keys(part: Mapping[str, Any], keys: Iterable[str], name: str, where: str) -> None:
    missing = [key for key in keys if key not in part]
    _require(not missing, f"{name} lacks {', '.join(missing)}", where, f"the fields of schema {SCHEMA}")


def validate(record: Mapping[str, Any], *, where: str = "record") -> None:
    """Raise a one-line `UsageError` unless `record` has the fields, types and internal agreement of today's schema.

    What an arm is said to be (`arm`, `mask`) must be what its identity says and what its mask gives. Stored bytes,
    integrity and routing cannot be had without the weights; scores, not without the items (the board recomputes those).
    """
    _require(isinstance(record, Mapping), "not a record", where, "a JSON object")
    schema = record.get("schema")
    _require(schema == SCHEMA, f"schema {schema!r}", where, f"schema {SCHEMA}")
    _require_keys(record, _TOP, "record", where)
    for key, kinds in {**_TOP, **{key: kinds for key, kinds in _OPTIONAL.items() if key in record}}.items():
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        _require(isinstance(record[key], kinds), f"{key} is {type(record[key]).__name__}", where, names)
    unknown = sorted(set(record) - set(_TOP) - set(_OPTIONAL))
    _require(not unknown, f"unknown field {', '.join(unknown)}", where, f"the fields of schema {SCHEMA}")
    _require(record["status"] in {"complete", "partial"}, f"status {record['status']!r}", where, "complete or partial")
    identity, arm = record["identity"], record["arm"]
    _require_keys(identity, _IDENTITY, "identity", where)
    _require_keys(arm, _ARM, "arm", where)
    try:
        wanted = run_id(identity)
        canonical_json(record).encode()
    except (TypeError, ValueError) as error:
        raise UsageError("the record is not plain JSON", where=where, fix=str(error)) from error
    _require(record["run_id"] == wanted, f"run_id {record['run_id']!r} is not its identity's", where, wanted)
    partial = identity["limit"] is not None
    agrees = partial == (record["status"] == "partial")
    _require(agrees, f"status {record['status']} with limit {identity['limit']}", where, "partial if there is a limit")
    _validate_identity(identity, where)
    _validate_mask(record, where)
    _validate_arm(record, where)
    _validate_metrics(record, where)
    for entry in record["integrity"]:
        fine = isinstance(entry, dict) and {"check", "status", "detail"} <= set(entry)
        fine = fine and entry["status"] in _CHECK_STATUS
        _require(fine, f"integrity entry {entry!r}", where, f"check, detail and status {' | '.join(_CHECK_STATUS)}")
    _validate_storage(record["storage"], where)
    _validate_tensors(record, where)
    _validate_routing(record["routing"], where)
    seal = record["seal"]
    fine = seal is None or (set(seal) == {"record", "items"} and all(map(_sha256, seal.values())))
    _require(fine, f"seal {seal!r}", where, "null, or the sha256 of record and items")


def _sha256(text: object) -> bool:
    return re.fullmatch("[0-9a-f]{64}", str(text)) is not None


def _validate_identity(identity: Mapping[str, Any], where: str) -> None:
    _require(isinstance(identity["model"], dict), "identity.model is no object", where, ", ".join(_MODEL))
    _require_keys(identity["model"], _MODEL, "identity.model", where)
    for key in ("method", "operator", "budget", "mask", "calibration"):
        part = identity[key]
        _require(part is None or isinstance(part, dict), f"identity.{key} is {part!r}", where, "an object or null")
        parameters = (part or {}).get("parameters", {})
        _require(isinstance(parameters, dict), f"identity.{key}.parameters is {parameters!r}", where, "an object")
    for key in ("method", "operator"):
        name = (identity[key] or {"name": ""}).get("name")
        _require(isinstance(name, str), f"identity.{key}.name is {name!r}", where, "text")
    executor = identity.get("executor", UNSAFE_LOCAL)
    _require(executor == UNSAFE_LOCAL, f"identity.executor is {executor!r}", where, f"{UNSAFE_LOCAL}, or none stated")
    suites = identity["suites"]
    fine = isinstance(suites, dict) and all(isinstance(suite, dict) for suite in suites.values())
    _require(fine, f"identity.suites is {suites!r}", where, "an object per suite")
    for name, suite in suites.items():
        fine = type(suite.get("version", 0)) is int and isinstance(suite.get("content", ""), str)
        _require(fine, f"identity.suites.{name} is {suite!r}", where, "a whole version and a content digest")


def _validate_mask(record: Mapping[str, Any], where: str) -> None:
    """The pruned experts are those that the identity names, of layers that the model has."""
    data, stated, shape = record["mask"], record["identity"]["mask"], record["identity"]["model"]["shape"]
    if data is None:
        _require(stated is None, f"identity.mask is {stated!r}, but there is no mask", where, "null")
        return
    mask = Mask.from_json(data, where=f"{where}, mask")
    _require(
        data == mask.to_json(), "the mask has other fields than a mask", where, "schema, model_shape, layers, digest"
    )
    _require(stated is not None, "identity.mask is null, but there is a mask", where, f"digest {mask.digest}")
    _require_keys(stated, ("digest", "source"), "identity.mask", where)
    _require(
        stated["digest"] == mask.digest,
        f"identity.mask.digest {stated['digest']!r}",
        where,
        f"the mask's {mask.digest}",
    )
    _require(
        mask.model_shape == shape, f"the mask is for {mask.model_shape!r}", where, f"identity.model.shape {shape!r}"
    )
    named = [f"{layer.index}:{layer.experts}" for layer in mask.layers]
    wanted = [layer.rpartition("x")[0] for layer in mask.model_shape.split()]
    _require(named == wanted, f"the mask has layers {' '.join(named)}", where, f"those of its shape {' '.join(wanted)}")


def _validate_arm(record: Mapping[str, Any], where: str) -> None:
    """What tables show of an arm is what its identity and its mask say."""
    arm, identity = record["arm"], record["identity"]
    dense = record["mask"] is None
    _require(
        arm["dense"] is dense,
        f"arm.dense {arm['dense']!r}",
        where,
        f"{dense}, as mask is {'null' if dense else 'given'}",
    )
    for key in ("model", "convention"):
        _require(isinstance(arm[key], str), f"arm.{key} is {arm[key]!r}", where, "text")
    for key in _ARM_TEXTS:
        fine = arm[key] is None or (isinstance(arm[key], str) and not dense)
        _require(fine, f"arm.{key} is {arm[key]!r}", where, "null for a dense arm" if dense else "text or null")
    source = None if dense else identity["mask"]["source"]
    agreeing = {
        "model": identity["model"]["name"],
        "mask": arm["mask"] if source == "file" else source,
        "ratio": _share_pruned(record["mask"]),
        "keep": (identity["budget"] or {}).get("keep"),
    }
    for key, wanted in agreeing.items():
        _require(_same(arm[key], wanted), f"arm.{key} is {arm[key]!r}", where, f"{wanted!r}, as identity and mask say")
    for key in ("operator", "calibration"):
        part = identity[key]
        _require((part is None) is dense, f"identity.{key} is {part!r}", where, "null exactly for a dense arm")
    _validate_calibration(identity, where)


def _validate_calibration(identity: Mapping[str, Any], where: str) -> None:
    """What the mask was chosen on and what the operator was fitted on, each an object or null."""
    calibration = identity["calibration"]
    if calibration is None:
        return
    _require(
        set(calibration) == {"mask", "fit"}, f"identity.calibration has {', '.join(calibration)}", where, "mask and fit"
    )
    for key, part in calibration.items():
        fine = part is None or (isinstance(part, dict) and set(part) == set(_CALIBRATION))
        _require(fine, f"identity.calibration.{key} is {part!r}", where, f"null, or {', '.join(_CALIBRATION)}")
    given = identity["mask"]["source"] == "file"
    _require(not (given and calibration["mask"]), "identity.calibration.mask is stated for a given mask", where, "null")


def _share_pruned(mask: Mapping[str, Any] | None) -> float | None:
    """The share of all experts that a mask's JSON removes; None without a mask."""
    if mask is None:
        return None
    experts = sum(int(layer["E"]) for layer in mask["layers"])
    return sum(len(layer["pruned"]) for layer in mask["layers"]) / max(1, experts)


def _same(one: object, other: object) -> bool:
    """Equal as JSON values; numbers to rounding, and never true for 1."""
    if isinstance(one, int | float) and isinstance(other, int | float) and bool not in {type(one), type(other)}:
        return math.isclose(one, other, rel_tol=1e-12)
    return type(one) is type(other) and one == other


def _validate_metrics(record: Mapping[str, Any], where: str) -> None:
    metrics, headline = record["metrics"], record["headline"]
    for name, metric in metrics.items():
        fine = isinstance(metric, dict) and set(metric) == {"value", "low", "high", "n"}
        fine = fine and all(map(_number, metric.values())) and metric["low"] <= metric["high"] and metric["n"] >= 1
        _require(fine, f"metric {name} is {metric!r}", where, "finite value, low ≤ high, n ≥ 1")
    for suite, cells in headline.items():
        _require(suite in metrics, f"no metric for suite {suite}", where, "one per suite of the headline")
        fine = isinstance(cells, list) and bool(cells) and all(isinstance(c, list) and len(c) == 3 for c in cells)
        _require(fine, f"headline of {suite} is {cells!r}", where, "a list of [task, filter, metric]")


def _validate_routing(routing: Mapping[str, Any], where: str) -> None:
    """Shares are shares, and counts and ratios no less than zero, as far as they are stated."""
    layers = routing.get("layers", {})
    _require(isinstance(layers, dict), f"routing.layers is {layers!r}", where, "an object per layer")
    for index, layer in layers.items():
        fine = isinstance(layer, dict) and all(_number(value) and value >= 0 for value in layer.values())
        fine = fine and all(layer[key] <= 1 for key in layer if key.endswith("_share"))
        _require(fine, f"routing.layers.{index} is {layer!r}", where, "counts and ratios from 0, shares up to 1")


def _validate_storage(storage: Mapping[str, Any], where: str) -> None:
    _require_keys(storage, ("total", "parts"), "storage", where)
    parts = storage["parts"]
    fine = isinstance(parts, dict) and set(parts) <= set(ALL_PARTS)
    fine = fine and all(isinstance(size, int) and size >= 0 for size in parts.values())
    _require(fine, f"storage parts {parts!r}", where, f"bytes by {', '.join(ALL_PARTS)}")
    total = sum(parts.values())
    _require(storage["total"] == total, f"storage total {storage['total']}", where, f"the sum of its parts {total}")


def _validate_tensors(record: Mapping[str, Any], where: str) -> None:
    """Fills are of pruned experts, edits of survivors; what the fills store are the stored bytes of fills."""
    layers = [] if record["mask"] is None else record["mask"]["layers"]
    pruned = {str(layer["index"]): set(layer["pruned"]) for layer in layers}
    kept = {str(layer["index"]): set(range(layer["E"])) - set(layer["pruned"]) for layer in layers}
    values = _validate_groups("tensors", record["tensors"], pruned, _TENSORS, where)
    _validate_groups("edits", record.get("edits", {}), kept, tuple(name for name in _TENSORS if name != "fill"), where)
    size = record["storage"]["parts"].get("fills", 0)
    fine = size == 0 if values == 0 else size > 0 and size % values == 0
    _require(fine, f"storage parts fills {size}", where, f"so many bytes for each of {values} values in tensors")


def _validate_groups(
    field: str, by_layer: Mapping[str, Any], allowed: Mapping[str, set[int]], names: Sequence[str], where: str
) -> int:
    """Groups of tensors that are alike, layer by layer, of different experts; how many values they are."""
    values = 0
    for index, groups in by_layer.items():
        _require(index in allowed, f"{field} of layer {index!r}", where, f"layers of the mask: {', '.join(allowed)}")
        _require(isinstance(groups, list), f"{field}.{index} is {groups!r}", where, "a list of groups")
        left = set(allowed[index])
        for group in groups:
            _require(_group(group, names), f"a group of {field}.{index} is {group!r}", where, ", ".join(names))
            experts = set(group["experts"])
            fine = experts <= left and group["experts"] == sorted(experts)
            _require(fine, f"{field}.{index} has experts {group['experts']}", where, f"of {sorted(left)}, each once")
            left -= experts
            values += len(experts) * sum(math.prod(tensor["shape"]) for tensor in group["tensors"].values())
    return values


def _group(group: object, names: Sequence[str]) -> bool:
    """Whether this is an entry of `tensors` or `edits`: what is alike in one layer."""
    if not (isinstance(group, dict) and set(group) == set(names)):
        return False
    experts, tensors = group["experts"], group["tensors"]
    fine = isinstance(group.get("fill", ""), str) and isinstance(experts, list) and bool(experts)
    fine = fine and all(type(expert) is int for expert in experts)
    fine = fine and _sha256(group["sha256"])
    return fine and isinstance(tensors, dict) and bool(tensors) and all(map(_tensor, tensors.values()))


def _tensor(tensor: object) -> bool:
    if not (isinstance(tensor, dict) and set(tensor) == {"dtype", "shape"} and isinstance(tensor["shape"], list)):
        return False
    return isinstance(tensor["dtype"], str) and all(type(size) is int and size >= 0 for size in tensor["shape"])
