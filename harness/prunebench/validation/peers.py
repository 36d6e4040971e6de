"""A records folder as a whole: what runs of one suite, and of one model, have to share."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from prunebench.errors import UsageError
from prunebench.items import ItemTable
from prunebench.mask import canonical_json
from prunebench.record import RECORD_FILE, Run, runs_under
from prunebench.validation.checks import Documents, Finding, check_run, stored_values
from prunebench.validation.retractions import RETRACTIONS, read_retractions

__all__ = ["Validation", "validate_records"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Validation:
    """What became of a validation.

    Args:
        runs: how many were looked at.
        findings: what is wrong; nothing, if all is well.
        notes: what could not be looked at, and partial and retracted runs.
    """

    runs: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"runs": self.runs, "findings": [vars(one) for one in self.findings], "notes": list(self.notes)}


def validate_records(
    paths: Sequence[Path],
    *,
    methods: Mapping[str, str],
    documents: Callable[[Run], Documents] | None = None,
    now: dt.datetime | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Hold every run at or below some folders against its evidence.

    Args:
        paths: run folders, or folders of such.
        methods: sha256 of the method files that are known, by name.
        documents: those of the suites that ship them; without, what needs them is believed.
        now: for tests; dates may not be after it.
        progress: called with (what, done, total).

    Raises:
        UsageError: for a folder that is not there, or a broken file of retractions.
    """
    now = now or dt.datetime.now(dt.UTC)
    findings: list[Finding] = []
    notes: list[str] = []
    folders = [(path, folder) for path in paths for folder in _folders(path)]
    seen: dict[str, str] = {}
    shelf = _Shelf()
    for number, (path, folder) in enumerate(folders):
        name = folder.relative_to(path).as_posix() if folder != path else folder.name
        run, found = check_run(folder, name, methods=methods, now=now, documents=documents)
        findings += found
        if run is None:
            continue
        first = seen.setdefault(run.record["run_id"], name)
        if first != name:
            findings.append(Finding(name, "record", f"the same run as {first}"))
        notes += _notes(run, name, methods)
        shelf.add(name, run)
        if progress is not None:
            progress("runs", number + 1, len(folders))
    findings += shelf.findings()
    notes += shelf.notes()
    for path in paths:
        for identifier, retraction in read_retractions(path).items():
            if identifier not in seen:
                findings.append(Finding(RETRACTIONS, "retraction", f"run {identifier} is not here"))
            else:
                notes.append(f"{seen[identifier]}: {retraction}")
    return Validation(len(folders), tuple(sorted(findings)), tuple(notes))


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise UsageError("no such folder", where=str(path), expected="a run folder, or a folder of them")
    listing = runs_under(path)
    return sorted([*listing.runs, *(one.path for one in listing.left_out if (one.path / RECORD_FILE).is_file())])


def _notes(run: Run, name: str, methods: Mapping[str, str]) -> Iterator[str]:
    record = run.record
    if record["status"] != "complete":
        yield f"{name}: partial, made with a limit of {record['identity']['limit']} items"
    for role in ("method", "operator"):
        part = record["identity"][role]
        if part and part["name"] not in methods:
            yield f"{name}: the file of {role} {part['name']} is not here, so its digest was not checked"


