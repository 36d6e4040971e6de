"""What entering at the deleted expert's layer saves over whole forwards: CPU seconds in one run, printed as a ratio.

    python benchmarks/deletions.py [--repeats N] [--experts N]

OLMoE-like: 128 wide, 8 layers, 16 experts of width 64, top-4, 512 tokens in one batch, 1,024 words, one thread.
Each of `--experts` experts of every layer is deleted once (`run.validity`), both ways in turn; the minimum of each is
compared, and the damages are equal bit for bit. The proof, and the dense logits of every layer, are in both.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from prunebench import load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens
from prunebench.mask import Mask
from prunebench.moe import open_model
from prunebench.plan import Plan, make_plan
from prunebench.run.validity import MEASURES, delete_experts
from prunebench.testing import random_model

VOCABULARY, BLOCKS, LENGTH = 1024, 4, 128


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--experts", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 8, "vocab_size": VOCABULARY}
    moe = open_model(random_model("olmoe", experts=16, top_k=4, **size))
    ids_BL = torch.randint(2, VOCABULARY, (BLOCKS, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens = CalibrationTokens(CalibrationSpec("file:random", BLOCKS, LENGTH), ids_BL, "random")
    experts = {layer.index: tuple(range(options.experts)) for layer in moe.layers}
    operator = load_method("reroute")

    def plan_of(index: int, expert: int) -> Plan:
        return make_plan(moe, Mask.for_shapes(moe.shapes, {index: (expert,)}), operator, None)

    seconds: dict[bool, list[float]] = {True: [], False: []}
    found = {}
    for _ in range(options.repeats):
        for whole, own in seconds.items():
            start = time.process_time()
            found[whole] = delete_experts(moe, tokens, experts, plan_of, whole=whole)
            own.append(time.process_time() - start)
    for index in experts:
        for name in MEASURES:
            if not np.array_equal(found[True].blocks[index][name], found[False].blocks[index][name]):
                raise SystemExit(f"layer {index}: {name} differs")
    whole_seconds, own_seconds = min(seconds[True]), min(seconds[False])
    print(f"whole forwards {whole_seconds:.2f} s, from the deleted expert's layer {own_seconds:.2f} s of CPU")
    print(f"whole / own: {whole_seconds / own_seconds:.2f}")


if __name__ == "__main__":
    main()
