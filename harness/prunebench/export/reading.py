"""Loading an export, and comparing what was saved with its source."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from prunebench.calibration import CalibrationSpec
from prunebench.errors import IntegrityError, PrerequisiteError, UsageError
from prunebench.export import ct, native, vllm_mone
from prunebench.export.folder import digests
from prunebench.export.native import INSIDE
from prunebench.export.pruned import Anatomy, PrunedModel, Settings
from prunebench.export.quantized import Scheme, need_compressed_tensors
from prunebench.export.shards import DEFAULT_SHARD, parse_size
from prunebench.export.writing import EXPORT_FILE, SCHEMA
from prunebench.install import installed
from prunebench.loader import resolve_model
from prunebench.mask import GroupPolicy
from prunebench.moe import load_tokenizer, open_model
from prunebench.plan import Plan
from prunebench.quantize import QuantizedModel
from prunebench.run.sources import ModelFiles, calibration_tokens

__all__ = ["Verification", "load", "verify"]

PROBE: Final = CalibrationSpec("world:general", 8, 64, "C")
"""The text that is compared on, 512 tokens; what arms are calibrated on, from another draw."""

# Of formats that run the very code that was evaluated nothing less is asked, nor of packed weights, whose source is the
# model that is cut to size and rounded in the same way.
EXACT: Final = ("native", "vllm-mone", "ct")
# Mean KL divergence in nats per token that rounding may cost where experts and router rows are physically gone.
TOLERANCE: Final[Mapping[str, float]] = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}


@dataclass(frozen=True)
class Export:
    """An export folder as its description says.

    Args:
        folder: where it is.
        form: name of the format.
        base: the base model as a person names it.
        weights_sha256: what identifies its files.
        policy: of router groups.
        settings: how the model was evaluated.
        scheme: how it was quantized, or None.
        files: digests of all files but the description.
    """

    folder: Path
    form: str
    base: str
    weights_sha256: str
    policy: GroupPolicy
    settings: Settings
    scheme: Scheme | None
    files: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> Export:
        """Read the description.

        Raises:
            UsageError: no export is there, or one of a newer prunebench.
        """
        path = folder / INSIDE / EXPORT_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA:
                raise UsageError(f"schema {data['schema']!r}", where=str(path), expected=f"schema {SCHEMA}")
            base, settings = data["base"], Settings(**data["settings"])
            known = str(data["format"]), str(base["model"]), str(base["weights_sha256"]), data["policy"]
            scheme = None if data["quantization"] is None else Scheme(**data["quantization"])
            return cls(folder, *known, settings, scheme, dict(data["files"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                "the folder holds no export", where=str(folder), expected=f"{INSIDE}/{EXPORT_FILE}, whole"
            ) from error

    def base_folder(self, base: str | Path | None) -> Path:
        """The base model's files, recognised by their digest.

        Raises:
            PrerequisiteError: they are not there, or another model's.
        """
        name = str(base or self.base)
        try:
            files = ModelFiles.of(resolve_model(name))
        except UsageError as error:
            raise PrerequisiteError(
                f"the base model is not there ({error.what})", where=name, fix="give its folder as base, or --base"
            ) from error
        if files.weights_sha256() != self.weights_sha256:
            raise PrerequisiteError(
                "this is not the export's base model", where=name, expected=f"weights sha256 {self.weights_sha256}"
            )
        return files.folder


def load(folder: str | Path, *, base: str | Path | None = None, device: str | None = None) -> Any:
    """The model of an export, as a transformers model in the dtype and experts implementation that were evaluated.

    A native export gives the base model with the plan installed on it for good: its logits are the evaluated model's
    bit for bit, on the same device and for the same batches. Its hooks are part of it; do not save or copy it. The plan
    may carry a method's file, whose code is then run.

    Args:
        folder: of the export.
        base: the base model, where it is not found under its old name; native only.
        device: `cpu` or `cuda`; the one that was evaluated on if None.

    Raises:
        UsageError: no export, or files that cannot be loaded.
        PrerequisiteError: the base model or the device is not there.
        IntegrityError: saved router rows are not those of the base model.
    """
    export = Export.read(Path(folder))
    settings = export.settings if device is None else changed(export.settings, device=device)
    if export.form == "native":
        return _installed(export, export.base_folder(base), settings)
    if export.form == "vllm-mone":
        plan = vllm_mone.plan_of(export.folder, Anatomy.of(export.folder))
        return _pruned(vllm_mone.weights_of(export.folder, settings), plan, export.policy)
    if export.form == "ct":
        need_compressed_tensors()
        assert export.scheme is not None
        return ct.load(export.folder, settings, export.scheme)
    return settings.weights(export.folder)


def _installed(export: Export, base: Path, settings: Settings) -> Any:
    """The base model with the plan of an export on it, and its integers in the place of weights."""
    plan = native.read_plan(export.folder)
    if export.form != "native":
        return _pruned(settings.weights(base), plan, export.policy)
    native.check_router(export.folder, base)
    # The description says so: without the file this is no export of the unquantized model.
    quantized = f"{INSIDE}/{native.INTEGERS}" in export.files
    integers = native.read_integers(export.folder) if quantized else None
    return _pruned(settings.weights(base), plan, export.policy, integers)


def _pruned(model: Any, plan: Plan, policy: GroupPolicy, integers: QuantizedModel | None = None) -> Any:
    """The model with the plan on it; the hooks keep what they need alive."""
    moe = open_model(model)
    if integers is not None:
        integers.put(moe)
        plan = changed(plan, edits=integers.unquantized(moe, plan.edits))
    installed(moe, plan, policy=policy).__enter__()  # never to be left
    return model


@dataclass(frozen=True)
class Verification:
    """What was saved against its source, over the probe's tokens.

    Args:
        form: name of the format.
        tokens: compared, each over the whole vocabulary.
        exact: every log-probability has the same bits.
        largest: difference of log-probabilities.
        divergence: mean KL of source and saved, nats per token.
        same_first: share of tokens whose likeliest next token is the same.
        allowed: mean KL allowed; 0 means the same bits.
    """

    form: str
    tokens: int
    exact: bool
    largest: float
    divergence: float
    same_first: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether they agree as they must."""
        return self.exact or (self.allowed > 0 and self.divergence <= self.allowed)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "passed": self.passed}


