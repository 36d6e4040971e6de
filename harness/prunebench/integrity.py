"""Proof that a pruned model is what it claims to be. A failing check stops the run and says where.

Each check returns a `Check`, which goes into the record; those that need no evaluation run before it, so that nothing
is spent on a broken arm. They are: (1) an empty mask changes no bit; (2) no token reaches a pruned expert; (3) k slots
per token; (4) keep and renorm pick the same experts and differ by one scalar per token; (5) every slot has an answer;
(6) masked = physically removed; (7) stored values are what was declared. The eighth, repeated items, is `run`'s. Of a
quantized model all of them are made on its weights, and (9) those are what its integers say.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prunebench.errors import IntegrityError
from prunebench.install import programs_of, shrink
from prunebench.mask import GroupPolicy, Mask
from prunebench.moe import Instrument, LayerProgram, MoELayer, MoEModel
from prunebench.plan import Plan
from prunebench.quantize import QuantizedModel
from prunebench.routing import RouterCall, Scale, reroute, scores_and_choice

__all__ = [
    "Check",
    "check_before_evaluation",
    "check_counters",
    "check_empty_mask",
    "check_one_ratio",
    "check_quantized",
    "check_removed_equals_masked",
    "check_slots_answered",
    "check_stored_values",
    "demand",
]

PROBE_LENGTH = 32
TOLERANCE = 2e-6
USUAL_LOGIT = 16.0
SCALES = ("keep", "renorm", "interp:0.5")


@dataclasses.dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    check: str
    status: Literal["pass", "fail", "not applicable"]
    detail: str

    def to_json(self) -> dict[str, str]:
        """As it goes into the record."""
        return dataclasses.asdict(self)


def demand(checks: Iterable[Check]) -> list[Check]:
    """The checks, if none failed.

    Raises:
        IntegrityError: naming the first that did.
    """
    checks = list(checks)
    for check in checks:
        if check.status == "fail":
            raise IntegrityError(f"integrity check failed: {check.check}", where=check.detail)
    return checks


def _verdict(name: str, faults: Sequence[str], fine: str) -> Check:
    return Check(name, "fail", faults[0]) if faults else Check(name, "pass", fine)


def _logits(moe: MoEModel, ids_BL: Tensor) -> Tensor:
    logits = moe.model(input_ids=ids_BL.to(moe.input_device), use_cache=False).logits
    assert isinstance(logits, Tensor)
    return logits


@torch.inference_mode()
def check_empty_mask(moe: MoEModel, ids_BL: Tensor) -> Check:
    """1. An empty mask with the rewriting forced on: logits equal the untouched model's bit for bit, at every scale."""
    plain = _logits(moe, ids_BL)
    faults = []
    scales = [scale for scale in SCALES if Scale.parse(scale).kind in moe.convention.scales]
    for scale in scales:
        programs = {layer.index: LayerProgram((), scale=Scale.parse(scale)) for layer in moe.layers}
        with Instrument(moe, programs, force=True):
            forced = _logits(moe, ids_BL)
        if not torch.equal(plain, forced):
            worst = float((plain.float() - forced.float()).abs().max())
            faults.append(f"scale {scale}: logits differ by up to {worst:.3g}")
    detail = f"{ids_BL.numel()} tokens, scales {', '.join(scales)}, {moe.experts_implementation}, {plain.dtype}"
    return _verdict("empty mask is bit-exact", faults, detail.replace("torch.", ""))


def check_slots_answered(plan: Plan, moe: MoEModel) -> Check:
    """5. Enough experts can answer: per layer, survivors and filled experts are at least top-k."""
    faults = []
    for layer in plan.layers:
        shape = moe.layer(layer.index).shape
        routable = shape.experts - len(plan.mask.pruned_of(layer.index)) + len(layer.fills)
        if routable < shape.fewest_survivors():
            faults.append(f"layer {layer.index}: {routable} routable experts for {shape.fewest_survivors()}")
    filled = sum(len(layer.fills) for layer in plan.layers)
    detail = f"{filled} of {plan.mask.pruned_count} pruned experts filled, the rest unroutable"
    return _verdict("every slot has an answer", faults, detail)


