"""Tensors that are made one after the other, and written to safetensors files of a limited size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.storage import INDEX, SINGLE, shards_of

__all__ = ["DEFAULT_SHARD", "Entry", "TensorFiles", "bytes_of", "parse_size", "write_shards"]

DEFAULT_SHARD: Final = "5GB"
_UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written.

    Args:
        name: in the file.
        bytes: that it takes.
        make: makes it, when its file is written.
    """

    name: str
    bytes: int
    make: Callable[[], Tensor]


class TensorFiles:
    """The tensors of a checkpoint folder, read one at a time; a context manager that keeps the files open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shard_of = shards_of(folder)
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._open.clear()

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors, in the order of their names."""
        return tuple(sorted(self._shard_of))

    def __getitem__(self, name: str) -> Tensor:
        shard = self._shard_of[name]
        if shard not in self._open:
            self._open[shard] = self._stack.enter_context(safe_open(self._folder / shard, framework="pt"))
        tensor: Tensor = self._open[shard].get_tensor(name)
        return tensor


def bytes_of(tensor: Tensor) -> int:
    """Bytes that a tensor takes in a file."""
    return tensor.numel() * tensor.element_size()


def parse_size(text: str) -> int:
    """A size as typed, such as 5GB, 500MB or 2GiB, in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise UsageError(f"shard size {text!r}", expected="a number of bytes, such as 5GB, 500MB or 2GiB")
    return size


def write_shards(folder: Path, entries: Iterable[Entry], limit: int) -> None:
    """Write `model.safetensors`, or shards of at most `limit` bytes of tensors each, with their index.

    A tensor that is larger than the limit gets a file of its own. One shard's tensors are in memory at a time.
    """
    groups = list(_grouped(entries, limit))
    if len(groups) == 1:
        _write(folder / SINGLE, groups[0])
        return
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write(folder / file, group)
        weight_map.update({entry.name: file for entry in group})
    total = sum(entry.bytes for group in groups for entry in group)
    index: Mapping[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _grouped(entries: Iterable[Entry], limit: int) -> Iterator[list[Entry]]:
    group: list[Entry] = []
    for entry in entries:
        if group and sum(one.bytes for one in group) + entry.bytes > limit:
            yield group
            group = []
        group.append(entry)
    yield group


def _write(path: Path, group: Sequence[Entry]) -> None:
    tensors = {entry.name: entry.make().contiguous() for entry in group}
    for entry in group:
        assert bytes_of(tensors[entry.name]) == entry.bytes, entry.name
    with torch.no_grad():
        save_file(tensors, path, metadata={"format": "pt"})
