"""Numbers read from texts, by cases and against lm-eval's own filters; predictions from log-likelihoods."""

from __future__ import annotations

import random
from decimal import Decimal

import pytest

from prunebench.analysis.deciding import (
    flexible_answer,
    is_tie,
    lm_eval_exact_match,
    numeric_answer,
    predicted,
    strict_answer,
)

TABLE = [
    ("#### $29.00", "29"),
    ("#### 29.", "29"),
    ("#### 1,234", "1234"),
    ("#### -3", "-3"),
    ("#### - 3", "-3"),
    ("#### −3", "-3"),
    ("#### +3", "3"),
    ("#### -$3.50", "-3.5"),
    ("#### $-3", "-3"),
    ("#### .5", "0.5"),
    ("#### 50%", "50"),
    ("#### 1,234,567.89 dollars", "1234567.89"),
    ("The total is 72 clips, altogether.", "72"),
    ("So, there are 16-3=13 left, and 13 is it.", "13"),
    ("16-3", "3"),
    ("#### 42\n\nQuestion: How many? #### 7", "42"),
    ("#### 42" + " and so on, 7 times" * 27, "42"),
    ("First 5, then ####  12 apples (not 13)", "12"),
    ("It is 9. #### none", "9"),
    ("1,2345", "2345"),
    ("versions 3.5.2", "2"),
    ("", None),
    ("   \n", None),
    ("no number, at all.", None),
    ("####", None),
    (",", None),
]


@pytest.mark.parametrize(("text", "number"), TABLE)
def test_the_number_of_a_solution(text, number):
    assert numeric_answer(text) == (None if number is None else Decimal(number))


def test_zero_has_no_sign_and_trailing_zeros_do_not_count():
    assert str(numeric_answer("#### -0")) == "0"
    assert numeric_answer("#### 7.50") == numeric_answer("#### 7.5")


def lm_evals(pattern, select, text):
    from lm_eval.filters.extraction import RegexFilter

    (result,) = RegexFilter(regex_pattern=pattern, group_select=select).apply([[text]], [{}])
    return result[0]


def some_texts():
    rng = random.Random(3)
    pieces = ["#### ", "42", "$1,234.50", " -7", "\n", ".", ",", " apples", "+3", "####5", "29.", "=", "$", "---"]
    yield from (text for text, _ in TABLE)
    yield from ("".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in range(400))


def test_both_matches_are_lm_evals_filters():
    for text in some_texts():
        assert strict_answer(text) == lm_evals(r"#### (\-?[0-9\.\,]+)", 0, text), text
        assert flexible_answer(text) == lm_evals(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1, text), text


def test_exact_match_is_lm_evals():
    from lm_eval.api.metrics import exact_match_hf_evaluate

    ignored = [",", r"\$", r"(?s).*#### ", r"\.$"]
    for text in some_texts():
        for answer, reference in (
            (strict_answer(text), "So 4.\n#### 42"),
            (text, text.upper()),
            (text, "#### 1,234.50"),
        ):
            theirs = exact_match_hf_evaluate([answer], [reference], ignored, ignore_case=True)["exact_match"]
            assert lm_eval_exact_match(answer, reference) == theirs, (answer, reference)


def test_predictions_take_the_first_of_the_best_as_numpys_argmax_does():
    import numpy as np

    rng = random.Random(0)
    for _ in range(300):
        scores = [round(-rng.random() * 4, 1) for _ in range(rng.randint(2, 5))]
        lengths = [rng.randint(1, 4) for _ in scores]
        assert predicted(scores) == int(np.argmax(scores))
        assert predicted(scores, lengths) == int(np.argmax(np.array(scores) / np.array(lengths, dtype=float)))
        assert is_tie(scores) == (scores.count(max(scores)) > 1)
