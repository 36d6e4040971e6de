"""Which experts are gone, and how many may be: `Mask` and `Budget`.

A mask names, per MoE layer, the ORIGINAL ids of the pruned experts. Ids are never renumbered here; only a physically
smaller model has other ids. This module knows numbers only: no torch, no model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, get_args

from prunebench.errors import UsageError

__all__ = [
    "Budget",
    "GroupPolicy",
    "LayerMask",
    "LayerShape",
    "Mask",
    "Scope",
    "canonical_json",
    "model_shape_text",
    "survivors_of",
    "write_atomically",
]

SCHEMA = 1

# Who chooses the groups of a group-limited router once experts are gone: the unpruned router, or its rule anew.
GroupPolicy = Literal["frozen", "reselect"]

# What a budget counts over: each layer, each router group of each layer, or the whole model.
Scope = Literal["layer", "group", "global"]


def survivors_of(pruned: Iterable[int], experts: int) -> tuple[int, ...]:
    """Ids of a layer's experts that are not pruned, increasing."""
    gone = set(pruned)
    return tuple(expert for expert in range(experts) if expert not in gone)


def canonical_json(value: object) -> str:
    """The one JSON text of a value: sorted keys, no spaces; what digests are taken over."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old file or the whole new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # where the folder is a file, there is nothing to remove either
            temporary.unlink()
        raise UsageError("cannot write", where=str(path), expected="a writable folder", fix=str(error)) from error


def _whole(value: object) -> int:
    """A JSON number that must be an integer; 1.5 or true is a ValueError, not 1."""
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


@dataclass(frozen=True, order=True)
class LayerShape:
    """One MoE layer as a mask and a budget see it: index in the model, E experts, top-k, router groups (1 = none)."""

    index: int
    experts: int
    top_k: int
    groups: int = 1
    kept_groups: int = 1

    def fewest_survivors(self, policy: GroupPolicy = "frozen") -> int:
        """Survivors of the layer below which a token cannot fill its k slots."""
        return self.top_k if policy == "reselect" else self.groups * self.fewest_per_group()

    def fewest_per_group(self) -> int:
        """Survivors that each router group needs, so that any choice of kept groups can fill k slots."""
        return self.top_k if self.groups == 1 else -(-self.top_k // self.kept_groups)

    def certain_slots(self, survivors: Iterable[int]) -> int:
        """Slots that any token can fill where groups are chosen anew: the survivors of the worst choice of groups.

        Groups without survivors cannot be chosen, so that fewer than `kept_groups` may be left.
        """
        left = Counter(self.group_of(expert) for expert in survivors)
        return sum(sorted(left.values())[: self.kept_groups])

    def group_of(self, expert: int) -> int:
        """The router group of an expert: groups are equal and contiguous."""
        return expert // (self.experts // self.groups)


def model_shape_text(shapes: Iterable[LayerShape]) -> str:
    """The part of a model that a mask must fit, as one comparable text, e.g. `1:32x4 2:32x4`."""
    return " ".join(f"{shape.index}:{shape.experts}x{shape.top_k}" for shape in shapes)


@dataclass(frozen=True)
class LayerMask:
    """The pruned experts of one layer: original ids, increasing, each below `experts`."""

    index: int
    experts: int
    pruned: tuple[int, ...]

    def __post_init__(self) -> None:
        where = f"layer {self.index}"
        if list(self.pruned) != sorted(set(self.pruned)):
            raise UsageError("pruned ids are not strictly increasing", where=where, fix="sort them and remove repeats")
        if self.pruned and not (0 <= self.pruned[0] and self.pruned[-1] < self.experts):
            raise UsageError(
                f"pruned id {self.pruned[0] if self.pruned[0] < 0 else self.pruned[-1]} does not exist",
                where=where,
                expected=f"ids from 0 to {self.experts - 1}",
            )

    @property
    def survivors(self) -> tuple[int, ...]:
        """Ids that stay, increasing."""
        return survivors_of(self.pruned, self.experts)


@dataclass(frozen=True)
class Mask:
    """The pruned experts of every MoE layer of one model shape.

    Args:
        model_shape: `model_shape_text` of the model that the mask was made for.
        layers: one entry per MoE layer, by increasing layer index.
        report: what a person should know about how it was chosen, as JSON data; no part of the mask, its digest or its
            file.
    """

    model_shape: str
    layers: tuple[LayerMask, ...]
    report: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        indices = [layer.index for layer in self.layers]
        if indices != sorted(set(indices)):
            raise UsageError("mask layers are not strictly increasing", where=f"layers {indices}")

    @classmethod
    def for_shapes(cls, shapes: Sequence[LayerShape], pruned: Mapping[int, Iterable[int]]) -> Mask:
        """A mask for a model: `pruned` maps layer index to ids; layers not named lose nothing."""
        unknown = set(pruned) - {shape.index for shape in shapes}
        if unknown:
            raise UsageError(f"layer {min(unknown)} is no MoE layer of this model", expected=model_shape_text(shapes))
        return cls(
            model_shape_text(shapes),
            tuple(
                LayerMask(s.index, s.experts, tuple(sorted(int(e) for e in pruned.get(s.index, ())))) for s in shapes
            ),
        )

    @property
    def digest(self) -> str:
        """16 hex digits over the model shape and all pruned ids."""
        return hashlib.sha256(canonical_json(self._content()).encode()).hexdigest()[:16]

    @property
    def pruned_count(self) -> int:
        """How many experts the mask removes, over all layers."""
        return sum(len(layer.pruned) for layer in self.layers)

    def pruned_of(self, index: int) -> tuple[int, ...]:
        """Pruned ids of the layer with this model index (none if the mask does not name it)."""
        return next((layer.pruned for layer in self.layers if layer.index == index), ())

    def check_fits(self, shapes: Sequence[LayerShape], *, where: str = "mask", policy: GroupPolicy = "frozen") -> None:
        """Raise unless the mask is for a model of these shapes and every token can still fill its k slots."""
        wanted = model_shape_text(shapes)
        if self.model_shape != wanted:
            raise UsageError(
                f"the mask is for another model ({self.model_shape})",
                where=where,
                expected=f"layer:experts x top-k {wanted}",
                fix="use a mask made for this model",
            )
        for layer, shape in zip(self.layers, shapes, strict=True):
            if policy == "reselect":
                _check_certain(layer, shape, where)
            else:
                _check_groups(layer, shape, where)

    def _content(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model_shape": self.model_shape,
            "layers": [{"index": x.index, "E": x.experts, "pruned": list(x.pruned)} for x in self.layers],
        }

    def to_json(self) -> dict[str, Any]:
        """The mask as JSON data, with its digest."""
        return {**self._content(), "digest": self.digest}

    @classmethod
    def from_json(cls, data: object, *, where: str = "mask") -> Mask:
        """Read `to_json`'s data back; a wrong schema, field or digest is a `UsageError` naming `where`."""
        try:
            if not isinstance(data, dict) or data["schema"] != SCHEMA:
                raise UsageError("not a prunebench mask", where=where, expected=f'an object with "schema": {SCHEMA}')
            layers = tuple(
                LayerMask(_whole(x["index"]), _whole(x["E"]), tuple(_whole(e) for e in x["pruned"]))
                for x in data["layers"]
            )
            mask = cls(str(data["model_shape"]), layers)
            digest = data.get("digest", mask.digest)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"not a prunebench mask ({error!r})", where=where, expected="schema, model_shape, layers, digest"
            ) from error
        if digest != mask.digest:
            raise UsageError(
                "the mask was changed after it was written",
                where=where,
                expected=f"digest {mask.digest}",
                fix='write it anew, or remove "digest" if the change is meant',
            )
        return mask

    def save(self, path: Path) -> None:
        """Write the mask as one JSON file, atomically."""
        write_atomically(path, (canonical_json(self.to_json()) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Mask:
        """Read a mask file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError("cannot read the mask file", where=str(path), fix=str(error)) from error
        except ValueError as error:
            raise UsageError("the mask file is not JSON", where=str(path), fix=str(error)) from error
        return cls.from_json(data, where=str(path))


def _check_groups(layer: LayerMask, shape: LayerShape, where: str) -> None:
    """Raise unless any groups that the unpruned router may keep can fill k slots."""
    left = Counter(shape.group_of(expert) for expert in layer.survivors)
    for group in range(shape.groups):
        if left[group] < shape.fewest_per_group():
            part = f", router group {group}" if shape.groups > 1 else ""
            raise UsageError(
                f"the mask leaves {left[group]} experts",
                where=f"{where}, layer {layer.index}{part}",
                expected=f"at least {shape.fewest_per_group()} survivors (top-k {shape.top_k})",
                fix="prune fewer",
            )


def _check_certain(layer: LayerMask, shape: LayerShape, where: str) -> None:
    """Raise unless any groups that may be chosen anew can fill k slots."""
    certain = shape.certain_slots(layer.survivors)
    if certain < shape.top_k:
        part = f", the {shape.kept_groups} smallest router groups left" if shape.groups > 1 else ""
        raise UsageError(
            f"the mask leaves {certain} experts",
            where=f"{where}, layer {layer.index}{part}",
            expected=f"at least {shape.top_k} survivors (top-k {shape.top_k})",
            fix="prune fewer, or evenly over the groups",
        )


@dataclass(frozen=True)
class Budget:
    """How many experts go. Exactly one of `ratio` and `keep` is given.

    The count rule, stated once, on decimals, so that 0.3 of 10 is 3 and not 2. With n experts in the scope, `ratio`
    removes floor(ratio · n) of them, and `keep` leaves that many per layer:

    * `layer`: each layer loses that many, spread over its router groups as evenly as can be;
    * `group`: each router group of each layer does (a layer without groups is one); `keep` must be a multiple of them;
    * `global`: the model does, wherever scores are lowest, but every layer keeps top-k experts (and every router group
      its share of them), and `keep` is what layers keep on average.

    A budget that removes nothing, or that leaves fewer survivors than a token needs, is refused before any work.

    Args:
        ratio: share of the scope's experts to remove, in (0, 1).
        keep: experts left in each layer.
        protected: layer index -> ids that may not be pruned.
        scope: what is counted over.
        make_up: whether another expert goes in the place of a protected one. If not, the mask is chosen as if nothing
            were protected, the protected are taken out of it, and it is that much smaller: so a paper's protected mask
            prunes 831 of 832 (2610.41366 App. E.8).
    """

    ratio: Decimal | None = None
    keep: int | None = None
    protected: Mapping[int, frozenset[int]] = field(default_factory=dict)
    scope: Scope = "layer"
    make_up: bool = True

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.keep is None):
            raise UsageError("a budget needs exactly one of ratio and keep", fix="give --ratio or --keep")
        if self.ratio is not None and not (self.ratio.is_finite() and 0 < self.ratio < 1):
            raise UsageError(f"ratio {self.ratio} is impossible", expected="a number above 0 and below 1, such as 0.5")
        if self.keep is not None and self.keep < 1:
            raise UsageError(f"keep {self.keep} is impossible", expected="at least 1 expert per layer")
        if self.scope not in get_args(Scope):
            raise UsageError(f"unknown budget scope {self.scope!r}", expected=", ".join(get_args(Scope)))

    @classmethod
    def of_ratio(cls, ratio: str | float | Decimal, **more: Any) -> Budget:
        """A budget from a ratio as typed: floats go through their shortest text, so 0.3 means 3/10."""
        try:
            return cls(ratio=Decimal(str(ratio)), **more)
        except InvalidOperation as error:
            raise UsageError(f"ratio {ratio!r} is not a number", expected="a number such as 0.5") from error

    @property
    def asked(self) -> str:
        """The amount in words, for errors."""
        return f"ratio {self.ratio}" if self.ratio is not None else f"keep {self.keep}"

    def must_stay(self, index: int) -> frozenset[int]:
        """Experts of a layer in whose place others go."""
        return self.protected.get(index, frozenset()) if self.make_up else frozenset()

    def pruned_count(self, shape: LayerShape) -> int:
        """How many experts this layer loses, before protected ones are taken out without making up for them.

        Raises:
            UsageError: if nothing would be pruned, or fewer than top-k experts, or fewer than the protected ones, stay;
                for a global budget.
        """
        where = f"layer {shape.index} with {shape.experts} experts"
        if self.scope == "global":
            raise UsageError("a global budget has no count per layer", where=where, expected="scope layer or group")
        if self.ratio is not None:
            groups = shape.groups if self.scope == "group" else 1
            count = int(self.ratio * (shape.experts // groups)) * groups
        else:
            assert self.keep is not None
            count = shape.experts - self.keep
            if self.scope == "group" and self.keep % shape.groups:
                raise UsageError(
                    f"keep {self.keep} is not the same for each of {shape.groups} router groups",
                    where=where,
                    expected=f"a multiple of {shape.groups}",
                )
        fewest = shape.fewest_survivors()
        wanted = f"top-k = {fewest} survivors"
        if shape.groups > 1:
            wanted = f"{fewest} survivors (top-k = {shape.top_k} from {shape.kept_groups} of {shape.groups} groups)"
        if count <= 0:
            least = shape.groups if self.scope == "group" else 1
            raise UsageError(
                f"{self.asked} prunes nothing",
                where=where,
                expected=f"at least one expert pruned (ratio ≥ {least}/{shape.experts}, keep < {shape.experts})",
            )
        if shape.experts - count < fewest:
            raise UsageError(
                f"{self.asked} leaves {shape.experts - count} experts",
                where=where,
                expected=f"at least {wanted}",
                fix=f"prune at most {shape.experts - fewest} of {shape.experts}",
            )
        guarded = len(self.must_stay(shape.index))
        if shape.experts - count < guarded:
            raise UsageError(
                f"{self.asked} leaves {shape.experts - count} experts",
                where=where,
                expected=f"the {guarded} protected ones",
            )
        return count

    def most_pruned(self, shape: LayerShape) -> int:
        """The most that this layer can lose; as many as its router leaves room for where the budget is global."""
        if self.scope != "global":
            return self.pruned_count(shape)
        per_group = Counter(shape.group_of(expert) for expert in self.must_stay(shape.index))
        size = shape.experts // shape.groups
        return sum(size - max(shape.fewest_per_group(), per_group[group]) for group in range(shape.groups))

    def total(self, shapes: Sequence[LayerShape]) -> int:
        """How many experts the model loses, before protected ones are taken out without making up for them.

        Raises:
            UsageError: as `pruned_count`, of any layer, or of the whole model.
        """
        if self.scope != "global":
            return sum(self.pruned_count(shape) for shape in shapes)
        experts = sum(shape.experts for shape in shapes)
        if self.ratio is not None:
            count = int(self.ratio * experts)
        else:
            assert self.keep is not None
            count = experts - self.keep * len(shapes)
        where = f"{len(shapes)} layers with {experts} experts"
        if count <= 0:
            raise UsageError(f"{self.asked} prunes nothing", where=where, expected="at least one expert pruned")
        room = sum(self.most_pruned(shape) for shape in shapes)
        if count > room:
            raise UsageError(
                f"{self.asked} prunes {count} experts",
                where=where,
                expected=f"at most {room}: every layer keeps its top-k and its protected experts",
                fix="prune fewer",
            )
        return count

    def check(self, shapes: Sequence[LayerShape]) -> None:
        """Raise unless the budget is possible in every layer, and protects only experts that exist."""
        by_index = {shape.index: shape for shape in shapes}
        for index, ids in self.protected.items():
            if index not in by_index:
                raise UsageError(f"layer {index} is no MoE layer", where="protected", expected=model_shape_text(shapes))
            if wrong := sorted(expert for expert in ids if not 0 <= expert < by_index[index].experts):
                raise UsageError(
                    f"protected expert {wrong[0]} does not exist",
                    where=f"layer {index}",
                    expected=f"ids from 0 to {by_index[index].experts - 1}",
                )
        self.total(shapes)

    def check_mask(self, mask: Mask, shapes: Sequence[LayerShape], *, where: str = "mask") -> None:
        """Raise unless the mask spends the budget: its count, in its scope, and no protected expert pruned."""
        spared = 0
        for layer, shape in zip(mask.layers, shapes, strict=True):
            guarded = self.protected.get(layer.index, frozenset())
            if gone := sorted(guarded & set(layer.pruned)):
                raise UsageError(
                    f"select pruned expert {gone[0]}, which is protected", where=f"{where}, layer {layer.index}"
                )
            # How many of them the mask would have pruned is not told by the mask.
            allowance = 0 if self.make_up else len(guarded)
            spared += allowance
            if self.scope != "global" and not 0 <= self.pruned_count(shape) - len(layer.pruned) <= allowance:
                raise UsageError(
                    f"select pruned {len(layer.pruned)} experts",
                    where=f"{where}, layer {layer.index}",
                    expected=f"{self.pruned_count(shape)}, as the budget says",
                )
        if not 0 <= self.total(shapes) - mask.pruned_count <= spared:
            raise UsageError(
                f"select pruned {mask.pruned_count} experts",
                where=where,
                expected=f"{self.total(shapes)}, as the budget says",
            )

    def to_json(self) -> dict[str, Any]:
        """The budget as it goes into a record; 0.5 and 0.50 are one budget."""
        amount: dict[str, Any] = {"keep": self.keep}
        if self.ratio is not None:
            amount = {"ratio": format(self.ratio.normalize(), "f")}
        if self.protected:
            amount["protected"] = {str(index): sorted(ids) for index, ids in sorted(self.protected.items())}
            if not self.make_up:
                amount["make_up"] = False
        if self.scope != "layer":
            amount["scope"] = self.scope
        return amount
