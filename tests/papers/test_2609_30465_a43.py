"""2609.30465 App. A.4.3: native scores and selection; a correction bias chooses and never weighs; hash layers apart."""

from __future__ import annotations

import math

import pytest
import torch

from prunebench.install import installed
from prunebench.mask import Mask
from prunebench.method import Method, Replacements, Routing
from prunebench.moe import open_model
from prunebench.moe.layer import find_layers
from prunebench.plan import make_plan
from prunebench.routing import RouterCall, Scale, native_gates, native_index, reroute, scores_and_choice
from prunebench.testing import random_ids, random_model

# The paper's four models; λ is the routed-output scale, of the random models' configurations.
SCORES = {
    "qwen3_5_moe": (1.0, math.exp),  # Qwen3.6: softmax, whose sum the renormalisation takes out again
    "glm4_moe_lite": (1.8, lambda x: 1 / (1 + math.exp(-x))),
    "deepseek_v4": (1.5, lambda x: math.sqrt(math.log1p(math.exp(x)))),
    "hy_v3": (2.826, lambda x: 1 / (1 + math.exp(-x))),
}
LOGITS = [1.5, -0.5, 0.25, -2.0, 0.75, -1.25, 2.0, 0.0]
BIAS = [0.0, 3.0, 0.0, 2.0, 0.0, 0.0, -4.0, 0.0]


def call_of(family: str) -> RouterCall:
    convention = find_layers(random_model(family, experts=8, top_k=2))[-1].convention
    logits_TE = torch.tensor([LOGITS])
    bias_E = torch.tensor(BIAS) if convention.biased else None
    scores_TE, choice_TE = scores_and_choice(convention, logits_TE, bias_E)
    index_TK = native_index(convention, choice_TE, 2)
    return RouterCall(convention, logits_TE, bias_E, index_TK, native_gates(convention, logits_TE, scores_TE, index_TK))


@pytest.mark.parametrize("pruned", [(), (6,), (1,), (0, 1, 3)])
@pytest.mark.parametrize("family", SCORES)
def test_selected_unmodified_scores_are_renormalised_and_scaled(family, pruned):
    call = call_of(family)
    factor, score = SCORES[family]
    blocked_E = torch.isin(torch.arange(8), torch.tensor(pruned, dtype=torch.long))
    index_TK, gates_TK = reroute(call, blocked_E, Scale("renorm"))
    total = sum(map(score, LOGITS)) if family == "qwen3_5_moe" else 1.0
    rank = [score(x) / total + (b if call.bias_E is not None else 0.0) for x, b in zip(LOGITS, BIAS, strict=True)]
    best = sorted((e for e in range(8) if e not in pruned), key=lambda e: -rank[e])[:2]
    weights = [score(LOGITS[e]) for e in best]
    wanted = {e: factor * w / sum(weights) for e, w in zip(best, weights, strict=True)}
    assert dict(zip(index_TK[0].tolist(), gates_TK[0].tolist(), strict=True)) == pytest.approx(wanted, rel=1e-6)


class Reroute(Method):
    """No fills."""

    name = "reroute"

    def replace_needs(self):
        return ()

    def replace(self, layer, pruned):
        return Replacements()

    def route(self, layer, pruned):
        return Routing("renorm")


def test_hash_layers_fall_outside_learned_routing_and_stay_as_they_are():
    moe = open_model(random_model("deepseek_v4.hash"))
    assert [layer.index for layer in moe.unprunable] == [0]
    assert [layer.index for layer in moe.layers] == [1, 2]
    hashed = moe.model.model.layers[0].mlp.gate
    seen = []
    handle = hashed.register_forward_hook(lambda _module, _args, output: seen.append(output))
    mask = Mask.for_shapes(moe.shapes, {layer.index: range(0, 16, 2) for layer in moe.layers})
    plan = make_plan(moe, mask, Reroute(), None, scale=Scale("renorm"))
    ids = random_ids()
    with torch.inference_mode():
        dense = moe.model(input_ids=ids, use_cache=False).logits
        with installed(moe, plan):
            assert not torch.equal(moe.model(input_ids=ids, use_cache=False).logits, dense)
    handle.remove()
    (_, dense_gates, dense_index), (_, gates, index) = seen
    assert torch.equal(index, dense_index)
    assert torch.equal(index, hashed.tid2eid[ids.reshape(-1)])
    assert torch.equal(gates, dense_gates)
