"""Runs as evidence: which arm a run is, its scores on shared resamples, its mask, its routing.

An arm that is not there, or is there twice, is a `NotMeasurableError` that names it; nothing is guessed in its place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from leaderboard.findings.operators import (
    ANSWERING,
    CONSTANT,
    LARGER,
    OPERATORS,
    OTHER,
    TRAINED,
    UNFITTED,
    USUAL,
    called,
)

from prunebench.analysis import PERCENT, headline_cells, is_loss, published
from prunebench.analysis.bootstrap import Sampled
from prunebench.analysis.metrics import Cell, cell_sampled, in_units, paired_order, suite_mean
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import Mask, canonical_json
from prunebench.record import ItemTable, LeftOut, Run, read_run, runs_under

__all__ = [
    "ARITHMETIC",
    "CODE",
    "CONSTANT",
    "CRITERIA",
    "DRAWS",
    "GENERAL",
    "IN_DOMAIN",
    "MULTIPLE_CHOICE",
    "OPERATORS",
    "OTHER",
    "PERPLEXITY",
    "RATIOS",
    "SUITES",
    "TRAINED",
    "Arm",
    "Chosen",
    "Draw",
    "Evidence",
    "Model",
    "NotMeasurableError",
    "Observed",
    "Score",
    "Suite",
    "dense",
    "gather",
    "pruned",
    "trained_scale",
]

RATIOS: Final = ("0.25", "0.5", "0.75")
CRITERIA: Final = ("mone", "reap", "sge", "frequency", "random")
DRAWS: Final = ("A", "B", "C")
GENERAL: Final = "world:general"
IN_DOMAIN: Final = "world:arithmetic"

_READ: Final = (*ANSWERING, *LARGER)  # the operators that some table asks for
_RESOLVED: Final = {"trained": True, "other": False}  # whether a scale as asked for is the trained one


class NotMeasurableError(Exception):
    """A number that these records cannot give; the text says what is missing."""


@dataclass(frozen=True)
class Suite:
    """A suite of the page: its name, its title, which direction is better, and how it is shown.

    Scores of a suite of right and wrong answers are in percent, a perplexity is in its logarithm: differences of it
    add up, and do not hang on the worst arm of a mean.
    """

    name: str
    title: str
    better: int = 1
    digits: int = 2


MULTIPLE_CHOICE: Final = Suite("multiple_choice", "multiple choice")
ARITHMETIC: Final = Suite("arithmetic", "arithmetic")
CODE: Final = Suite("code", "code")
PERPLEXITY: Final = Suite("perplexity", "ln perplexity ↓", better=-1, digits=3)
SUITES: Final = (MULTIPLE_CHOICE, ARITHMETIC, CODE, PERPLEXITY)


@dataclass(frozen=True, order=True)
class Draw:
    """A slice of a calibration text."""

    text: str = GENERAL
    name: str = "A"

    def __str__(self) -> str:
        return f"{self.text.removeprefix('world:')} {self.name}"


@dataclass(frozen=True)
class Arm:
    """An arm that a table asks for; `criterion` is None for the dense model.

    Args:
        model: its name.
        criterion: what chose the mask.
        ratio: share of experts pruned, as typed.
        operator: as `operators` names it.
        mask: what the mask was chosen on.
        fit: what the operator was fitted on; of no meaning for one that fits nothing.
    """

    model: str
    criterion: str | None = None
    ratio: str = ""
    operator: str = ""
    mask: Draw = Draw()
    fit: Draw = Draw()

    def __str__(self) -> str:
        if self.criterion is None:
            return f"{self.model} dense"
        chosen = f"{self.model} {self.criterion} ({self.mask}) {100 * float(self.ratio):g} %"
        refitted = f" fitted on {self.fit}" if self.fits and self.fit != self.mask else ""
        return f"{chosen} {self.operator}{refitted}"

    @property
    def fits(self) -> bool:
        """Whether its operator is fitted on a text."""
        return self.operator not in UNFITTED


def dense(model: str) -> Arm:
    """The unpruned model."""
    return Arm(model)


def pruned(
    model: str, ratio: str, operator: str, *, criterion: str = "mone", mask: Draw | None = None, fit: Draw | None = None
) -> Arm:
    """A pruned arm; without more, MoNE's mask of general draw A, fitted on what the mask was chosen on."""
    mask = mask or Draw()
    return Arm(model, criterion, ratio, operator, mask, fit or mask)


