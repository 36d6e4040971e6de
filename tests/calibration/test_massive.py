"""Super experts: Eq. 6 on planted maxima, massive activations that form in a planted layer, and the control."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prunebench import UsageError, find_super_experts, forming_layers, same_layer_control, super_experts
from prunebench.calibration import CalibrationSpec, CalibrationTokens, OutputMax, score_pass
from prunebench.mask import LayerShape
from prunebench.moe import open_model
from prunebench.testing import random_ids, random_model


def tokens(ids_BL: torch.Tensor) -> CalibrationTokens:
    return CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")


def maxima(layers: int = 27, experts: int = 64) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(0)
    # The first layer is dense: layers are named by their own index, not by their place.
    return {index: rng.uniform(1, 20, experts) for index in range(1, layers)}


def test_the_papers_pair_is_found_by_its_own_layer_index():
    max_of = maxima()
    max_of[3][54], max_of[4][38] = 1432.0, 700.0
    max_of[9][2] = 900.0  # large, but nothing forms in its layer
    found = super_experts(max_of, forming=(3, 4))
    assert found.found == ((3, 54), (4, 38))
    assert found.maxima == (1432.0, 700.0)
    assert found.threshold == pytest.approx(143.2)
    assert found.protected == {3: frozenset({54}), 4: frozenset({38})}
    assert super_experts(max_of, forming=()).found == ()


def test_both_thresholds_are_strict_and_over_all_layers_together():
    max_of = {0: np.full(300, 1.0), 1: np.full(300, 1.0)}
    max_of[1][:3] = 10.0, 9.0, 1.0
    # P99.5 of 600 numbers is 1.0: both large ones exceed it; 0.1 · max is 1.0 too, and 1.0 does not exceed 1.0.
    assert super_experts(max_of, forming=(0, 1)).found == ((1, 0), (1, 1))
    every = np.concatenate(list(max_of.values()))
    assert super_experts(max_of, forming=(0, 1)).threshold == max(np.percentile(every, 99.5), 0.1 * every.max())


def test_with_few_pairs_only_the_largest_can_be_super():
    for experts in (4, 16, 100):
        max_of = {0: np.arange(experts, dtype=float) + 100, 1: np.arange(experts, dtype=float) + 100.5}
        assert super_experts(max_of, forming=(0, 1)).found == ((1, experts - 1),)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_maxima_that_are_not_numbers_are_refused(bad):
    with pytest.raises(UsageError, match="1 of 8 maxima are not finite; in super experts"):
        super_experts({0: np.array([1.0, bad, 2.0, 3.0]), 1: np.ones(4)}, forming=(0,))


@pytest.fixture
def planted():
    """A DeepSeek-V2 of three layers, the first dense, in whose layer 2 expert 6 writes a huge number into channel 5."""
    moe = open_model(random_model("deepseek_v2", experts=16, top_k=4, num_hidden_layers=4))
    with torch.no_grad():
        moe.layer(2).experts.down_proj[6] *= 0.0
        moe.layer(2).experts.down_proj[6][5] = 1e7
    return moe


def test_the_expert_that_makes_the_massive_activation_is_found_in_its_true_layer(planted):
    ids_BL = random_ids(4, 24)
    assert [layer.index for layer in planted.layers] == [1, 2, 3]
    # Layer 2 forms it; layer 3 only passes it on.
    assert forming_layers(planted, tokens(ids_BL)) == (2,)
    scores = score_pass(planted, tokens(ids_BL), [OutputMax()])
    found = find_super_experts(planted, tokens(ids_BL), scores)
    assert found.found == ((2, 6),)
    assert found.to_json()["found"] == [[2, 6, found.maxima[0]]]
    # a is the largest |f|, before the gate, over tokens and channels.
    seen = []
    layer = planted.layer(2)
    handle = layer.experts.register_forward_pre_hook(lambda _m, args: seen.append(args))
    with torch.inference_mode():
        planted.model(input_ids=ids_BL, use_cache=False)
        handle.remove()
        x_TD, index_TK, _ = seen[0]
        mine_TD = x_TD[(index_TK == 6).any(-1)]
        largest = layer.run_experts(mine_TD, torch.full((len(mine_TD),), 6)).abs().max()
    assert found.maxima[0] == pytest.approx(float(largest), rel=1e-6)


def test_the_absolute_rule_cannot_fire_on_a_small_stream_and_the_relative_one_can(planted):
    ids_BL = random_ids(4, 24)
    with torch.no_grad():
        # All else writes little into the stream.
        planted.model.get_input_embeddings().weight.mul_(1e-2)
        for name, parameter in planted.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter.mul_(1e-2)
    with torch.inference_mode():
        peak = float(planted.model(input_ids=ids_BL, output_hidden_states=True).hidden_states[3].abs().max())
    with torch.no_grad():
        planted.layer(2).experts.down_proj[6] *= 80.0 / peak
    assert forming_layers(planted, tokens(ids_BL)) == ()
    assert forming_layers(planted, tokens(ids_BL), "relative") == (2,)
    with pytest.raises(UsageError, match="unknown rule 'big' for massive activations; expected absolute, relative"):
        forming_layers(planted, tokens(ids_BL), "big")


def test_the_control_is_of_the_same_size_and_layers_and_drawn_from_the_seed():
    shapes = [LayerShape(3, 64, 6), LayerShape(4, 64, 6), LayerShape(5, 64, 6)]
    found = ((3, 54), (3, 2), (5, 38))
    controls = [same_layer_control(found, shapes, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert controls[0] == controls[1] != controls[2]
    for control in controls:
        assert sorted(index for index, _ in control) == [3, 3, 5]
        assert not set(control) & set(found)
        assert len(set(control)) == 3
    drawn = {same_layer_control(((4, 0),), [LayerShape(4, 4, 1)], np.random.default_rng(s)) for s in range(40)}
    assert drawn == {((4, 1),), ((4, 2),), ((4, 3),)}
    with pytest.raises(UsageError, match="1 other experts for a control of 2; in layer 0"):
        same_layer_control(((0, 0), (0, 1)), [LayerShape(0, 3, 1)], np.random.default_rng(0))
