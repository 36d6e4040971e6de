"""Packing keeps what runs share once, changes no outcome, and can be killed at any moment."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prunebench import items as items_module
from prunebench import packing
from prunebench import record as record_module
from prunebench.errors import IntegrityError, PrerequisiteError, UsageError
from prunebench.items import Item, items_to_table, questions_bytes, questions_named, read_questions
from prunebench.packing import pack, unpack
from prunebench.record import is_complete, read_items, read_run, runs_under, write_items, write_run

ITEMS = "items.parquet"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Runs here need not outlast a power cut."""
    monkeypatch.setattr(os, "fsync", lambda _handle: None)


@pytest.fixture
def records(factory, tmp_path) -> Path:
    """Three runs of the same questions in two models' folders, and one of fewer."""
    folder = tmp_path / "records"
    factory.write(folder / "a" / "dense", factory.make_items(seed=1, n=8, skill=0.95), dense=True)
    factory.write(folder / "a" / "reap", factory.make_items(seed=2, n=8))
    factory.write(folder / "b" / "mone", factory.make_items(seed=3, n=8), mask="mone", model="tiny-granite")
    factory.write(folder / "b" / "short", factory.make_items(seed=4, n=4), mask="random", limit=4)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def outcomes(folder: Path) -> dict[str, tuple[dict, list[Item]]]:
    runs = {str(path.relative_to(folder)): read_run(path) for path in runs_under(folder).runs}
    return {name: (run.record, list(run.items.items())) for name, run in runs.items()}


def table_of(run: Path) -> str | None:
    return questions_named(run / ITEMS)


def test_packed_runs_read_as_before_and_hold_only_what_is_their_own(records):
    before = outcomes(records)
    result = pack(records)
    assert (result.changed, result.kept, result.tables, result.left_out) == (4, 0, 2, ())
    assert outcomes(records) == before
    assert result.bytes_after < result.bytes_before
    assert result.bytes_after == sum(len(data) for data in contents(records).values())
    for path in runs_under(records).runs:
        assert pq.read_schema(path / ITEMS).names == ["value", "state", "detail", "numbers"]
    tables = {path.stem for path in (records / "questions").iterdir()}
    assert {table_of(path) for path in runs_under(records).runs} == tables
    assert table_of(records / "a" / "dense") == table_of(records / "b" / "mone") != table_of(records / "b" / "short")
    for path in (records / "questions").iterdir():
        assert path.stem == hashlib.sha256(path.read_bytes()).hexdigest()


def test_packing_again_changes_no_byte(records):
    pack(records)
    packed = contents(records)
    assert (pack(records).changed, pack(records).kept) == (0, 4)
    assert contents(records) == packed


def test_unpacking_gives_the_very_bytes_back(records):
    whole = contents(records)
    pack(records)
    result = unpack(records)
    assert (result.changed, result.kept, result.tables) == (4, 0, 0)
    assert contents(records) == whole
    assert not (records / "questions").exists()
    assert unpack(records).kept == 4


def test_a_folder_of_packed_and_whole_runs_is_read_and_packed_on(records, factory):
    pack(records)
    before = contents(records)
    factory.write(records / "a" / "later", factory.make_items(seed=9, n=8), mask="frequency")
    assert table_of(records / "a" / "later") is None
    assert len(outcomes(records)) == 5
    result = pack(records)
    assert (result.changed, result.kept, result.tables) == (1, 4, 2)
    assert before.items() <= contents(records).items()
    assert table_of(records / "a" / "later") == table_of(records / "a" / "reap")


def test_a_run_that_is_made_again_is_whole_and_its_table_goes_when_nobody_names_it(records, factory):
    pack(records)
    short = table_of(records / "b" / "short")
    run = read_run(records / "b" / "short")
    write_run(run.path, run.record, run.items)
    assert table_of(run.path) is None
    assert (records / "questions" / f"{short}.parquet").exists()
    shutil.rmtree(run.path)
    assert pack(records).tables == 1
    assert not (records / "questions" / f"{short}.parquet").exists()


