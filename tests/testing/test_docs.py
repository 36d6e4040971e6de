"""The examples of docs/testing.md run as they stand, and its rules catch methods that break them."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

import prunebench.testing
from prunebench import Budget, Count, Method, load_method, prune_lowest
from prunebench.calibration.statistics import Statistic
from prunebench.mask import Mask
from prunebench.testing import strategies

TEXT = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
RULES, SHARED = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


# The same examples every time, enough to catch each; what they show need not be shrunk.
QUICK = settings(
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=100,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)


def module_of(text: str, folder: Path):
    """The example as a test file, imported as pytest would."""
    path = folder / f"example_{abs(hash(text))}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rules_of(module) -> dict:
    return {name: rule for name, rule in vars(module).items() if name.startswith("test_")}


@pytest.mark.parametrize("method", ["reap", "mone"])
def test_shipped_methods_keep_the_rules(tmp_path, method):
    module = module_of(RULES, tmp_path)
    module.METHOD = load_method(method)
    assert len(rules_of(module)) == 2
    for rule in rules_of(module).values():
        rule()


def test_the_example_of_shared_shapes_holds(tmp_path):
    [rule] = rules_of(module_of(SHARED, tmp_path)).values()
    rule()


class MeanOfMeans(Statistic):
    """Wrong: a batch of one token weighs as much as one of a thousand."""

    name = "mean_of_means"

    def start(self, experts, width, device):
        self.state = {"sum_E": torch.zeros(experts, dtype=torch.float64), "batches": torch.zeros(experts)}

    def update(self, batch):
        sums = torch.zeros_like(self.state["sum_E"]).index_add_(0, batch.expert_S, batch.gates_S.double())
        self.state["sum_E"] += sums / batch.counts_E.clamp(min=1)

    def value(self):
        return self.state["sum_E"].numpy()


class NotANumber(MeanOfMeans):
    """Wrong: nothing divided by nothing."""

    name = "not_a_number"

    def update(self, batch):
        sums = torch.zeros_like(self.state["sum_E"]).index_add_(0, batch.expert_S, batch.gates_S.double())
        self.state["sum_E"] = sums / batch.counts_E


class LowIdsFirst(MeanOfMeans):
    """Wrong: an expert's label is part of its number."""

    name = "low_ids_first"

    def update(self, batch):
        self.state["sum_E"] += batch.counts_E * torch.arange(len(batch.counts_E))


@dataclass(frozen=True)
class Wrong(Method):
    """A method whose parts can be broken one by one."""

    name = "wrong"
    statistic: type[Statistic] = Count
    one_more: bool = False
    blind: bool = False
    ungrouped: bool = False

    def select_needs(self):
        return (self.statistic(),)

    def select(self, layers, budget, *, rng):
        shapes = [layer.shape for layer in layers]
        if self.blind:
            budget = Budget(budget.ratio, budget.keep)
        if self.ungrouped:
            free = {
                s.index: [e for e in range(s.experts) if e not in budget.protected.get(s.index, ())] for s in shapes
            }
            return Mask.for_shapes(shapes, {s.index: free[s.index][: budget.pruned_count(s)] for s in shapes})
        mask = prune_lowest(layers, budget, lambda layer: layer.stats[self.statistic.name])
        if self.one_more:
            return Mask.for_shapes(shapes, {x.index: [*x.pruned, x.survivors[0]] for x in mask.layers})
        return mask


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (Wrong(), 2),
        (Wrong(statistic=MeanOfMeans), 1),
        (Wrong(statistic=NotANumber), 0),
        (Wrong(statistic=LowIdsFirst), 1),
        (Wrong(one_more=True), 1),
        (Wrong(blind=True), 1),
        (Wrong(ungrouped=True), 1),
    ],
    ids=["nothing", "mean of means", "not a number", "low ids first", "one more", "blind", "ungrouped"],
)
def test_the_rules_catch_what_they_are_for(tmp_path, method, kept):
    module = module_of(RULES, tmp_path)
    module.METHOD = method
    held = 0
    for rule in rules_of(module).values():
        try:
            QUICK(rule)()
        except (AssertionError, prunebench.PruneBenchError):
            continue
        held += 1
    assert held == kept


def test_the_page_names_every_strategy_and_every_helper():
    table = set(re.findall(r"^\| `(\w+)\(", TEXT, flags=re.MULTILINE))
    assert table >= set(strategies.__all__)
    for name in prunebench.testing.__all__:
        assert f"`{name}" in TEXT, name
