"""One run on disk: `record.json` (what was run and what came out) beside `items.parquet` (one row per item and metric).

A run folder is written whole or not at all, and the same content gives the same bytes. This module knows the format
only: it computes no metric (that is `analysis`) and imports nothing heavy until a file is touched. The rows, and what a
packed file of them is, are those of `items`.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from prunebench.errors import IntegrityError, PrerequisiteError, PruneBenchError, UsageError
from prunebench.items import (
    QUESTIONS,
    STATES,
    Item,
    ItemTable,
    Questions,
    content_hash,
    items_to_table,
    read_items,
    write_items,
)
from prunebench.mask import Mask, canonical_json
from prunebench.storage import ALL_PARTS
from prunebench.versions import SCHEMA, json_document, migrated

__all__ = [
    "ITEMS_FILE",
    "RECORD_FILE",
    "SCHEMA",
    "STATES",
    "UNSAFE_LOCAL",
    "Item",
    "ItemTable",
    "LeftOut",
    "Run",
    "RunListing",
    "clear_leftovers",
    "comparable",
    "content_hash",
    "is_complete",
    "items_to_table",
    "read_items",
    "read_record",
    "read_run",
    "run_id",
    "runs_under",
    "seal_of",
    "sealed",
    "sync",
    "validate",
    "write_items",
    "write_run",
]

RECORD_FILE: Final = "record.json"
ITEMS_FILE: Final = "items.parquet"
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


def comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without its volatile fields: equal for any two executions of one identity."""
    return {key: value for key, value in record.items() if key != "volatile"}


def seal_of(record: Mapping[str, Any], table: ItemTable) -> dict[str, str]:
    """Digests of all that a run says but its volatile fields: of the record, and of the items packed or not.

    Two executions that came to the same have equal seals.
    """
    said = {key: value for key, value in comparable(record).items() if key != "seal"}
    return {"record": hashlib.sha256(canonical_json(said).encode()).hexdigest(), "items": table.digest}


def sealed(record: Mapping[str, Any], table: ItemTable) -> dict[str, Any]:
    """The record with its seal."""
    return {**record, "seal": seal_of(record, table)}


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


@dataclass(frozen=True, eq=False)
class Run:
    """A run as read: its record, its items, and where they were."""

    record: dict[str, Any]
    items: ItemTable
    path: Path

    @property
    def invalid(self) -> int:
        """Questions that the model answered with NaN or infinity."""
        by_suite = self.record.get("evaluation", {}).get("items", {})
        return sum(counts.get("invalid", 0) for counts in by_suite.values())

    def calibration(self, part: Literal["mask", "fit"]) -> Mapping[str, Any] | None:
        """What the mask was chosen on, or the operator fitted on; None if nothing was."""
        stated: Mapping[str, Any] | None = (self.record["identity"]["calibration"] or {}).get(part)
        return stated

    @property
    def name(self) -> str:
        """How messages call the run: its folder and its id."""
        return f"{self.path.name} ({self.record['run_id']})"


