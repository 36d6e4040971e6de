"""What a streamed fit pass and a gradient pass cost: time beside a plain forward and bare products, and memory.

    python benchmarks/fit.py [--device cpu|cuda] [--blocks N] [--length N] [--experts N] [--depths 2 8]

OLMoE 1024 wide, 64 experts, top-8, of which half are pruned: per pruned expert Σ x, Σ f, Σ x xᵀ and Σ f xᵀ, what a
linear fit of its outputs needs, and the built-in statistics; per layer they become one small tensor before the next
layer comes. The gradient pass measures Fisher. All layers share one layer's weights, so that depth adds nothing but
work. One thread, CPU seconds; on CUDA bfloat16 and wall seconds. Every fit pass has its proof in it: four forwards of
two blocks, which a long text dwarfs. A gradient pass runs one block at a time, so it stands beside forwards of one
block too. Peaks are above what the model takes: resident memory on CPU, allocated memory on CUDA.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunebench.calibration import (
    CalibrationSpec,
    CalibrationTokens,
    Fisher,
    LayerVisit,
    Statistic,
    StreamResult,
    gradient_pass,
    stream_layers,
)
from prunebench.calibration.statistics import BUILT_IN
from prunebench.calibration.stream import PROOF_BLOCKS
from prunebench.moe import MoEModel, TokenBatch, open_model
from prunebench.moe.decoder import prove
from prunebench.testing import random_model

WIDTH = 1024


class LinearFit(Statistic):
    """Σ x, Σ f, Σ x xᵀ and Σ f xᵀ over the rows of some experts, in float64.

    Args:
        experts: their ids.
    """

    name = "linear_fit"

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__()
        self.place = {expert: number for number, expert in enumerate(experts)}

    def start(self, experts: int, width: int, device: torch.device) -> None:
        """Zeros, for the chosen experts only."""
        del experts
        count, options = len(self.place), {"dtype": torch.float64, "device": device}
        self.state = {
            "x_PD": torch.zeros(count, width, **options),
            "f_PD": torch.zeros(count, width, **options),
            "xx_PDD": torch.zeros(count, width, width, **options),
            "fx_PDD": torch.zeros(count, width, width, **options),
        }

    def update(self, batch: TokenBatch) -> None:
        """Two products per expert."""
        for expert, start, end in batch.segments:
            number = self.place[expert]
            x_SD, f_SD = batch.x_TD[batch.token_S[start:end]].double(), batch.outputs_SD[start:end].double()
            self.state["x_PD"][number] += x_SD.sum(0)
            self.state["f_PD"][number] += f_SD.sum(0)
            self.state["xx_PDD"][number].addmm_(x_SD.T, x_SD)
            self.state["fx_PDD"][number].addmm_(f_SD.T, x_SD)

    def value(self) -> dict[str, Tensor]:
        """The sums."""
        return self.state

    def to_host(self) -> None:
        """They are used where they are."""


@dataclass(frozen=True)
class Text:
    """What everything runs on.

    Args:
        ids_BL: the blocks.
        batches: the same, by forward.
    """

    ids_BL: Tensor
    batches: tuple[dict[str, Tensor], ...]


def deep_model(base: Any, layers: int) -> Any:
    """The same model with one layer many times: modules of their own, weights in common."""
    model = copy.deepcopy(base, {id(p): p for p in (*base.parameters(), *base.buffers())})
    only = model.model.layers[0]
    for index in range(1, layers):
        layer = copy.deepcopy(only, {id(p): p for p in only.parameters()})
        layer.self_attn.layer_idx = index
        model.model.layers.append(layer)
    model.config.num_hidden_layers = layers
    return model


def seconds(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """CPU seconds of a call, or wall seconds with the device's queue drained; and its result."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    result = work()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start, result


def peak_above(work: Callable[[], Any], device: str) -> tuple[float, float, Any]:
    """The most MiB that a call takes above what is in use before it; its seconds and its result."""
    gc.collect()
    if device == "cpu":
        # Give freed memory back, and start the kernel's own high-water mark anew.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    else:
        torch.cuda.reset_peak_memory_stats()
    before = in_use(device, peak=False)
    taken, result = seconds(work, device)
    return in_use(device, peak=True) - before, taken, result


def in_use(device: str, *, peak: bool) -> float:
    """MiB in use now, or at most since the mark was set."""
    if device != "cpu":
        return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**20
    if not peak:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**10


def fit(moe: MoEModel, text: Text, pruned: Sequence[int]) -> StreamResult:
    """The pass that is measured."""

    def work(visit: LayerVisit) -> dict[str, Tensor]:
        needs = (*(kind() for kind in BUILT_IN), LinearFit(pruned))
        measured = visit.measure(needs, experts=pruned)
        return {"trace_P": measured["linear_fit"].state["xx_PDD"].diagonal(dim1=1, dim2=2).sum(-1)}

    return stream_layers(moe, text.batches, work)


