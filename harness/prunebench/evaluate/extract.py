"""The program in what a model wrote.

Models answer with a body, a whole function, a fenced block between sentences, or code that runs on into the next task.
Scoring what was written as it is (lm-eval's way) is always done; these functions give the other reading. They only cut,
indent and put a prompt in front: nothing is repaired.
"""

from __future__ import annotations

import ast
import re
import textwrap

__all__ = ["LONGEST", "completed_program", "first_answer", "names_function", "whole_program"]

LONGEST = 20_000
"""Characters that are looked at: what is longer is left as it is, since a parser's stack is finite."""

# 2610.41366 App. A.7: [DONE], [BEGIN], the few-shot preamble, or a top-level assert / print.
_BOUNDARY = re.compile(r"\[DONE\]|\[BEGIN\]|You are an expert Python programmer|^(?:assert|print)\b", re.MULTILINE)
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def first_answer(text: str) -> str:
    """A generation cut at its first answer boundary (2610.41366 App. A.7)."""
    boundary = _BOUNDARY.search(text)
    return text[: boundary.start()] if boundary else text


def names_function(text: str, name: str) -> bool:
    """Whether a text has the name of the required function, as a word."""
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def completed_program(prompt: str, completion: str, name: str) -> str:
    """The program of a completion of `prompt`, which ends inside the function `name`: HumanEval's form.

    A completion that defines `name` itself stands alone, after what the prompt has before that function (imports,
    helpers). Any other is the rest of the body: tabs that indent become four spaces, as in the prompt, and a body
    that is not indented is. Definitions, imports and assignments are kept; prose, calls and tests after them are not.
    """
    code = _unfenced(completion, name)
    if len(prompt) + len(code) > LONGEST:
        return prompt + code
    if _defines(code, name):
        head = prompt[: _place_of(prompt, name)]
        return _definitions(f"{head.rstrip()}\n\n{_without_prose_before(code)}", name)
    return _definitions(prompt + _as_body(code), name)


def whole_program(text: str, name: str) -> str:
    """The program of an answer that has to define `name` itself: MBPP's form, fenced and among prose or not."""
    code = _unfenced(first_answer(text), name)
    return code if len(code) > LONGEST else _definitions(_without_prose_before(code), name)


def _unfenced(text: str, name: str) -> str:
    """The fenced block that defines `name`, or the first; without any, the text up to a closing fence."""
    blocks = [match[1] for match in _FENCED.finditer(text)]
    # A fence that closes what the prompt opened is an opening one to the eye: then the code is before it.
    before = text.partition("```")[0]
    if not blocks or _defines(before, name):
        return before
    return next((block for block in blocks if _defines(block, name)), blocks[0] if not before.strip() else before)


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^(?:async[ \t]+)?(?:def|class)[ \t]+{re.escape(name)}\b", code, re.MULTILINE) is not None


def _place_of(prompt: str, name: str) -> int:
    """Where the prompt's own definition of `name` begins."""
    found = re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", prompt, re.MULTILINE)
    return found.start() if found else len(prompt)


def _without_prose_before(code: str) -> str:
    """From the first line on that begins a definition, an import, a decorator or an assignment."""
    start = re.search(r"^(?:(?:async[ \t]+)?def|class|import|from|@\w|\w+[ \t]*(?::[^=\n]+)?=[^=])", code, re.MULTILINE)
    return code[start.start() :] if start else code


def _as_body(code: str) -> str:
    """Code as the rest of a body that is indented by four spaces."""
    lines = [re.sub(r"^[ \t]+", lambda indent: indent[0].expandtabs(4), line) for line in code.split("\n")]
    first = next((line for line in lines if line.strip()), "")
    if first and not first[0].isspace():
        # Not a line that goes on where the prompt stopped: prompts end with a line break.
        return textwrap.indent("\n".join(lines), "    ")
    return "\n".join(lines)


def _definitions(source: str, name: str) -> str:
    """The longest beginning that is Python, less what is neither a definition, an import nor an assignment.

    A text of which no beginning defines `name` is returned as it is, so that it fails by its own fault.
    """
    lines = source.split("\n")
    for end in range(len(lines), 0, -1):
        beginning = "\n".join(lines[:end])
        try:
            tree = ast.parse(beginning)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if not _defines(beginning, name):
            break
        kept = [node for node in tree.body if isinstance(node, _KEPT)]
        return "\n".join(_lines_of(node, lines) for node in kept) + "\n"
    return source


def _lines_of(node: ast.stmt, lines: list[str]) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : node.end_lineno])
