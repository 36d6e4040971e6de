"""A session loads once, calibrates once, and never repeats or half-writes an arm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from prunebench.calibration import score_pass
from prunebench.errors import IntegrityError, PrerequisiteError, UsageError
from prunebench.integrity import Check
from prunebench.packing import pack
from prunebench.record import comparable, read_run
from prunebench.run import Session
from prunebench.run import session as session_module
from prunebench.run.arm import prepare

FITS = {
    "A, A": {"draw": "A"},
    "A, B": {"draw": "A", "fit_draw": "B"},
    "B, A": {"draw": "B", "fit_draw": "A"},
    "B, B": {"draw": "B"},
}
"""Mask and fit: what each is calibrated on."""


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts)


def test_one_load_and_one_score_pass_serve_every_method(spec, tmp_path, monkeypatch):
    loads = []
    load = session_module.load_model
    monkeypatch.setattr(session_module, "load_model", lambda *a, **k: (loads.append(a), load(*a, **k))[1])
    session = Session(tmp_path)
    session.execute(prepare(spec(method=None, ratio=None)))
    assert session.score_passes == 0
    for changes in ({}, {"method": "reap"}, {"method": "mone"}, {"method": "sge", "operator": "constant"}):
        session.execute(prepare(spec(**changes)))
    assert session.score_passes == 1
    session.execute(prepare(spec(method="reap", operator="zero", ratio="0.25")))
    assert session.score_passes == 1
    session.execute(prepare(spec(draw="B")))
    assert session.score_passes == 2
    assert len(loads) == 1


def test_a_score_pass_is_kept_on_disk_and_recognised_by_content(spec, model, tmp_path):
    (tmp_path / "t.txt").write_text("The cat sat on the mat. " * 60)
    text = f"file:{tmp_path / 't.txt'}"
    out = tmp_path / "out"
    first = Session(out)
    first.execute(prepare(spec(text=text)))
    second = Session(out)
    second.execute(prepare(spec(text=text, method="reap")))
    assert (first.score_passes, second.score_passes) == (1, 0)
    os.utime(tmp_path / "t.txt", (0, 0))
    third = Session(out)
    third.execute(prepare(spec(text=text, method="sge")))
    assert third.score_passes == 0
    (tmp_path / "t.txt").write_text("The dog sat on the mat. " * 60)
    fourth = Session(out)
    fourth.execute(prepare(spec(text=text, method="mone")))
    assert fourth.score_passes == 1


def test_a_damaged_cached_pass_is_made_anew(spec, tmp_path):
    one = Session(tmp_path).execute(prepare(spec()))
    (cached,) = (tmp_path / ".cache").glob("*.safetensors")
    cached.write_bytes(cached.read_bytes()[:100])
    session = Session(tmp_path)
    other = session.execute(prepare(spec(method="reap")))
    assert session.score_passes == 1
    assert other.run.record["mask"] is not None
    assert one.run.record["run_id"] != other.run.record["run_id"]


def test_a_finished_arm_is_handed_back_and_not_repeated(spec, tmp_path, monkeypatch):
    first = Session(tmp_path).execute(prepare(spec()))
    monkeypatch.setattr(session_module, "load_model", lambda *_, **__: pytest.fail("loaded a model"))
    again = Session(tmp_path).execute(prepare(spec()))
    assert (first.reused, again.reused) == (False, True)
    assert again.run.record == first.run.record


@pytest.mark.parametrize("change", [{"batch_tokens": 512}, {"blocks": 9}, {"length": 16}])
def test_another_request_does_not_replace_a_finished_run(change, spec, tmp_path, monkeypatch):
    Session(tmp_path).execute(prepare(spec()))
    before = {path: path.read_bytes() for path in tmp_path.rglob("record.json")}
    monkeypatch.setattr(session_module, "load_model", lambda *_, **__: pytest.fail("loaded a model"))
    with pytest.raises(UsageError, match=r"the folder holds another run.*another --out"):
        Session(tmp_path).execute(prepare(spec(**change)))
    assert {path: path.read_bytes() for path in tmp_path.rglob("record.json")} == before


def test_a_calibration_text_edited_after_a_run_is_another_request(spec, tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("The cat sat on the mat. " * 60)
    Session(tmp_path / "out").execute(prepare(spec(text=f"file:{file}")))
    file.write_text("The dog sat on the mat. " * 60)
    with pytest.raises(UsageError, match="holds another run"):
        Session(tmp_path / "out").execute(prepare(spec(text=f"file:{file}")))


def test_a_suite_whose_data_changed_is_another_request(spec, tmp_path, suite):
    from shutil import copytree

    copy = Path(copytree(Path(suite).parent, tmp_path / "suites")) / "quick.py"
    known = prepare(spec(suites=(str(copy),))).known
    assert known == prepare(spec()).known
    data = copy.parent / "data" / "quick.jsonl"
    data.write_text(data.read_text().replace("red", "tan"))
    assert prepare(spec(suites=(str(copy),))).known != known


@pytest.mark.parametrize("half", ["record.json", "items.parquet", None])
def test_a_half_written_run_is_run_again_over_it(half, spec, tmp_path):
    arm = prepare(spec())
    whole = Session(tmp_path).execute(arm)
    if half is None:
        record = whole.folder / "record.json"
        record.write_bytes(record.read_bytes()[:200])
    else:
        (whole.folder / half).unlink()
    again = Session(tmp_path).execute(arm)
    assert not again.reused
    assert comparable(again.run.record) == comparable(whole.run.record)


@pytest.mark.parametrize("name", ["check_empty_mask", "check_before_evaluation", "check_counters", "_repeated"])
def test_a_failing_check_stops_the_run_and_nothing_is_written(name, spec, tmp_path, monkeypatch):
    bad = Check("a check", "fail", "layer 0")
    answer = [bad] if name in {"check_before_evaluation", "check_counters"} else bad
    monkeypatch.setattr(session_module, name, lambda *_, **__: answer)
    with pytest.raises(IntegrityError, match="integrity check failed: a check; in layer 0") as caught:
        Session(tmp_path).execute(prepare(spec()))
    assert caught.value.exit_code == 1
    assert visible(tmp_path) == []


def test_the_empty_mask_is_proven_again_for_each_loaded_model(spec, tmp_path, monkeypatch):
    proofs = []
    check = session_module.check_empty_mask
    monkeypatch.setattr(session_module, "check_empty_mask", lambda *a: (proofs.append(a), check(*a))[1])
    session = Session(tmp_path)
    for changes in ({}, {"method": "reap"}, {"dtype": "bfloat16", "method": "sge"}, {"method": "mone"}):
        session.execute(prepare(spec(**changes)))
    assert len(proofs) == 3


def test_the_dense_model_runs_without_hooks(spec, tmp_path, monkeypatch):
    def hooks(model) -> int:
        modules = list(model.modules())
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)

    seen = {}
    evaluate = session_module.Session._evaluate

    def watch(self, arm, loaded, *given):
        first = arm.suites[0]
        run = type(first).run

        def counted(suite, evaluation):
            seen[arm.spec.dense] = hooks(evaluation.model)
            return run(suite, evaluation)

        monkeypatch.setattr(type(first), "run", counted)
        try:
            return evaluate(self, arm, loaded, *given)
        finally:
            monkeypatch.setattr(type(first), "run", run)

    monkeypatch.setattr(session_module.Session, "_evaluate", watch)
    session = Session(tmp_path)
    session.execute(prepare(spec()))
    session.execute(prepare(spec(method=None, ratio=None)))
    assert seen[True] == 0
    assert seen[False] > 0


def test_an_arm_leaves_the_model_as_it_was(spec, tmp_path):
    session = Session(tmp_path / "one")
    before = session.execute(prepare(spec(method=None, ratio=None)))
    for changes in ({}, {"operator": "constant"}, {"operator": "zero"}):
        session.execute(prepare(spec(**changes)))
    (before.folder / "record.json").unlink()
    again = session.execute(prepare(spec(method=None, ratio=None)))
    assert comparable(again.run.record) == comparable(before.run.record)
    assert (again.folder / "items.parquet").read_bytes() == (before.folder / "items.parquet").read_bytes()


def test_arms_do_not_depend_on_the_arms_before_them(spec, tmp_path):
    session = Session(tmp_path / "many")
    for changes in ({"method": "reap"}, {"operator": "constant"}, {"operator": "reroute", "scale": "keep"}):
        many = session.execute(prepare(spec(**changes)))
    alone = Session(tmp_path / "alone").execute(prepare(spec(operator="reroute", scale="keep")))
    assert comparable(many.run.record) == comparable(alone.run.record)


@pytest.mark.parametrize("where", ["a file in place of the folder", "below a file", "no such device"])
def test_an_unwritable_place_is_found_before_the_model_is_loaded(where, spec, tmp_path, monkeypatch):
    monkeypatch.setattr(session_module, "load_model", lambda *_, **__: pytest.fail("loaded a model"))
    (tmp_path / "file").write_text("")
    out = {
        "a file in place of the folder": tmp_path / "file",
        "below a file": tmp_path / "file" / "x",
        "no such device": Path("/proc/nope"),
    }[where]
    with pytest.raises(UsageError, match="cannot write there"):
        Session(out).execute(prepare(spec()))


def test_a_foreign_file_in_the_run_folder_is_not_deleted(spec, tmp_path):
    arm = prepare(spec())
    notes = tmp_path / arm.spec.folder / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        Session(tmp_path).execute(arm)
    assert notes.read_text() == "mine"


def test_progress_names_the_steps_in_their_order(spec, tmp_path):
    steps = []
    Session(tmp_path, progress=lambda what, done, total: steps.append((what, done, total))).execute(prepare(spec()))
    names = list(dict.fromkeys(what for what, _, _ in steps))
    assert names[0].startswith("load ")
    assert names[1] == "score pass"
    assert len(names) > 2
    assert all(0 <= done <= total for _, done, total in steps)


def test_sessions_share_a_pass_that_another_is_making(spec, tmp_path, monkeypatch):
    import threading

    running, passes = threading.Event(), []

    def slow(*args, **kwargs):
        passes.append(1)
        running.set()
        threading.Event().wait(0.5)
        return score_pass(*args, **kwargs)

    monkeypatch.setattr(session_module, "score_pass", slow)
    one, two = Session(tmp_path), Session(tmp_path)
    thread = threading.Thread(target=lambda: one.execute(prepare(spec())))
    thread.start()
    running.wait(30)
    two.execute(prepare(spec(method="sge")))
    thread.join()
    assert len(passes) == 1


def test_the_record_is_plain_json_on_disk(spec, tmp_path):
    done = Session(tmp_path).execute(prepare(spec()))
    assert json.loads((done.folder / "record.json").read_text()) == read_run(done.folder).record


def test_a_packed_run_is_reused_and_without_its_table_never_run_again(spec, tmp_path):
    arm = prepare(spec())
    made = Session(tmp_path).execute(arm)
    assert pack(tmp_path).changed == 1
    again = Session(tmp_path).execute(arm)
    assert again.reused
    assert again.run.items.equals(made.run.items)
    (table,) = (tmp_path / "questions").iterdir()
    table.rename(tmp_path / "elsewhere")
    with pytest.raises(PrerequisiteError, match="their questions are not here"):
        Session(tmp_path).execute(arm)
    (tmp_path / "elsewhere").rename(table)
    assert Session(tmp_path).execute(arm).reused


def test_the_mask_of_a_run_can_be_held_fixed(spec, tmp_path):
    session = Session(tmp_path)
    first = session.execute(prepare(spec(method="reap"))).run.record
    folder = tmp_path / spec(method="reap").folder
    held = prepare(spec(method=None, ratio=None, mask=str(folder), operator="constant", draw="B"))
    second = session.execute(held).run.record
    assert second["mask"] == first["mask"]
    assert second["arm"]["mask"] == "reap"
    assert second["identity"]["calibration"]["mask"] is None
    assert second["identity"]["calibration"]["fit"]["draw"] == "B"


def test_a_mask_is_chosen_on_one_calibration_and_its_operator_fitted_on_another(spec, tmp_path):
    session = Session(tmp_path)
    arms = {name: {"method": "mone", "operator": "constant", **draws} for name, draws in FITS.items()}
    runs = {name: session.execute(prepare(spec(**arm))).run for name, arm in arms.items()}
    assert session.score_passes == 2, "one pass per text and draw, whatever it serves"
    masks, fills = ({name: run.record[key] for name, run in runs.items()} for key in ("mask", "tensors"))
    assert masks["A, B"] == masks["A, A"]
    assert masks["B, A"] == masks["B, B"] != masks["A, A"]
    assert fills["A, B"] != fills["A, A"]
    held = {"method": None, "ratio": None, "mask": str(runs["A, A"].path), "operator": "constant", "draw": "B"}
    assert session.execute(prepare(spec(**held))).run.record["tensors"] == fills["A, B"]
    stated = runs["A, B"].record["identity"]["calibration"]
    assert [stated[part]["draw"] for part in ("mask", "fit")] == ["A", "B"]
    assert stated["mask"]["fingerprint"] != stated["fit"]["fingerprint"]


def test_what_needs_no_statistics_states_no_calibration(spec, tmp_path):
    session = Session(tmp_path)
    known = session.execute(prepare(spec(method="random", operator="reroute"))).run.record["identity"]
    assert known["calibration"] == {"mask": None, "fit": None}
    assert session.score_passes == 0


def test_a_dense_run_has_no_mask_to_hold(spec, tmp_path):
    session = Session(tmp_path)
    dense = spec(method=None, ratio=None)
    session.execute(prepare(dense))
    with pytest.raises(UsageError, match="the run has no mask"):
        prepare(spec(method=None, ratio=None, mask=str(tmp_path / dense.folder), operator="constant"))
