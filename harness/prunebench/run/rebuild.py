"""A recorded run's plan, made again and proven to be the recorded one.

Records name every stored tensor by its digest, but do not hold it. What a run needs to be made again stands in its
identity, so its operator is asked once more, on the recorded mask, and the answer must have the recorded digests. A
quantized run's integers are made again in the same way, and held to their digest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prunebench.errors import IntegrityError, PrerequisiteError, UsageError
from prunebench.loader import available, load_method_class
from prunebench.plan import Plan
from prunebench.quantize import QuantizedModel
from prunebench.record import Run
from prunebench.run.arm import PreparedArm, prepare
from prunebench.run.reproduce import plan_request_of
from prunebench.run.session import CACHE, Progress, Session
from prunebench.run.spec import FIT_FIELDS, ArmSpec

__all__ = ["rebuild", "spec_of"]

# What decides about a plan. The rest of an identity says what it was asked.
_SAME = ("model", "operator", "mask", "calibration", "dtype", "device", "experts_implementation", "batch_tokens")
_TEXT = ("text", "blocks", "length", "draw")
_OPTIONAL = ("groups", "operator_layers", "quantize")


def spec_of(run: Run, *, model: str | None = None, operator: str | None = None) -> ArmSpec:
    """A request for the run's plan and integers: its recorded mask, with its operator and setting as recorded.

    Args:
        run: a run that is pruned, quantized or both.
        model: where the model is, if it was a folder; a record has only the folder's name.
        operator: where the operator's file is, if it is no shipped one.

    Raises:
        UsageError: a run that is neither.
        PrerequisiteError: an operator that is not shipped, and not given.
    """
    identity = run.record["identity"]
    # Nothing is evaluated; this suite has its data with it.
    request = replace(plan_request_of(run, model=model), suites=("perplexity",))
    if run.record["mask"] is None:
        if "quantize" not in identity:
            raise UsageError(
                "the run is dense", where=run.name, expected="a pruned or quantized run", fix="use the model itself"
            )
        return request
    fitted = run.calibration("fit")
    text = {} if fitted is None else {name: fitted[name] for name in _TEXT}
    # The request is of the fit's text, so the quantizer's is stated whether or not it was the mask's.
    seen = identity["quantize"]["calibration"] if "quantize" in identity else {}
    quant = {f"quant_{name}": seen[name] for name in _TEXT if seen}
    unset = dict.fromkeys(("method", "ratio", "keep", "protect", "spare", *FIT_FIELDS))
    return replace(
        request,
        **{**unset, **text, **quant},
        parameters=(),
        scope=ArmSpec.scope,
        mask=str(run.path),
        operator=operator or _shipped(identity["operator"]["name"], run),
    )


def rebuild(
    run: Run,
    *,
    model: str | None = None,
    operator: str | None = None,
    check: Callable[[PreparedArm], None] | None = None,
    progress: Progress | None = None,
) -> tuple[PreparedArm, Plan | None, QuantizedModel | None]:
    """The run's arm; its plan, which has the recorded mask and tensors, if it is pruned; its integers, if it has any.

    Score and gradient passes that the run's grid has left beside its records are used; others are made again.

    Args:
        run: a run that is pruned, quantized or both.
        model: as for `spec_of`.
        operator: as for `spec_of`.
        check: is shown the arm before anything is computed.
        progress: called with (what, done, total).

    Raises:
        UsageError, PrerequisiteError: as `spec_of`, or model or operator are not those of the run.
        IntegrityError: the operator answers with other tensors than it did, or the quantizer with other integers.
    """
    arm = prepare(spec_of(run, model=model, operator=operator))
    _check_same(run, arm)
    if check is not None:
        check(arm)
    records = run.path.resolve().parent.parent
    with tempfile.TemporaryDirectory() as scratch:
        session = Session(records if (records / CACHE).is_dir() else Path(scratch), progress=progress)
        plan = session.plan(arm)
        if plan is not None:
            _check_answer(run, "operator", "tensors", run.record.get("tensors", {}), plan.manifest())
            _check_answer(run, "operator", "edits", run.record.get("edits", {}), plan.edit_manifest())
        quantized = session.quantized(arm, plan)
    if quantized is not None:
        _check_answer(run, "quantizer", "integers", run.record["quantization"]["sha256"], quantized.digest())
    return arm, plan, quantized


def _check_answer(run: Run, who: str, name: str, recorded: object, made: object) -> None:
    if made != recorded:
        raise IntegrityError(
            f"the {who} answers with other {name} than the record names",
            where=run.name,
            expected="the same bytes, which a processor or a library of another version may round otherwise",
            fix="run the arm anew here, and export that run",
        )


def _shipped(name: str, run: Run) -> str:
    """The shipped file of a method with this name."""
    for stem in available("methods"):
        if stem == name or load_method_class(stem).name == name:
            return stem
    raise PrerequisiteError(
        f"operator {name} is not shipped with prunebench", where=run.name, fix="give its file: --operator FILE"
    )


def _check_same(run: Run, arm: PreparedArm) -> None:
    """Raise unless model, operator and calibration are those of the run, as far as they are known by now."""
    identity = run.record["identity"]
    wanted: dict[str, Any] = {name: identity.get(name) for name in (*_SAME, *_OPTIONAL)}
    found: dict[str, Any] = {name: arm.known.get(name) for name in (*_SAME, *_OPTIONAL)}
    # Whatever the mask was chosen by, here it is given.
    wanted["mask"], found["mask"] = ((one["mask"] or {}).get("digest") for one in (wanted, found))
    wanted["model"], found["model"] = _without_name(wanted["model"]), _without_name(found["model"])
    wanted["calibration"], found["calibration"] = ((one["calibration"] or {}).get("fit") for one in (wanted, found))
    wanted["calibration"] = _known_of(wanted["calibration"], found["calibration"])
    if wanted["quantize"] is not None and found["quantize"] is not None:
        known = _known_of(wanted["quantize"]["calibration"], found["quantize"]["calibration"])
        wanted["quantize"] = {**wanted["quantize"], "calibration": known}
    for name, value in wanted.items():
        if found[name] != value:
            raise PrerequisiteError(
                f"the {name.replace('_', ' ')} is not that of the run ({_difference(value, found[name])})",
                where=run.name,
                fix=_HINTS.get(name, "run the arm anew"),
            )


_HINTS = {
    "model": "give the model's folder: --model FOLDER",
    "operator": "give the file as it was: --operator FILE; or run the arm anew",
}


def _known_of(wanted: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What a record says of a calibration, as far as it is known of one whose text was not read yet."""
    if wanted is None or found is None or "fingerprint" in found:
        return wanted
    return {name: wanted[name] for name in found}


def _without_name(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name != "name"}


def _difference(wanted: Any, found: Any) -> str:
    """The first field that differs, in a few words."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        names = [name for name in wanted if found.get(name) != wanted[name]]
        return f"{names[0]} is {found.get(names[0])!r}, not {wanted[names[0]]!r}" if names else "other fields"
    return f"{found!r}, not {wanted!r}"
