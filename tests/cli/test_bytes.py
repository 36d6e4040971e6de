"""`prunebench bytes`: what the paper says of stored bytes, from configurations, files and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prunebench import cli

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "leaderboard" / "records" / "tiny" / "tiny-olmoe"

OLMOE = json.loads((Path(__file__).parents[1] / "configs" / "olmoe.json").read_text(encoding="utf-8"))


@pytest.fixture
def olmoe(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OLMOE))
    return str(tmp_path)


def asked(capsys, *arguments):
    code = cli.main(["bytes", *arguments])
    return code, *capsys.readouterr()


def data_of(capsys, *arguments):
    code, out, err = asked(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_papers_gaps_on_olmoe(olmoe, capsys):
    data = data_of(capsys, olmoe, "--ratio", "0.25", "--ratio", "0.5")
    arms = {arm["arm"]: arm for arm in data["arms"]}
    assert arms["w16"]["total"] == 2 * 6_919_161_856
    assert all(arm["total"] == sum(arm["parts"].values()) for arm in arms.values())
    assert arms["ratio 0.5 + w4"]["parts"]["fills"] == 512 * 2048 * 2
    assert arms["ratio 0.5 + w4"]["router_rows_of_pruned_experts"] == 512 * 2048 * 2
    near = data["gaps"]["ratio 0.25 + w4"]["e3a4"]
    assert (near["matched"], round(100 * near["gap"], 2)) == (True, -1.55)
    assert round(100 * data["gaps"]["ratio 0.5 + w4"]["w2"]["gap"], 2) == -1.37
    assert not data["gaps"]["ratio 0.5 + w4"]["e3a4"]["matched"]


def test_the_table_prints_every_part_every_gap_and_the_match(olmoe, capsys):
    code, out, _ = asked(capsys, f"{olmoe}/config.json", "--arm", "w4", "--arm", "e3a4", "--match", "e3a4")
    assert code == 0
    for part in ("experts", "fills", "router", "shared", "attention", "embeddings", "other", "metadata", "on disk"):
        assert part in out.splitlines()[0]
    assert "keep 49 + w4: +0.13 %, matched within 2 %" in out
    assert "+25.35 %" in out
    assert "counted by its config; groups of 128, zeros in 16 bits" in out


def test_b_bit_zeros_and_sliced_routers_store_less(olmoe, capsys):
    half = (olmoe, "--keep", "32", "--operator", "reroute", "--arm", "w4")

    def pruned(*more):
        return next(arm for arm in data_of(capsys, *half, *more)["arms"] if arm["arm"] == "keep 32 + w4")

    plain, sliced, zeros = pruned(), pruned("--slice-router"), pruned("--zeros", "bits")
    assert plain["parts"]["router"] - sliced["parts"]["router"] == 16 * 32 * 2048 * 2
    assert sliced["parts"]["metadata"] == 0
    assert zeros["parts"]["experts"] / plain["parts"]["experts"] == pytest.approx(4.15625 / 4.25)


def test_saved_weights_are_measured(capsys):
    files, config = data_of(capsys, "tiny-olmoe"), data_of(capsys, "tiny-olmoe", "--config-only")
    assert "headers" in files["counted"]
    router = [one["arms"][0]["parts"].pop("router") for one in (files, config)]
    assert router[0] == 2 * router[1]  # transformers saves routers in float32
    assert files["arms"][0]["parts"] == config["arms"][0]["parts"]


@pytest.mark.parametrize("run", ["mone-ratio0.5-constant-A", "reap-ratio0.5-reroute-other-A"])
def test_a_run_stores_at_16_bits_what_its_record_states(run, capsys):
    data = data_of(capsys, str(RUNS / run), "--match", "w2")
    arms = {arm["arm"]: arm for arm in data["arms"]}
    record = json.loads((RUNS / run / "record.json").read_text())
    parts = dict(arms["run + w16"]["parts"])
    parts.pop("metadata")
    assert parts == record["storage"]["parts"]
    assert data["match"]["nearest"]["run"]["setting"] == "run + w4"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--arm", "q4"], "unknown quantization 'q4'"),
        (["--ratio", "0.99"], "leaves 1 experts"),
        (["--ratio", "0.5", "--operator", "tilted"], "unknown operator 'tilted'"),
        (["--ratio", "0.5", "--slice-router"], "constant keeps the slots of pruned experts"),
        (["--group", "0"], "groups of 0"),
        (["--tolerance", "-1"], "a tolerance from 0"),
        (["--match", "x"], "unknown quantization 'x'"),
    ],
)
def test_what_cannot_be_counted_is_one_line(olmoe, capsys, arguments, says):
    code, out, err = asked(capsys, olmoe, *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_a_run_of_other_weights_is_refused(capsys):
    code, _, err = asked(capsys, str(RUNS / "mone-ratio0.5-constant-A"), "--config-only")  # routers of 16 bits
    assert code == 2
    assert "the record states 65,536 bytes of router" in err
    assert err.count("\n") == 1


def test_a_run_takes_no_budget(capsys):
    code, _, err = asked(capsys, str(RUNS / "mone-ratio0.5-constant-A"), "--ratio", "0.5")
    assert code == 2
    assert "a run has its own mask" in err


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--operator", "tilt"], "--operator tilt"),
        (["--rank", "0"], "--rank 0"),
        (["--slice-router"], "--slice-router"),
    ],
)
def test_what_says_how_to_prune_is_refused_where_nothing_is_pruned(olmoe, capsys, given, named):
    code, out, err = asked(capsys, olmoe, *given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{named} has nothing to say" in err
    assert "give --ratio" in err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_hidden_layers": "16"}, "num_hidden_layers is '16'"),
        ({"num_experts_per_tok": "8"}, "num_experts_per_tok"),  # which only a model needs
    ],
)
def test_a_config_of_odd_numbers_is_one_line_that_says_where(tmp_path, capsys, change, says):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(OLMOE | change))
    code, out, err = asked(capsys, str(path), "--ratio", "0.5")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert str(path.parent) in err


def test_a_model_without_experts_is_told_by_its_file(tmp_path, capsys):
    lite = json.loads((Path(__file__).parents[1] / "configs" / "deepseek-v2-lite.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(lite | {"first_k_dense_replace": 27}))
    code, _, err = asked(capsys, str(path))
    assert code == 2
    assert f"no routed experts; in {path}" in err


def test_a_config_that_is_no_json_is_one_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")
    code, _, err = asked(capsys, str(tmp_path / "config.json"))
    assert code == 2
    assert "config cannot be read" in err
    assert err.count("\n") == 1
