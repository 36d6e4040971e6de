"""The native format: everything the harness can run, as data beside a reference to the base model.

    prunebench/plan.safetensors    mask, fills (class, config, tensors), edited weights, scales
    prunebench/router.safetensors  every row of every router, as the base has them
    prunebench/methods/*.py        the files whose own fill classes the plan names
    prunebench/integers.safetensors
                                   of a quantized run: packed integers, scales and zeros (`quantize.packed`)

The base model's weights are not copied: only on them are the logits those of the evaluated model, bit for bit. It is
found by name, or given, and recognised by the digest of its files.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor

from prunebench.errors import IntegrityError
from prunebench.export.pruned import Anatomy, PrunedModel
from prunebench.export.shards import TensorFiles
from prunebench.export.weights import copy_small_files
from prunebench.loader import load_method_class, source_of
from prunebench.plan import FillPlan, Plan
from prunebench.quantize import QuantizedModel, read_packed, write_packed
from prunebench.storage import layer_of, part_of

__all__ = ["INSIDE", "INTEGERS", "ROUTER", "check_router", "read_integers", "read_plan", "write", "write_plan"]

INSIDE: Final = "prunebench"
_PLAN: Final = "plan.safetensors"
ROUTER: Final = "router.safetensors"
INTEGERS: Final = "integers.safetensors"
_METHODS: Final = "methods"


def write(pruned: PrunedModel, anatomy: Anatomy, folder: Path, limit: int) -> None:
    """Write the router's rows, integers if there are any, and the tokenizer; the plan is written with every format."""
    del limit
    if pruned.quantized is not None:
        write_packed(folder / INSIDE / INTEGERS, pruned.quantized, apart=anatomy.stacked is None)
    inside = {layer.index for layer in pruned.plan.mask.layers}
    with TensorFiles(pruned.folder) as files:
        rows: dict[str, Tensor] = {
            name: files[name] for name in files.names if part_of(name) == "router" and layer_of(name) in inside
        }
        save_file(rows, folder / INSIDE / ROUTER, metadata={"format": "pt"})
    copy_small_files(pruned.folder, folder)


def write_plan(plan: Plan, folder: Path) -> None:
    """Save a plan, and beside it the method files whose fill classes it names."""
    inside = folder / INSIDE
    inside.mkdir(exist_ok=True)
    names: dict[str, str] = {}

    def carried(fill: FillPlan) -> FillPlan:
        if fill.file is None:
            return fill
        path = Path(fill.file)
        if source_of(load_method_class(fill.file)).sha256 != fill.file_sha256:
            raise IntegrityError("the method file has changed since the plan was made", where=fill.file)
        if fill.file not in names:
            (inside / _METHODS).mkdir(exist_ok=True)
            names[fill.file] = f"{_METHODS}/{path.name}"
            shutil.copyfile(path, inside / names[fill.file])
        return replace(fill, file=names[fill.file])

    layers = tuple(
        replace(layer, fills={expert: carried(fill) for expert, fill in layer.fills.items()}) for layer in plan.layers
    )
    replace(plan, layers=layers).save(inside / _PLAN)


def read_plan(folder: Path) -> Plan:
    """The plan of an export, its method files those that were carried along."""
    inside = folder / INSIDE
    plan = Plan.load(inside / _PLAN)

    def found(fill: FillPlan) -> FillPlan:
        return fill if fill.file is None else replace(fill, file=str((inside / fill.file).resolve()))

    layers = tuple(
        replace(layer, fills={expert: found(fill) for expert, fill in layer.fills.items()}) for layer in plan.layers
    )
    return replace(plan, layers=layers)


def read_integers(folder: Path) -> QuantizedModel:
    """The integers of an export that has them.

    Raises:
        UsageError, PrerequisiteError: as `read_packed`.
    """
    return read_packed(folder / INSIDE / INTEGERS)


def check_router(pruned_folder: Path, base: Path) -> None:
    """Raise unless the saved router rows are the base model's.

    Raises:
        IntegrityError: naming the tensor.
    """
    from safetensors.torch import load_file

    with TensorFiles(base) as files:
        for name, saved in load_file(pruned_folder / INSIDE / ROUTER).items():
            if name not in files.names or not saved.equal(files[name]):
                raise IntegrityError("the base model has other router rows", where=name, expected="those of the export")
