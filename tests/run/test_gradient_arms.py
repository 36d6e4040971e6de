"""Arms that need gradients: for the mask, for the operator, or both; measured once, kept on disk, and resumed."""

from __future__ import annotations

import pytest
import torch

from prunebench.calibration import by_pass, gradient_pass
from prunebench.record import comparable, validate
from prunebench.run import Session
from prunebench.run import session as session_module
from prunebench.run.arm import prepare

NEEDS = """
    def replace_needs(self):
        return ({needs},)

    def replace(self, layer, pruned):
        fisher_E = layer.stats["fisher"]
        assert fisher_E.shape == (layer.experts,) and (fisher_E > 0).any()
        {more}
        return Replacements({{e: Constant.of(torch.full((layer.width,), float(fisher_E[e]))) for e in pruned}})
"""
ABOVE = "from prunebench import Fisher, InputOutputMoments"
ROUNDS = {
    "gradients alone": ("Fisher()", "", (1, 1, 0)),
    "and a score pass": ("Fisher(), OutputMoments()", 'layer.stats["output_moments"]', (1, 1, 0)),
    "and a fit pass": (
        "Fisher(), InputOutputMoments()",
        'layer.stats["input_output_moments"]; layer.stats["fisher"]',
        (1, 1, 1),
    ),
    "and both": (
        "Fisher(), OutputMoments(), InputOutputMoments()",
        'layer.stats["output_moments"]; layer.stats["input_output_moments"]',
        (1, 1, 1),
    ),
}


def counted(session):
    return session.score_passes, session.gradient_passes


@pytest.mark.parametrize("what", ROUNDS)
def test_an_operator_gets_fisher_beside_the_statistics_of_other_passes(what, spec, material, tmp_path):
    needs, more, (scores, gradients, fits) = ROUNDS[what]
    rest = NEEDS.format(needs=needs, more=more)
    method = material.write_method(tmp_path / "methods", above=ABOVE, rest=rest)
    session = Session(tmp_path / "out")
    record = session.execute(prepare(spec(method=method))).run.record
    validate(record)
    assert counted(session) == (scores, gradients)
    assert ("fit" in record) is bool(fits)
    assert record["identity"]["calibration"]["fit"]["length"] == 32
    assert record["identity"]["calibration"]["fit"]["blocks"] == 8
    # What the fills hold is the Fisher of a pass made here.
    arm = prepare(spec(method=method))
    loaded = session._model(arm)
    fisher = by_pass(arm.replace_needs).gradient
    wanted = gradient_pass(loaded.moe, session._tokens(arm, loaded)[arm.fit], fisher).layers
    plan, _, _ = session._plan(arm, loaded, session._tokens(arm, loaded))
    for layer in plan.layers:
        for expert in layer.fills:
            [mean_D] = plan.state_of(layer.index, expert).values()
            value = wanted[layer.index]["fisher"].value()[expert]
            assert torch.allclose(mean_D, torch.tensor(value, dtype=mean_D.dtype))


def test_the_criterion_runs_prunes_the_lowest_and_repeats(spec, tmp_path):
    arm = spec(method="fisher")
    session = Session(tmp_path / "one")
    record = session.execute(prepare(arm)).run.record
    validate(record)
    assert counted(session) == (0, 1)
    assert record["identity"]["calibration"]["fit"] is None
    assert {check["status"] for check in record["integrity"]} <= {"pass", "not applicable"}
    again = Session(tmp_path / "two").execute(prepare(arm)).run.record
    assert comparable(again) == comparable(record)
    sampled = session.execute(prepare(spec(method="fisher", parameters=("labels=sampled",)))).run.record
    assert sampled["run_id"] != record["run_id"]
    assert session.gradient_passes == 2


def test_mask_and_fit_share_a_pass_on_one_text_and_have_their_own_on_two(spec, material, tmp_path):
    method = material.write_method(tmp_path / "methods", above=ABOVE, rest=NEEDS.format(needs="Fisher()", more=""))
    session = Session(tmp_path / "out")
    one = session.execute(prepare(spec(method="fisher", operator=method))).run.record
    assert counted(session) == (0, 1)
    other = session.execute(prepare(spec(method="fisher", operator=method, fit_draw="B"))).run.record
    assert counted(session) == (0, 2)
    assert other["mask"] == one["mask"]
    assert other["tensors"] != one["tensors"]
    session.execute(prepare(spec(method="fisher", operator=method, draw="B")))
    assert counted(session) == (0, 2)


def test_a_pass_is_kept_on_disk_and_does_not_depend_on_the_batch(spec, tmp_path):
    first, second = Session(tmp_path), Session(tmp_path)
    first.execute(prepare(spec(method="fisher")))
    second.execute(prepare(spec(method="fisher", ratio="0.25", batch_tokens=64)))
    second.execute(prepare(spec(method="frequency")))
    assert [counted(first), counted(second)] == [(0, 1), (1, 0)]
    [kept] = (tmp_path / ".cache").glob("gradients-*.safetensors")
    kept.write_bytes(kept.read_bytes()[:100])
    third = Session(tmp_path)
    third.execute(prepare(spec(method="fisher", ratio="0.75")))
    assert counted(third) == (0, 1)


@pytest.mark.parametrize("when", ["within the pass", "after it"])
def test_an_interrupted_run_goes_on_and_ends_as_one_that_was_not(when, spec, tmp_path, monkeypatch):
    arm = prepare(spec(method="fisher"))
    wanted = Session(tmp_path / "whole").execute(arm).run.record

    def stop(what, done, total):
        if when == "within the pass" and what == "gradient pass" and done == 5:
            raise KeyboardInterrupt

    session = Session(tmp_path / "killed", progress=stop)
    with monkeypatch.context() as patch:
        if when == "after it":
            patch.setattr(session_module, "check_empty_mask", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            session.execute(arm)
    assert not list((tmp_path / "killed").rglob("record.json"))
    # The same session goes on with the model that it had: it must be whole.
    session.progress = None
    found = session.execute(arm).run.record
    assert comparable(found) == comparable(wanted)
    assert session.gradient_passes == (2 if when == "within the pass" else 1)
    fresh = Session(tmp_path / "killed")
    fresh.execute(prepare(spec(method="fisher", ratio="0.25")))
    assert fresh.gradient_passes == 0


def test_progress_names_the_pass(spec, tmp_path):
    steps = []
    Session(tmp_path, progress=lambda *now: steps.append(now)).execute(prepare(spec(method="fisher")))
    assert [now[1:] for now in steps if now[0] == "gradient pass"] == [(n, 8) for n in range(1, 9)]


def test_the_shipped_criterion_is_another_than_frequency(spec, tmp_path):
    session = Session(tmp_path)
    masks = [
        session.execute(prepare(spec(method=name))).run.record["mask"]["digest"] for name in ("fisher", "frequency")
    ]
    assert masks[0] != masks[1]
