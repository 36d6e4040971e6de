"""Making a recorded run again: its request is read back from its identity, and refused if it is another run today."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prunebench.analysis.reproduction import Reproduction, reproduction
from prunebench.errors import UsageError
from prunebench.loader import load_suite
from prunebench.mask import canonical_json
from prunebench.record import Run, read_run
from prunebench.run.arm import matches, prepare
from prunebench.run.session import Progress, Session
from prunebench.run.spec import ArmSpec

__all__ = ["plan_request_of", "reproduce", "request_of"]


def reproduce(
    folder: Path,
    out: Path,
    *,
    model: str | None = None,
    suites: tuple[str, ...] = (),
    device: str | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Make a run again and compare.

    Args:
        folder: the run.
        out: records folder that gets the new one; not the run's own.
        model: where its model is now, if not under the name in the record.
        suites: `NAME=SOURCE`, or paths, of suites that are not found by their name.
        device: such as cuda:1, of the kind that the run had.
        progress: called with (what, done, total).

    Raises:
        UsageError: if what would run is not the same run: another method file, model, suite or text.
    """
    original = read_run(folder)
    spec = request_of(original, model=model, suites=suites, device=device)
    if (out / spec.folder).resolve() == folder.resolve():
        raise UsageError("the run would be compared with itself", where=str(folder), fix="give another --out")
    arm = prepare(spec)
    identity = original.record["identity"]
    if not matches(identity, arm.known):
        raise UsageError(
            f"it would be another run today: {', '.join(_differences(identity, arm.known))}",
            where=original.name,
            expected="the files, model and suites that it was made with",
        )
    return reproduction(original, Session(out, progress=progress).execute(arm).run)


def request_of(
    run: Run, *, model: str | None = None, suites: tuple[str, ...] = (), device: str | None = None
) -> ArmSpec:
    """The request that a run answers."""
    identity = run.record["identity"]
    named = {one.partition("=")[0].rpartition("/")[2].removesuffix(".py"): one for one in suites}
    asked = {name: named.get(name, name) for name in identity["suites"]}
    return replace(
        plan_request_of(run, model=model, device=device),
        suites=tuple(asked.values()),
        limit=identity["limit"],
        unsafe_local="executor" in identity,
        truncate=identity.get("truncate", False),
        chat_template=identity.get("chat_template", False),
        sampling=",".join(f"{key}={value}" for key, value in identity.get("sampling", {}).items()) or None,
        scorer=_scorer(asked, identity.get("scorer", {})),
    )


def plan_request_of(run: Run, *, model: str | None = None, device: str | None = None) -> ArmSpec:
    """The request for a run's model; nothing is said of what it was asked."""
    identity = run.record["identity"]
    method, operator, budget = (identity[key] or {} for key in ("method", "operator", "budget"))
    given = (identity["mask"] or {}).get("source") == "file"
    stated = identity["calibration"] or {}
    chosen, fitted = stated.get("mask"), stated.get("fit")
    sizes = _sizes(chosen or fitted or {})
    fit = {f"fit_{key}": value for key, value in _sizes(fitted).items()} if chosen and fitted else {}
    quantized = identity.get("quantize")
    quant = {} if quantized is None else {f"quant_{key}": one for key, one in _sizes(quantized["calibration"]).items()}
    where = str(identity["device"])
    protected = budget.get("protected")
    guard: dict[str, Any] = (
        {} if protected is None else {"protect" if budget.get("make_up", True) else "spare": _protected(protected)}
    )
    return ArmSpec(
        model=model or identity["model"]["name"],
        method=method.get("name"),
        parameters=() if given else _parameters(method),
        mask=str(run.path) if given else None,
        operator=operator.get("name"),
        operator_parameters=_parameters(operator),
        operator_layers=",".join(map(str, (identity.get("operator_layers") or {}).get("only", []))) or None,
        scale=operator.get("scale"),
        groups=identity.get("groups", ArmSpec.groups),
        ratio=budget.get("ratio"),
        keep=budget.get("keep"),
        scope=budget.get("scope", ArmSpec.scope),
        **guard,
        **sizes,
        **fit,
        quantize=run.record["arm"].get("quantize"),
        **quant,
        seed=identity["seed"],
        device=device or ("cpu" if where.startswith("map:") else where),
        dtype=identity["dtype"],
        device_map=where.removeprefix("map:") if where.startswith("map:") else None,
        experts_implementation=identity["experts_implementation"],
        batch_tokens=identity["batch_tokens"],
    )


def _scorer(suites: Mapping[str, str], stated: Mapping[str, str]) -> str | None:
    """What a run was told, if that is not each suite's own; an identity states all but `batched`."""
    own = {name: load_suite(given).scored_by(None) for name, given in suites.items()}
    if stated == {name: scorer for name, scorer in own.items() if scorer != "batched"}:
        return None
    return next(iter(stated.values()), "batched")


def _sizes(calibration: Mapping[str, Any]) -> dict[str, Any]:
    return {key: calibration[key] for key in ("text", "blocks", "length", "draw") if key in calibration}


def _parameters(part: Mapping[str, Any]) -> tuple[str, ...]:
    """Parameters as they are typed."""
    return tuple(f"{name}={_typed(value)}" for name, value in sorted((part.get("parameters") or {}).items()))


def _typed(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(_typed, value))
    return str(value)


def _protected(stated: object) -> str:
    if isinstance(stated, Mapping):
        return ",".join(f"{layer}:{expert}" for layer, experts in stated.items() for expert in experts)
    return str(stated)


def _differences(identity: Mapping[str, Any], known: Mapping[str, Any], path: str = "") -> list[str]:
    """The fields in which a request differs from a run."""
    found = []
    for key, value in known.items():
        own = identity.get(key)
        if isinstance(value, Mapping) and isinstance(own, Mapping):
            found += _differences(own, value, f"{path}{key}.")
        elif own != value:
            found.append(f"{path}{key} was {canonical_json(own)[:40]}, is {canonical_json(value)[:40]}")
    return found
