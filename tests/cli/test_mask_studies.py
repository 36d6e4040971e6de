"""`prunebench mask validity | agreement | drift`: from the command line to numbers, and one line for what is wrong."""

from __future__ import annotations

import json

import pytest

from prunebench import cli

SMALL = ("--model", "tiny-granite", "--length", "32")
AGREEMENT = (*SMALL, "--blocks", "8", "--ratio", "0.5", "--shards", "4")
DRIFT = (*SMALL, "--blocks", "8", "--ratio", "0.5")
VALIDITY = (*SMALL, "--blocks", "8", "--held-out-blocks", "2", "--experts", "4", "--resamples", "50")


def asked(capsys, *arguments):
    code = cli.main(["mask", *(str(part) for part in arguments)])
    return code, *capsys.readouterr()


def test_validity_prints_what_it_measured(capsys, tmp_path):
    criteria = ("--criteria", "reap", "unified(member=msan)", "--out", tmp_path)
    code, text, _ = asked(capsys, "validity", *VALIDITY, *criteria, "--json")
    assert code == 0
    data = json.loads(text)
    assert set(data["validity"]) == {"reap", "unified(member=msan)"}
    assert data["operator"]["name"] == "reroute"
    assert data["experts_per_layer"] == dict.fromkeys(("0", "1", "2", "3"), 4)
    reap = data["validity"]["reap"]["kl"]
    assert set(reap["mean"]) == {"test", "retest", "scores", "damage", "ceiling"}
    assert [reap["pooled"][name]["n"] for name in ("test", "retest")] == [16, 16]
    assert [one["draw"] for one in data["calibration"]["reap"]] == ["A", "B"]
    # Again: nothing is deleted anew, and the same is said.
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("layer-*.json")}
    assert len(files) == 4
    code, text, _ = asked(capsys, "validity", *VALIDITY, *criteria)
    assert code == 0
    assert "mean of layers" in text
    assert "each deletion began at its own layer" in text
    assert f"{reap['mean']['test']['value']:.2f}" in text
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("layer-*.json")}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--criteria", "reap", "reap"), "criterion 'reap' is named twice"),
        (("--criteria", "nothing"), "nothing"),
        (("--criteria", "constant"), "constant selects no experts"),
        (("--criteria", "reap@keep"), "has a scale"),
        (("--criteria", "reap-sequential"), "scores a layer on a model that is pruned already"),
        (("--criteria", "reap", "--retest-draw", "A"), "draws A, A, C of one text"),
        (("--criteria", "reap", "--held-out-draw", "B"), "draws A, B, B of one text"),
        (("--criteria", "reap", "--held-out-blocks", "5"), "two texts of 5 held-out blocks"),
        (("--criteria", "reap", "--experts", "2"), "2 experts per layer are too few to rank"),
        (("--criteria", "reap", "--layers", "9"), "layer 9 is no MoE layer"),
        (("--criteria", "reap", "--resamples", "0"), "0 resamples"),
        (("--criteria", "reap", "--operator", "constant", "--scale", "keep"), "scale keep has no meaning for constant"),
        (("--criteria", "reap", "--held-out", "world:nowhere"), "no such calibration text"),
        ((), "--criteria"),
    ],
)
def test_what_is_wrong_with_validity_is_one_line(capsys, tmp_path, arguments, says):
    code, out, err = asked(capsys, "validity", *VALIDITY, "--out", tmp_path, *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_agreement_prints_both_sets_by_size(capsys, tmp_path):
    arguments = ("agreement", *AGREEMENT, "--criteria", "reap", "--out", tmp_path)
    code, text, _ = asked(capsys, *arguments, "--json")
    assert code == 0
    sizes = json.loads(text)["agreement"]["reap"]
    assert [one["shards"] for one in sizes] == [1, 2, 4]
    assert [one["tokens"] for one in sizes] == [64, 128, 256]
    assert sizes[2]["with_all"] is sizes[2]["between"] is None
    # Half of the experts go, so both sets are of one size.
    assert sizes[0]["with_all"]["pruned"] == sizes[0]["with_all"]["kept"]
    code, text, _ = asked(capsys, *arguments)
    assert code == 0
    assert f"{100 * sizes[0]['between']['pruned']['mean']:.1f} [" in text
    assert "pruned, disjoint" in text
    assert "kept, disjoint" in text


def test_drift_prints_domains_against_draws(capsys, tmp_path):
    texts = ("--texts", "world:general", "world:arithmetic")
    code, text, _ = asked(capsys, "drift", *DRIFT, *texts, "--criteria", "mone", "--out", tmp_path, "--json")
    assert code == 0
    [pair] = json.loads(text)["drift"]["mone"]
    assert pair["texts"] == ["world:general", "world:arithmetic"]
    assert pair["tokens"] == 256
    assert [len(pair[name]) for name in ("first", "second", "across")] == [3, 3, 9]
    code, text, _ = asked(capsys, "drift", *DRIFT, *texts, "--criteria", "mone", "--out", tmp_path)
    assert code == 0
    assert "world:general → world:arithmetic" in text
    assert f"{pair['splits_as_far'][0]} of 10" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("agreement", *AGREEMENT, "--criteria", "mone-variants(score=released)"), "released_moments of two streams"),
        (("agreement", *AGREEMENT, "--criteria", "residual-products"), "it measures the whole text layer by layer"),
        (("agreement", *AGREEMENT, "--criteria", "aimer"), "aimer cannot be added up from shards: it reads no"),
        (("agreement", *AGREEMENT, "--criteria", "reap", "--shards", "3"), "3 shards of 8 blocks"),
        (("agreement", *AGREEMENT, "--criteria", "reap", "--shards", "1"), "1 shards of 8 blocks"),
        (("agreement", *AGREEMENT, "--criteria", "reap", "--orderings", "0"), "0 orderings"),
        (("agreement", *SMALL, "--criteria", "reap"), "nothing says how many experts go"),
        (("drift", *DRIFT, "--criteria", "reap", "--texts", "world:general"), "one text drifts from nothing"),
        (("drift", *DRIFT, "--criteria", "reap", "--texts", *["world:general"] * 2), "a text is named twice"),
        (
            ("drift", *DRIFT, "--criteria", "reap", "--texts", "world:general", "world:code", "--draws", "A"),
            "one draw drifts from nothing",
        ),
        (("drift", *DRIFT, "--criteria", "random", "--texts", "world:general", "world:code"), "random reads no"),
        (("drift", *DRIFT, "--criteria", "reap", "--texts", "world:general", "x"), "unknown calibration text 'x'"),
        (("drift", *DRIFT, "--criteria", "reap"), "--texts"),
    ],
)
def test_what_is_wrong_with_the_others_is_one_line(capsys, tmp_path, arguments, says):
    code, out, err = asked(capsys, *arguments, "--out", tmp_path)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
