"""HumanEval: the body of a function from its signature and docstring; lm-eval's prompt and stop strings.

strict runs the prompt and the completion as they are, which is lm-eval's score; extracted runs the program that is in
the completion, whatever its form. Data: openai/openai_humaneval, 164 functions (MIT).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prunebench import (
    DataSuite,
    Evaluation,
    Item,
    check_case,
    code_item,
    completed_program,
    generation_of,
)

FIELDS = ("prompt", "entry_point", "canonical_solution", "test")


class HumanEval(DataSuite):
    """The 164 functions and their tests."""

    name = "humaneval"
    version = 1
    tasks = ("humaneval",)
    headline = (("humaneval", "strict", "pass@1"),)
    data_name = "humaneval"

    def document(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"id": str(row["task_id"]), **{field: str(row[field]) for field in FIELDS}}

    def run(self, evaluation: Evaluation) -> list[Item]:
        """Two rows per document."""
        answers = evaluation.ask(self, "humaneval")
        readings = [readings_of(answer.doc, generation_of(answer).text) for answer in answers]
        cases = [
            check_case(answer.doc, program)
            for answer, programs in zip(answers, readings, strict=True)
            for program in programs.values()
        ]
        first = answers[0].doc
        canary = check_case(first, f"{first['prompt']}{first['canonical_solution']}")
        verdicts = iter(evaluation.run_cases(cases, canary))
        return [
            code_item(answer, [next(verdicts)], filter_name=reading)
            for answer, programs in zip(answers, readings, strict=True)
            for reading in programs
        ]


def readings_of(doc: Mapping[str, Any], text: str) -> dict[str, str]:
    """The program under each reading."""
    return {
        "strict": f"{doc['prompt']}{text}",
        "extracted": completed_program(doc["prompt"], text, doc["entry_point"]),
    }


SUITE = HumanEval()
