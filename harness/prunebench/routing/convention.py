"""The one table of router conventions: what each router class of transformers computes, as data.

A row says how logits become scores, what chooses, whether the selected gates are renormalised, and by which factor they
are scaled. Rows are keyed by router class because that is where the computation lives; a row is trusted only after
`moe.open_model` has replayed the router's own selection and gates from it, bit for bit, on the model at hand.

Notation (2610.41366 §3): p score, b selection bias, c scaling factor, D the unpruned top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import torch

from prunebench.errors import UsageError

__all__ = ["REFUSED", "ROUTERS", "UNPRUNABLE", "Convention", "Groups", "RouterRow", "convention_of", "reach"]

Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "selected_softmax", "selected_sigmoid", "sparsemixer"]
GroupScore = Literal["max", "top2sum"]
DtypeOf = Literal["logits", "hidden", "float32"]
ScaleKind = Literal["keep", "renorm", "interp", "ref"]


@dataclass(frozen=True)
class Groups:
    """Group-limited selection: only the `kept` best of `count` equal, contiguous groups of experts are eligible.

    Args:
        count: number of groups.
        kept: groups that stay eligible.
        score: a group's score: its best choice (DeepSeek-V2) or the sum of its two best (DeepSeek-V3).
    """

    count: int
    kept: int
    score: GroupScore

    @property
    def outside(self) -> float:
        """What the router writes over the choice of experts outside the kept groups."""
        return 0.0 if self.score == "max" else float("-inf")

    @property
    def smallest(self) -> int:
        """The fewest experts of a group that its score is defined for."""
        return 1 if self.score == "max" else 2

    def check(self, experts: int, top_k: int, *, where: str = "") -> None:
        """Raise unless E experts form such groups, and the kept ones hold k experts.

        Raises:
            UsageError: naming the numbers.
        """
        size, rest = divmod(experts, self.count)
        if rest:
            problem, expected = f"{experts} experts in {self.count} router groups", "a multiple of the groups"
        elif size < self.smallest:
            problem = f"router groups of {size} expert"
            expected = f"at least {self.smallest}, of which a group's score is the sum"
        elif not 1 <= self.kept <= self.count:
            problem, expected = f"{self.kept} kept router groups of {self.count}", f"1 to {self.count}"
        elif self.kept * size < top_k:
            problem = f"top-{top_k} from {self.kept} router groups of {size} experts"
            expected = "at least k experts in the kept groups"
        else:
            return
        raise UsageError(problem, where=where, expected=expected)


@dataclass(frozen=True)
class Convention:
    """What one router computes, with its numbers filled in.

    Args:
        score: `softmax` over all logits; `sigmoid` or `sqrtsoftplus` of each; `selected_softmax`: a softmax over the k
            selected logits, which is a softmax over all, renormalised over the selected; `selected_sigmoid`: experts
            are chosen by their logits, of which the gate is the sigmoid; `sparsemixer`: two argmaxes in turn, each gate
            a softmax over the logits within a band below the maximum (2409.12136).
        renormalised: the selected gates are divided by their sum, as trained.
        factor: c, multiplied last.
        epsilon: added to the sum before dividing.
        floor: the least sum that is divided by.
        biased: a learned bias b is added to the score to choose, never to weigh.
        groups: group-limited selection, or None.
        gates_in: dtype of the gates that the router returns.
        scores_in: dtype that the scores, and so the gates, are computed in.
        gates_on: whether a gate multiplies the expert's output, or its input.
        expert_scales: a learned number per expert multiplies its gate, after c.
        identities: choices after the experts that pass the token on unchanged; nothing is stored for them, so they are
            never pruned.
        band: relative width below the maximum that `sparsemixer` counts in.
        sorted_topk: the router asks `torch.topk` for sorted slots (slot order only).
        fewest_rows: experts that the router's own code needs: DeepSeek-V3's sums the two best of every group, also of
            an only one, which is no limit.
    """

    score: Score
    renormalised: bool
    factor: float = 1.0
    epsilon: float = 0.0
    floor: float = 0.0
    biased: bool = False
    groups: Groups | None = None
    gates_in: DtypeOf = "float32"
    scores_in: DtypeOf = "float32"
    gates_on: Literal["output", "input"] = "output"
    expert_scales: bool = False
    identities: int = 0
    band: float = 0.0
    sorted_topk: bool = True
    fewest_rows: int = 1

    @property
    def trained_scale(self) -> Literal["keep", "renorm"]:
        """The scale that survivors' gates were trained under (2610.41366 §1)."""
        return "renorm" if self.renormalised or self.score == "sparsemixer" else "keep"

    @property
    def scales(self) -> tuple[ScaleKind, ...]:
        """The kinds of scale that are defined: sparsemixer gives an expert that it does not select no gate to keep."""
        return ("renorm",) if self.score == "sparsemixer" else ("keep", "renorm", "interp", "ref")

    @property
    def chosen_by_logits(self) -> bool:
        """Whether the router ranks logits, not scores."""
        return self.score in {"selected_softmax", "selected_sigmoid", "sparsemixer"}

    @property
    def simplex(self) -> bool:
        """Whether the scores of a token sum to one over all choices."""
        return self.score in {"softmax", "selected_softmax"}

    @property
    def one_scale(self) -> bool:
        """Whether Z is 1 under every scale: independent scores that are not renormalised."""
        return not self.renormalised and self.score in {"sigmoid", "selected_sigmoid", "sqrtsoftplus"}

    def loses_rows(self, scale: str, survivors: int) -> bool:
        """Whether a router without the pruned rows computes a resolved scale (its kind), groups apart.

        That is renorm, or any scale where all are one, if enough rows are left. Removal rescales a softmax, p/(1 - P),
        but not a bias added to it, so with one the two rank experts differently.
        """
        computes = (scale == "renorm" or self.one_scale) and not (self.simplex and self.biased)
        return computes and survivors >= self.fewest_rows

    def describe(self) -> str:
        """The convention in a few words, for tables."""
        words: list[str] = [self.score.removeprefix("selected_")]
        if self.score != "sparsemixer":
            words.append("renorm" if self.renormalised else "no renorm")
        if self.biased:
            words.append("bias")
        if self.factor != 1.0:
            words.append(f"×{self.factor:g}")
        if self.expert_scales:
            words.append("a scale per expert")
        if self.groups:
            words.append(f"{self.groups.kept} of {self.groups.count} groups")
        if self.identities:
            words.append(f"{self.identities} identity experts")
        if self.gates_on == "input":
            words.append("gates on the input")
        return ", ".join(words)


