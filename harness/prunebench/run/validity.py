"""What deleting single experts does to the model's answers, against what criteria score them (2610.41366 App. E.5).

One expert at a time is pruned, the operator answers for it, and the model's next-token distributions on held-out blocks
are compared with the dense model's. Layers are gone through in order: the hidden states before the layer of a deletion
are the dense model's, so each batch enters there (`moe.decoder`; a model whose layers cannot be told apart runs whole
forwards). Of the dense model one batch's logits are held at a time, and made anew for every layer. What a batch says of
a layer's experts is saved at once, so a killed run goes on, and one that asks for more experts adds to it.

B blocks, L tokens per block, V vocabulary, N experts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prunebench.analysis.validity import Validity, validity
from prunebench.calibration import CalibrationSpec, CalibrationTokens, by_pass
from prunebench.calibration.score import batches_of
from prunebench.errors import UsageError
from prunebench.install import programs_of
from prunebench.integrity import check_counters, check_empty_mask, demand
from prunebench.mask import Mask, canonical_json, write_atomically
from prunebench.moe import Instrument, MoEModel
from prunebench.moe.decoder import DecoderStack, Proof, prove
from prunebench.plan import Plan, fit_plan, make_plan
from prunebench.run.arm import PreparedArm
from prunebench.run.foreign import naming_the_file, same_torch
from prunebench.run.session import CACHE, Session, check_writable
from prunebench.run.sources import calibration_tokens

__all__ = ["MEASURES", "Damages", "ScoreValidity", "delete_experts", "divergences", "sample_experts", "score_validity"]

MEASURES: Final = ("kl", "reverse_kl", "nll")
_POSITIONS: Final = 128  # positions whose two distributions are in float64 at a time
_PROBE: Final = 2  # blocks on which entering behind the embeddings is proven

Floats = NDArray[np.float64]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Damages:
    """What deleting each expert changes.

    Args:
        experts: layer index -> ids, increasing.
        blocks: layer index -> measure -> (N, B), each a mean over the L - 1 predictions of a block, in nats per token:
            `kl` KL(dense ‖ pruned), `reverse_kl` KL(pruned ‖ dense), `nll` the pruned model's loss minus the dense
            one's.
        proof: whether deletions entered at their own layer, or why not.
    """

    experts: Mapping[int, tuple[int, ...]]
    blocks: Mapping[int, Mapping[str, Floats]]
    proof: Proof

    def over(self, measure: str, blocks: slice) -> dict[int, Floats]:
        """Layer index -> (N,) mean over some of the blocks."""
        return {index: found[measure][:, blocks].mean(axis=1) for index, found in self.blocks.items()}


def sample_experts(
    moe: MoEModel, count: int | None, layers: Sequence[int] | None, seed: int
) -> dict[int, tuple[int, ...]]:
    """Which experts are deleted: of each layer so many at random, or all; a larger sample holds a smaller one.

    Raises:
        UsageError: layers that do not exist, fewer than 3 experts, more than a layer has.
    """
    known = [shape.index for shape in moe.shapes]
    if unknown := sorted(set(layers or ()) - set(known)):
        raise UsageError(f"layer {unknown[0]} is no MoE layer", expected=", ".join(map(str, known)))
    if count is not None and count < 3:
        raise UsageError(f"{count} experts per layer are too few to rank", expected="at least 3")
    chosen = {}
    for shape in moe.shapes:
        if layers is None or shape.index in layers:
            if count is not None and count > shape.experts:
                raise UsageError(
                    f"{count} experts per layer",
                    where=f"layer {shape.index} with {shape.experts}",
                    expected=f"3 to {shape.experts}",
                    fix="leave out --experts for all",
                )
            order = np.random.default_rng([seed, shape.index]).permutation(shape.experts)
            chosen[shape.index] = tuple(sorted(order[:count].tolist()))
    return chosen


def divergences(dense_BLV: Tensor, pruned_BLV: Tensor, ids_BL: Tensor) -> Floats:
    """(3, B): what `Damages` says of each block, from two models' logits; sums are float64.

    Raises:
        UsageError: logits that are not finite.
    """
    labels_BL = ids_BL[:, 1:].to(dense_BLV.device)
    total = torch.zeros(len(MEASURES), len(ids_BL), dtype=torch.float64, device=dense_BLV.device)
    for start in range(0, labels_BL.shape[1], _POSITIONS):
        part = slice(start, min(start + _POSITIONS, labels_BL.shape[1]))
        for block in range(len(ids_BL)):
            dense_LV, pruned_LV = (one[block, part].double().log_softmax(-1) for one in (dense_BLV, pruned_BLV))
            label_L1 = labels_BL[block, part, None]
            total[0, block] += _kl(dense_LV, pruned_LV)
            total[1, block] += _kl(pruned_LV, dense_LV)
            total[2, block] += (dense_LV.gather(1, label_L1) - pruned_LV.gather(1, label_L1)).sum()
    if not bool(total.isfinite().all()):
        raise UsageError(
            "a deletion's divergence is not finite", expected="finite logits of both models", fix="use --dtype float32"
        )
    mean: Floats = (total / labels_BL.shape[1]).cpu().numpy()
    return mean


def _kl(p_LV: Tensor, q_LV: Tensor) -> Tensor:
    """Σ over positions of KL(p ‖ q), of log-probabilities; what has no probability adds nothing."""
    weight_LV = p_LV.exp()
    return torch.where(weight_LV > 0, weight_LV * (p_LV - q_LV), 0.0).sum()


@torch.inference_mode()
def delete_experts(
    moe: MoEModel,
    held_out: CalibrationTokens,
    experts: Mapping[int, Sequence[int]],
    plan_of: Callable[[int, int], Plan],
    *,
    batch_tokens: int = 8192,
    folder: Path | None = None,
    key: str = "",
    whole: bool = False,
    progress: Progress | None = None,
) -> Damages:
    """Delete experts one by one and compare the model with itself.

    Args:
        moe: the opened, untouched model.
        held_out: the blocks.
        experts: layer index -> ids.
        plan_of: (layer index, expert) -> the plan of a mask that prunes this expert alone.
        batch_tokens: tokens per forward.
        folder: where finished deletions are saved; None saves nothing.
        key: all that they depend on but for model layer, expert and batch; what is saved under another is not read.
        whole: run whole forwards, for comparison.
        progress: called with (what, done, total).

    Raises:
        UsageError: blocks of fewer than 2 tokens, logits that are not finite.
        IntegrityError: a slot reached a deleted expert, or hooks did not run.
    """
    batches = batches_of(held_out, batch_tokens)
    probe_BL = held_out.ids_BL[:_PROBE].to(moe.input_device)
    stack, proof = prove(moe, {"input_ids": probe_BL})
    if not proof.streamed or whole:
        stack = None
    walk = _Walk(moe, stack, [{"input_ids": ids_BL.to(moe.input_device)} for ids_BL in batches])
    total = sum(len(ids) for ids in experts.values()) * len(batches)
    done = 0
    blocks: dict[int, dict[str, Floats]] = {}
    for index in sorted(experts):
        wanted = tuple(sorted(experts[index]))
        plans: dict[int, Plan] = {}
        columns = []
        for number, ids_BL in enumerate(batches):
            store = None if folder is None else folder / f"layer-{index:03}-batch-{number:04}.json"
            found = _read(store, key)
            if missing := [expert for expert in wanted if expert not in found]:
                dense_BLV = walk.logits(index, number)
                for expert in missing:
                    if expert not in plans:
                        with torch.inference_mode(mode=False):  # an operator may differentiate what it fits
                            plans[expert] = plan_of(index, expert)
                    found[expert] = divergences(dense_BLV, _pruned(walk, plans[expert], index, number), ids_BL)
                del dense_BLV
                if store is not None:
                    _write(store, key, found)
            columns.append(np.stack([found[expert] for expert in wanted]))
            done += len(wanted)
            if progress is not None:
                progress("deletions × batches", done, total)
        values_NMB = np.concatenate(columns, axis=2)
        blocks[index] = {name: values_NMB[:, place] for place, name in enumerate(MEASURES)}
    return Damages({index: tuple(sorted(ids)) for index, ids in experts.items()}, blocks, proof)


def _pruned(walk: _Walk, plan: Plan, index: int, number: int) -> Tensor:
    """The pruned model's logits on a batch, with the checks of a run on its counters."""
    layer = walk.moe.layer(index)
    alone = dataclasses.replace(walk.moe, layers=(layer,))
    with Instrument(alone, {index: programs_of(plan)[index]}) as instrument:
        logits_BLV = walk.logits(index, number)
        counters = {index: instrument.counters[index].read()}
    # That a fill was never asked is no fault here: an expert that no held-out token is routed to changes nothing.
    demand(check for check in check_counters(plan, counters) if check.check != "every asked fill answered")
    if counters[index]["asked"] != counters[index]["answered"]:
        demand(check_counters(plan, counters))
    return logits_BLV


