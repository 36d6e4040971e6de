"""GPTQ of a layer's experts at once against one expert after the other: `python benchmarks/gptq.py`; `--device cuda`.

The layer: 64 experts of 1024 × 512 (outputs × inputs), 3 bits in groups of 128, H from 600 correlated inputs each. The
loop is the textbook's (2210.17323, Algorithm 1 with lazy blocks of 128): per expert, Cholesky of the inverse, and per
column one rank-1 update of the rest of its block. Both make the same integers, which is checked. Times are of this
process's CPU on a CPU, of the wall on a GPU; best of `--repeats`. Peak memory is of what is allocated beside inputs.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from prunebench.quantize import Quantized, gptq
from prunebench.quantize.grid import grid_of

BLOCK = 128


def textbook(weight_RC: Tensor, hessian_CC: Tensor, bits: int, group: int, damping: float = 0.01) -> Tensor:
    """One matrix's integers by the loop that everybody writes."""
    rows, columns = weight_RC.shape
    grid = grid_of(weight_RC[None], torch.tensor([bits], device=weight_RC.device), group)
    scale_RG, zero_RG = grid.scale_ERG[0].float(), grid.zero_ERG[0].float()
    damped = hessian_CC.float().clone()
    damped.diagonal().add_(damping * damped.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True)
    left, codes = weight_RC.float().clone(), torch.empty(rows, columns, dtype=torch.uint8, device=weight_RC.device)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        block, errors = left[:, start:end].clone(), torch.zeros(rows, end - start, device=weight_RC.device)
        within = upper[start:end, start:end]
        for i in range(end - start):
            scale, zero = scale_RG[:, (start + i) // group], zero_RG[:, (start + i) // group]
            code = ((block[:, i] / scale).round() + zero).clamp(0, 2**bits - 1)
            codes[:, start + i] = code.to(torch.uint8)
            error = (block[:, i] - (code - zero) * scale) / within[i, i]
            block[:, i:] -= error[:, None] * within[i, i:][None]
            errors[:, i] = error
        left[:, end:] -= errors @ upper[start:end, end:]
    return codes


def timed(run: Callable[[], object], device: str, repeats: int) -> float:
    """Seconds of the fastest of several runs."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        best = min(best, clock() - start)
    return best


def peak(run: Callable[[], object], device: str) -> float:
    """MiB that a run allocates at most, beside what is there before; on a CPU by the process's high water."""
    if device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def main() -> int:
    """Print times, ratios and memory; 1 if the integers differ by more than rounding, or a ratio is under `--least`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--looped", type=int, default=8, help="experts that the loops run over, scaled up to all")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--least", type=float, default=0.0, help="fail under this ratio to the textbook's loop")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shape = (options.experts, options.rows, options.columns)
    weight_ERC = torch.randn(shape, generator=generator).to(options.device)
    mixing_CC = torch.eye(options.columns) + 0.1 * torch.randn(options.columns, options.columns, generator=generator)
    hessian_ECC = torch.empty(options.experts, options.columns, options.columns, dtype=torch.float64)
    for e in range(options.experts):
        x_TC = torch.randn(600, options.columns, generator=generator) @ mixing_CC
        hessian_ECC[e] = (x_TC.T @ x_TC).double()
    hessian_ECC = hessian_ECC.to(options.device)
    tokens, few = [600] * options.experts, min(options.looped, options.experts)

    def together() -> Quantized:
        return gptq(weight_ERC, hessian_ECC, tokens, options.bits)

    def one_by_one() -> None:
        for e in range(few):
            gptq(weight_ERC[e : e + 1], hessian_ECC[e : e + 1], [600], options.bits)

    def by_the_book() -> list[Tensor]:
        return [textbook(weight_ERC[e], hessian_ECC[e], options.bits, 128) for e in range(few)]

    with torch.inference_mode():
        memory = peak(together, options.device)
        same = torch.stack(by_the_book()) == together().codes_ERC[:few]
        batch = timed(together, options.device, options.repeats)
        scaled = options.experts / few
        single = timed(one_by_one, options.device, options.repeats) * scaled
        book = timed(by_the_book, options.device, options.repeats) * scaled
    differing = 1 - float(same.float().mean())
    print(f"{options.experts} experts of {options.rows} × {options.columns}, {options.bits} bits, {options.device}")
    print(f"at once                 {batch:8.2f} s   peak {memory:.0f} MiB, inputs apart")
    print(f"textbook, one by one    {book:8.2f} s   {book / batch:.1f} times as long")
    print(f"this kernel, one by one {single:8.2f} s   {single / batch:.1f} times as long")
    print(f"integers that differ    {differing:.2e}")
    # Two float32 orders of the same sums part where a weight lies between two integers, and what follows may part too.
    return int(differing > 1e-3 or book / batch < options.least)


if __name__ == "__main__":
    sys.exit(main())