def reach(module: torch.nn.Module, path: str) -> Any:
    """The attribute at a dotted path, e.g. `moe_statics.e_score_correction_bias`."""
    return reduce(getattr, path.split("."), module)


@dataclass(frozen=True)
class RouterRow:
    """One row of the table. Strings are dotted paths of attributes, from the router module unless said otherwise.

    Args:
        score: see `Convention`, as all that is not named here.
        rows: tensors with one entry per choice on their first axis; the first is the matrix whose rows score experts.
        bias: the selection bias: one number per choice, in any shape.
        bias_on: the module that owns the bias; a block hands it to its router at every call.
        bias_if: the router's switch for the bias.
        scale: the number per expert that multiplies its gate.
        grouped_if: (attribute, value): groups apply only where the router says so.
        top_k: K.
        choices: counts experts and identity experts together; `num_experts` then counts the experts.
        logits_from: the child module that computes the logits, where the router returns something else.
        returns: `(logits, gates, index)`, or `(dense scores, logits)`.
        note: what a person should know about pruning such a model, in one line.
    """

    score: Score
    renormalised: str | bool
    factor: str | float = 1.0
    epsilon: float = 0.0
    floor: str | float = 0.0
    rows: tuple[str, ...] = ("weight",)
    bias: str | None = None
    bias_on: Literal["router", "block"] = "router"
    bias_if: str | None = None
    scale: str | None = None
    groups: tuple[str, str, GroupScore] | None = None
    grouped_if: tuple[str, str] | None = None
    gates_in: DtypeOf = "float32"
    scores_in: DtypeOf = "float32"
    gates_on: Literal["output", "input"] = "output"
    band: str | float = 0.0
    sorted_topk: bool = True
    top_k: str = "top_k"
    choices: str | None = None
    logits_from: str | None = None
    returns: Literal["triple", "dense"] = "triple"
    note: str = ""

    def resolve(self, router: torch.nn.Module) -> Convention:
        """Fill the numbers in from a router module."""

        def number(value: Any) -> Any:
            return reach(router, value) if isinstance(value, str) else value

        groups = None
        if self.groups and (self.grouped_if is None or getattr(router, self.grouped_if[0]) == self.grouped_if[1]):
            count, kept = int(number(self.groups[0]) or 1), int(number(self.groups[1]) or 1)
            # One group is no limit: dropping it keeps every later rule simple, and the self-check proves it harmless.
            groups = Groups(count, kept, self.groups[2]) if count > 1 else None
        return Convention(
            score=self.score,
            renormalised=bool(number(self.renormalised)),
            factor=float(number(self.factor)),
            epsilon=self.epsilon,
            floor=float(number(self.floor)),
            biased=self.bias is not None and (self.bias_if is None or bool(number(self.bias_if))),
            groups=groups,
            gates_in=self.gates_in,
            scores_in=self.scores_in,
            gates_on=self.gates_on,
            expert_scales=self.scale is not None,
            identities=int(number(self.choices) - number("num_experts")) if self.choices else 0,
            band=float(number(self.band)),
            sorted_topk=self.sorted_topk,
            fewest_rows=2 if self.groups is not None and self.groups[2] == "top2sum" else 1,
        )


