"""Score pass and integrity of a random 1–2 B OLMoE on one device, with figures: `gpu_smoke.sh` runs it.

Prints: build time, plain and observed forward (seconds, tokens/s, ratio), every integrity check of a constant and
of a rerouting arm, the cost of their forwards, and on CUDA peak memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import torch

from prunebench.calibration import CalibrationSpec, CalibrationTokens, score_pass
from prunebench.calibration.score import with_built_in
from prunebench.install import installed
from prunebench.integrity import check_before_evaluation, check_counters, check_empty_mask
from prunebench.loader import load_method
from prunebench.mask import Budget
from prunebench.moe import open_model
from prunebench.plan import layer_views, make_plan
from prunebench.testing import random_model

SIZES = {
    "full": {
        "experts": 64,
        "top_k": 8,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32768,
        "max_position_embeddings": 1024,
    },
    "tiny": {"experts": 16, "top_k": 4, "max_position_embeddings": 1024},
}


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall seconds of a call, the device's queue drained."""
    start = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="full", choices=sorted(SIZES))
    arguments = parser.parse_args()
    device = arguments.device
    implementation = "eager" if device == "cpu" else "grouped_mm"
    start = time.perf_counter()
    with torch.device(device):
        model = random_model(
            "olmoe", dtype=torch.bfloat16, experts_implementation=implementation, **SIZES[arguments.size]
        )
    moe = open_model(model)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    print(f"{billions:.2f} B parameters on {device}, {implementation}, built in {time.perf_counter() - start:.1f} s")
    blocks, length = (64, 1024) if arguments.size == "full" else (8, 128)
    generator = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(2, model.config.vocab_size, (blocks, length), generator=generator)
    tokens = CalibrationTokens(CalibrationSpec(blocks=blocks, length=length), ids_BL, "random")

    def plain() -> None:
        with torch.inference_mode():
            for piece_BL in ids_BL.split(max(1, 8192 // length)):
                model(input_ids=piece_BL.to(device), use_cache=False, logits_to_keep=1)

    plain()
    plain_seconds = min(seconds(plain, device) for _ in range(2))
    statistics = with_built_in(())
    score_pass(moe, tokens, statistics)
    scores = score_pass(moe, tokens, statistics)
    observed_seconds = seconds(lambda: score_pass(moe, tokens, statistics), device)
    total = ids_BL.numel()
    print(f"plain    {plain_seconds:8.3f} s  {total / plain_seconds:10.0f} tokens/s")
    print(f"observed {observed_seconds:8.3f} s  {total / observed_seconds:10.0f} tokens/s")
    print(f"ratio    {observed_seconds / plain_seconds:8.3f}")
    print(check_empty_mask(moe, ids_BL[:8]))
    method = load_method("reap")
    declared = tuple(statistic.name for statistic in method.select_needs())
    mask = method.select(
        layer_views(moe, scores, declared, "reap"), Budget(ratio=Decimal("0.5")), rng=np.random.default_rng(0)
    )
    for operator in ("constant", "reroute"):
        plan = make_plan(moe, mask, load_method(operator), scores)
        for check in check_before_evaluation(moe, plan, ids_BL):
            print(f"{operator:9} {check}")
        with installed(moe, plan) as instrument:
            masked_seconds = seconds(plain, device)
        for check in check_counters(plan, {index: c.read() for index, c in instrument.counters.items()}):
            print(f"{operator:9} {check}")
        print(f"{operator:9} forward {masked_seconds / plain_seconds:.3f} × plain")
    if device.startswith("cuda"):
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
