"""The sequential pass: a layer's Hessians from inputs that came through quantized layers, then its integers, then on.

Masks, fits and edits are those of the 16-bit model (2610.41366 §6.5); what is quantized is the model that they make,
under the operator and routing that it will run with. All linears of a layer see that layer's inputs unquantized, as in
llm-compressor; the next layer sees what the quantized one gives. Experts run by their eager code meanwhile, so that
each matrix is multiplied by `linear`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunebench.calibration import CalibrationTokens
from prunebench.calibration.base import sum_by_expert
from prunebench.calibration.score import batches_of
from prunebench.calibration.sequential import DecoderVisit, stream_decoder
from prunebench.calibration.stream import Buffers, Progress
from prunebench.errors import UsageError
from prunebench.moe import LayerProgram, MoELayer, MoEModel, TokenBatch
from prunebench.quantize.allocation import WIDTHS, allocate, costs
from prunebench.quantize.hessians import Hessians
from prunebench.quantize.kernel import Quantized, gptq, output_error
from prunebench.quantize.model import QuantizedLinear, QuantizedModel, Undo
from prunebench.quantize.setting import Setting
from prunebench.quantize.targets import Target, targets_of

__all__ = ["quantize_model", "without_edits"]


def without_edits(programs: Mapping[int, LayerProgram]) -> dict[int, LayerProgram]:
    """Programs whose edited survivors are in the quantized weights already."""
    return {index: replace(program, edits={}) for index, program in programs.items()}


def quantize_model(
    moe: MoEModel,
    setting: Setting,
    tokens: CalibrationTokens,
    *,
    programs: Mapping[int, LayerProgram] | None = None,
    batch_tokens: int = 8192,
    buffers: Buffers = "host",
    progress: Progress | None = None,
) -> QuantizedModel:
    """Quantize every decoder linear of a model, pruned or not; the model is left as it was.

    Args:
        moe: the opened model.
        setting: widths and rules.
        tokens: the calibration text.
        programs: what pruned layers run; pruned experts are not quantized, as nobody stores them, and neither is what
            answers for them.
        batch_tokens: tokens per forward.
        buffers: where hidden states wait.
        progress: called with (what, done, total).

    Raises:
        UsageError: an expert layout whose inputs are not on the last axis.
        IntegrityError: linears that were not called as such.
    """
    programs = dict(programs or {})
    for layer in moe.layers:
        _check_layout(layer)
    pruned = {index: program.pruned for index, program in programs.items()}
    undo = Undo()
    found: dict[str, QuantizedLinear] = {}
    allocation: dict[int, tuple[int, ...]] = {}

    def work(visit: DecoderVisit) -> None:
        targets = targets_of(moe, visit.position, visit.name, visit.module, pruned=pruned, setting=setting)
        if not targets:
            return
        experts = [name for name, target in targets.items() if target.weight.dim() == 3]
        weighing = _Weighing() if setting.mixed and experts else None
        hessians = Hessians(targets)
        with hessians:
            visit.run(weighing)
        if visit.moe is not None and experts:
            hessians.check(experts, visit.name)
        widths = _widths(setting, targets, hessians, experts, weighing)
        if weighing is not None:
            allocation[visit.position] = widths[experts[0]]
        for name, target in targets.items():
            found[name] = _quantized(target, hessians.sums.pop(name), hessians.rows[name], widths[name], setting)
            for place, expert in enumerate(target.experts):
                value_RC = found[name].quantized.weight_ERC[place]
                undo.write(target.weight, value_RC, expert if target.weight.dim() == 3 else None)

    try:
        _edit(moe, programs, undo)
        with _eager(moe):
            proof = stream_decoder(
                moe,
                [{"input_ids": ids_BL} for ids_BL in batches_of(tokens, batch_tokens)],
                work,
                programs=without_edits(programs),
                buffers=buffers,
                progress=progress,
            )
    finally:
        undo.restore()
    return QuantizedModel(setting, found, proof, int(tokens.ids_BL.numel()), allocation)


def _check_layout(layer: MoELayer) -> None:
    if layer.layout.width_axis != 1 or layer.layout.takes == "all":
        raise UsageError(
            f"{type(layer.experts).__name__} cannot be quantized here",
            where=layer.name,
            expected="experts that multiply by `linear`, with inputs on the last axis",
        )


def _edit(moe: MoEModel, programs: Mapping[int, LayerProgram], undo: Undo) -> None:
    """Write edited survivors' weights, which then are what is quantized."""
    for index, program in programs.items():
        layer = moe.layer(index)
        for expert, named in program.edits.items():
            for name, value in named.items():
                undo.write(layer.experts.get_parameter(name), value, expert)


