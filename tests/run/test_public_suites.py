"""Runs on suites whose data are not shipped: what records say, resuming inside an evaluation, deciding again."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prunebench import cli
from prunebench.analysis.recompute import recompute
from prunebench.board import build_board
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.evaluate import Evaluation, engine, sharing, walks
from prunebench.items import items_to_table
from prunebench.record import comparable, read_run, write_run
from prunebench.run import Session
from prunebench.run.arm import prepare

SPEC = importlib.util.spec_from_file_location(
    "_rows_for_runs", Path(__file__).parents[1] / "evaluate" / "handwritten.py"
)
handwritten = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(handwritten)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return handwritten.write(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def long_model(tmp_path_factory, material):
    return material.write_model(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=1024)


@pytest.fixture
def ask(spec, data, long_model):
    """An arm on some of the suites; hellaswag and fidelity if none are named."""

    def make(*suites, **changes):
        named = tuple(f"{name}={data}" + ("/fidelity.jsonl" if name == "fidelity" else "") for name in suites)
        return prepare(spec(model=str(long_model), suites=named, **changes))

    return make


def test_a_pruned_run_on_every_kind_of_suite_agrees_with_its_items(ask, tmp_path, capsys):
    arm = ask("hellaswag", "fidelity", "held_out", "wikitext", "gsm8k")
    outcome = Session(tmp_path).execute(arm)
    record = outcome.run.record
    assert record["evaluation"]["bos"] == "no bos"  # the world's tokenizer puts none before a text
    assert record["evaluation"]["decoding"] == "greedy"
    assert record["evaluation"]["chat_template"] is None
    assert record["evaluation"]["too_long"] == "an error"
    shared = dict.fromkeys(("hellaswag", "held_out", "wikitext", "gsm8k"), "prefix")
    assert record["identity"]["scorer"] == shared  # both models of a fidelity read the same batch
    assert record["evaluation"]["scorer"] == {"suites": shared, "piece_tokens": 512}
    report = recompute(outcome.run)
    assert report.agrees
    assert sum(cell.agree for cell in report.cells) == len(outcome.run.items)
    assert sum(cell.believed for cell in report.cells) == 0
    assert record["metrics"]["fidelity"]["value"] > 0
    # The unpruned forwards are not counted: as many token-layer calls as without the comparison.
    assert cli.main(["recompute", str(outcome.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agrees"]


@pytest.mark.parametrize("pruned", [True, False])
def test_fidelity_of_a_quantized_arm_is_to_the_model_in_its_own_weights(ask, tmp_path, monkeypatch, pruned):
    """While the unpruned model reads, its weights are those of the file, and the quantized ones afterwards."""
    seen, diverge = [], engine.diverge

    def watched(model, inputs, targets, dense):
        weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
        before = weight.clone()
        with dense():
            seen.append((before, weight.clone()))
        assert torch.equal(weight, before)
        return diverge(model, inputs, targets, dense)

    monkeypatch.setattr(engine, "diverge", watched)
    arm = ask("fidelity", quantize="w2(group=16, fewest=1)", **({} if pruned else {"method": None, "ratio": None}))
    run = Session(tmp_path).execute(arm).run
    own = load_file(Path(arm.folder) / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert all(torch.equal(dense, own.to(dense.dtype)) for _, dense in seen)
    assert not any(torch.equal(quantized, dense) for quantized, dense in seen)
    assert run.record["metrics"]["fidelity"]["value"] > 0


def test_fidelity_counts_pruned_forwards_only(ask, tmp_path):
    """Tokens that the counters saw are those of the pairs, once for the items and twice for the repeated check."""
    outcome = Session(tmp_path).execute(ask("fidelity"))
    dense = Session(tmp_path / "dense").execute(ask("fidelity", method=None, ratio=None)).run
    calls = {layer["calls"] for layer in outcome.run.record["routing"]["layers"].values()}
    from transformers import AutoTokenizer

    arm = ask("fidelity")
    tokenizer = AutoTokenizer.from_pretrained(arm.folder)
    lengths = [
        len(tokenizer.encode(doc["context"] + doc["continuation"], add_special_tokens=False))
        for doc in arm.suites[0].all_documents()
    ]
    # All but the last token; all rows are among the first eight of their axis, so asked three times.
    assert calls == {3 * sum(length - 1 for length in lengths)}
    assert {value for value, metric in zip(dense.items.value, dense.items.metric, strict=True) if metric} == {0.0}


class Stop(Exception):  # noqa: N818  no error: what a signal does
    pass


@pytest.mark.parametrize(("scorer", "asked"), [("batched", "score"), ("prefix", "walk")])
def test_a_killed_evaluation_goes_on_where_it_was_and_gives_the_same_record(ask, tmp_path, monkeypatch, scorer, asked):
    """Killed in the first suite, between the two, and when all items are there but the last proof is not."""
    batches: list[str] = []
    through = Evaluation._through
    killer = {"after": 10**9}

    def dying(self, kind, asked, compute):
        def counted():
            batches.append(kind)
            if len(batches) > killer["after"]:
                raise Stop
            return compute()

        return through(self, kind, asked, counted)

    monkeypatch.setattr(Evaluation, "_through", dying)
    monkeypatch.setattr(walks, "REPEATED", 1)  # so that a few hand-written questions are several walks

    def execute(folder):
        batches.clear()
        arm = ask("hellaswag", "fidelity", batch_tokens=512 if scorer == "batched" else 256, scorer=scorer)
        return Session(tmp_path / folder).execute(arm).run

    whole = execute("whole")
    total, kinds = len(batches), list(batches)
    items = (total + 1) // 3  # each question is asked once, and twice more to see that the answer is the same
    assert kinds[:items].count(asked) > 1
    assert kinds[:items].count("fidelity") > 1
    assert not list((tmp_path / "whole").rglob("answers-*"))
    for when in (1, kinds.index("fidelity"), items):
        killer["after"] = when
        with pytest.raises(Stop):
            execute(f"killed{when}")
        (journal,) = (tmp_path / f"killed{when}").rglob("answers-*")
        assert len(journal.read_bytes().splitlines()) == 1 + when
        killer["after"] = 10**9
        resumed = execute(f"killed{when}")
        assert len(batches) == total - when
        assert comparable(resumed.record) == comparable(whole.record)
        assert resumed.items.equals(whole.items)
        assert not list((tmp_path / f"killed{when}").rglob("answers-*"))


def test_no_arm_is_served_anothers_answers(ask, tmp_path):
    """Journals of two masks, two texts and two dtypes have names of their own."""
    session = Session(tmp_path)
    arms = [ask("hellaswag"), ask("hellaswag", dtype="bfloat16"), ask("hellaswag", batch_tokens=512), ask("held_out")]
    journals = [session._journal(arm, None, None) for arm in arms]
    assert len({journal.path for journal in journals}) == len(arms)
    for journal in journals:
        journal.forget()


def test_settings_that_change_outcomes_are_part_of_the_identity_and_of_the_folder(ask):
    plain = ask("gsm8k")
    folders, identities = {plain.spec.folder}, [plain.known]
    for changes in (
        {"truncate": True},
        {"scorer": "batched"},
        {"sampling": "temperature=0.7,n=2"},
        {"sampling": "temperature=0.7,n=2,seed=1"},
    ):
        arm = ask("gsm8k", **changes)
        assert arm.spec.folder not in folders
        assert arm.known not in identities
        folders.add(arm.spec.folder)
        identities.append(arm.known)
    assert not {"truncate", "sampling", "chat_template"} & set(plain.known)
    assert ask("gsm8k", sampling="n=2,temperature=0.7").spec.folder in folders
    with pytest.raises(UsageError, match="top_p"):
        ask("gsm8k", sampling="top_p=2")


def test_sampled_generations_are_recorded_and_decided_again(ask, tmp_path):
    outcome = Session(tmp_path).execute(ask("gsm8k", sampling="temperature=1.0,n=2", limit=1))
    assert outcome.run.record["evaluation"]["decoding"]["n"] == 2
    assert set(outcome.run.items.item.tolist()) == {"0#0", "0#1"}
    assert recompute(outcome.run).agrees


@pytest.mark.parametrize("scorer", ["batched", "prefix"])
def test_nan_in_a_choice_flags_the_run_and_keeps_it_off_the_board(ask, tmp_path, monkeypatch, scorer):
    owner, name = {"batched": (engine, "score_batch"), "prefix": (sharing, "_scored")}[scorer]
    score = getattr(owner, name)

    def poisoned(*given):
        scored = score(*given)
        scored[0][0] = float("nan")
        return scored

    monkeypatch.setattr(owner, name, poisoned)
    monkeypatch.setattr(sharing, "PIECE_TOKENS", {"cpu": 100_000})
    outcome = Session(tmp_path).execute(ask("hellaswag", batch_tokens=100_000, scorer=scorer))
    assert outcome.run.invalid == 1
    assert outcome.run.record["evaluation"]["items"]["hellaswag"]["invalid"] == 1
    assert recompute(outcome.run).agrees
    with pytest.raises(PrerequisiteError, match="1 questions answered with NaN or infinite logits"):
        build_board(tmp_path)


def test_nan_in_the_tiny_world_flags_the_run_too(spec, tmp_path, monkeypatch):
    """Its suites have a state of their own for it."""
    score = engine.score_batch

    def poisoned(*given):
        logprobs, greedy = score(*given)
        logprobs[0] = float("nan")
        return [logprobs, greedy]

    monkeypatch.setattr(engine, "score_batch", poisoned)
    run = Session(tmp_path).execute(prepare(spec(suites=("multiple_choice",), limit=2))).run
    counted = run.record["evaluation"]
    assert set(counted) == {"items"}
    assert run.invalid == counted["items"]["multiple_choice"]["invalid"] > 0
    assert recompute(run).agrees


@pytest.mark.parametrize("column", ["value", "detail", "state"])
def test_an_altered_item_or_number_does_not_pass(ask, tmp_path, column):
    run = Session(tmp_path).execute(ask("hellaswag", method=None, ratio=None)).run
    items = list(run.items.items())
    item = items[0]
    stated = json.loads(item.detail)
    other = [0.0 if place == (stated["prediction"] + 1) % 4 else -9.0 for place in range(4)]
    changed = {
        "value": {"value": 1.0 - item.value, "state": "wrong" if item.value else "ok"},
        "state": {"state": "wrong" if item.state == "ok" else "ok"},
        "detail": {"detail": json.dumps({**stated, "loglikelihoods": other})},
    }[column]
    table = items_to_table([dataclasses.replace(item, **changed), *items[1:]])
    folder = tmp_path / "altered" / "run"
    write_run(folder, run.record, table)
    report = recompute(read_run(folder))
    assert not report.agrees
    assert item.item in next(cell.first for cell in report.cells if cell.first)
    assert cli.main(["recompute", str(folder)]) == 1


def test_a_record_whose_numbers_are_not_its_items_does_not_pass(ask, tmp_path):
    run = Session(tmp_path).execute(ask("hellaswag", method=None, ratio=None)).run
    metrics = {**run.record["metrics"]}
    metrics["hellaswag"] = {**metrics["hellaswag"], "value": metrics["hellaswag"]["value"] / 2 + 0.01, "low": 0.0}
    write_run(tmp_path / "altered" / "run", {**run.record, "metrics": metrics}, run.items)
    report = recompute(read_run(tmp_path / "altered" / "run"))
    assert report.differing == ("hellaswag",)
    assert not report.agrees


def test_suites_of_the_tiny_world_say_nothing_new(spec, suite, tmp_path):
    assert "evaluation" not in Session(tmp_path).execute(prepare(spec())).run.record


def test_an_identity_states_a_scorer_only_where_it_is_not_the_batched_one(ask, spec):
    assert ask("gsm8k").known["scorer"] == {"gsm8k": "prefix"}
    assert "scorer" not in ask("gsm8k", scorer="batched").known
    assert "scorer" not in prepare(spec(suites=("multiple_choice",))).known
    assert prepare(spec(suites=("multiple_choice",), scorer="prefix")).known["scorer"] == {"multiple_choice": "prefix"}
    assert "scorer" not in ask("fidelity", scorer="prefix").known
    with pytest.raises(UsageError, match=r"scorer.*batched or prefix"):
        ask("gsm8k", scorer="fast")


def test_a_model_that_cannot_share_is_batched_and_the_record_says_why(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(sharing, "MASKED_BY_US", ("eager",))
    record = Session(tmp_path).execute(ask("hellaswag", limit=2)).run.record
    (reason,) = record["evaluation"]["scorer"]["batched_because"]["hellaswag"]
    assert "sdpa" in reason


def test_the_tiny_worlds_suites_may_share_too(spec, tmp_path):
    """Routing counters see fewer tokens then, as common beginnings are computed once."""
    runs = {}
    for scorer in ("batched", "prefix"):
        arm = prepare(spec(suites=("multiple_choice", "arithmetic"), limit=4, scorer=scorer))
        runs[scorer] = Session(tmp_path).execute(arm).run
    batched, prefix = runs["batched"], runs["prefix"]
    assert "evaluation" not in batched.record
    assert prefix.record["evaluation"]["scorer"]["suites"] == {"multiple_choice": "prefix", "arithmetic": "prefix"}
    assert prefix.record["metrics"].keys() == batched.record["metrics"].keys()
    for one, other in zip(batched.items.items(), prefix.items.items(), strict=True):
        assert (one.value, one.state) == (other.value, other.state)
        told, again = json.loads(one.detail), json.loads(other.detail)
        assert again.get("loglikelihoods", 0) == pytest.approx(told.get("loglikelihoods", 0), abs=1e-4)
        assert again.get("text") == told.get("text")
    calls = [sum(layer["calls"] for layer in run.record["routing"]["layers"].values()) for run in (prefix, batched)]
    assert calls[0] < calls[1]