def verify(
    folder: str | Path,
    *,
    base: str | Path | None = None,
    device: str | None = None,
    ids_BL: Tensor | None = None,
) -> Verification:
    """Compare log-probabilities of an export's files with those of its source, the base model with the plan on it.

    Args:
        folder: of the export.
        base: the base model, where it is not found under its old name.
        device: where both are run; as evaluated if None.
        ids_BL: token ids to compare on; by default `PROBE`, in the base model's tokens.

    Raises:
        IntegrityError: a file is missing, or is not as it was written.
        PruneBenchError: as `load`.
    """
    export = Export.read(Path(folder))
    _check_files(export)
    if device is not None:
        export = changed(export, settings=changed(export.settings, device=device))
    base_folder = export.base_folder(base)
    if ids_BL is None:
        ids_BL = calibration_tokens(PROBE, load_tokenizer(base_folder)).ids_BL
    source_BLV = _log_probabilities(_source(export, base_folder), ids_BL)
    saved_BLV = _log_probabilities(load(export.folder, base=base, device=export.settings.device), ids_BL)
    if source_BLV.shape != saved_BLV.shape:
        raise IntegrityError(f"logits of shape {list(saved_BLV.shape)}", expected=f"{list(source_BLV.shape)}")
    divergence_BL = (source_BLV.exp() * (source_BLV - saved_BLV)).sum(-1)
    return Verification(
        export.form,
        ids_BL.numel(),
        bool(torch.equal(source_BLV, saved_BLV)),
        float((source_BLV - saved_BLV).abs().max()),
        float(divergence_BL.mean()),
        float((source_BLV.argmax(-1) == saved_BLV.argmax(-1)).double().mean()),
        0.0 if export.form in EXACT else TOLERANCE[export.settings.dtype],
    )


def _check_files(export: Export) -> None:
    found = digests(export.folder, without=export.folder / INSIDE / EXPORT_FILE)
    for name, digest in export.files.items():
        if found.get(name) != digest:
            state = "is missing" if name not in found else "is not as it was written"
            raise IntegrityError(f"{name} {state}", where=str(export.folder), fix="export it again")


def _source(export: Export, base: Path) -> Any:
    """The evaluated model; for packed weights, the one that is cut and rounded as they were."""
    if export.scheme is not None:
        need_compressed_tensors()
        plan = native.read_plan(export.folder)
        pruned = PrunedModel(export.base, base, export.weights_sha256, plan, export.policy, export.settings)
        with tempfile.TemporaryDirectory() as scratch:
            ct.simulate(pruned, Anatomy.of(base), Path(scratch), parse_size(DEFAULT_SHARD), export.scheme)
            return export.settings.weights(Path(scratch))
    return _installed(export, base, export.settings)


@torch.inference_mode()
def _log_probabilities(model: Any, ids_BL: Tensor) -> Tensor:
    """Log-probabilities over the vocabulary, in float64 of the model's logits, on the host ([B, L, V])."""
    device = model.get_input_embeddings().weight.device
    logits_BLV: Tensor = model(input_ids=ids_BL.to(device), use_cache=False).logits
    return logits_BLV.cpu().double().log_softmax(-1)
