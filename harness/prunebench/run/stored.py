"""The documents of a run's suites, where they are shipped and still those that the run was asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from prunebench.errors import PruneBenchError
from prunebench.loader import load_suite
from prunebench.mask import canonical_json
from prunebench.record import Run
from prunebench.suite import suite_content

__all__ = ["documents_of", "stored_documents"]

Documents = Mapping[tuple[str, str, str], Mapping[str, Any]]


def stored_documents(run: Run) -> Documents:
    """(suite, task, item) -> document, of every suite that ships its data and has the content that the run names."""
    found: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for name, stated in run.record["identity"]["suites"].items():
        try:
            suite = load_suite(name)
            files = suite.task_files
            shipped = bool(files) and all(file.data_files for file in files)
            shipped = shipped and suite_content(suite) == stated["content"]
        except PruneBenchError:
            continue
        if not shipped:
            continue
        for task in suite.tasks:
            for path in suite.task_file(task).data_files.values():
                for line in path.read_text(encoding="utf-8").splitlines():
                    document = json.loads(line)
                    found[name, task, str(document["id"])] = document
    return found


def documents_of() -> Callable[[Run], Documents]:
    """`stored_documents` for many runs: of each combination of suites they are read once."""
    known: dict[str, Documents] = {}

    def documents(run: Run) -> Documents:
        suites = canonical_json(run.record["identity"]["suites"])
        if suites not in known:
            known[suites] = stored_documents(run)
        return known[suites]

    return documents
