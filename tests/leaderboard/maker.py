"""A synthetic tiny track: every arm's items, mask and routing are functions of the arm, so a test can ask for them too.

Nothing here is prunebench's but the format in which the runs are written.
"""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

import numpy as np

from prunebench.mask import LayerMask, Mask
from prunebench.record import SCHEMA, Item, content_hash, run_id, write_run

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
    parameters: tuple[tuple[str, object], ...] = ()
    keep: int | None = None

    def __repr__(self):
        """Also what outcomes are drawn from; fields of no meaning are left out."""
        shown = [f"{name}={value!r}" for name, value in zip(self._fields[:7], self, strict=False)]
        more = [f"{name}={value!r}" for name, value in (("parameters", self.parameters), ("keep", self.keep)) if value]
        return f"Spec({', '.join(shown + more)})"


USUAL = {
    "tilt": {"rank": 32, "ridge": 0.01, "clip": 4.0},
    "neurons": {"tilt_rank": 32, "times": 1},
    "svd": {"tilt_rank": 32, "times": 1},
    "svd-whitened": {"tilt_rank": 32, "times": 1, "damping": 1e-06},
    "mora": {"threshold": 0.4, "ridge": 1e-06, "scale": "trained"},
    "conmoe-nearest": {},
    "conmoe-functional": {"candidates": 4, "states": 64, "seed": 0},
    "compel": {"gamma": 0.1, "epsilon": 1e-12, "scale": "trained"},
}
# By the name on the page: of which method, with which parameters, at which scale that was asked for.
FILLS = {
    "tilt(rank=4)": ("tilt", {"rank": 4}, None),
    "tilt(rank=8)": ("tilt", {"rank": 8}, None),
    "neurons(tilt_rank=8)": ("neurons", {"tilt_rank": 8}, None),
    "svd(tilt_rank=8)": ("svd", {"tilt_rank": 8}, None),
    "svd-whitened(tilt_rank=8)": ("svd-whitened", {"tilt_rank": 8}, None),
}
HANDED = {
    "mora": ("mora", {}, None),
    "conmoe-nearest": ("conmoe-nearest", {}, None),
    "conmoe-functional": ("conmoe-functional", {}, None),
    "compel": ("compel", {}, None),
    "compel@other": ("compel", {}, "other"),
}
LARGER = {
    "neurons(tilt_rank=8, times=4)": ("neurons", {"tilt_rank": 8, "times": 4}, None),
    "svd(tilt_rank=8, times=4)": ("svd", {"tilt_rank": 8, "times": 4}, None),
}
OPERATORS = FILLS | HANDED | LARGER
REFITTED = [*FILLS, "mora", "conmoe-functional", "compel"]
PROXIES = 0.4  # R² above which the made MoRA uses a survivor


def operator(name, model, ratio, criterion="mone", *, fit=None):
    """An arm of another operator than the constant and rerouting, by its name on the page."""
    method, asked, scale = OPERATORS[name]
    mask = ("world:general", "A")
    own = None if method == "conmoe-nearest" else fit or mask
    return Spec(model, criterion, ratio, method, scale, mask, own, tuple((USUAL[method] | asked).items()))


