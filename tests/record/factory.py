"""Synthetic runs for tests: small, seeded, and valid in every field."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from prunebench.analysis import metrics_from_items
from prunebench.mask import LayerMask, Mask
from prunebench.record import SCHEMA, Item, ItemTable, content_hash, items_to_table, run_id, sealed, write_run

HEADLINE = {
    "arithmetic": [["arithmetic", "strict", "exact_match"]],
    "multiple_choice": [["recall", "none", "acc"], ["yes_no", "none", "acc"]],
    "perplexity": [["stories", "none", "nll"]],
}
MASK = Mask("1:8x2 2:8x2", (LayerMask(1, 8, (0, 3, 5, 7)), LayerMask(2, 8, (1, 2, 4, 6))))


RANDOM_MASK = Mask(MASK.model_shape, (LayerMask(1, 8, (1, 2, 4, 6)), LayerMask(2, 8, (0, 3, 5, 7))))
CALIBRATION = {"text": "world:general", "blocks": 4, "length": 8, "draw": "A", "fingerprint": "fA"}
FITTED = ("constant", "tilt")


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`one` with the leaves of `other` in place."""
    deep = {k: merged(one[k], v) for k, v in other.items() if isinstance(v, dict) and isinstance(one.get(k), dict)}
    return one | other | deep


def _operator(arm: dict[str, Any]) -> dict[str, Any]:
    operator = {"name": arm["operator"], "version": 1, "file_sha256": "00", "parameters": {}, "scale": arm["scale"]}
    return operator | ({"parameters": {"scale": "trained"}} if arm["operator"] == "reroute" else {})


def _calibrations(arm: dict[str, Any], draw: str | None, fit_draw: str | None) -> dict[str, Any]:
    """The mask's calibration, and the fit's of an operator that is fitted."""
    mask = CALIBRATION | {"draw": draw or "A", "fingerprint": f"f{draw or 'A'}"}
    fit = mask | {"draw": fit_draw or mask["draw"], "fingerprint": f"f{fit_draw or mask['draw']}"}
    return {"mask": mask, "fit": fit if arm["operator"] in FITTED else None}


def make_items(*, seed: int = 0, n: int = 20, skill: float = 0.7) -> list[Item]:
    """n items per task of all three suites; `skill` is the chance of a right answer."""
    rng = np.random.default_rng(seed)
    items = []
    cells = [(s, *cell) for s, cells in HEADLINE.items() for cell in cells]
    cells += [
        ("multiple_choice", "recall", "none", "acc_norm"),
        ("arithmetic", "arithmetic", "flexible", "exact_match"),
    ]
    for suite, task, filter_name, metric in cells:
        for i in range(n):
            words = 5 + content_hash(f"{task}-{i}") % 20
            loss = metric == "nll"
            value = float(rng.gamma(4, words / (1 + 4 * skill))) if loss else float(rng.random() < skill)
            items.append(
                Item(
                    *(suite, task, filter_name, f"{task}-{i:03d}"),
                    doc_hash=content_hash(f"doc {task}-{i}"),
                    prompt_hash=content_hash(f"prompt {task}-{i}"),
                    metric=metric,
                    value=value,
                    weight=float(words) if loss else 1.0,
                    state="ok" if loss or value else "wrong",
                    detail=json.dumps({"answer": int(rng.integers(4))} | ({"tokens": words} if loss else {})),
                )
            )
    return items


