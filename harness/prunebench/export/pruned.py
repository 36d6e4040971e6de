"""What is exported: a pruned model as it was evaluated, and the facts about it that decide what a format can hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from prunebench.errors import UsageError
from prunebench.install import configured_counts
from prunebench.mask import GroupPolicy, Mask
from prunebench.moe.layer import MoELayer, find_layers, find_unprunable
from prunebench.moe.load import empty_model, load_weights
from prunebench.plan import LayerPlan, Plan
from prunebench.quantize import QuantizedModel
from prunebench.record import Run
from prunebench.replacement import Constant, Survivor, Zero
from prunebench.routing import Scale
from prunebench.run.arm import PreparedArm
from prunebench.run.rebuild import rebuild
from prunebench.run.session import Progress
from prunebench.storage import Tensor, expert_of, layer_of, part_of, read_headers

__all__ = [
    "Anatomy",
    "Facts",
    "PrunedModel",
    "Settings",
    "facts_of_plan",
    "facts_of_record",
    "pruned_model_of",
    "whole_plan",
]


@dataclass(frozen=True)
class Settings:
    """How the model was run: exactness holds for one of each.

    Args:
        dtype: of the weights.
        device: `cpu` or `cuda`; `map:auto` is a model spread over devices.
        experts_implementation: of transformers.
    """

    dtype: str = "float32"
    device: str = "cpu"
    experts_implementation: str = "eager"

    def weights(self, folder: Path) -> Any:
        """The model of a checkpoint folder, loaded so."""
        kind, _, spread = self.device.partition(":")
        mapped = kind == "map"
        return load_weights(
            folder,
            device="cpu" if mapped else self.device,
            dtype=self.dtype,
            device_map=spread if mapped else None,
            experts_implementation=self.experts_implementation,
        )


@dataclass(frozen=True)
class PrunedModel:
    """A pruned model as it was evaluated.

    Args:
        model: the base model as a person names it: zoo name, hub id or folder.
        folder: the base model's files.
        weights_sha256: what identifies them.
        plan: mask, fills, edits and scales.
        policy: who chooses the groups of a group-limited router.
        settings: how it was run.
        record: of the run, or None.
        run: where that was, for the card.
        quantized: the integers that it computes with, its edits in them; None if it is not quantized.
    """

    model: str
    folder: Path
    weights_sha256: str
    plan: Plan
    policy: GroupPolicy = "frozen"
    settings: Settings = Settings()
    record: Mapping[str, Any] | None = None
    run: str | None = None
    quantized: QuantizedModel | None = None


def pruned_model_of(
    run: Run,
    check: Callable[[Facts], None],
    *,
    model: str | None = None,
    operator: str | None = None,
    progress: Progress | None = None,
) -> PrunedModel:
    """A recorded run as a model to export; operator and quantizer are asked once more, and must answer the same.

    Args:
        run: a run that is pruned, quantized or both.
        check: is shown the facts that the record tells, before anything is computed.
        model: the model's folder, where the record has only its name.
        operator: the operator's file, if it is not shipped.
        progress: called with (what, done, total).

    Raises:
        PruneBenchError: as `rebuild`, and whatever `check` raises.
    """

    def early(arm: PreparedArm) -> None:
        check(facts_of_record(run.record, Anatomy.of(arm.folder)))

    arm, plan, quantized = rebuild(run, model=model, operator=operator, check=early, progress=progress)
    known = arm.known
    return PrunedModel(
        model=str(Path(arm.spec.model).resolve()) if Path(arm.spec.model).is_dir() else arm.spec.model,
        folder=arm.folder,
        weights_sha256=known["model"]["weights_sha256"],
        plan=plan if plan is not None else whole_plan(Anatomy.of(arm.folder)),
        policy=arm.policy,
        settings=Settings(known["dtype"], known["device"], known["experts_implementation"]),
        record=run.record,
        run=f"{run.path.parent.name}/{run.path.name}",
        quantized=quantized,
    )


@dataclass(frozen=True)
class Anatomy:
    """What a checkpoint is, from its config and the headers of its files.

    Args:
        config: transformers' config.
        layers: MoE layers without weights, by increasing index.
        unprunable: index -> why that layer keeps all its experts.
        headers: tensors of its files.
        linears: module paths of the model's linear layers.
    """

    config: Any
    layers: tuple[MoELayer, ...]
    unprunable: Mapping[int, str]
    headers: Mapping[str, Tensor]
    linears: frozenset[str]

    @classmethod
    def of(cls, folder: Path) -> Anatomy:
        """Of a checkpoint folder; reads no weight."""
        model = empty_model(folder)
        unprunable = {layer.index: layer.reason for layer in find_unprunable(model)}
        linears = frozenset(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
        return cls(model.config, find_layers(model, where=str(folder)), unprunable, read_headers(folder), linears)

    def counts(self, kept: int) -> dict[str, Any]:
        """The config's words for a layer's number of experts, if that is `kept`."""
        return configured_counts(self.config.get_text_config(), self.layers[0].expert_count, kept)

    @property
    def stacked(self) -> str | None:
        """A tensor that holds several experts; None if each expert has tensors of its own."""
        names = (name for name in self.headers if part_of(name) == "experts" and expert_of(name) is None)
        return next(names, None)

    @property
    def layer_count(self) -> int:
        """Decoder layers."""
        return int(self.config.get_text_config().num_hidden_layers)


def whole_plan(anatomy: Anatomy) -> Plan:
    """The plan of a model that is not pruned."""
    scale = anatomy.layers[0].convention.trained_scale
    layers = tuple(LayerPlan(layer.index, {}, scale, scale) for layer in anatomy.layers)
    return Plan(Mask.for_shapes([layer.shape for layer in anatomy.layers], {}), layers, {}, {})


@dataclass(frozen=True)
class Facts:
    """What decides whether a format can hold a pruned model.

    Args:
        anatomy: of the base model.
        mask: the pruned experts.
        fills: classes that answer pruned slots; one of a method's own file as `file:Class`.
        answered: whether every pruned expert keeps its slots.
        scales: resolved scales of refilled slots; none if `answered`.
        policy: of router groups.
        edited: layers with edited survivors.
        integers: the setting that weights are quantized by; nothing if they are not.
    """

    anatomy: Anatomy
    mask: Mask
    fills: frozenset[str]
    answered: bool
    scales: tuple[str, ...]
    policy: GroupPolicy
    edited: tuple[int, ...]
    integers: str = ""

    @property
    def kept(self) -> tuple[int, ...]:
        """The distinct numbers of experts that layers keep, increasing."""
        return tuple(sorted({len(layer.survivors) for layer in self.mask.layers}))

    @property
    def needs_router_rows(self) -> tuple[str, ...]:
        """The scales that a router without the pruned experts' rows does not compute."""
        convention = self.anatomy.layers[0].convention
        return tuple(s for s in self.scales if not convention.loses_rows(Scale.parse(s).kind, self.kept[0]))

    @property
    def other_groups(self) -> str:
        """Why a router without the pruned rows would choose other groups; nothing if it would not."""
        convention = self.anatomy.layers[0].convention
        if convention.groups is None:
            return ""
        if self.policy == "frozen":
            return "the unpruned router chooses the groups"
        for layer, part in zip(self.anatomy.layers, self.mask.layers, strict=True):
            left = {sum(layer.shape.group_of(e) == g for e in part.survivors) for g in range(layer.shape.groups)}
            if len(left) > 1 or min(left) < convention.groups.smallest:
                return f"layer {layer.index} keeps {', '.join(map(str, sorted(left)))} experts per router group"
        return ""

    @property
    def strange_fills(self) -> tuple[str, ...]:
        """The fills that are neither a constant nor nothing."""
        return tuple(sorted(self.fills - {Constant.__name__, Zero.__name__}))

    @property
    def stray_layers(self) -> tuple[int, ...]:
        """Layers whose expert tensors the checkpoint has, and which no mask can name (a multi-token head's)."""
        named = {layer.index for layer in self.mask.layers} | set(self.anatomy.unprunable)
        held = {layer_of(name) for name in self.anatomy.headers if part_of(name) == "experts"}
        return tuple(sorted(index for index in held - named if index is not None))

    @property
    def quantization(self) -> str | None:
        """How the base checkpoint itself is quantized, or None."""
        stated = getattr(self.anatomy.config, "quantization_config", None)
        if stated is None:
            return None
        return str(stated.get("quant_method", "unknown") if isinstance(stated, Mapping) else stated.quant_method)


