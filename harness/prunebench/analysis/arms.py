"""Finding the runs that a contrast names, by folder or by what their records say of the arm; no items are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.items import Outcomes, read_outcomes
from prunebench.mask import canonical_json
from prunebench.record import ITEMS_FILE, RECORD_FILE, LeftOut, Run, read_run, runs_under

__all__ = ["Found", "Selector", "Shelf", "UnfoundError"]


class UnfoundError(Exception):
    """An arm that these records do not have, or have more than once; the text says which."""


@dataclass(frozen=True)
class Selector:
    """One arm. A field that is None asks for nothing, except where stated.

    Args:
        run: the run's folder below the records; nothing else is then asked.
        model: its name.
        dense: whether it is the unpruned model; of all further fields but the last one, and of `text` where that is
            given, nothing is then asked.
        mask: what chose the mask: a criterion's name.
        ratio: share of experts pruned, as typed.
        keep: experts kept per layer, where those were asked for.
        operator: name of the operator's file, with the scale as asked for behind an @, if any is meant.
        parameters: of the operator, those that matter: name to value.
        text: calibration text of the mask.
        draw: slice of that text.
        fit_text: what the operator was fitted on; None for what the mask was chosen on.
        fit_draw: the slice of it; None for the mask's.
        quantize: how it was quantized, as asked for, on the mask's text; None for 16 bits.
    """

    run: str | None = None
    model: str | None = None
    dense: bool = False
    mask: str | None = None
    ratio: str | None = None
    keep: int | None = None
    operator: str | None = None
    parameters: tuple[tuple[str, Any], ...] = ()
    text: str | None = None
    draw: str | None = None
    fit_text: str | None = None
    fit_draw: str | None = None
    quantize: str | None = None

    @classmethod
    def of(cls, stated: Mapping[str, Any] | str, where: str) -> Selector:
        """From a TOML table, or from a run folder's name.

        Raises:
            UsageError: for an unknown field, or one of another type.
        """
        if isinstance(stated, str):
            return cls(run=stated)
        types: dict[str, type] = {"dense": bool, "keep": int, "parameters": dict}
        known = {field.name for field in fields(cls)}
        for name, value in stated.items():
            if name not in known:
                raise UsageError(f"unknown field {name!r} of an arm", where=where, expected=", ".join(sorted(known)))
            if type(value) is not types.get(name, str):
                kind = types.get(name, str).__name__
                raise UsageError(f"{name} of an arm is {value!r}", where=where, expected=f"a {kind}")
        parameters = tuple(sorted(stated.get("parameters", {}).items()))
        selector = cls(**{**stated, "parameters": parameters})
        if selector.run is None and selector.model is None:
            raise UsageError("an arm without run and model", where=where, expected="run, or model and what was done")
        return selector

    def __str__(self) -> str:
        if self.run is not None:
            return self.run
        if self.dense:
            return f"{self.model} dense" + (f" {self.quantize}" if self.quantize else "")
        parameters = ", ".join(f"{name}={value}" for name, value in self.parameters)
        amount = f"keep {self.keep}" if self.keep is not None else f"ratio {self.ratio}" if self.ratio else ""
        chosen = " ".join(filter(None, (self.mask, self.text, self.draw)))
        fitted = " ".join(filter(None, (self.fit_text, self.fit_draw)))
        parts = (str(self.model), chosen, amount, f"{self.operator or ''} {parameters}".strip())
        more = ([f"fitted on {fitted}"] if fitted else []) + ([self.quantize] if self.quantize else [])
        return ", ".join([part for part in parts if part] + more)


@dataclass(frozen=True)
class Found:
    """A run folder with its record, without items."""

    folder: str
    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        """How messages call the run, as they do one with items."""
        return f"{self.folder} ({self.record['run_id']})"

    @property
    def operator(self) -> str:
        """Name of the operator's file, with the scale as asked for."""
        identity, scale = self.record["identity"], self.record["arm"]["scale"]
        name = (identity["operator"] or {"name": "dense"})["name"]
        return f"{name}@{scale}" if scale else str(name)

    @property
    def parameters(self) -> dict[str, Any]:
        """Of the operator, without its scale, which is the arm's."""
        stated = dict((self.record["identity"]["operator"] or {}).get("parameters") or {})
        stated.pop("scale", None)
        return stated

    def calibration(self, part: str) -> Mapping[str, Any] | None:
        """What the mask was chosen on (`mask`) or the operator fitted on (`fit`)."""
        stated: Mapping[str, Any] | None = (self.record["identity"]["calibration"] or {}).get(part)
        return stated

    @property
    def ratio(self) -> str | None:
        """The share of experts pruned as it was asked for."""
        asked = (self.record["identity"]["budget"] or {}).get("ratio")
        return None if asked is None else str(asked)

    def fits(self, wanted: Selector) -> bool:
        """Whether the run is the arm."""
        if wanted.run is not None:
            return self.folder == wanted.run
        arm = self.record["arm"]
        if arm["model"] != wanted.model or bool(arm["dense"]) != wanted.dense:
            return False
        if not self._quantized(wanted):
            return False
        if wanted.dense:
            return True
        # An operator in some layers only is another arm, and is named by its folder.
        if self.record["identity"].get("operator_layers"):
            return False
        pairs = (
            (wanted.mask, arm["mask"]),
            (wanted.ratio, self.ratio),
            (wanted.keep, arm["keep"]),
            (wanted.operator, self.operator if "@" in (wanted.operator or "") else self.operator.partition("@")[0]),
        )
        same = all(asked is None or asked == stated for asked, stated in pairs)
        own = self.parameters
        same = same and all(name in own and own[name] == value for name, value in wanted.parameters)
        return same and self._calibrated(wanted)

    def _quantized(self, wanted: Selector) -> bool:
        """Whether it is quantized as asked, on the text that the mask is asked to be of."""
        if self.record["arm"].get("quantize") != wanted.quantize:
            return False
        seen = (self.record["identity"].get("quantize") or {}).get("calibration")
        return seen is None or _on(seen, wanted.text, wanted.draw)

    def _calibrated(self, wanted: Selector) -> bool:
        """A criterion or an operator without statistics has no calibration, and fits any that is asked for."""
        mask, fit = self.calibration("mask"), self.calibration("fit")
        on_mask = _on(mask, wanted.text, wanted.draw)
        return on_mask and _on(fit, wanted.fit_text or wanted.text, wanted.fit_draw or wanted.draw)