def make_record(items: list[Item] | ItemTable, **changes: Any) -> dict[str, Any]:
    """A valid record for these items.

    Args:
        items: of the run.
        changes: fields of `arm`; `draw` and `fit_draw`; `mask_data`; `identity`, which is merged into the identity,
            deeply; `limit`; `suites`, added to those of the items; `integrity`; `routing`; `volatile`.
    """
    table = items if isinstance(items, ItemTable) else items_to_table(items)
    dense = bool(changes.get("dense"))
    arm: dict[str, Any] = {
        "model": "tiny-olmoe",
        "convention": "softmax, no renorm",
        "mask": None if dense else "reap",
        "operator": None if dense else "reroute",
        "scale": None if dense else "trained",
        "resolved_scale": None if dense else "keep",
        "ratio": None if dense else 0.5,
        "keep": None,
        "dense": dense,
    }
    arm |= {key: value for key, value in changes.items() if key in arm}
    mask = None if dense else changes.get("mask_data", MASK)
    budget = None if dense else {"ratio": str(arm["ratio"])} if arm["keep"] is None else {"keep": arm["keep"]}
    if mask is not None:
        arm["ratio"] = mask.pruned_count / sum(layer.experts for layer in mask.layers)
    headline = {suite: cells for suite, cells in HEADLINE.items() if suite in set(table.suite.tolist())}
    limit = changes.get("limit")
    identity: dict[str, Any] = {
        "engine": 1,
        "model": {
            "name": arm["model"],
            "weights_sha256": hashlib.sha256(arm["model"].encode()).hexdigest(),
            "tokenizer_sha256": "7e",
            "shape": MASK.model_shape,
        },
        "method": None if dense else {"name": arm["mask"], "version": 1, "file_sha256": "00", "parameters": {}},
        "operator": None if dense else _operator(arm),
        "budget": budget,
        "mask": None if mask is None else {"digest": mask.digest, "source": arm["mask"]},
        "calibration": None if dense else _calibrations(arm, changes.get("draw"), changes.get("fit_draw")),
        "suites": {suite: {"version": 1, "content": "c0ffee"} for suite in headline} | changes.get("suites", {}),
        "dtype": "float32",
        "device": "cpu",
        "experts_implementation": "eager",
        "batch_tokens": 1024,
        "limit": limit,
        "seed": 0,
    }
    identity = merged(identity, changes.get("identity", {}))
    if not dense and identity["mask"]["source"] != "file":
        identity["mask"]["source"] = arm["mask"]
    elif not dense:
        identity["calibration"]["mask"] = None
    parts = {"experts": 4_000_000 if dense else 2_000_000, "router": 1_000, "embeddings": 500_000}
    default_integrity = [
        {"check": "empty mask", "status": "pass", "detail": ""},
        {"check": "stored values", "status": "not applicable", "detail": "no fills"},
    ]
    record = {
        "schema": SCHEMA,
        "status": "complete" if limit is None else "partial",
        "run_id": run_id(identity),
        "identity": identity,
        "arm": arm,
        "metrics": metrics_from_items(table, headline),
        "headline": headline,
        "integrity": changes.get("integrity", default_integrity),
        "storage": {"total": sum(parts.values()), "parts": parts},
        "routing": changes.get("routing", {}),
        "mask": None if mask is None else mask.to_json(),
        "tensors": {},
        "provenance": {"prunebench": "0", "packages": {}, "git": {"revision": None, "dirty": None}},
        "volatile": changes.get("volatile", {"seconds": 1.5, "started": "2026-11-30T12:00:00+00:00"}),
    }
    return sealed(record, table)


def write(folder: Path, items: list[Item], **changes: Any) -> Path:
    """Write a run and give its folder back."""
    write_run(folder, make_record(items, **changes), items)
    return folder


def demo(records: Path, *, n: int = 20, model: str = "tiny-olmoe") -> None:
    """The shape of the demo track: dense, and two masks under constant and two rerouting scales."""
    write(records / f"{model}-dense", make_items(seed=1, n=n, skill=0.95), model=model, dense=True)
    seed = 2
    for mask in ("mone", "random"):
        for operator, scale, resolved in (
            ("constant", None, None),
            ("reroute", "trained", "keep"),
            ("reroute", "other", "renorm"),
        ):
            items = make_items(seed=seed, n=n, skill={"mone": 0.7, "random": 0.4}[mask] + 0.02 * seed)
            arm = {"model": model, "mask": mask, "operator": operator, "scale": scale, "resolved_scale": resolved}
            arm["mask_data"] = {"mone": MASK, "random": RANDOM_MASK}[mask]
            write(records / "-".join(filter(None, (model, mask, operator, scale))), items, **arm)
            seed += 1