def check_stored_values(plan: Plan) -> Check:
    """7. Each fill stores as many values as it declares."""
    faults = []
    for key, declared in plan.declared.items():
        index, expert = key.split("/")
        measured = sum(tensor.numel() for tensor in plan.state_of(int(index), int(expert)).values())
        if measured != declared:
            faults.append(f"layer {index}, expert {expert}: {measured} values stored, {declared} declared")
    return _verdict("stored values as declared", faults, f"{plan.values_stored} values in {len(plan.declared)} fills")


def check_quantized(moe: MoEModel, plan: Plan | None, quantized: QuantizedModel) -> Check:
    """9. Every decoder linear that the setting names is what its integers say, and nothing else was touched.

    Args:
        moe: the model with the quantized weights installed.
        plan: what prunes it, or None; pruned experts have no integers.
        quantized: the integers.
    """
    pruned = {} if plan is None else {layer.index: layer.pruned for layer in plan.mask.layers}
    faults = quantized.faults(moe, pruned)
    found = quantized.to_json()
    linears = sum(part["linears"] for part in found["parts"].values())
    rounded = sum(part["fallbacks"] for part in found["parts"].values())
    detail = f"{linears} linears, {rounded} of them rounded to nearest, {found['dead_columns']} dead columns"
    return _verdict("quantized weights are what is stored", faults, detail)


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _capture(moe: MoEModel, ids_BL: Tensor) -> tuple[dict[int, Inputs], dict[int, RouterCall]]:
    """Each MoE block's arguments and each router's call on a probe batch, unpruned."""
    inputs: dict[int, Inputs] = {}
    calls: dict[int, RouterCall] = {}
    handles = []
    for layer in moe.layers:

        def keep_input(
            _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = layer.index
        ) -> None:
            inputs[index] = args, kwargs

        def keep_call(call: RouterCall, _hidden: torch.dtype, index: int = layer.index) -> None:
            calls[index] = call

        handles.append(layer.block.register_forward_pre_hook(keep_input, with_kwargs=True))
        handles += layer.watch_router(keep_call)
    try:
        _logits(moe, ids_BL)
    finally:
        for handle in handles:
            handle.remove()
    return inputs, calls


def _rounding_of_ratios(call: RouterCall, index_TK: Tensor) -> Tensor:
    """How far apart the ratios of one token's slots may be by rounding alone ([T]).

    Each gate was rounded once to its dtype: two roundings on either side of a ratio. The router's own gates also carry
    the error of its scores in their dtype: a few units in the last place, and for a softmax half a unit of the
    difference to the largest logit, which goes into an exponential.
    """
    logits_TE = call.logits_TE.double()
    depth_T = logits_TE.amax(-1) - logits_TE.gather(1, index_TK).amin(-1)
    scores_in = call.logits_TE.dtype if call.convention.scores_in == "logits" else torch.float32
    return 4 * torch.finfo(call.gates_TK.dtype).eps + (4 + depth_T) * torch.finfo(scores_in).eps


