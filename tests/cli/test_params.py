"""`prunebench params` counts what operators store from a configuration alone, in the paper's numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from prunebench import cli

OLMOE = json.loads((Path(__file__).parents[1] / "configs" / "olmoe.json").read_text(encoding="utf-8"))


@pytest.fixture
def olmoe(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OLMOE))
    return str(tmp_path)


def asked(capsys, *arguments):
    code = cli.main(["params", *arguments])
    return code, *capsys.readouterr()


def test_olmoe_costs_what_the_paper_prints(olmoe, capsys):
    code, out, _ = asked(capsys, olmoe, "--ratio", "0.5", "--json")
    assert code == 0
    data = json.loads(out)
    tilt = next(one for one in data["operators"] if one["operator"] == "tilt")
    assert (tilt["per_expert"], round(tilt["added"] / 1e6, 1), round(100 * tilt["added_share"], 2)) == (
        133_184,
        67.1,
        1.82,
    )
    assert round(tilt["stored"] / 1e6, 1) == 68.2
    assert round(data["one_more_expert_per_layer"] / 1e6, 1) == 100.7
    assert (data["dense"], data["pruned_experts"]) == (6_919_161_856, 512)


def test_the_table_names_every_operator_and_what_does_not_fit(olmoe, capsys):
    code, out, _ = asked(capsys, olmoe, "--keep", "33", "--rank", "1")
    assert code == 0
    assert "496 of 1024 experts pruned" in out
    assert re.search(r"^tilt +6,146 +3,048,416 ", out, re.MULTILINE)
    assert "neurons: a neurons copy of rank 0; in a budget of 4096 values; expected at least 6144" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "nothing says how many experts go"),
        (("--ratio", "0.5", "--keep", "3"), "both ratio and keep are given"),
        (("--ratio", "0.5", "--operator", "tilted"), "unknown operator 'tilted'; expected constant, tilt"),
        (("--ratio", "0.5", "--operator", "tilt", "--rank", "0"), "--rank 0 is impossible"),
        (("--ratio", "0.5", "--times", "-1"), "--times -1 is impossible"),
        (("--ratio", "0.5", "--operator", "svd", "--rank", "1"), "a svd copy of rank 0"),
        (("--ratio", "0.99"), "leaves 1 experts"),
    ],
)
def test_what_cannot_be_counted_is_one_line(olmoe, capsys, arguments, says):
    code, out, err = asked(capsys, olmoe, *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
