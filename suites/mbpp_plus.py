"""MBPP+: MBPP's functions on evalplus's inputs, where they have to agree with the reference; lm-eval's prompt.

base is the task's own inputs; plus is those and the additional ones, which is evalplus's score; both of the whole
generation. plus-lenient is of the program that is in it, cut at its first answer boundary. Flags as in mbpp. Data:
evalplus's release (extra `code`), or its file (Apache-2.0).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from prunebench import (
    Answer,
    DataSuite,
    Evaluation,
    Item,
    base_and_plus,
    code_item,
    first_answer,
    generation_of,
    names_function,
    whole_program,
)

SHOWN_TESTS = 3


class MbppPlus(DataSuite):
    """The functions whose tests evalplus could extend."""

    name = "mbpp_plus"
    version = 1
    tasks = ("mbpp_plus",)
    headline = (("mbpp_plus", "plus", "pass@1"),)
    data_name = "mbppplus"
    default_source = "evalplus:mbpp"

    def document(self, row: Mapping[str, Any]) -> dict[str, Any]:
        # Inputs are of many types: as one text, they are what they were.
        inputs = {field: json.dumps(row[field]) for field in ("base_input", "plus_input")}
        return {
            "id": str(row["task_id"]),
            "text": description_of(str(row["prompt"])),
            "test_list": assertions_of(str(row["assertion"]))[:SHOWN_TESTS],
            "entry_point": str(row["entry_point"]),
            "canonical_solution": str(row["canonical_solution"]),
            "atol": float(row["atol"]),
            **inputs,
        }

    def run(self, evaluation: Evaluation) -> list[Item]:
        """Three rows per document."""
        answers = evaluation.ask(self, "mbpp_plus")
        docs = [answer.doc for answer in answers]
        texts = [generation_of(answer).text for answer in answers]
        lenient = [whole_program(text, doc["entry_point"]) for doc, text in zip(docs, texts, strict=True)]
        verdicts = base_and_plus(evaluation, [*docs, *docs], [*texts, *lenient], "Mbpp")
        items = []
        for answer, (base, plus), (_, cut) in zip(answers, verdicts[: len(docs)], verdicts[len(docs) :], strict=True):
            items += [
                code_item(answer, [verdict], filter_name=reading, flags=flags_of(answer))
                for reading, verdict in (("base", base), ("plus", plus), ("plus-lenient", cut))
            ]
        return items


def description_of(prompt: str) -> str:
    """The words of a prompt that is a docstring, without the assertions that newer releases put into it."""
    words = re.sub(r"^\s*(?:'''|\"\"\")|(?:'''|\"\"\")\s*$", "", prompt)
    return re.sub(r"^assert .*$", "", words, flags=re.MULTILINE).strip()


def assertions_of(code: str) -> list[str]:
    """The assertions of a task, each as it is written."""
    return [str(ast.get_source_segment(code, node)) for node in ast.parse(code).body if isinstance(node, ast.Assert)]


def flags_of(answer: Answer) -> dict[str, bool]:
    """Whether a generation ran past its answer, and names the required function."""
    text = generation_of(answer).text
    return {
        "ran_past": first_answer(text).rstrip() != text.rstrip(),
        "names_function": names_function(first_answer(text), answer.doc["entry_point"]),
    }


SUITE = MbppPlus()
