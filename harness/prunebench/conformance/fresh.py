"""A method in a process that knows nothing: no history, other hashes, its file loaded anew.

Starting Python and torch takes seconds, so one server per session imports prunebench, opens the models, and forks for
every job before any method's code has run in it. Run as a module, this is that server: it reads jobs from standard
input, one JSON text a line, and answers each by a line.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import prunebench
from prunebench.conformance.cases import HOMES, case
from prunebench.conformance.left import left_behind
from prunebench.conformance.result import Fault
from prunebench.conformance.subject import HALF, Subject, Trial, forget_passes, planned, selected
from prunebench.conformance.watch import watching
from prunebench.errors import PrerequisiteError, PruneBenchError
from prunebench.mask import Mask
from prunebench.plan import Plan
from prunebench.replacement import Survivor

__all__ = ["FreshRun", "in_fresh_process", "probe_rows"]

# A job's CPU time; and how long it may wait for that on a busy machine.
_CPU_SECONDS = 120
_PATIENCE = 900.0
_ROWS = 6


def probe_rows(width: int) -> Tensor:
    """Rows on which fills are compared, [6, D]."""
    return torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class FreshRun:
    """What a method did there.

    Args:
        mask: selected there; an operator's is the one that was given.
        plan: answered there on the mask from here, before `select` had run.
        threaded: mask and plan again, on two threads.
        answers: of the fills that were saved here, rebuilt there, on `probe_rows`; or why they could not be.
        import_effects: what loading the file did beside defining.
        megabytes: by which memory peaked above what was there; None where the system does not say.
    """

    mask: Mask
    plan: Plan
    threaded: tuple[Mask, Plan]
    answers: list[Tensor] | str
    import_effects: list[str]
    megabytes: float | None


def in_fresh_process(subject: Subject) -> FreshRun:
    """The method's run on its plain case in another process; asked for once.

    Raises:
        Fault: it died, hung or raised there.
        NotApplicable: its class cannot be found in its file.
    """
    key = ("fresh",)
    if key not in subject.kept:
        subject.kept[key] = _asked(subject), None
    found, _ = subject.kept[key]
    assert isinstance(found, FreshRun)
    return found


def _asked(subject: Subject) -> FreshRun:
    kind, mask, plan = subject.in_its_file, subject.mask(), subject.plan()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan.save(folder / "given.safetensors")
        job = {
            "folder": name,
            "file": str(subject.source.path),
            "class": kind.__qualname__,
            "parameters": subject.method.parameters(),
            "family": subject.home,
            "mask": mask.to_json(),
        }
        answer = _server().ask(job)
        if "error" in answer:
            raise Fault(
                str(answer["error"]),
                where="a process of its own",
                expected="what it does here",
                fix="let the file stand alone: it is loaded by its path",
            )
        answers: list[Tensor] | str = str(answer["unbuilt"])
        if not answer["unbuilt"]:
            found = load_file(folder / "answers.safetensors")
            answers = [found[f"{number:06}"] for number in range(len(found) - 1)]
        return FreshRun(
            Mask.from_json(answer["mask"]),
            Plan.load(folder / "plan.safetensors"),
            (Mask.from_json(answer["threaded"]), Plan.load(folder / "threaded.safetensors")),
            answers,
            list(answer["effects"]),
            answer["megabytes"],
        )


# --- the server, from outside


class _Server:
    """The process that forks for jobs."""

    def __init__(self) -> None:
        roots = [str(Path(prunebench.__file__).parents[1]), *filter(None, sys.path)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(roots)),
            # Two threads that wait for one another by spinning take seconds where there is one core for them.
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            "KMP_BLOCKTIME": "0",
            # Other hashes than here, whatever they are here.
            "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "prunebench.conformance.fresh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C is for the command, which ends this one
        )
        atexit.register(self.close)

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Send a job and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], 2 * _PATIENCE)
            line = self.process.stdout.readline() if ready else ""
        except BrokenPipeError:
            line = ""
        if not line:
            self.close()
            _servers.clear()
            raise PrerequisiteError("the process for methods did not answer", fix="try again on a machine less busy")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        atexit.unregister(self.close)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_servers: list[_Server] = []


def _server() -> _Server:
    if not _servers:
        _servers.append(_Server())
    return _servers[0]


# --- the server, from inside


def _serve(answers: IO[str]) -> None:
    torch.set_num_threads(1)  # before anything runs on several, whose threads a fork would lose
    for family in HOMES:
        case("plain", family)
    for line in sys.stdin:
        job = json.loads(line)
        result = Path(job["folder"]) / "result.json"
        child = os.fork()
        if child == 0:
            _work(job, result)
        answer = {"error": f"it ended without an answer, or took more than {_CPU_SECONDS} s of CPU time"}
        if _ended(child) and result.is_file():
            answer = json.loads(result.read_text(encoding="utf-8"))
        with suppress(BrokenPipeError):  # who asked has gone, and the next line is the last
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _ended(child: int) -> bool:
    """Wait for a child; kill it if it takes too long, or if nobody waits for its answer any more."""
    until, asker = time.monotonic() + _PATIENCE, select.poll()
    asker.register(sys.stdin, 0)  # only that it hung up
    while time.monotonic() < until and not asker.poll(5):
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _work(job: Mapping[str, Any], result: Path) -> None:
    """Do a job in this process and end it."""
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    try:
        answer = _done(job)
    except BaseException as error:  # noqa: BLE001  whatever it is, it has to be told
        answer = {"error": str(error) if isinstance(error, PruneBenchError) else f"{type(error).__name__}: {error}"}
    result.write_text(json.dumps(answer), encoding="utf-8")
    os._exit(0)  # a forked child must not run the server's exits


def _done(job: Mapping[str, Any]) -> dict[str, Any]:
    from prunebench.loader import load_class_of
    from prunebench.parameters import make

    folder, where = Path(job["folder"]), case("plain", job["family"])
    loading = Trial()
    with left_behind(loading), watching(frozenset({job["file"]}), closely=True) as acts:
        kind = load_class_of(Path(job["file"]), job["class"])
    effects = [f"{act.what} in line {act.line}" for act in acts] + [
        f"{name} has changed" for name in (*loading.settings, *loading.generators)
    ]
    unbuilt = _rebuilt(Plan.load(folder / "given.safetensors"), where.moe.layers[0].width, folder)
    method = make(kind, job["parameters"])
    mask, before = Mask.from_json(job["mask"]), _reset_peak()
    with left_behind(Trial(), where.moe):
        planned(method, where, mask).save(folder / "plan.safetensors")
    if kind.selects():
        mask = selected(method, where, HALF, 0)
    peak = _status("VmHWM")
    megabytes = None if before is None or peak is None else (peak - before) / 1024
    torch.set_num_threads(2)
    forget_passes()
    planned(method, where, mask).save(folder / "threaded.safetensors")
    threaded = selected(method, where, HALF, 0) if kind.selects() else mask
    return {
        "mask": mask.to_json(),
        "threaded": threaded.to_json(),
        "effects": effects,
        "unbuilt": unbuilt,
        "megabytes": megabytes,
    }


def _rebuilt(plan: Plan, width: int, folder: Path) -> str:
    """Save what the plan's fills answer; or say why they cannot."""
    answers = {"none": torch.zeros(1)}
    try:
        for layer in plan.layers:
            for expert, saved in sorted(layer.fills.items()):
                fill = saved.build(plan.state_of(layer.index, expert), where=f"layer {layer.index}, expert {expert}")
                if type(fill) is not Survivor:
                    with torch.inference_mode():
                        answers[f"{len(answers) - 1:06}"] = fill(probe_rows(width)).contiguous().clone()
    except Exception as error:  # noqa: BLE001  a method's code may raise anything
        return f"{type(error).__name__}: {error}"
    save_file(answers, folder / "answers.safetensors")
    return ""


def _status(name: str) -> int | None:
    """A line of this process's status in kilobytes (Linux)."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return None


def _reset_peak() -> int | None:
    """Forget the peak of memory so far; what is in use now, in kilobytes."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _status("VmRSS")
    return None


if __name__ == "__main__":
    # What a method prints must not reach the answers.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _serve(lines)
