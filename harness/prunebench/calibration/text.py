"""Which text a method is calibrated on: a named stream, cut into equal blocks, sliced into disjoint draws.

A spec is `world:DOMAIN` (the tiny world's shipped streams), `file:PATH` (one document per line of JSON with a "text"
field, or a plain text file as one document) or `hub:ID@REVISION:FIELD`. Documents are tokenised one by one and
joined by the tokenizer's end-of-text token, one before each document; draw A is blocks [0, n), B [n, 2n), C [2n, 3n)
(2610.41366 §3).
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunebench.errors import PrerequisiteError, UsageError

__all__ = ["DRAWS", "CalibrationSpec", "CalibrationTokens", "documents_of", "tokens_of"]

DRAWS = ("A", "B", "C")


@dataclass(frozen=True)
class CalibrationSpec:
    """A calibration text and the slice of it that is used.

    Args:
        text: `world:DOMAIN`, `file:PATH` or `hub:ID@REVISION:FIELD`.
        blocks: blocks per draw.
        length: tokens per block.
        draw: A, B or C.
    """

    text: str = "world:general"
    blocks: int = 256
    length: int = 128
    draw: str = "A"

    def __post_init__(self) -> None:
        if self.draw not in DRAWS:
            raise UsageError(f"unknown draw {self.draw!r}", expected="A, B or C")
        if self.blocks < 1 or self.length < 2:
            raise UsageError(
                f"calibration of {self.blocks} blocks × {self.length} tokens", expected="≥ 1 block of ≥ 2 tokens"
            )
        if not re.fullmatch(r"(world|file):.+|hub:[^@:]+@[^@:]+:.+", self.text, flags=re.DOTALL):
            raise UsageError(
                f"unknown calibration text {self.text!r}", expected="world:DOMAIN, file:PATH or hub:ID@REVISION:FIELD"
            )


@dataclass(frozen=True)
class CalibrationTokens:
    """Token ids of one draw, [B, L] int64, and the fingerprint of exactly these ids."""

    spec: CalibrationSpec
    ids_BL: Tensor
    fingerprint: str

    def to_json(self) -> dict[str, Any]:
        """What a record says about calibration."""
        return {**vars(self.spec), "fingerprint": self.fingerprint}


def documents_of(text: str, world: Path) -> Iterator[str]:
    """The documents of a calibration text, in order; `world` is the folder of the shipped streams."""
    kind, _, rest = text.partition(":")
    if kind == "hub":
        yield from _hub_documents(rest)
        return
    path = world / f"{rest}.jsonl.gz" if kind == "world" else Path(rest)
    if not path.is_file():
        known = ", ".join(sorted(p.name.removesuffix(".jsonl.gz") for p in world.glob("*.jsonl.gz")))
        hint = f"one of {known}" if kind == "world" else "a readable file"
        raise UsageError("no such calibration text", where=text, expected=hint)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            if ".jsonl" not in path.name:
                yield file.read()
                return
            for number, line in enumerate(file, start=1):
                try:
                    document = json.loads(line)["text"]
                    if not isinstance(document, str):
                        raise TypeError
                    yield document
                except (ValueError, KeyError, TypeError) as error:
                    raise UsageError(
                        "not a calibration document", where=f"{path}, line {number}", expected='{"text": …} per line'
                    ) from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError("cannot read the calibration text", where=str(path), fix=str(error)) from error


def _hub_documents(rest: str) -> Iterator[str]:
    from datasets import load_dataset

    source, _, field = rest.partition(":")
    name, _, revision = source.partition("@")
    try:
        stream = load_dataset(name, revision=revision, split="train", streaming=True)
    except (OSError, ValueError, ConnectionError) as error:
        raise PrerequisiteError(
            f"cannot open the data set: {str(error).splitlines()[0]}", where=rest, fix="download it first"
        ) from error
    for row in stream:
        yield str(row[field])


def _stream(documents: Iterable[str], tokenizer: Any, wanted: int) -> tuple[list[int], bool]:
    """At least `wanted` ids if the text has them, and whether there was any text at all."""
    ids: list[int] = []
    some = False
    for document in documents:
        some = some or bool(document.strip())
        ids.append(tokenizer.eos_token_id)
        ids += tokenizer(document, add_special_tokens=False)["input_ids"]
        if len(ids) >= wanted:
            break
    return ids, some


def tokens_of(spec: CalibrationSpec, tokenizer: Any, world: Path) -> CalibrationTokens:
    """Tokenise a calibration text and cut out the spec's draw.

    Raises:
        UsageError: an empty text, or one too short for this draw (with the numbers).
    """
    end = (DRAWS.index(spec.draw) + 1) * spec.blocks * spec.length
    ids, some = _stream(documents_of(spec.text, world), tokenizer, end)
    if not some:
        raise UsageError("the calibration text is empty", where=spec.text, expected="some text")
    if len(ids) < end:
        raise UsageError(
            f"the calibration text has {len(ids)} tokens",
            where=f"{spec.text}, draw {spec.draw}",
            expected=f"{end} for {spec.blocks} blocks × {spec.length} tokens up to this draw",
            fix=f"use at most {len(ids) * spec.blocks // end} blocks",
        )
    array = np.asarray(ids[end - spec.blocks * spec.length : end], dtype=np.int64).reshape(spec.blocks, spec.length)
    return CalibrationTokens(spec, torch.from_numpy(array), sha256(array.tobytes()).hexdigest()[:16])
