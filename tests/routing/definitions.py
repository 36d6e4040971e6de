"""What each supported router computes, and its rerouting arms: one token at a time, in decimals of 200 digits.

Written from 2610.41366 §3 (gates, keep, renorm), 2609.04575 eq. (2) (ref), 2609.30465 App. A.4.3 and transformers'
modeling files (scores, ranking, groups). Nothing here imports prunebench or torch. 200 digits make every underflow of
float32 an ordinary number: 1 - P is computed as it is written.

Scores are exact; what a router RANKS is rounded as the router rounds it, because ties of rounded numbers are ties.
E counts identity experts too; K slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cache

import numpy as np

DIGITS = 200
Scores = Callable[[Sequence[Decimal]], list[Decimal]]
# How a number is stored: as the nearest of its dtype.
Rounding = Callable[[float], float]


def float32(x: float) -> float:
    return float(np.float32(x))


def bfloat16(x: float) -> float:
    """The nearest of float32's upper halves, ties to even."""
    bits = int(np.float32(x).view(np.uint32))
    bits += 0x7FFF + ((bits >> 16) & 1)
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))


ROUNDINGS: dict[str, Rounding] = {"float32": float32, "bfloat16": bfloat16}


def softmax(logits: Sequence[Decimal]) -> list[Decimal]:
    top = max(logits)
    powers = [(x - top).exp() for x in logits]
    return [power / sum(powers) for power in powers]


def sigmoid(logits: Sequence[Decimal]) -> list[Decimal]:
    return [1 / (1 + (-x).exp()) for x in logits]


def sqrtsoftplus(logits: Sequence[Decimal]) -> list[Decimal]:
    return [(1 + x.exp()).ln().sqrt() for x in logits]


@dataclass(frozen=True)
class Router:
    """One router, as its modeling file has it.

    Args:
        scores: p of the logits.
        divides: the gates of the selected are divided by their sum (in the papers: trained with renormalisation).
        c: multiplies every gate.
        plus: is added to that sum.
        at_least: the sum counts for at least this much.
        bias: a bias is added to p to choose.
        by_logits: experts are chosen by their logits.
        groups: (count, kept); `outside` is written over the rest.
        own_dtype: p is stored in the model's dtype, not in float32.
        gates_in_model_dtype: the gates are stored in the model's dtype.
        identities: how many of the choices, the last ones, are identity experts.
        scaled: a number per expert multiplies its gate.
        doubly_rounded: softplus is stored before its root is taken.
    """

    scores: Scores
    divides: bool
    c: float = 1.0
    plus: float = 0.0
    at_least: float = 0.0
    bias: bool = False
    by_logits: bool = False
    groups: tuple[int, int] | None = None
    outside: float = float("-inf")
    own_dtype: bool = False
    gates_in_model_dtype: bool = False
    identities: int = 0
    scaled: bool = False
    doubly_rounded: bool = False

    @property
    def simplex(self) -> bool:
        return self.scores is softmax


# Numbers: the configurations of the random models (prunebench.testing), or else the defaults of transformers' classes.
_V3 = {"scores": sigmoid, "divides": True, "plus": 1e-20, "bias": True}
_LFM2 = {"scores": sigmoid, "divides": True, "plus": 1e-6, "own_dtype": True, "gates_in_model_dtype": True}
ROUTERS: dict[str, Router] = {
    "olmoe": Router(softmax, divides=False, gates_in_model_dtype=True),
    "jamba": Router(softmax, divides=False, gates_in_model_dtype=True),
    "deepseek_v2": Router(softmax, divides=False),
    # The strongest expert of a group is its score, and 0 is written over the others'.
    "deepseek_v2.groups": Router(softmax, divides=False, c=16.0, groups=(4, 2), outside=0.0),
    "qwen3_moe": Router(softmax, divides=True, gates_in_model_dtype=True),
    "mixtral": Router(softmax, divides=True),
    "hunyuan_v1_moe": Router(softmax, divides=True, gates_in_model_dtype=True),
    # A softmax over the selected logits is the softmax over all, divided by its sum over the selected.
    "granitemoe": Router(softmax, divides=True, by_logits=True, gates_in_model_dtype=True),
    # Its bias is part of the logits.
    "gpt_oss": Router(softmax, divides=True, by_logits=True, gates_in_model_dtype=True),
    "gemma4": Router(softmax, divides=True, scaled=True),
    "ernie4_5_moe": Router(softmax, divides=True, at_least=1e-12, bias=True, gates_in_model_dtype=True),
    "longcat_flash": Router(softmax, divides=False, c=6.0, bias=True, identities=6),
    "deepseek_v3": Router(**_V3, c=2.446),
    # The two strongest of a group add up to its score.
    "deepseek_v3.groups": Router(**_V3, c=2.5, groups=(4, 2)),
    "bailing_hybrid": Router(**_V3, c=2.5, groups=(4, 2)),
    "nemotron_h": Router(**_V3, c=2.5),
    "glm4_moe_lite": Router(**_V3, c=1.8),
    "dots1.no_renorm": Router(sigmoid, divides=False, bias=True),
    "hy_v3": Router(**_V3, c=2.826),
    "afmoe": Router(**_V3, c=2.0),
    "minimax_m2": Router(sigmoid, divides=True, bias=True),
    "lfm2_moe": Router(**_LFM2, bias=True),
    "lfm2_moe.no_bias": Router(**_LFM2),
    "deepseek_v4": Router(
        sqrtsoftplus,
        divides=True,
        c=1.5,
        plus=1e-20,
        bias=True,
        own_dtype=True,
        gates_in_model_dtype=True,
        doubly_rounded=True,
    ),
    "llama4": Router(sigmoid, divides=False, by_logits=True, gates_in_model_dtype=True),
}


