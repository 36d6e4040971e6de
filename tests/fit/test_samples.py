"""Samples of routed tokens: uniform, by fold, and the same however the stream is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prunebench.errors import UsageError
from prunebench.fit import RoutedSamples
from prunebench.moe import TokenBatch

EXPERTS, TOP_K, WIDTH, LENGTH = 6, 2, 3, 40


def routed(blocks: range, seed: int = 0) -> TokenBatch:
    """Blocks of a stream; what a token is depends on its block and place only. Its first input says which it is."""
    parts = []
    for block in blocks:
        generator = torch.Generator().manual_seed(1000 * seed + block)
        index = torch.rand(LENGTH, EXPERTS, generator=generator).topk(TOP_K).indices
        parts.append((index, torch.rand(LENGTH, TOP_K, generator=generator)))
    index_TK, gates_TK = (torch.cat(part) for part in zip(*parts, strict=True))
    block_T = torch.tensor(list(blocks)).repeat_interleave(LENGTH)
    x_TD = (block_T * LENGTH + torch.arange(LENGTH).repeat(len(blocks))).float()[:, None].expand(-1, WIDTH)
    order = torch.argsort(index_TK.flatten(), stable=True)
    token_S, slot_S = order // TOP_K, order % TOP_K
    expert_S = index_TK.flatten()[order]
    counts_E = torch.bincount(expert_S, minlength=EXPERTS)
    none_TE = torch.zeros(len(block_T), EXPERTS)
    return TokenBatch(
        x_TD, none_TE, none_TE, index_TK, gates_TK, x_TD[token_S], expert_S, token_S, slot_S, counts_E, block_T
    )


def sampled(*batches: TokenBatch, size: int = 8, folds: int = 2, seed: int = 0) -> RoutedSamples:
    statistic = RoutedSamples(size, folds, seed)
    statistic.start(EXPERTS, WIDTH, torch.device("cpu"))
    for batch in batches:
        statistic.update(batch)
    return statistic


def kept(statistic: RoutedSamples) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """(expert, fold) -> sorted (which token, gate)."""
    value = statistic.value()
    result = {}
    for expert in range(EXPERTS):
        for fold in range(statistic.folds):
            x_SD, gate_S = value.fold(expert, fold)
            result[expert, fold] = sorted(zip(x_SD[:, 0].tolist(), gate_S.tolist(), strict=True))
    return result


def test_samples_are_routed_tokens_of_their_fold_with_their_gates():
    batch = routed(range(6))
    statistic = sampled(batch)
    for (expert, fold), rows in kept(statistic).items():
        assert len(rows) == 8
        for which, gate in rows:
            token = int(which)
            assert (token // LENGTH) % 2 == fold
            slot = batch.index_TK[token].tolist().index(expert)
            assert gate == float(batch.gates_TK[token, slot])
        assert len({which for which, _ in rows}) == 8
    routed_tokens = torch.bincount(batch.expert_S[(batch.block_T[batch.token_S] % 2) == 1], minlength=EXPERTS)
    assert torch.equal(statistic.value().count_GE[1], routed_tokens)


def test_the_cut_of_the_stream_does_not_matter():
    whole = kept(sampled(routed(range(8))))
    assert kept(sampled(routed(range(3)), routed(range(3, 4)), routed(range(4, 8)))) == whole
    first, second = sampled(routed(range(5))), sampled(routed(range(5, 8)))
    first.merge(second)
    assert kept(first) == whole
    assert torch.equal(first.value().count_GE, sampled(routed(range(8))).value().count_GE)


def test_few_tokens_are_all_kept_and_none_give_an_empty_sample():
    batch = routed(range(2))
    statistic = sampled(batch, size=1000)
    for (expert, fold), rows in kept(statistic).items():
        mine = (batch.expert_S == expert) & (batch.block_T[batch.token_S] == fold)
        assert [int(which) for which, _ in rows] == sorted(batch.token_S[mine].tolist())
    x_SD, gate_S = sampled(routed(range(0, 4, 2))).value().fold(0, 1)
    assert (x_SD.shape, gate_S.shape) == ((0, WIDTH), (0,))


def test_every_token_is_as_likely_as_another():
    batch = routed(range(4))
    hits = np.zeros(4 * LENGTH)
    draws = 400
    for seed in range(draws):
        for which, _ in kept(sampled(batch, size=5, folds=1, seed=seed))[2, 0]:
            hits[int(which)] += 1
    mine = batch.token_S[batch.expert_S == 2].numpy()
    expected = 5 * draws / len(mine)
    statistic = ((hits[mine] - expected) ** 2 / expected).sum() / (1 - 5 / len(mine))
    assert hits.sum() == 5 * draws
    # χ² with len − 1 degrees of freedom; four deviations.
    assert abs(statistic - (len(mine) - 1)) < 4 * np.sqrt(2 * (len(mine) - 1))


def test_experts_and_seeds_draw_apart():
    one, other = (kept(sampled(routed(range(8)), seed=seed)) for seed in (0, 1))
    assert all(one[key] != other[key] for key in one)
    shared = routed(range(8))
    both = {int(t) for t in shared.token_S[shared.expert_S == 0]} & {
        int(t) for t in shared.token_S[shared.expert_S == 1]
    }
    ours = [{int(which) for which, _ in one[e, 0]} & both for e in (0, 1)]
    assert ours[0] != ours[1]


def test_the_state_is_plain_tensors_that_survive_a_copy():
    statistic = sampled(routed(range(4)))
    assert all(isinstance(part, torch.Tensor) and "/" not in key for key, part in statistic.state.items())
    fresh = RoutedSamples(8)
    fresh.state = {key: part.clone() for key, part in statistic.state.items()}
    assert kept(fresh) == kept(statistic)


@pytest.mark.parametrize("options", [{"size": 0}, {"folds": 0}])
def test_no_samples_are_refused(options):
    with pytest.raises(UsageError, match="in routed_samples; expected at least 1 of each"):
        RoutedSamples(**options)
