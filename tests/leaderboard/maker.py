"""A synthetic tiny track: every arm's items, mask and routing are functions of the arm, so a test can ask for them too.

Nothing here is prunebench's but the format in which the runs are written.
"""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

import numpy as np

from prunebench.mask import LayerMask, Mask
from prunebench.record import Item, content_hash, run_id, write_run

KEEP, RENORM = "softmax, no renorm", "sigmoid, renorm, bias, ×2.446"
MODELS = {"plain": KEEP, "normed": RENORM}
RATIOS = ("0.25", "0.5", "0.75")
CRITERIA = ("mone", "reap", "sge", "frequency", "random")
CELLS = {
    "multiple_choice": [("recall", "none", "acc", 4), ("yes_no", "none", "acc", 2)],
    "arithmetic": [("sums", "strict", "exact_match", 0)],
    "code": [("mbpp", "none", "pass@1", 0), ("humaneval", "none", "pass@1", 0)],
    "perplexity": [("stories", "none", "nll", 0)],
}
N = 24
EXPERTS, LAYERS = 8, (1, 2)
SHAPE = " ".join(f"{layer}:{EXPERTS}x2" for layer in LAYERS)


class Spec(NamedTuple):
    """An arm: text and draw of its mask and of its fit as (text, draw); a dense one has none of it."""

    model: str
    criterion: str | None = None
    ratio: str | None = None
    operator: str | None = None
    scale: str | None = None
    mask: tuple[str, str] | None = None
    fit: tuple[str, str] | None = None


def arm(model, ratio, operator, criterion="mone", *, mask=("world:general", "A"), fit=None):
    """A pruned arm as the track has it: `operator` is constant, trained or other."""
    mask_of = None if criterion == "random" else mask
    if operator == "constant":
        return Spec(model, criterion, ratio, "constant", None, mask_of, fit or mask)
    return Spec(model, criterion, ratio, "reroute", operator, mask_of, None)


def track(model):
    """All arms of the tiny track for one model."""
    general, own = [[(text, draw) for draw in "ABC"] for text in ("world:general", "world:arithmetic")]
    operators = ("constant", "trained", "other")
    arms = [Spec(model)]
    arms += [arm(model, r, o, c) for r in RATIOS for c in CRITERIA for o in operators]
    arms += [arm(model, "0.5", "constant", fit=fit) for fit in general[1:]]
    arms += [arm(model, r, "constant", mask=mask) for r in RATIOS for mask in general[1:] + own[1:]]
    arms += [arm(model, r, o, mask=own[0]) for r in RATIOS for o in operators]
    arms += [arm(model, "0.5", "constant", mask=a, fit=b) for a, b in ((general[0], own[0]), (own[0], general[0]))]
    assert len(set(arms)) == len(arms) == 71
    return arms


def seed(*parts):
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def outcomes(spec, suite, task):
    """Values of the items of a task in the order of their numbers; right and wrong, or nats."""
    rng = np.random.default_rng(seed("items", spec, suite, task))
    skill = 0.95 if spec.criterion is None else rng.choice([0.15, 0.5, 0.55, 0.6, 0.9])
    if spec.criterion == "sge" and spec.ratio != "0.75":
        # All suites order the operators alike; on one model, all but perplexity.
        exchanged = (spec.model, suite) == ("normed", "perplexity")
        skill = {None: 0.95, "trained": 0.1 if exchanged else 0.5, "other": 0.5 if exchanged else 0.1}[spec.scale]
    if suite == "perplexity":
        return rng.gamma(4, 1.0, N) * weights(task) * (2.6 - 2 * skill)
    values = (rng.random(N) < skill).astype(float)
    values[0] = max(values[0], spec.criterion is None)  # no dense score is zero
    return values


def weights(task):
    """Scored tokens of the items of a task."""
    return np.array([5.0 + seed(task, number) % 20 for number in range(N)])


def pruned(spec):
    """Pruned ids by layer: an order by criterion and text, a few swaps of it by draw."""
    count = int(float(spec.ratio) * EXPERTS)
    text, draw = spec.mask or ("", "")
    result = {}
    for layer in LAYERS:
        order = np.random.default_rng(seed("mask", spec.model, spec.criterion, text, layer)).permutation(EXPERTS)
        rng = np.random.default_rng(seed("draw", spec.model, text, draw, layer))
        for at in rng.integers(0, EXPERTS - 1, 2):
            order[[at, at + 1]] = order[[at + 1, at]]
        result[layer] = tuple(sorted(order[:count].tolist()))
    return result