@dataclass(frozen=True, order=True)
class Model:
    """A model of the records: trained gate scale (keep or renorm), name, and whether a bias steers its choice."""

    trained: str
    name: str
    biased: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.trained})"


@dataclass(frozen=True, eq=False)
class Score:
    """A suite's number on its items and resamples.

    Args:
        mean: in the units of `Suite`.
        pairing: all that two runs must share to be subtracted, by name.
        chance: the score of guessing, where the items say between how many choices; else None.
    """

    mean: Sampled
    pairing: Mapping[str, str]
    chance: float | None


@dataclass(frozen=True, eq=False)
class Observed:
    """A run without its items: its record, and its score on each suite of the page."""

    record: Mapping[str, Any]
    scores: Mapping[str, Score]

    @property
    def arm(self) -> Mapping[str, Any]:
        """What the record calls the arm."""
        arm: Mapping[str, Any] = self.record["arm"]
        return arm

    @property
    def identity(self) -> Mapping[str, Any]:
        """The run's identity."""
        identity: Mapping[str, Any] = self.record["identity"]
        return identity

    @property
    def operator(self) -> str:
        """As `operators` names it, with the scale as it was asked for, and the layers if it stands in a few only.

        An operator of `USUAL` keeps its name where it could do nothing but what another does: a tilt without tokens.
        """
        stated = self.identity["operator"] or {}
        scale = self.arm["scale"]
        name = f"{self.arm['operator']}@{scale}" if scale else str(self.arm["operator"])
        if stated.get("name") in USUAL:
            name = called(stated["name"], stated["parameters"], stated["scale"])
        special = [key for key in ("groups", "operator_layers") if key in self.identity]
        return ", ".join([name, *(f"{key} {canonical_json(self.identity[key])}" for key in special)])

    @property
    def ratio(self) -> str:
        """As asked for, where a ratio was; else the share of experts that the mask removes."""
        asked = (self.identity["budget"] or {}).get("ratio")
        return str(asked) if asked is not None else f"{self.arm['ratio']:.6g}"

    @property
    def given_mask(self) -> bool:
        """Whether the mask came from a file or another run, so that the record does not say what chose it."""
        return bool(self.identity["mask"]["source"] == "file")

    @property
    def digest(self) -> str:
        """Of the mask."""
        return str(self.identity["mask"]["digest"])

    def draw(self, part: str) -> Draw | None:
        """What the mask was chosen on (`mask`) or the operator fitted on (`fit`)."""
        stated = (self.identity["calibration"] or {}).get(part)
        return Draw(str(stated["text"]), str(stated["draw"])) if stated else None


@dataclass(frozen=True)
class Chosen:
    """A mask with the text that chose it: how many tokens, and their fingerprint."""

    mask: Mask
    tokens: str
    fingerprint: str


