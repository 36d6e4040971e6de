"""How much faster than lm-eval's HFLM (float32 softmax, batch 16) the same requests are answered: CPU seconds, one run.

    python benchmarks/eval.py --data FOLDER [--model MODEL [--gguf FILE]] [--tokenizer FOLDER] [--task arc_easy=60 …]

Without MODEL, on a random OLMoE of 32 million parameters over the vocabulary of --tokenizer (with --gguf, of that
file). FOLDER has the data files (docs/suites.md). For each TASK=DOCUMENTS: seconds of HFLM, of the scorer `prefix` (and
with --batched of that); its time under an instrument of an empty mask over that without, for a MoE; tokens that HFLM
runs over those that are left when common beginnings are computed once; the largest difference of a log-likelihood, and
predictions that differ although the best two are further apart than 1e-4, or texts that differ. Exit code 1 if anything
differs that must not. Tokenising is part of all times, building the prompts of none.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lm_eval_agreement import load, suite_of
from tabulate import tabulate

from prunebench.errors import UsageError
from prunebench.evaluate import Evaluation, Pair
from prunebench.evaluate.decoding import prompt_of
from prunebench.evaluate.sharing import refusal
from prunebench.evaluate.tasks import load_task
from prunebench.evaluate.walks import plan_walks, trie_of
from prunebench.moe import Instrument, LayerProgram, open_model, quiet_libraries

TOLERANCE = 1e-4
TASKS = ("arc_challenge=100", "arc_easy=60", "mmlu_5shot=50", "gsm8k=8")
HEAD = (
    "task",
    "requests",
    "HFLM s",
    "batched s",
    "prefix s",
    "ratio",
    "empty mask",
    "token limit",
    "largest |Δ|",
    "differ",
)


def random_moe(tokenizer: Any) -> Any:
    """A random OLMoE: 4 layers of 16 experts, width 256."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        max_position_embeddings=2048,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = OlmoeForCausalLM(config).eval()
    model.set_experts_implementation("eager")  # what `prunebench run` takes on a CPU
    return model


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, and what came out."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def measure(task: str, documents: int, model: Any, tokenizer: Any, data: Path, *, batched: bool) -> list[Any]:
    """One line of the table; the last entry says whether all is as it must be."""
    from lm_eval.models.huggingface import HFLM

    suite, name = suite_of(task, data)
    groups = load_task(suite.task_file(name), suite.documents(name), suite.shots).build(documents)
    instances = [instance for group in groups for instance in group]
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=16, max_length=2048, softmax_dtype="float32")
    kind = instances[0].request_type
    theirs_s, theirs = timed(lambda: getattr(lm, kind)(instances, disable_tqdm=True))
    pairs = [Pair(*one.args) for one in instances] if kind == "loglikelihood" else []
    prompts = [prompt_of(*one.args, "") for one in instances] if kind == "generate_until" else []

    def ask(scorer: str) -> Callable[[], Any]:
        evaluation = Evaluation(model, tokenizer, bos=suite.bos, scorer=scorer)
        return lambda: evaluation.loglikelihood(pairs) if pairs else [one.text for one in evaluation.generate(prompts)]

    refusal(model, 1, nullcontext)  # the trial is made once per model
    prefix_s, ours = timed(ask("prefix"))
    batched_s = f"{timed(ask('batched'))[0]:.2f}" if batched else ""
    try:
        moe = open_model(model)
    except UsageError:
        empty = "no MoE"
    else:
        with Instrument(moe, {layer.index: LayerProgram(()) for layer in moe.layers}):
            empty = f"{timed(ask('prefix'))[0] / prefix_s:.2f}"
    rows = Evaluation(model, tokenizer, bos=suite.bos)._rows(pairs)[0]  # noqa: SLF001  what is fed for each
    whole = sum(len(own) for own in {tuple(row.inputs) for row in rows})
    inputs = [row.inputs for row in rows]
    shared = sum(
        len(trie_of([inputs[index] for index in walk], [1] * len(walk)).token_N) for walk in plan_walks(inputs, 8192)
    )
    if pairs:
        largest = max(abs(one.loglikelihood - other[0]) for one, other in zip(ours, theirs, strict=True))
        counts = [len(group) for group in groups]
        beyond = wrong(counts, [one.loglikelihood for one in ours], [other[0] for other in theirs])
        fine = largest <= TOLERANCE and not beyond
        compared = [f"{largest:.1e}", beyond]
    else:
        differ = sum(one != other for one, other in zip(ours, theirs, strict=True))
        compared, fine = ["", f"{differ} texts"], differ == 0
    limit = f"{whole / shared:.2f}" if shared else ""
    times = [f"{theirs_s:.2f}", batched_s, f"{prefix_s:.2f}"]
    return [f"{task}, {documents}", len(instances), *times, f"{theirs_s / prefix_s:.2f}", empty, limit, *compared, fine]


def wrong(counts: list[int], ours: list[float], theirs: list[float]) -> int:
    """Questions whose prediction differs although the best two are further apart than the tolerance."""
    found, first = 0, 0
    for count in counts:
        one, other = ours[first : first + count], theirs[first : first + count]
        best = sorted(other)
        found += one.index(max(one)) != other.index(best[-1]) and best[-1] - best[-2] > TOLERANCE
        first += count
    return found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--tokenizer")
    parser.add_argument("--gguf")
    parser.add_argument("--task", action="append", metavar="TASK=DOCUMENTS")
    parser.add_argument("--batched", action="store_true", help="time the scorer batched too")
    options = parser.parse_args()
    quiet_libraries()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if options.model:
        model, tokenizer = load(options.model, options.gguf)
    elif options.tokenizer:
        from transformers import AutoTokenizer

        more = {"gguf_file": options.gguf} if options.gguf else {}
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, **more)
        model = random_moe(tokenizer)
    else:
        parser.error("give --model or --tokenizer")
    lines = []
    for asked in options.task or TASKS:
        task, _, documents = asked.partition("=")
        lines.append(measure(task, int(documents), model, tokenizer, options.data, batched=options.batched))
        print(lines[-1], file=sys.stderr, flush=True)
    print(tabulate([line[:-1] for line in lines], HEAD, tablefmt="pipe", disable_numparse=True))
    return 0 if all(line[-1] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