@contextmanager
def _eager(moe: MoEModel) -> Iterator[None]:
    """While entered, experts run by their eager code."""
    configs: list[tuple[Any, Any]] = []
    for layer in moe.layers:
        config: Any = getattr(layer.experts, "config", None)
        if hasattr(config, "_experts_implementation"):
            configs.append((config, config._experts_implementation))  # noqa: SLF001  transformers' setter is the model's
            config._experts_implementation = "eager"  # noqa: SLF001
    try:
        yield
    finally:
        for config, implementation in reversed(configs):
            config._experts_implementation = implementation  # noqa: SLF001


class _Weighing:
    """Adds up each expert's gates."""

    def __init__(self) -> None:
        self.gates_E: Tensor | None = None
        self.tokens = 0

    def __call__(self, batch: TokenBatch) -> None:
        gates_E = sum_by_expert(batch.gates_S, batch)
        self.gates_E = gates_E if self.gates_E is None else self.gates_E + gates_E
        self.tokens += batch.tokens


def _widths(
    setting: Setting,
    targets: Mapping[str, Target],
    hessians: Hessians,
    experts: list[str],
    weighing: _Weighing | None,
) -> dict[str, tuple[int, ...]]:
    """The bits of every matrix of every target."""
    widths: dict[str, tuple[int, ...]] = {}
    for name, target in targets.items():
        bits = setting.bits.experts if target.weight.dim() == 3 else setting.bits.linears
        assert bits is not None
        widths[name] = (bits,) * len(target.experts)
    if weighing is None:
        return widths
    assert weighing.gates_E is not None
    assert setting.bits.experts is not None
    left = list(targets[experts[0]].experts)
    square_EW = np.zeros((len(left), len(WIDTHS)))
    for name in experts:
        weight_ERC = targets[name].weight_ERC
        for w, bits in enumerate(WIDTHS):
            tried = _gptq(weight_ERC, hessians.sums[name], hessians.rows[name], (bits,) * len(left), setting)
            square_EW[:, w] += output_error(weight_ERC, tried, hessians.sums[name]).cpu().numpy()
    share_E = np.asarray(hessians.rows[experts[0]]) / weighing.tokens
    gate_E = weighing.gates_E[left].cpu().numpy() / weighing.tokens
    chosen = allocate(costs(share_E, gate_E, np.sqrt(square_EW.clip(min=0))), setting.bits.experts)
    return widths | dict.fromkeys(experts, chosen)


def _gptq(
    weight_ERC: Tensor, hessian_ECC: Tensor, rows: list[int], widths: tuple[int, ...], setting: Setting
) -> Quantized:
    return gptq(
        weight_ERC,
        hessian_ECC,
        rows,
        widths,
        group=setting.bits.group,
        groups=setting.groups,
        damping=setting.damping,
        fewest=setting.fewest,
    )


def _quantized(
    target: Target, hessian_ECC: Tensor, rows: list[int], widths: tuple[int, ...], setting: Setting
) -> QuantizedLinear:
    weight_ERC = target.weight_ERC.detach()
    quantized = _gptq(weight_ERC, hessian_ECC, rows, widths, setting)
    missed_E = output_error(weight_ERC, quantized, hessian_ECC)
    whole_E = (torch.bmm(weight_ERC.double(), hessian_ECC) * weight_ERC).sum((1, 2))
    error_E = torch.where(whole_E > 0, missed_E / whole_E, 0.0)
    return QuantizedLinear(quantized, target.experts, tuple(rows), tuple(error_E.tolist()))