@dataclass(frozen=True, order=True)
class LeftOut:
    """A folder that was not used, and why, in one line without paths of this machine."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class RunListing:
    """What `runs_under` found: whole runs and half-written ones, each sorted by path."""

    runs: tuple[Path, ...]
    left_out: tuple[LeftOut, ...]


def read_record(folder: Path) -> dict[str, Any]:
    """The validated record of a folder, as one of today's schema.

    Raises:
        PrerequisiteError: if the folder is half-written or damaged.
    """
    again = "run it again; the folder will be replaced"
    missing = [name for name in (RECORD_FILE, ITEMS_FILE) if not (folder / name).is_file()]
    if missing:
        raise PrerequisiteError(f"half-written run folder: no {' and no '.join(missing)}", where=str(folder), fix=again)
    try:
        record = json_document((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PrerequisiteError(
            f"half-written run folder: {RECORD_FILE} is damaged", where=str(folder), fix=f"{again} ({error})"
        ) from error
    try:
        record = migrated(record, where=RECORD_FILE)
        validate(record, where=RECORD_FILE)
    except UsageError as error:
        raise PrerequisiteError(f"half-written or altered run folder: {error}", where=str(folder), fix=again) from error
    return record


def read_run(folder: Path) -> Run:
    """Read and validate one run folder.

    Raises:
        UsageError: if there is no such folder.
        PrerequisiteError: if the folder is half-written or damaged.
    """
    if not folder.is_dir():
        raise UsageError("no such run folder", where=str(folder), expected=f"a folder with {RECORD_FILE}")
    record = read_record(folder)
    return Run(record, read_items(folder / ITEMS_FILE), folder)


def is_complete(folder: Path, run_id: str) -> bool:
    """Whether a whole run of this identity stands here, so that it need not be run again.

    True also for a finished run with a limit: the limit is part of the identity.
    """
    try:
        run = read_run(folder)
    except PruneBenchError:
        return False
    return bool(run.record["run_id"] == run_id)


def runs_under(folder: Path) -> RunListing:
    """Find the run folders at or below `folder`. Hidden folders (unfinished writes) are not looked into.

    A folder is half-written if it holds a part of a run, or holds nothing to descend into and no run. Tables of
    questions are passed over.
    """
    runs: list[Path] = []
    left_out: list[LeftOut] = []
    if not folder.is_dir():
        raise UsageError("no such folder", where=str(folder), expected="a folder of run folders")
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        below = [path for path in here.iterdir() if path.is_dir() and not path.name.startswith(".")]
        has_part = (here / RECORD_FILE).exists() or (here / ITEMS_FILE).exists()
        if here.name == QUESTIONS and not has_part and not below:
            continue
        if not has_part and (below or here == folder):
            waiting += below
            continue
        try:
            read_record(here)
            runs.append(here)
        except PrerequisiteError as error:
            left_out.append(LeftOut(here, error.what))
    return RunListing(tuple(sorted(runs)), tuple(sorted(left_out)))


def write_run(
    folder: Path,
    record: Mapping[str, Any],
    items: Iterable[Item] | ItemTable,
    *,
    replace: bool = False,
    questions: Questions | None = None,
) -> None:
    """Write one run folder, all or nothing: a kill at any moment leaves no run, the old run, or the whole new one.

    Args:
        folder: where the run goes; a half-written run there is replaced.
        record: the content of record.json; validated first.
        items: all outcomes, in any order.
        replace: allow a whole run of another identity to be replaced.
        questions: pack the items: their table, which must stand in a folder above already.

    Raises:
        UsageError: for an invalid record or item, an occupied or an unwritable folder.
        IntegrityError: packed items that do not read as the same again.
    """
    validate(record)
    table = items if isinstance(items, ItemTable) else items_to_table(items)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(folder)
        _check_replaceable(folder, str(record["run_id"]), replace=replace)
        temporary.mkdir()
        write_items(temporary / ITEMS_FILE, table, questions)
        if questions is not None and not read_items(temporary / ITEMS_FILE).equals(table):
            raise IntegrityError("packed items read as other ones", where=str(folder))
        (temporary / RECORD_FILE).write_text(_text(record), encoding="utf-8")
        for path in (temporary / ITEMS_FILE, temporary / RECORD_FILE, temporary):
            sync(path)
        _put_in_place(temporary, folder)
        sync(folder.parent)
    except OSError as error:
        raise UsageError(
            "cannot write the run", where=str(folder), expected="a writable folder", fix=str(error)
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _text(record: Mapping[str, Any]) -> str:
    """A record as JSON, each field in a line of its own."""
    lines = [f"{canonical_json(key)}: {canonical_json(value)}" for key, value in sorted(record.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _check_replaceable(folder: Path, new_id: str, *, replace: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError("the run folder is a file", where=str(folder), fix="choose another folder")
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in {RECORD_FILE, ITEMS_FILE})
    if foreign:
        raise UsageError(f"the run folder holds other things ({foreign[0]})", where=str(folder), fix="choose another")
    try:
        old = str(read_record(folder)["run_id"])
    except PrerequisiteError:
        return
    if old != new_id and not replace:
        raise UsageError(
            f"the folder holds another run ({old})", where=str(folder), expected=new_id, fix="choose another folder"
        )


def sync(path: Path) -> None:
    """Have a file's or a folder's content on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Move a finished folder to its name; an old one there ends up under the temporary name."""
    if not folder.exists():
        temporary.rename(folder)
    elif not _exchange(temporary, folder):
        # Without an atomic exchange there is a moment with no folder; `clear_leftovers` then brings the old one back.
        old = temporary.with_suffix(".old")
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old)


def _exchange(left: Path, right: Path) -> bool:
    """Swap two folders in one step; False where the system cannot."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
    return rename is not None and rename(here, os.fsencode(left), here, os.fsencode(right), exchange) == 0


def clear_leftovers(folder: Path) -> None:
    """Remove what killed writers left beside `folder`; bring back an old run that lost its place."""
    leftover = re.compile(rf"\.{re.escape(folder.name)}\.(\d+)\.(?:tmp|old)")
    for path in sorted(folder.parent.iterdir()):
        match = leftover.fullmatch(path.name)
        if match is None or _alive(int(match[1])):
            continue
        if path.suffix == ".old" and not folder.exists():
            path.rename(folder)
        else:
            shutil.rmtree(path)


def _alive(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
