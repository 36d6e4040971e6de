"""What the sandbox costs, whether every reference solution passes in it, and evalplus on the same samples.

    python benchmarks/code.py DATA [--only humaneval mbpp mbpp_plus] [--workers 1 4] [--load N] [--no-evalplus]

DATA is a folder with humaneval.jsonl.gz, mbpp.jsonl.gz and mbppplus-2023-11.jsonl.gz. Trivial cases per second come
first. Then every reference solution is run once for each number of workers, so by default twice in a row, if asked for
with N busy processes beside. Last, evalplus's checker and our sandbox run HumanEval's reference solutions on the same
inputs: those that HumanEval's own tests pass, as evalplus's release is not needed here. Seconds are of the wall, and
say little where others use the machine; CPU milliseconds per case are of a cgroup of our own (root and cgroup v1).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prunebench.evaluate.code import assertion_case, check_case, inputs_case
from prunebench.loader import load_suite
from prunebench.sandbox import CANARY, Case, boxed, run_cases, usable_cores

FILES = {"humaneval": "humaneval", "mbpp": "mbpp", "mbpp_plus": "mbppplus-2023-11"}
TRIVIAL = 120


def documents(data: Path, name: str) -> list[dict[str, Any]]:
    """The documents of a suite's test split."""
    return load_suite(f"{name}={data / f'{FILES[name]}.jsonl.gz'}").documents(name)["test"]  # type: ignore[index]


