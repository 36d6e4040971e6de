"""Every published criterion scores what its formula says, in a float64 loop over tokens, for routers of every kind."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from prunebench import Budget, UsageError, load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens, score_pass
from prunebench.calibration.score import with_built_in
from prunebench.mask import LayerShape
from prunebench.method import LayerView, Statistics
from prunebench.moe import open_model
from prunebench.plan import layer_views
from prunebench.run.selection import choose_mask
from prunebench.testing import opened_model, random_ids, random_model, select

_NAME = "prunebench_tests_layer_by_hand"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).parents[1] / "calibration" / "by_hand.py")
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])
hand = sys.modules[_NAME]

FAMILIES = [family for family in hand.definitions.ROUTERS if family != "llama4"]
SCORED = [
    ("frequency", {}),
    ("seer", {}),
    ("seer", {"over": "all"}),
    ("ean", {}),
    ("unified", {"member": "man"}),
    ("unified", {"member": "msan"}),
    ("unified", {"member": "gated-ean"}),
    ("reap", {}),
    ("reap-variants", {"aggregate": "rms"}),
    ("reap-variants", {"aggregate": "sum"}),
    ("sge", {}),
    ("mone", {}),
    ("mone-variants", {"score": "printed"}),
    ("mone-variants", {"score": "routing-score"}),
    ("mone-variants", {"score": "fluctuation"}),
    ("mone-variants", {"score": "released"}),
    ("razor", {"quantity": "rcs"}),
    ("razor", {"quantity": "rcs-loo", "aggregate": "mean"}),
    ("razor", {"quantity": "refill"}),
    ("razor", {"quantity": "refill", "aggregate": "sum-squares"}),
    ("razor", {"quantity": "frozen-refill", "aggregate": "mean"}),
]
IDS = ["-".join([name, *parameters.values()]) for name, parameters in SCORED]


def released(batches: list[list[np.ndarray]], width: int) -> float:
    """‖sqrt(v)‖₂ of the released running variance, a line of it after the other."""
    seen, mean_D, variance_D = 0, np.zeros(width), np.zeros(width)
    for rows in batches:
        if not rows:
            continue
        t = len(rows)
        mean_D = mean_D * seen / (seen + t) + sum(rows) / (seen + t)
        if seen > 0:
            variance_D = variance_D * (seen - 1) / (seen + t - 1) + sum((f - mean_D) ** 2 for f in rows) / (seen + t)
        seen += t
    return float(np.sqrt(variance_D.sum()))


def formulas(router, array, index_TK, outputs_TED, batch_of_T) -> dict[str, list[float]]:
    """One number per expert and criterion, each from the tokens of that expert, one after the other."""
    tokens, experts, width = outputs_TED.shape
    p_TE = hand.scores_of(router, array["logits"])
    result = defaultdict(list)
    for e in range(experts):
        rows = [(t, k) for t in range(tokens) for k, chosen in enumerate(index_TK[t]) if chosen == e]
        n = len(rows)
        g = [array["gates"][t][k] for t, k in rows]
        norm = [math.sqrt(math.fsum(x * x for x in outputs_TED[t, e])) for t, _ in rows]
        gated = [a * b for a, b in zip(g, norm, strict=True)]
        frequency = math.fsum(g) / tokens
        mean_D = sum(outputs_TED[t, e] for t, _ in rows) / max(n, 1)
        squares = math.fsum(float(((outputs_TED[t, e] - mean_D) ** 2).sum()) for t, _ in rows)
        by_batch = [[outputs_TED[t, e] for t, _ in rows if batch_of_T[t] == b] for b in sorted(set(batch_of_T))]
        result["frequency"].append(n)
        result["seer"].append(math.fsum(p_TE[t, e] for t, _ in rows))
        result["seer-all"].append(math.fsum(p_TE[t, e] for t in range(tokens)))
        result["ean"].append(math.fsum(norm))
        result["unified-man"].append(math.fsum(norm) / max(n, 1))
        result["unified-msan"].append(math.fsum(x * x for x in norm) / max(n, 1))
        result["unified-gated-ean"].append(math.fsum(gated))
        result["reap"].append(math.fsum(gated) / max(n, 1))
        result["reap-variants-rms"].append(math.sqrt(math.fsum(x * x for x in gated) / max(n, 1)))
        result["reap-variants-sum"].append(math.fsum(gated))
        result["sge"].append(math.fsum(x * x for x in gated))
        result["mone"].append(frequency * math.sqrt(squares / max(n, 1)))
        fluctuation = math.sqrt(squares / (n - 1)) if n > 1 else 0.0
        result["mone-variants-printed"].append(frequency * fluctuation)
        result["mone-variants-routing-score"].append(frequency)
        result["mone-variants-fluctuation"].append(fluctuation)
        result["mone-variants-released"].append(frequency * released(by_batch, width))
    for name, sums in hand.damage(router, array, index_TK, outputs_TED).items():
        n = np.maximum(result["frequency"], 1)
        result[f"razor-{name}"] = np.sqrt(sums[1] / n)
        result[f"razor-{name}-mean"] = sums[0] / n
        result[f"razor-{name}-sum-squares"] = sums[1]
    return result


@pytest.fixture
def scores_of(monkeypatch):
    """What a method's select hands to `prune_lowest`, by layer."""

    def ask(method, views, budget) -> dict[int, np.ndarray]:
        module = sys.modules[type(method).__module__]
        own, found = module.prune_lowest, {}

        def spy(layers, budget, score, **options):
            found.update({layer.index: np.asarray(score(layer), dtype=np.float64) for layer in layers})
            return own(layers, budget, score, **options)

        monkeypatch.setattr(module, "prune_lowest", spy)
        found["mask"] = method.select(views, budget, rng=np.random.default_rng(0))
        return found

    return ask


