"""Maps, agreement and differences of masks, counted by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from prunebench import Mask
from prunebench.analysis.masks import difference, heat_map, overlap, overlaps
from prunebench.errors import UsageError
from prunebench.mask import LayerShape

SHAPES = [LayerShape(1, 4, 1), LayerShape(3, 8, 2)]


def mask(one, three):
    return Mask.for_shapes(SHAPES, {1: one, 3: three})


A, B = mask((0,), (1, 2, 5)), mask((3,), (1, 2, 7))


def test_pruned_and_kept_sets_agree_by_different_shares():
    found = overlap(A, B)
    assert found.pruned == Fraction(2, 4)
    assert found.kept == Fraction(6, 8)
    # By chance 1 · 1/4 of layer 1 and 3 · 3/8 of layer 3, of 4 pruned experts.
    assert found.by_chance == Fraction(11, 8) / 4
    assert found.to_json() == {"pruned": 0.5, "kept": 0.75, "by_chance": 0.34375}


def test_shares_are_of_the_first_where_counts_differ():
    small = mask((), (1,))
    assert (overlap(small, A).pruned, overlap(A, small).pruned) == (1, Fraction(1, 4))
    assert overlap(A, small).kept == 1


def test_every_pair_comes_once():
    assert [(one, other) for one, other, _ in overlaps({"a": A, "b": B, "c": A})] == [
        ("a", "b"),
        ("a", "c"),
        ("b", "c"),
    ]


def test_differences_name_who_prunes_what():
    assert difference(A, B) == {1: ((0,), (3,)), 3: ((5,), (7,))}
    assert difference(A, A) == {}


def test_a_map_shows_layers_by_their_own_index():
    assert heat_map([A]).splitlines() == ["    1  ·███  3 of 4 kept", "    3  █··██·██  5 of 8 kept"]
    assert heat_map([A, B]).splitlines() == ["    1  1221", "    3  2··22121"]


def test_other_models_and_empty_masks_are_refused():
    other = Mask.for_shapes([LayerShape(1, 4, 1)], {1: (0,)})
    for ask in (overlap, difference, lambda one, two: heat_map([one, two])):
        with pytest.raises(UsageError, match="masks of different shapes"):
            ask(A, other)
    with pytest.raises(UsageError, match="prunes nothing"):
        overlap(mask((), ()), A)