@dataclass
class _Shelf:
    """What is kept of every run to hold it against the others: digests and counts, no items."""

    suites: dict[str, list[_Answered]] = field(default_factory=dict)
    records: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    items: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Runs and what of the model answered in them, by the digest of their items."""

    def add(self, name: str, run: Run) -> None:
        """Remember a run; partial ones are held against nothing."""
        if run.record["status"] != "complete":
            return
        answered_by = canonical_json([_weights(run.record), (run.record["mask"] or {}).get("digest")])
        self.items.setdefault(run.items.digest, []).append((name, answered_by))
        self.records.append((name, {key: run.record[key] for key in _KEPT}))
        for suite, cells in run.record["headline"].items():
            content = canonical_json([suite, run.record["identity"]["suites"].get(suite)])
            self.suites.setdefault(content, []).append(_Answered.of(name, suite, cells, run.items))

    def notes(self) -> Iterator[str]:
        """Items that another mask answered to the last bit: only experts that nothing asks for explain that."""
        for (first, answered_by), *others in self.items.values():
            for name, other in others:
                if other != answered_by:
                    yield f"{name}: its items are those of {first} to the last bit, whose mask or weights are others"

    def findings(self) -> Iterator[Finding]:
        """What the runs do not share and should."""
        for answered in self.suites.values():
            yield from _same_questions(answered)
        yield from _same_bytes(self.records)
        yield from _same_words(self.records)


@dataclass(frozen=True)
class _Answered:
    """What a run answered of one suite: a digest of its questions, how many rows, and its headline."""

    run: str
    suite: str
    digest: str
    rows: Mapping[str, int]
    headline: str

    @classmethod
    def of(cls, run: str, suite: str, headline: object, items: ItemTable) -> _Answered:
        own = items.suite == suite
        columns = [getattr(items, key)[own].tolist() for key in ("task", "filter", "metric", "item", "doc_hash")]
        digest = hashlib.sha256("\n".join(map(repr, zip(*columns, strict=True))).encode(errors="replace")).hexdigest()
        return cls(run, suite, digest, Counter(map("/".join, zip(*columns[:3], strict=True))), canonical_json(headline))


def _same_questions(answered: Iterable[_Answered]) -> Iterator[Finding]:
    """Runs of one suite answer the same questions: the most complete ones say which, and there are no fewer of them."""
    answered = list(answered)
    votes = Counter((sum(one.rows.values()), one.digest) for one in answered)
    (_, digest), _ = max(votes.items(), key=lambda vote: (vote[0][0], vote[1]))
    reference = next(one for one in answered if one.digest == digest)
    headline = Counter(one.headline for one in answered).most_common(1)[0][0]
    for one in answered:
        if one.digest != digest:
            short = [
                f"{cell}: {one.rows.get(cell, 0)} of {n}"
                for cell, n in reference.rows.items()
                if one.rows.get(cell, 0) < n
            ]
            how = f"items are short ({short[0]})" if short else "other items"
            yield Finding(one.run, "count", f"{one.suite}: {how} than {reference.run} has of the same suite")
        if one.headline != headline:
            yield Finding(
                one.run, "headline", f"{one.suite} is averaged over other tasks than in the other runs: {one.headline}"
            )


_KEPT: Final = ("arm", "identity", "mask", "storage", "tensors")
_PLAIN: Final = frozenset(
    (
        *("engine", "model", "method", "operator", "budget", "mask", "calibration", "suites"),
        *("dtype", "device", "experts_implementation", "batch_tokens", "limit", "seed"),
        *("groups", "executor", "operator_layers", "truncate", "chat_template", "sampling"),
    )
)


def _same_bytes(records: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[Finding]:
    """A pruned checkpoint is the dense one without its pruned experts; what else it stores are its fills.

    Of runs whose identity says nothing else of how weights are stored, beside a dense one on the same weights, and of
    models whose MoE layers are all alike.
    """
    plain = [(name, one) for name, one in records if set(one["identity"]) <= _PLAIN]
    dense = {_weights(one): one["storage"]["parts"] for _, one in plain if one["arm"]["dense"]}
    for name, one in plain:
        whole, parts, mask = dense.get(_weights(one)), one["storage"]["parts"], one["mask"]
        if whole is None or mask is None or len({layer["E"] for layer in mask["layers"]}) > 1:
            continue
        pruned = sum(len(layer["pruned"]) for layer in mask["layers"])
        experts = sum(layer["E"] for layer in mask["layers"])
        allowed = {part: {size} for part, size in whole.items()} | {"fills": {parts.get("fills", 0)}}
        for part in ("experts", "router"):
            size = whole.get(part, 0)
            left = size * (experts - pruned) / experts
            allowed[part] = {left} if part == "experts" else {left, size}
        for part in sorted(allowed.keys() | parts.keys()):
            if parts.get(part, 0) not in allowed.get(part, {0}):
                wanted = " or ".join(f"{size:.0f}" for size in sorted(allowed.get(part, {0})))
                yield Finding(
                    name, "bytes", f"{part} of {parts.get(part, 0)} bytes; the dense model and the mask give {wanted}"
                )


def _same_words(records: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[Finding]:
    """Runs on the same weights have one router convention, and fills as wide as these weights' experts are."""
    alike: dict[str, list[tuple[str, str, object]]] = {}
    for name, one in records:
        values = stored_values(one["tensors"])
        alike.setdefault(f"convention {_weights(one)}", []).append((name, "arm", one["arm"]["convention"]))
        if values:
            width = one["storage"]["parts"].get("fills", 0) // values
            alike.setdefault(f"fills {_weights(one)}", []).append((name, "bytes", width))
    for said in alike.values():
        usual = Counter(words for _, _, words in said).most_common(1)[0][0]
        for name, rule, words in said:
            if words != usual:
                what = f"convention {words}" if rule == "arm" else f"fills of {words} bytes a value"
                yield Finding(name, rule, f"{what}; the other runs on these weights have {usual}")


def _weights(record: Mapping[str, Any]) -> str:
    return str(record["identity"]["model"]["weights_sha256"])
