"""What each format cannot hold, as one table; it is asked before anything is written.

A row says what is the matter with a pruned model, or nothing; and for which formats that is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prunebench.errors import UsageError
from prunebench.export.naming import edits_by_name
from prunebench.export.pruned import Facts, in_words

__all__ = ["FORMATS", "REFUSALS", "Refusal", "refuse"]

FORMATS: Final = ("native", "hf", "vllm-mone", "ct")
_PLAIN: Final = ("hf", "ct")  # the router has no row for a pruned expert
_COPIES: Final = ("hf", "vllm-mone", "ct")  # weights are copied from the base checkpoint's files
_AS_NATIVE: Final = "export it as native"


@dataclass(frozen=True)
class Refusal:
    """One thing that formats cannot hold.

    Args:
        rule: its name, for tests and the manual.
        formats: that cannot.
        finds: what of it a model has, in words; nothing if it has none.
        expected: what those formats do hold.
        fix: what to do.
    """

    rule: str
    formats: tuple[str, ...]
    finds: Callable[[Facts], str]
    expected: str
    fix: str = _AS_NATIVE


UNREADABLE: Final = {
    "bailing_hybrid": "transformers joins its convolution kernels as it loads, but not where weights are packed",
}
"""Model types whose packed weights transformers 5.24 does not load, and why."""


def _quantized(facts: Facts) -> str:
    return f"the base checkpoint is quantized by {facts.quantization}" if facts.quantization else ""


def _integers(facts: Facts) -> str:
    return f"the run computes with the integers of {facts.integers}" if facts.integers else ""


def _stray(facts: Facts) -> str:
    return f"layer {facts.stray_layers[0]} has experts that the mask does not name" if facts.stray_layers else ""


def _edits(facts: Facts) -> str:
    for index in facts.edited:
        layer = next(layer for layer in facts.anatomy.layers if layer.index == index)
        for name in layer.layout.tensors:
            if edits_by_name(facts.anatomy.headers, index, layer.expert_count, name) is None:
                return f"layer {index}: survivors are edited, and {name} has no tensor of its own in the files"
    return ""


def _filled(facts: Facts) -> str:
    return f"pruned experts are answered by {in_words(sorted(facts.fills))}" if facts.fills else ""


def _scale(facts: Facts) -> str:
    if not (needs := facts.needs_router_rows):
        return ""
    router = facts.anatomy.layers[0].convention.describe()
    return f"scale {in_words(needs)} of this router ({router}) needs the pruned experts' rows"


def _groups(facts: Facts) -> str:
    return facts.other_groups if not facts.answered else ""


def _counts(facts: Facts) -> str:
    return f"layers keep different numbers of experts ({in_words(facts.kept)})" if len(facts.kept) > 1 else ""


def _unprunable(facts: Facts) -> str:
    found = facts.anatomy.unprunable
    return next((f"layer {index} keeps all its experts: {why}" for index, why in sorted(found.items())), "")


def _uncounted(facts: Facts) -> str:
    return "" if facts.anatomy.counts(facts.kept[0]) else "the config does not say how many experts a layer has"


def _refilled(facts: Facts) -> str:
    return "" if facts.answered else "slots of pruned experts are refilled by survivors"


def _functions(facts: Facts) -> str:
    return f"pruned experts are answered by {in_words(facts.strange_fills)}" if facts.strange_fills else ""


def _input_gates(facts: Facts) -> str:
    return "gates multiply the experts' input" * (facts.anatomy.layers[0].convention.gates_on == "input")


def _identities(facts: Facts) -> str:
    count = facts.anatomy.layers[0].convention.identities
    return f"the router also chooses among {count} identity experts" if count else ""


def _unreadable(facts: Facts) -> str:
    kind = facts.anatomy.config.get_text_config().model_type
    return f"{kind}: {UNREADABLE[kind]}" if kind in UNREADABLE else ""


def _stacked(facts: Facts) -> str:
    name = facts.anatomy.stacked
    return f"the files stack the experts of a layer in one tensor ({name})" if name else ""


REFUSALS: Final = (
    Refusal("quantized", _COPIES, _quantized, "a base checkpoint with plain weights"),
    Refusal("integers", _COPIES, _integers, "a run without --quantize; ct makes integers of its own as it writes"),
    Refusal("unreadable", ("ct",), _unreadable, "a model type whose packed weights transformers loads"),
    Refusal("fills", _PLAIN, _filled, "rerouted slots: nothing in this format answers for a pruned expert"),
    Refusal("scale", _PLAIN, _scale, "a scale that a router without them computes, such as renorm of a softmax"),
    Refusal("groups", _PLAIN, _groups, "--groups reselect, and equally many survivors in every router group"),
    Refusal("counts", _PLAIN, _counts, "one number in all layers, which a config can hold"),
    Refusal("unprunable", _PLAIN, _unprunable, "one number of experts in all layers, which a config can hold"),
    Refusal("stray", _PLAIN, _stray, "expert tensors of the mask's layers only"),
    Refusal("uncounted", _PLAIN, _uncounted, "a config with a number of experts"),
    Refusal("refilled", ("vllm-mone",), _refilled, "an operator that keeps slots: this format changes no routing"),
    Refusal("functions", ("vllm-mone",), _functions, "Constant or Zero: this format stores one vector per expert"),
    Refusal("input gates", ("vllm-mone",), _input_gates, "gates that multiply the experts' output"),
    Refusal("identities", ("vllm-mone",), _identities, "a router over experts only"),
    Refusal("stacked", ("vllm-mone", "ct"), _stacked, "tensors named expert by expert"),
    Refusal("edits", _COPIES, _edits, "edited weights that the files name"),
)


def refuse(facts: Facts, form: str) -> None:
    """Raise for the first thing of a pruned model that a format cannot hold.

    Raises:
        UsageError: with the format's name and the reason.
    """
    for row in REFUSALS:
        if form in row.formats and (found := row.finds(facts)):
            raise UsageError(f"{form} cannot hold this model: {found}", expected=row.expected, fix=row.fix)
