"""A reader of vLLM's expert substitution, written from its documented rules and from nothing of prunebench.

The rules (vLLM, docs/design/expert_substitution.md, and the form `approximate_experts`): the router chooses among all
experts and its weights are left as they are; a retained expert is stored under its own id; a replaced expert j has one
vector v_j, named `<experts>.<j>.approx_value`, of the routed output's width, and adds w_j(x)·v_j; every replaced expert
must have one, and nobody else may; ids are unique, within the router's, and never all of a layer.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

SUFFIX = ".approx_value"


def read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text())["weight_map"].values())
    return {name: tensor for file in sorted(files) for name, tensor in load_file(folder / file).items()}


def only_integer(path: str) -> int:
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    assert len(numbers) == 1, path
    return numbers[0]


class Substituted(nn.Module):
    """The experts of one layer: retained ones by id, vectors for the rest."""

    def __init__(self, retained: dict[int, dict[str, Tensor]], values: dict[int, Tensor], count: int) -> None:
        super().__init__()
        assert set(retained) | set(values) == set(range(count))
        assert not set(retained) & set(values)
        assert retained, "a layer must keep an expert"
        self.retained, self.values = retained, values

    def expert(self, number: int, x_SD: Tensor) -> Tensor:
        own = {name: tensor.double() for name, tensor in self.retained[number].items()}
        gate, up, down = own["gate_proj"], own["up_proj"], own["down_proj"]
        return (torch.nn.functional.silu(x_SD @ gate.T) * (x_SD @ up.T)) @ down.T

    def forward(self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        total_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
        for token in range(x_TD.shape[0]):
            for slot in range(index_TK.shape[1]):
                number, weight = int(index_TK[token, slot]), weights_TK[token, slot].double()
                value_D = self.values.get(number)
                answer_D = value_D.double() if value_D is not None else self.expert(number, x_TD[token].double())
                total_TD[token] += weight * answer_D
        return total_TD.to(x_TD.dtype)


def read_model(folder: Path):
    """The checkpoint as a model that runs on transformers' own attention, norms and routers."""
    config = AutoConfig.from_pretrained(folder)
    replaced = {int(layer): sorted(ids) for layer, ids in config.approximate_experts.items()}
    tensors = {name: tensor.float() for name, tensor in read_tensors(folder).items()}
    values: dict[int, dict[int, Tensor]] = {}
    retained: dict[int, dict[int, dict[str, Tensor]]] = {}
    for name in [name for name in tensors if ".experts." in name and "shared_experts" not in name]:
        tensor = tensors.pop(name)
        if name.endswith(SUFFIX):
            path, _, number = name.removesuffix(SUFFIX).rpartition(".")
            layer = only_integer(path)
            assert int(number) in replaced[layer], f"{name} is not listed"
            values.setdefault(layer, {})[int(number)] = tensor
        else:
            path, number, word = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name).groups()
            layer = only_integer(path)
            assert int(number) not in replaced.get(layer, ()), f"{name} is replaced"
            retained.setdefault(layer, {}).setdefault(int(number), {})[word] = tensor
    for layer, ids in replaced.items():
        assert sorted(values[layer]) == ids, "a vector for every replaced expert"
        assert len(set(ids)) == len(ids)
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, module in list(model.named_modules()):
        if hasattr(module, "experts") and hasattr(module, "gate"):
            layer, count = only_integer(name), module.gate.weight.shape[0]
            for value_D in values.get(layer, {}).values():
                assert value_D.shape == (config.hidden_size,)
            module.experts = Substituted(retained[layer], values.get(layer, {}), count)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"} if config.tie_word_embeddings else not missing, missing
    model.tie_weights()
    return model
