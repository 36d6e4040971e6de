"""What criteria cost over the plain forward that they observe: CPU seconds, all in one run, printed as ratios.

    python benchmarks/score.py [--repeats N] [--experts-implementation eager|grouped_mm]

OLMoE-like: 512 wide, 8 layers, 64 experts of width 256, top-8, 8,192 tokens, one thread; its router renormalises, so
that every criterion is defined. Passes alternate, so that a busy machine slows all; the minimum of each is compared,
and every observed forward's logits equal the plain ones bit for bit. What is measured:

    all        everything that a score pass collects: every single-forward criterion but Razor (goal: 1.5)
    razor      the same and Razor, whose rank-(k+1) expert runs once per token (goal: 1.8)
    products   the same as all, and the inner products of deletion residuals (App. E.5); those of the constant and the
               tilt are of further visits, as `benchmarks/fit.py` measures them
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence

import torch

from prunebench import RefillSums, ResidualProducts, Statistic
from prunebench.calibration.score import with_built_in
from prunebench.moe import Instrument, MoELayer, MoEModel, TokenBatch, open_model
from prunebench.testing import random_model

BLOCKS, LENGTH = 16, 512
GOALS = {"all": 1.5, "razor": 1.8}


def cpu_seconds(work: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """CPU seconds of a call, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def observed(
    moe: MoEModel, wanted: Sequence[Statistic], plain: Callable[[], torch.Tensor], seconds_of: dict[str, float]
) -> Callable[[], torch.Tensor]:
    """The plain forward with statistics taken of every layer; what each costs is added to `seconds_of`."""

    def work() -> torch.Tensor:
        statistics = {layer.index: copy.deepcopy(wanted) for layer in moe.layers}
        for layer in moe.layers:
            for statistic in statistics[layer.index]:
                statistic.start(layer.expert_count, layer.width, layer.device)

        def observe(layer: MoELayer, batch: TokenBatch) -> None:
            for statistic in statistics[layer.index]:
                start = time.process_time()
                statistic.update(batch)
                seconds_of[statistic.name] = seconds_of.get(statistic.name, 0.0) + time.process_time() - start

        with Instrument(moe, observer=observe):
            return plain()

    return work


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--experts-implementation", default="eager", choices=["eager", "grouped_mm"])
    parser.add_argument("--by-statistic", action="store_true", help="print the seconds of each statistic as well")
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
        norm_topk_prob=True,
        experts_implementation=arguments.experts_implementation,
    )
    moe = open_model(model)
    ids_BL = torch.randint(8192, (BLOCKS, LENGTH), generator=torch.Generator().manual_seed(0))
    seconds_of: dict[str, float] = {}

    def plain() -> torch.Tensor:
        return model(input_ids=ids_BL, use_cache=False, logits_to_keep=1).logits

    extra: dict[str, tuple[Statistic, ...]] = {"all": (), "razor": (RefillSums(),), "products": (ResidualProducts(),)}
    passes = {"plain": plain}
    passes |= {name: observed(moe, with_built_in(more), plain, seconds_of) for name, more in extra.items()}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    with torch.inference_mode():
        expected = plain()
        for _ in range(arguments.repeats):
            for name, work in passes.items():
                took, logits = cpu_seconds(work)
                if not torch.equal(expected, logits):
                    raise SystemExit(f"the forward observed by {name} differs from the plain one")
                seconds[name].append(took)
    low = {name: min(values) for name, values in seconds.items()}
    print(f"{arguments.experts_implementation}, bit-exact, {BLOCKS * LENGTH} tokens")
    for name, value in low.items():
        goal = f"  goal {GOALS[name]}" if name in GOALS else ""
        print(f"{name:10} {value:7.2f} CPU s  ratio {value / low['plain']:6.3f}{goal}")
    if arguments.by_statistic:
        for name, value in sorted(seconds_of.items(), key=lambda item: -item[1]):
            print(f"  {name:32} {value:7.2f} s in all passes")


if __name__ == "__main__":
    main()