@pytest.mark.parametrize("family", FAMILIES)
def test_every_score_is_its_formula_also_of_experts_without_tokens(family, scores_of):
    exact = family != "gemma4"  # whose router cannot be had in float64
    moe = open_model(random_model(family, dtype=torch.float64 if exact else torch.float32))
    # Two forwards of one block; 16 tokens leave some experts of most layers without any.
    ids_BL = random_ids(2, 8)
    methods = [(label, load_method(name, parameters)) for label, (name, parameters) in zip(IDS, SCORED, strict=True)]
    needs = [one for _, method in methods for one in method.select_needs()]
    tokens = CalibrationTokens(CalibrationSpec("file:x", 2, 8), ids_BL, "test")
    scores = score_pass(moe, tokens, with_built_in(needs), batch_tokens=8)
    wanted = defaultdict(list)
    # The same two forwards, so that kernels see the same rows.
    halves = [list(hand.captured(moe, ids_BL[row : row + 1])) for row in range(2)]
    for (index, first, index_TK, outputs), (_, second, more_TK, more) in zip(*halves, strict=True):
        array = {
            key: first[key] if key in {"bias", "scale"} else np.concatenate([first[key], second[key]]) for key in first
        }
        wanted[index] = formulas(
            hand.definitions.ROUTERS[family],
            array,
            index_TK + more_TK,
            np.concatenate([outputs, more]),
            [0] * 8 + [1] * 8,
        )
    for label, method in methods:
        declared = tuple(one.name for one in method.select_needs())
        views = layer_views(moe, scores, declared, label)
        if label.startswith("razor") and "frozen" not in label and not moe.convention.renormalised:
            with pytest.raises(UsageError, match="is defined for routers that renormalise"):
                method.select(views, Budget(keep=12), rng=np.random.default_rng(0))
            continue
        found = scores_of(method, views, Budget(keep=12))
        for index, formula in wanted.items():
            np.testing.assert_allclose(
                found[index], formula[label][:16], rtol=1e-6, atol=1e-9 if exact else 1e-6, err_msg=f"{label} {index}"
            )
        found["mask"].check_fits(moe.shapes)


