"""Loading a model once, in the dtype, device and experts implementation that the record will name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import LayerShape
from prunebench.moe.layer import MoEModel, find_layers, open_model
from prunebench.routing import Convention

__all__ = [
    "LoadedModel",
    "check_device",
    "context_length",
    "empty_model",
    "experts_implementation_for",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "peek",
    "quiet_libraries",
    "weights_files",
    "weights_sha256",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """An opened model with its tokenizer and what identifies its weights.

    Args:
        name: as the user asked for it.
        moe: the opened model.
        tokenizer: its tokenizer.
        folder: the checkpoint folder.
    """

    name: str
    moe: MoEModel
    tokenizer: Any
    folder: Path


def weights_sha256(folder: Path) -> str:
    """sha256 over names and bytes of a checkpoint's config and safetensors files: what identifies a model."""
    digest = sha256()
    files = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors" or p.name == "config.json")
    for path in files:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def weights_files(folder: Path) -> list[Path]:
    """A checkpoint's safetensors files."""
    return [path for path in folder.iterdir() if path.suffix == ".safetensors"]


def _config_of(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers checks fields with errors of its own kinds
        raise UsageError("the model's config cannot be read", where=str(folder), fix=_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


def context_length(folder: Path) -> int:
    """Positions that a model takes, from its config."""
    return int(_config_of(folder).get_text_config().max_position_embeddings)


def peek(folder: Path) -> tuple[tuple[LayerShape, ...], Convention]:
    """A model's layer shapes and router convention from its config alone, before any weight is read.

    Raises:
        UsageError: no MoE layers, an unknown router, or no causal language model.
    """
    layers = find_layers(empty_model(folder), where=str(folder))
    return tuple(layer.shape for layer in layers), layers[0].convention


def empty_model(folder: Path) -> Any:
    """A model without values, from its config alone.

    Raises:
        UsageError: an unreadable config, or no causal language model.
    """
    from transformers import AutoModelForCausalLM

    config = _config_of(folder)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise UsageError("not a causal language model", where=str(folder), fix=_first_line(error)) from error
    except Exception as error:  # a config that a model's own code cannot take may end in any error
        raise UsageError(
            f"no model can be built from the config ({type(error).__name__}: {_first_line(error)})",
            where=str(folder),
            expected=f"a whole config of a {config.model_type}",
        ) from error


def load_model(
    name: str,
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    device_map: str | None = None,
    experts_implementation: str | None = None,
) -> LoadedModel:
    """Load a checkpoint folder and open it.

    The dtype goes to `from_pretrained`, never to a later cast, which would round routers kept in float32. Remote code
    is never run.

    Args:
        name: for tables and errors.
        folder: config, safetensors and tokenizer.
        device: where the model goes, unless `device_map` says.
        dtype: float32, bfloat16 or float16.
        device_map: `auto` spreads the model over the devices (needs accelerate).
        experts_implementation: see `experts_implementation_for`.

    Raises:
        UsageError: unknown dtype, a folder that is no checkpoint, weights that are missing or of another shape, a model
            that cannot be opened.
        PrerequisiteError: a missing device.
    """
    model = load_weights(
        folder, device=device, dtype=dtype, device_map=device_map, experts_implementation=experts_implementation
    )
    tokenizer = load_tokenizer(folder)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {rows}",
            where=str(folder),
            expected="the model's own tokenizer",
        )
    return LoadedModel(name, open_model(model), tokenizer, folder)


def load_weights(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    device_map: str | None = None,
    experts_implementation: str | None = None,
) -> Any:
    """The model of a checkpoint folder on its device, not yet opened; arguments and errors as for `load_model`."""
    from transformers import AutoModelForCausalLM

    check_device(device, dtype)
    options: dict[str, Any] = {
        "dtype": DTYPES[dtype],
        "trust_remote_code": False,
        # Tensors that do not fit are then named; transformers' own error does not.
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
        "experts_implementation": experts_implementation or experts_implementation_for(device, device_map),
    }
    if device_map is not None:
        options["device_map"] = device_map
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, config=_config_of(folder), **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(
            f"cannot load the model: {_first_line(error)}", where=str(folder), fix="check the folder's files"
        ) from error
    model, info = loaded
    _check_complete(info, folder)
    if device_map is None:
        model = model.to(device)
    return model.requires_grad_(requires_grad=False)


def _check_complete(info: Mapping[str, Any], folder: Path) -> None:
    """Refuse weights that transformers would have drawn at random instead: missing, or of another shape."""
    for name, saved, wanted in sorted(info["mismatched_keys"]):
        raise UsageError(
            f"{name} has shape {list(saved)}",
            where=str(folder),
            expected=f"{list(wanted)}, by the config",
            fix="slice every tensor of a pruned model, and write its number of experts into its config",
        )
    for name in sorted(info["missing_keys"]):
        raise UsageError(f"{name} is missing", where=str(folder), expected="all weights of the config's model")


def load_tokenizer(folder: Path) -> Any:
    """A checkpoint's tokenizer."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"cannot load the tokenizer: {_first_line(error)}",
            where=str(folder),
            expected="the model's tokenizer beside its weights",
        ) from error


def quiet_libraries() -> None:
    """Keep transformers' and datasets' progress bars and advice off standard error, which is ours."""
    from datasets.utils import logging as datasets_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    datasets_logging.disable_progress_bar()


def check_device(device: str, dtype: str) -> None:
    """Raise unless the dtype is known and the device is there."""
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", expected=", ".join(DTYPES))
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UsageError(f"unknown device {device!r}", expected="cpu, cuda or cuda:N") from error
    if kind not in {"cpu", "cuda"}:
        raise UsageError(f"device {device!r} is not supported", expected="cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise PrerequisiteError("no CUDA device is available", where=f"device {device}", fix="use cpu")


def experts_implementation_for(device: str, device_map: str | None) -> str:
    """`eager` on CPU, where it is fastest and the readable reference; elsewhere `grouped_mm`, transformers' default."""
    return "eager" if device == "cpu" and device_map is None else "grouped_mm"
