"""A run folder is whole or absent, validated, and the same bytes for the same content."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prunebench import record as record_module
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import LayerMask, Mask
from prunebench.record import (
    STATES,
    Item,
    comparable,
    content_hash,
    is_complete,
    items_to_table,
    read_items,
    read_run,
    run_id,
    runs_under,
    validate,
    write_items,
    write_run,
)


@pytest.fixture
def items(factory):
    return factory.make_items(n=6)


@pytest.fixture
def record(factory, items):
    return factory.make_record(items)


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
hashes = st.integers(0, 2**64 - 1)
some_items = st.builds(
    Item,
    *(names, names, st.just("none"), names, hashes, hashes, names),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(1e-3, 1e6),
    st.sampled_from(STATES),
    st.dictionaries(names, st.integers()).map(json.dumps),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(some_items, max_size=8, unique_by=lambda item: item.key), st.randoms())
def test_items_come_back_equal_and_sorted_in_the_same_bytes_from_any_order(tmp_path_factory, items, shuffler):
    folder = tmp_path_factory.mktemp("items")
    write_items(folder / "a", items)
    assert list(read_items(folder / "a").items()) == sorted(items, key=lambda item: item.key)
    shuffler.shuffle(items)
    write_items(folder / "b", items)
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes()


def test_columns_have_the_types_of_the_format(tmp_path, items):
    write_items(tmp_path / "items.parquet", items)
    schema = pq.read_schema(tmp_path / "items.parquet")
    assert {name: str(schema.field(name).type) for name in schema.names} == {
        **dict.fromkeys(("suite", "task", "filter", "item", "metric", "state", "detail"), "string"),
        **dict.fromkeys(("doc_hash", "prompt_hash"), "uint64"),
        **dict.fromkeys(("value", "weight"), "double"),
    }


def test_content_hash_is_64_bits_of_blake2b():
    assert content_hash("añ") == int.from_bytes(hashlib.blake2b("añ".encode(), digest_size=8).digest(), "big")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("state", "fine", "unknown item state 'fine'"),
        ("value", float("nan"), "finite"),
        ("weight", 0.0, "weight above 0"),
        ("doc_hash", 2**64, "64-bit"),
        ("detail", "{", "not JSON"),
        ("filter", "", "empty filter"),
    ],
)
def test_an_impossible_item_is_refused(field, value, message):
    good = {"suite": "s", "task": "t", "filter": "none", "item": "i", "doc_hash": 1, "prompt_hash": 2, "metric": "acc"}
    with pytest.raises(UsageError, match=message):
        Item(**(good | {"value": 1.0, field: value}))


def test_two_outcomes_for_one_item_are_refused(items):
    with pytest.raises(UsageError, match=r"two outcomes.*arithmetic-005"):
        items_to_table([*items, items[-1]])


def test_a_written_run_is_read_back_whole(tmp_path, record, items):
    write_run(tmp_path / "deep" / "run", record, items)
    run = read_run(tmp_path / "deep" / "run")
    assert run.record == record
    assert list(run.items.items()) == sorted(items, key=lambda item: item.key)
    assert is_complete(run.path, record["run_id"])
    assert not is_complete(run.path, "0" * 16)
    assert not is_complete(tmp_path / "elsewhere", record["run_id"])
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["run"]


def test_the_same_run_written_twice_gives_the_same_bytes(tmp_path, record, items):
    shuffled = random.Random(3).sample(items, len(items))
    write_run(tmp_path / "a", record, items)
    write_run(tmp_path / "b", dict(reversed(record.items())), items_to_table(shuffled))
    for name in ("record.json", "items.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_run_id_is_the_hash_of_the_identity_alone(factory, items, record):
    text = json.dumps(record["identity"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert run_id(record["identity"]) == hashlib.sha256(text.encode()).hexdigest()[:16] == record["run_id"]
    other = factory.make_record(items, volatile={"seconds": 99})
    assert other != record
    assert comparable(other) == comparable(record)
    assert factory.make_record(items, mask="mone")["run_id"] != record["run_id"]


def test_a_record_may_say_how_a_fit_pass_went(items, factory):
    record = factory.make_record(items)
    validate({**record, "fit": {"tokens": 512}})
    assert run_id(record["identity"]) == record["run_id"]


def test_a_record_names_the_tensors_of_fills_by_layer_and_kind(record):
    _filled()(record)
    validate(record)
    _filled(size=3 * 8 * 2)(record)
    validate(record)


def test_a_records_text_has_a_line_for_each_of_its_fields(tmp_path, record, items):
    write_run(tmp_path / "run", record, items)
    lines = (tmp_path / "run" / "record.json").read_text().splitlines()
    assert [lines[0], lines[-1]] == ["{", "}"]
    fields = [json.loads(f"{{{line.rstrip(',')}}}") for line in lines[1:-1]]
    assert [key for field in fields for key in field] == sorted(record)


def _without(key):
    return lambda r: r.pop(key)


BROKEN = {
    "no such field": (_without("routing"), "lacks routing"),
    "unknown field": (lambda r: r.update(extra=1), "unknown field extra"),
    "fit of another type": (lambda r: r.update(fit=[]), "fit is list; in record; expected dict"),
    "other schema": (lambda r: r.update(schema=3), "schema 3"),
    "wrong type": (lambda r: r.update(integrity={}), "integrity is dict; in record; expected list"),
    "unknown status": (lambda r: r.update(status="done"), "status 'done'"),
    "changed identity": (lambda r: r["identity"].update(seed=1), "is not its identity's"),
    "identity gap": (lambda r: r["identity"].pop("dtype"), "identity lacks dtype"),
    "arm gap": (lambda r: r["arm"].pop("keep"), "arm lacks keep"),
    "limit not declared": (lambda r: r.update(status="partial"), "status partial with limit None"),
    "infinite metric": (lambda r: r["metrics"]["perplexity"].update(value=float("inf")), "not plain JSON"),
    "lone surrogate": (lambda r: r["arm"].update(model="\ud800"), "not plain JSON"),
    "boolean metric": (lambda r: r["metrics"]["perplexity"].update(value=True), "metric perplexity"),
    "reversed interval": (lambda r: r["metrics"]["perplexity"].update(low=1e9), "low ≤ high"),
    "no suite metric": (lambda r: r["metrics"].pop("perplexity"), "no metric for suite perplexity"),
    "headline": (lambda r: r["headline"].update(perplexity=[["a"]]), "headline of perplexity"),
    "integrity": (lambda r: r["integrity"].append({"check": "x", "status": "maybe", "detail": ""}), "maybe"),
    "storage sum": (lambda r: r["storage"].update(total=1), "storage total 1"),
    "storage part": (lambda r: r["storage"]["parts"].update(heads=1), "storage parts"),
}


def _of_identity(change):
    """An alteration by someone who makes the run id fit again."""

    def apply(record):
        change(record["identity"])
        record["run_id"] = run_id(record["identity"])

    return apply


def _other_experts(record):
    """Other experts, with the digest made to fit, so that the mask alone looks untouched."""
    record["mask"]["layers"][0]["pruned"] = [0, 3, 5, 6]
    del record["mask"]["digest"]
    record["mask"] = Mask.from_json(record["mask"]).to_json()


def _filled(layer="1", size=3 * 8 * 4, **changes):
    """Constants of width 8 for two experts of layer 1, a group of which `changes` are made, and for a third one."""
    group = {"fill": "Constant", "sha256": "0f" * 32, "tensors": {"mean_D": {"dtype": "float32", "shape": [8]}}}

    def apply(record):
        record["tensors"] = {layer: [{**group, "experts": [0, 3], **changes}, {**group, "experts": [5]}]}
        record["storage"]["parts"]["fills"] = size
        record["storage"]["total"] = sum(record["storage"]["parts"].values())

    return apply


def _layer_dropped(record):
    """One layer less, with both digests and the ratio made to fit."""
    record["mask"] = Mask(record["mask"]["model_shape"], (LayerMask(1, 8, (0, 3, 5, 7)),)).to_json()
    _of_identity(lambda i: i["mask"].update(digest=record["mask"]["digest"]))(record)


BROKEN |= {
    "tensors of another layer": (_filled("3"), "tensors of layer '3'; in record; expected layers of the mask: 1, 2"),
    "tensors one by one": (lambda r: r.update(tensors={"1": {"0/mean_D": {}}}), "expected a list of groups"),
    "tensors of a survivor": (_filled(experts=[0, 1]), "tensors.1 has experts [0, 1]; in record; expected of [0, 3"),
    "tensors twice": (_filled(experts=[3, 5]), "tensors.1 has experts [5]; in record; expected of [0, 7], each once"),
    "tensors out of order": (_filled(experts=[3, 0]), "tensors.1 has experts [3, 0]"),
    "tensors of nobody": (_filled(experts=[]), "a group of tensors.1 is"),
    "no hash of tensors": (_filled(sha256="0f"), "expected experts, fill, sha256, tensors"),
    "tensors without a shape": (_filled(tensors={"mean_D": {"dtype": "float32"}}), "a group of tensors.1 is"),
    "negative shape": (_filled(tensors={"a": {"dtype": "float32", "shape": [-8]}}), "a group of tensors.1 is"),
    "more about tensors": (_filled(note=""), "a group of tensors.1 is"),
    "other bytes": (_filled(size=100), "storage parts fills 100; in record; expected so many bytes for each of 24"),
    "no bytes": (_filled(size=0), "storage parts fills 0"),
    "share above one": (
        lambda r: r.update(routing={"layers": {"1": {"calls": 10, "displaced_share": 7.5}}}),
        "routing.layers.1 is {'calls': 10, 'displaced_share': 7.5}",
    ),
    "ratio below zero": (
        lambda r: r.update(routing={"layers": {"1": {"calls": 10, "keep_over_renorm": -1.0}}}),
        "counts and ratios from 0, shares up to 1",
    ),
    "layers a list": (lambda r: r.update(routing={"layers": []}), "routing.layers is []"),
    "mask edited": (lambda r: r["mask"]["layers"][0]["pruned"].pop(), "the mask was changed after it was written"),
    "mask replaced": (_other_experts, "identity.mask.digest"),
    "mask layer dropped": (_layer_dropped, "the mask has layers 1:8; in record; expected those of its shape 1:8 2:8"),
    "mask with more fields": (lambda r: r["mask"].update(note="x"), "the mask has other fields"),
    "mask removed": (lambda r: r.update(mask=None), "but there is no mask"),
    "mask not of the identity": (_of_identity(lambda i: i.update(mask=None)), "identity.mask is null"),
    "mask of another model": (_of_identity(lambda i: i["model"].update(shape="1:8x4 2:8x4")), "the mask is for '1:8x2"),
    "called dense": (lambda r: r["arm"].update(dense=True), "arm.dense True; in record; expected False"),
    "dense by number": (lambda r: r["arm"].update(dense=0), "arm.dense 0"),
    "another ratio": (lambda r: r["arm"].update(ratio=0.25), "arm.ratio is 0.25; in record; expected 0.5"),
    "no ratio": (lambda r: r["arm"].update(ratio=None), "arm.ratio is None; in record; expected 0.5"),
    "another count": (lambda r: r["arm"].update(keep=4), "arm.keep is 4; in record; expected None"),
    "another model": (lambda r: r["arm"].update(model="gpt"), "arm.model is 'gpt'; in record; expected 'tiny-olmoe'"),
    "mask both given and chosen": (
        _of_identity(lambda i: i["mask"].update(source="file")),
        "identity.calibration.mask is stated for a given mask",
    ),
    "another criterion": (lambda r: r["arm"].update(mask="mone"), "arm.mask is 'mone'; in record; expected 'reap'"),
    "operator no text": (lambda r: r["arm"].update(operator=3), "arm.operator is 3"),
    "no calibration": (_of_identity(lambda i: i.update(calibration=None)), "identity.calibration is None"),
    "calibration of one": (
        _of_identity(lambda i: i.update(calibration=i["calibration"]["mask"])),
        "identity.calibration has text, blocks, length, draw, fingerprint; in record; expected mask and fit",
    ),
    "calibration gap": (
        _of_identity(lambda i: i["calibration"]["mask"].pop("draw")),
        "expected null, or text, blocks, length, draw, fingerprint",
    ),
    "no operator": (_of_identity(lambda i: i.update(operator=None)), "identity.operator is None"),
    "no tokenizer": (
        _of_identity(lambda i: i["model"].pop("tokenizer_sha256")),
        "identity.model lacks tokenizer_sha256",
    ),
    "method no object": (_of_identity(lambda i: i.update(method="reap")), "identity.method is 'reap'"),
    "parameters no object": (
        _of_identity(lambda i: i["method"].update(parameters=1)),
        "identity.method.parameters is 1",
    ),
    "operator unnamed": (_of_identity(lambda i: i["operator"].update(name=[1])), "identity.operator.name is [1]"),
    "suite version": (
        _of_identity(lambda i: i["suites"]["perplexity"].update(version="x")),
        "identity.suites.perplexity",
    ),
    "suites no objects": (_of_identity(lambda i: i.update(suites={"a": 1})), "identity.suites is"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_record_is_refused_in_one_line_and_nothing_is_written(tmp_path, record, items, case):
    change, message = BROKEN[case]
    broken = copy.deepcopy(record)
    validate(broken)
    change(broken)
    with pytest.raises(UsageError) as caught:
        write_run(tmp_path / "run", broken, items)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ratio", 0.0),
        ("keep", 4),
        ("mask", "reap"),
        ("operator", "zero"),
        ("scale", "keep"),
        ("dense", False),
    ],
)
def test_a_dense_record_has_nothing_of_a_pruned_arm(factory, items, key, value):
    record = factory.make_record(items, dense=True)
    validate(record)
    record["arm"][key] = value
    with pytest.raises(UsageError, match=rf"arm\.{key} "):
        validate(record)


def test_a_given_mask_has_the_name_of_its_file_and_a_budget_of_its_own(factory, items):
    record = factory.make_record(items, mask="mine", identity={"mask": {"source": "file"}, "budget": None})
    validate(record)
    assert record["arm"]["ratio"] == 0.5


def test_another_run_is_replaced_only_on_request(tmp_path, factory, items, record):
    write_run(tmp_path / "run", record, items)
    write_run(tmp_path / "run", record, items)
    other = factory.make_record(items, mask="mone")
    with pytest.raises(UsageError, match=f"holds another run .{record['run_id']}"):
        write_run(tmp_path / "run", other, items)
    assert is_complete(tmp_path / "run", record["run_id"])
    write_run(tmp_path / "run", other, items, replace=True)
    assert is_complete(tmp_path / "run", other["run_id"])


def test_replacing_works_where_folders_cannot_be_exchanged(tmp_path, monkeypatch, factory, items, record):
    monkeypatch.setattr(record_module, "_exchange", lambda left, right: False)
    write_run(tmp_path / "run", record, items)
    other = factory.make_record(items, mask="mone")
    write_run(tmp_path / "run", other, items, replace=True)
    assert is_complete(tmp_path / "run", other["run_id"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_old_run_that_lost_its_place_is_brought_back(tmp_path, factory, items, record):
    write_run(tmp_path / "run", record, items)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / "run").rename(tmp_path / f".run.{int(gone.stdout)}.old")
    (tmp_path / f".run.{int(gone.stdout)}.tmp").mkdir()
    bad = factory.make_items(n=1)
    with pytest.raises(UsageError, match="holds another run"):
        write_run(tmp_path / "run", factory.make_record(bad, mask="mone"), bad)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert is_complete(tmp_path / "run", record["run_id"])


def test_a_folder_with_other_things_is_left_alone(tmp_path, record, items):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match=r"holds other things .thesis.tex"):
        write_run(tmp_path / "home", record, items, replace=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "precious"


def test_an_unwritable_place_is_one_line(tmp_path, record, items):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the run") as caught:
        write_run(tmp_path / "file" / "run", record, items)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="is a file"):
        write_run(tmp_path / "file", record, items)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


HALVES = {
    "no record": lambda folder: (folder / "record.json").unlink(),
    "no items": lambda folder: (folder / "items.parquet").unlink(),
    "cut record": lambda folder: _cut(folder / "record.json"),
    "nothing": lambda folder: [path.unlink() for path in folder.iterdir()],
    "not a record": lambda folder: (folder / "record.json").write_text("[]"),
    "edited": lambda folder: (folder / "record.json").write_text('{"schema": 1}'),
}


@pytest.mark.parametrize("case", HALVES)
def test_a_half_written_run_is_one_line_listed_and_replaced(tmp_path, record, items, case):
    write_run(tmp_path / "whole", record, items)
    write_run(tmp_path / "sub" / "half", record, items)
    HALVES[case](tmp_path / "sub" / "half")
    with pytest.raises(PrerequisiteError, match=r"half-written (or altered )?run folder") as caught:
        read_run(tmp_path / "sub" / "half")
    assert "\n" not in str(caught.value)
    assert not is_complete(tmp_path / "sub" / "half", record["run_id"])
    listing = runs_under(tmp_path)
    assert listing.runs == (tmp_path / "whole",)
    assert [one.path for one in listing.left_out] == [tmp_path / "sub" / "half"]
    assert str(tmp_path) not in listing.left_out[0].reason
    write_run(tmp_path / "sub" / "half", record, items)
    assert is_complete(tmp_path / "sub" / "half", record["run_id"])


def test_damaged_items_are_one_line(tmp_path, record, items):
    write_run(tmp_path / "run", record, items)
    _cut(tmp_path / "run" / "items.parquet")
    with pytest.raises(PrerequisiteError, match="cannot read the items"):
        read_run(tmp_path / "run")
    assert not is_complete(tmp_path / "run", record["run_id"])


def test_a_foreign_table_is_refused(tmp_path, record, items):
    write_run(tmp_path / "run", record, items)
    table = pq.read_table(tmp_path / "run" / "items.parquet")
    pq.write_table(table.drop_columns(["weight"]), tmp_path / "run" / "items.parquet")
    with pytest.raises(PrerequisiteError, match="not an items file"):
        read_run(tmp_path / "run")


def test_a_folder_of_runs_is_no_half_written_run(tmp_path, record, items):
    write_run(tmp_path / "records" / "run", record, items)
    with pytest.raises(
        UsageError, match=r"the folder is no run's; in .*records; expected one run's folder, with record"
    ):
        read_run(tmp_path / "records")


def test_missing_folders_are_one_line(tmp_path):
    with pytest.raises(UsageError, match="no such run folder"):
        read_run(tmp_path / "no")
    with pytest.raises(UsageError, match="no such folder"):
        runs_under(tmp_path / "no")


def test_unfinished_writes_are_not_listed(tmp_path, record, items):
    write_run(tmp_path / "run", record, items)
    (tmp_path / ".other.1.tmp").mkdir()
    assert runs_under(tmp_path) == record_module.RunListing((tmp_path / "run",), ())


WRITER = """
import json, sys
from pathlib import Path
from prunebench.record import read_run, write_run
source = [read_run(Path(p)) for p in sys.argv[2:4]]
print("ready", flush=True)
while True:
    for run in source:
        write_run(Path(sys.argv[1]), run.record, run.items, replace=True)