def test_a_packed_run_that_was_copied_away_is_one_line_and_unpacked_it_is_fine(records, tmp_path):
    pack(records)
    alone = tmp_path / "alone" / "run"
    shutil.copytree(records / "a" / "reap", alone)
    with pytest.raises(PrerequisiteError, match=r"their questions are not here.*prunebench pack --unpack") as caught:
        read_run(alone)
    assert "\n" not in str(caught.value)
    shutil.rmtree(alone)
    assert unpack(records / "a" / "reap").changed == 1
    shutil.copytree(records / "a" / "reap", alone)
    assert read_run(alone).items.equals(read_run(records / "a" / "reap").items)
    assert table_of(records / "a" / "dense") is not None


def test_a_packed_records_folder_can_be_moved_whole_and_read_from_within(records, tmp_path, monkeypatch):
    pack(records)
    before = outcomes(records)
    records.rename(tmp_path / "moved")
    assert outcomes(tmp_path / "moved") == before
    monkeypatch.chdir(tmp_path / "moved" / "a" / "reap")
    assert read_run(Path()).items.equals(read_run(tmp_path / "moved" / "a" / "reap").items)


def _damaged(table: Path) -> None:
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)


def _another(table: Path) -> None:
    other = next(path for path in table.parent.iterdir() if path != table)
    shutil.copyfile(other, table)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_damaged, "the questions have been damaged: their sha256 is"),
        (_another, "the questions have been damaged: their sha256 is"),
        (lambda table: table.write_bytes(b""), "the questions have been damaged"),
        (Path.unlink, "their questions are not here"),
    ],
)
def test_a_table_that_is_not_what_it_was_is_one_line(records, harm, message):
    pack(records)
    run = records / "a" / "reap"
    harm(records / "questions" / f"{table_of(run)}.parquet")
    with pytest.raises(PrerequisiteError, match=message) as caught:
        read_run(run)
    assert "\n" not in str(caught.value)
    assert not is_complete(run, json.loads((run / "record.json").read_text())["run_id"])
    before = {name: data for name, data in contents(records).items() if not name.startswith("questions")}
    result = unpack(records)
    assert (result.changed, len(result.left_out)) == (1, 3)
    assert message in result.left_out[0].reason
    short = {name: data for name, data in contents(records).items() if "short" in name}
    assert {**before, **short} == {n: d for n, d in contents(records).items() if not n.startswith("questions")}


def test_packing_stops_at_a_damaged_table_before_it_changes_anything(records, factory):
    pack(records)
    _damaged(records / "questions" / f"{table_of(records / 'a' / 'reap')}.parquet")
    factory.write(records / "a" / "later", factory.make_items(seed=9, n=8), mask="frequency")
    before = contents(records)
    with pytest.raises(PrerequisiteError, match="the questions have been damaged"):
        pack(records)
    assert contents(records) == before


def test_a_table_is_never_taken_for_a_half_written_run(records):
    pack(records)
    assert runs_under(records).left_out == ()
    assert len(runs_under(records).runs) == 4


def test_a_model_may_be_called_questions(records, factory):
    factory.write(records / "questions" / "run", factory.make_items(seed=9, n=8), mask="frequency")
    before = outcomes(records)
    pack(records)
    assert outcomes(records) == before
    assert len(before) == 5
    unpack(records)
    assert outcomes(records) == before


def test_other_numbers_of_outcomes_than_questions_are_one_line(records):
    pack(records)
    file = records / "a" / "reap" / ITEMS
    table = pq.read_table(file)
    with pq.ParquetWriter(file, table.schema) as writer:
        writer.write_table(table.slice(1))
        writer.add_key_value_metadata({"prunebench.questions": table_of(records / "a" / "dense")})
    with pytest.raises(PrerequisiteError, match="47 outcomes for 48 questions"):
        read_items(file)


