"""The README.md of an export: what it is, where it is from, and what was measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import prunebench
from prunebench.export.pruned import Anatomy, PrunedModel, in_words
from prunebench.export.quantized import Scheme
from prunebench.quantize import QuantizedModel
from prunebench.storage import PARTS

__all__ = ["card"]

_PLAIN: Final = (
    "from transformers import AutoModelForCausalLM\n\n"
    'model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="{dtype}")'
)
_HOW_TO_LOAD: Final[Mapping[str, str]] = {
    "native": "import prunebench\n\nmodel = prunebench.load(FOLDER)  # on the base model's own weights",
    "hf": _PLAIN,
    "vllm-mone": "vllm serve FOLDER   # 0.32 or later; or, from Python: prunebench.load(FOLDER)",
    "ct": _PLAIN + "  # with compressed-tensors installed",
}
_ASYMMETRIC: Final = "import prunebench\n\nmodel = prunebench.load(FOLDER)  # with compressed-tensors installed"


def card(pruned: PrunedModel, anatomy: Anatomy, form: str, stored: Mapping[str, Any], scheme: Scheme | None) -> str:
    """The card as Markdown.

    Args:
        pruned: what was exported.
        anatomy: of its base model.
        form: name of the format.
        stored: bytes on disk, as `storage.measured` gives them.
        scheme: how weights were quantized, or None.
    """
    plan, convention = pruned.plan, anatomy.layers[0].convention
    total = sum(layer.experts for layer in plan.mask.layers)
    kept = sorted({len(layer.survivors) for layer in plan.mask.layers})
    rows = {
        "format": form,
        "base model": f"{pruned.model} (weights sha256 {pruned.weights_sha256})",
        "mask": f"{plan.mask.pruned_count} of {total} experts pruned, {in_words(kept)} kept per layer,"
        f" digest {plan.mask.digest}",
        "pruned slots": _answers(pruned),
        "router": convention.describe(),
        "gate scale": in_words(plan.scales) or "the unpruned router's gates: every slot is kept",
        "router groups": pruned.policy if convention.groups is not None else "none",
        "evaluated in": f"{pruned.settings.dtype}, {pruned.settings.experts_implementation}, {pruned.settings.device}",
        **({} if scheme is None else {"quantized": _quantized(scheme)}),
        **({} if pruned.quantized is None else {"quantized": _integers(pruned.quantized)}),
        **_of_record(pruned.record),
    }
    asymmetric = scheme is not None and not scheme.symmetric
    lines = [
        f"# {pruned.model}, {_what(pruned)}",
        "",
        f"Written by prunebench {prunebench.__version__} (`prunebench export`).",
        "`prunebench verify FOLDER` compares it with its source.",
        "",
        "```python" if form != "vllm-mone" else "```sh",
        _ASYMMETRIC if asymmetric else _HOW_TO_LOAD[form].format(dtype=pruned.settings.dtype),
        "```",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        "## Bytes on disk",
        "",
        "| part | bytes |",
        "| --- | ---: |",
        *(f"| {part} | {stored['parts'][part]:,} |" for part in PARTS if stored["parts"][part]),
        f"| total | {stored['total']:,} |",
        "",
        *_recorded_bytes(pruned, stored, form),
        *_scores(pruned),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _what(pruned: PrunedModel) -> str:
    done = ["pruned"] * (pruned.plan.mask.pruned_count > 0) + ["quantized"] * (pruned.quantized is not None)
    return " and ".join(done) or "as it was"


def _quantized(scheme: Scheme) -> str:
    attention = f"{scheme.attention_bits} bits" if scheme.attention_bits else "as it was"
    kind = "symmetric" if scheme.symmetric else "asymmetric"
    untested = (
        "" if scheme.symmetric else " Untested: transformers does not load asymmetric experts, others were not tried."
    )
    return (
        f"experts {scheme.bits} bits, attention {attention}; round-to-nearest, {kind}, groups of"
        f" {scheme.group_size} columns.{untested} The scores below are of the unquantized model"
    )


def _integers(quantized: QuantizedModel) -> str:
    bits, setting = quantized.setting.bits, quantized.setting
    widths = [f"{what} {width} bits" for what, width in (("experts", bits.experts), ("linears", bits.linears)) if width]
    mean = " on average" * setting.mixed
    return (
        f"{setting.text}: {in_words(widths)}{mean}; GPTQ, asymmetric, {setting.groups} groups of {bits.group} columns;"
        f" integers sha256 {quantized.digest()}. The scores below are of these integers"
    )


def _answers(pruned: PrunedModel) -> str:
    """Who answers, in words."""
    kinds: dict[str, int] = {}
    for layer in pruned.plan.layers:
        for fill in layer.fills.values():
            kinds[fill.kind] = kinds.get(fill.kind, 0) + 1
    refilled = pruned.plan.mask.pruned_count - sum(kinds.values())
    said = [f"{kind} for {count}" for kind, count in sorted(kinds.items())]
    said += [f"refilled by survivors for {refilled}"] if refilled else []
    said += [f"{len(pruned.plan.edits)} weights of survivors edited"] if pruned.plan.edits else []
    return in_words(said) or "none"


def _of_record(record: Mapping[str, Any] | None) -> dict[str, str]:
    if record is None:
        return {}
    identity = record["identity"]
    rows = {} if record["mask"] is None else {"mask chosen by": str(record["arm"]["mask"])}
    for name, key in (("method", "method"), ("operator", "operator")):
        part = identity[key]
        if part is not None:
            parameters = in_words([f"{field} = {value}" for field, value in part["parameters"].items()])
            rows[name] = f"{part['name']} ({parameters})" if parameters else part["name"]
            rows[name] += f", file sha256 {part['file_sha256'][:16]}"
    quantizer = {} if "quantize" not in identity else {"quantizer": identity["quantize"]["calibration"]}
    for name, part in {**(identity["calibration"] or {}), **quantizer}.items():
        if part is not None:
            words = f"{part['text']}, {part['blocks']} blocks of {part['length']} tokens, draw {part['draw']}"
            rows[f"calibration of the {name}"] = f"{words}, fingerprint {part['fingerprint']}"
    return rows


def _recorded_bytes(pruned: PrunedModel, stored: Mapping[str, Any], form: str) -> list[str]:
    """How the bytes on disk are those of the record, or why not."""
    if pruned.record is None:
        return []
    recorded = pruned.record["storage"]
    if form == "native":
        gone = "with the pruned experts gone " * (pruned.plan.mask.pruned_count > 0)
        smaller = f"{gone}the record counts {recorded['total']:,} bytes"
        return [f"The base model's weights are not in this folder; {smaller}."]
    if recorded["total"] == stored["total"]:
        return ["The record counts the same."]
    different = [part for part in PARTS if recorded["parts"].get(part, 0) != stored["parts"][part]]
    said = in_words([f"{part} {recorded['parts'].get(part, 0):,}" for part in different])
    return [f"The record counts {recorded['total']:,} bytes ({said})."]


def _scores(pruned: PrunedModel) -> list[str]:
    if pruned.record is None:
        return []
    record = pruned.record
    lines = [
        "",
        "## Scores",
        "",
        "Of the run before it was exported; its record is [record.json](prunebench/record.json)",
    ]
    lines[-1] += f" (run `{record['run_id']}`, `{pruned.run}`)."
    lines += ["", "| metric | value | 95 % interval | n |", "| --- | ---: | --- | ---: |"]
    for name, metric in sorted(record["metrics"].items()):
        interval = f"[{metric['low']:.4f}, {metric['high']:.4f}]"
        lines.append(f"| {name} | {metric['value']:.4f} | {interval} | {metric['n']} |")
    if record["status"] != "complete":
        lines += ["", "The run is partial: it asked only the first items of each task."]
    return lines
