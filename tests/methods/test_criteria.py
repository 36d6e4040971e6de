"""Every shipped criterion prunes what its formula says, computed from captured layer inputs and weights."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest
import torch

from prunebench import Budget, load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens, score_pass
from prunebench.errors import UsageError
from prunebench.mask import LayerShape
from prunebench.method import LayerView, Method, Statistics, prune_lowest
from prunebench.moe import open_model
from prunebench.plan import layer_views
from prunebench.testing import random_ids, random_model

CRITERIA = ["frequency", "reap", "sge", "mone"]


def select(moe, name, budget, *, seed=0, ids=None):
    ids = random_ids(4, 24) if ids is None else ids
    method = load_method(name)
    tokens = CalibrationTokens(CalibrationSpec("file:x", *ids.shape), ids, "test")
    scores = score_pass(moe, tokens, method.select_needs())
    declared = tuple(statistic.name for statistic in method.select_needs())
    return method.select(layer_views(moe, scores, declared, name), budget, rng=np.random.default_rng(seed))


def formula(oracle, name, layer, *, x_TD, index_TK, gates_TK) -> list[float]:
    """One number per expert, straight from the docstrings."""
    tokens, result = len(x_TD), []
    for e in range(layer.expert_count):
        rows, slots = np.nonzero(index_TK == e)
        if not len(rows):
            result.append(0.0)
            continue
        f_SD, g_S = oracle.expert(layer.experts, e, x_TD[rows]), gates_TK[rows, slots]
        norm_S = np.linalg.norm(f_SD, axis=1)
        result.append({
            "frequency": float(len(rows)),
            "reap": float(np.mean(g_S * norm_S)),
            "sge": float(np.sum(g_S**2 * norm_S**2)),
            "mone": float(g_S.sum() / tokens * np.linalg.norm(f_SD.std(axis=0))),
        }[name])  # fmt: skip
    return result


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "granitemoe"])
def test_the_lowest_by_the_formula_go_and_ties_keep_the_lowest_id(oracle, family, name):
    moe = open_model(random_model(family))
    mask = select(moe, name, Budget.of_ratio("0.5"))
    with torch.inference_mode(), oracle.Trace(moe.layers) as trace:
        moe.model(input_ids=random_ids(4, 24))
    for layer in moe.layers:
        _, gates_TK, index_TK = (oracle.array(part) for part in trace.router[layer.index][0])
        x_TD = oracle.array(trace.inputs[layer.index][0])
        score = formula(oracle, name, layer, x_TD=x_TD, index_TK=index_TK, gates_TK=gates_TK)
        gone = sorted(range(16), key=lambda e: (score[e], -e))[:8]
        assert mask.pruned_of(layer.index) == tuple(sorted(gone))


@pytest.mark.parametrize("name", [*CRITERIA, "random"])
@pytest.mark.parametrize(("ratio", "gone"), [("0.5", 5), ("0.3", 3), ("0.39", 3), ("0.1", 1), ("0.6", 6)])
def test_floor_of_ratio_times_e_go_on_decimals(name, ratio, gone):
    moe = open_model(random_model("olmoe", experts=10))
    mask = select(moe, name, Budget.of_ratio(ratio), ids=random_ids(2, 8))
    assert [len(layer.pruned) for layer in mask.layers] == [gone, gone]


@pytest.mark.parametrize("name", [*CRITERIA, "random"])
def test_keep_leaves_exactly_that_many_and_protected_experts_stay(name):
    moe = open_model(random_model("olmoe"))
    free = select(moe, name, Budget(keep=5))
    assert [len(layer.survivors) for layer in free.layers] == [5, 5]
    protected = frozenset(free.pruned_of(1)[:4])
    mask = select(moe, name, Budget(keep=5, protected={1: protected}))
    assert not protected & set(mask.pruned_of(1))
    assert len(mask.pruned_of(1)) == 11
    assert name == "random" or mask.pruned_of(0) == free.pruned_of(0)


def test_random_is_decided_by_the_seed_alone():
    moe, other = open_model(random_model("olmoe")), open_model(random_model("olmoe", seed=7))
    masks = [select(m, "random", Budget.of_ratio("0.5"), seed=s) for m, s in ((moe, 0), (moe, 0), (other, 0), (moe, 1))]
    assert masks[0] == masks[1] == masks[2]
    assert masks[0] != masks[3]
    assert masks[0].pruned_of(0) != masks[0].pruned_of(1)


def test_random_prunes_every_expert_equally_often():
    moe = open_model(random_model("olmoe", experts=8, top_k=2))
    views = layer_views(moe, None, (), "random")
    method, counts = load_method("random"), np.zeros(8)
    for seed in range(400):
        counts[list(method.select(views, Budget(keep=4), rng=np.random.default_rng(seed)).pruned_of(0))] += 1
    # 200 ± 10 (binomial); five deviations.
    assert (np.abs(counts - 200) < 50).all()


def test_a_never_routed_expert_scores_zero_and_goes_first():
    moe = open_model(random_model("deepseek_v3"))
    for layer in moe.layers:
        layer.router.e_score_correction_bias[11] = -10.0
    for name in CRITERIA:
        assert all(mask.pruned == (11,) for mask in select(moe, name, Budget(keep=15)).layers), name


def views(scores, *, groups: int = 1, kept: int = 1, top_k: int = 2) -> list[LayerView]:
    """One layer without a model."""
    shape = LayerShape(3, len(scores), top_k, groups, kept)
    return [LayerView(shape, None, 1, Statistics({}, (), "x"), None)]


def lowest(scores, budget: Budget, **shape) -> tuple[int, ...]:
    return prune_lowest(views(scores, **shape), budget, lambda _: scores).pruned_of(3)


def test_of_equal_scores_the_lowest_id_is_kept():
    assert lowest([1.0] * 8, Budget(keep=3)) == (3, 4, 5, 6, 7)
    assert lowest([2.0, 1.0, 1.0, 1.0, 0.0, 2.0], Budget(keep=4)) == (3, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_number_is_refused(bad):
    with pytest.raises(
        UsageError, match=r"score gave scores of shape \(4,\), 1 not finite; in layer 3; expected 4 finite numbers"
    ):
        lowest([1.0, bad, 2.0, 3.0], Budget(keep=3))


def test_scores_of_the_wrong_shape_are_refused():
    with pytest.raises(UsageError, match=r"shape \(3,\), 0 not finite"):
        prune_lowest(views([1.0] * 4), Budget(keep=3), lambda _: [1.0, 2.0, 3.0])
    with pytest.raises(UsageError, match=r"shape \(4, 1\)"):
        prune_lowest(views([1.0] * 4), Budget(keep=3), lambda _: np.ones((4, 1)))


def test_group_limited_routers_lose_evenly_so_that_every_group_can_fill_the_slots():
    # The eight lowest scores are all in the first two groups.
    scores = list(range(16))
    assert lowest(scores, Budget(keep=8), groups=4, kept=2, top_k=4) == (0, 1, 4, 5, 8, 9, 12, 13)
    # Six over four groups: the two left over go to the groups with the lowest scores.
    assert lowest(scores, Budget(keep=10), groups=4, kept=2, top_k=4) == (0, 1, 4, 5, 8, 12)


def test_a_group_whose_protected_experts_forbid_its_share_is_refused():
    budget = Budget(keep=8, protected={3: frozenset({0, 1, 2})})
    with pytest.raises(UsageError, match="protected experts leave 7 to prune; in layer 3; expected 8"):
        lowest(list(range(16)), budget, groups=4, kept=2, top_k=4)


@pytest.mark.parametrize("family", ["deepseek_v2.groups", "deepseek_v3.groups"])
@pytest.mark.parametrize("name", [*CRITERIA, "random"])
@pytest.mark.parametrize("keep", [8, 9, 11, 13])
def test_every_criterion_leaves_every_group_enough(family, name, keep):
    moe = open_model(random_model(family))
    mask = select(moe, name, Budget(keep=keep), ids=random_ids(2, 12))
    mask.check_fits(moe.shapes)
    for layer in mask.layers:
        left = [sum(e // 4 == group for e in layer.survivors) for group in range(4)]
        assert sum(left) == keep
        assert max(left) - min(left) <= 1
        assert min(left) >= 2


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (Budget(keep=1), "leaves 1 experts"),
        (Budget(keep=8), "prunes nothing"),
        (Budget(ratio=Decimal("0.9")), "leaves 1 experts"),
        (Budget(ratio=Decimal("0.01")), "prunes nothing"),
    ],
)
def test_an_impossible_budget_is_refused(budget, reason):
    with pytest.raises(UsageError, match=reason):
        lowest(list(range(8)), budget)


def test_every_shipped_method_is_a_method_with_a_source():
    for name in [*CRITERIA, "random", "constant", "zero", "reroute"]:
        method = load_method(name)
        assert isinstance(method, Method)
        assert method.name == name
        assert method.reference
        assert type(method).selects() == (name in [*CRITERIA, "random"])
        assert type(method).keeps_slots() == (name in ("mone", "constant", "zero"))
