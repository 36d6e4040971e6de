"""What a model stores once it is pruned and quantized, by part, ideal and on disk: from its tensors' shapes alone.

The rules, which are those of 2610.41366 App. F.2:

* quantized are the decoder linears: attention, routed and shared experts, dense MLPs;
* everything else stays as it is saved: embeddings, head, norms, biases, routers (a shared expert's gate too), fills;
* a tied tensor counts once. A file that holds it twice is that much larger on disk;
* a pruned expert's router row goes only where nothing needs it. Where rows stay, each such layer stores a map from
  its rows to the experts that are left, one 32-bit number per row: metadata.

On disk, integers fill whole 32-bit words, and every quantized matrix brings a `weight_shape`. Headers of safetensors
files are not among these numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from prunebench.errors import UsageError
from prunebench.storage.quantized import Bits, packed
from prunebench.storage.saved import (
    PARTS,
    Tensor,
    expert_bytes,
    expert_of,
    identity_experts,
    layer_of,
    part_of,
    router_rows,
)

__all__ = ["ALL_PARTS", "Account", "Layer", "Matrix", "Survey", "account", "is_linear", "survey"]

ALL_PARTS: Final = (*PARTS, "metadata")

_QUANTIZED_PARTS: Final = ("experts", "shared", "attention", "other")
_NOT_LINEAR: Final = re.compile(r"norm|shared_expert_gate|conv1d")
_FLOATS: Final = ("BF16", "F16", "F32", "F64")
_MAP_ENTRY: Final = 4


@dataclass(frozen=True)
class Matrix:
    """A linear: `rows` outputs, `columns` inputs, and its bytes as it is saved."""

    rows: int
    columns: int
    bytes: int


@dataclass(frozen=True)
class Layer:
    """The routed experts of one layer, which are all alike.

    Args:
        index: of the layer in the model.
        experts: E.
        matrices: of one expert.
        rest: bytes of what one expert has besides: biases.
        router_row: bytes that the router has for one expert.
    """

    index: int
    experts: int
    matrices: tuple[Matrix, ...]
    rest: int
    router_row: int


@dataclass(frozen=True)
class Survey:
    """A dense model as the rules see it.

    Args:
        plain: part -> bytes of what is never quantized, experts apart; all router rows are here.
        linears: (part, matrix) of every decoder linear, experts apart.
        layers: of routed experts, by increasing index.
        twice: bytes of embeddings that are tied and saved all the same.
    """

    plain: Mapping[str, int]
    linears: tuple[tuple[str, Matrix], ...]
    layers: tuple[Layer, ...]
    twice: int = 0


@dataclass(frozen=True)
class Account:
    """Bytes of a model at one setting.

    Args:
        ideal: part -> bytes, without padding and without what only a file needs.
        on_disk: part -> bytes of packed tensors.
        pruned_rows: of the router's bytes, those of rows that belong to pruned experts.
    """

    ideal: Mapping[str, int]
    on_disk: Mapping[str, int]
    pruned_rows: int = 0

    @property
    def total(self) -> int:
        """Ideal bytes: what settings are matched by."""
        return sum(self.ideal.values())

    @property
    def total_on_disk(self) -> int:
        """Bytes on disk."""
        return sum(self.on_disk.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "total": self.total,
            "parts": dict(self.ideal),
            "on_disk": {"total": self.total_on_disk, "parts": dict(self.on_disk)},
            "router_rows_of_pruned_experts": self.pruned_rows,
        }


def is_linear(name: str, shape: Sequence[int]) -> bool:
    """Whether a saved tensor is a decoder linear that is quantized, by its name; routed experts may be stacked."""
    if layer_of(name) is None or (part := part_of(name)) not in _QUANTIZED_PARTS:
        return False
    if _NOT_LINEAR.search(name):
        return False
    if part == "experts" and expert_of(name) is None:
        return len(shape) == 3
    return len(shape) == 2 and name.endswith(".weight")


def survey(tensors: Mapping[str, Tensor], *, tied: Sequence[str] = (), where: str = "weights") -> Survey:
    """Sort a model's tensors by what the rules do with them.

    Args:
        tensors: `read_headers`' or `config_tensors`' result.
        tied: names of tensors that are another's, see `tied_names`; counted once.
        where: for errors.

    Raises:
        UsageError: no routed experts, experts of unequal size, or weights that are quantized already.
    """
    plain = dict.fromkeys(ALL_PARTS, 0)
    linears: list[tuple[str, Matrix]] = []
    by_layer: dict[int, dict[str, Tensor]] = {}
    twice = 0
    for name, tensor in tensors.items():
        part, index = part_of(name), layer_of(name)
        if index is not None:
            by_layer.setdefault(index, {})[name] = tensor
        if name in tied:
            twice += tensor.bytes
        elif part == "experts" and index is not None:
            continue
        elif is_linear(name, tensor.shape):
            linears.append((part, _matrix(name, tensor, where)))
        else:
            plain[part] += tensor.bytes
    layers = tuple(found for index, own in sorted(by_layer.items()) if (found := _layer(index, own, where)) is not None)
    for layer in layers:  # LongCat-Flash saves slices of identity experts, which nobody reads or quantizes
        whole = layer.rest + sum(matrix.bytes for matrix in layer.matrices)
        saved = sum(tensor.bytes for name, tensor in by_layer[layer.index].items() if part_of(name) == "experts")
        plain["experts"] += saved - layer.experts * whole
    if not layers:
        raise UsageError("no routed experts", where=where, expected="a Mixture-of-Experts model")
    return Survey(plain, tuple(linears), layers, twice)


def _matrix(name: str, tensor: Tensor, where: str) -> Matrix:
    if tensor.dtype not in _FLOATS:
        raise UsageError(f"{name} is {tensor.dtype}", where=where, expected="weights that are not quantized yet")
    *_, rows, columns = tensor.shape
    return Matrix(rows, columns, tensor.bytes * rows * columns // prod(tensor.shape))


def _layer(index: int, own: Mapping[str, Tensor], where: str) -> Layer | None:
    experts = {name: tensor for name, tensor in own.items() if part_of(name) == "experts"}
    if not experts:
        return None
    where = f"{where}, layer {index}"
    stacked = {tensor.shape[0] for name, tensor in experts.items() if expert_of(name) is None}
    single = {found for name in experts if (found := expert_of(name)) is not None}
    if len(stacked) + bool(single) != 1:
        raise UsageError("cannot tell how many experts there are", where=where, expected="one layout of experts")
    count = stacked.pop() if stacked else len(single) - identity_experts(own, 0)
    identities = identity_experts(own, count)
    whole = expert_bytes(own, count, identities, where=where)
    _check_orientation(experts, where)
    matrices = tuple(
        _matrix(name, tensor, where)
        for name, tensor in sorted(experts.items())
        if is_linear(name, tensor.shape) and expert_of(name) in (None, 0)
    )
    rest = whole - sum(matrix.bytes for matrix in matrices)
    return Layer(index, count, matrices, rest, sum(router_rows(own, count + identities)))


def _check_orientation(experts: Mapping[str, Tensor], where: str) -> None:
    """Refuse stacked experts whose inputs are not on the last axis, by the two shapes that have to agree."""
    shapes = {name.rpartition(".experts.")[2]: tensor.shape for name, tensor in experts.items()}
    if "gate_up_proj" not in shapes or "down_proj" not in shapes:
        return
    gate_up, down = shapes["gate_up_proj"], shapes["down_proj"]
    if gate_up[1] != 2 * down[2] or gate_up[2] != down[1]:
        raise UsageError(
            f"experts of shape {list(gate_up)} and {list(down)}", where=where, expected="inputs on the last axis"
        )


class _Sums:
    """Bytes by part, ideal and on disk."""

    def __init__(self, plain: Mapping[str, int]) -> None:
        self.ideal, self.on_disk = dict(plain), dict(plain)

    def add(self, part: str, size: int) -> None:
        """As it is, in both."""
        self.ideal[part] += size
        self.on_disk[part] += size

    def add_matrix(self, part: str, matrix: Matrix, width: int | None, bits: Bits, count: int = 1) -> None:
        """So many equal matrices at `width` bits."""
        if width is None:
            self.add(part, count * matrix.bytes)
            return
        one = packed(matrix.rows, matrix.columns, width, group=bits.group, zeros=bits.zeros)
        self.ideal[part] += count * one.ideal
        self.on_disk[part] += count * one.on_disk
        self.on_disk["metadata"] += count * one.metadata


def account(
    model: Survey,
    bits: Bits | None = None,
    *,
    pruned: Mapping[int, int] | None = None,
    fill_bytes: int = 0,
    keep_router_rows: bool = True,
    allocation: Mapping[int, Sequence[int | None]] | None = None,
) -> Account:
    """Bytes of a model at one setting.

    Args:
        model: `survey`'s result.
        bits: how it is quantized; None leaves everything as it is.
        pruned: layer index -> experts that are gone; layers that are not named keep all.
        fill_bytes: stored by what answers in their place.
        keep_router_rows: the router still scores the pruned experts.
        allocation: layer index -> bits of each expert that is left, for arms whose experts differ, in place of
            `bits.experts`; None leaves an expert as it is.

    Raises:
        UsageError: a layer that the model does not have, more experts pruned than there are, an allocation of another
            length.
    """
    bits = bits or Bits()
    pruned, allocation = pruned or {}, allocation or {}
    _check_layers(model, pruned, allocation)
    sums, rows = _Sums(model.plain), 0
    for part, matrix in model.linears:
        sums.add_matrix(part, matrix, bits.linears, bits)
    for layer in model.layers:
        gone = pruned.get(layer.index, 0)
        left = layer.experts - gone
        if not 0 <= gone <= layer.experts:
            raise UsageError(f"{gone} of {layer.experts} experts pruned", where=f"layer {layer.index}")
        widths = allocation.get(layer.index, (bits.experts,) * left)
        if len(widths) != left:
            raise UsageError(
                f"bits for {len(widths)} experts", where=f"layer {layer.index}", expected=f"{left}, one for each left"
            )
        for width in set(widths):
            for matrix in layer.matrices:
                sums.add_matrix("experts", matrix, width, bits, list(widths).count(width))
        sums.add("experts", left * layer.rest)
        if gone and keep_router_rows:
            rows += gone * layer.router_row
            sums.add("metadata", layer.experts * _MAP_ENTRY)
        elif gone:
            sums.add("router", -gone * layer.router_row)
    sums.add("fills", fill_bytes)
    sums.on_disk["embeddings"] += model.twice
    return Account(sums.ideal, sums.on_disk, rows)


def _check_layers(model: Survey, *named: Mapping[int, Any]) -> None:
    known = {layer.index for layer in model.layers}
    for index in sorted({index for one in named for index in one} - known):
        raise UsageError(f"layer {index} has no routed experts", expected=", ".join(map(str, sorted(known))))