def check_one_ratio(calls: Mapping[int, RouterCall], programs: Mapping[int, LayerProgram]) -> Check:
    """4. keep and renorm pick the same experts; survivors of D keep their gate under keep; one ratio per token."""
    faults, seen, worst = [], 0, 0.0
    for index, call in calls.items():
        program = programs.get(index)
        if program is None or not program.blocked or "keep" not in call.convention.scales:
            continue
        blocked_E = torch.zeros(call.logits_TE.shape[-1], dtype=torch.bool, device=call.logits_TE.device)
        blocked_E[list(program.blocked)] = True
        keep_TK, keep_gates_TK = reroute(call, blocked_E, Scale("keep"), program.policy)
        renorm_TK, renorm_gates_TK = reroute(call, blocked_E, Scale("renorm"), program.policy)
        survivor_TK = keep_TK == call.index_TK
        if not torch.equal(keep_TK, renorm_TK):
            faults.append(f"layer {index}: the two scales pick different experts")
        if bool((~blocked_E[call.index_TK] & ~survivor_TK).any()) and program.policy == "frozen":
            faults.append(f"layer {index}: a survivor lost its slot")
        if not torch.equal(keep_gates_TK[survivor_TK], call.gates_TK[survivor_TK]):
            faults.append(f"layer {index}: a survivor's gate changed under keep")
        if not (torch.isfinite(keep_gates_TK).all() and torch.isfinite(renorm_gates_TK).all()):
            faults.append(f"layer {index}: a gate is not a number")
        # Below the smallest normal number a gate has lost digits, and a ratio says nothing.
        smallest = torch.finfo(call.gates_TK.dtype).tiny
        positive_TK = (keep_gates_TK >= smallest) & (renorm_gates_TK >= smallest)
        ratio_TK = torch.where(positive_TK, keep_gates_TK.double() / renorm_gates_TK.double(), torch.nan)
        middle_T1 = ratio_TK.nanmedian(dim=-1, keepdim=True).values
        spread_T = torch.nan_to_num((ratio_TK / middle_T1 - 1).abs()).amax(-1)
        spread = float(spread_T.max())
        worst, seen = max(worst, spread), seen + call.index_TK.shape[0]
        if bool((spread_T > _rounding_of_ratios(call, keep_TK)).any()):
            faults.append(f"layer {index}: keep / renorm varies by {spread:.2g} within a token")
    if not seen:
        return Check("keep and renorm differ by one scalar", "not applicable", "no slot is refilled")
    detail = f"{seen} token-layer calls, largest spread {worst:.2g}"
    return _verdict("keep and renorm differ by one scalar", faults, detail)


def check_removed_equals_masked(
    moe: MoEModel,
    programs: Mapping[int, LayerProgram],
    inputs: Mapping[int, Inputs],
    calls: Mapping[int, RouterCall],
) -> Check:
    """6. Per layer, the block with the pruned experts sliced out computes what the masked one does.

    Both blocks run in float64; a router that insists on float32 still rounds its logits, and a sliced one rounds them
    otherwise, so the tolerance grows with logits beyond `USUAL_LOGIT`, and tokens whose last place is a tie but for
    rounding are left out by number.
    """
    faults, worst, ties = [], 0.0, 0
    for layer in moe.layers:
        program = programs.get(layer.index)
        if program is None or not program.pruned:
            continue
        args, kwargs = _in_float64(inputs[layer.index])
        masked_layer, removed_layer = _exact_copy(layer), _exact_copy(layer)
        with Instrument(MoEModel(masked_layer.block, (masked_layer,)), {layer.index: program}):
            masked_TD = _first(masked_layer.block(*args, **kwargs)).flatten(0, -2)
        rest = shrink(removed_layer, program)
        left = {layer.index: rest} if rest is not None else {}
        with Instrument(MoEModel(removed_layer.block, (removed_layer,)), left):
            removed_TD = _first(removed_layer.block(*args, **kwargs)).flatten(0, -2)
        difference_T = (masked_TD - removed_TD).abs().amax(-1) / max(1.0, float(masked_TD.abs().max()))
        if rest is None:
            tie_T = _near_ties(calls[layer.index], program.blocked)
            ties += int(tie_T.sum())
            difference_T = difference_T.masked_fill(tie_T, 0.0)
        difference = float(difference_T.max())
        worst = max(worst, difference)
        tolerance = TOLERANCE * max(1.0, float(calls[layer.index].logits_TE.abs().max()) / USUAL_LOGIT)
        if not difference <= tolerance:
            faults.append(f"layer {layer.index}: outputs differ by {difference:.3g}, more than {tolerance:.3g}")
    detail = f"largest relative difference {worst:.2g}" + (f", {ties} tied tokens left out" if ties else "")
    return _verdict("masked equals physically removed", faults, detail)


def _near_ties(call: RouterCall, blocked: Sequence[int]) -> Tensor:
    """[T] bool: tokens whose k-th and next routable choices differ by no more than rounding."""
    _, choice_TE = scores_and_choice(call.convention, call.logits_TE, call.bias_E)
    top_k = call.index_TK.shape[1]
    routable = [expert for expert in range(choice_TE.shape[1]) if expert not in set(blocked)]
    if len(routable) <= top_k:
        return torch.zeros(choice_TE.shape[0], dtype=torch.bool, device=choice_TE.device)
    best_TK = choice_TE[:, routable].double().topk(top_k + 1, dim=-1).values
    return best_TK[:, -2] - best_TK[:, -1] <= 1e-5 * best_TK[:, -2].abs()