def test_unrouted_experts_are_named_in_the_report_and_go_first():
    moe = opened_model("olmoe")
    method = load_method("unified")
    ids_BL = random_ids(1, 3)
    tokens = CalibrationTokens(CalibrationSpec("file:x", 1, 3), ids_BL, "test")
    needs = method.select_needs()
    scores = score_pass(moe, tokens, needs)
    mask = choose_mask(
        moe,
        method,
        Budget(keep=14),
        needs=needs,
        scores=scores,
        tokens=tokens,
        rng=np.random.default_rng(0),
    )
    for layer in mask.layers:
        count_E = scores.layers[layer.index]["count"].value()
        unrouted = np.flatnonzero(count_E == 0).tolist()
        assert len(unrouted) >= 4
        # Ties of zeros: the lowest ids are kept.
        assert list(layer.pruned) == unrouted[-2:]
        report = mask.report["layers"][str(layer.index)]
        assert report["never_routed"] == report["zero_scores"] == unrouted
        assert report["never_routed_pruned"] == 2
        assert report["kept_by_id"] == unrouted[:-2]
    assert mask.report["schedule"] == "one_shot"
    assert mask.report["score"] == "man"


# ---------------------------------------------------------------------------------------------------------- AIMER


def weights_view(weights: list[torch.Tensor]) -> LayerView:
    class Layer:
        width = 4

        def weights(self, expert):
            return {"gate_up_proj": weights[expert], "gate_up_proj_bias": torch.full((3,), 1e9)}

    shape = LayerShape(3, len(weights), 2)
    return LayerView(shape, None, 0, Statistics({}, (), "x"), Layer())


def aimer_of(weights: list[torch.Tensor], scores_of) -> list[float]:
    found = scores_of(load_method("aimer"), [weights_view(weights)], Budget(keep=len(weights) - 1))
    return (-found[3]).tolist()


def test_aimers_known_values(scores_of):
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(400, 500, generator=generator)
    uniform = torch.rand(400, 500, generator=generator) * 2 - 1
    laplace = torch.log(torch.rand(400, 500, generator=generator)) * torch.sign(uniform)
    one = torch.zeros(4, 25)
    one[2, 3] = -7.0
    found = aimer_of([torch.full((4, 25), -3.0), one, torch.zeros(4, 25), normal, laplace, uniform], scores_of)
    assert found[:3] == pytest.approx([1.0, 1 / math.sqrt(100), 0.0], abs=1e-12)
    assert found[3:] == pytest.approx([math.sqrt(2 / math.pi), 1 / math.sqrt(2), math.sqrt(3) / 2], rel=5e-3)


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "nemotron_h", "longcat_flash"])
def test_aimer_pools_every_entry_of_the_experts_matrices(family, scores_of):
    moe = opened_model(family)
    method = load_method("aimer")
    found = scores_of(method, layer_views(moe, None, (), "aimer"), Budget(keep=12))
    for layer in moe.layers:
        for e in range(layer.expert_count):
            entries = [
                float(x)
                for name, weight in layer.weights(e).items()
                if "bias" not in name
                for x in weight.double().flatten()
            ]
            ratio = (sum(map(abs, entries)) / len(entries)) / math.sqrt(sum(x * x for x in entries) / len(entries))
            assert found[layer.index][e] == pytest.approx(-ratio, rel=1e-12)
        # The most even go.
        gone = sorted(range(16), key=lambda e: (found[layer.index][e], -e))[:4]
        assert sorted(gone) == list(found["mask"].pruned_of(layer.index))


# --------------------------------------------------------------------------------------- residual products (App. E.5)


def search(moe, method, budget, ids_BL, *, batch_tokens: int = 8192):
    tokens = CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")
    return choose_mask(
        moe,
        method,
        budget,
        needs=method.select_needs(),
        scores=None,
        tokens=tokens,
        rng=np.random.default_rng(0),
        batch_tokens=batch_tokens,
    )


