"""Every way of making a record say more than its evidence is refused, by the name of the rule that it breaks."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path

import pytest

from prunebench.analysis import metrics_from_items
from prunebench.errors import UsageError
from prunebench.loader import content_root, file_digests
from prunebench.packing import unpack
from prunebench.record import (
    items_to_table,
    read_items,
    read_record,
    run_id,
    sealed,
    write_items,
)
from prunebench.run.stored import documents_of
from prunebench.schema import _OPTIONAL, _TOP
from prunebench.storage import PARTS
from prunebench.validation import RETRACTIONS, record_schema, validate_records
from prunebench.validation.checks import CHECKS, first_fault
from prunebench.versions import SCHEMA, json_document, migrated

SAMPLES = Path(__file__).parents[1] / "record" / "samples"
NOW = dt.datetime(2026, 12, 1, tzinfo=dt.UTC)
METHODS = {"mone": "00", "reroute": "00", "constant": "00"}


def marks(kind="pruned"):
    return [{"check": name, "status": "pass", "detail": ""} for name in CHECKS[kind]]


@pytest.fixture(scope="module")
def honest(factory, tmp_path_factory):
    """A dense run, a constant and two rerouted ones on one mask."""
    records = tmp_path_factory.mktemp("honest")
    make = factory.make_items
    factory.write(records / "dense", make(seed=1, skill=0.95), dense=True, integrity=marks("dense"))
    for number, (operator, scale, resolved) in enumerate(
        [("constant", None, None), ("reroute", "trained", "keep"), ("reroute", "other", "renorm")]
    ):
        arm = {"mask": "mone", "operator": operator, "scale": scale, "resolved_scale": resolved}
        factory.write(records / f"{operator}{number}", make(seed=2 + number), **arm, integrity=marks())
    return records


@pytest.fixture
def records(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "records")


def found(records, **more):
    result = validate_records([records], **({"methods": METHODS, "now": NOW} | more))
    return [(one.path, one.rule, one.what) for one in result.findings]


def forge(folder, record=None, items=None, *, metrics=False, seal=True):
    """Change a run as somebody would who knows the format: numbers, run id and seal are made to agree again."""
    path = folder / "record.json"
    data = json.loads(path.read_text())
    table = read_items(folder / "items.parquet")
    if items is not None:
        table = items_to_table(items(list(table.items())))
        write_items(folder / "items.parquet", table)
    if record is not None:
        record(data)
    data["run_id"] = run_id(data["identity"])
    if metrics:
        data["metrics"] = metrics_from_items(table, data["headline"])
    path.write_text(json.dumps(sealed(data, table) if seal else data))


def change(item, **new):
    return type(item)(**(vars(item) | new))


def flipped(items):
    at = next(i for i, item in enumerate(items) if item.metric == "acc" and item.value == 0)
    return [*items[:at], change(items[at], value=1.0, state="ok"), *items[at + 1 :]]


def without_errors(items):
    """What was wrong in one task is not counted, in any of its metrics."""
    gone = {item.item for item in items if item.task == "recall" and item.metric == "acc" and item.value == 0}
    return [item for item in items if item.item not in gone]


def best_of(items):
    """The errors are dropped from one metric only."""
    return [item for item in items if item.task != "recall" or item.metric != "acc" or item.value]


def text(folder, old, new):
    path = folder / "record.json"
    before = path.read_text()
    after = before.replace(old, new)
    assert after != before
    path.write_text(after)


def foreign_items(folder):
    shutil.copyfile(folder.parent / "reroute2" / "items.parquet", folder / "items.parquet")


def one_task_less(folder):
    forge(folder, lambda r: r["headline"].update(multiple_choice=[["yes_no", "none", "acc"]]), metrics=True)


TAMPERING = {
    "one score changed": (
        lambda f: forge(f, lambda r: r["metrics"]["arithmetic"].update(value=0.99)),
        ("metrics", "arithmetic: the record says value 0.99"),
    ),
    "one item flipped": (lambda f: forge(f, items=flipped), ("metrics", "its items give")),
    "one item flipped and nothing sealed again": (
        lambda f: forge(f, items=flipped, metrics=True, seal=False),
        ("seal", "the items are not those that were sealed"),
    ),
    "an item above one": (
        lambda f: forge(f, items=lambda i: [change(i[0], value=1.5), *i[1:]], metrics=True),
        ("items", "1.5 is no share"),
    ),
    "items of another run": (foreign_items, ("seal", "the items are not those that were sealed")),
    "record edited after hashing": (
        lambda f: text(f, '"storage": {"parts":{', '"storage": {"parts":{"other":0,'),
        ("seal", "edited after it was sealed"),
    ),
    "identity edited after hashing": (
        lambda f: text(f, '"batch_tokens":1024', '"batch_tokens":2048'),
        ("record", "is not its identity's"),
    ),
    "accuracy 1.7": (
        lambda f: forge(f, lambda r: r["metrics"]["multiple_choice/recall/none/acc"].update(value=1.7, high=1.7)),
        ("schema", "is greater than the maximum of 1"),
    ),
    "negative size": (
        lambda f: forge(f, lambda r: r["storage"]["parts"].update(experts=-1)),
        ("schema", "-1 is less than the minimum"),
    ),
    "future date": (
        lambda f: forge(f, lambda r: r["volatile"].update(started="2031-01-01T00:00:00+00:00")),
        ("date", "is in the future"),
    ),
    "no date": (lambda f: forge(f, lambda r: r["volatile"].pop("started")), ("date", "no date")),
    "schema version missing": (lambda f: text(f, f'"schema": {SCHEMA},\n', ""), ("schema", "no schema version")),
    "schema of the future": (
        lambda f: text(f, f'"schema": {SCHEMA},', f'"schema": {SCHEMA + 1},'),
        ("schema", "newer than this prunebench"),
    ),
    "NaN": (lambda f: text(f, '"seconds":1.5', '"seconds":NaN'), ("json", "NaN is no JSON number")),
    "Infinity": (lambda f: text(f, '"seconds":1.5', '"seconds":-Infinity'), ("json", "-Infinity is no JSON number")),
    "a name twice": (
        lambda f: text(f, '"seconds":1.5', '"seconds":9,"seconds":1.5'),
        ("json", "'seconds' is there twice"),
    ),
    "partial tasks averaged": (one_task_less, ("headline", "averaged over other tasks")),
    "a limited run called complete": (
        lambda f: forge(f, items=lambda i: [one for one in i if not one.item.endswith("9")], metrics=True),
        ("count", "items are short"),
    ),
    "a limit that is called none": (
        lambda f: forge(f, lambda r: r["identity"].update(limit=5)),
        ("record", "status complete with limit 5"),
    ),
    "claimed ratio is not the mask's": (
        lambda f: forge(f, lambda r: r["arm"].update(ratio=0.25)),
        ("record", "arm.ratio is 0.25"),
    ),
    "budget is not the mask's": (
        lambda f: forge(f, lambda r: r["identity"]["budget"].update(ratio="0.25")),
        ("arm", "the mask removes 8 experts; ratio 0.25 of 16 is 4"),
    ),
    "budget that is no number": (
        lambda f: forge(f, lambda r: r["identity"]["budget"].update(ratio="half")),
        ("arm", "budget: ratio 'half' is not a number; expected a number such as 0.5"),
    ),
    "budget of more than all": (
        lambda f: forge(f, lambda r: r["identity"]["budget"].update(ratio="1.5")),
        ("arm", "budget: ratio 1.5 is impossible; expected a number above 0 and below 1"),
    ),
    "another operator's name": (
        lambda f: forge(f, lambda r: r["arm"].update(operator="reroute")),
        ("arm", "operator reroute, of the file constant, that stores nothing and refills no slots"),
    ),
    "another scale's name": (
        lambda f: forge(f.parent / "reroute2", lambda r: r["arm"].update(scale="trained")),
        ("arm", "scale trained; its identity asks for other"),
    ),
    "another scale": (
        lambda f: forge(f.parent / "reroute2", lambda r: r["arm"].update(resolved_scale="keep")),
        ("arm", "scale other is keep; a router with softmax, no renorm makes it renorm"),
    ),
    "another router": (
        lambda f: forge(f, lambda r: r["arm"].update(convention="softmax, renorm")),
        ("arm", "convention softmax, renorm; the other runs on these weights have softmax, no renorm"),
    ),
    "a seal before there were seals": (
        lambda f: text(f, f'"schema": {SCHEMA},', '"schema": 1,'),
        ("schema", "a seal in a record of schema 1"),
    ),
    "a check that is passed over": (
        lambda f: forge(f, lambda r: r["integrity"][3].update(status="not applicable")),
        ("integrity", "is marked not applicable, and this arm has it"),
    ),
    "mask changed": (
        lambda f: forge(f, lambda r: r["mask"]["layers"][0].update(pruned=[0, 3, 5, 6])),
        ("record", "the mask was changed"),
    ),
    "method file changed since": (
        lambda f: forge(f, lambda r: r["identity"]["method"].update(file_sha256="ff")),
        ("method", "the file of method mone has changed since"),
    ),
    "operator file changed since": (
        lambda f: forge(f, lambda r: r["identity"]["operator"].update(file_sha256="ff")),
        ("method", "the file of operator constant has changed since"),
    ),
    "errors dropped from the denominator": (
        lambda f: forge(f, items=without_errors, metrics=True),
        ("count", "items are short"),
    ),
    "errors dropped from one metric": (
        lambda f: forge(f, items=best_of, metrics=True),
        ("count", "multiple_choice/recall/none/acc has"),
    ),
    "a failed check": (
        lambda f: forge(f, lambda r: r["integrity"][0].update(status="fail")),
        ("integrity", "'empty mask is bit-exact' failed"),
    ),
    "a check that is not there": (
        lambda f: forge(f, lambda r: r["integrity"].pop()),
        ("integrity", "no mark for 'k slots per token'"),
    ),
    "fewer bytes than the mask leaves": (
        lambda f: forge(
            f,
            lambda r: (r["storage"]["parts"].update(experts=1_000_000), r["storage"].update(total=1_501_000)),
        ),
        ("bytes", "experts of 1000000 bytes; the dense model and the mask give 2000000"),
    ),
    "fills of other bytes than their tensors": (
        lambda f: forge(
            f,
            lambda r: (
                r["tensors"].update({"1": [fill(expert=0)]}),
                r["storage"]["parts"].update(fills=8 * 24),
                r["storage"].update(total=2_501_000 + 8 * 24),
            ),
        ),
        ("bytes", "fills of 192 bytes, for 8 values"),
    ),
}


def fill(expert):
    return {
        "experts": [expert],
        "fill": "Constant",
        "sha256": "0" * 64,
        "tensors": {"mean_D": {"dtype": "float32", "shape": [8]}},
    }


@pytest.mark.parametrize("case", TAMPERING)
def test_tampering_is_refused_by_name(records, case):
    tamper, (rule, what) = TAMPERING[case]
    tamper(records / "constant0")
    findings = found(records)
    (blamed,) = {path for path, _, _ in findings}
    assert blamed == ("reroute2" if case.startswith("another scale") else "constant0"), "and nobody else is blamed"
    assert [one for one in findings if one[1] == rule and what in one[2]], findings
    assert all("\n" not in text for _, _, text in findings)


def test_honest_runs_have_no_finding_and_a_forger_who_changes_nothing_none_either(records):
    assert found(records) == []
    forge(records / "constant0")
    assert found(records) == []


COMMITTED = content_root() / "leaderboard" / "records" / "tiny"


@pytest.fixture
def committed(tmp_path):
    """A committed run on its own, unpacked."""
    shutil.copytree(COMMITTED / "questions", tmp_path / "questions")
    shutil.copytree(COMMITTED / "tiny-granite" / "reap-ratio0.75-constant-A", tmp_path / "m" / "run")
    unpack(tmp_path / "m")
    return tmp_path / "m"


def without_first(items):
    """One question of a task is gone from all its metrics."""
    gone = min(one.item for one in items if one.task == "tiny_recall")
    return [one for one in items if one.task != "tiny_recall" or one.item != gone]


ALONE = {
    "an item flipped, all else made to agree": (flipped, ("decision", "should be 0.0")),
    "an item right that the detail does not tell": (
        lambda items: [change(one, detail="{}") if one.metric == "nll" else one for one in items],
        ("decision", "its detail cannot be decided"),
    ),
    "errors dropped from the denominator, in a run alone": (without_first, ("count", "items are short")),
}


@pytest.mark.parametrize("case", ALONE)
def test_a_run_alone_is_held_against_its_own_details_and_the_documents_that_are_shipped(committed, case):
    tamper, (rule, what) = ALONE[case]
    methods = file_digests("methods")
    assert validate_records([committed], methods=methods, documents=documents_of()).findings == ()
    forge(committed / "run", items=tamper, metrics=True)
    findings = validate_records([committed], methods=methods, documents=documents_of()).findings
    assert [one for one in findings if one.rule == rule and what in one.what], findings


def test_fills_are_stored_as_wide_as_those_of_the_other_runs(tmp_path):
    shutil.copytree(COMMITTED / "questions", tmp_path / "questions")
    names = ("mone-ratio0.5-constant-A", "reap-ratio0.5-constant-A", "reap-ratio0.75-constant-A")
    for name in names:
        shutil.copytree(COMMITTED / "tiny-granite" / name, tmp_path / "m" / name)
    assert found(tmp_path, methods=file_digests("methods")) == []

    def halve(record):
        parts = record["storage"]["parts"]
        parts["fills"] //= 2
        record["storage"]["total"] -= parts["fills"]

    forge(tmp_path / "m" / names[0], halve, seal=False)
    assert found(tmp_path, methods=file_digests("methods")) == [
        (f"m/{names[0]}", "bytes", "fills of 1 bytes a value; the other runs on these weights have 2")
    ]


def test_items_that_another_mask_answered_to_the_last_bit_are_a_note(committed):
    """Everything was made to agree, so nothing is wrong; only that two masks never answer alike is told."""
    other = committed / "other"
    shutil.copytree(COMMITTED / "tiny-granite" / "mone-ratio0.75-constant-A", other)
    shutil.copyfile(committed / "run" / "items.parquet", other / "items.parquet")
    path = other / "record.json"
    record = migrated(json.loads(path.read_text()), where="")
    items = read_items(other / "items.parquet")
    record["metrics"] = metrics_from_items(items, record["headline"])
    path.write_text(json.dumps(sealed(record, items)))
    result = validate_records([committed], methods=file_digests("methods"), documents=documents_of())
    assert result.findings == ()
    assert result.notes == ("run: its items are those of other to the last bit, whose mask or weights are others",)
    shutil.rmtree(other)
    shutil.copytree(committed / "run", other)
    again = validate_records([committed], methods=file_digests("methods"), documents=documents_of())
    assert again.notes == (), "the same mask answers alike"


def test_a_run_that_is_there_twice_is_a_finding(records):
    shutil.copytree(records / "dense", records / "elsewhere")
    assert found(records) == [("elsewhere", "record", "the same run as dense")]


def test_committed_runs_hold(tmp_path):
    shutil.copytree(COMMITTED / "questions", tmp_path / "questions")
    names = ("dense", "mone-ratio0.5-constant-A", "mone-ratio0.5-reroute-other-A", "reap-ratio0.5-mora-A")
    for name in names:
        shutil.copytree(COMMITTED / "tiny-granite" / name, tmp_path / "tiny-granite" / name)
    result = validate_records([tmp_path], methods=file_digests("methods"), documents=documents_of())
    assert (result.runs, result.findings, result.notes) == (len(names), (), ())


@pytest.mark.parametrize("version", range(1, SCHEMA + 1))
def test_a_sample_of_every_version_is_read_as_todays(version):
    folder = SAMPLES / f"schema-{version}"
    assert json_document((folder / "record.json").read_text())["schema"] == version
    record = read_record(folder)
    assert record["schema"] == SCHEMA
    assert first_fault(record) == ""
    assert (record["seal"] is None) == (version == 1)
    assert found(folder) == []


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "not a record"),
        ({}, "no schema version"),
        ({"schema": True}, "schema True"),
        ({"schema": "2"}, "schema '2'"),
        ({"schema": 0}, "schema 0 was never written"),
        ({"schema": SCHEMA + 1}, "upgrade prunebench"),
    ],
)
def test_a_version_that_cannot_be_read_says_what_to_do(record, message):
    with pytest.raises(UsageError, match=message):
        migrated(record, where="record.json")


def test_the_schema_knows_the_fields_that_the_reader_knows():
    schema = record_schema()
    assert set(schema["properties"]) == set(_TOP) | set(_OPTIONAL)
    assert set(schema["required"]) == set(_TOP)
    assert schema["properties"]["schema"]["const"] == SCHEMA
    assert "fills" in PARTS


RETRACTED = '[[retraction]]\nrun = "{}"\ndate = 2026-12-01\nreason = "its text held test items"\n'


def test_a_retraction_says_why_and_names_a_run_that_is_there(records):
    identifier = read_record(records / "constant0")["run_id"]
    (records / RETRACTIONS).write_text(RETRACTED.format(identifier))
    result = validate_records([records], methods=METHODS, now=NOW)
    assert result.findings == ()
    assert "constant0: retracted 2026-12-01: its text held test items" in result.notes
    (records / RETRACTIONS).write_text(RETRACTED.format("0" * 16))
    assert found(records) == [(RETRACTIONS, "retraction", f"run {'0' * 16} is not here")]


@pytest.mark.parametrize(
    "broken",
    [
        "[[retraction]]\nrun = 5",
        RETRACTED.format("x" * 16),
        RETRACTED.format("0" * 16) * 2,
        RETRACTED.format("0" * 16).replace("its text held test items", " "),
        "run = 1",
        "=",
    ],
)
def test_a_retraction_without_run_date_or_reason_is_one_line(records, broken):
    (records / RETRACTIONS).write_text(broken)
    with pytest.raises(UsageError) as caught:
        found(records)
    assert "\n" not in str(caught.value)
