"""The base checkpoint's tensors without the pruned experts, under the names and in the dtypes of its own files.

Nothing goes through a model: a tensor of the base is copied, cut or left out, so what is not edited keeps its bits, and
the bytes are those that `storage.pruned_bytes` predicts, by whose rules tensors are told apart.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunebench.export.naming import edits_by_name
from prunebench.export.pruned import Anatomy, PrunedModel
from prunebench.export.shards import Entry, TensorFiles, bytes_of
from prunebench.run.sources import TOKENIZER_FILES
from prunebench.storage import expert_of, layer_of, part_of, router_axis

__all__ = ["copy_small_files", "retained", "sliced", "write_config"]


def retained(pruned: PrunedModel, anatomy: Anatomy, files: TensorFiles) -> Iterator[Entry]:
    """All tensors but those of pruned experts, which are named one by one; survivors keep their names."""
    edits = _edits(pruned, anatomy)
    for name in files.names:
        index, expert = layer_of(name), expert_of(name)
        if index is None or expert is None or expert not in pruned.plan.mask.pruned_of(index):
            yield _entry(name, anatomy, files, edits.get(name, {}))


def sliced(pruned: PrunedModel, anatomy: Anatomy, files: TensorFiles) -> Iterator[Entry]:
    """All tensors with the pruned experts cut out, of experts and routers; survivors are renumbered in order."""
    edits = _edits(pruned, anatomy)
    masks = {layer.index: layer for layer in pruned.plan.mask.layers}
    for name in files.names:
        layer = masks.get(index) if (index := layer_of(name)) is not None else None
        entry = _entry(name, anatomy, files, edits.get(name, {}))
        if layer is None or not layer.pruned:
            yield entry
            continue
        kept, expert = layer.survivors, expert_of(name)
        shape = anatomy.headers[name].shape
        if part_of(name) == "experts" and expert is not None:
            if expert in kept:
                new = re.sub(rf"\.experts\.{expert}\.", f".experts.{kept.index(expert)}.", name)
                yield Entry(new, entry.bytes, entry.make)
            continue
        axis = 0 if part_of(name) == "experts" else router_axis(name, shape, layer.experts)
        if axis is None:
            yield entry
        else:
            yield Entry(name, entry.bytes // layer.experts * len(kept), partial(_cut, entry, axis, kept))


def _cut(entry: Entry, axis: int, kept: tuple[int, ...]) -> Tensor:
    return entry.make().index_select(axis, torch.tensor(kept))


def _entry(name: str, anatomy: Anatomy, files: TensorFiles, edits: Mapping[int | None, Tensor]) -> Entry:
    """A tensor as the base has it, with what was edited in it."""
    if not edits:
        return Entry(name, anatomy.headers[name].bytes, partial(files.__getitem__, name))
    edited = _edited(files[name], edits)
    return Entry(name, bytes_of(edited), lambda: edited)


def _edited(own: Tensor, edits: Mapping[int | None, Tensor]) -> Tensor:
    """A tensor with new values for some experts, or for all of it; in its own dtype if that holds them exactly."""
    exact = all(torch.equal(edit.to(own.dtype).to(edit.dtype), edit) for edit in edits.values())
    dtype = own.dtype if exact else next(iter(edits.values())).dtype
    result = own.to(dtype, copy=True)
    for expert, edit in edits.items():
        (result if expert is None else result[expert]).copy_(edit)
    return result


def _edits(pruned: PrunedModel, anatomy: Anatomy) -> dict[str, dict[int | None, Tensor]]:
    """File tensor -> expert, or None if the tensor is of one expert only -> its new values."""
    found: dict[str, dict[int | None, Tensor]] = {}
    for layer in anatomy.layers:
        for expert, named in pruned.plan.edits_of(layer.index).items():
            for parameter, tensor in named.items():
                parts = edits_by_name(anatomy.headers, layer.index, layer.expert_count, parameter)
                assert parts is not None, "refused before"
                for part, rows in zip(parts, tensor.chunk(len(parts), dim=0), strict=True):
                    name = part[expert]
                    found.setdefault(name, {})[None if expert_of(name) is not None else expert] = rows
    return found


def copy_small_files(source: Path, folder: Path) -> None:
    """The tokenizer, the chat template and the generation settings, as they are."""
    for path in sorted(source.iterdir()):
        if path.is_file() and (path.stem in {*TOKENIZER_FILES, "generation_config", "chat_template"}):
            shutil.copyfile(path, folder / path.name)


def write_config(source: Path, folder: Path, changes: Mapping[str, Any], *, of_text: Mapping[str, Any]) -> None:
    """The base's config.json with changes, on top and of the text model, which may be a config inside."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    inner = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    inner.update(of_text)
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
