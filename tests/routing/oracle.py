"""Routers, gates and experts in float64 numpy, written from the models' own code and from 2610.41366 §3.

Nothing here imports prunebench. T tokens, K slots, E experts, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch


@dataclass(frozen=True)
class Router:
    """One router as its modeling file computes it; `groups` is (count, kept, how a group is scored)."""

    score: str
    renormalised: bool
    factor: float = 1.0
    epsilon: float = 0.0
    groups: tuple[int, int, str] | None = None


# The numbers are those of the tiny models' configurations.
ROUTERS = {
    "olmoe": Router("softmax", renormalised=False),
    "qwen3_moe": Router("softmax", renormalised=True),
    "granitemoe": Router("softmax", renormalised=True),
    "deepseek_v2": Router("softmax", renormalised=False),
    "deepseek_v2.groups": Router("softmax", renormalised=False, factor=16.0, groups=(4, 2, "max")),
    "deepseek_v3": Router("sigmoid", renormalised=True, factor=2.446, epsilon=1e-20),
    "deepseek_v3.groups": Router("sigmoid", renormalised=True, factor=2.5, epsilon=1e-20, groups=(4, 2, "top2sum")),
}


def array(tensor: torch.Tensor | None) -> Any:
    """A tensor as float64 or int64 numpy."""
    if tensor is None:
        return None
    tensor = tensor.detach().cpu()
    return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()


def scores(router: Router, logits_TE: np.ndarray) -> np.ndarray:
    """p."""
    logits_TE = np.asarray(logits_TE, dtype=np.float64)
    if router.score == "sigmoid":
        return 1.0 / (1.0 + np.exp(-logits_TE))
    shifted = np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def choices(router: Router, logits_TE: np.ndarray, bias_E: np.ndarray | None = None) -> np.ndarray:
    """What is ranked, in float32 as the routers do: p + b, or the logits, whose order is a softmax's."""
    if router.score == "softmax":
        return np.asarray(logits_TE, dtype=np.float32)
    p_TE = scores(router, logits_TE)
    return (p_TE if bias_E is None else p_TE + bias_E).astype(np.float32)


def eligible(router: Router, choice_E: np.ndarray) -> set[int]:
    """Experts of the groups that the unpruned router keeps, for one token."""
    if router.groups is None:
        return set(range(len(choice_E)))
    count, kept, how = router.groups
    size = len(choice_E) // count
    groups = [list(range(g * size, (g + 1) * size)) for g in range(count)]

    def strength(members: list[int]) -> float:
        ranked = sorted((float(choice_E[e]) for e in members), reverse=True)
        return ranked[0] if how == "max" else ranked[0] + ranked[1]

    best = sorted(range(count), key=lambda g: -strength(groups[g]))[:kept]
    return {expert for g in best for expert in groups[g]}


def top(choice_E: np.ndarray, among: set[int], k: int) -> list[int]:
    """The k best, ties to the lowest id."""
    return sorted(among, key=lambda e: (-float(choice_E[e]), e))[:k]


def select(router: Router, choice_E: np.ndarray, dense_K: list[int], blocked: set[int]) -> list[int]:
    """S: members of D keep their slots, the best routable others fill the holes in slot order."""
    free = eligible(router, choice_E) - blocked - set(dense_K)
    promoted = iter(top(choice_E, free, len(dense_K)))
    return [next(promoted) if e in blocked else e for e in dense_K]


