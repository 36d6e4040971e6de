"""One layer by hand, in float64 and without the package's statistics: scores, the runner-up, every expert's output.

What routers compute comes from tests/routing/definitions.py, which was written from the models' own files.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import torch

_spec = importlib.util.spec_from_file_location(
    "prunebench_tests_definitions_again", Path(__file__).parents[1] / "routing" / "definitions.py"
)
assert _spec is not None
assert _spec.loader is not None
definitions = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(definitions)


def scores_of(router, logits_TE: np.ndarray) -> np.ndarray:
    """p in float64, from the definition's name."""
    if router.scores is definitions.softmax:
        powers_TE = np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True))
        return powers_TE / powers_TE.sum(axis=1, keepdims=True)
    if router.scores is definitions.sigmoid:
        return 1.0 / (1.0 + np.exp(-logits_TE))
    return np.sqrt(np.log1p(np.exp(logits_TE)))


def best_left(router, p_E: np.ndarray, bias_E: np.ndarray | None, chosen: list[int]) -> int | None:
    """The strongest unselected expert of the groups that the router kept, or None."""
    ranked = p_E if bias_E is None else p_E + bias_E
    among = range(len(p_E))
    if router.groups is not None:
        count, kept = router.groups
        size = len(p_E) // count

        def strength(group: int) -> float:
            members = sorted(ranked[group * size : (group + 1) * size], reverse=True)
            return members[0] if router.outside == 0.0 else members[0] + members[1]

        groups = sorted(range(count), key=lambda g: (-strength(g), g))[:kept]
        among = [e for g in sorted(groups) for e in range(g * size, (g + 1) * size)]
    left = [e for e in among if e not in chosen]
    return min(left, key=lambda e: (-ranked[e], e)) if left else None


def captured(moe, ids_BL):
    """Per layer: logits, selection, bias, scale per expert, and every expert's output on every token, in float64."""
    found, inputs, handles = {}, {}, []
    for layer in moe.layers:
        handles += layer.watch_router(lambda call, _dtype, index=layer.index: found.update({index: call}))
        handles.append(
            layer.experts.register_forward_pre_hook(
                lambda _m, args, index=layer.index: inputs.update({index: args[0].clone()})
            )
        )
    with torch.inference_mode():
        moe.model(input_ids=ids_BL, use_cache=False)
        for handle in handles:
            handle.remove()
        # Identity experts follow the experts, and say what they are told.
        outputs = {
            layer.index: torch.stack([
                layer.run_experts(inputs[layer.index], torch.full((ids_BL.numel(),), e))
                for e in range(layer.expert_count)
            ] + [inputs[layer.index]] * layer.convention.identities, dim=1)
            for layer in moe.layers
        }  # fmt: skip
    for index, call in found.items():
        array = {
            name: None if value is None else value.double().numpy()
            for name, value in (
                ("bias", call.bias_E),
                ("scale", call.expert_scale_E),
                ("logits", call.logits_TE),
                ("gates", call.gates_TK),
            )
        }
        yield index, array, call.index_TK.tolist(), outputs[index].double().numpy()


def routed(router, weights: dict[int, float], outputs_ED: np.ndarray, scale_E) -> np.ndarray:
    """A routed output: Σ of c·s_e·p_e/(Σp + ε)·f_e over the experts that `weights` names, p by expert."""
    total = max(sum(weights.values()) + router.plus, router.at_least)
    result = np.zeros(outputs_ED.shape[1])
    for e, p in weights.items():
        gate = router.c * p / total if router.divides else router.c * p
        result += gate * (1.0 if scale_E is None else scale_E[e]) * outputs_ED[e]
    return result


def damage(router, array, index_TK, outputs_TED) -> dict[str, np.ndarray]:
    """Σ d and Σ d² of every quantity, by expert, in a loop over tokens and their experts."""
    names = ("rcs", "rcs-loo", "refill", "frozen-refill")
    sums = {name: np.zeros((2, outputs_TED.shape[1])) for name in names}
    p_TE = scores_of(router, array["logits"])
    for p_E, chosen, outputs_ED in zip(p_TE, index_TK, outputs_TED, strict=True):
        weights = {e: p_E[e] for e in chosen}
        runner = best_left(router, p_E, array["bias"], chosen)
        whole_D = routed(router, weights, outputs_ED, array["scale"])
        for e in chosen:
            rest = {other: p for other, p in weights.items() if other != e}
            refilled = rest if runner is None else {**rest, runner: p_E[runner]}
            share = weights[e] / max(sum(weights.values()) + router.plus, router.at_least) if router.divides else 0.0
            own_D = router.c * (1.0 if array["scale"] is None else array["scale"][e]) * outputs_ED[e]
            found = {
                "rcs": np.linalg.norm(share * (own_D - whole_D)),
                "rcs-loo": np.linalg.norm(routed(router, rest, outputs_ED, array["scale"]) - whole_D),
                "refill": np.linalg.norm(routed(router, refilled, outputs_ED, array["scale"]) - whole_D),
            }
            # Every gate as the unpruned router makes it.
            total = max(sum(weights.values()) + router.plus, router.at_least) if router.divides else 1.0
            parts = []
            for who in (e, runner):
                scale = 1.0 if array["scale"] is None or who is None else array["scale"][who]
                parts.append(0.0 if who is None else router.c * p_E[who] / total * scale * outputs_ED[who])
            found["frozen-refill"] = np.linalg.norm(parts[0] - parts[1])
            for name, d in found.items():
                sums[name][0, e] += d
                sums[name][1, e] += d * d
    return sums
