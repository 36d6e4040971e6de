"""Parameters of a method, from a command line and from Python: typed, uniform, and refused in one line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunebench import Method
from prunebench.errors import UsageError
from prunebench.parameters import make, parse_parameters


@dataclass(frozen=True)
class Rich(Method):
    """One parameter of each kind."""

    name = "rich"

    text: str = "a"
    flag: bool = False
    blocks: int = 4
    power: float = 1.0
    share: Decimal = Decimal("0.5")
    cap: float | None = None
    label: int | str = 0
    side: Literal["low", "high"] = "low"
    ids: tuple[int, ...] = ()
    span: tuple[int, float] = (0, 1.0)
    table: dict[str, int] = field(default_factory=dict)
    hidden: int = field(default=0, init=False)


@dataclass(frozen=True)
class Needy(Method):
    """A parameter without a default, and a rule of its own."""

    name = "needy"

    rank: int

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError("rank must be at least 1")


@dataclass(frozen=True)
class Plain(Method):
    """No parameters."""

    name = "plain"


def refused(call, *arguments) -> str:
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("text=b", "b"),
        ("text=", ""),
        ("text=a=b", "a=b"),
        ("text=none", "none"),
        ("flag=true", True),
        ("flag=False", False),
        ("blocks=-3", -3),
        ("power=0.25", 0.25),
        ("power=2", 2.0),
        ("power=1e-3", 0.001),
        ("share=0.3", Decimal("0.3")),
        ("cap=none", None),
        ("cap=3", 3.0),
        ("label=7", 7),
        ("label=seven", "seven"),
        ("side=high", "high"),
        ("ids=", ()),
        ("ids=1, 2,3", (1, 2, 3)),
        ("span=3,0.5", (3, 0.5)),
    ],
)
def test_a_typed_parameter_becomes_the_fields_type(typed, value):
    name = typed.partition("=")[0]
    parsed = parse_parameters(Rich, [typed])
    assert parsed == {name: value}
    assert type(parsed[name]) is type(value)
    assert getattr(make(Rich, parsed), name) == value


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("flag=yes", "expected true or false"),
        ("blocks=4.0", "expected a whole number"),
        ("blocks=", "expected a whole number"),
        ("blocks=٣", "expected a whole number"),
        ("power=high", "expected a number"),
        ("power=nan", "expected a finite number"),
        ("power=1e999", "expected a finite number"),
        ("share=inf", "expected a finite number"),
        ("cap=x", "expected none or a number"),
        ("side=middle", "expected one of low, high"),
        ("ids=1,x", "expected a whole number"),
        ("span=1", "expected 2 values"),
        ("blocks", "expected name=value"),
        ("table={}", "set this one from Python"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_in_one_line(typed, said):
    line = refused(parse_parameters, Rich, [typed])
    assert "in method rich" in line
    assert said in line


def test_a_type_without_a_spelling_on_the_command_line_is_taken_from_python():
    assert make(Rich, {"table": {"a": 1}}).table == {"a": 1}


def test_an_unknown_parameter_gets_the_list_and_the_closest():
    line = refused(parse_parameters, Rich, ["powr=1"])
    assert line.startswith("unknown parameter 'powr'; in method rich; expected one of text (str), flag (bool)")
    assert line.endswith("fix: did you mean power?")
    assert refused(make, Rich, {"powr": 1}) == line


def test_a_field_that_the_constructor_does_not_take_is_no_parameter():
    assert "unknown parameter 'hidden'" in refused(parse_parameters, Rich, ["hidden=1"])


def test_a_method_without_parameters_says_so():
    assert "the method has none" in refused(parse_parameters, Plain, ["x=1"])
    assert parse_parameters(Plain, []) == {}


def test_a_parameter_given_twice_is_refused():
    assert "blocks is given twice" in refused(parse_parameters, Rich, ["blocks=1", "blocks=1"])


def test_a_missing_parameter_is_named():
    line = refused(make, Needy, {})
    assert line == "parameter rank is not given; in method needy; fix: give --param rank=…"


def test_what_the_method_itself_refuses_is_a_usage_error():
    line = refused(make, Needy, {"rank": 0})
    assert line == "the method refuses its parameters: rank must be at least 1; in method needy"


@pytest.mark.parametrize(
    ("name", "given_", "kept"),
    [("power", 2, 2.0), ("ids", [1, 2], (1, 2)), ("span", [1, 2], (1, 2.0)), ("share", 0.3, Decimal("0.3"))],
)
def test_equal_parameters_are_recorded_equally(name, given_, kept):
    value = getattr(make(Rich, {name: given_}), name)
    assert value == kept
    assert type(value) is type(kept)


@pytest.mark.parametrize(
    "parameters",
    [
        {"blocks": 4.0},
        {"blocks": True},
        {"power": True},
        {"power": "1"},
        {"power": math.nan},
        {"flag": 1},
        {"text": 1},
        {"side": "middle"},
        {"ids": 3},
        {"ids": [1.5]},
        {"cap": "x"},
    ],
    ids=str,
)
def test_a_python_value_of_the_wrong_type_is_refused(parameters):
    assert "in method rich" in refused(make, Rich, parameters)


def test_an_annotation_that_means_nothing_at_run_time_is_refused():
    @dataclass(frozen=True)
    class Torn(Method):
        name = "torn"

        when: "NowhereImported" = 0  # noqa: F821, UP037

    line = refused(parse_parameters, Torn, ["when=1"])
    assert "NowhereImported" in line
    assert "TYPE_CHECKING" in line


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(), st.lists(st.integers(), max_size=4))
def test_numbers_survive_the_command_line_exactly(power, blocks, ids):
    typed = [f"power={power!r}", f"blocks={blocks}", f"ids={','.join(map(str, ids))}"]
    assert parse_parameters(Rich, typed) == {"power": power, "blocks": blocks, "ids": tuple(ids)}