_OLMOE = RouterRow("softmax", renormalised="norm_topk_prob", gates_in="logits")
_RENORMALISING = replace(_OLMOE, renormalised=True)
_MIXTRAL = replace(_RENORMALISING, gates_in="float32")
_GRANITE = RouterRow("selected_softmax", renormalised=True, gates_in="hidden")
# config.norm_topk_prob exists and is ignored by this router.
_DEEPSEEK_V2 = RouterRow(
    "softmax",
    renormalised=False,
    factor="routed_scaling_factor",
    groups=("num_group", "topk_group", "max"),
    grouped_if=("topk_method", "group_limited_greedy"),
    sorted_topk=False,
)
# Moonlight is a DeepSeek-V3 with one group and factor 2.446.
_DEEPSEEK_V3 = RouterRow(
    "sigmoid",
    renormalised="norm_topk_prob",
    factor="routed_scaling_factor",
    epsilon=1e-20,
    bias="e_score_correction_bias",
    groups=("num_group", "topk_group", "top2sum"),
    sorted_topk=False,
)
_HY_V3 = RouterRow(
    "sigmoid",
    renormalised=True,
    factor="router_scaling_factor",
    epsilon=1e-20,
    bias="e_score_correction_bias",
    bias_on="block",
    sorted_topk=False,
)
_ERNIE = RouterRow(
    "softmax",
    renormalised=True,
    floor="norm_min",
    bias="moe_statics.e_score_correction_bias",
    gates_in="hidden",
    note="the bias is added to a softmax: masks rank experts by the unpruned p + b, which a router without the pruned"
    " rows does not",
)
_GEMMA4 = RouterRow(
    "softmax",
    renormalised=True,
    rows=("proj.weight",),
    scale="per_expert_scale",
    top_k="config.top_k_experts",
    logits_from="proj",
    note="a norm follows the experts: keep and renorm differ by one scalar per token, which it divides out again",
)