def _exact_copy(layer: MoELayer) -> MoELayer:
    """A copy of the layer's block in float64, with its own router and experts."""
    block = copy.deepcopy(layer.block).double()
    names = {id(module): name for name, module in layer.block.named_modules()}
    experts = block.get_submodule(names[id(layer.experts)])
    if (config := getattr(experts, "config", None)) is not None:
        # The fused kernels take no float64; the copy's config is a copy too.
        config._experts_implementation = "eager"  # noqa: SLF001  transformers' own setter is the model's
    return dataclasses.replace(layer, block=block, router=block.get_submodule(names[id(layer.router)]), experts=experts)


def _in_float64(value: Any) -> Any:
    """A copy of nested arguments with every floating tensor in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if type(value) in {tuple, list}:
        return type(value)(_in_float64(item) for item in value)
    if isinstance(value, dict):
        twin = copy.copy(value)  # of its own class
        twin.update({key: _in_float64(item) for key, item in value.items()})
        return twin
    return value


def _first(output: Any) -> Tensor:
    result = output[0] if isinstance(output, tuple) else output
    assert isinstance(result, Tensor)
    return result


@torch.inference_mode()
def check_before_evaluation(
    moe: MoEModel, plan: Plan, ids_BL: Tensor, *, policy: GroupPolicy = "frozen"
) -> list[Check]:
    """Checks 4 to 7 of an arm, on a few calibration tokens; check 1 is per model and is made once by the caller.

    Args:
        moe: the untouched model.
        plan: the arm.
        ids_BL: token ids; the first `PROBE_LENGTH` of up to 8 blocks are used.
        policy: who chooses the groups of a group-limited router.
    """
    probe_BL = ids_BL[:8, :PROBE_LENGTH]
    programs = programs_of(plan, policy=policy)
    inputs, calls = _capture(moe, probe_BL)
    return [
        check_one_ratio(calls, programs),
        check_slots_answered(plan, moe),
        check_removed_equals_masked(moe, programs, inputs, calls),
        check_stored_values(plan),
    ]


def _top_k_by_layer(mask: Mask) -> dict[int, int]:
    """Layer index -> k, as the mask's model shape states it (`index:ExK …`)."""
    return {int(part.partition(":")[0]): int(part.rpartition("x")[2]) for part in mask.model_shape.split()}


def check_counters(plan: Plan, counters: Mapping[int, Mapping[str, float]]) -> list[Check]:
    """2 and 3, from counters over an evaluation: zero tokens to pruned experts, every asked fill answered, k slots."""
    reached, unanswered, short = [], [], []
    top_k = _top_k_by_layer(plan.mask)
    short += [
        f"layer {layer.index}: pruned, but nothing was counted"
        for layer in plan.mask.layers
        if layer.pruned and layer.index not in counters
    ]
    for index, counted in counters.items():
        if counted["reached_pruned"]:
            reached.append(f"layer {index}: {counted['reached_pruned']:.0f} slots asked for an unroutable expert")
        if counted["asked"] != counted["answered"]:
            unanswered.append(f"layer {index}: {counted['asked']:.0f} slots asked, {counted['answered']:.0f} answered")
        if not counted["calls"] or counted["slots"] != top_k[index] * counted["calls"]:
            short.append(
                f"layer {index}: {counted['slots']:.0f} slots in {counted['calls']:.0f} calls, k = {top_k[index]}"
            )
    total = {name: sum(c[name] for c in counters.values()) for name in ("slots", "asked", "answered")}
    if plan.mask.pruned_count and not plan.fills_nothing and not total["asked"]:
        unanswered.append("no slot ever asked for a fill")
    return [
        _verdict("no token reaches a pruned expert", reached, f"0 of {total['slots']:.0f} slots"),
        _verdict("every asked fill answered", unanswered, f"{total['answered']:.0f} answers")
        if not plan.fills_nothing
        else Check("every asked fill answered", "not applicable", "nothing is filled"),
        _verdict("k slots per token", short, f"{total['slots']:.0f} slots"),
    ]
