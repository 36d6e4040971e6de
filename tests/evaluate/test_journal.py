"""A journal serves what was asked of the same model in the same order, and nothing else."""

from __future__ import annotations

import json

import pytest

from prunebench.errors import UsageError
from prunebench.evaluate import Evaluation, Pair, Passage, Prompt, Sampling
from prunebench.evaluate.journal import Journal


@pytest.fixture
def kept(tmp_path):
    """The factory of journals at one place; closed in the end."""
    opened = []

    def make(key="key", counting=None):
        opened.append(Journal(tmp_path / "j", key, counting))
        return opened[-1]

    yield make
    for journal in opened:
        journal.close()


class Counters:
    def __init__(self):
        self.count = 0

    def snapshot(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = state["count"]


def ask_all(evaluation):
    pairs = [Pair(f"Mara has {n}", " stones and more", f"pair {n}") for n in range(9)]
    prompts = [
        Prompt(f"Noka went {n}", ("a",), 5, sampling=sampling) for n in range(5) for sampling in (None, Sampling())
    ]
    return [
        evaluation.loglikelihood(pairs),
        evaluation.rolling([Passage("Saka was sad. " * 30, window=24)]),
        evaluation.generate(prompts),
    ]


def evaluation(model, tokenizer, journal):
    return Evaluation(model, tokenizer, 60, journal=journal)


def counted(model):
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls, handle


def test_a_rerun_computes_nothing_and_gives_the_same_to_the_bit(model, tokenizer, tmp_path, kept):
    plain = ask_all(Evaluation(model, tokenizer, 60))
    journal = kept()
    assert ask_all(evaluation(model, tokenizer, journal)) == plain
    journal.close()
    calls, handle = counted(model)
    again = kept()
    assert ask_all(evaluation(model, tokenizer, again)) == plain
    handle.remove()
    assert not calls
    assert again.served > 3
    again.forget()
    assert not (tmp_path / "j").exists()


def test_a_journal_cut_anywhere_goes_on_behind_its_last_whole_batch(model, tokenizer, tmp_path, kept):
    journal = kept()
    plain = ask_all(evaluation(model, tokenizer, journal))
    journal.close()
    content = (tmp_path / "j").read_bytes()
    for size in (0, 10, len(content) // 3, len(content) // 2, len(content) - 1):
        (tmp_path / "j").write_bytes(content[:size])
        calls, handle = counted(model)
        resumed = kept()
        assert ask_all(evaluation(model, tokenizer, resumed)) == plain
        resumed.close()
        handle.remove()
        assert calls, size
        assert (tmp_path / "j").read_bytes() == content


def test_another_model_is_never_served(model, new_model, tokenizer, tmp_path, kept):
    other = new_model(seed=7)
    journal = kept("weights of one")
    ask_all(evaluation(model, tokenizer, journal))
    journal.close()
    journal = kept("weights of another")
    assert ask_all(evaluation(other, tokenizer, journal)) == ask_all(Evaluation(other, tokenizer, 60))


@pytest.mark.parametrize("changed", ["text", "stop", "seed", "batch"])
def test_a_changed_request_is_asked_anew_and_so_is_all_behind_it(model, tokenizer, tmp_path, changed, kept):
    def ask(journal, *, change):
        text, stop, seed = "Mara", "a", 0
        if change:
            text, stop, seed = {"text": ("Noka", stop, 0), "stop": (text, "b", 0), "seed": (text, stop, 1)}.get(
                changed, (text, stop, seed)
            )
        tokens = 40 if change and changed == "batch" else 60
        one = Evaluation(model, tokenizer, tokens, journal=journal)
        prompts = [Prompt(f"{text} {n}", (stop,), 6, sampling=Sampling(seed=seed)) for n in range(6)]
        return one.generate(prompts), one.loglikelihood([Pair("a", " b")])

    journal = kept()
    before = ask(journal, change=False)
    journal.close()
    journal = kept()
    assert ask(journal, change=True) == ask(None, change=True)
    journal.close()
    journal = kept()
    assert ask(journal, change=False) == before


def test_counters_stand_as_they_did(tmp_path, kept):
    counters = Counters()

    def batch():
        counters.count += 5
        return [1.5]

    journal = kept("key", counters)
    journal.through("one", batch)
    journal.through("two", batch)
    journal.close()
    counters.count = 0
    journal = kept("key", counters)
    assert journal.through("one", lambda: pytest.fail("asked again")) == [1.5]
    assert counters.count == 5
    journal.through("three", batch)  # where it said "two" before
    assert counters.count == 10
    journal.close()
    assert [json.loads(line).get("counters") for line in (tmp_path / "j").read_text().splitlines()[1:]] == [
        {"count": 5},
        {"count": 10},
    ]


def test_numbers_that_are_none_survive(tmp_path, kept):
    journal = kept()
    assert str(journal.through("x", lambda: [float("nan"), float("-inf")])) == "[nan, -inf]"


def test_two_writers_of_one_journal_are_told_apart(tmp_path, kept):
    journal = kept()
    with pytest.raises(BlockingIOError):
        kept()
    journal.close()


def test_an_unwritable_place_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write there"):
        Journal(tmp_path / "file" / "j", "key")