def normaliser(  # noqa: PLR0917  in the order of the equations
    router: Router,
    p_E: np.ndarray,
    choice_E: np.ndarray,
    dense_K: list[int],
    chosen_K: list[int],
    blocked: set[int],
    scale: str,
) -> float:
    """Z of 2610.41366 §3 and 2609.04575 (2), for one token."""
    routable = set(range(len(p_E))) - blocked
    kind, _, number = scale.partition(":")
    if kind == "keep":
        return float(p_E[dense_K].sum()) + router.epsilon if router.renormalised else 1.0
    if kind == "renorm":
        if router.renormalised:
            return float(p_E[chosen_K].sum()) + router.epsilon
        return 1.0 - float(p_E[sorted(blocked)].sum())
    if kind == "ref":
        if not router.renormalised:
            return 1.0
        return float(p_E[top(choice_E, routable & eligible(router, choice_E), int(number))].sum()) + router.epsilon
    ends = [normaliser(router, p_E, choice_E, dense_K, chosen_K, blocked, end) for end in ("keep", "renorm")]
    return (1 - float(number)) * ends[0] + float(number) * ends[1]


def route(  # noqa: PLR0917  in the order of the equations
    router: Router,
    logits_TE: np.ndarray,
    bias_E: np.ndarray | None,
    dense_TK: np.ndarray,
    blocked: set[int],
    scale: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Experts and gates of every token after rerouting."""
    p_TE, choice_TE = scores(router, logits_TE), choices(router, logits_TE, bias_E)
    chosen, gates = [], []
    for p_E, choice_E, dense in zip(p_TE, choice_TE, dense_TK.tolist(), strict=True):
        picked = select(router, choice_E, dense, blocked)
        z = normaliser(router, p_E, choice_E, dense, picked, blocked, scale)
        chosen.append(picked)
        gates.append(router.factor * p_E[picked] / z)
    return np.array(chosen), np.array(gates)


def expert(experts: torch.nn.Module, e: int, x_SD: np.ndarray) -> np.ndarray:
    """down(silu(gate(x)) · up(x)) of one expert, from its weights."""
    both = x_SD @ array(experts.gate_up_proj)[e].T
    gate, up = np.split(both, 2, axis=1)
    return (gate / (1.0 + np.exp(-gate)) * up) @ array(experts.down_proj)[e].T


def mixture(
    experts: torch.nn.Module, x_TD: np.ndarray, index_TK: np.ndarray, gates_TK: np.ndarray, answers: Any = None
) -> np.ndarray:
    """Σ_k g·f(x); `answers` maps expert id to a function that stands for it."""
    total = np.zeros_like(x_TD)
    for e in np.unique(index_TK):
        rows, slots = np.nonzero(index_TK == e)
        answer = (answers or {}).get(int(e)) or (lambda x, e=int(e): expert(experts, e, x))
        total[rows] += gates_TK[rows, slots, None] * answer(x_TD[rows])
    return total


class Trace:
    """Plain hooks of our own: each MoE block's input and output, and each router's output, in one list per layer."""

    def __init__(self, layers: Any) -> None:
        self.inputs: dict[int, list[torch.Tensor]] = {layer.index: [] for layer in layers}
        self.outputs: dict[int, list[torch.Tensor]] = {layer.index: [] for layer in layers}
        self.router: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {x.index: [] for x in layers}
        self._layers, self._handles = layers, []

    def __enter__(self) -> Self:
        for layer in self._layers:

            def block(_module: Any, args: Any, output: Any, index: int = layer.index) -> None:
                self.inputs[index].append(args[0].detach().reshape(-1, args[0].shape[-1]))
                self.outputs[index].append(output.detach().reshape(-1, output.shape[-1]))

            def router(_module: Any, _args: Any, output: Any, index: int = layer.index) -> None:
                self.router[index].append(output)

            self._handles += [
                layer.block.register_forward_hook(block),
                layer.router.register_forward_hook(router),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def bias_of(router: torch.nn.Module) -> np.ndarray | None:
    """The selection bias of the routers that have one."""
    return array(getattr(router, "e_score_correction_bias", None))


def shared(block: torch.nn.Module, x_TD: torch.Tensor) -> np.ndarray:
    """What shared experts add to a block's output."""
    module = getattr(block, "shared_experts", None)
    return array(module(x_TD)) if module is not None else np.zeros(tuple(x_TD.shape))