class Evidence:
    """The runs of a records folder, found by arm."""

    def __init__(self, runs: Iterable[Observed], left_out: Sequence[LeftOut] = (), read: int = 0) -> None:
        self.left_out = tuple(left_out)
        self.read = read
        self._dense: list[Observed] = []
        self._pruned: dict[tuple[str, str, str], list[Observed]] = {}
        models: dict[str, Model] = {}
        for run in runs:
            biased = "bias" in run.arm["convention"].split(", ")
            models.setdefault(run.arm["model"], Model(trained_scale(run.arm), run.arm["model"], biased))
            if run.arm["dense"]:
                self._dense.append(run)
            else:
                key = (run.arm["model"], run.ratio, run.operator)
                self._pruned.setdefault(key, []).append(run)
        self.models = tuple(sorted(models.values()))

    def find(self, arm: Arm) -> Observed:
        """The one run of an arm.

        Raises:
            NotMeasurableError: if there is none, or more than one.
        """
        if arm.criterion is None:
            return _only([run for run in self._dense if run.arm["model"] == arm.model], arm)
        runs = [
            run
            for run in self._pruned.get((arm.model, arm.ratio, arm.operator), [])
            if not arm.fits or run.draw("fit") == arm.fit
        ]
        found = [run for run in runs if _chose(run, arm)]
        if not found:
            # A mask that was given instead of chosen is the one asked for if it has the same experts.
            digests = {run.digest for run in self._choosing(arm)}
            found = [run for run in runs if run.given_mask and run.digest in digests]
        # A criterion of its own operator may be constant too (such as mone); the house's own file is the one meant.
        house = [run for run in found if run.identity["operator"]["name"] == run.arm["operator"]]
        return _only(house or found, arm)

    def _choosing(self, arm: Arm) -> list[Observed]:
        """The runs under any operator whose mask was chosen as an arm's was."""
        keys = [(arm.model, arm.ratio, operator) for operator in _READ]
        return [run for key in keys for run in self._pruned.get(key, []) if _chose(run, arm)]

    def score(self, arm: Arm, suite: Suite) -> Score:
        """An arm's score on a suite."""
        run = self.find(arm)
        if suite.name not in run.scores:
            raise NotMeasurableError(f"no {suite.name} in the run of {arm}")
        score = run.scores[suite.name]
        if not np.isfinite(score.mean.draws_B).all():
            raise NotMeasurableError(f"{suite.name} of {arm} is not finite")
        return score

    def both(self, one: Arm, other: Arm, suite: Suite) -> tuple[Score, Score]:
        """The scores of two arms that answered the same items under the same conditions."""
        scores = self.score(one, suite), self.score(other, suite)
        differing = [name for name, value in scores[0].pairing.items() if scores[1].pairing[name] != value]
        if differing:
            raise NotMeasurableError(f"{one} and {other} differ in {', '.join(differing)}")
        return scores

    def contrast(self, one: Arm, other: Arm, suite: Suite) -> Sampled:
        """One arm minus another, in points or in ln perplexity, paired over the items."""
        a, b = self.both(one, other, suite)
        return a.mean.minus(b.mean)

    def require_one_budget(self, *arms: Arm) -> None:
        """Raise unless all masks and fits of some arms come from as many blocks of one length."""
        stated = [run.identity["calibration"][part] for run in map(self.find, arms) for part in ("mask", "fit")]
        if len({(one["blocks"], one["length"]) for one in stated if one is not None}) > 1:
            raise NotMeasurableError(f"not on as many tokens: {', '.join(map(str, arms))}")

    def mask(self, model: str, ratio: str, draw: Draw, criterion: str = "mone") -> Chosen:
        """The mask that a criterion chose on a draw, whatever was then done on it."""
        arm = pruned(model, ratio, CONSTANT, criterion=criterion, mask=draw)
        found = {run.digest: run for run in self._choosing(arm)}
        asked = f"{model} {criterion} ({draw}) {100 * float(ratio):g} %"
        if len(found) != 1:
            raise NotMeasurableError(f"{len(found)} masks of {asked}" if found else f"no mask of {asked}")
        (run,) = found.values()
        stated = run.identity["calibration"]["mask"]
        if stated is None:
            raise NotMeasurableError(f"the mask of {asked} is chosen on no text")
        tokens = f"{stated['blocks']} × {stated['length']}"
        return Chosen(Mask.from_json(run.record["mask"]), tokens, str(stated["fingerprint"]))

    def stored_bytes(self, arm: Arm) -> int:
        """What an arm's checkpoint holds."""
        return int(self.find(arm).record["storage"]["total"])

    def part(self, arm: Arm, name: str) -> Mapping[str, Any]:
        """A part of an arm's record that only some runs have, such as `fit`."""
        stated: Mapping[str, Any] | None = self.find(arm).record.get(name)
        if stated is None:
            raise NotMeasurableError(f"no {name} in the run of {arm}")
        return stated

    def routing(self, arm: Arm) -> Mapping[str, Any]:
        """What the routers of an arm's run did."""
        routing: Mapping[str, Any] = self.find(arm).record["routing"]
        return routing


def _chose(run: Observed, arm: Arm) -> bool:
    """Whether the run's mask was chosen by the arm's criterion on its draw; a criterion without statistics has none."""
    return not run.given_mask and run.arm["mask"] == arm.criterion and run.draw("mask") in (arm.mask, None)


def _only(found: Sequence[Observed], arm: Arm) -> Observed:
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotMeasurableError(f"no run of {arm}")
    fields = sorted(found[0].identity)
    differing = [field for field in fields if len({canonical_json(run.identity[field]) for run in found}) > 1]
    raise NotMeasurableError(f"{len(found)} runs of {arm}, which differ in {', '.join(differing)}")


def trained_scale(arm: Mapping[str, Any]) -> str:
    """The scale that the arm's router was trained with, from what its record says of the router."""
    words = str(arm["convention"]).split(", ")
    for word, scale in (("no renorm", "keep"), ("renorm", "renorm")):
        if word in words:
            return scale
    raise UsageError(
        f"unknown router convention {arm['convention']!r}", where=str(arm["model"]), expected="renorm or no renorm"
    )


