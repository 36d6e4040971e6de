"""The processes for methods end with whoever asked them."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAITS = '''"""Waits."""

import sys
import time
from dataclasses import dataclass

from prunebench import Method, Replacements, Zero


@dataclass(frozen=True)
class Waits(Method):
    """Answers zero, after a minute where nobody has selected."""

    name = "waits"
    reference = "a test"

    def replace(self, layer, pruned):
        if "ignore" in sys.warnoptions:
            time.sleep(600)
        return Replacements({expert: Zero(layer.width) for expert in pruned})
'''


def test_a_killed_check_leaves_no_process_behind(tmp_path):
    path = tmp_path / "waits.py"
    path.write_text(WAITS, encoding="utf-8")
    command = [sys.executable, "-m", "prunebench.cli", "check", str(path), "--only", "fresh_process"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT / "harness")}) as check:
        found = _until(lambda: _descendants(check.pid), 3)
        check.kill()
    assert _until(lambda: [pid for pid in found if Path(f"/proc/{pid}/status").exists()], 0) == []


def _descendants(pid):
    """Those of the checks, the server for fresh processes, and the job that it forked for."""
    return [found for one in _children(pid) for found in (one, *_descendants(one))]


def _children(pid):
    """Processes whose parent this is."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = status.read_text(encoding="utf-8", errors="replace")
            state, parent = text.rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(status.parent.name))
    return found


def _until(look, count, patience=300):
    """What is seen once there are that many of them."""
    until = time.monotonic() + patience
    while len(seen := look()) != count and time.monotonic() < until:
        time.sleep(0.05)
    return seen