@pytest.mark.parametrize("operator", ["deletion", "constant"])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "granitemoe", "deepseek_v2.groups"])
def test_the_chosen_set_has_the_least_joint_error_of_the_layer(family, operator):
    moe = open_model(random_model(family, experts=8, top_k=2, dtype=torch.float64))
    ids_BL = random_ids(2, 10)
    mask = search(moe, load_method("residual-products", {"operator": operator}), Budget(keep=5), ids_BL)
    for index, array, index_TK, outputs_TED in hand.captured(moe, ids_BL):
        errors = {}
        mean_ED = np.zeros(outputs_TED.shape[1:])
        for e in range(8 if operator == "constant" else 0):
            rows = [t for t, chosen in enumerate(index_TK) if e in chosen]
            if rows:
                # As it is stored.
                mean_ED[e] = outputs_TED[rows, e].mean(axis=0).astype(np.float32)
        for gone in combinations(range(8), 3):
            shape = next(shape for shape in moe.shapes if shape.index == index)
            left = [sum(shape.group_of(e) == g for e in range(8) if e not in gone) for g in range(shape.groups)]
            if min(left) < shape.fewest_per_group():
                continue
            error = 0.0
            for t, chosen in enumerate(index_TK):
                missing = [k for k, e in enumerate(chosen) if e in gone]
                parts = [array["gates"][t][k] * (outputs_TED[t, chosen[k]] - mean_ED[chosen[k]]) for k in missing]
                error += float((sum(parts, np.zeros(outputs_TED.shape[2])) ** 2).sum())
            errors[gone] = error
        best = min(errors.values())
        assert errors[mask.pruned_of(index)] <= best * (1 + 1e-9) + 1e-15
    assert mask.report["schedule"] == "layerwise"


def test_without_interactions_experts_are_ranked_by_their_own_error():
    moe = opened_model("olmoe", experts=12)
    ids_BL = random_ids(3, 16)
    mask = search(moe, load_method("residual-products", {"interactions": False}), Budget(keep=7), ids_BL)
    for index, array, index_TK, outputs_TED in hand.captured(moe, ids_BL):
        own = []
        for e in range(12):
            rows = [(t, k) for t, chosen in enumerate(index_TK) for k, x in enumerate(chosen) if x == e]
            mean_D = sum(outputs_TED[t, e] for t, _ in rows) / max(len(rows), 1)
            own.append(sum(array["gates"][t][k] ** 2 * ((outputs_TED[t, e] - mean_D) ** 2).sum() for t, k in rows))
        assert list(mask.pruned_of(index)) == sorted(np.argsort(own)[:5].tolist())


def test_the_tilts_own_residuals_are_smaller_than_the_constants():
    moe = opened_model("olmoe", experts=8, top_k=2)
    ids_BL = random_ids(8, 24)
    masks = [
        search(moe, load_method("residual-products", parameters), Budget(keep=5), ids_BL)
        for parameters in ({"operator": "constant"}, {"operator": "tilt", "rank": 2})
    ]
    for mask in masks:
        mask.check_fits(moe.shapes)
    assert masks[0] != masks[1]


# ------------------------------------------------------------------------------------------- subset search (NAEE)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "deepseek_v3", "deepseek_v2.groups"])
def test_subset_search_finds_the_set_whose_router_moves_the_layer_least(family):
    moe = open_model(random_model(family, experts=8, top_k=2, dtype=torch.float64))
    router = hand.definitions.ROUTERS[family]
    ids_BL = random_ids(2, 8)
    mask = search(moe, load_method("subset-search"), Budget(keep=6), ids_BL, batch_tokens=8)
    halves = [list(hand.captured(moe, ids_BL[row : row + 1])) for row in range(2)]
    for parts in zip(*halves, strict=True):
        index, shape = parts[0][0], next(s for s in moe.shapes if s.index == parts[0][0])
        errors = {}
        for gone in combinations(range(8), 2):
            left = [sum(shape.group_of(e) == g for e in range(8) if e not in gone) for g in range(shape.groups)]
            if min(left) < shape.fewest_per_group():
                continue
            errors[gone] = 0.0
            for _, array, index_TK, outputs_TED in parts:
                p_TE = hand.scores_of(router, array["logits"])
                squares = 0.0
                for t, chosen in enumerate(index_TK):
                    stays = [e for e in chosen if e not in gone]
                    while len(stays) < len(chosen):
                        stays.append(hand.best_left(router, p_TE[t], array["bias"], [*stays, *gone, *chosen]))
                    before, after = (
                        hand.routed(router, {e: p_TE[t, e] for e in who}, outputs_TED[t], array["scale"])
                        for who in (chosen, stays)
                    )
                    squares += float(((after - before) ** 2).sum())
                errors[gone] += math.sqrt(squares)
        best = min(errors.values())
        assert errors[mask.pruned_of(index)] <= best * (1 + 1e-5)


