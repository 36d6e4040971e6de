"""lm-eval's own tasks, from its own files, over rows of ours, and what its own evaluator and HFLM make of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["FILES", "by_subject", "lm_eval_task", "requests", "samples"]

FILES = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "copa": "super_glue/copa/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "rte": "glue/rte/default.yaml",
    "winogrande": "winogrande/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "wikitext": "wikitext/wikitext.yaml",
}


def lm_eval_task(name: str, splits: Mapping[str, list[dict[str, Any]]], shots: int) -> Any:
    """lm-eval's task `name`, or `mmlu_SUBJECT`, as its command line sets it up.

    Args:
        name: a key of `FILES`, or the name of a subject's file.
        splits: rows of each split, in the columns of the data set.
        shots: few-shot examples.
    """
    import lm_eval
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = Path(lm_eval.__file__).parent / "tasks"
    file = folder / FILES.get(name, f"mmlu/default/{name}.yaml")
    config = dict(load_yaml(file))
    config.pop("tag", None)
    config.pop("task_alias", None)
    config["custom_dataset"] = lambda **_: {split: Dataset.from_list(rows) for split, rows in splits.items()}
    for key in ("training_split", "validation_split", "test_split", "fewshot_split"):
        if config.get(key) is not None and config[key] not in splits:
            config[key] = None
    task = ConfigurableTask(config=config)
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(seed=1234)
    return task


def by_subject(splits: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """MMLU's rows as lm-eval's 57 tasks have them, in the order of the asked split."""
    subjects = dict.fromkeys(row["subject"] for row in splits["test"])
    return {
        f"mmlu_{subject}": {
            split: [{k: v for k, v in row.items() if k != "subject"} for row in own if row["subject"] == subject]
            for split, own in splits.items()
        }
        for subject in subjects
    }


def requests(task: Any, limit: int | None = None) -> list[tuple[Any, ...]]:
    """The arguments of all its requests, in order."""
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    return [instance.args for instance in task.instances]


def samples(
    model: Any, tokenizer: Any, tasks: Mapping[str, Any], *, length: int, limit: int | None = None, batch_size: int = 8
) -> Any:
    """lm-eval's rows per task: its own evaluator over its own model class, softmax in float32.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer.
        tasks: as of `lm_eval_task`, by name.
        length: most tokens of a request.
        limit: only the first so many documents.
        batch_size: rows of a batch.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        max_length=length,
        softmax_dtype="float32",
    )
    return evaluate(lm, dict(tasks), log_samples=True, bootstrap_iters=0, limit=limit)["samples"]