class _Walk:
    """The dense hidden states of every batch before one layer, which only moves on."""

    def __init__(self, moe: MoEModel, stack: DecoderStack | None, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self.moe, self.stack, self.batches = moe, stack, batches
        # By batch: the position that its hidden states stand before, and they themselves, on the host.
        self._at: list[tuple[int, Tensor | None]] = [(0, None)] * len(batches)

    def logits(self, index: int, number: int) -> Tensor:
        """The logits of a batch, by a forward that begins at layer `index`."""
        batch = self.batches[number]
        if self.stack is None:
            logits: Tensor = self.moe.model(**batch, use_cache=False).logits
            return logits
        first, hidden = self._at[number]
        if first < index:
            hidden = self.stack.run(batch, first, index - 1, hidden).cpu()
            self._at[number] = index, hidden
        return self.stack.logits(batch, index, hidden)


def _read(store: Path | None, key: str) -> dict[int, Floats]:
    """Finished deletions of a batch: expert -> (3, B); none where there is no whole file of this key."""
    if store is None:
        return {}
    try:
        data = json.loads(store.read_text(encoding="utf-8"))
        if data["key"] != key:
            return {}
        return {int(expert): np.asarray(values, dtype=np.float64) for expert, values in data["experts"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _write(store: Path, key: str, found: Mapping[int, Floats]) -> None:
    data = {"key": key, "experts": {str(expert): found[expert].tolist() for expert in sorted(found)}}
    store.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(store, f"{json.dumps(data)}\n".encode())


@dataclass(frozen=True)
class ScoreValidity:
    """The answer of `prunebench mask validity`.

    Args:
        damages: of the deletions.
        found: criterion -> measure -> its correlations.
        said: what was asked, as plain data.
    """

    damages: Damages
    found: Mapping[str, Mapping[str, Validity]]
    said: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain data, every deletion's damage on each of the two texts with it."""
        half = self.said["held_out"]["blocks"]
        damage = {
            str(index): {
                "experts": list(self.damages.experts[index]),
                **{
                    name: [values_NB[:, :half].mean(axis=1).tolist(), values_NB[:, half:].mean(axis=1).tolist()]
                    for name, values_NB in measures.items()
                },
            }
            for index, measures in self.damages.blocks.items()
        }
        return {
            **self.said,
            "proof": self.damages.proof.to_json(),
            "validity": {
                name: {measure: one.to_json() for measure, one in by_measure.items()}
                for name, by_measure in self.found.items()
            },
            "damage": damage,
        }


def score_validity(
    session: Session,
    criteria: Mapping[str, tuple[PreparedArm, PreparedArm]],
    deletion: PreparedArm,
    held_out: CalibrationSpec,
    *,
    blocks: int,
    experts: int | None = None,
    layers: Sequence[int] | None = None,
    resamples: int | None = None,
) -> ScoreValidity:
    """Delete experts, and correlate what criteria score them with the damage.

    Args:
        session: loads the model, and keeps score passes and finished deletions below its folder.
        criteria: name -> the arm that chooses by it, on two calibration draws.
        deletion: an arm whose operator and scale answer for the deleted expert; its seed samples experts.
        held_out: text and draw of the held-out blocks, which are its first.
        blocks: of each of the two held-out texts.
        experts: deleted per layer; None deletes all.
        layers: only of these.
        resamples: of the bootstrap.

    Raises:
        UsageError: a criterion without scores, held-out blocks that calibration has seen, and what
            `sample_experts`, `delete_experts` and `validity` refuse.
    """
    if blocks < 1 or 2 * blocks > held_out.blocks:
        raise UsageError(
            f"two texts of {blocks} held-out blocks",
            expected=f"1 to {held_out.blocks // 2}: both are from one draw of {held_out.blocks} blocks",
        )
    check_writable(session.out)
    loaded = session.open(deletion)
    chosen = sample_experts(loaded.moe, experts, layers, deletion.spec.seed)
    tokens = _held_out(loaded.tokenizer, held_out, 2 * blocks)
    for name, arm in _each(criteria, deletion):
        _check_unseen(name, arm, loaded.tokenizer, tokens)
    scores = {name: (session.rank(first), session.rank(second)) for name, (first, second) in criteria.items()}
    demand([check_empty_mask(loaded.moe, tokens.ids_BL[:_PROBE])])
    fit = None if deletion.fit is None else calibration_tokens(deletion.fit, loaded.tokenizer)
    known = {name: value for name, value in deletion.known.items() if name not in _NOT_OF_DELETIONS}
    key = canonical_json([known, fit.fingerprint if fit is not None else None, tokens.fingerprint])
    with same_torch(), naming_the_file(deletion.method_files, frozenset()):
        damages = delete_experts(
            loaded.moe,
            tokens,
            chosen,
            _planner(session, deletion, loaded.moe, fit),
            batch_tokens=deletion.spec.batch_tokens,
            folder=session.out / CACHE / f"deletions-{sha256(key.encode()).hexdigest()[:16]}",
            key=key,
            progress=session.progress,
        )
    halves = slice(0, blocks), slice(blocks, 2 * blocks)
    more = {"seed": deletion.spec.seed, **({} if resamples is None else {"resamples": resamples})}
    found = {}
    for name, pair in scores.items():
        first, second = ({i: score_E[list(chosen[i])] for i, score_E in one.items() if i in chosen} for one in pair)
        found[name] = {
            measure: validity(
                (first, second), (damages.over(measure, halves[0]), damages.over(measure, halves[1])), **more
            )
            for measure in MEASURES
        }
    said = {
        "model": deletion.spec.model,
        "operator": deletion.known["operator"],
        "calibration": {name: [vars(arm.spec.calibration) for arm in pair] for name, pair in criteria.items()},
        "held_out": {**vars(held_out), "blocks": blocks, "texts": 2, "fingerprint": tokens.fingerprint},
        "experts_per_layer": {str(index): len(ids) for index, ids in chosen.items()},
        "seed": deletion.spec.seed,
    }
    return ScoreValidity(damages, found, said)


# What an arm's identity says of its mask and its evaluation.
_NOT_OF_DELETIONS: Final = {"method", "budget", "calibration", "suites", "limit", "seed", "mask", "executor"}


def _each(
    criteria: Mapping[str, tuple[PreparedArm, PreparedArm]], deletion: PreparedArm
) -> Iterator[tuple[str, PreparedArm]]:
    for name, pair in criteria.items():
        yield from ((name, arm) for arm in pair)
    yield f"operator {deletion.spec.operator}", deletion


def _held_out(tokenizer: Any, spec: CalibrationSpec, blocks: int) -> CalibrationTokens:
    """The first blocks of a draw."""
    ids_BL = calibration_tokens(spec, tokenizer).ids_BL[:blocks]
    return CalibrationTokens(spec, ids_BL, sha256(ids_BL.numpy().tobytes()).hexdigest()[:16])


def _check_unseen(name: str, arm: PreparedArm, tokenizer: Any, held_out: CalibrationTokens) -> None:
    """Refuse to measure on blocks that a criterion or the operator was shown."""
    seen: set[bytes] = set()
    for one in (arm.calibration if arm.method is not None else None, arm.fit):
        if one is not None:
            tokens = arm.tokens[one] if one in arm.tokens else calibration_tokens(one, tokenizer)
            seen |= {ids_L.tobytes() for ids_L in tokens.ids_BL.numpy()}
    shared = sum(ids_L.tobytes() in seen for ids_L in held_out.ids_BL.numpy())
    if shared:
        raise UsageError(
            f"{shared} held-out blocks are among the calibration's",
            where=name,
            expected="text that nothing was calibrated on",
            fix="give another draw or text",
        )


def _planner(
    session: Session, arm: PreparedArm, moe: MoEModel, fit: CalibrationTokens | None
) -> Callable[[int, int], Plan]:
    """What answers for one expert alone: from statistics of all, or by a fit pass of its own."""
    operator = arm.operator
    assert operator is not None
    needs = by_pass(operator.replace_needs())
    at_once = (*needs.score, *needs.gradient)
    scores = session.measured(arm, fit, at_once) if fit is not None and at_once else None

    def plan_of(index: int, expert: int) -> Plan:
        mask = Mask.for_shapes(moe.shapes, {index: (expert,)})
        if fit is None or not operator.in_fit_pass():
            return make_plan(moe, mask, operator, scores, scale=arm.scale)
        size = arm.spec.batch_tokens
        return fit_plan(moe, mask, operator, scores, fit, batch_tokens=size, scale=arm.scale).plan

    return plan_of