def test_packed_columns_without_a_table_are_no_items_file(tmp_path):
    columns = {"value": pa.array([1.0]), "state": pa.array(["ok"]), "detail": pa.array(["{}"]), "numbers": [[1]]}
    pq.write_table(pa.table(columns), tmp_path / ITEMS)
    with pytest.raises(PrerequisiteError, match="not an items file"):
        read_items(tmp_path / ITEMS)


def test_a_run_without_questions_of_its_own_kind_is_refused(records, factory, tmp_path):
    pack(records)
    questions = read_questions(records / "questions" / f"{table_of(records / 'a' / 'reap')}.parquet")
    heavier = [replace(item, weight=item.weight + 1) for item in factory.make_items(n=8)]
    for items in (factory.make_items(n=4), heavier):
        with pytest.raises(UsageError, match="the items answer other questions"):
            write_items(tmp_path / ITEMS, items, questions)


def test_damaged_runs_and_runs_too_deep_are_left_as_they_are(records, factory):
    cut = records / "a" / "reap" / ITEMS
    cut.write_bytes(cut.read_bytes()[:-20])
    deep = factory.write(records / "1" / "2" / "3" / "4" / "run", factory.make_items(seed=9, n=2), mask="mone")
    before = contents(records)
    result = pack(records)
    assert result.changed == 3
    assert {one.path: one.reason for one in result.left_out} == {
        cut.parent: "cannot read the items",
        deep: "the items are packed, and their questions are not here",
    }
    assert all(contents(records)[name] == before[name] for name in before if "reap" in name or name.startswith("1/"))


def test_a_place_where_nothing_can_be_packed_is_one_line(records, tmp_path):
    with pytest.raises(UsageError, match="the folder is a run's own"):
        pack(records / "a" / "reap")
    with pytest.raises(UsageError, match="no such folder"):
        pack(tmp_path / "no")


def test_what_does_not_read_as_the_same_replaces_nothing(records, monkeypatch):
    before = contents(records)
    monkeypatch.setattr(items_module, "_differences", lambda details, _references: ["{}"] * len(details))
    with pytest.raises(IntegrityError, match="packed items read as other ones"):
        pack(records)
    after = contents(records)
    assert {name: data for name, data in after.items() if not name.startswith("questions/")} == before


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6)
decimals = st.integers(-(10**10), 10**10).map(lambda number: number / 1e6) | st.floats(-2, 2)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | decimals | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)
details = st.builds(
    json.dumps,
    st.dictionaries(st.sampled_from("abc"), values, max_size=3) | values,
    separators=st.sampled_from([(",", ":"), None]),
    ensure_ascii=st.booleans(),
    sort_keys=st.booleans(),
) | st.sampled_from(
    [
        "{}",
        '{"a":NaN}',
        '{"a":1,"a":2}',
        '"\\ud800"',
        '{"a":1e2}',
        '{"a":100.0}',
        '{"a":true}',
        " {}",
        '{"a":-0.0}',
        '"1.50 2.5 -3.25.1 2147.483648"',
        '"\\u0001 0.5"',
    ]
)


