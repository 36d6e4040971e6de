"""The records on matched storage are whole and the track's, and docs/results/matched.md is what they say."""

from __future__ import annotations

import importlib
import json
import re
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
    arms = read_track(resolve_track("matched")).arms
    assert all(arm.quantize is not None for arm in arms)
    return arms


def test_every_quantized_arm_has_its_run_and_no_other_run_is_there(quantized):
    own = RECORDS / "matched"
    assert {str(path.relative_to(own)) for path in runs_under(own).runs} == {arm.folder for arm in quantized}
    assert [arm.folder for arm in quantized if finished(prepare(arm), own) is None] == []


def test_the_records_leave_room_in_the_repository():
    files = [file for file in (RECORDS / "matched").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 2_000_000


def test_the_page_is_what_the_records_give(matched, tmp_path):
    families = ROOT / "leaderboard" / "families" / "matched.toml"
    page, summary = matched.page.write_matched(RECORDS, families, tmp_path)
    assert page.read_text() == (ROOT / "docs" / "results" / matched.page.PAGE).read_text()
    assert "0 not measured" in summary


def stored(model, folder):
    return json.loads((RECORDS / "matched" / model / folder / "record.json").read_text())["storage"]["total"]


def test_the_page_says_how_near_the_bytes_of_its_pairs_are():
    """From the records' totals alone: the two budgets, the lower one twice, then everything on arithmetic."""
    models = ("tiny-olmoe", "tiny-deepseek-v2", "tiny-moonlight", "tiny-granite")
    operators = ("constant", "reroute-trained", "tilt-rank=8")
    page = (ROOT / "docs" / "results" / "matched.md").read_text()
    words = r"(\d+) of these pairs are matched within 2 % of their bytes, and the gaps are (\S+) % to (\S+) %"
    said = re.findall(words, page)
    wanted = []
    for pruned, whole in (
        ("mone-ratio0.25-{}-A-w4-quant=64", "dense-e3a4-quant=64"),
        ("mone-ratio0.5-{}-A-w4-quant=64", "dense-w2-quant=64"),
        ("mone-ratio0.5-{}-A-w4-quant=64", "dense-e2a4-quant=64"),
        ("mone-ratio0.25-{}-world_arithmetic-A-w4-quant=64", "dense-world_arithmetic-e3a4-quant=64"),
    ):
        gaps = [
            100 * (stored(model, pruned.format(operator)) / stored(model, whole) - 1)
            for model in models
            for operator in operators
        ]
        wanted.append((str(sum(abs(gap) <= 2 for gap in gaps)), f"{min(gaps):+.2f}", f"{max(gaps):+.2f}"))
    assert said == wanted


def test_no_records_end_in_one_line(matched, tmp_path, capsys):
    assert matched.__main__.main([str(tmp_path), "--out", str(tmp_path)]) == 3
    assert capsys.readouterr().err.count("\n") == 1


@given(points=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5).map(float)), max_size=8))
def test_the_front_is_who_is_beaten_by_nobody(matched, points):
    kept = matched.arms.front(points)
    for (size, score), stays in zip(points, kept, strict=True):
        better = [(s, v) for s, v in points if (s < size and v >= score) or (s <= size and v > score)]
        assert stays == (not better)
