"""The format vllm-mone: the layout that vLLM 0.32 and later run as expert substitution (MoNE).

    config.json: "approximate_experts": {"1": [1, 6], …}        layer -> replaced ids
    model.layers.1.mlp.gate.weight                              every row of the router
    model.layers.1.mlp.experts.0.{gate,up,down}_proj.weight     survivors keep their ids
    model.layers.1.mlp.experts.1.approx_value [D]               one vector per replaced expert

Routing is that of the whole model; a replaced expert adds its gate times its vector. Sources: vLLM's
`docs/design/expert_substitution.md` and `model_executor/layers/fused_moe/expert_substitution.py`. transformers does not
read it; `load` here does, by giving replaced experts weights that nothing asks for and installing their vectors.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.export.pruned import Anatomy, PrunedModel, Settings
from prunebench.export.shards import Entry, TensorFiles, bytes_of, write_shards
from prunebench.export.weights import copy_small_files, retained, write_config
from prunebench.mask import Mask
from prunebench.moe.load import DTYPES
from prunebench.plan import FillPlan, LayerPlan, Plan
from prunebench.replacement import Constant
from prunebench.storage import INDEX, expert_of, layer_of, part_of, read_headers, shards_of

__all__ = ["KEY", "plan_of", "weights_of", "write"]

KEY = "approximate_experts"
_VALUE = "approx_value"
_PREFIX = re.compile(r"(.*\.experts)\.\d+\.")


def write(pruned: PrunedModel, anatomy: Anatomy, folder: Path, limit: int) -> None:
    """Write config, weights, vectors and tokenizer; `refuse` has been asked.

    Vectors are stored in the dtype that they were added in, that of the evaluated model, so that nothing is rounded. An
    expert that nothing answers for has a vector of zeros, as the format asks for one.
    """
    replaced = {str(layer.index): list(layer.pruned) for layer in pruned.plan.mask.layers if layer.pruned}
    write_config(pruned.folder, folder, {KEY: replaced}, of_text={})
    with TensorFiles(pruned.folder) as files:
        entries = sorted([*retained(pruned, anatomy, files), *_vectors(pruned, anatomy)], key=lambda one: one.name)
        write_shards(folder, entries, limit)
    copy_small_files(pruned.folder, folder)


def _vectors(pruned: PrunedModel, anatomy: Anatomy) -> Iterator[Entry]:
    # The files may call a block otherwise than transformers does.
    named = {layer_of(name): found[1] for name in anatomy.headers if (found := _PREFIX.match(name))}
    for layer in anatomy.layers:
        for expert in pruned.plan.mask.pruned_of(layer.index):
            state = pruned.plan.state_of(layer.index, expert)
            value_D = next(iter(state.values()), torch.zeros(layer.width)).to(DTYPES[pruned.settings.dtype])
            yield Entry(
                f"{named[layer.index]}.{expert}.{_VALUE}", bytes_of(value_D), partial(torch.Tensor.clone, value_D)
            )


def plan_of(folder: Path, anatomy: Anatomy) -> Plan:
    """What the files say of a pruned model: replaced experts, each answered by its vector.

    Raises:
        UsageError: a replaced expert without a vector, or the reverse.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    pruned = {int(layer): tuple(ids) for layer, ids in config[KEY].items()}
    named = {
        (index, expert): name
        for name in read_headers(folder)
        if name.endswith(f".{_VALUE}")
        and (index := layer_of(name)) is not None
        and (expert := expert_of(name)) is not None
    }
    wanted = {(index, expert) for index, ids in pruned.items() for expert in ids}
    if different := sorted(wanted ^ set(named)):
        raise UsageError(
            f"layer {different[0][0]}, expert {different[0][1]}: {_VALUE} and {KEY} disagree", where=str(folder)
        )
    tensors: dict[str, Tensor] = {}
    with TensorFiles(folder) as files:
        for (index, expert), name in named.items():
            tensors[f"{index}/{expert}/mean_D"] = files[name]
    layers = tuple(
        LayerPlan(
            layer.index,
            {expert: FillPlan(Constant.__name__, {"width": layer.width}) for expert in pruned.get(layer.index, ())},
            layer.convention.trained_scale,
            layer.convention.trained_scale,
        )
        for layer in anatomy.layers
    )
    mask = Mask.for_shapes([layer.shape for layer in anatomy.layers], pruned)
    return Plan(mask, layers, tensors, {})


def weights_of(folder: Path, settings: Settings) -> Any:
    """The model of the files, its replaced experts' weights zeros that no row is sent to."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch)
        # A file of the usual name would be taken for all there is.
        shard_of = {name: f"kept-{file}" for name, file in shards_of(folder).items() if not name.endswith(f".{_VALUE}")}
        for file in set(shard_of.values()):
            (whole / file).symlink_to((folder / file.removeprefix("kept-")).resolve())
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        replaced = config.pop(KEY)
        (whole / "config.json").write_text(json.dumps(config), encoding="utf-8")
        zeros = _missing(folder, {int(layer): set(ids) for layer, ids in replaced.items()})
        save_file(zeros, whole / "replaced.safetensors", metadata={"format": "pt"})
        shard_of.update(dict.fromkeys(zeros, "replaced.safetensors"))
        (whole / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shard_of}), encoding="utf-8")
        with _quietly():
            return settings.weights(whole)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' report on the vectors, which it does not know."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _missing(folder: Path, replaced: dict[int, set[int]]) -> dict[str, Tensor]:
    """Zeros in the place of every tensor of a replaced expert, as a surviving one of its layer has them."""
    zeros: dict[str, Tensor] = {}
    with TensorFiles(folder) as files:
        for name in files.names:
            index, expert = layer_of(name), expert_of(name)
            if index in replaced and expert is not None and part_of(name) == "experts":
                like = files[name]
                for other in replaced[index]:
                    zeros.setdefault(re.sub(r"\.experts\.\d+\.", f".experts.{other}.", name), torch.zeros_like(like))
    return zeros