# Classes of one row compute the same, statement for statement; each was compared in transformers 5.24.
ROUTERS: dict[str, RouterRow] = {
    **dict.fromkeys(
        (
            *("OlmoeTopKRouter", "FlexOlmoTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter"),
            *("Qwen3NextTopKRouter", "MellumTopKRouter", "Qwen3OmniMoeThinkerTextTopKRouter"),
            *("Qwen3OmniMoeTalkerTextTopKRouter", "Qwen4ExpTextTopKRouter"),
        ),
        _OLMOE,
    ),
    **dict.fromkeys(("Qwen3_5MoeTopKRouter", "Qwen3OmniMoeTextTopKRouter", "Qwen3VLMoeTextTopKRouter"), _RENORMALISING),
    "HunYuanMoEV1Gate": replace(_RENORMALISING, rows=("wg.weight",)),
    **dict.fromkeys(("MixtralTopKRouter", "MiniMaxTopKRouter"), _MIXTRAL),
    "JambaTopKRouter": RouterRow("softmax", renormalised=False, gates_in="hidden"),
    **dict.fromkeys(
        (
            *("GraniteMoeTopKRouter", "GraniteMoeSharedTopKRouter", "GraniteMoeHybridTopKRouter"),
            "GraniteMoeSWATopKRouter",
        ),
        _GRANITE,
    ),
    # The bias of this router is part of its logits: it chooses and weighs.
    "GptOssTopKRouter": replace(_GRANITE, gates_in="logits", scores_in="logits", rows=("weight", "bias")),
    **dict.fromkeys(("DeepseekV2TopkRouter", "DeepseekOcr2TextTopkRouter", "UnlimitedOcrTextTopkRouter"), _DEEPSEEK_V2),
    **dict.fromkeys(
        (
            *("DeepseekV3TopkRouter", "DeepseekV32TopkRouter", "Glm4MoeTopkRouter", "Glm4MoeLiteTopkRouter"),
            *("Dots1TopkRouter", "NemotronHTopkRouter", "BailingHybridTopkRouter", "AXK1TopkRouter"),
            *("Dots3NoteTextTopkRouter", "ExaoneMoeTopkRouter", "Glm4vMoeTextTopkRouter", "Glm5NextTextTopkRouter"),
            *("GlmMoeDsaTopkRouter", "HYV4TopkRouter", "HYV4VLTopkRouter", "KimiLinearTopkRouter"),
            *("MiMoV2FlashTopkRouter", "SolarOpenTopkRouter"),
        ),
        _DEEPSEEK_V3,
    ),
    "DeepseekV4TopKRouter": RouterRow(
        "sqrtsoftplus",
        renormalised=True,
        factor="routed_scaling_factor",
        epsilon=1e-20,
        bias="e_score_correction_bias",
        gates_in="logits",
        scores_in="logits",
        sorted_topk=False,
    ),
    **dict.fromkeys(("HYV3TopKRouter", "Dots3NoteVisionTopKRouter"), _HY_V3),
    "MiniMaxM2TopKRouter": replace(_HY_V3, factor=1.0, epsilon=0.0),
    "AfmoeTokenChoiceRouter": replace(
        _HY_V3, factor="route_scale", bias="expert_bias", rows=("gate.weight",), sorted_topk=True
    ),
    "Lfm2MoeTopKRouter": RouterRow(
        "sigmoid",
        renormalised="norm_topk_prob",
        factor="routed_scaling_factor",
        epsilon=1e-6,
        bias="expert_bias",
        bias_on="block",
        bias_if="use_expert_bias",
        gates_in="logits",
        scores_in="logits",
    ),
    **dict.fromkeys(("Ernie4_5_MoeTopKRouter", "Ernie4_5_VLMoeMoeTopKRouter"), _ERNIE),
    **dict.fromkeys(("Gemma4TextRouter", "DiffusionGemmaTextRouter"), _GEMMA4),
    "LongcatFlashTopkRouter": RouterRow(
        "softmax",
        renormalised=False,
        factor="routed_scaling_factor",
        rows=("classifier.weight",),
        bias="e_score_correction_bias",
        gates_in="logits",
        sorted_topk=False,
        choices="n_routed_experts",
        note=_ERNIE.note + "; identity experts are not pruned and count in the softmax",
    ),
    "PhimoeTopKRouter": RouterRow(
        "sparsemixer",
        renormalised=False,
        gates_in="logits",
        scores_in="logits",
        band="router_jitter_noise",
        note="sparsemixer gates exist for the experts that it selects only: renorm runs it again among the survivors,"
        " and no other scale is defined",
    ),
    "Llama4Router": RouterRow(
        "selected_sigmoid",
        renormalised=False,
        gates_in="logits",
        gates_on="input",
        returns="dense",
        note="gates multiply the experts' input: keep and renorm coincide, a fill answers the scaled input, and"
        " calibration statistics, which are of un-weighted outputs, are refused",
    ),
}

# Layers of these routers are left as they are; the model's other layers can be pruned.
UNPRUNABLE: dict[str, str] = {
    "DeepseekV4HashRouter": "experts are looked up in a fixed table by token id, not chosen by a score",
}

# Known routers that cannot be pruned, and why.
REFUSED: dict[str, str] = {
    "DbrxRouter": "it returns logits only, and its block selects the experts",
    "JetMoeTopKGating": "it sorts the tokens by expert itself and returns no selection",
    "ZayaRouter": "its logits depend on the router of the layer before",
    "InklingTopkRouter": "its gates are normalised together with those of the shared experts",
}


def convention_of(router: torch.nn.Module, *, where: str = "") -> tuple[RouterRow, Convention]:
    """The row of a router module (subclasses take their base's) and the convention with its numbers.

    Raises:
        UsageError: if no row describes the router.
    """
    for base in type(router).__mro__:
        if base.__name__ in ROUTERS:
            row = ROUTERS[base.__name__]
            return row, row.resolve(router)
    raise UsageError(
        f"unknown router {type(router).__name__}",
        where=where,
        expected="one of " + ", ".join(sorted(ROUTERS)),
        fix="add its row to prunebench/routing/convention.py",
    )
