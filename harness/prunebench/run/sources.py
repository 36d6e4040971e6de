"""The files that an arm reads before any weight: a model's folder, its tokenizer, its calibration tokens.

What is found out about a file is remembered in this process for as long as its size and time are the same, so that a
grid of many arms reads each model's digest once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from prunebench.calibration import CalibrationSpec, CalibrationTokens, tokens_of
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.loader import ModelSource, content_root
from prunebench.mask import LayerShape
from prunebench.moe import context_length, load_tokenizer, peek, weights_sha256
from prunebench.routing import Convention

__all__ = ["ModelFiles", "calibration_tokens"]

VOCABULARY_FILES = ("tokenizer", "vocab")  # .json, .model, .txt
TOKENIZER_FILES = ("added_tokens", "merges", "special_tokens_map", "tokenizer", "tokenizer_config", "vocab")

Stamp = tuple[tuple[str, int, int], ...]


def _stamp(*paths: Path) -> Stamp:
    """Names, sizes and times of files."""
    found = [(path, path.stat()) for path in sorted(paths) if path.is_file()]
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found)


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder as it stands now."""

    folder: Path
    stamp: Stamp

    @classmethod
    def of(cls, source: ModelSource) -> ModelFiles:
        """The files of a model; a hub id is downloaded, or found in the hub's cache when offline."""
        folder = _local_folder(source)
        return cls(folder, _stamp(*folder.iterdir()))

    def peek(self) -> tuple[tuple[LayerShape, ...], Convention]:
        """Layer shapes and router convention, from the config."""
        return _peek(self)

    def positions(self) -> int:
        """Tokens that the model takes at most."""
        return _positions(self)

    def weights_sha256(self) -> str:
        """What identifies the weights."""
        return _weights_sha256(self)

    def tokenizer_sha256(self) -> str:
        """What identifies the tokenizer."""
        return _tokenizer_sha256(self)

    def calibration_tokens(self, spec: CalibrationSpec) -> CalibrationTokens:
        """The tokens of a draw of a local text."""
        return _local_tokens(self, spec, _stamp(_text_file(spec.text)))


def _local_folder(source: ModelSource) -> Path:
    """The folder of a model's files; a hub id is downloaded, or found in the hub's cache when offline.

    Raises:
        PrerequisiteError: if the hub has no such model, or cannot be reached.
    """
    if source.path is not None:
        return source.path
    from huggingface_hub import snapshot_download

    assert source.repo is not None
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(source.repo, revision=source.revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise PrerequisiteError(
            f"cannot fetch the model ({type(error).__name__})",
            where=source.repo,
            expected="a hub id that can be reached, or is in the hub's cache",
            fix="download it first, or give --model a local folder",
        ) from error


@lru_cache(maxsize=32)
def _peek(files: ModelFiles) -> tuple[tuple[LayerShape, ...], Convention]:
    return peek(files.folder)


@lru_cache(maxsize=32)
def _positions(files: ModelFiles) -> int:
    return context_length(files.folder)


@lru_cache(maxsize=32)
def _weights_sha256(files: ModelFiles) -> str:
    return weights_sha256(files.folder)


@lru_cache(maxsize=32)
def _tokenizer_sha256(files: ModelFiles) -> str:
    """sha256 over names and bytes of a checkpoint's tokenizer files.

    Raises:
        UsageError: if there are none; transformers would make up an empty tokenizer.
    """
    paths = sorted(path for path in files.folder.iterdir() if path.is_file() and path.stem in TOKENIZER_FILES)
    if not any(path.stem in VOCABULARY_FILES for path in paths):
        raise UsageError(
            "the folder has no tokenizer", where=str(files.folder), expected="the model's tokenizer beside its weights"
        )
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@lru_cache(maxsize=32)
def _tokenizer(files: ModelFiles) -> Any:
    return load_tokenizer(files.folder)


def calibration_tokens(spec: CalibrationSpec, tokenizer: Any) -> CalibrationTokens:
    """The tokens of a calibration draw."""
    return tokens_of(spec, tokenizer, _world())


def _world() -> Path:
    return content_root() / "fixtures" / "world" / "calibration"


@lru_cache(maxsize=32)
def _local_tokens(files: ModelFiles, spec: CalibrationSpec, text_stamp: Stamp) -> CalibrationTokens:
    del text_stamp
    return calibration_tokens(spec, _tokenizer(files))


def _text_file(text: str) -> Path:
    kind, _, rest = text.partition(":")
    return _world() / f"{rest}.jsonl.gz" if kind == "world" else Path(rest)
