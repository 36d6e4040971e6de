"""The program in a completion, in every form that models answer in; and texts that no parser should be given."""

from __future__ import annotations

import ast
import time

import pytest

from prunebench.evaluate.extract import LONGEST, completed_program, first_answer, names_function, whole_program

PROMPT = 'import math\n\ndef helper(x):\n    return x\n\ndef area(r: float) -> float:\n    """Area of a circle."""\n'
BODY = "    return math.pi * r ** 2\n"
WHOLE = "def area(r):\n    return math.pi * r ** 2\n"

COMPLETIONS = {
    "body": BODY,
    "body, then prose": f"{BODY}\nThis computes the area, as it's asked.\n",
    "body, then a word": f"{BODY}\nDone\n",
    "body, then a test": f"{BODY}\nprint(area(2))\nassert area(1) == 0\n",
    "body, then a main": f"{BODY}\nif __name__ == '__main__':\n    raise SystemExit(area(1))\n",
    "body, then a helper": "    return square(r) * math.pi\n\ndef square(x):\n    return x * x\n",
    "body, then half a function": f"{BODY}\ndef other(x:\n    retu",
    "body, cut short": f"{BODY}    if r >",
    "body with tabs": "\treturn math.pi * r ** 2\n",
    "body with tabs in two levels": "\tif r:\n\t\treturn math.pi * r ** 2\n\treturn 0.0\n",
    "body not indented": "return math.pi * r ** 2\n",
    "body not indented, two levels": "if r:\n    return math.pi * r ** 2\nreturn 0.0\n",
    "blank lines before the body": f"\n\n{BODY}",
    "comment first": f"    # pi r squared\n{BODY}",
    "body, closing a fence": f"{BODY}```\nThat is all.",
    "signature": WHOLE,
    "signature, with its imports": f"from math import pi\n{WHOLE.replace('math.pi', 'pi')}",
    "signature, then prose": f"{WHOLE}\nI hope that this helps!\n",
    "prose, then signature": f"Here's the function:\n\n{WHOLE}",
    "helper, then signature": f"def square(x):\n    return x * x\n\n{WHOLE.replace('r ** 2', 'square(r)')}",
    "signature with tabs": WHOLE.replace("    ", "\t"),
    "signature, decorated": f"import functools\n\n@functools.cache\n{WHOLE}",
    "constant, then signature": f"PI = math.pi\n{WHOLE.replace('math.pi', 'PI')}",
    "fence": f"```python\n{WHOLE}```",
    "fence without a language": f"```\n{WHOLE}```\n",
    "fence among prose": f"Sure! This is it.\n\n```python\n{WHOLE}```\n\nIt multiplies. Don't forget the `math`.\n",
    "two fences": f"First the import:\n```python\nimport math\n```\nthen:\n```python\n{WHOLE}```\n",
    "fence that does not close": f"```python\n{WHOLE}",
    "fence with a body": f"```python\n{BODY}```\n",
    "signature, then a fence": f"{WHOLE}```\nOutput:\n```\n3.14\n```",
    "carriage returns": WHOLE.replace("\n", "\r\n"),
}


def area(program):
    space = {}
    exec(compile(program, "program.py", "exec"), space)  # noqa: S102 - what is written above
    return space["area"](2.0)


@pytest.mark.parametrize("form", COMPLETIONS)
def test_a_function_is_found_in_every_form_of_a_completion(form):
    assert area(completed_program(PROMPT, COMPLETIONS[form], "area")) == pytest.approx(12.566370614359172)


WHOLE_ANSWERS = {
    "plain": f"import math\n\n{WHOLE}",
    "import inside": WHOLE.replace("    return", "    import math\n    return"),
    "fence among prose": f"Sure:\n\n```python\nimport math\n{WHOLE}```\n\nIt multiplies.\n",
    "few-shot": f"import math\n{WHOLE}[DONE]\n\nYou are an expert Python programmer, and here is your task: more",
    "few-shot, begun": f"import math\n{WHOLE}\n[BEGIN]\ndef other(): pass",
    "with tests": f"import math\n{WHOLE}assert area(1) > 3\nprint(area(2))\n",
    "prose before": f"The area of a circle is:\n\nimport math\n{WHOLE}",
}


