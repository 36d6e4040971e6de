"""What one arm is: everything that can change its numbers, resolved and checked.

`prepare` checks all of it before any weight is read: names, parameters, scale, budget against the model's config. What
it returns knows the arm's identity but for the mask's digest, which is enough to recognise a finished run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from prunebench.calibration import CalibrationSpec, CalibrationTokens, Statistic
from prunebench.calibration.massive import MassiveRule
from prunebench.errors import UsageError
from prunebench.evaluate import ENGINE_VERSION
from prunebench.loader import load_method, load_method_class, load_suite, resolve_model, source_of
from prunebench.mask import Budget, GroupPolicy, LayerShape, Mask, canonical_json, model_shape_text
from prunebench.method import Method
from prunebench.moe import check_device, experts_implementation_for
from prunebench.parameters import parse_parameters
from prunebench.quantize import Setting, setting_of
from prunebench.record import RECORD_FILE, UNSAFE_LOCAL, read_run
from prunebench.routing import Convention, Scale
from prunebench.run.foreign import naming_the_file, same_torch
from prunebench.run.sources import ModelFiles
from prunebench.run.spec import DEFAULT_SUITES, QUANT_FIELDS, ArmSpec
from prunebench.sandbox import boxed
from prunebench.storage import read_headers
from prunebench.suite import SCORERS, Suite, suite_content

__all__ = [
    "PreparedArm",
    "budget_of",
    "matches",
    "prepare",
    "read_mask",
]

ELSEWHERE = "constant"
GROUP_POLICIES = ("frozen", "reselect")
EXPERTS_IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


@dataclass(frozen=True)
class PreparedArm:
    """An arm whose every name has been resolved and checked.

    Args:
        spec: as asked.
        folder: the model's files.
        shapes: of its MoE layers.
        convention: of its router.
        method: gives the mask, or None.
        mask: a given mask, or None.
        mask_name: what tables call a given mask.
        operator: gives replace and route; None if dense.
        elsewhere: the operator of the layers that `operator_layers` leaves out; None if there are none.
        scale: overriding scale, or None.
        budget: how many experts go, or None.
        protects: the rule that finds the super experts that stay; None if none are looked for.
        select_needs: statistics that the mask is chosen by; none if it is given.
        replace_needs: statistics that the operator is fitted by, and the one of the other layers.
        calibration: what the mask is chosen on; None if it is given, or chosen without statistics.
        fit: what the operator is fitted on; None if it fits nothing.
        quantize: how it is quantized, or None.
        quant: what the quantizer sees; None if there is none.
        tokens: of the calibrations of local texts; hub texts are not fetched before they are needed.
        suites: loaded.
        known: the identity as far as it is known before the mask is.
    """

    spec: ArmSpec
    folder: Path
    shapes: tuple[LayerShape, ...]
    convention: Convention
    method: Method | None
    mask: Mask | None
    mask_name: str | None
    operator: Method | None
    elsewhere: Method | None
    scale: Scale | None
    budget: Budget | None
    protects: MassiveRule | None
    select_needs: tuple[Statistic, ...]
    replace_needs: tuple[Statistic, ...]
    calibration: CalibrationSpec | None
    fit: CalibrationSpec | None
    quantize: Setting | None
    quant: CalibrationSpec | None
    tokens: Mapping[CalibrationSpec, CalibrationTokens]
    suites: tuple[Suite, ...]
    known: dict[str, Any]

    @property
    def policy(self) -> GroupPolicy:
        """Who chooses the groups of a group-limited router."""
        return "reselect" if self.spec.groups == "reselect" else "frozen"

    @property
    def method_files(self) -> frozenset[str]:
        """Paths of the files whose code the arm runs."""
        return _method_files(self.method, self.operator, self.elsewhere)


def _check_settings(spec: ArmSpec) -> None:
    """Refuse impossible settings of the machine and the evaluation."""
    check_device(spec.device, spec.dtype)
    if spec.limit is not None and spec.limit < 1:
        raise UsageError(f"limit {spec.limit} is impossible", expected="at least 1 item per task")
    if spec.batch_tokens < 1:
        raise UsageError(f"{spec.batch_tokens} tokens per forward are impossible", expected="at least 1")
    if spec.scorer not in (None, *SCORERS):
        raise UsageError(f"unknown scorer {spec.scorer!r}", expected=" or ".join(SCORERS))
    if spec.seed < 0:
        raise UsageError(f"seed {spec.seed} is impossible", expected="0 or more")
    if spec.experts_implementation not in (None, *EXPERTS_IMPLEMENTATIONS):
        raise UsageError(
            f"unknown experts implementation {spec.experts_implementation!r}",
            expected=", ".join(EXPERTS_IMPLEMENTATIONS),
        )


def prepare(spec: ArmSpec) -> PreparedArm:
    """Resolve and check an arm; reads no weights but for their digest.

    Raises:
        UsageError: whatever is wrong with the request, in one line.
        PrerequisiteError: a missing device, file or hub model.
    """
    _check_settings(spec)
    asked = tuple(dict.fromkeys((spec.calibration, spec.fit_calibration, spec.quant_calibration)))
    suites = _suites(spec.suites)
    _check_sandbox(spec, suites)
    method = _method(spec.method, spec.parameters)
    operator = _method(spec.operator, spec.operator_parameters) or method
    scale = Scale.parse(spec.scale) if spec.scale is not None else None
    budget = _budget(spec)
    _check_combination(spec, method, operator, scale)
    elsewhere = _method(ELSEWHERE, ()) if spec.only_in else None
    select_needs, replace_needs = _needs(method if spec.mask is None else None, operator, elsewhere)
    layerwise = spec.mask is None and method is not None and method.schedule != "one_shot"
    protects = _SUPER.get(spec.protect or spec.spare or "")
    calibration = spec.calibration if select_needs or layerwise or protects is not None else None
    fit = spec.fit_calibration if replace_needs or (operator is not None and operator.visits) else None
    _check_fit(spec, operator, fit)
    quantize = _quantization(spec)
    source = resolve_model(spec.model)
    files = ModelFiles.of(source)
    shapes, convention = files.peek()
    if budget is not None:
        budget.check(shapes)
        if method is not None and spec.mask is None:
            with same_torch(), naming_the_file(_method_files(method), frozenset()):
                method.check_model(shapes, convention, budget)
    mask, mask_name = read_mask(spec.mask) if spec.mask is not None else (None, None)
    if mask is not None:
        mask.check_fits(shapes, where=spec.mask or "mask")
        if not mask.pruned_count:
            raise UsageError("the mask prunes nothing", where=spec.mask or "mask", expected="at least one expert")
    _check_groups(spec, operator, convention)
    _check_layers(spec, operator, shapes)
    if scale is not None:
        scale.resolve(convention)
        _check_reference(scale, shapes, budget, mask)
    positions = files.positions()
    for one in asked:
        if one.length > positions:
            raise UsageError(
                f"calibration blocks of {one.length} tokens are longer than the model's context",
                expected=f"at most {positions} tokens per block",
            )
    read_headers(files.folder)  # whole safetensors, of which the record will state the bytes
    files.tokenizer_sha256()  # that there is a tokenizer
    tokens = {one: files.calibration_tokens(one) for one in asked if not one.text.startswith("hub:")}
    arm = PreparedArm(
        spec=spec,
        folder=files.folder,
        shapes=shapes,
        convention=convention,
        method=method,
        mask=mask,
        mask_name=mask_name,
        operator=operator,
        elsewhere=elsewhere,
        scale=scale,
        budget=budget,
        protects=protects,
        select_needs=select_needs,
        replace_needs=replace_needs,
        calibration=calibration,
        fit=fit,
        quantize=quantize,
        quant=spec.quant_calibration if quantize is not None else None,
        tokens=tokens,
        suites=suites,
        known={},
    )
    return replace(arm, known=_known(arm, source.name, files))


def _known(arm: PreparedArm, name: str, files: ModelFiles) -> dict[str, Any]:
    """The arm's identity as far as it is known before the mask is, as JSON data: tuples as lists, as a record has them.

    A field that only some arms have is there only where it is asked for, so that other arms stay who they are.
    """
    spec = arm.spec
    implementation = spec.experts_implementation or experts_implementation_for(spec.device, spec.device_map)
    known: dict[str, Any] = {
        "engine": ENGINE_VERSION,
        "model": {
            "name": name,
            "weights_sha256": files.weights_sha256(),
            "tokenizer_sha256": files.tokenizer_sha256(),
            "shape": model_shape_text(arm.shapes),
        },
        "method": _described(arm.method),
        "operator": _described(arm.operator, arm.scale),
        "budget": None if arm.budget is None else _budget_json(arm.budget, spec),
        "calibration": None if arm.operator is None else calibrations_json(arm.calibration, arm.fit, arm.tokens),
        "suites": {suite.name: {"version": suite.version, "content": suite_content(suite)} for suite in arm.suites},
        "dtype": spec.dtype,
        "device": f"map:{spec.device_map}" if spec.device_map else spec.device.partition(":")[0],
        "experts_implementation": implementation,
        "batch_tokens": spec.batch_tokens,
        "limit": spec.limit,
        "seed": spec.seed,
    }
    if spec.groups != ArmSpec.groups:
        known["groups"] = spec.groups
    if arm.quantize is not None:
        known["quantize"] = quantization_json(arm, arm.tokens)
    if spec.unsafe_local:
        # Stated only where it departs: a sandbox is what every other record's programs ran in, or would have.
        known["executor"] = UNSAFE_LOCAL
    if arm.elsewhere is not None:
        known["operator_layers"] = {"only": spec.only_in, "elsewhere": _described(arm.elsewhere)}
    known |= {name: True for name in ("truncate", "chat_template") if getattr(spec, name)}
    scorers = {suite.name: suite.scored_by(spec.scorer) for suite in arm.suites}
    if departing := {name: scorer for name, scorer in scorers.items() if scorer != "batched"}:
        known["scorer"] = departing
    if spec.drawn is not None:
        known["sampling"] = spec.drawn.to_json()
    if arm.mask is not None:
        known["mask"] = {"digest": arm.mask.digest, "source": "file"}
    elif arm.operator is None:
        known["mask"] = None
    plain: dict[str, Any] = json.loads(canonical_json(known))
    return plain


def _check_sandbox(spec: ArmSpec, suites: tuple[Suite, ...]) -> None:
    """Refuse, before any weight is read, to run programs where there is no sandbox, unless that was asked for."""
    running = [suite.name for suite in suites if suite.runs_programs]
    if spec.unsafe_local and not running:
        raise UsageError("no suite runs programs", where=", ".join(spec.suites), fix="leave --unsafe-local out")
    if running and not spec.unsafe_local:
        boxed()


def calibrations_json(
    calibration: CalibrationSpec | None,
    fit: CalibrationSpec | None,
    tokens: Mapping[CalibrationSpec, CalibrationTokens],
) -> dict[str, Any]:
    """What an identity says of calibration: the mask's and the fit's, each as far as its tokens are known."""
    return {
        name: None if one is None else tokens[one].to_json() if one in tokens else vars(one)
        for name, one in (("mask", calibration), ("fit", fit))
    }


def quantization_json(arm: PreparedArm, tokens: Mapping[CalibrationSpec, CalibrationTokens]) -> dict[str, Any]:
    """What an identity says of the quantization: the setting, and what the quantizer sees, as far as it is known."""
    assert arm.quantize is not None
    assert arm.quant is not None
    one = arm.quant
    return {**arm.quantize.to_json(), "calibration": tokens[one].to_json() if one in tokens else vars(one)}


def _quantization(spec: ArmSpec) -> Setting | None:
    """The setting, if one is asked for; a calibration for it belongs to one."""
    if spec.quantize is not None:
        return setting_of(spec.quantize)
    if stated := [name for name in QUANT_FIELDS if getattr(spec, name) is not None]:
        raise UsageError(
            f"{stated[0]} without a quantization",
            expected="a setting such as w4",
            fix="give --quantize, or leave it out",
        )
    return None


def _check_groups(spec: ArmSpec, operator: Method | None, convention: Convention) -> None:
    """Refuse an unknown policy for router groups, and one that would change nothing."""
    if spec.groups not in GROUP_POLICIES:
        raise UsageError(f"unknown policy {spec.groups!r} for router groups", expected=" or ".join(GROUP_POLICIES))
    if spec.groups == ArmSpec.groups:
        return
    if convention.groups is None:
        raise UsageError(
            f"the router has no groups to choose anew ({convention.describe()})",
            where=spec.model,
            fix="leave --groups out",
        )
    if operator is None or operator.keeps_slots():
        name = operator.name if operator is not None else "the dense model"
        raise UsageError(f"{name} refills no slots, so its groups stay", fix="leave --groups out")


def _check_layers(spec: ArmSpec, operator: Method | None, shapes: tuple[LayerShape, ...]) -> None:
    """Refuse layers that do not exist, and a choice of layers that chooses nothing."""
    if not spec.only_in:
        return
    if operator is None:
        raise UsageError("the dense model has no operator", fix="leave --operator-layers out")
    if operator.name == ELSEWHERE:
        raise UsageError(f"{ELSEWHERE} answers in the other layers too", fix="leave --operator-layers out")
    indices = {shape.index for shape in shapes}
    if unknown := [index for index in spec.only_in if index not in indices]:
        raise UsageError(
            f"operator layer {unknown[0]} is no MoE layer",
            where=spec.model,
            expected=", ".join(str(index) for index in sorted(indices)),
        )


def _check_fit(spec: ArmSpec, operator: Method | None, fit: CalibrationSpec | None) -> None:
    """Refuse a calibration of the fit where it would change nothing, or is said twice."""
    if spec.fit_calibration == spec.calibration:
        return
    if fit is None:
        name = operator.name if operator is not None else "the dense model"
        raise UsageError(
            f"{name} fits nothing", expected="an operator such as constant", fix="leave the fit's calibration out"
        )
    if spec.mask is not None:
        raise UsageError(
            "the mask is given, so text and draw are the fit's already",
            fix="give --text, --blocks, --length and --draw without fit",
        )


def read_mask(text: str) -> tuple[Mask, str]:
    """A mask from its file or from a run's folder, and its name: the file's, or the criterion of that run."""
    path = Path(text)
    if not path.is_dir():
        return Mask.load(path), path.stem
    if not (path / RECORD_FILE).is_file():
        raise UsageError("the folder holds no run", where=text, expected=f"a mask file, or a folder with {RECORD_FILE}")
    record = read_run(path).record
    if record["mask"] is None:
        raise UsageError("the run has no mask", where=text, expected="a pruned run, not a dense one")
    return Mask.from_json(record["mask"], where=text), str(record["arm"]["mask"])


def _check_reference(scale: Scale, shapes: tuple[LayerShape, ...], budget: Budget | None, mask: Mask | None) -> None:
    """Refuse a reference set that is larger than the survivors of a layer."""
    for shape in shapes:
        gone = len(mask.pruned_of(shape.index)) if mask is not None else budget.most_pruned(shape) if budget else 0
        scale.check_possible(shape.experts - gone, where=f"layer {shape.index}")


def _suites(names: tuple[str, ...]) -> tuple[Suite, ...]:
    suites = tuple(load_suite(name) for name in names)
    if not suites:
        raise UsageError("no suite to run", expected=", ".join(DEFAULT_SUITES), fix="give --suite")
    for number, suite in enumerate(suites):
        if suite.name in {other.name for other in suites[:number]}:
            raise UsageError(f"suite {suite.name} is named twice", expected="each suite once")
    return suites


def _method(name: str | None, parameters: tuple[str, ...]) -> Method | None:
    if name is None:
        return None
    with same_torch():
        return load_method(name, parse_parameters(load_method_class(name), parameters))


def _method_files(*methods: Method | None) -> frozenset[str]:
    return frozenset(str(source_of(type(method)).path) for method in methods if method is not None)


Needs: TypeAlias = tuple[Statistic, ...]


def _needs(selects: Method | None, *operators: Method | None) -> tuple[Needs, Needs]:
    """The statistics that a mask is chosen by, and those that operators are fitted by, each once."""
    with same_torch(), naming_the_file(_method_files(selects, *operators), frozenset()):
        choosing = selects.select_needs() if selects is not None else ()
        fitting = [one for operator in operators if operator is not None for one in operator.replace_needs()]
        return tuple(choosing), tuple({one.name: one for one in reversed(fitting)}.values())[::-1]


def budget_of(ratio: str | None, keep: int | None, **more: Any) -> Budget | None:
    """The budget of a ratio as typed or a number of experts kept, if either is given."""
    if ratio is not None and keep is not None:
        raise UsageError("both ratio and keep are given", expected="one of them")
    if ratio is not None:
        return Budget.of_ratio(ratio, **more)
    return Budget(keep=keep, **more) if keep is not None else None


_SUPER: dict[str, MassiveRule] = {"super": "absolute", "super-relative": "relative"}


def _budget(spec: ArmSpec) -> Budget | None:
    if spec.ratio is None and spec.keep is None:
        for name in ("scope", "protect", "spare"):
            if getattr(spec, name) != getattr(ArmSpec, name):
                raise UsageError(f"{name} belongs to no budget", fix="give --ratio or --keep, or leave it out")
        return None
    if spec.protect and spec.spare:
        raise UsageError("both protect and spare are given", expected="one of them")
    more: dict[str, Any] = {
        "scope": spec.scope,
        "protected": _pairs(spec.protect or spec.spare),
        "make_up": spec.spare is None,
    }
    return budget_of(spec.ratio, spec.keep, **more)


def _pairs(text: str | None) -> dict[int, frozenset[int]]:
    """Experts as typed, `3:54,4:38`; none where they are looked for in the model."""
    if text is None or text in _SUPER:
        return {}
    pairs: dict[int, set[int]] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\d+):(\d+)", part.strip())
        if match is None:
            raise UsageError(
                f"protected expert {part!r}", expected=f"LAYER:EXPERT, such as 3:54, or {' or '.join(_SUPER)}"
            )
        pairs.setdefault(int(match[1]), set()).add(int(match[2]))
    return {index: frozenset(ids) for index, ids in pairs.items()}


def _budget_json(budget: Budget, spec: ArmSpec) -> dict[str, Any]:
    """The budget as it goes into an identity: super experts by the rule that finds them."""
    asked = spec.protect or spec.spare
    if asked not in _SUPER:
        return budget.to_json()
    return {**budget.to_json(), "protected": asked, **({} if budget.make_up else {"make_up": False})}


def _check_combination(spec: ArmSpec, method: Method | None, operator: Method | None, scale: Scale | None) -> None:
    """Refuse requests whose parts do not fit together."""
    budget = spec.ratio is not None or spec.keep is not None
    for word, parameters, owner in (
        ("parameter", spec.parameters, spec.method),
        ("operator parameter", spec.operator_parameters, spec.operator),
    ):
        if parameters and owner is None:
            wanted = "--method" if word == "parameter" else "--operator"
            raise UsageError(f"{word} {parameters[0]!r} belongs to nothing", fix=f"give {wanted}, or leave it out")
    if spec.dense and (operator is not None or scale is not None or budget):
        raise UsageError("nothing says which experts go", fix="give --method or --mask, or leave the rest out (dense)")
    if spec.mask is not None and operator is None:
        raise UsageError("the mask has no operator", fix="give --operator, such as constant or reroute")
    if spec.mask is not None and budget:
        raise UsageError("a mask file already says how many experts go", fix="leave --ratio and --keep out")
    if spec.mask is None and method is not None:
        if not method.selects():
            raise UsageError(
                f"{method.name} selects no experts",
                fix=f"give a criterion as --method and {method.name} as --operator, or give --mask FILE",
            )
        if not budget:
            raise UsageError("nothing says how many experts go", fix="give --ratio, such as 0.5, or --keep")
        if method.schedule != "one_shot" and spec.scope == "global":
            raise UsageError(
                f"{method.name} sees one layer at a time, so no budget can be global", fix="leave --scope global out"
            )
    if scale is not None and operator is not None and operator.keeps_slots():
        raise UsageError(
            f"scale {scale} has no meaning for {operator.name}",
            expected="an operator that refills slots, such as reroute",
            fix="leave --scale out, or give --operator reroute",
        )


def _described(method: Method | None, scale: Scale | None = None) -> dict[str, Any] | None:
    if method is None:
        return None
    described: dict[str, Any] = {
        "name": method.name,
        "version": method.version,
        "file_sha256": source_of(type(method)).sha256,
        "parameters": method.parameters(),
    }
    return {**described, "scale": str(scale) if scale is not None else None}


def matches(identity: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Whether a record's identity agrees with everything that is known of an arm."""
    for key, value in known.items():
        if key not in identity:
            return False
        if isinstance(value, Mapping) and isinstance(identity[key], Mapping):
            if not matches(identity[key], value):
                return False
        elif identity[key] != value:
            return False
    return True
