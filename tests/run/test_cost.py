"""What arms cost to run: the logic on clocks that are made up, and the shape of one real run. No time is tested."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from prunebench import cli
from prunebench.errors import UsageError
from prunebench.run import Session
from prunebench.run.arm import prepare
from prunebench.run.cost import (
    DENSE,
    CostSettings,
    Timing,
    interleaved,
    measure_cost,
    share_kept,
    timed,
    timings,
)

COSTS = {"dense": 8.0, "constant": 4.0, "tilt": 5.0, "reroute": 7.0}


class Machine:
    """Work takes its cost times a load that changes from round to round; remembers what it ran."""

    def __init__(self, load):
        self.load, self.ran = load, []

    def measure(self, arm):
        taken = COSTS[arm] * self.load(len(self.ran) // len(COSTS))
        self.ran.append(arm)
        return taken


def test_arms_are_taken_in_turn_and_each_round_begins_with_the_next():
    machine = Machine(lambda _: 1.0)
    seconds = interleaved(list(COSTS), machine.measure, repeats=4, warmup=1)
    rounds = [machine.ran[at : at + 4] for at in range(0, len(machine.ran), 4)]
    assert [set(one) for one in rounds] == [set(COSTS)] * 5
    assert [one[0] for one in rounds] == ["dense", "constant", "tilt", "reroute", "dense"]
    assert {arm: len(times) for arm, times in seconds.items()} == dict.fromkeys(COSTS, 4)


def test_a_warm_up_does_not_count():
    cold = Machine(lambda number: 100.0 if number == 0 else 1.0)
    assert interleaved(list(COSTS), cold.measure, repeats=2, warmup=1)["tilt"] == [5.0, 5.0]
    cold = Machine(lambda number: 100.0 if number == 0 else 1.0)
    assert interleaved(list(COSTS), cold.measure, repeats=2, warmup=0)["tilt"] == [500.0, 5.0]


@pytest.mark.parametrize("load", [lambda n: 1.0 + n, lambda n: 3.0 if n % 2 else 0.5], ids=["growing", "jumping"])
def test_a_load_that_drifts_between_rounds_cancels(load):
    found = timings(interleaved(list(COSTS), Machine(load).measure, repeats=5))
    for arm, cost in COSTS.items():
        one = found[arm]
        assert (one.ratio, one.low, one.high) == pytest.approx((cost / 8, cost / 8, cost / 8))
    assert [share_kept(found[arm], found["constant"]) for arm in ("tilt", "reroute")] == pytest.approx([0.75, 0.25])


def test_ratios_are_medians_of_rounds_and_not_ratios_of_medians():
    one = timings({"dense": [1.0, 10.0, 2.0], "a": [3.0, 10.0, 1.0]})["a"]
    assert one == Timing(seconds=3.0, ratio=1.0, low=0.5, high=3.0)


def test_no_share_is_stated_of_a_saving_that_is_not_there():
    slow = Timing(2.0, 1.2, 1.1, 1.3)
    assert share_kept(slow, Timing(1.0, 0.8, 0.7, 1.0)) is None
    assert share_kept(slow, Timing(1.0, 0.8, 0.7, 0.9)) == pytest.approx(-1.0)
    assert share_kept(Timing(1.0, 0.7, 0.7, 0.7), Timing(1.0, 0.8, 0.7, 0.9)) == pytest.approx(1.5)


def test_a_time_covers_the_work_and_the_wait_for_it_and_nothing_before():
    log, now = [], [0.0]

    def passing(what, seconds):
        def act():
            log.append(what)
            now[0] += seconds

        return act

    def clock():
        log.append("clock")
        return now[0]

    assert timed(passing("work", 5.0), clock=clock, finish=passing("finish", 2.0)) == 7.0
    assert log == ["finish", "clock", "work", "finish", "clock"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batches": ()}, "batches []"),
        ({"batches": (0,)}, "batches [0]"),
        ({"repeats": 0}, "repeats 0"),
        ({"warmup": -1}, "warmup -1"),
        ({"prompt": 480, "decode": 64}, "480 tokens of prompt and 64 decoded; expected at most 512 together"),
        (
            {"prompt": 400, "batches": (1, 8)},
            "the text has 3000 tokens; expected 3200, for a batch of 8 prompts of 400",
        ),
    ],
)
def test_what_cannot_be_timed_is_one_line(settings, says):
    with pytest.raises(UsageError) as caught:
        CostSettings(**settings).check(positions=512, tokens=3000)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gpus_work_is_not_timed_by_the_cpus_clock():
    CostSettings(clock="cpu").check(positions=4096, tokens=10**6)
    with pytest.raises(UsageError, match="the CPU's clock for work on cuda:1; expected --clock wall"):
        CostSettings(clock="cpu").check(positions=4096, tokens=10**6, device="cuda:1")


def test_every_arm_runs_every_piece_and_stores_what_its_record_says(spec, tmp_path):
    operators = {"constant": (), "tilt(rank=4)": ("rank=4",), "reroute": ()}
    arms = {DENSE: prepare(spec(method=None, ratio=None))}
    for name, parameters in operators.items():
        arms[name] = prepare(spec(operator=name.partition("(")[0], operator_parameters=parameters))
    session, ticks = Session(tmp_path), itertools.count()
    settings = CostSettings(batches=(1, 2), prompt=16, decode=4, repeats=2, warmup=0)
    data = measure_cost(session, arms, settings, clock=lambda: float(next(ticks)))
    assert json.loads(json.dumps(data)) == data
    # The clock ticks once within each piece of work, so every time is a second, and a token a quarter.
    assert data["rounds"] == {
        piece: {name: [seconds] * 2 for name in arms}
        for piece, seconds in (("prefill 1", 1.0), ("prefill 2", 1.0), ("decode", 0.25))
    }
    assert next(ticks) == 2 * len(arms) * 3 * 2
    assert [one["arm"] for one in data["arms"]] == list(arms)
    for one in data["arms"]:
        assert one["stored"] == session.execute(arms[one["arm"]]).run.record["storage"]
        assert one["times"]["prefill 2"]["kept"] is None  # a made-up constant that saves nothing
    assert data["mask"] == session.execute(arms["reroute"]).run.record["identity"]["mask"]["digest"]


def test_pruned_arms_are_installed_while_they_are_timed_and_only_then(spec, tmp_path):
    arms = {
        DENSE: prepare(spec(method=None, ratio=None)),
        "constant": prepare(spec(operator="constant")),
    }
    session = Session(tmp_path)
    model = session.planned(arms[DENSE])[0].moe.model
    ids = torch.arange(1, 17)[None]
    with torch.inference_mode():
        before = model(input_ids=ids).logits
    hooked = []

    def clock():
        hooked.append(bool(model._forward_hooks))
        return float(len(hooked))

    measure_cost(session, arms, CostSettings((1,), 8, 2, 2, 0), clock=clock)
    # Two ticks for each arm, rounds beginning with dense and with the constant, of prefill and of decode.
    assert hooked == [False, False, True, True, True, True, False, False] * 2
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, before)


def test_arms_of_different_masks_are_refused(spec, tmp_path):
    arms = {
        DENSE: prepare(spec(method=None, ratio=None)),
        "constant": prepare(spec(operator="constant")),
        "reroute": prepare(spec(operator="reroute", ratio="0.25")),
    }
    with pytest.raises(UsageError, match="arms of different masks"):
        measure_cost(Session(tmp_path), arms, CostSettings((1,), 8, 2, 1, 0))


def test_the_command_writes_its_file_and_prints_its_table(model, tmp_path, capsys):
    out = tmp_path / "cost.json"
    shared = ["cost", "--model", model, "--method", "frequency", "--ratio", "0.5", "--blocks", "8", "--length", "32"]
    quick = [
        "--prompt",
        "16",
        "--decode",
        "2",
        "--clock",
        "cpu",
        "--repeats",
        "1",
        "--warmup",
        "0",
        "--batch",
        "2",
        "--out",
        str(out),
    ]
    assert cli.main([*shared, *quick, "--operator", "reroute@other"]) == 0
    shown = capsys.readouterr().out
    data = json.loads(out.read_text())
    assert [one["arm"] for one in data["arms"]] == ["dense", "constant", "reroute@other"]
    assert set(data["arms"][0]["times"]) == {"prefill 2", "decode"}
    assert all(one["times"]["decode"]["seconds"] > 0 for one in data["arms"])
    assert "not serving times" in data["label"]
    assert data["label"] in shown
    assert "prompts of 16 tokens, 2 decoded, 1 rounds, cpu clock" in shown
    for one in data["arms"]:
        assert one["arm"] in shown


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], "nothing says which experts go"),
        (["--method", "frequency", "--ratio", "0.5", "--prompt", "100000"], "together, the model's context"),
        (["--method", "frequency", "--ratio", "0.5", "--blocks", "2"], "the text has 64 tokens"),
        (["--method", "frequency", "--ratio", "0.5", "--operator", "tilted"], "tilted"),
        (["--method", "frequency", "--ratio", "0.5", "--operator", "constant@keep"], "constant"),
    ],
)
def test_a_wrong_request_is_one_line_before_anything_is_written(model, tmp_path, capsys, more, says):
    out = tmp_path / "new" / "cost.json"
    fixed = ["--length", "32", "--prompt", "16", "--decode", "4", "--blocks", "32", "--out", str(out)]
    assert cli.main(["cost", "--model", model, *fixed, *more]) == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.err.count("\n") == 1
    assert not out.parent.exists()


def test_more_decoded_than_the_model_has_room_for_is_told_as_it_was_asked(tmp_path, capsys):
    request = [
        "cost",
        "--model",
        "tiny-olmoe",
        "--method",
        "random",
        "--ratio",
        "0.5",
        "--blocks",
        "2",
        "--decode",
        "600",
    ]
    assert cli.main([*request, "--out", str(tmp_path / "cost.json")]) == 2
    assert "1 tokens of prompt and 600 decoded; expected at most 512" in capsys.readouterr().err
