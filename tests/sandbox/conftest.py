"""A box, and cases that are easily said. There is no skip here: where boxes cannot be made, these tests fail."""

from __future__ import annotations

import pytest

from prunebench.sandbox import Case, boxed, run_case


@pytest.fixture(scope="session")
def box():
    return boxed()


@pytest.fixture(scope="session")
def ask(box):
    """The verdict on a program that should add 2."""

    def run(program, *, tests="assert add(1) == 3\nassert add(-4) == -2\n", entry="add", **more):
        return run_case(Case("test", program, tests, {entry: entry}, **{"cpu_seconds": 1, **more}), box)

    return run
