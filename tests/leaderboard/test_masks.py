"""docs/results/masks.md and fixtures/masks are what the committed records hold; small tables are counted by hand."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from prunebench import load_method
from prunebench.mask import Mask

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "leaderboard" / "records" / "tiny"


@pytest.fixture(scope="module")
def masks():
    sys.path.insert(0, str(ROOT))
    try:
        from leaderboard import masks as module
    finally:
        sys.path.remove(str(ROOT))
    return module


@pytest.fixture(scope="module")
def chosen(masks):
    return masks.read_masks(RECORDS)


def test_the_committed_page_is_what_the_records_give(masks, chosen):
    assert (ROOT / "docs" / "results" / "masks.md").read_text(encoding="utf-8") == masks.page(chosen)


def test_the_committed_masks_are_those_of_the_records(masks, chosen, tmp_path):
    count = masks.export(chosen, tmp_path)
    there = {path.relative_to(ROOT / "fixtures" / "masks") for path in (ROOT / "fixtures" / "masks").glob("*/*.json")}
    assert there == {path.relative_to(tmp_path) for path in tmp_path.glob("*/*.json")}
    assert len(there) == count
    for path in there:
        mask = Mask.load(ROOT / "fixtures" / "masks" / path)
        assert mask.to_json() == json.loads((tmp_path / path).read_text())


def test_docs_name_the_criteria_that_have_no_mask():
    text = (ROOT / "docs" / "criteria.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `([^`]+)`", text, flags=re.MULTILINE)
    table = table[: table.index("random") + 1]
    there = {path.name for path in (ROOT / "fixtures" / "masks" / "tiny-moonlight").glob("*.json")}

    def has_masks(criterion: str) -> bool:
        name, *given = criterion.split()
        method = load_method(
            name, {key: {"false": False}.get(value, value) for key, value in (p.split("=") for p in given)}
        )
        parts = [name, *(f"{key}={value}" for key, value in sorted(method.parameters().items()))]
        return {"-".join([*parts, f"{ratio}.json"]) for ratio in ("0.25", "0.5", "0.75")} <= there

    said = re.search(r"Not there, of the table: (.*?); nor\b", text, flags=re.DOTALL)
    assert len(table) == 28
    assert sorted(re.findall(r"`([^`]+)`", said[1])) == sorted(one for one in table if not has_masks(one))


def test_agreement_is_counted_over_pruned_and_over_kept_experts(masks):
    def one(criterion, pruned, draw="A", text="world:general"):
        from prunebench.mask import LayerShape

        mask = Mask.for_shapes([LayerShape(0, 8, 2)], {0: pruned})
        return masks.Chosen("m", criterion, "0.25", text, draw, mask)

    shelf = [
        one("mone", (0, 1)),
        one("mone", (0, 2), draw="B"),
        one("mone", (4, 5), draw="A", text="world:arithmetic"),
        one("reap", (1, 2)),
    ]
    lines = masks.page(shelf).splitlines()
    assert "| reap | 50 / 83 |" in lines[lines.index("## 25 % pruned, against `mone`") :]
    assert "| *by chance, pruned* | 25 |" in lines
    assert "| mone | m | 0.25 | world:general: 50 / 83 | 0 / 67 |" in lines


def test_two_masks_of_one_request_are_refused(masks, tmp_path, monkeypatch):
    from prunebench.errors import UsageError

    with pytest.raises(UsageError, match="no masks"):
        masks.read_masks(tmp_path)