def plain(moe: MoEModel, text: Text) -> None:
    """The forward that any pass over the text needs."""
    with torch.inference_mode():
        for batch in text.batches:
            moe.model(input_ids=batch["input_ids"].to(moe.input_device), use_cache=False, logits_to_keep=1)


def one_by_one(moe: MoEModel, text: Text) -> None:
    """A forward per block."""
    plain(moe, Text(text.ids_BL, tuple({"input_ids": ids_1L} for ids_1L in text.ids_BL.split(1))))


def nothing(visit: LayerVisit) -> dict[str, Tensor]:
    """Visit a layer without looking."""
    visit.observe(None)
    return {}


def rows_of(moe: MoEModel, text: Text, pruned: Sequence[int]) -> list[list[int]]:
    """Rows of each pruned expert, by layer and batch."""
    rows: list[list[int]] = []

    def work(visit: LayerVisit) -> dict[str, Tensor]:
        visit.observe(lambda batch: rows.append([end - start for _, start, end in batch.segments]), experts=pruned)
        return {}

    stream_layers(moe, text.batches, work)
    return rows


def gram_products(rows: list[list[int]], device: str) -> None:
    """The same products on the same numbers of rows, and nothing else."""
    total_DD = torch.zeros(WIDTH, WIDTH, dtype=torch.float64, device=device)
    most = max(max(counts) for counts in rows)
    x_SD, f_SD = (torch.randn(most, WIDTH, dtype=torch.float64, device=device) for _ in range(2))
    for counts in rows:
        for count in counts:
            total_DD.addmm_(x_SD[:count].T, x_SD[:count])
            total_DD.addmm_(f_SD[:count].T, x_SD[:count])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 8])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = arguments.device
    base = random_model(
        "olmoe",
        experts=arguments.experts,
        top_k=8,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=arguments.length,
        vocab_size=1024,
        dtype=torch.float32 if device == "cpu" else torch.bfloat16,
        experts_implementation="eager" if device == "cpu" else "grouped_mm",
    ).to(device)
    shape = (arguments.blocks, arguments.length)
    ids_BL = torch.randint(1024, shape, generator=torch.Generator().manual_seed(0))
    rows = max(1, arguments.blocks // 2)
    text = Text(ids_BL, tuple({"input_ids": part} for part in ids_BL.split(rows)))
    pruned = tuple(range(0, arguments.experts, 2))
    print(
        f"{ids_BL.numel()} tokens in {len(text.batches)} batches, {len(pruned)} of {arguments.experts} pruned, {device}"
    )
    peaks: dict[str, dict[int, float]] = {"fit": {}, "gradient": {}}
    tokens = CalibrationTokens(CalibrationSpec("file:random", *shape), ids_BL, "random")
    for depth in sorted(arguments.depths):
        moe = open_model(deep_model(base, depth))
        plain(moe, text)
        peaks["gradient"][depth], gradients, _ = peak_above(lambda m=moe: gradient_pass(m, tokens, [Fisher()]), device)
        peaks["fit"][depth], fitted, result = peak_above(lambda m=moe: fit(m, text, pruned), device)
        forward, _ = seconds(lambda moe=moe: plain(moe, text), device)
        single, _ = seconds(lambda moe=moe: one_by_one(moe, text), device)
        streamed, _ = seconds(lambda moe=moe: stream_layers(moe, text.batches, nothing), device)
        first = {"input_ids": ids_BL[:PROOF_BLOCKS].to(device)}
        proof, _ = seconds(lambda moe=moe, first=first: prove(moe, first), device)
        counts = rows_of(moe, text, pruned)
        products, _ = seconds(lambda counts=counts: gram_products(counts, device), device)
        way = "streamed" if result.proof.streamed else f"NOT streamed: {result.proof.reason}"
        print(f"{depth} layers, {way}")
        print(f"  fit pass       {fitted:7.2f} s")
        print(f"  plain forward  {forward:7.2f} s   fit / forward              {fitted / forward:6.2f}")
        print(f"  proof          {proof:7.2f} s   in every pass, whatever the length of the text")
        print(f"  streaming only {streamed:7.2f} s   less the proof / forward   {(streamed - proof) / forward:6.2f}")
        print(f"  Gram products  {products:7.2f} s   fit / products             {fitted / products:6.2f}")
        print(f"{'':28}less the proof / (both)    {(fitted - proof) / (forward + products):6.2f}")
        print(f"  gradient pass  {gradients:7.2f} s   gradient / forward         {gradients / forward:6.2f}")
        print(f"  block by block {single:7.2f} s   gradient / (block by block){gradients / single:6.2f}")
        for name, peak in peaks.items():
            print(f"  peak memory    {peak[depth]:7.0f} MiB above the model's, {name} pass")
    for name, peak in peaks.items():
        low, high = min(peak), max(peak)
        if low != high:
            print(f"{name} pass, peak with {high} layers / with {low}: {peak[high] / peak[low]:.3f}")


if __name__ == "__main__":
    main()
