"""A recorded run can be asked for again, and what comes out is held against it decision by decision."""

from __future__ import annotations

import json

import pytest

from prunebench import cli
from prunebench.analysis.reproduction import MARGIN, reproduction
from prunebench.errors import UsageError
from prunebench.loader import content_root
from prunebench.record import Run, items_to_table, read_record, read_run, run_id, runs_under
from prunebench.run import Session
from prunebench.run.arm import matches, prepare
from prunebench.run.reproduce import reproduce, request_of
from prunebench.run.spec import ArmSpec

RECORDS = content_root() / "leaderboard" / "records" / "tiny"


def test_committed_runs_are_asked_for_as_what_they_are():
    paths = runs_under(RECORDS).runs[::25]
    records = [read_record(path) for path in paths]
    requests = [prepare(request_of(Run(record, None, path))) for record, path in zip(records, paths, strict=True)]
    assert [arm.spec.model for arm in requests] == [record["arm"]["model"] for record in records]
    assert all(matches(record["identity"], arm.known) for record, arm in zip(records, requests, strict=True))


ARMS = {
    "dense": {},
    "a criterion with its operator": {"method": "mone", "keep": 8},
    "protected, on another fit": {
        "method": "reap",
        "ratio": "0.5",
        "protect": "0:1",
        "operator": "tilt",
        "operator_parameters": ("rank=2",),
        "fit_draw": "B",
        "seed": 3,
    },
    "quantized, on another text": {
        "method": "mone",
        "keep": 8,
        "quantize": "w3(group=16, fewest=1)",
        "quant_draw": "B",
    },
    "another scorer": {"scorer": "prefix"},
    "a scale": {"method": "random", "keep": 8, "operator": "reroute", "scale": "other", "limit": 3},
}


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_is_reproduced(model, suite, tmp_path, arm):
    spec = ArmSpec(model=model, suites=(suite,), blocks=8, length=32, **ARMS[arm])
    first = Session(tmp_path / "first").execute(prepare(spec))
    found = reproduce(first.folder, tmp_path / "again", model=model, suites=(suite,))
    assert found.agrees
    assert set(found.parts.values()) == {True}, found.to_text()
    assert (found.equal, found.within, found.differing, found.metrics) == (found.items, 0, (), {})


def test_a_given_mask_is_taken_from_the_run_itself(model, suite, tmp_path, capsys):
    spec = ArmSpec(model=model, suites=(suite,), blocks=8, length=32, method="random", keep=8)
    first = Session(tmp_path / "first").execute(prepare(spec))
    given = ArmSpec(model=model, suites=(suite,), blocks=8, length=32, mask=str(first.folder), operator="constant")
    run = Session(tmp_path / "given").execute(prepare(given))
    arguments = ["reproduce", str(run.folder), "--model", model, "--suite", suite, "--json"]
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["agrees"] is True
    reproduce(first.folder, tmp_path / "again", model=model, suites=(suite,))
    (made,) = runs_under(tmp_path / "again").runs
    with pytest.raises(UsageError, match="compared with itself"):
        reproduce(made, tmp_path / "again", model=model, suites=(suite,))


def test_another_method_file_is_refused_by_name(model, suite, tmp_path):
    spec = ArmSpec(model=model, suites=(suite,), blocks=8, length=32, method="random", keep=8)
    first = Session(tmp_path / "first").execute(prepare(spec))
    path = first.folder / "record.json"
    data = json.loads(path.read_text())
    data["identity"]["method"]["file_sha256"] = "f" * 64
    path.write_text(json.dumps(data | {"run_id": run_id(data["identity"])}))
    with pytest.raises(UsageError, match=r"it would be another run today: method\.file_sha256 was \"ffff"):
        reproduce(first.folder, tmp_path / "again", model=model, suites=(suite,))


# --- what counts as the same


@pytest.fixture
def pair(factory, tmp_path):
    items = factory.make_items(n=3)
    first = next(at for at, item in enumerate(items) if item.metric == "acc")
    folder = factory.write(tmp_path / "a", items)
    return read_run(folder), items, first


def again(run, items, at, **change):
    new = [*items]
    new[at] = type(items[at])(**(vars(items[at]) | change))
    return Run(run.record, items_to_table(new), run.path)


def test_a_flipped_decision_is_different_unless_it_was_within_the_margin(pair):
    run, items, at = pair
    other = {"value": 1.0 - items[at].value, "state": "wrong" if items[at].value else "ok"}
    for gap, within in ((MARGIN / 2, 1), (2 * MARGIN, 0)):
        detail = json.dumps({"loglikelihoods": [-3.0, -3.0 - gap], "characters": [1, 1], "gold": 0})
        found = reproduction(run, again(run, items, at, **other, detail=detail))
        assert (found.within, len(found.differing), found.agrees) == (within, 1 - within, bool(within))


def test_losses_agree_to_the_margin_and_lost_items_never(pair):
    run, items, _ = pair
    loss = next(at for at, item in enumerate(items) if item.metric == "nll")
    near, far = (reproduction(run, again(run, items, loss, value=items[loss].value * x)) for x in (1 + 5e-5, 1 + 5e-4))
    assert (near.within, near.agrees) == (1, True)
    assert (far.within, far.agrees) == (0, False)
    lost = reproduction(run, Run(run.record, items_to_table(items[1:]), run.path))
    assert "is in one run only" in lost.differing[0]
    assert "NOT reproduced" in lost.to_text()


@pytest.mark.parametrize(("field", "part"), [("mask", "mask"), ("storage", "stored bytes"), ("integrity", "integrity")])
def test_another_mask_size_or_check_is_no_reproduction(pair, field, part):
    run, _, _ = pair
    found = reproduction(run, Run({**run.record, field: []}, run.items, run.path))
    assert found.parts[part] is False
    assert not found.agrees


PRINTED = """[[score]]
model = "tiny-olmoe"
arm = "a"
metric = "accuracy, %"
value = {}
source = "nowhere, Table 1"
run = "tiny-olmoe/a"
suite = "arithmetic"
"""


def test_a_run_is_held_against_what_is_printed_of_it(factory, tmp_path, capsys):
    folder = factory.write(tmp_path / "a", factory.make_items(n=40))
    value = 100 * read_record(folder)["metrics"]["arithmetic"]["value"]
    for printed, code in ((value, 0), (value - 60, 1)):
        (tmp_path / "r.toml").write_text(PRINTED.format(printed))
        assert cli.main(["reproduce", str(folder), "--against", str(tmp_path / "r.toml")]) == code
        assert ("inside" if code == 0 else "OUTSIDE") in capsys.readouterr().out
    (tmp_path / "r.toml").write_text(PRINTED.format(1.0).replace("tiny-olmoe/a", "tiny-olmoe/b"))
    assert cli.main(["reproduce", str(folder), "--against", str(tmp_path / "r.toml")]) == 3