def reference_cases(name: str, docs: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Every reference solution with its tests; for MBPP+ the base inputs and the additional ones are a case each."""
    if name == "humaneval":
        return [check_case(doc, f"{doc['prompt']}{doc['canonical_solution']}") for doc in docs]
    if name == "mbpp":
        return [assertion_case(doc, doc["code"]) for doc in docs]
    return [
        inputs_case(doc, doc["canonical_solution"], "Mbpp", which)
        for doc in docs
        for which in ("base", "plus")
        if json.loads(doc[f"{which}_input"])
    ]


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep the cores loaded; what is started is ended."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


class CpuClock:
    """CPU seconds of this process and all that it starts, by a cgroup of its own; None where one cannot be made.

    Not `getrusage`: bubblewrap does not wait for what runs inside, so that nobody is told its times.
    """

    def __init__(self) -> None:
        self._folder: Path | None = Path(f"/sys/fs/cgroup/cpuacct/prunebench-{os.getpid()}")
        try:
            self._folder.mkdir()
            (self._folder / "tasks").write_text(str(os.getpid()))
        except OSError:
            self._folder = None

    def read(self) -> float | None:
        """CPU seconds so far."""
        return None if self._folder is None else int((self._folder / "cpuacct.usage").read_text()) / 1e9

    def close(self) -> None:
        """Leave the cgroup and remove it."""
        if self._folder is not None:
            (self._folder.parent / "tasks").write_text(str(os.getpid()))
            self._folder.rmdir()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What work returns, and its wall seconds."""
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def trivial(workers: Sequence[int]) -> None:
    """Cases per second where programs and tests are nothing."""
    box, clock = boxed(), CpuClock()
    run_cases([CANARY], box)
    for count in workers:
        before = clock.read()
        _, seconds = timed(lambda count=count: run_cases([CANARY] * TRIVIAL, box, workers=count))
        after = clock.read()
        cost = "" if before is None or after is None else f", {1000 * (after - before) / (TRIVIAL + 2):.1f} ms CPU each"
        print(f"trivial cases, {count} workers: {(TRIVIAL + 2) / seconds:.1f} per second{cost}", flush=True)
    clock.close()


def references(name: str, docs: Sequence[Mapping[str, Any]], workers: Sequence[int]) -> None:
    """Every reference solution, once per number of workers; verdicts must be the same."""
    cases = reference_cases(name, docs)
    seen = []
    for count in workers:
        verdicts, seconds = timed(lambda count=count: run_cases(cases, boxed(), workers=count))
        seen.append(verdicts)
        states = ", ".join(f"{number} {state}" for state, number in Counter(v.state for v in verdicts).items())
        print(f"{name}: {len(docs)} tasks, {len(cases)} cases, {count} workers: {states}; {seconds:.1f} s", flush=True)
        for case, verdict in zip(cases, verdicts, strict=True):
            if verdict.state != "ok":
                print(f"  {case.name}: {verdict.state}, {verdict.reason}")
    print(
        f"{name}: verdicts at {' and '.join(map(str, workers))} workers are {'equal' if equal(seen) else 'DIFFERENT'}"
    )


def equal(lists: Sequence[Any]) -> bool:
    """Whether all are the first."""
    return all(one == lists[0] for one in lists)


def evalplus_on_humaneval(docs: Sequence[Mapping[str, Any]], workers: int) -> None:
    """Reference solutions by evalplus's checker, and by ours on the same inputs; `workers` processes at a time each."""
    from concurrent.futures import ThreadPoolExecutor

    from evalplus.eval import untrusted_check
    from evalplus.gen.util import trusted_exec

    samples = []
    for doc in docs:
        inputs = inputs_of(doc)
        solution = f"{doc['prompt']}{doc['canonical_solution']}"
        expected, seconds = trusted_exec(solution, inputs, doc["entry_point"], record_time=True)
        samples.append((doc, solution, inputs, expected, seconds))

    def theirs(sample: tuple[Any, ...]) -> str:
        doc, solution, inputs, expected, seconds = sample
        atol = 1e-4 if doc["entry_point"] == "find_zero" else 0
        return str(untrusted_check("humaneval", solution, inputs, doc["entry_point"], expected, atol, seconds, True)[0])

    cases = [
        inputs_case(
            {**doc, "atol": 1e-4 * (doc["entry_point"] == "find_zero"), "base_input": json.dumps(inputs)},
            solution,
            "HumanEval",
            "base",
        )
        for doc, solution, inputs, _, _ in samples
    ]
    with ThreadPoolExecutor(workers) as pool:
        verdicts, seconds = timed(lambda: list(pool.map(theirs, samples)))
    failed = [sample[0]["id"] for sample, verdict in zip(samples, verdicts, strict=True) if verdict != "pass"]
    count, total = len(samples) - len(failed), len(samples)
    print(f"evalplus, {workers} workers: {count} of {total} pass; {seconds:.1f} s; not {failed}")
    ours, seconds = timed(lambda: run_cases(cases, boxed(), workers=workers))
    passed = sum(verdict.state == "ok" for verdict in ours)
    print(f"prunebench on the same inputs, {workers} workers: {passed} of {len(samples)} pass; {seconds:.1f} s")


def inputs_of(doc: Mapping[str, Any]) -> list[list[Any]]:
    """The arguments of every call in HumanEval's own test of a reference; JSON's types only."""
    calls: list[list[Any]] = []
    space: dict[str, Any] = {}
    exec(f"{doc['prompt']}{doc['canonical_solution']}\n{doc['test']}", space)  # noqa: S102 - the data set's own code
    reference = space[doc["entry_point"]]

    def watched(*arguments: Any) -> Any:
        calls.append(json.loads(json.dumps(arguments)))
        return reference(*arguments)

    with contextlib.redirect_stdout(io.StringIO()):
        space["check"](watched)
    return calls


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--no-evalplus", action="store_true")
    options = parser.parse_args()
    print(f"{boxed().name}; {usable_cores()} cores, load {os.getloadavg()[0]:.1f} before we began, {options.load} busy")
    with busy(options.load):
        trivial([1, usable_cores(), *(count for count in options.workers if count not in (1, usable_cores()))])
        for name in options.only:
            references(name, documents(options.data, name), options.workers)
        if not options.no_evalplus:
            evalplus_on_humaneval(documents(options.data, "humaneval"), usable_cores())


if __name__ == "__main__":
    main()
