"""The score pass: what it reports while it runs, and its cache by content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from prunebench import Count, GateSum, Statistic
from prunebench.calibration import CalibrationSpec, CalibrationTokens, OutputMoments, ScoreResult, score_pass
from prunebench.calibration.score import with_built_in
from prunebench.moe import open_model
from prunebench.testing import random_ids, random_model


class Widest(Statistic):
    """A statistic of a method's own: the largest gate that an expert ever got."""

    name = "widest"

    def start(self, experts, width, device):
        self.state = {"max_E": torch.zeros(experts, dtype=torch.float64, device=device)}

    def update(self, batch):
        self.state["max_E"].scatter_reduce_(0, batch.expert_S, batch.gates_S.double(), "amax")

    def merge(self, other):
        self.state["max_E"] = torch.maximum(self.state["max_E"], other.state["max_E"])

    def value(self):
        return self.state["max_E"].numpy()


@pytest.fixture(scope="module")
def moe():
    return open_model(random_model())


@pytest.fixture(scope="module")
def tokens():
    return CalibrationTokens(CalibrationSpec("file:x", 5, 16), random_ids(5, 16), "test")


@pytest.fixture(scope="module")
def result(moe, tokens):
    return score_pass(moe, tokens, with_built_in([Widest()]))


def test_a_methods_own_statistic_rides_along_and_built_in_ones_are_always_there(result):
    names = {
        *("count", "gate_sum", "score_sum", "score_total", "norm_sum", "norm_squared_sum", "gate_norm_sum"),
        *("gate_squared_norm_squared_sum", "output_max", "residual_sums", "output_moments", "released_moments"),
        "widest",
    }
    assert all(set(statistics) == names for statistics in result.layers.values())
    assert (result.layers[0]["widest"].value() > 0).any()


def test_the_given_instances_stay_empty(moe, tokens):
    mine = GateSum()
    score_pass(moe, tokens, [mine])
    assert not mine.state


def test_slots_are_counted_even_if_nobody_asks(moe, tokens):
    assert score_pass(moe, tokens, []).layers[1]["count"].value().sum() == 4 * 80


def test_progress_counts_blocks(moe, tokens):
    seen = []
    score_pass(moe, tokens, [], batch_tokens=32, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_the_model_is_left_as_it_was(moe, tokens):
    with torch.inference_mode():
        before = moe.model(input_ids=random_ids()).logits
        score_pass(moe, tokens, [OutputMoments()])
        assert torch.equal(before, moe.model(input_ids=random_ids()).logits)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in moe.model.modules())


def test_two_passes_are_equal_bit_for_bit(moe, tokens, result):
    again = score_pass(moe, tokens, with_built_in([Widest()]))
    for index, statistics in result.layers.items():
        for name, statistic in statistics.items():
            assert all(torch.equal(v, again.layers[index][name].state[k]) for k, v in statistic.state.items())


def test_the_cache_gives_back_every_state_bit_for_bit(result, tmp_path):
    result.save(tmp_path / "deep" / "scores.safetensors", "key")
    loaded = ScoreResult.load(tmp_path / "deep" / "scores.safetensors", "key", with_built_in([Widest()]))
    assert loaded is not None
    assert loaded.tokens == 80
    for index, statistics in result.layers.items():
        assert loaded.layers[index].keys() == statistics.keys()
        for name, statistic in statistics.items():
            found = loaded.layers[index][name]
            assert type(found) is type(statistic)
            assert found.state.keys() == statistic.state.keys()
            assert all(
                torch.equal(found.state[k], v) and found.state[k].dtype == v.dtype for k, v in statistic.state.items()
            )
    moments = loaded.layers[0]["output_moments"].value()
    np.testing.assert_array_equal(moments.mean_ED, result.layers[0]["output_moments"].value().mean_ED)


def load(path: Path, key: str = "key") -> ScoreResult | None:
    return ScoreResult.load(path, key, [Count(), GateSum()])


def test_another_key_a_missing_file_and_a_missing_statistic_are_no_hit(result, tmp_path):
    path = tmp_path / "scores.safetensors"
    assert load(path) is None
    result.save(path, "key")
    assert load(path) is not None
    assert load(path, "other") is None
    assert ScoreResult.load(path, "key", [Count(), type("New", (Widest,), {"name": "new"})()]) is None


@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage", "folder", "no metadata"])
def test_a_damaged_cache_is_no_hit_and_no_error(result, tmp_path, damage):
    path = tmp_path / "scores.safetensors"
    result.save(path, "key")
    whole = path.read_bytes()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "garbage":
        path.write_bytes(b"\xff" * 100)
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        save_file(load_file(path), path)
    assert load(path) is None


def test_a_cache_written_over_by_another_pass_is_replaced_whole(result, tmp_path):
    path = tmp_path / "scores.safetensors"
    result.save(path, "one")
    result.save(path, "two")
    assert load(path, "one") is None
    assert load(path, "two") is not None
    assert [p.name for p in tmp_path.iterdir()] == ["scores.safetensors"]
