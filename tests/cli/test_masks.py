"""`prunebench mask`: a mask is chosen as a run chooses it, and looked at."""

from __future__ import annotations

import json

import pytest

from prunebench import cli
from prunebench.run import Session
from prunebench.run.arm import prepare
from prunebench.run.spec import ArmSpec

SMALL = ("--model", "tiny-granite", "--ratio", "0.5", "--blocks", "4", "--length", "32")


def asked(capsys, *arguments):
    code = cli.main(["mask", *(str(part) for part in arguments)])
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    for method in ("reap", "frequency"):
        assert cli.main(["mask", "compute", *SMALL, "--method", method, "--out", str(folder / f"{method}.json")]) == 0
    return folder


def test_a_computed_mask_is_that_of_a_run(masks, tmp_path):
    spec = ArmSpec("tiny-granite", method="reap", ratio="0.5", blocks=4, length=32, suites=("perplexity",), limit=2)
    run = Session(tmp_path).execute(prepare(spec)).run
    written = json.loads((masks / "reap.json").read_text())
    assert written["digest"] == run.record["mask"]["digest"]
    assert written == run.record["mask"]


def test_protected_experts_and_scopes_reach_the_mask(masks, capsys, tmp_path):
    out = tmp_path / "guarded.json"
    first = json.loads((masks / "reap.json").read_text())["layers"][0]
    spared = first["pruned"][0]
    code, text, _ = asked(
        capsys, "compute", *SMALL, "--method", "reap", "--protect", f"{first['index']}:{spared}", "--out", out, "--json"
    )
    assert code == 0
    data = json.loads(text)
    assert spared not in data["mask"]["layers"][0]["pruned"]
    assert data["selection"]["schedule"] == "one_shot"
    code, text, _ = asked(capsys, "diff", masks / "reap.json", out)
    assert code == 0
    assert f"layer {first['index']}: only A prunes {spared}; only B prunes " in text


def test_what_a_rule_decided_is_told_where_the_mask_is_computed(capsys, tmp_path):
    out = tmp_path / "few.json"
    few = ("--model", "tiny-granite", "--ratio", "0.5", "--blocks", "1", "--length", "4", "--method", "reap")
    code, text, _ = asked(capsys, "compute", *few, "--protect", "super", "--out", out, "--json")
    assert code == 0
    layers = json.loads(text)["selection"]["layers"]
    assert all(len(layer["never_routed"]) > 16 for layer in layers.values())
    code, text, _ = asked(capsys, "compute", *few, "--protect", "super", "--out", out)
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines[1:5]] == [f"layer {index}" for index in layers]
    for line, layer in zip(lines[1:5], layers.values(), strict=True):
        unreached, kept = line.split(": ", 1)[1].split("; ")
        assert unreached == f"no token reached {', '.join(map(str, layer['never_routed']))}"
        # All that go are of the unreached, the highest ids first.
        assert kept == f"kept by id over equal scores {', '.join(map(str, layer['never_routed'][:-16]))}"
    assert lines[5:] == ["super experts (absolute): none", str(out)]
    first = layers["0"]["never_routed"]
    code, text, _ = asked(capsys, "compute", *few, "--spare", f"0:{first[-1]}", "--out", out)
    assert text.splitlines()[1].endswith(f"; kept by protection {first[-1]}")


@pytest.mark.parametrize("where", ["", "file/mask.json"])
def test_a_mask_that_cannot_be_written_is_refused_before_any_pass(capsys, tmp_path, monkeypatch, where):
    monkeypatch.setattr(Session, "choose", lambda *_: pytest.fail("a pass was made"))
    (tmp_path / "file").touch()
    code, out, err = asked(capsys, "compute", *SMALL, "--method", "reap", "--out", tmp_path / where)
    assert (code, out) == (2, "")
    assert ("a folder stands where the mask goes" if not where else "cannot write there") in err
    assert err.count("\n") == 1


def test_masks_are_shown_compared_and_validated(masks, capsys):
    both = (masks / "reap.json", masks / "frequency.json")
    code, text, _ = asked(capsys, "show", both[0])
    assert code == 0
    assert "64 of 128 experts pruned in 4 layers" in text
    assert text.count("16 of 32 kept") == 4
    assert asked(capsys, "show", *both)[0] == 0
    code, text, _ = asked(capsys, "overlap", *both, "--json")
    [pair] = json.loads(text)
    assert 0 < pair["pruned"] == pair["kept"] < 1
    assert pair["by_chance"] == 0.5
    assert asked(capsys, "diff", both[0], both[0])[:2] == (2, "")
    code, text, _ = asked(capsys, "validate", *both, "--model", "tiny-granite")
    assert (code, text.count("fits tiny-granite")) == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("compute", *SMALL, "--out", "x.json"), "nothing says which experts go"),
        (("compute", *SMALL, "--method", "constant", "--out", "x.json"), "constant selects no experts"),
        (("overlap", "{reap}"), "one mask agrees with nothing"),
        (("overlap", "{reap}", "{reap}"), "a mask is named twice"),
        (("validate", "nowhere.json"), "nowhere.json"),
        (("validate", "{reap}", "--model", "tiny-deepseek-v2"), "the mask is for another model"),
        (("show",), "MASK"),
        ((), "MASK_VERB"),
    ],
)
def test_what_is_wrong_is_one_line(masks, capsys, arguments, says):
    code, out, err = asked(capsys, *(part.format(reap=masks / "reap.json") for part in arguments))
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
