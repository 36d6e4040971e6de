"""Fisher-weighted selection: products of slopes against autograd's own gradients, and the set that they choose."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from prunebench import Budget, SlopeProducts, UsageError, load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens, gradient_pass
from prunebench.calibration.gradient import _digest, _drawn
from prunebench.moe import open_model
from prunebench.testing import opened_model, random_ids, random_model, score, select


def tokens(ids_BL):
    return CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")


def watched(moe, ids_L, seed):
    """Layer -> inputs and gradients of the routed outputs by token, and the router's call, of one sequence."""
    inputs, outputs, calls, handles = {}, {}, {}, []
    for layer in moe.layers:

        def keep(_module, args, output, index=layer.index):
            inputs[index] = args[0].detach()
            outputs[index] = output if outputs else output.detach().requires_grad_()
            outputs[index].retain_grad()
            return outputs[index]

        handles.append(layer.experts.register_forward_hook(keep))
        handles += layer.watch_router(lambda call, _dtype, index=layer.index: calls.__setitem__(index, call))
    with torch.enable_grad():
        logits_LV = moe.model(input_ids=ids_L[None], use_cache=False).logits[0, :-1]
        labels_L = ids_L[1:]
        if seed is not None:
            labels_L = _drawn(logits_LV.detach(), np.random.default_rng([seed, *_digest(ids_L)]))
        (-logits_LV.log_softmax(-1)[torch.arange(len(labels_L)), labels_L].mean()).backward()
    for handle in handles:
        handle.remove()
    flat = len(ids_L), -1
    return {i: (inputs[i].reshape(flat), outputs[i].grad.reshape(flat), calls[i]) for i in inputs}


def by_hand(moe, ids_BL, seed):
    """Layer -> F_ij, as a float64 loop over sequences, tokens and pairs, from the gradients of the routed outputs."""
    found = {layer.index: np.zeros((layer.expert_count,) * 2) for layer in moe.layers}
    for ids_L in ids_BL:
        for index, (x_TD, h_TD, call) in watched(moe, ids_L, seed).items():
            for t in range(len(ids_L)):
                slope = {}
                for expert, gate in zip(call.index_TK[t].tolist(), call.gates_TK[t].tolist(), strict=True):
                    f_D = moe.layer(index).run_experts(x_TD[t : t + 1], torch.tensor([expert]))[0].detach()
                    slope[expert] = float(h_TD[t] @ f_D) * gate
                for i, a in slope.items():
                    for j, b in slope.items():
                        found[index][i, j] += a * b / len(ids_BL)
    return found


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "granitemoe", "deepseek_v2.groups", "gpt_oss"])
def test_products_are_those_of_gradients_and_outputs_written_out(family, seed):
    moe = open_model(random_model(family, dtype=torch.float64), probe_tokens=64)
    ids_BL = random_ids(2, 10)
    measured = gradient_pass(moe, tokens(ids_BL), [SlopeProducts(seed)])
    for index, expected_EE in by_hand(moe, ids_BL, seed).items():
        value_EE = measured.layers[index]["slope_products"].value()
        assert np.abs(expected_EE).max() > 0
        np.testing.assert_allclose(value_EE, expected_EE, rtol=1e-6, atol=1e-9 * np.abs(expected_EE).max())


def test_the_chosen_set_has_the_least_joint_cost():
    moe, method = opened_model("granitemoe"), load_method("fisher-residuals")
    mask = select(method, moe, Budget(keep=12))
    alone = select(load_method("fisher-residuals", {"interactions": False}), moe, Budget(keep=12))
    measured = score(moe, method.select_needs())
    for layer in moe.layers:
        f_EE = measured.layers[layer.index]["slope_products"].value()
        costs = {chosen: f_EE[np.ix_(chosen, chosen)].sum() for chosen in combinations(range(16), 4)}
        assert costs[mask.pruned_of(layer.index)] == min(costs.values())
        order = sorted(range(16), key=lambda e: (f_EE[e, e], -e))
        assert alone.pruned_of(layer.index) == tuple(sorted(order[:4]))


def test_never_routed_experts_go_first_and_protected_ones_stay():
    moe, ids_BL = opened_model("olmoe"), random_ids(1, 2)
    method = load_method("fisher-residuals")
    diagonal = {
        index: np.diagonal(found["slope_products"].value())
        for index, found in score(moe, method.select_needs(), ids_BL=ids_BL).layers.items()
    }
    mask = select(method, moe, Budget(keep=12), ids_BL=ids_BL)
    for layer in moe.layers:
        assert (diagonal[layer.index][list(mask.pruned_of(layer.index))] == 0).all()
    first = mask.pruned_of(0)[0]
    assert first not in select(method, moe, Budget(keep=12, protected={0: frozenset({first})})).pruned_of(0)


def test_what_it_is_not_defined_for_is_refused():
    with pytest.raises(UsageError, match="unknown labels 'true'; in fisher-residuals; expected data or sampled"):
        load_method("fisher-residuals", {"labels": "true"})
    moe = opened_model("olmoe")
    with pytest.raises(UsageError, match="fisher-residuals chooses a set in each layer"):
        load_method("fisher-residuals").check_model(moe.shapes, moe.convention, Budget(keep=8, scope="global"))
    with pytest.raises(UsageError, match="the layer has no gate at an expert's output"):
        gradient_pass(opened_model("llama4"), tokens(random_ids(1, 4)), [SlopeProducts()])
    with pytest.raises(UsageError, match="seed -1 is impossible"):
        SlopeProducts(-1)
