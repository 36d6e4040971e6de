"""Versions of `record.json`: what a reader does with an older file, and with one from the future.

An older record is migrated in memory, one version at a time, and nothing on disk changes. A newer one is refused: what
it says may not be what this version would read. `tests/record/samples` keeps a run of every version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from prunebench.errors import UsageError

__all__ = ["SCHEMA", "json_document", "migrated"]

SCHEMA: Final = 2
"""2 added `seal`, the digests of what a run says, so that a record or its items cannot be changed unseen."""

_UPGRADE: Final = "upgrade prunebench (pip install -U prunebench)"


def _from_1(record: dict[str, Any]) -> dict[str, Any]:
    if "seal" in record:
        raise UsageError(
            "a seal in a record of schema 1, which had none", expected="the schema that it was sealed with"
        )
    return {**record, "schema": 2, "seal": None}


_MIGRATIONS: Final[Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {1: _from_1}


def migrated(record: object, *, where: str) -> dict[str, Any]:
    """A record as one of today's schema.

    Raises:
        UsageError: for what is no record, says no version, or has one that is not known here.
    """
    if not isinstance(record, dict):
        raise UsageError("not a record", where=where, expected="a JSON object")
    version = record.get("schema")
    if type(version) is not int:
        what = "no schema version" if version is None else f"schema {version!r}"
        raise UsageError(what, where=where, expected=f"a whole number up to {SCHEMA}")
    if version > SCHEMA:
        raise UsageError(f"schema {version} is newer than this prunebench", where=where, fix=_UPGRADE)
    while version != SCHEMA:
        if version not in _MIGRATIONS:
            raise UsageError(f"schema {version} was never written", where=where, expected=f"1 to {SCHEMA}")
        record = _MIGRATIONS[version](record)
        version = record["schema"]
    return record


def json_document(text: str) -> Any:
    """Parse JSON as the standard has it: no NaN, no Infinity, no name twice in one object.

    Raises:
        ValueError: for anything else, saying what.
    """
    return json.loads(text, parse_constant=_refused, object_pairs_hook=_once)


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return whole
