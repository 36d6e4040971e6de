"""Programs pass only by running to their end."""

from __future__ import annotations

import time

import pytest

from prunebench.evaluate.code import run_program

GOOD = "def add(x):\n    return x + 2\nassert add(1) == 3\n"


def test_a_correct_program_passes_and_says_nothing():
    assert run_program(GOOD) == ("ok", "")
    assert run_program("print('x' * 10_000_000)\n" + GOOD).state == "ok"


@pytest.mark.parametrize(
    ("program", "state", "reason"),
    [
        (GOOD.replace("x + 2", "x + 3"), "wrong", "AssertionError"),
        ("def add(x:\n", "error", "SyntaxError"),
        ("add(1)", "error", "NameError"),
        ("raise KeyError('a')", "error", "KeyError"),
        ("def f():\n    f()\nf()", "error", "RecursionError"),
        ("import sys\nsys.exit(0)\nassert False", "error", "SystemExit"),
        ("raise SystemExit\nassert False", "error", "SystemExit"),
        ("exit(0)\nassert False", "error", "exit"),
        ("import os\nos._exit(0)\nassert False", "error", "code 0"),
        ("print('0' * 32)\nimport os\nos._exit(0)", "error", "code 0"),
        ("import os\nos.kill(os.getpid(), 11)", "error", "-11"),
        ("held = bytearray(4 * 2**30)", "error", "MemoryError"),
        ("open('big', 'wb').write(b'0' * 2**24)", "error", "too large"),
        ("input()", "error", "EOFError"),
        ("import numpy", "error", "ModuleNotFoundError"),
        ("\ud800", "error", "SyntaxError"),
    ],
)
def test_everything_else_fails_with_its_reason(program, state, reason):
    program += "\nassert False\n"
    verdict = run_program(program)
    assert verdict.state == state
    assert reason in verdict.reason


@pytest.mark.parametrize(
    "loop", ["while True:\n    pass", "while True:\n    try:\n        1 / 0\n    except BaseException:\n        pass"]
)
def test_an_endless_loop_is_a_timeout_by_cpu_time(loop):
    assert run_program(loop, cpu_seconds=1) == ("timeout", "used 1 s of CPU time")


def test_a_sleeping_program_is_ended_by_the_wall_limit():
    started = time.monotonic()
    assert run_program("import time\ntime.sleep(60)", wall_seconds=0.5).state == "timeout"
    assert time.monotonic() - started < 20


def test_a_program_sees_neither_our_environment_nor_our_folder_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PRUNEBENCH_SECRET", "1")
    monkeypatch.chdir(tmp_path)
    program = (
        "import os\nassert 'PRUNEBENCH_SECRET' not in os.environ\nassert os.listdir() == []\nopen('left', 'w').close()"
    )
    assert run_program(program).state == "ok"
    assert list(tmp_path.iterdir()) == []


def test_what_a_program_leaves_running_is_ended(tmp_path):
    mark = tmp_path / "mark"
    later = f"    time.sleep(1)\n    open({str(mark)!r}, 'w').close()\n    os._exit(0)\n"
    program = "import os, time\nif os.fork() == 0:\n" + later
    assert run_program(program).state == "ok"
    time.sleep(1.5)
    assert not mark.exists()


def test_verdicts_do_not_depend_on_hash_seeds_or_addresses():
    seen = {run_program("raise KeyError(list({'a', 'b', 'c', 'd', 'e', 'f'}), object())") for _ in range(4)}
    assert len(seen) == 1
