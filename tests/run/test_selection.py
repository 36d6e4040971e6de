"""Selection through arms: layer by layer on a pruned model, other budgets, and what records say of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prunebench import Budget, UsageError, load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens, Count, GateNormSum, score_pass
from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.record import comparable, validate
from prunebench.routing import Scale
from prunebench.run import Session, read_track
from prunebench.run.arm import prepare
from prunebench.run.selection import choose_mask
from prunebench.testing import opened_model, random_ids, random_model


def tokens(ids_BL: torch.Tensor) -> CalibrationTokens:
    return CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")


def chosen(moe, method, budget, ids_BL, **options):
    return choose_mask(
        moe,
        method,
        budget,
        needs=method.select_needs(),
        scores=None,
        tokens=tokens(ids_BL),
        rng=np.random.default_rng(0),
        **options,
    )


def programs_before(moe, pruned: dict[int, tuple[int, ...]], scale: str = "renorm") -> dict[int, LayerProgram]:
    return {index: LayerProgram(ids, scale=Scale(scale)) for index, ids in pruned.items()}


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "granitemoe", "deepseek_v2.groups", "gemma4"])
def test_sequential_reap_scores_each_layer_on_the_model_pruned_so_far(family):
    moe = open_model(random_model(family))
    ids_BL, budget = random_ids(4, 24), Budget(keep=10)
    mask = chosen(moe, load_method("reap-sequential"), budget, ids_BL)
    # By hand: one whole score pass per layer, everything before it rerouted.
    pruned: dict[int, tuple[int, ...]] = {}
    for layer in moe.layers:
        with Instrument(moe, programs_before(moe, pruned)):
            scores = score_pass(moe, tokens(ids_BL), [Count(), GateNormSum()]).layers[layer.index]
        reap_E = scores["gate_norm_sum"].value() / np.maximum(scores["count"].value(), 1)
        order = sorted(range(16), key=lambda e: (reap_E[e], -e))
        if layer.shape.groups == 1:
            pruned[layer.index] = tuple(sorted(order[:6]))
        else:
            pruned[layer.index] = mask.pruned_of(layer.index)
        assert mask.pruned_of(layer.index) == pruned[layer.index]
    assert mask.report["schedule"] == "sequential"
    assert mask.report["proof"]["streamed"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in moe.model.modules())


def test_sequential_differs_from_one_shot_but_for_the_first_layer():
    moe = open_model(random_model("olmoe", num_hidden_layers=4))
    ids_BL, budget = random_ids(6, 24), Budget(keep=5)
    method = load_method("reap")
    scores = score_pass(moe, tokens(ids_BL), method.select_needs())
    one_shot = choose_mask(
        moe,
        method,
        budget,
        needs=method.select_needs(),
        scores=scores,
        tokens=tokens(ids_BL),
        rng=np.random.default_rng(0),
    )
    sequential = chosen(moe, load_method("reap-sequential"), budget, ids_BL)
    assert one_shot.pruned_of(0) == sequential.pruned_of(0)
    assert one_shot != sequential


def test_sequential_runs_the_methods_own_fills_before_the_next_layer(material, tmp_path):
    """A sequential method with constants: the next layer is scored behind them."""
    file = material.write_method(
        tmp_path,
        fields='schedule = "sequential"',
        rest="""
    def replace(self, layer, pruned):
        mean_ED = torch.from_numpy(layer.stats["output_moments"].mean_ED).float()
        return Replacements({expert: Constant.of(mean_ED[expert]) for expert in pruned})
