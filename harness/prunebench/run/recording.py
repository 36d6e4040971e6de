"""What a record says of an arm: its identity, its numbers, its proofs, its bytes and what its routers did."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import prunebench
from prunebench.analysis import metrics_from_items
from prunebench.calibration import CalibrationSpec, CalibrationTokens
from prunebench.fit import remap_summary
from prunebench.integrity import Check
from prunebench.loader import content_root
from prunebench.mask import Mask
from prunebench.plan import FittedPlan, Plan
from prunebench.quantize import QuantizedModel
from prunebench.record import SCHEMA, Item, items_to_table, run_id, sealed
from prunebench.replacement import AffineSurvivor, Constant, Survivor, Zero
from prunebench.routing import Convention, Scale
from prunebench.run.arm import PreparedArm, calibrations_json, quantization_json
from prunebench.storage import Tensor, account, part_of, pruned_bytes, read_headers, stored_bytes, survey, tied_names

__all__ = ["git_state", "provenance", "record_of", "routing_of", "storage_of"]

SURVIVORS = (Survivor.__name__, AffineSurvivor.__name__)
PACKAGES = ("torch", "transformers", "lm-eval", "numpy", "tokenizers", "safetensors")


def record_of(
    arm: PreparedArm,
    plan: Plan | None,
    *,
    tokens: Mapping[CalibrationSpec, CalibrationTokens],
    mask_source: str | None,
    items: Sequence[Item],
    checks: Sequence[Check],
    routing: dict[str, Any],
    fitted: FittedPlan | None = None,
    protocol: Mapping[str, Any] | None = None,
    quantized: QuantizedModel | None = None,
) -> dict[str, Any]:
    """The sealed record of an arm but for its volatile fields; `fit`, `selection`, `quantization` if there was one."""
    spec = arm.spec
    identity = {
        **arm.known,
        "calibration": None if plan is None else calibrations_json(arm.calibration, arm.fit, tokens),
        "mask": None if plan is None else {"digest": plan.mask.digest, "source": mask_source},
    }
    if arm.quantize is not None:
        identity["quantize"] = quantization_json(arm, tokens)
    headline = {suite.name: [list(cell) for cell in suite.cells] for suite in arm.suites}
    odd = oddities(items)
    table = items_to_table(items)
    record = {
        "schema": SCHEMA,
        "status": "complete" if spec.limit is None else "partial",
        "run_id": run_id(identity),
        "identity": identity,
        "arm": {
            "model": arm.known["model"]["name"],
            "convention": arm.convention.describe(),
            "mask": None if plan is None else arm.mask_name or mask_source,
            "operator": _operator_name(arm, plan),
            "scale": _asked_scale(plan),
            "resolved_scale": ", ".join(plan.scales) or None if plan is not None else None,
            "ratio": None if plan is None else _pruned_share(plan),
            "keep": spec.keep,
            "dense": plan is None,
            **({} if arm.quantize is None else {"quantize": arm.quantize.text}),
        },
        "metrics": metrics_from_items(table, headline),
        "headline": headline,
        "integrity": [check.to_json() for check in checks],
        "storage": storage_of(arm.folder, plan, arm.convention, quantized),
        "routing": routing,
        "mask": None if plan is None else plan.mask.to_json(),
        "tensors": {} if plan is None else plan.manifest(),
        "provenance": provenance(),
        **({} if protocol is None and not odd else {"evaluation": {**(protocol or {}), "items": odd}}),
        **({} if fitted is None else {"fit": fitted.to_json()}),
        **({} if quantized is None else {"quantization": quantized.to_json()}),
        **({} if plan is None or not plan.edits else {"edits": plan.edit_manifest()}),
        **({} if plan is None else _remap(plan, fitted)),
        **({} if plan is None or plan.mask.report is None else {"selection": dict(plan.mask.report)}),
    }
    return sealed(record, table)


def oddities(items: Sequence[Item]) -> dict[str, dict[str, int]]:
    """By suite, how many questions were invalid, tied, tokenised across the join, or cut, where any were."""
    found: dict[str, dict[str, set[tuple[str, str]]]] = {}
    for item in items:
        detail = json.loads(item.detail)
        question = (item.task, item.item)
        for what, is_so in (
            ("invalid", _is_invalid(item, detail)),
            ("ties", "tie" in detail),
            ("spans", "spans" in detail),
            ("truncated", "dropped" in detail),
        ):
            if is_so:
                found.setdefault(item.suite, {}).setdefault(what, set()).add(question)
    return {suite: {what: len(which) for what, which in kinds.items()} for suite, kinds in found.items()}


def _is_invalid(item: Item, detail: Mapping[str, Any]) -> bool:
    """Whether the model's logits were no numbers, in the words of any suite."""
    return item.state == "invalid" or detail.get("finish") == "invalid" or None in detail.get("loglikelihoods", ())


def _remap(plan: Plan, fitted: FittedPlan | None) -> dict[str, Any]:
    """Which survivor answers for which pruned expert, if any does (Table H.8)."""
    targets = {
        layer.index: {e: fill.config["survivor"] for e, fill in layer.fills.items() if fill.kind in SURVIVORS}
        for layer in plan.layers
    }
    if not any(targets.values()):
        return {}
    coverage = fitted.coverage.values() if fitted is not None else ()
    outcomes = [row["outcome"] for rows in coverage for row in rows.values()]
    layers = {str(index): {str(e): j for e, j in layer.items()} for index, layer in targets.items() if layer}
    return {"remap": {**remap_summary(targets, outcomes).to_json(), "layers": layers}}