@pytest.mark.parametrize("form", WHOLE_ANSWERS)
def test_a_function_is_found_in_every_form_of_an_answer(form):
    assert area(whole_program(WHOLE_ANSWERS[form], "area")) == pytest.approx(12.566370614359172)


def test_evalplus_finds_the_same_function_where_its_sanitizer_is_right():
    """It keeps what compiles longest; forms that are no Python as a whole are not its business."""
    from evalplus.sanitize import sanitize

    right = [
        "body",
        "body, then prose",
        "body, then a test",
        "body, then a helper",
        "signature, then prose",
        "helper, then signature",
        "constant, then signature",
    ]
    for form in right:
        text = COMPLETIONS[form]
        theirs = sanitize(PROMPT + text if "def area" not in text else f"import math\n{text}", "area")
        assert area(theirs) == area(completed_program(PROMPT, text, "area")), form


@pytest.mark.parametrize(
    "text",
    ["", "\n", "no code at all", "def other():\n    pass", "```", "```python\n```", "    return (", "\0", "\ud800"],
)
def test_a_text_without_the_function_stays_what_it_is_and_fails(text):
    for program in (completed_program(PROMPT, text, "area"), whole_program(text, "area")):
        try:
            result = area(program)
        except (Exception, SystemExit):  # noqa: BLE001, S112 - whatever its fault is
            continue
        assert result is None


def test_nothing_is_repaired():
    wrong = "    return math.pi * r * 2\n"
    assert area(completed_program(PROMPT, wrong, "area")) == pytest.approx(12.566370614359172)  # 2 r at r = 2: the same
    with pytest.raises(NameError):
        area(completed_program(PROMPT, "    return pi * r ** 2\n", "area"))
    assert "class" not in completed_program(PROMPT, BODY, "area")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("def f(): pass\n", "def f(): pass\n"),
        ("def f(): pass\n[DONE]\nmore", "def f(): pass\n"),
        ("def f(): pass\n[BEGIN]\nmore", "def f(): pass\n"),
        ("def f(): pass\n\nYou are an expert Python programmer, and", "def f(): pass\n\n"),
        ("def f(): pass\nassert f()", "def f(): pass\n"),
        ("def f(): pass\nprint(f())", "def f(): pass\n"),
        ("def f():\n    assert True\n    print(1)\n", "def f():\n    assert True\n    print(1)\n"),
        ("printed = 1\nassertion = 2", "printed = 1\nassertion = 2"),
        ("print(1)\n[DONE]", ""),
        ("def f(): pass\nYou are an expert\n", "def f(): pass\nYou are an expert\n"),
    ],
)
def test_the_boundaries_of_an_answer_are_the_papers(text, kept):
    assert first_answer(text) == kept


def test_a_function_is_named_by_its_whole_name():
    assert names_function("def area(r)", "area")
    assert names_function("return area(1)", "area")
    assert not names_function("def areas(r)", "area")
    assert not names_function("def sub_area(r)", "area")


@pytest.mark.parametrize(
    "piece", ["(", "[", "{", "-", "not ", "lambda:", "a.", "f()", "1+", "if x:\n ", "a if b else ", "*", "x="]
)
@pytest.mark.parametrize("size", [LONGEST // 2, 3 * LONGEST])
def test_texts_that_exhaust_a_parser_are_survived(piece, size):
    text = (piece * size)[:size]
    started = time.monotonic()
    for found in (completed_program(PROMPT, text, "area"), whole_program(f"def area(r):\n    return {text}", "area")):
        assert isinstance(found, str)
    assert time.monotonic() - started < 60


def test_long_texts_of_many_lines_take_no_time_to_speak_of():
    text = "\n".join(f"word {n} and (" for n in range(1000))
    started = time.monotonic()
    completed_program(PROMPT, BODY + text, "area")
    assert time.monotonic() - started < 30


def test_what_is_kept_is_the_models_own_text():
    text = "def area(r):\n    # pi  r squared\n    return  math.pi*r ** 2   # odd spacing\n"
    program = completed_program(PROMPT, text, "area")
    assert text.rstrip() in program
    assert ast.parse(program)