def routing(spec):
    """Counts of a rerouting run: by layer calls, displaced calls, the sum of their ratios, how many exceed 1."""
    rng = np.random.default_rng(seed("routing", spec))
    return {
        layer: (calls := int(rng.integers(500, 900)), shown := int(rng.integers(1, calls)), 0.7 * shown, shown // 5)
        for layer in LAYERS
    }


def items(spec):
    """The items of a run."""
    made = []
    for suite, cells in CELLS.items():
        for task, filter_name, metric, choices in cells:
            detail = json.dumps({"loglikelihoods": [0.0] * choices} if choices else {})
            for number, value in enumerate(outcomes(spec, suite, task)):
                ids = (suite, task, filter_name, f"{task}-{number}")
                hashes = (content_hash(f"doc {task} {number}"), content_hash(f"prompt {task} {number}"))
                weight = float(weights(task)[number]) if metric == "nll" else 1.0
                made.append(Item(*ids, *hashes, metric, float(value), weight, detail=detail))
    return made


def calibration(pair):
    """What a record says of a text and draw."""
    if pair is None:
        return None
    return {"text": pair[0], "blocks": 4, "length": 8, "draw": pair[1], "fingerprint": f"{seed(pair):016x}"}


def record(spec, **changes):
    """The record of an arm; `changes` replace fields of its identity (as `identity={…}`) or of the record."""
    dense = spec.criterion is None
    mask = None
    if not dense:
        mask = Mask(SHAPE, tuple(LayerMask(layer, EXPERTS, ids) for layer, ids in pruned(spec).items()))
    trained = "keep" if MODELS[spec.model] == KEEP else "renorm"
    other = {"keep": "renorm", "renorm": "keep"}[trained]
    operator = {"name": spec.operator, "version": 1, "file_sha256": "00", "parameters": {}, "scale": spec.scale}
    identity = {
        "engine": 1,
        "model": {"name": spec.model, "weights_sha256": spec.model, "tokenizer_sha256": "7e", "shape": SHAPE},
        "method": None if dense else {"name": spec.criterion, "version": 1, "file_sha256": "00", "parameters": {}},
        "operator": None if dense else operator,
        "budget": None if dense else {"ratio": spec.ratio},
        "mask": None if dense else {"digest": mask.digest, "source": spec.criterion},
        "calibration": None if dense else {"mask": calibration(spec.mask), "fit": calibration(spec.fit)},
        "suites": {suite: {"version": 1, "content": "c0ffee"} for suite in CELLS},
        "dtype": "float32",
        "device": "cpu",
        "experts_implementation": "eager",
        "batch_tokens": 1024,
        "limit": None,
        "seed": 0,
    } | changes.pop("identity", {})
    layers = {
        str(layer): {
            "calls": calls,
            "filled_share": 0.0 if spec.operator == "reroute" else 0.4,
            "displaced_share": shown / calls if spec.operator == "reroute" else 0.0,
            "keep_over_renorm": total / shown if spec.operator == "reroute" else 1.0,
            "above_one_share": above / shown if spec.operator == "reroute" else 0.0,
        }
        for layer, (calls, shown, total, above) in routing(spec).items()
    }
    return {
        "schema": 1,
        "status": "complete" if identity["limit"] is None else "partial",
        "run_id": run_id(identity),
        "identity": identity,
        "arm": {
            "model": spec.model,
            "convention": MODELS[spec.model],
            "mask": spec.criterion,
            "operator": spec.operator,
            "scale": spec.scale,
            "resolved_scale": {None: None, "trained": trained, "other": other}[spec.scale],
            "ratio": None if dense else mask.pruned_count / (EXPERTS * len(LAYERS)),
            "keep": None,
            "dense": dense,
        },
        # What a record states of its scores is not what the page is made from.
        "metrics": {suite: {"value": 0.5, "low": 0.0, "high": 1.0, "n": 1} for suite in CELLS},
        "headline": {suite: [list(cell[:3]) for cell in cells] for suite, cells in CELLS.items()},
        "integrity": [{"check": "empty mask", "status": "pass", "detail": ""}],
        "storage": {"total": 3, "parts": {"experts": 2, "router": 1}},
        "routing": {} if dense else {"layers": layers},
        "mask": None if mask is None else mask.to_json(),
        "tensors": {},
        "provenance": {},
        "volatile": {},
    } | changes


def write(records, spec, own=None, name=None, **changes):
    """Write the run of an arm, named by the arm unless another name is given."""
    folder = records / spec.model / (name or f"{seed(spec):016x}")
    write_run(folder, record(spec, **changes), items(spec) if own is None else own)
    return folder
