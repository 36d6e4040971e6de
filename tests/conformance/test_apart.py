"""Whatever a method does to the process that it runs in, `prunebench check` says so, by a check's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from prunebench import cli, load_method
from prunebench.conformance.apart import report_apart, try_loading
from prunebench.errors import UsageError

HONEST = (Path(__file__).parent / "honest.txt").read_text(encoding="utf-8")
SELECT = "        return prune_lowest(layers, budget, self.score)\n"
ENDS = {
    "import os; os._exit(0)": "it ends the process, with exit status 0",
    "import os; os.abort()": "it kills the process (SIGABRT)",
    "import ctypes; ctypes.string_at(0)": "it kills the process (SIGSEGV)",
    "raise KeyboardInterrupt": "KeyboardInterrupt; in honest.py:62",
    "raise GeneratorExit": "GeneratorExit; in honest.py:62",
    "raise SystemExit(0)": "SystemExit: 0",
    "raise type('Mine', (BaseException,), {})('no')": "Mine: no",
    "input()": "EOFError: ",
}


@pytest.fixture
def written(tmp_path):
    """A method's file, of the honest text with one thing changed."""

    def write(old, new):
        assert HONEST.count(old) == 1
        path = tmp_path / "honest.py"
        path.write_text(HONEST.replace(old, new), encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize("does", ENDS)
def test_a_verb_that_ends_its_process_fails_a_check_and_is_named(written, does, capsys):
    path = written(SELECT, f"        {does}\n{SELECT}")
    assert cli.main(["check", path, "--only", "metadata", "--only", "runs", "--only", "nested"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"failed           runs: {ENDS[does]}")
    assert shown[0].endswith(f"reproduce: prunebench check {path} --only runs")
    assert shown[1].startswith("not run          nested: ")
    assert shown[2] == "honest (honest.py): 1 passed, 1 failed, 1 not run"


def test_a_verb_that_never_returns_fails_a_check_and_is_named(written):
    path = written(SELECT, f"        while True:\n            pass\n{SELECT}")
    report = report_apart(path, load_method(path), only=["metadata", "runs"], patience=8)
    assert [one.outcome for one in report.results] == ["passed", "failed"]
    assert "it has not come back after 8 s" in report.results[1].message


@pytest.mark.parametrize(
    ("does", "what"),
    [
        ("import os; os._exit(0)", "it ends the process, with exit status 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("while True: pass", "it has not come back after 8 s"),
    ],
)
def test_a_file_that_ends_the_process_that_imports_it_is_refused(written, does, what):
    with pytest.raises(UsageError, match="the file cannot be loaded") as info:
        try_loading(written("class GateSquareSum", f"{does}\n\n\nclass GateSquareSum"), patience=8)
    assert what in str(info.value)


def test_apart_the_honest_method_gets_the_report_that_it_gets_here(written, capsys):
    path = written("power: float = 1.0", "power: float = 0.5")
    told = []
    only = ["metadata", "runs", "same_seed", "nested"]
    report = report_apart(path, load_method(path), only=only, progress=lambda *step: told.append(step))
    assert [(one.check, one.outcome) for one in report.results] == [(name, "passed") for name in only]
    assert told == [(name, number, 4) for number, name in enumerate(only)]
    with pytest.raises(UsageError, match="unknown check 'run'"):
        report_apart(path, load_method(path), only=["run"])


def test_what_a_method_prints_is_no_answer(written, capfd):
    path = written(SELECT, f"        print('{{\"done\": true}}')\n{SELECT}")
    assert cli.main(["check", path, "--only", "runs"]) == 0
    assert capfd.readouterr().out == "honest (honest.py): 1 passed\n"
