"""Runs of different identity read differently on the board, and only arms alike but for the operator are compared."""

from __future__ import annotations

import copy
import html.parser
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prunebench.analysis.batch import columns_of
from prunebench.board import table as board_table
from prunebench.board.entries import Entry
from prunebench.board.markdown import to_markdown
from prunebench.board.naming import IDENTIFYING
from prunebench.board.scoring import score
from prunebench.board.site import Site, index_page
from prunebench.items import Outcomes
from prunebench.record import items_to_table, run_id

CONSTANT = {"operator": "constant", "scale": None, "resolved_scale": None}
CHOOSES = ("budget", "method", "seed", "operator")
"""Identity fields that may differ between an arm and its constant: what chose the mask, if the mask is the same."""

# Written out, so that a field cannot leave the test with the code; `test_the_list_is_whole` holds it to the factory.
LEAVES = [
    *("engine", "limit", "dtype", "device"),
    *("experts_implementation", "batch_tokens", "seed"),
    *("budget.ratio",),
    *("model.name", "model.weights_sha256", "model.tokenizer_sha256", "model.shape"),
    *("method.name", "method.version", "method.file_sha256", "method.parameters"),
    *("operator.name", "operator.version", "operator.file_sha256", "operator.parameters", "operator.scale"),
    *("mask.digest", "mask.source"),
    *(f"calibration.mask.{key}" for key in ("text", "blocks", "length", "draw", "fingerprint")),
    *(f"calibration.fit.{key}" for key in ("text", "blocks", "length", "draw", "fingerprint")),
    *("suites.arithmetic.version", "suites.arithmetic.content"),
    *("suites.multiple_choice.version", "suites.multiple_choice.content"),
    *("suites.perplexity.version", "suites.perplexity.content"),
]


@pytest.fixture(scope="module")
def make(factory):
    items = factory.make_items(n=2)
    table = items_to_table(items)
    sheet = columns_of(Outcomes(table.value, table))

    def make(**changes):
        return Entry(factory.make_record(items, **changes), Path("run"), "run", sheet)

    return make


def build_table(runs):
    return board_table.build_table(runs, score(runs))


def leaves(value, path=()):
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, (*path, key))
    else:
        yield ".".join(path)


def altered(run, changes):
    """The run with identity fields set, and what follows from them: run id and the arm's own name."""
    record = copy.deepcopy(run.record)
    for name, value in changes.items():
        *way, last = name.split(".")
        part = record["identity"]
        for key in way:
            part = part[key] if part is not None else None
        if part is not None:
            part[last] = value
    identity = record["identity"]
    record["arm"] |= {"model": identity["model"]["name"]}
    record["run_id"] = run_id(identity)
    return Entry(record, run.path, run.folder, run.sheet)


def other(run, name):
    value = run.record["identity"]
    for key in name.split("."):
        value = value[key]
    if isinstance(value, str):
        return value + "9"
    return {"power": 0.2} if isinstance(value, dict) else (value or 0) + 1


def gains(runs):
    """The differences of the one reroute arm, by suite."""
    table = build_table(runs)
    (row,) = (row for row in table.rows if row.cells["operator"].text == "reroute")
    return {
        key.removesuffix("-gain"): cell.detail if cell.text == "—" else "paired"
        for key, cell in row.cells.items()
        if key.endswith("-gain")
    }


def test_the_list_is_whole(make):
    assert sorted(LEAVES) == sorted(leaves(make(**CONSTANT).record["identity"]))


@pytest.mark.parametrize("name", LEAVES)
def test_a_constant_that_differs_in_one_identity_field_does_not_serve(make, name):
    arm, constant = make(), make(**CONSTANT)
    assert set(gains([arm, constant]).values()) == {"paired"}
    found = gains([arm, altered(constant, {name: other(constant, name)})])
    field, *rest = name.split(".")
    if field == "suites":  # another content of one suite says nothing about the others
        suite = rest[0]
        mine = {key: text for key, text in found.items() if key.startswith(suite)}
        assert sorted(mine.values()) == ["no constant arm", "not run"]
        assert {text for key, text in found.items() if key not in mine} == {"paired"}
    elif field in CHOOSES or name in {"model.name", "mask.source"} or name.startswith("calibration.mask"):
        assert set(found.values()) == {"paired"}
    else:
        assert set(found.values()) == {"no constant arm"}


