"""Code tasks: which tests a program is held against, and the rows of the outcome.

Where the tests run, and why a program cannot reach them, is told in `prunebench.sandbox`.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from prunebench.documents import typed_inputs
from prunebench.evaluate.engine import Evaluation, Generation
from prunebench.evaluate.tasks import Answer, common_detail
from prunebench.record import Item
from prunebench.sandbox import Case, Verdict, failure_kind

__all__ = [
    "assertion_case",
    "base_and_plus",
    "check_case",
    "code_item",
    "generation_of",
    "inputs_case",
    "pass_at_k",
    "required_names",
]

Dataset = Literal["HumanEval", "Mbpp"]

REFERENCE_FACTOR = 4
"""evalplus's: how much longer than the reference a program may take. Mbpp/392's takes more than a minute."""

INPUTS_MEMORY_BYTES = 2 * 2**30
"""Mbpp/255's reference makes a list of 1.7 million tuples of 77."""

# In the tests' namespace; functions that change their arguments get copies.
_EXPECTED = """
import copy as _copy
_expected = [{entry}(*_copy.deepcopy(list(_arguments))) for _arguments in _inputs]
"""


def check_case(doc: Mapping[str, Any], program: str) -> Case:
    """HumanEval's tests: `check(candidate)`, beside the reference, whose helpers the tests use.

    In the tests, the function's own name means the reference: HumanEval/33 compares with it, and in the original, where
    that name is the candidate's, with itself.
    """
    return Case(
        name=str(doc["id"]),
        program=program,
        preamble=f"{doc['prompt']}{doc['canonical_solution']}",
        tests=f"{doc['test']}\n\ncheck(_candidate)\n",
        names={"_candidate": str(doc["entry_point"])},
    )


def assertion_case(doc: Mapping[str, Any], program: str) -> Case:
    """MBPP's tests: assertions, after the task's own setup. What they ask for is what the reference gives them.

    lm-eval leaves the setup out, so that Mbpp/367, the one task of the test split that has any, cannot be passed there.
    """
    tests = "\n".join([str(doc["test_setup_code"]), *doc["test_list"]])
    return Case(
        name=str(doc["id"]), program=program, tests=tests, names={name: name for name in required_names(doc, tests)}
    )


def required_names(doc: Mapping[str, Any], tests: str) -> list[str]:
    """The names that the reference defines and the tests use, sorted; builtin ones too (Mbpp/126 asks for `sum`)."""
    body = ast.parse(str(doc["code"])).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    return sorted(defined & used)


def inputs_case(doc: Mapping[str, Any], program: str, dataset: Dataset, which: Literal["base", "plus"]) -> Case:
    """evalplus's tests: the reference and the program are asked for the same inputs, and have to agree.

    Raises:
        PrerequisiteError: for MBPP+ without the extra `code`.
    """
    inputs = json.loads(doc[f"{which}_input"])
    if dataset == "Mbpp":
        inputs = typed_inputs(str(doc["id"]), inputs)
    entry = str(doc["entry_point"])
    head = str(doc["prompt"]) if dataset == "HumanEval" else ""
    return Case(
        name=f"{doc['id']}, {which}",
        program=program,
        preamble=f"{head}{doc['canonical_solution']}\n{_EXPECTED.format(entry=entry)}",
        tests="_agree(_candidate, _expected, _inputs, _atol, _rule)\n",
        names={"_candidate": entry},
        data={"_inputs": inputs, "_atol": float(doc["atol"]), "_rule": f"{dataset}/{entry}"},
        cpu_factor=REFERENCE_FACTOR,
        memory_bytes=INPUTS_MEMORY_BYTES,
    )


def base_and_plus(
    evaluation: Evaluation, docs: Sequence[Mapping[str, Any]], programs: Sequence[str], dataset: Dataset
) -> list[tuple[Verdict, Verdict]]:
    """Each program's verdict on its document's own inputs, and on those and the additional ones.

    The canaries are the first document's reference.
    """
    head = str(docs[0]["prompt"]) if dataset == "HumanEval" else ""
    reference = f"{head}{docs[0]['canonical_solution']}"
    base = evaluation.run_cases(
        [inputs_case(doc, program, dataset, "base") for doc, program in zip(docs, programs, strict=True)],
        inputs_case(docs[0], reference, dataset, "base"),
    )
    # Who fails on the document's own inputs has failed on all of them; Mbpp/793 has no others.
    has_more = {str(doc["id"]): bool(json.loads(doc["plus_input"])) for doc in docs}
    left = [place for place, verdict in enumerate(base) if verdict.state == "ok" and has_more[str(docs[place]["id"])]]
    more = evaluation.run_cases(
        [inputs_case(docs[place], programs[place], dataset, "plus") for place in left],
        inputs_case(docs[0], reference, dataset, "base"),
    )
    plus = dict(zip(left, more, strict=True))
    return [(verdict, plus.get(place, verdict)) for place, verdict in enumerate(base)]


def generation_of(answer: Answer) -> Generation:
    """The one completion of a document."""
    (generation,) = answer.responses
    assert isinstance(generation, Generation)
    return generation


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that at least one of k of n samples passes: 1 - C(n - passed, k) / C(n, k) (Chen et al., 2021).

    Raises:
        ValueError: unless 0 ≤ passed ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= passed <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {passed} in {n} samples")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def code_item(
    answer: Answer, verdicts: Sequence[Verdict], *, filter_name: str, k: int = 1, flags: Mapping[str, Any] | None = None
) -> Item:
    """The row of one document under one reading of its generations.

    Args:
        answer: what the model answered; its generations are in the verdicts' order.
        verdicts: one per generation.
        filter_name: the reading.
        k: of pass@k; n is the number of verdicts, and both are in the row.
        flags: more for its detail.
    """
    generations = [one for one in answer.responses if isinstance(one, Generation)]
    states = [_state(one, verdict) for one, verdict in zip(generations, verdicts, strict=True)]
    n, passed = len(states), states.count("ok")
    first = next((place for place, state in enumerate(states) if state != "ok"), 0)
    verdict = verdicts[first]
    detail = {
        **generations[first]._asdict(),
        "reason": verdict.reason,
        "kind": failure_kind(verdict),
        "n": n,
        "k": k,
        "passed": passed,
        **common_detail(answer),
        **(flags or {}),
    }
    return answer.item(f"pass@{k}", pass_at_k(n, passed, k), states[first], detail, filter_name=filter_name)


def _state(generation: Generation, verdict: Verdict) -> str:
    """The verdict's, unless there was no program, or the logits were no numbers: then what passed is no merit."""
    if generation.finish == "invalid":
        return "invalid"
    return verdict.state if generation.text.strip() or verdict.state == "ok" else "empty"
