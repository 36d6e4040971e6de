"""The score pass: one plain forward over the calibration blocks, every statistic of every expert at once.

The outputs are those that the model computes anyway, and the observed forward equals the plain one bit for bit. A pass
is cached by content (weights, tokens, statistics, dtype, implementation) and then serves every criterion and arm.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from prunebench.calibration.base import Statistic
from prunebench.calibration.statistics import COLLECTED, Count
from prunebench.calibration.text import CalibrationTokens
from prunebench.errors import IntegrityError, UsageError
from prunebench.mask import write_atomically
from prunebench.moe import Instrument, MoELayer, MoEModel, TokenBatch
from prunebench.moe.decoder import LAST_TOKEN

__all__ = [
    "ScoreResult",
    "batches_of",
    "check_slots",
    "distinct",
    "identity_slots",
    "score_pass",
    "settings_of",
    "started",
    "with_built_in",
]

Progress = Callable[[int, int], None]
_Kind = TypeVar("_Kind", bound=Statistic)


@dataclass(frozen=True)
class ScoreResult:
    """The statistics of a pass.

    Args:
        tokens: T, calibration tokens counted.
        layers: layer index -> statistic name -> finished statistic.
    """

    tokens: int
    layers: Mapping[int, Mapping[str, Statistic]]

    def joined(self, other: ScoreResult) -> ScoreResult:
        """This and another pass over the same text, of other statistics."""
        both = {index: {**mine, **other.layers[index]} for index, mine in self.layers.items()}
        return ScoreResult(self.tokens, both)

    def save(self, path: Path, key: str) -> None:
        """Write all states to one file, atomically, labelled with what they are of."""
        tensors = {
            f"{index}/{name}/{part}": value.contiguous()
            for index, statistics in self.layers.items()
            for name, statistic in statistics.items()
            for part, value in statistic.state.items()
        }
        write_atomically(path, save(tensors, metadata={"key": key, "tokens": str(self.tokens)}))

    @classmethod
    def load(cls, path: Path, key: str, statistics: Sequence[Statistic]) -> ScoreResult | None:
        """Read a pass back; None if there is none under this key, or it lacks one of the statistics."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("key") != key:
                    return None
                layers: dict[int, dict[str, Statistic]] = {}
                fresh = {statistic.name: statistic for statistic in statistics}
                for name in file.keys():  # noqa: SIM118  not a dict
                    index, statistic, part = name.split("/")
                    if statistic in fresh:
                        target = layers.setdefault(int(index), {}).setdefault(
                            statistic, copy.deepcopy(fresh[statistic])
                        )
                        target.state[part] = file.get_tensor(name)
        except (OSError, SafetensorError):
            return None
        complete = bool(layers) and all(len(found) == len(fresh) for found in layers.values())
        return cls(int(metadata["tokens"]), layers) if complete else None


def with_built_in(statistics: Sequence[Statistic]) -> tuple[Statistic, ...]:
    """The asked statistics and all that a pass always collects: it costs much the same, and then serves all methods."""
    return distinct((*(kind() for kind in COLLECTED), *statistics))


def distinct(statistics: Sequence[Statistic]) -> tuple[Statistic, ...]:
    """One statistic of each name.

    Raises:
        UsageError: a name that is no name, or that two kinds of statistics have, or two with other settings.
    """
    named: dict[str, Statistic] = {}
    for statistic in statistics:
        if not re.fullmatch(r"\w+", statistic.name):
            raise UsageError(
                f"statistic name {statistic.name!r}", where=type(statistic).__name__, expected="letters, digits and _"
            )
        known = named.get(statistic.name)
        if known is not None and type(known) is not type(statistic):
            raise UsageError(
                f"two statistics are named {statistic.name!r}",
                where=type(statistic).__name__,
                fix="give yours another name",
            )
        if known is not None and settings_of(known) != settings_of(statistic):
            raise UsageError(
                f"two statistics named {statistic.name!r} have different settings",
                where=type(statistic).__name__,
                expected="one of each name on a calibration text",
                fix="give both the same, or fit on another draw",
            )
        named[statistic.name] = statistic
    return tuple(named.values())


def settings_of(statistic: Statistic) -> dict[str, str]:
    """What a statistic was made with: it may have parameters of its own."""
    return {name: repr(value) for name, value in vars(statistic).items() if name != "state"}