def test_an_identity_field_that_is_not_known_yet_counts_too(make):
    assert set(gains([make(), altered(make(**CONSTANT), {"attention": "sdpa"})]).values()) == {"no constant arm"}


def test_a_given_mask_finds_its_constant_and_of_two_the_one_asked_for_alike(make):
    given = {"mask": {"source": "file"}, "method": None, "budget": None}
    arm, constant = make(identity=given), make(**CONSTANT)
    assert set(gains([arm, constant]).values()) == {"paired"}
    assert set(gains([arm, constant, make(**CONSTANT, identity=given)]).values()) == {"paired"}
    twice = [constant, altered(constant, {"operator.file_sha256": "01"})]
    assert set(gains([arm, *twice]).values()) == {"several constant arms"}
    assert set(gains([arm, constant, altered(constant, {"operator.name": "mone"})]).values()) == {"paired"}


class Cells(html.parser.HTMLParser):
    """The visible text of each cell of each row."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.open = [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"}:
            self.rows[-1].append("")
            self.open = True
        elif tag == "small" and self.open:
            self.rows[-1][-1] += " "

    def handle_endtag(self, tag):
        self.open = self.open and tag not in {"td", "th"}

    def handle_data(self, data):
        if self.open:
            self.rows[-1][-1] += data


def read(runs):
    """The identifying cells of each run as a reader sees them, in both files: [page rows, Markdown rows]."""
    table = build_table(runs)
    keys = {column.key for column in IDENTIFYING}
    places = [number for number, column in enumerate(table.columns) if column.key in keys]
    assert len(places) == len(IDENTIFYING)
    html = index_page(Site("t", table, (), None, (), ()), ())
    page = [tuple(" ".join(row[at].split()) for at in places) for row in Cells(html).rows[1:]]
    lines = [line for line in to_markdown(table, []).splitlines() if line.startswith("|")][2:]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    return page, [tuple(row[at].strip() for at in places) for row in cells]


@pytest.mark.parametrize("name", LEAVES)
def test_runs_that_differ_in_one_identity_field_read_differently(make, name):
    run = make(**CONSTANT)
    runs = [run, altered(run, {name: other(run, name)})]
    for rows in read(runs):
        assert len(set(rows)) == 2


VALUES = st.sampled_from(
    ["", "A", "A ", " A", "—", "dense", "1", 1, 0, 0.2, True, None, "a" * 40, "a" * 41, [1], {"p": 1}]
)
TEXTS = st.sampled_from(["", "A", "A ", "A  A", "A A", "—", "dense", "a" * 40, "a" * 41])
TYPED = ("model.name", "calibration.mask.draw", "calibration.fit.draw", "method.parameters", "operator.parameters")
FREE = [x for x in LEAVES if x not in TYPED]
FREE = [x for x in FREE if not x.startswith("suites.") and x != "mask.source"]
PARAMETERS = st.dictionaries(st.sampled_from(["p", "q", "scale"]), VALUES, max_size=2)
CHANGES = st.one_of(
    st.dictionaries(st.sampled_from(FREE), VALUES, max_size=2),
    st.dictionaries(st.sampled_from([*TYPED[:3], "mask.source"]), TEXTS, max_size=2),
    st.dictionaries(st.sampled_from(["method.parameters", "operator.parameters"]), PARAMETERS, max_size=2),
    st.just({"mask.source": "file"}),
)
KINDS = st.sampled_from([{"dense": True}, CONSTANT, {}, {"keep": 4}])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(KINDS, CHANGES), min_size=2, max_size=6))
def test_no_two_runs_read_the_same(make, wanted):
    runs = {run.record["run_id"]: run for run in (altered(make(**kind), changes) for kind, changes in wanted)}
    for rows in read(list(runs.values())):
        for one, two in itertools.combinations(rows, 2):
            assert one != two


def row(make, *others, **identity):
    """What the row of an arm with this identity says, by column key."""
    run = make(identity=identity)
    table = build_table([run, *others])
    return next(row.cells for row in table.rows if row.entry.id == run.id)


def test_the_usual_run_has_no_small_print(make):
    cells = row(make)
    assert [cells[c.key].detail for c in IDENTIFYING] == ["", "", "", "= keep", "", "", "", ""]
    assert [cells[key].text for key in ("calibration", "fit")] == ["world:general A", "—"]
    assert row(make, make(dense=True), make(**CONSTANT))["model"].detail == ""


def test_parameters_and_a_seed_stand_by_the_method(make):
    assert (
        row(make, method={"parameters": {"power": 0.2, "norm": "l2", "note": None}})["method"].detail
        == "norm=l2, power=0.2"
    )
    assert row(make, seed=1)["method"].detail == "seed=1"
    assert row(make, make(identity={"seed": 1}))["method"].detail == "", "the other row says its seed"


def test_a_given_mask_is_called_so_without_the_parameters_of_a_method_that_did_not_choose_it(make):
    given = row(make, mask={"source": "file"}, method={"parameters": {"power": 0.2}})
    assert given["method"].detail == "given mask"


def test_an_operator_of_another_file_is_named_with_its_parameters(make):
    assert (
        row(make, operator={"name": "mine", "parameters": {"shrink": 0.5, "scale": "keep"}})["operator"].detail
        == "mine, shrink=0.5"
    )


def test_execution_is_named_where_it_is_unusual_or_differs(make):
    gpu = {"dtype": "bfloat16", "device": "cuda", "experts_implementation": "grouped_mm"}
    assert row(make, **gpu)["model"].detail == "bfloat16, cuda, grouped_mm"
    assert row(make, dtype="bfloat16")["model"].detail == "bfloat16"
    assert row(make, make(identity=gpu))["model"].detail == "float32, cpu, eager"


def test_calibration_says_text_and_draw_and_its_size_where_sizes_differ(make):
    other = {"mask": {"text": "world:code", "draw": "B", "blocks": 9}}
    assert row(make, calibration=other)["calibration"].visible == "world:code B"
    assert row(make, make(identity={"calibration": other}))["calibration"].visible == "world:general A 4 × 8 tokens"


def test_what_an_operator_was_fitted_on_stands_beside_what_its_mask_was_chosen_on(make):
    refitted = make(**CONSTANT, fit_draw="B")
    (found,) = build_table([refitted]).rows
    assert [found.cells[key].text for key in ("calibration", "fit")] == ["world:general A", "world:general B"]


def test_an_arm_that_fits_nothing_is_compared_with_the_constant_fitted_on_the_masks_own_calibration(make):
    constants = [make(**CONSTANT), make(**CONSTANT, fit_draw="B")]
    assert set(gains([make(), *constants]).values()) == {"paired"}
    assert set(gains([make(), constants[1]]).values()) == {"no constant arm"}


def test_a_fitted_arm_is_compared_with_the_constant_of_the_same_fit(make):
    tilts = [make(operator="tilt", scale=None, resolved_scale=None, fit_draw=draw) for draw in "AB"]
    table = build_table([*tilts, make(**CONSTANT, fit_draw="B")])
    said = {row.cells["fit"].text: row.cells["arithmetic-gain"].detail for row in table.rows}
    assert said["world:general A"] == "no constant arm"
    assert said["world:general B"].startswith("[") or said["world:general B"] == "is the constant"


def test_what_has_no_place_of_its_own_is_named_beside_what_it_is_about(make):
    long = {"model": {"weights_sha256": "0123456789abcdef" * 4}}
    assert "model.weights_sha256 01234567" in row(make, make(), **long)["model"].detail.split(", ")
    assert row(make, make(), batch_tokens=7)["model"].detail == "batch_tokens 7"
    assert row(make, make(), budget={"ratio": "0.51"})["ratio"].detail == "budget.ratio 0.51"
    renamed = {"mask": {"fingerprint": "fX"}}
    assert row(make, make(), calibration=renamed)["calibration"].detail == "calibration.mask.fingerprint fX"
    fits = [make(**CONSTANT, identity={"calibration": {"fit": {"fingerprint": name}}}) for name in ("f1", "f2")]
    said = sorted(row.cells["fit"].detail for row in build_table(fits).rows)
    assert said == ["calibration.fit.fingerprint f1", "calibration.fit.fingerprint f2"]