def gather(records: Path) -> Evidence:
    """Read every whole run under a folder; items are scored at once and let go.

    Raises:
        UsageError: if there is no such folder.
    """
    listing = runs_under(records)
    left_out = [LeftOut(one.path.relative_to(records), one.reason) for one in listing.left_out]
    seen: dict[str, Path] = {}
    runs: list[Observed] = []
    for path in listing.runs:
        place = path.relative_to(records)
        try:
            run = read_run(path)
        except (PrerequisiteError, UsageError) as error:
            left_out.append(LeftOut(place, error.what))
            continue
        identifier = run.record["run_id"]
        first = seen.setdefault(identifier, place)
        if reason := f"the same run as {first}" if first != place else _unfit(run):
            left_out.append(LeftOut(place, reason))
        else:
            runs.append(Observed(run.record, _scores(run) if _asked_for(run) else {}))
    return Evidence(runs, sorted(left_out), len(runs))


def _unfit(run: Run) -> str:
    """Why a whole run is no evidence, or nothing."""
    if run.record["status"] != "complete":
        return f"partial: made with a limit of {run.record['identity']['limit']} items"
    arm = run.record["arm"]
    if arm["scale"] in _RESOLVED and (arm["resolved_scale"] == trained_scale(arm)) is not _RESOLVED[arm["scale"]]:
        return f"{arm['scale']} scale resolved to {arm['resolved_scale']}, on a router with {arm['convention']}"
    failed = [str(entry["check"]) for entry in run.record["integrity"] if entry["status"] == "fail"]
    return f"failed: {', '.join(failed)}" if failed else ""


def _asked_for(run: Run) -> bool:
    """Whether some table can ask for the run's scores; all others are spared the resampling."""
    observed = Observed(run.record, {})
    return bool(observed.arm["dense"]) or observed.operator in _READ


def _scores(run: Run) -> dict[str, Score]:
    names = set(run.record["headline"])
    return {suite.name: _score(run, suite) for suite in SUITES if suite.name in names}


def _score(run: Run, suite: Suite) -> Score:
    wanted = headline_cells(run.record["headline"], suite.name)
    rows: dict[Cell, ItemTable] = {}
    for name, task, filter_name, metric in run.items.cells():
        cell = (task, filter_name, published(metric))
        if name == suite.name and cell in wanted:
            rows[cell] = paired_order(run.items.rows(name, task, filter_name, metric))
    mean = suite_mean({cell: cell_sampled(own) for cell, own in rows.items()}, wanted, suite.name)
    return Score(_in_units(mean, wanted, suite), _pairing(run, suite, [rows[cell] for cell in wanted]), _chance(rows))


def _in_units(mean: Sampled, wanted: Sequence[Cell], suite: Suite) -> Sampled:
    """Percent, or ln perplexity."""
    metrics = {cell[2] for cell in wanted}
    if (all(map(is_loss, metrics)) and suite.better < 0) or (metrics <= PERCENT and suite.better > 0):
        return in_units(mean, metrics)
    raise UsageError(f"{suite.name} is scored by {', '.join(sorted(metrics))}", expected=suite.title)


def _pairing(run: Run, suite: Suite, rows: Sequence[ItemTable]) -> dict[str, str]:
    """What two runs must share: how they were executed and scored, and which prompts, in the order of the items."""
    identity = run.record["identity"]
    items = hashlib.sha256()
    for own in rows:
        items.update(own.doc_hash.astype("<u8").tobytes() + own.prompt_hash.astype("<u8").tobytes())
    return {
        "engine": str(identity["engine"]),
        "weights": str(identity["model"]["weights_sha256"]),
        "tokenizer": str(identity["model"]["tokenizer_sha256"]),
        **{field: str(identity[field]) for field in ("dtype", "device", "experts_implementation", "batch_tokens")},
        "suite": canonical_json([identity["suites"].get(suite.name), run.record["headline"][suite.name]]),
        "items": items.hexdigest(),
    }


def _chance(rows: Mapping[Cell, ItemTable]) -> float | None:
    """What uniform guessing scores, in percent: the mean over tasks of one over the number of choices of each item."""
    tasks = [[_choices(str(detail)) for detail in own.detail] for own in rows.values()]
    if not all(all(task) for task in tasks):
        return None
    return 100.0 * float(np.mean([np.mean([1.0 / count for count in task]) for task in tasks]))


def _choices(detail: str) -> int:
    """How many choices an item had; 0 if it was none between choices."""
    stated = json.loads(detail)
    scores = stated.get("loglikelihoods") if isinstance(stated, dict) else None
    return len(scores) if isinstance(scores, list) else 0
