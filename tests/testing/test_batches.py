"""Batches built by hand are those that the hooks show; splitting and relabelling them loses nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prunebench.calibration.statistics import BUILT_IN, Count
from prunebench.errors import UsageError
from prunebench.mask import LayerShape
from prunebench.moe import Instrument, open_model
from prunebench.routing import Convention, Groups
from prunebench.testing import (
    FAMILIES,
    batch_of,
    measured,
    opened_model,
    random_ids,
    random_model,
    relabel_batch,
    router_call,
    shape_of,
    split_batch,
)
from prunebench.testing.strategies import token_batches

# Statistics are of un-weighted outputs, which gates on the input do not have.
OBSERVED = [family for family in FAMILIES if family != "llama4"]


def parts_of(batch) -> dict[str, torch.Tensor]:
    names = ("x_TD", "scores_TE", "choice_TE", "index_TK", "gates_TK", "outputs_TKD", "block_T")  # tensors by token
    return {name: getattr(batch, name) for name in names}


def assert_same(batch, other) -> None:
    for field in dataclasses.fields(batch):
        if field.name in {"call", "evaluate"}:
            continue  # not of tensors; statistics that ask for them are compared in tests/calibration
        got, wanted = getattr(batch, field.name), getattr(other, field.name)
        assert got.dtype == wanted.dtype, field.name
        assert torch.equal(got, wanted), field.name


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", OBSERVED)
def test_rows_are_laid_out_as_the_hooks_lay_them_out(family, kernel):
    moe = opened_model(family, experts_implementation=kernel)
    seen = []
    with torch.inference_mode(), Instrument(moe, observer=lambda _layer, batch: seen.append(batch)):
        moe.model(input_ids=random_ids(2, 12), use_cache=False)
    assert len(seen) == len(moe.layers)
    for layer, batch in zip(moe.layers, seen, strict=True):
        assert_same(batch_of(**parts_of(batch), slot_major=layer.reduces_in_expert_order), batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_call_decides_as_the_models_own_router_does(family, dtype):
    moe = open_model(random_model(family, dtype=dtype))
    calls = {}
    handles = [
        handle
        for layer in moe.layers
        for handle in layer.watch_router(lambda call, _dtype, index=layer.index: calls.update({index: call}))
    ]
    with torch.inference_mode():
        moe.model(input_ids=random_ids(2, 12), use_cache=False)
    for handle in handles:
        handle.remove()
    for layer in moe.layers:
        native = calls[layer.index]
        call = router_call(
            native.convention,
            native.logits_TE,
            native.bias_E,
            top_k=layer.top_k,
            hidden=dtype,
            expert_scale_E=native.expert_scale_E,
        )
        assert torch.equal(call.index_TK, native.index_TK)
        assert torch.equal(call.gates_TK, native.gates_TK)
        assert call.gates_TK.dtype == native.gates_TK.dtype
        assert shape_of(call, index=layer.index) == layer.shape


def test_the_shape_of_a_call_has_the_groups_of_its_router():
    plain = router_call(Convention("softmax", renormalised=False), torch.zeros(3, 6), top_k=2)
    assert shape_of(plain) == LayerShape(0, 6, 2)
    grouped = Convention("softmax", renormalised=False, groups=Groups(3, 2, "max"))
    assert shape_of(router_call(grouped, torch.zeros(3, 6), top_k=2), index=4) == LayerShape(4, 6, 2, 3, 2)


@given(token_batches(min_tokens=2), st.data())
def test_the_parts_of_a_batch_are_its_tokens_in_turn(batch, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, batch.tokens), max_size=3)))
    parts = split_batch(batch, *cuts)
    assert [part.tokens for part in parts] == [b - a for a, b in zip([0, *cuts], [*cuts, batch.tokens], strict=True)]
    for name, whole in parts_of(batch).items():
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), whole), name
    assert torch.equal(torch.stack([part.counts_E for part in parts]).sum(0), batch.counts_E)
    for part in parts:
        assert part.expert_S.tolist() == sorted(e for e in part.index_TK.reshape(-1).tolist() if e < len(part.counts_E))
        assert torch.equal(part.outputs_SD, part.outputs_TKD[part.token_S, part.slot_S])


@given(token_batches(), st.data())
def test_relabelling_and_back_is_nothing_and_the_new_labels_name_the_old_experts(batch, data):
    old_of_new = data.draw(st.permutations(range(len(batch.counts_E))))
    twin = relabel_batch(batch, old_of_new)
    experts = len(batch.counts_E)
    assert [
        [old_of_new[e] if e < experts else e for e in row] for row in twin.index_TK.tolist()
    ] == batch.index_TK.tolist()
    for new, old in enumerate(old_of_new):
        assert int(twin.counts_E[new]) == int(batch.counts_E[old])
        assert torch.equal(twin.scores_TE[:, new], batch.scores_TE[:, old])
        assert torch.equal(twin.choice_TE[:, new], batch.choice_TE[:, old])
    back = relabel_batch(twin, torch.tensor(old_of_new).argsort().tolist())
    for name, value in parts_of(batch).items():
        assert torch.equal(getattr(back, name), value), name


@given(token_batches(), st.data())
def test_built_in_statistics_depend_neither_on_the_cuts_nor_on_the_labels(batch, data):
    cut = data.draw(st.integers(0, batch.tokens))
    old_of_new = data.draw(st.permutations(range(len(batch.counts_E))))
    for kind in BUILT_IN:
        whole = measured(kind(), batch).state
        parts = measured(kind(), *split_batch(batch, cut)).state
        merged, second = (measured(kind(), part) for part in split_batch(batch, cut))
        merged.merge(second)
        named = measured(kind(), relabel_batch(batch, old_of_new)).state
        for key, value in whole.items():
            # Sums of squares of deviations cancel against a mean of up to 1000.
            torch.testing.assert_close(parts[key], value, rtol=1e-12, atol=1e-9)
            torch.testing.assert_close(merged.state[key], value, rtol=1e-12, atol=1e-9)
            torch.testing.assert_close(named[key], value[old_of_new], rtol=1e-12, atol=1e-9)


def test_what_is_measured_is_a_copy():
    batch = batch_of(
        x_TD=torch.ones(1, 2),
        scores_TE=torch.tensor([[0.25, 0.75]]),
        choice_TE=torch.tensor([[0.25, 0.75]]),
        index_TK=torch.tensor([[1]]),
        gates_TK=torch.tensor([[0.75]]),
        outputs_TKD=torch.ones(1, 1, 2),
    )
    statistic = Count()
    assert measured(statistic, batch, batch).value().tolist() == [0, 2]
    assert statistic.state == {}
    assert batch.block_T.tolist() == [0]


def test_what_cannot_be_is_refused_in_one_line():
    batch = batch_of(
        x_TD=torch.ones(2, 2),
        scores_TE=torch.full((2, 3), 1 / 3),
        choice_TE=torch.full((2, 3), 1 / 3),
        index_TK=torch.tensor([[1], [2]]),
        gates_TK=torch.ones(2, 1),
        outputs_TKD=torch.ones(2, 1, 2),
    )
    for make, message in (
        (lambda: split_batch(batch, 3), "cuts (3,) of 2 tokens; expected increasing, from 0 to 2"),
        (lambda: split_batch(batch, 2, 1), "cuts (2, 1) of 2 tokens; expected increasing, from 0 to 2"),
        (lambda: split_batch(batch, -1), "cuts (-1,) of 2 tokens; expected increasing, from 0 to 2"),
        (lambda: relabel_batch(batch, [0, 1]), "old_of_new [0, 1]; expected each id from 0 to 2 once"),
        (lambda: relabel_batch(batch, [0, 1, 1]), "old_of_new [0, 1, 1]; expected each id from 0 to 2 once"),
        (
            lambda: measured(Count()),
            "nothing to measure; in prunebench.testing.measured; expected at least one batch",
        ),
    ):
        with pytest.raises(UsageError) as info:
            make()
        assert str(info.value) == message