def one_more(model):
    """The constant where one more expert is kept than at 50 %."""
    return Spec(model, "mone", None, "constant", None, *[("world:general", "A")] * 2, keep=EXPERTS // 2 + 1)


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
    arms += [operator(name, model, r, c) for r in RATIOS for c in CRITERIA[:2] for name in FILLS | HANDED]
    arms += [operator(name, model, "0.5") for name in LARGER]
    arms += [operator(name, model, "0.5", fit=fit) for name in REFITTED for fit in general[1:]]
    arms += [one_more(model)]
    assert len(set(arms)) == len(arms) == 150
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
    count = EXPERTS - spec.keep if spec.keep else int(float(spec.ratio) * EXPERTS)
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


def fit(spec):
    """How a fit went: by layer and pruned expert (tokens, squared error, constant's, gate square, held-out share)."""
    made = {}
    for layer, experts in pruned(spec).items():
        made[layer] = {}
        for expert in experts:
            rng = np.random.default_rng(seed("fit", spec, layer, expert))
            tokens = int(rng.integers(0, 4)) and int(rng.integers(1, 400))
            constant = float(rng.gamma(2, 50.0)) if tokens else 0.0
            share = float(rng.uniform(-0.2, 1))
            held = float(rng.uniform(-0.5, 0.9)) if tokens else None
            unused = spec.operator == "mora" and (held is None or held <= PROXIES)
            errors = (0.0, 0.0) if unused else (constant * (1 - share), constant)
            made[layer][expert] = (tokens, *errors, float(rng.gamma(2, 0.01)), held)
    return made


def outcome(spec, layer, expert):
    """How the made MoRA or functional remap decided."""
    if spec.operator == "mora":
        held = fit(spec)[layer][expert][4]
        return "proxy" if held is not None and held > PROXIES else ""
    kinds = ("functional", "nearest already best", "folds disagree", "empty fold")
    return kinds[seed("outcome", spec, layer, expert) % 4] if spec.operator == "conmoe-functional" else ""


def targets(spec):
    """By layer, which survivor answers for which pruned expert; few of them for the nearest of the first model."""
    made = {}
    for layer, gone in pruned(spec).items():
        survivors = [expert for expert in range(EXPERTS) if expert not in gone]
        few = (spec.operator == "conmoe-nearest") == (spec.model == "plain")
        own = survivors[:1] if few else survivors
        made[layer] = {expert: own[seed("target", spec, layer, expert) % len(own)] for expert in gone}
    return made


def remap(spec):
    """The record's part of it."""
    chosen = targets(spec)
    loads = [(layer, survivor) for layer, own in chosen.items() for survivor in own.values()]
    told = [outcome(spec, layer, expert) for layer, own in chosen.items() for expert in own]
    return {
        "slots": len(loads),
        "targets": len(set(loads)),
        "most": max(loads.count(one) for one in loads),
        "outcomes": {kind: told.count(kind) for kind in sorted(set(told)) if kind},
        "layers": {str(layer): {str(e): j for e, j in own.items()} for layer, own in chosen.items()},
    }


def fit_columns(spec):
    """The record's part of it, in columns; the shares that it states are not what the page is made from."""
    layers = {}
    for layer, rows in fit(spec).items():
        tokens, left, constant, gates, held = (list(column) for column in zip(*rows.values(), strict=True))
        outcomes = [outcome(spec, layer, expert) for expert in rows]
        fallbacks = [e for e, row in rows.items() if not row[2]]
        layers[str(layer)] = {
            **dict.fromkeys(("fit_share", "weighted_fit_share", "weighted_held_out_share"), 0.5),
            "fallbacks": {str(expert): "for a reason" for expert in fallbacks},
            "experts": list(rows),
            "tokens": tokens,
            "squared_error": left,
            "constant_squared_error": constant,
            "gate_square": gates,
            **({} if spec.operator == "conmoe-functional" else {"held_out_share": held}),
            **({"outcome": outcomes} if any(outcomes) else {}),
        }
    return {"tokens": 32, "proof": {}, "layers": layers}


def stored(spec):
    """Bytes of an arm's checkpoint."""
    return 100_000 + seed("stored", spec) % 50_000


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
    refills = spec.operator in {"reroute", "compel", "mora"}
    asked = spec.scale or ("trained" if refills else None)
    operator = {"name": spec.operator, "version": 1, "file_sha256": "00"}
    operator |= {"parameters": dict(spec.parameters), "scale": spec.scale}
    identity = {
        "engine": 1,
        "model": {"name": spec.model, "weights_sha256": spec.model, "tokenizer_sha256": "7e", "shape": SHAPE},
        "method": None if dense else {"name": spec.criterion, "version": 1, "file_sha256": "00", "parameters": {}},
        "operator": None if dense else operator,
        "budget": None if dense else {"keep": spec.keep} if spec.keep else {"ratio": spec.ratio},
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
            "filled_share": 0.0 if refills else 0.4,
            "displaced_share": shown / calls if refills else 0.0,
            "keep_over_renorm": total / shown if refills else 1.0,
            "above_one_share": above / shown if refills else 0.0,
        }
        for layer, (calls, shown, total, above) in routing(spec).items()
    }
    return {
        "schema": SCHEMA,
        "seal": None,
        "status": "complete" if identity["limit"] is None else "partial",
        "run_id": run_id(identity),
        "identity": identity,
        "arm": {
            "model": spec.model,
            "convention": MODELS[spec.model],
            "mask": spec.criterion,
            "operator": spec.operator,
            "scale": asked,
            "resolved_scale": {None: None, "trained": trained, "other": other}[asked],
            "ratio": None if dense else mask.pruned_count / (EXPERTS * len(LAYERS)),
            "keep": spec.keep,
            "dense": dense,
        },
        # What a record states of its scores is not what the page is made from.
        "metrics": {suite: {"value": 0.5, "low": 0.0, "high": 1.0, "n": 1} for suite in CELLS},
        "headline": {suite: [list(cell[:3]) for cell in cells] for suite, cells in CELLS.items()},
        "integrity": [{"check": "empty mask", "status": "pass", "detail": ""}],
        "storage": {"total": stored(spec), "parts": {"experts": stored(spec) - 1, "router": 1}},
        "routing": {} if dense else {"layers": layers},
        "mask": None if mask is None else mask.to_json(),
        "tensors": {},
        "provenance": {},
        "volatile": {},
        **({"fit": fit_columns(spec)} if spec.operator in USUAL and spec.fit and spec.operator != "compel" else {}),
        **({"remap": remap(spec)} if str(spec.operator).startswith("conmoe") else {}),
    } | changes


def write(records, spec, own=None, name=None, **changes):
    """Write the run of an arm, named by the arm unless another name is given."""
    folder = records / spec.model / (name or f"{seed(spec):016x}")
    write_run(folder, record(spec, **changes), items(spec) if own is None else own)
    return folder
