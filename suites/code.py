"""Small Python functions: whole ones from a description (MBPP's form), or the body of a signature (HumanEval's form).

A document passes if the program, followed by its tests, runs to its end.
"""

from __future__ import annotations

from functools import cache

from prunebench import Answer, Evaluation, Generation, Item, Suite


class Code(Suite):
    """The tiny world's two code tasks."""

    name = "code"
    version = 1
    tasks = ("tiny_mbpp", "tiny_humaneval")
    headline = tuple((task, "none", "pass@1") for task in tasks)

    def run(self, evaluation: Evaluation) -> list[Item]:
        """One row per document; equal programs are run once."""
        verdict_of = cache(evaluation.run_program)
        items = []
        for task in self.tasks:
            answers = evaluation.ask(self, task)
            for done, answer in enumerate(answers, start=1):
                generation = generation_of(answer)
                state, reason = verdict_of(program(answer)) if generation.text.strip() else ("empty", "")
                detail = {**generation._asdict(), "reason": reason}
                items.append(answer.item("pass@1", float(state == "ok"), state, detail))
                evaluation.report("run programs", done, len(answers))
        return items


def generation_of(answer: Answer) -> Generation:
    """The one completion of a document."""
    (generation,) = answer.responses
    assert isinstance(generation, Generation)
    return generation


def program(answer: Answer) -> str:
    """The completion, after its prompt where that is the function's own beginning, and the tests."""
    head = answer.doc["prompt"] if answer.task == "tiny_humaneval" else ""
    return f"{head}{generation_of(answer).text}\n{answer.doc['test']}"


SUITE = Code()
