"""The records on matched storage are whole and the track's, and docs/results/matched.md is what they say."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunebench.loader import content_root, resolve_track
from prunebench.record import runs_under
from prunebench.run import read_track
from prunebench.run.arm import prepare
from prunebench.run.session import finished

ROOT = content_root()
RECORDS = ROOT / "leaderboard" / "records"


@pytest.fixture(scope="module")
def matched():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield SimpleNamespace(
            **{name: importlib.import_module(f"leaderboard.matched.{name}") for name in ("arms", "page", "__main__")}
        )


@pytest.fixture(scope="module")
def quantized():
    """The arms of the track; those at 16 bits are the tiny track's."""
    return [arm for arm in read_track(resolve_track("matched")).arms if arm.quantize is not None]


def test_every_quantized_arm_has_its_run_and_no_other_run_is_there(quantized):
    own = RECORDS / "matched"
    assert {str(path.relative_to(own)) for path in runs_under(own).runs} == {arm.folder for arm in quantized}
    assert [arm.folder for arm in quantized if finished(prepare(arm), own) is None] == []


def test_the_records_leave_room_in_the_repository():
    files = [file for file in (RECORDS / "matched").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 1_500_000


def test_the_page_is_what_the_records_give(matched, tmp_path):
    families = ROOT / "leaderboard" / "families" / "matched.toml"
    page, summary = matched.page.write_matched(RECORDS, families, tmp_path)
    assert page.read_text() == (ROOT / "docs" / "results" / matched.page.PAGE).read_text()
    assert "0 not measured" in summary


def test_no_records_end_in_one_line(matched, tmp_path, capsys):
    assert matched.__main__.main([str(tmp_path), "--out", str(tmp_path)]) == 3
    assert capsys.readouterr().err.count("\n") == 1


@given(points=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5).map(float)), max_size=8))
def test_the_front_is_who_is_beaten_by_nobody(matched, points):
    kept = matched.arms.front(points)
    for (size, score), stays in zip(points, kept, strict=True):
        better = [(s, v) for s, v in points if (s < size and v >= score) or (s <= size and v > score)]
        assert stays == (not better)
