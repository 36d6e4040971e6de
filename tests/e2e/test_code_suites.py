"""The code suites end to end through the command line: prompts, generation, sandbox, record and board."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from prunebench import cli
from prunebench.record import read_run
from prunebench.run.arm import matches, prepare
from prunebench.run.spec import ArmSpec
from prunebench.sandbox import box as box_module
from prunebench.sandbox import boxed
from prunebench.testing import random_model

ROOT = Path(__file__).parents[2]

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
    "base_input": [[3]],
    "plus_input": [[0]],
    "atol": 0,
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to double.",
    "code": "def double(x):\r\n  return 2 * x",
    "test_setup_code": "",
    "test_list": [f"assert double({x}) == {2 * x}" for x in (1, 2, 3)],
}
PLUS = {
    "task_id": "Mbpp/11",
    "prompt": "'''\nWrite a function to double.\n'''\n",
    "entry_point": "double",
    "canonical_solution": "def double(x):\n  return 2 * x\n",
    "base_input": [[1]],
    "plus_input": [[0.5]],
    "atol": 0,
    "assertion": "assert double(1) == 2\nassert double(2) == 4\nassert double(3) == 6",
}
ROWS = {"humaneval": HUMANEVAL, "humaneval_plus": HUMANEVAL, "mbpp": MBPP, "mbpp_plus": PLUS}
SMALL = ["--blocks", "8", "--length", "32"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, row in ROWS.items():
        other = {**row, "task_id": 12 if row["task_id"] == 11 else f"{row['task_id']}1"}
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(other) + "\n")
    return {name: f"{name}={folder / f'{name}.jsonl'}" for name in ROWS}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """Three shots are more than the zoo's contexts hold."""
    import shutil

    folder = tmp_path_factory.mktemp("long") / "long"
    folder.mkdir()
    random_model("olmoe", vocab_size=1024, max_position_embeddings=1600).save_pretrained(folder)
    for file in (ROOT / "fixtures/world/tokenizer").iterdir():
        shutil.copy(file, folder)
    return str(folder)


def run(capsys, *arguments):
    assert cli.main(["run", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


READINGS = {
    "humaneval": ("strict", "extracted"),
    "humaneval_plus": ("base", "plus", "plus-extracted"),
    "mbpp": ("strict", "lenient"),
    "mbpp_plus": ("base", "plus", "plus-lenient"),
}


@pytest.mark.parametrize("names", [("humaneval", "humaneval_plus"), ("mbpp", "mbpp_plus")], ids=" ".join)
def test_the_suites_run_on_a_model_with_a_limit(long_model, sources, tmp_path, capsys, names):
    model = long_model if "mbpp" in names else "tiny-olmoe"
    suites = [part for name in names for part in ("--suite", sources[name])]
    arguments = ["--model", model, *suites, *SMALL, "--limit", "1", "--out", str(tmp_path)]
    done = run(capsys, *arguments)
    record = done["record"]
    assert record["status"] == "partial"
    assert set(record["identity"]["suites"]) == set(names)
    assert "executor" not in record["identity"]
    assert record["volatile"]["sandbox"] == boxed().name
    items = list(read_run(Path(done["folder"])).items.items())
    assert {(item.suite, item.filter) for item in items} == {(name, one) for name in names for one in READINGS[name]}
    assert len({item.item for item in items if item.suite == names[0]}) == 1
    for item in items:  # neither model has ever seen such a task
        detail = json.loads(item.detail)
        assert (item.value, detail["n"], detail["k"], detail["passed"]) == (0.0, 1, 1, 0)
        assert detail["kind"] is not None
    assert cli.main(["run", *arguments]) == 0
    assert f"programs ran in: {boxed().name}" in capsys.readouterr().out


def test_a_zoo_model_is_asked_humaneval_without_half_of_its_experts(sources, tmp_path, capsys):
    arm = ["--model", "tiny-olmoe", "--suite", sources["humaneval"], *SMALL, "--limit", 2, "--out", tmp_path]
    done = run(capsys, *arm, "--method", "frequency", "--keep", 16, "--operator", "reroute")
    assert done["record"]["metrics"]["humaneval"]["n"] == 2
    assert {check["status"] for check in done["record"]["integrity"]} <= {"pass", "not applicable"}


def test_without_a_sandbox_a_run_is_refused_before_the_model_is_read(sources, tmp_path, monkeypatch, capsys):
    box_module.boxed.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        for suite in (sources["humaneval"], "code"):
            arguments = ["--model", "tiny-olmoe", "--suite", suite, "--out", str(tmp_path)]
            assert cli.main(["run", *arguments]) == 3
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert "bubblewrap, which is not installed" in said
            assert "--unsafe-local" in said
        assert cli.main(["run", "--model", "tiny-olmoe", "--suite", "perplexity", "--dry-run"]) == 0
        capsys.readouterr()
        done = run(
            capsys,
            "--model",
            "tiny-olmoe",
            "--suite",
            "code",
            *SMALL,
            "--limit",
            1,
            "--unsafe-local",
            "--out",
            tmp_path,
        )
    finally:
        box_module.boxed.cache_clear()
    assert done["record"]["identity"]["executor"] == "unsafe-local"
    assert "unsafe-local" in done["record"]["volatile"]["sandbox"]
    assert done["folder"].endswith("-unsafe_local")


def test_an_unsafe_run_is_another_run_and_never_on_the_board(factory, tmp_path, capsys):
    spec = ArmSpec(model="tiny-olmoe", suites=("code",))
    safe, unsafe = (
        prepare(one).known for one in (spec, ArmSpec(model="tiny-olmoe", suites=("code",), unsafe_local=True))
    )
    assert "executor" not in safe
    assert {key: value for key, value in unsafe.items() if key != "executor"} == safe
    assert not matches(safe, unsafe)
    assert ArmSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    items = factory.make_items()
    factory.write(tmp_path / "safe", items)
    identity = factory.make_record(items)["identity"]
    factory.write(tmp_path / "unsafe", items, identity={**identity, "executor": "unsafe-local"})
    assert cli.main(["board", str(tmp_path), "--out", str(tmp_path / "board"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"] == 1
    assert shown["left_out"] == [f"{tmp_path / 'unsafe'}: its programs ran without a sandbox (--unsafe-local)"]


def test_a_record_that_names_another_executor_is_not_believed(factory):
    from prunebench.errors import UsageError
    from prunebench.record import run_id, validate

    record = factory.make_record(factory.make_items())
    record["identity"] = {**record["identity"], "executor": "trust me"}
    record["run_id"] = run_id(record["identity"])
    with pytest.raises(UsageError, match=r"identity\.executor is 'trust me'"):
        validate(record)


def test_unsafe_where_nothing_runs_is_refused(capsys):
    assert cli.main(["run", "--model", "tiny-olmoe", "--suite", "perplexity", "--unsafe-local"]) == 2
    assert "no suite runs programs" in capsys.readouterr().err


def test_check_env_names_the_sandbox(capsys):
    assert cli.main(["check-env"]) == 0
    assert boxed().name in capsys.readouterr().out
    assert sys.version_info >= (3, 11)
