"""The table of conventions says what each router computes: against the model's own routers and a float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prunebench.errors import UsageError
from prunebench.moe import open_model
from prunebench.routing import convention_of, native_gates, native_index, scores_and_choice
from prunebench.testing import CORE, random_ids, random_model

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", CORE)
def test_selection_and_gates_are_the_routers_own_bit_for_bit_and_the_oracles(oracle, family, dtype):
    moe = open_model(random_model(family, dtype=dtype))
    rule = oracle.ROUTERS[family]
    with torch.inference_mode(), oracle.Trace(moe.layers) as trace:
        moe.model(input_ids=random_ids())
    for layer in moe.layers:
        [(logits_TE, gates_TK, index_TK)] = trace.router[layer.index]
        scores_TE, choice_TE = scores_and_choice(layer.convention, logits_TE, layer.bias_E)
        replayed_TK = native_index(layer.convention, choice_TE, layer.top_k)
        assert torch.equal(replayed_TK, index_TK)
        assert torch.equal(native_gates(layer.convention, logits_TE, scores_TE, index_TK).to(gates_TK.dtype), gates_TK)

        x_TD, weight_ED = oracle.array(trace.inputs[layer.index][0]), oracle.array(layer.router.weight)
        rounding = torch.finfo(dtype if layer.convention.gates_in != "float32" else torch.float32).eps
        np.testing.assert_allclose(oracle.array(logits_TE), x_TD @ weight_ED.T, atol=20 * rounding, rtol=2 * rounding)
        p_TE, choice_TE = (
            f(rule, oracle.array(logits_TE), *more)
            for f, more in (
                (oracle.scores, ()),
                (oracle.choices, (oracle.bias_of(layer.router),)),
            )
        )
        np.testing.assert_allclose(oracle.array(scores_TE), p_TE, rtol=2e-6)
        for t, dense in enumerate(index_TK.tolist()):
            best = oracle.top(choice_TE[t], oracle.eligible(rule, choice_TE[t]), layer.top_k)
            # Of equal choices (bfloat16) either is right.
            np.testing.assert_allclose(sorted(choice_TE[t][dense]), sorted(choice_TE[t][best]), rtol=1e-6)
            z = p_TE[t][dense].sum() + rule.epsilon if rule.renormalised else 1.0
            wanted_K = rule.factor * p_TE[t][dense] / z
            eps = torch.finfo(gates_TK.dtype).eps
            np.testing.assert_allclose(oracle.array(gates_TK[t]), wanted_K, rtol=4e-6 if eps < 1e-6 else eps)


@pytest.mark.parametrize("family", CORE)
def test_the_convention_names_the_scale_the_router_was_trained_with(oracle, family):
    convention = open_model(random_model(family)).convention
    assert convention.trained_scale == ("renorm" if oracle.ROUTERS[family].renormalised else "keep")


def test_a_routers_own_switch_decides_whether_it_renormalises():
    assert not open_model(random_model("qwen3_moe", norm_topk_prob=False)).convention.renormalised
    assert open_model(random_model("olmoe", norm_topk_prob=True)).convention.renormalised
    # DeepSeek-V2's configuration has the option, and its router ignores it.
    assert not open_model(random_model("deepseek_v2", norm_topk_prob=True)).convention.renormalised


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("olmoe", "softmax, no renorm"),
        ("granitemoe", "softmax, renorm"),
        ("deepseek_v2.groups", "softmax, no renorm, ×16, 2 of 4 groups"),
        ("deepseek_v3", "sigmoid, renorm, bias, ×2.446"),
    ],
)
def test_a_convention_is_described_in_a_few_words(family, words):
    assert open_model(random_model(family)).convention.describe() == words


def test_a_subclass_of_a_known_router_takes_its_row():
    router = random_model("olmoe").model.layers[0].mlp.gate
    router.__class__ = type("Mine", (type(router),), {})
    assert convention_of(router)[1].describe() == "softmax, no renorm"


def test_an_unknown_router_is_refused_with_the_table_and_what_to_do():
    with pytest.raises(
        UsageError, match=r"unknown router Linear; in layer 3; expected one of .*DeepseekV3.*fix: add its row"
    ):
        convention_of(torch.nn.Linear(2, 2), where="layer 3")
