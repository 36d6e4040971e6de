"""Masks round trip, are told apart by digest, and refuse what does not fit, in one line each."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunebench.errors import PruneBenchError, UsageError
from prunebench.mask import LayerMask, LayerShape, Mask, canonical_json, model_shape_text, write_atomically


@st.composite
def shapes_and_pruned(draw):
    indices = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True).map(sorted))
    shapes = [LayerShape(index, draw(st.integers(3, 12)), 2) for index in indices]
    pruned = {s.index: draw(st.sets(st.integers(0, s.experts - 1), max_size=s.experts - 2)) for s in shapes}
    return shapes, pruned


@given(shapes_and_pruned())
def test_a_mask_survives_json_and_a_file(tmp_path_factory, case):
    shapes, pruned = case
    mask = Mask.for_shapes(shapes, pruned)
    assert Mask.from_json(json.loads(json.dumps(mask.to_json()))) == mask
    path = tmp_path_factory.mktemp("mask") / "deep" / "mask.json"
    mask.save(path)
    assert Mask.load(path) == mask
    assert Mask.load(path).digest == mask.digest
    mask.check_fits(shapes)


@given(shapes_and_pruned())
def test_pruned_and_survivors_part_the_ids(case):
    shapes, pruned = case
    mask = Mask.for_shapes(shapes, pruned)
    for layer, shape in zip(mask.layers, shapes, strict=True):
        assert sorted(layer.pruned + layer.survivors) == list(range(shape.experts))
        assert set(mask.pruned_of(shape.index)) == pruned[shape.index]
    assert mask.pruned_count == sum(map(len, pruned.values()))
    assert mask.pruned_of(1000) == ()


@given(shapes_and_pruned(), st.data())
def test_the_digest_changes_with_any_id_and_with_the_shape(case, data):
    shapes, pruned = case
    mask = Mask.for_shapes(shapes, pruned)
    shape = data.draw(st.sampled_from(shapes))
    flipped = pruned | {shape.index: pruned[shape.index] ^ {data.draw(st.integers(0, shape.experts - 1))}}
    assert Mask.for_shapes(shapes, flipped).digest != mask.digest
    other = [LayerShape(s.index, s.experts, s.top_k + 1) for s in shapes]
    assert Mask.for_shapes(other, pruned).digest != mask.digest


def test_the_digest_is_16_hex_digits_and_stays_what_it_was():
    mask = Mask("0:4x2", (LayerMask(0, 4, (1, 3)),))
    assert mask.to_json() == {
        "schema": 1,
        "model_shape": "0:4x2",
        "layers": [{"index": 0, "E": 4, "pruned": [1, 3]}],
        "digest": mask.digest,
    }
    assert mask.digest == "8065fde7d28f6c6f"


@given(shapes_and_pruned(), st.data())
def test_an_edited_mask_is_refused(case, data):
    shapes, pruned = case
    written = Mask.for_shapes(shapes, pruned).to_json()
    layer = data.draw(st.sampled_from(written["layers"]))
    layer["pruned"] = sorted(set(layer["pruned"]) ^ {data.draw(st.integers(0, layer["E"] - 1))})
    with pytest.raises(UsageError, match="changed after it was written"):
        Mask.from_json(written)
    del written["digest"]
    assert Mask.from_json(written).layers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerMask(3, 8, (2, 1)), "pruned ids are not strictly increasing; in layer 3; fix: sort them"),
        (lambda: LayerMask(3, 8, (1, 1)), "not strictly increasing"),
        (lambda: LayerMask(3, 8, (1, 8)), "pruned id 8 does not exist; in layer 3; expected ids from 0 to 7"),
        (lambda: LayerMask(3, 8, (-1, 2)), "pruned id -1 does not exist"),
        (lambda: Mask("", (LayerMask(1, 8, ()), LayerMask(0, 8, ()))), "mask layers are not strictly increasing"),
        (lambda: Mask.for_shapes([LayerShape(0, 8, 2)], {5: [1]}), "layer 5 is no MoE layer; expected 0:8x2"),
        (lambda: Mask.from_json([]), "not a prunebench mask"),
        (lambda: Mask.from_json({"schema": 2}), 'expected an object with "schema": 1'),
        (lambda: Mask.from_json({"schema": 1}), "not a prunebench mask"),
        (
            lambda: Mask.from_json({"schema": 1, "model_shape": "", "layers": [{"index": 0, "E": 4}]}),
            "not a prunebench",
        ),
        (lambda: Mask.from_json({"schema": 1, "model_shape": "", "layers": 3}), "not a prunebench mask"),
        (lambda: Mask.from_json(json.loads('{"schema": 1, "layers": [{"index": 1e999}]}')), "not a prunebench mask"),
    ],
    ids=[
        *("unsorted", "repeated", "too high", "negative", "layers", "no such layer"),
        *("list", "schema", "fields", "layer fields", "layer type", "infinite"),
    ],
)
def test_an_impossible_mask_is_refused_in_one_line(make, message):
    with pytest.raises(UsageError) as caught:
        make()
    assert message.replace(" layer;", " layer of this model;") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mask_for_another_model_or_below_top_k_is_refused():
    shapes = [LayerShape(0, 4, 2), LayerShape(1, 4, 2)]
    mask = Mask.for_shapes(shapes, {1: [0, 1, 2]})
    with pytest.raises(UsageError, match=r"leaves 1 experts; in mask, layer 1; expected at least 2 survivors .top-k 2"):
        mask.check_fits(shapes)
    for other in ([LayerShape(0, 4, 2)], [LayerShape(0, 5, 2), shapes[1]], [LayerShape(0, 4, 1), shapes[1]]):
        with pytest.raises(UsageError, match=r"for another model .0:4x2 1:4x2"):
            mask.check_fits(other, where="m.json")
    assert model_shape_text(shapes) == "0:4x2 1:4x2"


def test_a_mask_that_empties_a_router_group_is_refused():
    shapes = [LayerShape(3, 8, 2, groups=4, kept_groups=2)]
    Mask.for_shapes(shapes, {3: [0, 2, 4, 6]}).check_fits(shapes)
    with pytest.raises(UsageError, match=r"leaves 0 experts; in mask, layer 3, router group 1; expected at least 1 "):
        Mask.for_shapes(shapes, {3: [2, 3]}).check_fits(shapes)


def test_bad_files_are_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read the mask file; in .*no\.json"):
        Mask.load(tmp_path / "no.json")
    (tmp_path / "text.json").write_text("experts 1, 2")
    with pytest.raises(UsageError, match=r"not JSON; in .*text\.json"):
        Mask.load(tmp_path / "text.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"not JSON; in .*bytes\.json"):
        Mask.load(tmp_path / "bytes.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(UsageError, match=r"not a prunebench mask; in .*list\.json"):
        Mask.load(tmp_path / "list.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_canonical_json_is_json_and_independent_of_key_order(value):
    text = canonical_json(value)
    assert json.loads(text) == value
    if isinstance(value, dict):
        assert canonical_json(dict(reversed(value.items()))) == text
    assert "\n" not in text


@given(json_values)
def test_any_json_is_a_mask_or_one_line(value):
    with pytest.raises(PruneBenchError) as caught:
        Mask.from_json(value)
    assert "\n" not in str(caught.value)


def test_atomic_writes_replace_and_leave_nothing_behind(tmp_path):
    path = tmp_path / "new" / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    with pytest.raises(UsageError, match="cannot write"):
        write_atomically(path / "below a file", b"three")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="cannot write"):
        write_atomically(tmp_path / "folder", b"four")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "new"]


@pytest.mark.parametrize("expert", [1.5, True, "1", None])
def test_an_id_that_is_no_whole_number_is_refused(expert):
    data = {"schema": 1, "model_shape": "1:4x2", "layers": [{"index": 1, "E": 4, "pruned": [expert]}]}
    with pytest.raises(UsageError, match="not a prunebench mask"):
        Mask.from_json(data)
