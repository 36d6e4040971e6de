"""2610.41366 Table H.1: the 104 rows as printed, and what Holm's correction makes of their p-values."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from prunebench.analysis.multiplicity import MARKS, Verdict, holm, verdict, within_families
from prunebench.analysis.report import shown_adjusted, shown_p

HERE = Path(__file__).parent
WITNESS = HERE.parents[2] / "shared" / "data" / "papers" / "holm_table_h1_witness.json"
FAMILIES = {
    "Fig.3": 27,
    "Tab.8": 6,
    "Tab.13": 12,
    "Tab.5": 11,
    "Remap": 12,
    "Tab.H.6": 13,
    "Rank": 6,
    "Tab.A.10": 6,
    "Tab.10": 3,
    "COMPEL": 8,
}
"""The ten families that App. H.1 names."""


@pytest.fixture(scope="module")
def rows():
    with (HERE / "table_h1.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@pytest.fixture(scope="module")
def families(rows):
    return [row["family"] for row in rows]


def rounding_ends(text):
    """The lowest and highest p that are printed so: three decimals, or two digits where p is below 0.001."""
    if text == "1":
        return 0.9995, 1.0
    mantissa, _, exponent = text.partition("e")
    half = 0.5 * 10.0 ** (-len(mantissa.partition(".")[2]) + int(exponent or 0))
    return float(text) - half, float(text) + half


def corrected(p, families):
    return within_families(p, families), holm(p)


def counts(p, in_family, over_all):
    return [int((np.asarray(x) < 0.05).sum()) for x in (p, in_family, over_all)]


def test_the_table_has_104_rows_in_ten_families(rows, families):
    assert Counter(families) == FAMILIES
    assert sum(FAMILIES.values()) == len(rows) == 104
    assert len({row["comparison"] for row in rows}) == 104


def test_the_printed_p_give_all_verdicts_and_counts(rows, families):
    p = [float(row["p"]) for row in rows]
    adjusted = corrected(p, families)
    given = [str(verdict(*one)) for one in zip(p, *adjusted, strict=True)]
    assert given == [row["verdict"] for row in rows]
    assert counts(p, *adjusted) == [62, 55, 44]


def test_every_printed_adjusted_value_lies_between_those_of_the_rounding_ends(rows, families):
    low, high = (
        corrected(list(ends), families) for ends in zip(*(rounding_ends(row["p"]) for row in rows), strict=True)
    )
    for column, below, above in zip(("holm_table", "holm_all"), low, high, strict=True):
        for row, least, most in zip(rows, below, above, strict=True):
            printed = rounding_ends(row[column])
            assert least <= printed[1], row
            assert printed[0] <= most, row


def test_a_star_is_an_interval_without_zero_and_a_p_below_5_percent(rows):
    for row in rows:
        assert row["difference"].endswith("*") == (float(row["p"]) < 0.05)
        assert (row["verdict"] == "n.s.") == (float(row["p"]) >= 0.05)


def test_the_smallest_attainable_adjusted_values(rows):
    assert shown_adjusted(holm([2e-4] * 104)[0]) == "0.021"
    assert shown_adjusted(holm([2e-4] * 111)[0]) == "0.022"
    assert {row["holm_all"] for row in rows if row["p"] == "2.0e-4"} == {"0.021"}


def test_marks_are_the_papers():
    assert {str(verdict): mark for verdict, mark in MARKS.items()} == {
        "both": "‡",
        "table": "†",
        "lost": "*",
        "n.s.": "",
    }


@pytest.mark.skipif(not WITNESS.is_file(), reason="no ../shared/data/papers/holm_table_h1_witness.json")
def test_the_witness_reproduces_all_208_values_to_the_digit(rows, families):
    witness = json.loads(WITNESS.read_text(encoding="utf-8"))
    names = ("comparison", "printed_p", "holm_table", "holm_all", "verdict")
    printed = [[row["p" if name == "printed_p" else name] for name in names] for row in rows]
    assert [[one[name] for name in names] for one in witness] == printed
    p = [one["p"] for one in witness]
    for exact, row in zip(p, rows, strict=True):
        low, high = rounding_ends(row["p"])
        assert low - 1e-12 <= exact <= high + 1e-12
        assert exact * 10_000 / 2 == pytest.approx(round(exact * 5000), abs=1e-9), "a multiple of 2/B"
    adjusted = corrected(p, families)
    assert [shown_adjusted(x) for x in adjusted[0]] == [row["holm_table"] for row in rows]
    assert [shown_adjusted(x) for x in adjusted[1]] == [row["holm_all"] for row in rows]
    assert [str(verdict(*one)) for one in zip(p, *adjusted, strict=True)] == [row["verdict"] for row in rows]
    assert counts(p, *adjusted) == [62, 55, 44]
    # 0.001 is printed in both ways; all others as `shown_p` has it.
    assert all(shown_p(x) == row["p"] for x, row in zip(p, rows, strict=True) if row["p"] not in {"0.001", "1.0e-3"})


def test_a_family_is_corrected_by_itself():
    p = [0.01, 0.02, 0.03, 0.004]
    assert within_families(p, ["a", "b", "a", "b"]) == pytest.approx([0.02, 0.02, 0.03, 0.008])
    assert [Verdict(v) for v in ("both", "table", "lost", "n.s.")] == list(Verdict)
