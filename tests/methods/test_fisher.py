"""The criterion `fisher` prunes the experts of the smallest Fisher, by the statistic that its labels ask for."""

from __future__ import annotations

import numpy as np
import pytest

from prunebench import Budget, Fisher, TrueFisher, UsageError, load_method
from prunebench.moe import open_model
from prunebench.testing import random_ids, random_model, score, select


@pytest.fixture(scope="module", params=["olmoe", "deepseek_v3", "granitemoe"])
def moe(request):
    return open_model(random_model(request.param))


@pytest.mark.parametrize(("labels", "statistic"), [("data", Fisher()), ("sampled", TrueFisher(5))])
def test_the_lowest_go_and_ties_keep_the_lowest_id(moe, labels, statistic):
    mask = select(load_method("fisher", {"labels": labels, "seed": 5}), moe, Budget.of_ratio("0.5"))
    measured = score(moe, [statistic])
    for layer in moe.layers:
        value_E = measured.layers[layer.index][statistic.name].value()
        gone = sorted(range(16), key=lambda e: (value_E[e], -e))[:8]
        assert mask.pruned_of(layer.index) == tuple(sorted(gone))


def test_never_routed_experts_go_first(moe):
    mask = select(load_method("fisher"), moe, Budget.of_ratio("0.25"), ids_BL=random_ids(1, 2))
    values = score(moe, [Fisher()], ids_BL=random_ids(1, 2))
    for layer in moe.layers:
        value_E = values.layers[layer.index]["fisher"].value()
        assert (value_E[list(mask.pruned_of(layer.index))] == 0).all()
        assert np.count_nonzero(value_E) <= 8


def test_unknown_labels_are_refused():
    with pytest.raises(UsageError, match="unknown labels 'true'; in fisher; expected data or sampled"):
        load_method("fisher", {"labels": "true"})
