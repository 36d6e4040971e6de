"""HumanEval+: HumanEval's functions on evalplus's inputs, where they have to agree with the reference.

base is HumanEval's own inputs; plus is those and the additional ones, which is evalplus's score; both of the prompt
and the completion as they are. plus-extracted is of the program that is in the completion, whatever its form. Data:
evalplus's release (extra `code`), or its file (Apache-2.0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prunebench import (
    DataSuite,
    Evaluation,
    Item,
    base_and_plus,
    code_item,
    completed_program,
    generation_of,
)

FIELDS = ("prompt", "entry_point", "canonical_solution")


class HumanEvalPlus(DataSuite):
    """The same functions, on many more inputs."""

    name = "humaneval_plus"
    version = 1
    tasks = ("humaneval_plus",)
    headline = (("humaneval_plus", "plus", "pass@1"),)
    data_name = "humanevalplus"
    default_source = "evalplus:humaneval"

    def document(self, row: Mapping[str, Any]) -> dict[str, Any]:
        # Inputs are of many types: as one text, they are what they were.
        inputs = {field: json.dumps(row[field]) for field in ("base_input", "plus_input")}
        return {
            "id": str(row["task_id"]),
            **{field: str(row[field]) for field in FIELDS},
            "atol": float(row["atol"]),
            **inputs,
        }

    def run(self, evaluation: Evaluation) -> list[Item]:
        """Three rows per document."""
        answers = evaluation.ask(self, "humaneval_plus")
        docs = [answer.doc for answer in answers]
        texts = [generation_of(answer).text for answer in answers]
        strict = [f"{doc['prompt']}{text}" for doc, text in zip(docs, texts, strict=True)]
        extracted = [
            completed_program(doc["prompt"], text, doc["entry_point"]) for doc, text in zip(docs, texts, strict=True)
        ]
        verdicts = base_and_plus(evaluation, [*docs, *docs], [*strict, *extracted], "HumanEval")
        items = []
        for answer, (base, plus), (_, cut) in zip(answers, verdicts[: len(docs)], verdicts[len(docs) :], strict=True):
            items += [
                code_item(answer, [verdict], filter_name=reading)
                for reading, verdict in (("base", base), ("plus", plus), ("plus-extracted", cut))
            ]
        return items


SUITE = HumanEvalPlus()
