"""Masks from shards are those of one pass over their text, and agreement is what sets written out say."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from prunebench import UsageError, load_method
from prunebench.calibration import (
    CalibrationSpec,
    CalibrationTokens,
    Fisher,
    RefillSums,
    TrueFisher,
    gradient_pass,
    score_pass,
)
from prunebench.calibration.score import with_built_in
from prunebench.run import Session
from prunebench.run.arm import prepare
from prunebench.run.selection import choose_mask
from prunebench.run.stability import Spread, add_up, shard_agreement, shards_of, text_drift
from prunebench.testing import opened_model, random_ids


def tokens(ids_BL: torch.Tensor) -> CalibrationTokens:
    return CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")


def test_statistics_of_shards_add_up_to_those_of_the_whole_text():
    moe, whole = opened_model("granitemoe"), tokens(random_ids(6, 16))
    parts = shards_of(whole, 3)
    assert torch.equal(torch.cat([part.ids_BL for part in parts]), whole.ids_BL)
    assert len({part.fingerprint for part in parts}) == 3
    statistics = with_built_in([RefillSums()])
    # Two blocks per forward: the batches of the shards are those of the whole.
    expected = score_pass(moe, whole, statistics, batch_tokens=32)
    names = [one.name for one in statistics if one.name != "released_moments"]
    passes = [score_pass(moe, part, statistics, batch_tokens=32) for part in parts]
    added = add_up([passes[2], passes[0], passes[1]], names)
    assert added.tokens == expected.tokens == 96
    for index, found in expected.layers.items():
        for name in names:
            for key, value in found[name].state.items():
                got = added.layers[index][name].state[key]
                if value.dtype == torch.int64:
                    assert torch.equal(got, value)
                else:
                    torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-12)
    # What was added up is left as it was.
    again = score_pass(moe, parts[2], statistics, batch_tokens=32)
    assert torch.equal(again.layers[0]["count"].state["count_E"], passes[2].layers[0]["count"].state["count_E"])


def test_gradient_statistics_add_up_too():
    moe, whole = opened_model("olmoe"), tokens(random_ids(4, 12))
    statistics = (Fisher(), TrueFisher())
    expected = gradient_pass(moe, whole, statistics)
    added = add_up([gradient_pass(moe, part, statistics) for part in shards_of(whole, 2)], ["fisher", "true_fisher"])
    for index, found in expected.layers.items():
        for name in ("fisher", "true_fisher"):
            np.testing.assert_allclose(added.layers[index][name].value(), found[name].value(), rtol=1e-12)


@pytest.mark.parametrize("blocks", [(7, 2), (8, 1), (8, 16)])
def test_shards_are_equal_and_at_least_two(blocks):
    with pytest.raises(UsageError, match=f"{blocks[1]} shards of {blocks[0]} blocks"):
        shards_of(tokens(random_ids(blocks[0], 8)), blocks[1])


def by_hand(arm, session, ids_BL, method):
    """The pruned set of a mask from a pass over these blocks."""
    moe = session.open(arm).moe
    needs = method.select_needs()
    scores = score_pass(moe, tokens(ids_BL), needs, batch_tokens=64)
    rng = np.random.default_rng(0)
    mask = choose_mask(moe, method, arm.budget, needs=needs, scores=scores, tokens=None, rng=rng)
    return {(layer.index, e) for layer in mask.layers for e in layer.pruned}


def test_agreement_is_that_of_masks_made_from_passes_over_the_same_blocks(spec, tmp_path):
    arm, method = prepare(spec(method="mone", ratio="0.25", operator="reroute", batch_tokens=64)), load_method("mone")
    session = Session(tmp_path)
    found = shard_agreement(session, {"mone": arm}, shards=4, orderings=3, seed=5)["mone"]
    assert session.score_passes == 4
    parts = arm.tokens[arm.calibration].ids_BL.split(2)
    rng = np.random.default_rng(5)
    orders = [rng.permutation(4).tolist() for _ in range(3)]
    everything = {(index, e) for index in (0, 1) for e in range(16)}

    def pruned(shards):
        return by_hand(arm, session, torch.cat([parts[i] for i in sorted(shards)]), method)

    full = pruned(range(4))
    for size, one in zip((1, 2, 4), found, strict=True):
        assert (one.shards, one.tokens) == (size, size * 2 * 32)
        pairs = {"with_all": [(order[:size], range(4)) for order in orders] if size < 4 else []}
        pairs["between"] = [(order[:size], order[size : 2 * size]) for order in orders] if size < 4 else []
        for kind, compared in pairs.items():
            if not compared:
                assert getattr(one, kind) is None
                continue
            sets = [(pruned(a), full if kind == "with_all" else pruned(b)) for a, b in compared]
            shares = {
                "pruned": [len(a & b) / len(a) for a, b in sets],
                "kept": [len((everything - a) & (everything - b)) / len(everything - a) for a, b in sets],
            }
            for name, values in shares.items():
                spread = getattr(one, kind)[name]
                assert spread.mean == pytest.approx(np.mean(values))
                assert (spread.low, spread.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
    assert found[0].with_all["pruned"].mean < found[0].with_all["kept"].mean < 1
    # Again: the passes over shards are there.
    again = Session(tmp_path)
    assert shard_agreement(again, {"mone": arm}, shards=4, orderings=3, seed=5)["mone"] == found
    assert again.score_passes == 0


def test_a_number_of_shards_that_is_no_power_of_two_ends_with_all(spec, tmp_path):
    arm = prepare(spec(method="frequency", blocks=6, operator="reroute"))
    found = shard_agreement(Session(tmp_path), {"frequency": arm}, shards=6, orderings=2)["frequency"]
    assert [one.shards for one in found] == [1, 2, 4, 6]
    assert [one.between is None for one in found] == [False, False, True, True]
    assert found[2].with_all["pruned"].n == 2


def test_a_spread_is_its_mean_and_its_middle():
    spread = Spread.of([0.0, 0.5, 1.0])
    assert (spread.mean, spread.n) == (0.5, 3)
    assert (spread.low, spread.high) == pytest.approx((0.025, 0.975))


def test_a_criterion_whose_statistic_refuses_to_merge_is_refused_before_any_pass(spec, tmp_path):
    session = Session(tmp_path)
    arm = prepare(spec(method="mone-variants", parameters=("score=released",)))
    with pytest.raises(UsageError, match="mine cannot be added up from shards: released_moments of two streams"):
        shard_agreement(session, {"mine": arm}, shards=4, orderings=2)
    assert session.score_passes == 0


def test_drift_compares_the_masks_of_all_draws(spec, tmp_path):
    texts = ("world:general", "world:code")
    arms = {text: [prepare(spec(method="reap", text=text, draw=draw)) for draw in "AB"] for text in texts}
    session = Session(tmp_path)
    [found] = text_drift(session, {"reap": arms})["reap"]
    sets = {
        text: [{(m.index, e) for m in session.choose(arm).layers for e in m.pruned} for arm in own]
        for text, own in arms.items()
    }
    general, code = sets.values()
    assert found.tokens == 256
    assert found.drifts.first == (1 - Fraction(len(general[0] & general[1]), len(general[0])),)
    assert found.drifts.across == tuple(1 - Fraction(len(a & b), len(a)) for a in general for b in code)
    assert found.splits[1] == 3


def test_one_text_under_two_names_is_refused(spec, tmp_path):
    words = " ".join(f"word {n}" for n in range(900))
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(words)
    arms = {
        text: [prepare(spec(method="reap", text=text, draw=draw, blocks=4)) for draw in "AB"]
        for text in (f"file:{tmp_path / 'one.txt'}", f"file:{tmp_path / 'two.txt'}")
    }
    with pytest.raises(UsageError, match=r"two.txt, draw A is the same text as .*one.txt, draw A"):
        text_drift(Session(tmp_path), {"reap": arms})