def _on(stated: Mapping[str, Any] | None, text: str | None, draw: str | None) -> bool:
    if stated is None:
        return True
    return text in (None, stated["text"]) and draw in (None, stated["draw"])


class Shelf:
    """The whole, unlimited runs below a folder, each once.

    Args:
        records: the folder.
        left_out: folders that are not used, and why.
        runs: what is left.
    """

    def __init__(self, records: Path, left_out: Iterable[LeftOut], runs: Iterable[Found]) -> None:
        self.records = records
        self.left_out = tuple(sorted(left_out))
        self.runs = tuple(runs)

    @classmethod
    def of(cls, records: Path) -> Shelf:
        """Read the records below a folder.

        Raises:
            UsageError: if there is no such folder.
            PrerequisiteError: if there is no whole run in it.
        """
        listing = runs_under(records)
        left_out = [replace(one, path=one.path.relative_to(records)) for one in listing.left_out]
        seen: dict[str, str] = {}
        runs: list[Found] = []
        for path in listing.runs:
            folder = path.relative_to(records).as_posix()
            record = json.loads((path / RECORD_FILE).read_text(encoding="utf-8"))
            first = seen.setdefault(record["run_id"], folder)
            failed = [str(entry["check"]) for entry in record["integrity"] if entry["status"] == "fail"]
            reason = f"the same run as {first}" if first != folder else f"failed: {', '.join(failed)}" if failed else ""
            if record["status"] != "complete":
                reason = f"partial: made with a limit of {record['identity']['limit']} items"
            if reason:
                left_out.append(LeftOut(Path(folder), reason))
            else:
                runs.append(Found(folder, record))
        if not runs:
            detail = f"left out: {left_out[0]}" if left_out else "make some with prunebench grid"
            raise PrerequisiteError("no complete run to compare", where=str(records), fix=detail)
        return cls(records, left_out, runs)

    def find(self, wanted: Selector) -> Found:
        """The one run of an arm.

        Raises:
            UnfoundError: if there is none, or more than one.
        """
        found = [run for run in self.runs if run.fits(wanted)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise UnfoundError(f"no run of {wanted}")
        paths = sorted(found[0].record["identity"])
        differing = [p for p in paths if len({canonical_json(run.record["identity"][p]) for run in found}) > 1]
        raise UnfoundError(f"{len(found)} runs of {wanted}, which differ in {', '.join(differing)}")

    def read(self, found: Found) -> Run:
        """A run with its items."""
        return read_run(self.records / found.folder)

    def outcomes(self, found: Found) -> Outcomes:
        """A run's numbers without what its items say in words."""
        return read_outcomes(self.records / found.folder / ITEMS_FILE)
