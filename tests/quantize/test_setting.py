from __future__ import annotations

import pytest

from prunebench.errors import UsageError
from prunebench.quantize import NAMES, setting_of


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_its_setting_s(name):
    found = setting_of(name)
    assert (found.name, found.text) == (name, name)
    assert (found.bits.group, found.bits.zeros, found.groups, found.fewest) == (128, "fp16", "static", 128)


@pytest.mark.parametrize(
    ("name", "experts", "linears", "mixed"),
    [("w4", 4, 4, False), ("w2", 2, 2, False), ("e3a4", 3, 4, False), ("mc3a4", 3, 4, True), ("e2a16", 2, None, False)],
)
def test_widths_are_those_of_the_name(name, experts, linears, mixed):
    found = setting_of(name)
    assert (found.bits.experts, found.bits.linears, found.mixed) == (experts, linears, mixed)


def test_parameters_are_read_and_only_what_is_unusual_is_said():
    found = setting_of("w4(zeros=bits, group=64, groups=dynamic, fewest=128)")
    assert (found.bits.group, found.bits.zeros, found.groups) == (64, "bits", "dynamic")
    assert found.text == "w4(group=64, zeros=bits, groups=dynamic)"
    assert setting_of(found.text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("w1", "1 bits"),
        ("q4", "unknown quantization"),
        ("w16", "quantizes nothing"),
        ("w4(grup=64)", "unknown parameter 'grup'"),
        ("w4(group)", "no parameter"),
        ("w4(group=many)", "no number"),
        ("w4(zeros=none)", "unknown zeros"),
        ("w4(groups=some)", "unknown groups"),
        ("mc5a4", "unknown quantization"),
    ],
)
def test_nonsense_is_refused_by_name(text, said):
    with pytest.raises(UsageError, match=said):
        setting_of(text)
