"""Opened models: each its own copy; scored, selected from and renumbered in a line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prunebench import Budget, Count, load_method
from prunebench.errors import UsageError
from prunebench.testing import FAMILIES, opened_model, random_ids, random_model, relabel_model, score, select


def logits(moe) -> torch.Tensor:
    with torch.inference_mode():
        return moe.model(input_ids=random_ids(2, 12), use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_an_opened_model_is_the_random_model_of_the_same_arguments(family):
    moe = opened_model(family, experts=8, top_k=2, seed=5)
    plain = random_model(family, experts=8, top_k=2, seed=5)
    for (name, got), (_, wanted) in zip(moe.model.state_dict().items(), plain.state_dict().items(), strict=True):
        assert torch.equal(got, wanted), name
    assert {(shape.experts, shape.top_k) for shape in moe.shapes} == {(8, 2)}
    assert moe.experts_implementation == "eager"


def test_what_is_done_to_one_model_does_not_reach_the_next():
    first = opened_model(experts=8, top_k=2)
    first.layers[0].router.weight.zero_()
    first.layers[0].experts.down_proj.zero_()
    second = opened_model(experts=8, top_k=2)
    assert second.layers[0].router.weight.abs().min() > 0
    assert second.layers[0].experts.down_proj.abs().max() > 0
    # The view's layers are the modules of its own model.
    assert second.layers[0].router is second.model.get_submodule(second.layers[0].name + ".gate")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_renumbered_model_computes_the_same_if_its_router_has_no_groups(family):
    moe = opened_model(family, experts=8, top_k=2)
    old_of_new = [3, 0, 7, 1, 6, 2, 5, 4]
    twin = relabel_model(moe, old_of_new)
    for mine, theirs in zip(moe.layers, twin.layers, strict=True):
        assert torch.equal(theirs.router_rows_ED[: mine.expert_count], mine.router_rows_ED[old_of_new])
        for new, old in enumerate(old_of_new):
            for name, weight in mine.weights(old).items():
                assert torch.equal(theirs.weights(new)[name], weight)
        if mine.bias_E is not None:
            identities = range(mine.expert_count, mine.choices)
            assert torch.equal(theirs.bias_E.reshape(-1), mine.bias_E.reshape(-1)[[*old_of_new, *identities]])
    if moe.convention.groups is None:
        torch.testing.assert_close(logits(twin), logits(moe), rtol=0, atol=1e-5 * moe.convention.factor)
        if moe.convention.gates_on == "input":
            return  # no statistics
        counts = [score(m, [Count()]).layers for m in (moe, twin)]
        for index in counts[0]:
            theirs_E, mine_E = (found[index]["count"].value() for found in reversed(counts))
            np.testing.assert_array_equal(theirs_E, mine_E[old_of_new])


def test_a_relabelling_that_is_none_is_refused():
    with pytest.raises(UsageError, match=r"old_of_new \[0, 0, 1, 2\]; expected each id from 0 to 3 once"):
        relabel_model(opened_model(experts=4, top_k=1), [0, 0, 1, 2])


def test_scores_are_of_the_given_tokens():
    moe = opened_model(experts=8, top_k=2)
    assert score(moe, [Count()]).tokens == 4 * 24
    result = score(moe, [Count()], ids_BL=random_ids(1, 2))
    assert result.tokens == 2
    assert [int(found["count"].value().sum()) for found in result.layers.values()] == [4, 4]


def test_select_is_the_methods_own_answer():
    moe = opened_model(experts=8, top_k=2)
    ids = random_ids(3, 8)
    mask = select(load_method("frequency"), moe, Budget(keep=6), ids_BL=ids)
    found = score(moe, [Count()], ids_BL=ids)
    for layer in mask.layers:
        count_E = found.layers[layer.index]["count"].value()
        assert layer.pruned == tuple(sorted(sorted(range(8), key=lambda e: (count_E[e], -e))[:2]))
    random = [select(load_method("random"), moe, Budget(keep=6), seed=seed) for seed in (0, 0, 1)]
    assert random[0] == random[1] != random[2]
