"""What the batch does to scores and texts of one model: rounding differs between batches, most of all in bfloat16.

    python benchmarks/batch_dependence.py MODEL [--dtype bfloat16] [--limit 40] [--small 1] [--data FOLDER]

Every question is asked in small batches and in large ones: how many log-likelihoods differ and by how much,
predictions that flip, ties at the stored digit; and how many greedy texts differ. On the tiny world's suites, or with
--data on ARC-Easy and GSM8K.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from prunebench.evaluate import Evaluation
from prunebench.loader import load_suite, resolve_model
from prunebench.moe import load_model, quiet_libraries
from prunebench.run.sources import ModelFiles


def measured(name: str, evaluations: list[Evaluation], tasks: tuple[str, ...] | None = None) -> list[list[Any]]:
    """The rows of a suite's items under each evaluation."""
    suite: Any = load_suite(name)
    if tasks is not None:
        narrowed: Any = type("Part", (type(suite),), {"tasks": tasks, "file": suite.file})
        suite = narrowed().with_source(suite.source)
    return [suite.run(evaluation) for evaluation in evaluations]


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--small", type=int, default=1, help="tokens of a small batch; 1 is one request at a time")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    source = resolve_model(options.model)
    loaded = load_model(source.name, ModelFiles.of(source).folder, device=options.device, dtype=options.dtype)
    evaluations = [
        Evaluation(loaded.moe.model, loaded.tokenizer, tokens, options.limit)
        for tokens in (options.small, options.batch_tokens)
    ]
    public = options.data is not None
    choices = (
        measured(f"nine_tasks={options.data}", evaluations, ("arc_easy",))
        if public
        else measured("multiple_choice", evaluations)
    )
    scores, differ, largest, flips, ties = 0, 0, 0.0, 0, 0
    for small, large in zip(*choices, strict=True):
        if small.metric != "acc":
            continue
        one, other = (json.loads(item.detail)["loglikelihoods"] for item in (small, large))
        pairs = list(zip(one, other, strict=True))
        scores, differ = scores + len(pairs), differ + sum(a != b for a, b in pairs)
        largest = max([largest, *(abs(a - b) for a, b in pairs)])
        flips += one.index(max(one)) != other.index(max(other))
        ties += other.count(max(other)) > 1
    questions = sum(item.metric == "acc" for item in choices[0])
    print(f"{options.model}, {options.dtype}: batches of {options.small} and of {options.batch_tokens} tokens")
    print(f"log-likelihoods: {differ} of {scores} differ ({differ / scores:.1%}), by up to {largest:.2g} nats")
    print(f"predictions: {flips} of {questions} flip ({flips / questions:.1%}); {ties} ties ({ties / questions:.1%})")
    texts = measured(f"gsm8k={options.data}" if public else "arithmetic", evaluations)
    first = texts[0][0].filter
    pairs = [
        (json.loads(a.detail)["text"], json.loads(b.detail)["text"])
        for a, b in zip(*texts, strict=True)
        if a.filter == first
    ]
    changed = sum(a != b for a, b in pairs)
    print(f"greedy texts: {changed} of {len(pairs)} differ ({changed / len(pairs):.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
