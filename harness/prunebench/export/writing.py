"""Exporting: ask the table, write everything into a new folder, say what is in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from prunebench.errors import UsageError
from prunebench.export import ct, hf, native, vllm_mone
from prunebench.export.card import card
from prunebench.export.folder import check_free, digests, new_folder
from prunebench.export.native import INSIDE
from prunebench.export.pruned import (
    Anatomy,
    Facts,
    PrunedModel,
    check_format,
    facts_of_plan,
    pruned_model_of,
)
from prunebench.export.quantized import Scheme, need_compressed_tensors
from prunebench.export.refusals import FORMATS, refuse
from prunebench.export.shards import DEFAULT_SHARD, parse_size
from prunebench.mask import canonical_json
from prunebench.record import read_run
from prunebench.run.session import Progress
from prunebench.storage import PARTS, measured, read_headers

__all__ = ["EXPORT_FILE", "SCHEMA", "Exported", "default_folder", "export_run", "write_export"]

SCHEMA: Final = 1
EXPORT_FILE: Final = "export.json"
Writer = Callable[[PrunedModel, Anatomy, Path, int], None]
_WRITERS: Final[Mapping[str, Writer]] = {"native": native.write, "hf": hf.write, "vllm-mone": vllm_mone.write}


@dataclass(frozen=True)
class Exported:
    """What was written: the folder, the format, and the bytes on disk as `storage.measured` gives them."""

    folder: Path
    form: str
    stored: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"folder": str(self.folder), "format": self.form, "storage": dict(self.stored)}


def default_folder(run: Path, form: str) -> Path:
    """Where an export goes unless it is said: `exports/MODEL/ARM-FORMAT` below the working folder."""
    run = run.resolve()
    return Path("exports") / run.parent.name / f"{run.name}-{form}"


def export_run(
    run: Path,
    form: str,
    out: Path | None = None,
    *,
    max_shard_size: str = DEFAULT_SHARD,
    scheme: Scheme | None = None,
    model: str | None = None,
    operator: str | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Export a recorded run.

    Args:
        run: its folder.
        form: name of the format.
        out: the new folder; `default_folder` if None.
        max_shard_size: bytes of tensors per file, such as 5GB.
        scheme: how weights are quantized; for ct only, and its default if None.
        model: the base model's folder, where the record has only its name.
        operator: the operator's file, if it is not shipped.
        progress: called with (what, done, total).

    Raises:
        UsageError: what the format cannot hold; a dense run; something is there already.
        PruneBenchError: as `pruned_model_of`.
    """
    check_format(form, FORMATS)
    scheme = _scheme(form, scheme)
    limit = parse_size(max_shard_size)
    out = default_folder(run, form) if out is None else out
    check_free(out)

    def check(facts: Facts) -> None:
        refuse(facts, form)
        if scheme is not None:
            ct.check_scheme(facts.anatomy, scheme)

    pruned = pruned_model_of(read_run(run), check, model=model, operator=operator, progress=progress)
    return write_export(pruned, form, out, limit=limit, scheme=scheme)


def write_export(
    pruned: PrunedModel, form: str, out: Path, *, limit: int | None = None, scheme: Scheme | None = None
) -> Exported:
    """Write a pruned model in one format, all or nothing.

    Args:
        pruned: what to export.
        form: name of the format.
        out: the new folder.
        limit: bytes of tensors per file.
        scheme: how weights are quantized; for ct only, and its default if None.

    Raises:
        UsageError: what the format cannot hold, before anything is written; something is there already.
        PrerequisiteError: ct without compressed-tensors.
    """
    check_format(form, FORMATS)
    scheme = _scheme(form, scheme)
    anatomy = Anatomy.of(pruned.folder)
    refuse(facts_of_plan(pruned, anatomy), form)
    if scheme is not None:
        ct.check_scheme(anatomy, scheme)
    limit = limit or parse_size(DEFAULT_SHARD)
    with new_folder(out) as folder:
        native.write_plan(pruned.plan, folder)
        if scheme is None:
            _WRITERS[form](pruned, anatomy, folder, limit)
        else:
            ct.write(pruned, anatomy, folder, limit, scheme)
        stored = _stored(pruned, form, folder)
        (folder / "README.md").write_text(card(pruned, anatomy, form, stored, scheme), encoding="utf-8")
        if pruned.record is not None:
            (folder / INSIDE / "record.json").write_text(canonical_json(pruned.record) + "\n", encoding="utf-8")
        description = folder / INSIDE / EXPORT_FILE
        data = _description(pruned, form, scheme)
        data["files"] = digests(folder, without=description)
        description.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return Exported(out, form, stored)


def _stored(pruned: PrunedModel, form: str, folder: Path) -> dict[str, Any]:
    """Bytes on disk by part; of a native export, those of fills, edited weights, router rows and integers."""
    if form != "native":
        return measured(read_headers(folder))
    parts = dict.fromkeys(PARTS, 0)
    parts["fills"] = sum(tensor.numel() * tensor.element_size() for tensor in pruned.plan.tensors.values())
    parts["experts"] = sum(tensor.numel() * tensor.element_size() for tensor in pruned.plan.edits.values())
    parts["router"] = sum(tensor.bytes for tensor in read_headers(folder / INSIDE / native.ROUTER).values())
    if pruned.quantized is not None:
        for part, size in measured(read_headers(folder / INSIDE / native.INTEGERS))["parts"].items():
            parts[part] += size
    return {"total": sum(parts.values()), "parts": parts}


def _scheme(form: str, scheme: Scheme | None) -> Scheme | None:
    """The scheme to quantize by; None for formats that do not."""
    if form != "ct":
        if scheme is not None:
            raise UsageError(
                f"{form} quantizes nothing",
                fix="leave --bits, --attention-bits, --group-size and --asymmetric out, or give --format ct",
            )
        return None
    need_compressed_tensors()
    return scheme or Scheme()


def _description(pruned: PrunedModel, form: str, scheme: Scheme | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "format": form,
        "base": {"model": pruned.model, "weights_sha256": pruned.weights_sha256},
        "mask": pruned.plan.mask.digest,
        "policy": pruned.policy,
        "settings": asdict(pruned.settings),
        "quantization": None if scheme is None else scheme.to_json(),
        "run_id": None if pruned.record is None else pruned.record["run_id"],
    }