def facts_of_plan(pruned: PrunedModel, anatomy: Anatomy) -> Facts:
    """The facts of a model that is there."""
    plan = pruned.plan
    fills = [fill for layer in plan.layers for fill in layer.fills.values()]
    return Facts(
        anatomy=anatomy,
        mask=plan.mask,
        fills=frozenset(f"file:{fill.kind}" if fill.file else fill.kind for fill in fills),
        answered=plan.keeps_slots,
        scales=plan.scales,
        policy=pruned.policy,
        edited=_layers_of(plan.edits),
        integers="" if pruned.quantized is None else pruned.quantized.setting.text,
    )


def facts_of_record(record: Mapping[str, Any], anatomy: Anatomy) -> Facts:
    """The facts as far as a record tells them, so that a format can refuse before a fit is made anew.

    What fills of own classes that store nothing are, a record does not say.
    """
    kinds = {group["fill"] for groups in record["tensors"].values() for group in groups}
    if "remap" in record:
        kinds.add(Survivor.__name__)
    scales = record["arm"]["resolved_scale"]
    if record["arm"]["operator"] == "zero":
        kinds.add(Zero.__name__)
    return Facts(
        anatomy=anatomy,
        mask=whole_plan(anatomy).mask if record["mask"] is None else Mask.from_json(record["mask"]),
        fills=frozenset(kinds),
        answered=scales is None,
        scales=() if scales is None else tuple(scales.split(", ")),
        policy="reselect" if record["identity"].get("groups") == "reselect" else "frozen",
        edited=_layers_of(record.get("edits", {})),
        integers=record["arm"].get("quantize", ""),
    )


def _layers_of(keys: Collection[str]) -> tuple[int, ...]:
    return tuple(sorted({int(key.partition("/")[0]) for key in keys}))


def in_words(values: Sequence[object]) -> str:
    """A few values, separated by commas."""
    return ", ".join(map(str, values))


def check_format(name: str, known: Collection[str]) -> None:
    """Raise for a format that does not exist."""
    if name not in known:
        raise UsageError(f"unknown format {name!r}", expected=", ".join(known))
