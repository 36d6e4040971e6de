"""What a file of families declares, and what is refused about it."""

from __future__ import annotations

import datetime as dt
import hashlib

import pytest

from prunebench.analysis.arms import Selector
from prunebench.analysis.declared import read_declaration
from prunebench.errors import UsageError

HEAD = 'name = "f"\ndate = 2026-11-30\nnote = "before"\n'
FAMILY = """
[[family]]
name = "scale"
suite = "multiple_choice"
each = { model = ["m1", "m2"], ratio = ["0.25", "0.5"] }
label = "{model} {ratio}: trained - other"
arm = { model = "{model}", mask = "mone", ratio = "{ratio}", draw = "A" }
a = { operator = "reroute@trained" }
b = { operator = "reroute@other" }
"""


@pytest.fixture
def read(tmp_path):
    def declared(text, head=HEAD):
        path = tmp_path / "families.toml"
        path.write_text(head + text)
        return read_declaration(path)

    return declared


def arm(operator, **more):
    return Selector(**{"model": "m1", "mask": "mone", "ratio": "0.5", "draw": "A", "operator": operator} | more)


def one(**lines):
    """A family of one contrast, with these lines in it."""
    stated = {
        "name": '"n"',
        "suite": '"s"',
        "label": '"l"',
        "arm": '{ model = "m1", mask = "mone", ratio = "0.5", draw = "A" }',
        "a": '{ operator = "tilt" }',
        "b": '{ operator = "constant" }',
    } | lines
    return "[[family]]\n" + "".join(f"{key} = {value}\n" for key, value in stated.items())


def test_a_declaration_has_its_date_its_note_and_the_hash_of_its_bytes(read, tmp_path):
    declaration = read(FAMILY)
    assert (declaration.name, declaration.date, declaration.note) == ("f", dt.date(2026, 11, 30), "before")
    assert declaration.sha256 == hashlib.sha256((tmp_path / "families.toml").read_bytes()).hexdigest()
    assert declaration.to_json()["date"] == "2026-11-30"
    assert read(FAMILY.replace("trained - other", "T - O")).sha256 != declaration.sha256


def test_each_gives_every_combination(read):
    questions = read(FAMILY).questions
    assert [q.label for q in questions] == [f"{m} {r}: trained - other" for m in ("m1", "m2") for r in ("0.25", "0.5")]
    assert {q.family for q in questions} == {"scale"}
    assert questions[1].terms == ((1.0, arm("reroute@trained")), (-1.0, arm("reroute@other")))


def test_a_list_in_an_arm_is_a_mean(read):
    arms = '{ model = "m1", mask = ["mone", "reap", "sge", "frequency"], ratio = "0.5", draw = "A" }'
    (question,) = read(one(arm=arms)).questions
    assert [weight for weight, _ in question.terms] == [0.25] * 4 + [-0.25] * 4
    assert [selector.mask for _, selector in question.terms] == ["mone", "reap", "sge", "frequency"] * 2


def test_less_makes_an_interaction(read):
    less = '{ a = { operator = "tilt", ratio = "0.25" }, b = { operator = "constant", ratio = "0.25" } }'
    (question,) = read(one(less=less)).questions
    assert question.terms == (
        (1.0, arm("tilt")),
        (-1.0, arm("constant")),
        (-1.0, arm("tilt", ratio="0.25")),
        (1.0, arm("constant", ratio="0.25")),
    )


def test_replicates_change_what_they_name(read):
    replicates = '[{ b = { fit_draw = "B" } }, { a = { fit_draw = "C" }, b = { fit_draw = "C" } }]'
    (question,) = read(one(replicates=replicates)).questions
    assert question.replicates == (
        ((1.0, arm("tilt")), (-1.0, arm("constant", fit_draw="B"))),
        ((1.0, arm("tilt", fit_draw="C")), (-1.0, arm("constant", fit_draw="C"))),
    )


def test_blocks_of_one_name_are_one_family_and_folders_may_be_named(read):
    declaration = read(one() + one(label='"other"', a='"m/folder"', tasks='["t"]'))
    assert {q.family for q in declaration.questions} == {"n"}
    assert declaration.questions[1].terms[0] == (1.0, Selector(run="m/folder"))
    assert declaration.questions[1].tasks == ("t",)


def test_the_exploratory_are_said_to_be(read):
    assert [q.exploratory for q in read(one(exploratory="true") + one(name='"m"')).questions] == [True, False]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no family"),
        (one() + one(), "contrast 'l' is declared twice"),
        (one(exploratory="true") + one(label='"m"'), "family 'n' is exploratory in part"),
        (one(color='"red"'), "unknown field 'color'"),
        (one(suite="3"), "suite is 3"),
        (one(label='"{model}"'), "'{model}' names 'model'"),
        (one(each='{ model = "m1" }'), "each.model is 'm1'"),
        (one(a='{ operator = "tilt", rank = 4 }'), "unknown field 'rank' of an arm"),
        (one(a="{ ratio = 0.5 }"), "ratio of an arm is 0.5"),
        (one(arm="{}"), "an arm without run and model"),
        (one(replicates='[{ c = { fit_draw = "B" } }]'), "unknown field 'c'"),
        (one(less='{ a = { operator = "tilt" } }'), "no b"),
        ("[[family]]\nname = 'n'\n", "no suite"),
        ("family = []\n", "no contrast is declared"),
        ("family = [3]\n", "3 is no table"),
        ("family = ", "cannot read the families"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(read, text, says):
    with pytest.raises(UsageError) as caught:
        read(text)
    assert says in str(caught.value)
    assert "families.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_a_date_is_no_declaration(read, tmp_path):
    with pytest.raises(UsageError, match="no date"):
        read(FAMILY, head='name = "f"\n')
    with pytest.raises(UsageError, match="cannot read the families"):
        read_declaration(tmp_path / "nowhere.toml")