@cache
def exact_scores(scores: Scores, logits: tuple[float, ...]) -> list[Decimal]:
    """p of these logits."""
    with localcontext(prec=DIGITS):
        return scores([Decimal(x) for x in logits])


@dataclass(frozen=True)
class Token:
    """One token at one router: exact scores p, and what is ranked."""

    router: Router
    p: list[Decimal]
    ranked: list[float]
    scale: list[float] | None = None

    @property
    def experts(self) -> range:
        return range(len(self.p))


def token(
    router: Router,
    logits: Sequence[float],
    bias: Sequence[float] | None = None,
    *,
    dtype: str = "float32",
    scale: Sequence[float] | None = None,
) -> Token:
    """A token whose router computes these logits.

    Where nothing is added to a softmax, it ranks experts as their logits do, which tells apart even those whose p are
    no longer numbers in float32.
    """
    p = exact_scores(router.scores, tuple(logits))
    rounding = ROUNDINGS[dtype] if router.own_dtype else float32
    if router.by_logits or (router.simplex and not router.bias):
        ranked = list(logits)
    else:
        rounded = [rounding(float(x)) for x in p]
        if router.doubly_rounded:
            rounded = [rounding(float(np.sqrt(rounding(float(x * x))))) for x in p]
        ranked = [float32(x + b) for x, b in zip(rounded, bias or [0.0] * len(p), strict=True)]
    return Token(router, p, ranked, None if scale is None else list(scale))


def members(t: Token) -> list[list[int]]:
    """The experts of each group."""
    count = t.router.groups[0] if t.router.groups else 1
    size = len(t.p) // count
    return [list(range(g * size, (g + 1) * size)) for g in range(count)]


def group_scores(t: Token, blocked: frozenset[int] = frozenset()) -> list[float | None]:
    """The score of each group over those that are not blocked; None for a group without any."""
    found: list[float | None] = []
    for group in members(t):
        ranked = sorted((t.ranked[e] for e in group if e not in blocked), reverse=True)
        if not ranked:
            found.append(None)
        elif t.router.outside == 0.0:
            # DeepSeek-V2 takes it from p itself.
            found.append(float32(max(float(t.p[e]) for e in group if e not in blocked)))
        else:
            found.append(float32(sum(ranked[:2])))
    return found


def eligible(t: Token, blocked: frozenset[int] = frozenset()) -> set[int] | None:
    """Experts of the groups that are kept; None if a tie leaves open which these are."""
    if t.router.groups is None:
        return set(t.experts)
    kept = t.router.groups[1]
    scores = {g: s for g, s in enumerate(group_scores(t, blocked)) if s is not None}
    best = sorted(scores, key=lambda g: -scores[g])
    if len(best) > kept and scores[best[kept - 1]] == scores[best[kept]]:
        return None
    groups = members(t)
    return {e for g in best[:kept] for e in groups[g]}