"""


@pytest.mark.parametrize("existing", [True, False])
def test_sigkill_at_any_moment_leaves_a_whole_run_or_none(tmp_path, factory, existing):
    for seed, name in enumerate(("a", "b")):
        factory.write(tmp_path / "source" / name, factory.make_items(seed=seed, n=4), mask=name)
    whole = {run.record["run_id"]: run for run in map(read_run, runs_under(tmp_path / "source").runs)}
    chance = random.Random(0)
    target = tmp_path / "out" / "run"
    command = [
        sys.executable,
        "-c",
        WRITER,
        str(target),
        str(tmp_path / "source" / "a"),
        str(tmp_path / "source" / "b"),
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(record_module.__file__).parents[1])}
    for _ in range(5):
        shutil.rmtree(target, ignore_errors=True)
        if existing:
            factory.write(target, factory.make_items(seed=0, n=4), mask="a")
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
            writer.stdout.readline()
            time.sleep(chance.uniform(0, 0.05))
            writer.send_signal(signal.SIGKILL)
        if existing or target.exists():
            run = read_run(target)
            wanted = whole[run.record["run_id"]]
            assert run.record == wanted.record
            assert np.array_equal(run.items.value, wanted.items.value)
    if not target.exists():
        factory.write(target, factory.make_items(seed=0, n=4), mask="a")
    last = read_run(target)
    write_run(target, last.record, last.items)
    assert [path.name for path in target.parent.iterdir()] == ["run"], "leftovers of killed writers are cleared"


def test_importing_records_takes_no_heavy_package():
    code = "import sys, prunebench.record; print(sorted({'torch', 'transformers', 'pyarrow'} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": str(Path(record_module.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
