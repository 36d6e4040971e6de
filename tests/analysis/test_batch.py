"""Many runs scored at once give the numbers that each gives alone, packed or not."""

from __future__ import annotations

import numpy as np
import pytest

from prunebench.analysis.batch import columns_of, sampled_sheets
from prunebench.analysis.metrics import metrics_from_items, metrics_from_samples
from prunebench.errors import PrerequisiteError
from prunebench.items import read_outcomes
from prunebench.packing import pack
from prunebench.record import ITEMS_FILE, read_run, runs_under


@pytest.fixture
def records(factory, tmp_path):
    """Two runs on the same items and one on others, with a question that is there twice."""
    for number, n in enumerate((31, 31, 40)):
        items = factory.make_items(seed=number, n=n)
        items[1] = type(items[1])(**(vars(items[1]) | {"doc_hash": items[0].doc_hash}))
        factory.write(tmp_path / "r" / f"m{number}", items, mask=f"m{number}")
    return tmp_path / "r"


@pytest.mark.parametrize("packed", [False, True])
def test_batches_give_what_each_run_gives_alone(records, packed):
    if packed:
        assert pack(records).changed == 3
    runs = [read_run(path) for path in runs_under(records).runs]
    sheets = [columns_of(read_outcomes(run.path / ITEMS_FILE)) for run in runs]
    for run, samples in zip(runs, sampled_sheets(sheets), strict=True):
        alone = metrics_from_items(run.items, run.record["headline"])
        together = metrics_from_samples(samples, run.record["headline"])
        assert together.keys() == alone.keys()
        for name, numbers in alone.items():
            assert together[name] == pytest.approx(numbers, rel=1e-12), name


def test_runs_on_the_same_items_are_known_by_their_digest(records):
    pack(records)
    one, two, other = (columns_of(read_outcomes(path / ITEMS_FILE)) for path in runs_under(records).runs)
    for key in one:
        assert one[key].digest == two[key].digest
        assert one[key].same_items(two[key])
        assert not one[key].same_items(other[key])
        assert one[key].digest != other[key].digest


def test_outcomes_of_a_packed_run_are_those_of_its_items(records):
    plain = [read_outcomes(path / ITEMS_FILE).value_N for path in runs_under(records).runs]
    pack(records)
    for path, values in zip(runs_under(records).runs, plain, strict=True):
        assert np.array_equal(read_outcomes(path / ITEMS_FILE).value_N, values)


def test_cut_outcomes_are_one_line(records):
    pack(records)
    path = runs_under(records).runs[0] / ITEMS_FILE
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(PrerequisiteError, match="cannot read the items") as caught:
        read_outcomes(path)
    assert "\n" not in str(caught.value)