def is_top(t: Token, chosen: Sequence[int], slack: float = 0.0) -> bool:
    """Whether these may be D: distinct, and nobody left out is ranked higher (by more than the slack, relatively)."""
    among = eligible(t)
    if len(set(chosen)) != len(chosen):
        return False
    if among is None:
        return True
    shown = [x if e in among else t.router.outside for e, x in enumerate(t.ranked)]
    if t.router.simplex and not t.router.by_logits and not t.router.bias:
        # The router ranks p itself, whose underflows are ties.
        shown = [float32(float(x)) if e in among else t.router.outside for e, x in enumerate(t.p)]
    worst = min(shown[e] for e in chosen)
    return all(shown[e] <= worst + slack * abs(worst) for e in t.experts if e not in chosen)


def survivors(
    t: Token, dense: Sequence[int], blocked: frozenset[int], among: set[int], *, policy: str = "frozen"
) -> list[int]:
    """S in slot order: members of D keep their slots, the best others fill the holes, ties to the lowest id.

    E stands for an empty slot. Under the policy "reselect" new groups may hold better experts than members of D, which
    then leave too; of equals, the members of D stay.
    """
    gone = set(blocked)
    if policy == "reselect":
        best = sorted(among - blocked, key=lambda e: (-t.ranked[e], e not in dense))
        gone = set(t.experts) - set(best[: len(dense)])
    free = sorted(among - blocked - set(dense), key=lambda e: (-t.ranked[e], e))
    promoted = iter(free)
    return [next(promoted, len(t.p)) if e in gone else e for e in dense]


def smallest(t: Token, z: Decimal) -> float:
    """The smallest gate over this Z that is normal in float32: below it a model's own gates are coarse, or 0."""
    tiny = float(np.finfo(np.float32).tiny)
    return 0.0 if z == 0 else t.router.c * (tiny**0.5 if t.router.doubly_rounded else tiny) / float(z)


def _sum(t: Token, experts: Sequence[int]) -> Decimal:
    """The sum that this router divides by."""
    total = sum((t.p[e] for e in experts if e < len(t.p)), Decimal(0))
    return max(total, Decimal(t.router.at_least)) + Decimal(t.router.plus)


def normaliser(  # noqa: PLR0917  in the order of the equations
    t: Token, dense: Sequence[int], chosen: Sequence[int], blocked: frozenset[int], among: set[int], scale: str
) -> Decimal:
    """Z."""
    kind, _, number = scale.partition(":")
    with localcontext(prec=DIGITS):
        if kind == "interp":
            keep, renorm = (normaliser(t, dense, chosen, blocked, among, end) for end in ("keep", "renorm"))
            return (1 - Decimal(number)) * keep + Decimal(number) * renorm
        if not t.router.divides:
            pruned = sum((t.p[e] for e in blocked), Decimal(0))
            return 1 - pruned if kind == "renorm" and t.router.simplex else Decimal(1)
        if kind == "keep":
            return _sum(t, dense)
        if kind == "renorm":
            return _sum(t, chosen)
        best = sorted((e for e in among - blocked), key=lambda e: (-t.ranked[e], e))
        return _sum(t, best[: int(number)])


def gates(t: Token, chosen: Sequence[int], z: Decimal) -> list[float]:
    """c·p/Z, times the expert's own number; 0 in an empty slot."""
    found = []
    with localcontext(prec=DIGITS):
        for e in chosen:
            gate = Decimal(0) if e == len(t.p) else Decimal(t.router.c) * t.p[e] / z
            found.append(float(gate) * (t.scale[e] if t.scale and e < len(t.p) else 1.0))
    return found


def sparsemixer(logits: Sequence[float], band: float) -> list[tuple[int, float]]:
    """Experts and gates of PhiMoE's router in evaluation (2409.12136), the first then the second, as many as there are.

    Each is the best of what is left. Its gate is a softmax over those left that lie within the band: no further below
    the best than 2·band times their own magnitude, or the best's if that is larger.
    """
    left, found = dict(enumerate(logits)), []
    for _ in range(min(2, len(left))):
        best = max(left, key=lambda e: (left[e], -e))
        top = left[best]
        # The router compares in float32.
        near = [
            x for x in left.values() if x == top or float32(float32(top - x) / max(abs(x), top)) <= float32(2 * band)
        ]
        with localcontext(prec=DIGITS):
            gate = 1 / sum((Decimal(x) - Decimal(top)).exp() for x in near)
        found.append((best, float(gate)))
        del left[best]
    return found