def batches_of(tokens: CalibrationTokens, batch_tokens: int) -> tuple[Tensor, ...]:
    """The ids of each forward, [rows, L]: as many whole blocks as hold `batch_tokens` tokens, the last with the rest.

    Every pass over a text cuts it so: outputs are equal bit for bit only for one batch composition.
    """
    return tuple(tokens.ids_BL.split(max(1, batch_tokens // tokens.ids_BL.shape[1])))


def identity_slots(batch: TokenBatch, experts: int, identities: int) -> Tensor | int:
    """Slots of identity experts: they belong to none of the E experts, and are slots all the same."""
    return (batch.index_TK >= experts).sum() if identities else 0


def check_slots(layer: MoELayer, statistics: Mapping[str, Statistic], tokens: int, beside: int) -> None:
    """Raise unless the layer filled exactly k slots per token.

    Args:
        layer: the layer.
        statistics: with a finished `Count` among them.
        tokens: T.
        beside: slots of identity experts.
    """
    slots = int(statistics[Count.name].value().sum()) + beside
    if slots != layer.top_k * tokens:
        raise IntegrityError(
            f"{slots} slots for {tokens} tokens", where=layer.name, expected=f"k = {layer.top_k} slots per token"
        )


def started(moe: MoEModel, statistics: Sequence[_Kind]) -> dict[int, dict[str, _Kind]]:
    """Layer index -> statistic name -> a copy of each statistic, at its start, on the layer's device."""
    layers: dict[int, dict[str, _Kind]] = {}
    for layer in moe.layers:
        layers[layer.index] = {statistic.name: copy.deepcopy(statistic) for statistic in statistics}
        for statistic in layers[layer.index].values():
            statistic.start(layer.expert_count, layer.width, layer.device)
    return layers


def _check_possible(tokens: CalibrationTokens, statistics: Sequence[Statistic]) -> None:
    """Refuse a text without tokens, and statistics that a score pass cannot measure."""
    if not tokens.ids_BL.numel():
        raise UsageError("there are no calibration tokens", where="a score pass", expected="at least one")
    for statistic in statistics:
        _check_here(statistic)


def _check_here(statistic: Statistic) -> None:
    if statistic.measured_in == "gradient":
        raise UsageError(
            f"statistic {statistic.name!r} is of gradients",
            where="a score pass, which has none",
            fix="measure it by gradient_pass",
        )
    if statistic.after:
        raise UsageError(
            f"statistic {statistic.name!r} comes after {', '.join(statistic.after)}",
            where="a score pass, which sees the text once",
            fix="measure it in a fit pass",
        )


def score_pass(
    moe: MoEModel,
    tokens: CalibrationTokens,
    statistics: Sequence[Statistic],
    *,
    batch_tokens: int = 8192,
    progress: Progress | None = None,
) -> ScoreResult:
    """Run the calibration blocks once and collect statistics of every expert of every MoE layer.

    Args:
        moe: the opened model; whatever is installed on it is what gets measured.
        tokens: the blocks, all of equal length, so nothing is padding.
        statistics: fresh instances; one copy per layer is accumulated on the layer's device.
        batch_tokens: tokens per forward.
        progress: called with (blocks done, blocks in total).

    Raises:
        IntegrityError: if a layer did not fill exactly k slots per token.
        UsageError: a statistic that needs another visit, no token at all, or router scores that are no numbers: even
            counts would then be decided by them.
    """
    _check_possible(tokens, statistics)
    if Count.name not in {statistic.name for statistic in statistics}:
        statistics = (*statistics, Count())
    layers = started(moe, statistics)
    beside, strange = (
        {layer.index: torch.zeros((), dtype=torch.int64, device=layer.device) for layer in moe.layers} for _ in range(2)
    )

    def observe(layer: MoELayer, batch: TokenBatch) -> None:
        strange[layer.index] += batch.scores_TE.isnan().any(-1).sum()
        beside[layer.index] += identity_slots(batch, layer.expert_count, layer.convention.identities)
        for statistic in layers[layer.index].values():
            statistic.update(batch)

    done = 0
    with torch.inference_mode(), Instrument(moe, observer=observe):
        for ids_BL in batches_of(tokens, batch_tokens):
            moe.model(input_ids=ids_BL.to(moe.input_device), use_cache=False, logits_to_keep=LAST_TOKEN)
            done += ids_BL.shape[0]
            if progress is not None:
                progress(done, tokens.ids_BL.shape[0])
    total = tokens.ids_BL.numel()
    for layer in moe.layers:
        if count := int(strange[layer.index]):
            raise UsageError(
                f"router scores of {count} of {total} tokens are not finite",
                where=layer.name,
                expected="numbers",
                fix="use --dtype float32",
            )
        for statistic in layers[layer.index].values():
            statistic.to_host()
        check_slots(layer, layers[layer.index], total, int(beside[layer.index]))
    return ScoreResult(total, layers)
