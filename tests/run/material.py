"""What tests of runs share: a random model with the world's tokenizer, a suite of six items, and small methods."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prunebench.loader import content_root
from prunebench.run import ArmSpec
from prunebench.testing import random_model

EXPERTS, TOP_K = 16, 4

SUITE = '''"""Six choices, quickly."""

from prunebench import Item, Suite


class {title}(Suite):
    name = "{name}"
    version = 1
    tasks = ("{name}_choice",)
    headline = (("{name}_choice", "none", "acc"),)

    def run(self, evaluation):
        items = []
        for answer in evaluation.ask(self, "{name}_choice"):
            value = float(answer.metrics["none"]["acc"])
            scores = [round(response.loglikelihood, 6) for response in answer.responses]
            items.append(answer.item("acc", value, "ok" if value else "wrong", {{"scores": scores}}))
        return items


SUITE = {title}()
'''

TASK = """task: {name}_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: data/{name}.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
num_fewshot: 0
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""

METHOD = '''"""A method of a test."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from prunebench import Budget, Constant, Count, Fill, LayerView, Mask, Method, OutputMoments, Replacements, Routing
from prunebench import prune_lowest

{above}

@dataclass(frozen=True)
class Mine(Method):
    name = "mine"
    {fields}

    def select_needs(self):
        return (Count(), OutputMoments())

    def replace_needs(self):
        return (OutputMoments(),)

    def select(self, layers, budget, *, rng):
        {select}
{rest}
'''

LOWEST = 'return prune_lowest(layers, budget, lambda layer: layer.stats["count"])'


def write_model(folder: Path, family: str = "olmoe", **options: Any) -> Path:
    """A random checkpoint with the world's tokenizer."""
    folder.mkdir(parents=True)
    settings: dict[str, Any] = {"vocab_size": 1024, "experts": EXPERTS, "top_k": TOP_K, **options}
    random_model(family, **settings).save_pretrained(folder)
    for file in (content_root() / "fixtures" / "world" / "tokenizer").iterdir():
        shutil.copy(file, folder)
    return folder


def write_suite(folder: Path, name: str = "quick") -> Path:
    """A suite by path: six two-choice items, no generation."""
    for part in ("tasks", "data"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.py"
    file.write_text(SUITE.format(name=name, title=name.title()))
    (folder / "tasks" / f"{name}_choice.yaml").write_text(TASK.format(name=name))
    words = ("red", "blue", "green", "cake", "rice", "Oslo")
    rows = [
        {"id": f"q{n}", "context": f"Question: {word}?\nAnswer:", "choices": [" yes", " no"], "label": n % 2}
        for n, word in enumerate(words)
    ]
    (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_method(
    folder: Path, select: str = LOWEST, *, name: str = "mine", above: str = "", fields: str = "", rest: str = ""
) -> str:
    """A method file; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.py"
    file.write_text(METHOD.format(select=select, above=above, fields=fields, rest=rest))
    return str(file)


@pytest.fixture(scope="session")
def material() -> ModuleType:
    """This module."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random OLMoE: 2 layers, 16 experts, top-4."""
    return str(write_model(tmp_path_factory.mktemp("models") / "rand"))


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the suite of six items."""
    return str(write_suite(tmp_path_factory.mktemp("suites")))


@pytest.fixture
def spec(model: str, suite: str) -> Callable[..., ArmSpec]:
    """Quick arms: `frequency` at 50 % unless changed; `method=None, ratio=None` is the dense one."""

    def make(**changes: Any) -> ArmSpec:
        values: dict[str, Any] = {"model": model, "method": "frequency", "ratio": "0.5", "suites": (suite,)}
        return ArmSpec(**{**values, "blocks": 8, "length": 32, **changes})

    return make
