"""What a score pass costs over the plain forward it observes: CPU seconds, both in one run, printed as a ratio.

    python benchmarks/score_pass.py [--repeats N] [--experts-implementation eager|grouped_mm]

OLMoE 512 wide, 8 layers, 64 experts, top-8, 8,192 tokens, one thread. The forwards alternate, so that a busy machine
slows both; the minimum of each is compared. Also checks that the observed logits equal the plain ones bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch

from prunebench.calibration.score import with_built_in
from prunebench.moe import Instrument, MoELayer, TokenBatch, open_model
from prunebench.testing import random_model

BLOCKS, LENGTH = 16, 512


def cpu_seconds(work: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """CPU seconds of a call, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--experts-implementation", default="eager", choices=["eager", "grouped_mm"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = random_model(
        "olmoe",
        experts=64,
        top_k=8,
        hidden_size=512,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
        vocab_size=8192,
        experts_implementation=arguments.experts_implementation,
    )
    moe = open_model(model)
    ids_BL = torch.randint(8192, (BLOCKS, LENGTH), generator=torch.Generator().manual_seed(0))
    statistics = {layer.index: copy.deepcopy(with_built_in(())) for layer in moe.layers}
    for layer in moe.layers:
        for statistic in statistics[layer.index]:
            statistic.start(layer.expert_count, layer.width, layer.device)

    def observe(layer: MoELayer, batch: TokenBatch) -> None:
        for statistic in statistics[layer.index]:
            statistic.update(batch)

    def plain() -> torch.Tensor:
        return model(input_ids=ids_BL, use_cache=False, logits_to_keep=1).logits

    def observed() -> torch.Tensor:
        with Instrument(moe, observer=observe):
            return plain()

    seconds: dict[str, list[float]] = {"plain": [], "observed": []}
    with torch.inference_mode():
        plain()
        for _ in range(arguments.repeats):
            one, expected = cpu_seconds(plain)
            two, got = cpu_seconds(observed)
            if not torch.equal(expected, got):
                raise SystemExit("the observed forward differs from the plain one")
            seconds["plain"].append(one)
            seconds["observed"].append(two)
    low = {name: min(values) for name, values in seconds.items()}
    tokens = BLOCKS * LENGTH
    print(f"plain    {low['plain']:7.2f} CPU s  {tokens / low['plain']:8.0f} tokens/s")
    print(f"observed {low['observed']:7.2f} CPU s  {tokens / low['observed']:8.0f} tokens/s")
    print(f"ratio    {low['observed'] / low['plain']:7.3f}  ({arguments.experts_implementation}, bit-exact)")


if __name__ == "__main__":
    main()