def _operator_name(arm: PreparedArm, plan: Plan | None) -> str | None:
    """What the arm does with pruned slots, in the house's words where they apply; else the file's name."""
    if plan is None:
        return None
    assert arm.operator is not None
    if plan.fills_nothing and not arm.operator.replaces():
        return "reroute"
    own = {Constant.__name__: "constant", Zero.__name__: "zero"}
    fills = [fill for layer in plan.layers for fill in layer.fills.values()]
    words = {own.get(fill.kind) if fill.file is None else None for fill in fills}
    word = words.pop() if plan.keeps_slots and len(words) == 1 else None
    return word or arm.operator.name


def _asked_scale(plan: Plan | None) -> str | None:
    if plan is None or not plan.scales:
        return None
    return ", ".join(sorted({layer.asked for layer in plan.layers}))


def _pruned_share(plan: Plan) -> float:
    return plan.mask.pruned_count / sum(layer.experts for layer in plan.mask.layers)


def storage_of(
    folder: Path, plan: Plan | None, convention: Convention, quantized: QuantizedModel | None = None
) -> dict[str, Any]:
    """Bytes of the arm's checkpoint.

    Fills are stored in the dtype of the experts; the pruned experts' router rows go where `install.shrink` lets them,
    which is where nothing needs them (2610.41366 §3).
    """
    headers = read_headers(folder)
    if plan is None and quantized is not None:
        return _quantized_storage(folder, headers, None, quantized, fill_bytes=0, keep_router_rows=True)
    if plan is None:
        return {name: value for name, value in stored_bytes(headers).items() if name in ("total", "parts")}
    expert = next(tensor for name, tensor in headers.items() if part_of(name) == "experts")
    value_bytes = expert.bytes // max(1, int(np.prod(expert.shape)))
    left = min(len(layer.survivors) for layer in plan.mask.layers)
    rows_go = plan.fills_nothing and convention.groups is None
    rows_go = rows_go and all(convention.loses_rows(Scale.parse(scale).kind, left) for scale in plan.scales)
    fill_bytes = plan.values_stored * value_bytes
    if quantized is not None:
        return _quantized_storage(
            folder, headers, plan.mask, quantized, fill_bytes=fill_bytes, keep_router_rows=not rows_go
        )
    return pruned_bytes(headers, plan.mask, fill_values_bytes=fill_bytes, keep_router_rows=not rows_go)


def _quantized_storage(
    folder: Path,
    headers: Mapping[str, Tensor],
    mask: Mask | None,
    quantized: QuantizedModel,
    *,
    fill_bytes: int,
    keep_router_rows: bool,
) -> dict[str, Any]:
    """Bytes of a quantized arm, by `storage`'s formulas."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return account(
        survey(headers, tied=tied_names(config), where=str(folder)),
        quantized.setting.bits,
        pruned={} if mask is None else {layer.index: len(layer.pruned) for layer in mask.layers},
        fill_bytes=fill_bytes,
        keep_router_rows=keep_router_rows,
        allocation=quantized.allocation,
    ).to_json()


def routing_of(
    counters: dict[int, dict[str, float]], plan: Plan | None, convention: Convention
) -> dict[str, dict[str, float]]:
    """Per layer: how often a slot was asked of a pruned expert, and how far the two scales are apart (2610.41366 §5.3).

    `displaced_share` is the share of token-layer calls whose unpruned top-k held an unroutable expert; over those,
    `keep_over_renorm` is the mean ratio of the gates' totals under the two scales and `above_one_share` how often it
    exceeds 1. A router for which keep is not defined has no such ratio.
    """
    if plan is None:
        return {}
    result = {}
    for index, counted in counters.items():
        displaced = counted["displaced"]
        layer = result[str(index)] = {
            "calls": counted["calls"],
            "filled_share": counted["asked"] / counted["slots"] if counted["slots"] else 0.0,
            "displaced_share": displaced / counted["calls"] if counted["calls"] else 0.0,
        }
        if "keep" in convention.scales:
            layer["keep_over_renorm"] = counted["ratio_sum"] / displaced if displaced else 1.0
            layer["above_one_share"] = counted["ratio_above_one"] / displaced if displaced else 0.0
    return result


def provenance() -> dict[str, Any]:
    """The package's version, and those of the packages that can change a number."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "unknown"
    return {"prunebench": prunebench.__version__, "packages": packages}


def git_state() -> dict[str, Any] | None:
    """Revision of the checkout that runs, and whether tracked files differ from it; None outside a checkout."""
    root = content_root()

    def ask(*command: str) -> str | None:
        # Without a lock: a killed run must not leave one behind in the user's checkout.
        words = ["git", "--no-optional-locks", "-C", str(root), *command]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    revision = ask("rev-parse", "HEAD")
    return None if revision is None else {"revision": revision, "dirty": bool(ask("status", "--porcelain", "-uno"))}