@settings(max_examples=60)
@given(st.lists(st.tuples(details, details), min_size=1, max_size=6))
def test_any_detail_comes_back_to_the_letter(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("r")
    runs = [
        items_to_table(
            Item("s", "t", "none", f"{number}", 1, 2, "acc", 1.0, detail=pair[side])
            for number, pair in enumerate(pairs)
        )
        for side in (0, 1)
    ]
    data = questions_bytes(runs[0])
    table = folder / "questions" / f"{hashlib.sha256(data).hexdigest()}.parquet"
    table.parent.mkdir()
    table.write_bytes(data)
    for number, run in enumerate(runs):
        (folder / f"{number}").mkdir()
        write_items(folder / f"{number}" / ITEMS, run, read_questions(table))
        assert list(read_items(folder / f"{number}" / ITEMS).items()) == list(run.items())


def test_details_are_told_by_what_differs_from_those_of_the_first_run(factory, tmp_path):
    for name, answers in (("a", (1, 2, 3, 3)), ("b", (1, 2, 2, 0))):
        items = [
            replace(item, detail=f'{{"answer":{answers[number % 4]},"choices":[0,1,2,3]}}')
            for number, item in enumerate(factory.make_items(n=4))
        ]
        factory.write(tmp_path / name, items, mask=name)
    assert pack(tmp_path).tables == 1
    told = {name: pq.read_table(tmp_path / name / ITEMS).column("detail").to_pylist() for name in "ab"}
    assert set(told["a"]) == {"", "{}"}
    assert told["b"][:8] == ["{}", "", '{"answer":2}', '{"answer":0}', "{}", "", '{"answer":2}', '{"answer":0}']


def test_log_likelihoods_are_kept_as_whole_numbers(factory, tmp_path):
    for name, last in (("a", -10.834259), ("b", -0.002411)):
        items = [
            replace(item, detail=f'{{"loglikelihoods":[{last},-12.0,1.2345678,3]}}') for item in factory.make_items(n=1)
        ]
        factory.write(tmp_path / name, items, mask=name)
    pack(tmp_path)
    table = pq.read_table(tmp_path / "b" / ITEMS)
    assert table.column("detail").to_pylist()[0] == '{"loglikelihoods":[\x01,\x01,1.2345678,3]}'
    assert table.column("numbers").to_pylist()[0] == [-2411, -12_000_000]
    assert read_items(tmp_path / "b" / ITEMS).detail[0] == '{"loglikelihoods":[-0.002411,-12.0,1.2345678,3]}'


# ------------------------------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize(
    ("verb", "step"),
    [(verb, step) for verb in (pack, unpack) for step in ("write_run", "_put_in_place")]
    + [(pack, "write_atomically"), (unpack, "unlink")],
)
def test_a_command_that_dies_before_or_after_a_step_is_given_again(records, monkeypatch, verb, step):
    whole = outcomes(records)
    raw = contents(records)
    pack(records)
    packed = contents(records)
    wanted = packed if verb is pack else raw
    owner = {"_put_in_place": record_module, "unlink": Path}.get(step, packing)
    done = getattr(owner, step)
    deaths = 0
    for after in (False, True):
        for nth in range(1, 4):
            unpack(records) if verb is pack else pack(records)
            calls = []

            def dying(*arguments, calls=calls, nth=nth, after=after, **named):
                calls.append(1)
                if len(calls) == nth and not after:
                    raise KeyboardInterrupt
                result = done(*arguments, **named)
                if len(calls) == nth:
                    raise KeyboardInterrupt
                return result

            with monkeypatch.context() as patch:
                patch.setattr(owner, step, dying)
                try:
                    verb(records)
                except KeyboardInterrupt:
                    deaths += 1
                    assert outcomes(records) == whole
            verb(records)
            assert contents(records) == wanted
    assert deaths >= 4


PACKER = """
import sys
from pathlib import Path
from prunebench.packing import pack, unpack
print("ready", flush=True)
while True:
    pack(Path(sys.argv[1]))
    unpack(Path(sys.argv[1]))
"""


def test_sigkill_at_any_moment_leaves_every_run_whole(records):
    whole = outcomes(records)
    raw = contents(records)
    pack(records)
    packed = contents(records)
    environment = os.environ | {"PYTHONPATH": str(Path(packing.__file__).parents[1])}
    chance = random.Random(0)
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", PACKER, str(records)], stdout=subprocess.PIPE, env=environment
        ) as packer:
            packer.stdout.readline()
            time.sleep(chance.uniform(0, 0.3))
            packer.send_signal(signal.SIGKILL)
        assert outcomes(records) == whole
    pack(records)
    assert contents(records) == packed
    unpack(records)
    assert contents(records) == raw