""",
    )
    moe = opened_model("olmoe")
    ids_BL = random_ids(4, 24)
    mask = chosen(moe, load_method(file), Budget(keep=8), ids_BL)
    first, second = moe.layers
    from prunebench import Constant, OutputMoments

    moments = score_pass(moe, tokens(ids_BL), [OutputMoments()]).layers[first.index]["output_moments"].value()
    fills = {e: Constant.of(torch.from_numpy(moments.mean_ED[e]).float()) for e in mask.pruned_of(first.index)}
    with Instrument(moe, {first.index: LayerProgram(mask.pruned_of(first.index), fills)}):
        count_E = score_pass_under(moe, ids_BL, second.index)
    order = sorted(range(16), key=lambda e: (count_E[e], -e))
    assert mask.pruned_of(second.index) == tuple(sorted(order[:8]))


def score_pass_under(moe, ids_BL, index):
    """Counts of one layer while another is answered by fills: only one instrument may watch, so by the router alone."""
    layer = moe.layer(index)
    found = []
    handles = layer.watch_router(lambda call, _dtype: found.append(call.index_TK))
    with torch.inference_mode():
        moe.model(input_ids=ids_BL, use_cache=False)
    for handle in handles:
        handle.remove()
    return np.bincount(found[0].flatten().numpy(), minlength=16)


@pytest.mark.parametrize("method", ["reap-sequential", "residual-products"])
def test_a_layer_by_layer_arm_runs_end_to_end_and_its_record_says_so(method, spec, tmp_path):
    arm = prepare(spec(method=method, operator="reroute", scale="trained"))
    assert arm.known["calibration"]["mask"]["blocks"] == 8
    session = Session(tmp_path / "one")
    run = session.execute(arm).run
    validate(run.record)
    selection = run.record["selection"]
    assert selection["schedule"] == {"reap-sequential": "sequential", "residual-products": "layerwise"}[method]
    assert selection["proof"]["streamed"]
    assert run.record["arm"]["mask"] == method
    assert session.score_passes == 0
    assert comparable(Session(tmp_path / "two").execute(arm).run.record) == comparable(run.record)
    assert session.execute(arm).reused


def test_a_one_shot_record_says_what_was_left_to_a_rule(spec, tmp_path):
    record = Session(tmp_path).execute(prepare(spec(blocks=1, length=2))).run.record
    validate(record)
    assert record["selection"]["schedule"] == "one_shot"
    assert record["selection"]["score"] == "frequency"
    for layer in record["selection"]["layers"].values():
        # Two tokens, four slots each: at least eight of sixteen experts are never routed to.
        assert len(layer["never_routed"]) >= 8
        assert layer["never_routed_pruned"] == 8


def test_a_layer_by_layer_method_is_refused_a_global_budget_before_any_weight_is_read(spec):
    with pytest.raises(UsageError, match="reap-sequential sees one layer at a time, so no budget can be global"):
        prepare(spec(method="reap-sequential", scope="global"))


def test_a_criterion_refuses_a_router_that_it_is_not_defined_for_before_any_weight_is_read(spec):
    with pytest.raises(UsageError, match=r"razor's refill is defined for routers that renormalise; in a router of"):
        prepare(spec(method="razor"))
    with pytest.raises(UsageError, match="12870 subsets of 8 experts; in layer 0"):
        prepare(spec(method="subset-search"))
    assert prepare(spec(method="razor", parameters=("quantity=frozen-refill",)))


@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({"scope": "global"}, 16),
        ({"protect": "0:3,1:4"}, 16),
        ({"protect": "super"}, 16),
        ({"spare": "super-relative"}, 16),
    ],
)
def test_budgets_of_every_kind_run_and_are_in_the_identity(changes, gone, spec, tmp_path):
    arm = prepare(spec(method="reap", **changes))
    usual = prepare(spec(method="reap"))
    assert arm.known["budget"] != usual.known["budget"]
    assert arm.spec.folder != usual.spec.folder
    record = Session(tmp_path).execute(arm).run.record
    validate(record)
    assert sum(len(layer["pruned"]) for layer in record["mask"]["layers"]) == gone
    if "protect" in changes and ":" in changes["protect"]:
        assert 3 not in record["mask"]["layers"][0]["pruned"]
        assert 4 not in record["mask"]["layers"][1]["pruned"]
    if "super" in str(changes):
        # A random model has no massive activations, so none is found, and that is said.
        assert record["selection"]["super_experts"]["found"] == []


def test_a_planted_super_expert_is_protected_or_spared(spec, material, tmp_path):
    folder = tmp_path / "planted"
    material.write_model(folder)
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    name = next(
        key for key in weights if key.endswith("layers.1.mlp.experts.down_proj") or "layers.1.mlp.experts.2.down" in key
    )
    with torch.no_grad():
        weights[name].zero_()
        weights[name][5] = 1e7
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    masks = {}
    for label, changes in {"free": {}, "protect": {"protect": "super"}, "spare": {"spare": "super"}}.items():
        arm = prepare(spec(model=str(folder), method="random", operator="reroute", seed=1, **changes))
        record = Session(tmp_path / label).execute(arm).run.record
        masks[label] = {layer["index"]: layer["pruned"] for layer in record["mask"]["layers"]}
        if changes:
            assert [pair[:2] for pair in record["selection"]["super_experts"]["found"]] == [[1, 2]]
            assert 2 not in masks[label][1]
    gone = 2 in masks["free"][1]
    assert len(masks["protect"][1]) == 8
    assert len(masks["spare"][1]) == 8 - gone
    assert masks["spare"][1] == [e for e in masks["free"][1] if e != 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protect": "3"}, "protected expert '3'; expected LAYER:EXPERT, such as 3:54, or super or super-relative"),
        ({"protect": "0:1", "spare": "0:2"}, "both protect and spare are given"),
        ({"protect": "0:99"}, "protected expert 99 does not exist; in layer 0"),
        ({"scope": "model"}, "unknown budget scope 'model'"),
        ({"method": None, "ratio": None, "scope": "global"}, "scope belongs to no budget"),
        ({"method": None, "ratio": None, "protect": "super"}, "protect belongs to no budget"),
    ],
)
def test_what_does_not_fit_together_is_refused_in_a_line(changes, message, spec):
    with pytest.raises(UsageError, match=message) as caught:
        prepare(spec(**changes))
    assert "\n" not in str(caught.value)


def test_tracks_name_variants_of_a_criterion(tmp_path):
    file = tmp_path / "track.toml"
    file.write_text(
        '[track]\nname = "t"\nmodels = ["tiny-granite"]\nratios = ["0.5"]\noperators = ["reroute@trained"]\n'
        'masks = ["reap", "razor(quantity=rcs, aggregate=mean)", "unified(member=msan)", "unified"]\n'
    )
    arms = read_track(file).arms[1:]
    assert [(arm.method, arm.parameters) for arm in arms] == [
        ("reap", ()),
        ("razor", ("quantity=rcs", "aggregate=mean")),
        ("unified", ("member=msan",)),
        ("unified", ()),
    ]
    assert len({arm.folder for arm in arms}) == 4