def test_of_identical_experts_subset_search_keeps_the_lower_id():
    moe = open_model(random_model("mixtral", experts=4, top_k=1))
    with torch.no_grad():
        for layer in moe.layers:
            for name in layer.layout.tensors:
                getattr(layer.experts, name)[3] = getattr(layer.experts, name)[1]
            # Whoever is chosen of the two answers alike, and alone: either may go, at no error.
            layer.router.weight[3] = layer.router.weight[1]
    mask = search(moe, load_method("subset-search"), Budget(keep=3), random_ids(2, 12))
    assert all(layer.pruned == (3,) for layer in mask.layers)


def test_more_subsets_than_asked_for_are_refused_not_sampled():
    moe = opened_model("olmoe")
    with pytest.raises(UsageError, match=r"12870 subsets of 8 experts; in layer 0; expected at most 5000"):
        search(moe, load_method("subset-search"), Budget(keep=8), random_ids(1, 4))


# ------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("seer", {"over": "some"}),
        ("unified", {"member": "reap"}),
        ("reap-variants", {"aggregate": "mean"}),
        ("mone-variants", {"score": "fusion"}),
        ("razor", {"quantity": "loo"}),
        ("razor", {"aggregate": "sum"}),
        ("residual-products", {"operator": "zero"}),
    ],
)
def test_an_unknown_variant_is_refused_in_a_line_that_names_the_known(name, parameters):
    with pytest.raises(UsageError, match=f"in {name}; expected ") as caught:
        load_method(name, parameters)
    assert "\n" not in str(caught.value)


def test_statistics_of_no_tokens_are_refused():
    moe = opened_model("olmoe")
    empty = torch.zeros(0, 8, dtype=torch.int64)
    with pytest.raises(UsageError, match="there are no calibration tokens"):
        score_pass(moe, CalibrationTokens(CalibrationSpec("file:x", 1, 8), empty, "test"), [])
    views = layer_views(moe, None, ("count",), "frequency")
    with pytest.raises(UsageError, match="frequency has no calibration tokens; in layer 0"):
        load_method("frequency").select(views, Budget(keep=8), rng=np.random.default_rng(0))


NEVER = [
    *((name, {}) for name in ("reap", "ean", "unified", "sge", "mone", "reap-variants", "mone-variants")),
    *(("razor", {"quantity": quantity}) for quantity in ("rcs", "rcs-loo", "refill", "frozen-refill")),
    *(("residual-products", {"operator": operator}) for operator in ("deletion", "constant", "tilt")),
    *(("fisher", {"labels": labels}) for labels in ("data", "sampled")),
    *(("fisher-residuals", {"labels": labels}) for labels in ("data", "sampled")),
    ("residual-products", {"interactions": False}),
    ("reap-sequential", {}),
    ("subset-search", {}),
    ("aimer", {}),
]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("name", "parameters"), NEVER, ids=["-".join(map(str, [n, *p.values()])) for n, p in NEVER])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the ratio of two infinities
def test_outputs_that_are_not_numbers_never_decide(name, parameters, bad):
    moe = opened_model("qwen3_moe", experts=8, top_k=2)
    with torch.no_grad():
        moe.layers[1].experts.down_proj[4] = bad
    with pytest.raises(UsageError, match="not finite") as caught:
        select(load_method(name, parameters), moe, Budget(keep=6), ids_BL=random_ids(2, 12))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["frequency", "seer"])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_a_router_that_sees_no_numbers_never_decides(family, name):
    moe = opened_model(family, experts=8, top_k=2)
    with torch.no_grad():
        moe.layers[0].experts.down_proj[4] = float("nan")
    with pytest.raises(UsageError, match=r"router scores of \d+ of 24 tokens are not finite") as caught:
        select(load_method(name), moe, Budget(keep=6), ids_BL=random_ids(2, 12))
    assert "\n" not in str(caught.value)
