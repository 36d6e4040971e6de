"""MBPP: a whole function from a description and three assertions; lm-eval's prompt, three shots.

strict runs the whole generation, which is lm-eval's score; lenient cuts it at its first answer boundary (2610.41366
App. A.7). Beside each outcome: the kind of failure, whether the generation ran past its answer, and whether it names
the required function. Data: google-research-datasets/mbpp, tasks 11 to 510 of the full set (CC BY 4.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prunebench import (
    Answer,
    DataSuite,
    Evaluation,
    Item,
    assertion_case,
    code_item,
    first_answer,
    generation_of,
    names_function,
    required_names,
)

TEST_SPLIT = range(11, 511)


class Mbpp(DataSuite):
    """The 500 tasks of the test split."""

    name = "mbpp"
    version = 1
    tasks = ("mbpp",)
    headline = (("mbpp", "strict", "pass@1"),)
    data_name = "mbpp"

    def document(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        if row["task_id"] not in TEST_SPLIT:
            return None
        texts = {field: str(row[field]) for field in ("text", "code", "test_setup_code")}
        return {"id": str(row["task_id"]), **texts, "test_list": [str(test) for test in row["test_list"]]}

    def run(self, evaluation: Evaluation) -> list[Item]:
        """Two rows per document."""
        answers = evaluation.ask(self, "mbpp")
        texts = [generation_of(answer).text for answer in answers]
        cases = [
            assertion_case(answer.doc, program)
            for answer, text in zip(answers, texts, strict=True)
            for program in (text, first_answer(text))
        ]
        first = answers[0].doc
        verdicts = iter(evaluation.run_cases(cases, assertion_case(first, first["code"])))
        return [
            code_item(answer, [next(verdicts)], filter_name=reading, flags=flags_of(answer))
            for answer in answers
            for reading in ("strict", "lenient")
        ]


def flags_of(answer: Answer) -> dict[str, bool]:
    """Whether a generation ran past its answer, and names what its tests ask for."""
    text = generation_of(answer).text
    wanted = required_names(answer.doc, "\n".join(answer.doc["test_list"]))
    return {
        "ran_past": first_answer(text).rstrip() != text.rstrip(),
        "names_function": all(names_function(first_answer(text), name) for name in wanted),
    }


SUITE = Mbpp()
