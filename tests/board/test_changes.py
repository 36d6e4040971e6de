"""What changed between two boards, and what moved beyond its interval."""

from __future__ import annotations

import pytest

from prunebench.board.changes import changes, last_board
from prunebench.errors import PrerequisiteError


def board(**rows):
    return {
        "rows": [
            {"folder": folder, "run": run, "suites": {"s": {"value": [value, value - 0.1, value + 0.1, 9]}}}
            for folder, (run, value) in rows.items()
        ]
    }


def test_runs_come_and_go_and_numbers_move():
    old = board(a=("1", 0.5), b=("2", 0.5), c=("3", 0.5), d=("4", 0.5))
    new = board(a=("1", 0.5), b=("2", 0.55), c=("9", 0.7), e=("5", 0.5))
    found = changes(old, new)
    assert (found.added, found.removed, found.other_run) == (("e",), ("d",), ("c",))
    assert [(one.folder, one.beyond) for one in found.moved] == [("b", False), ("c", True)]
    assert [one.folder for one in found.beyond] == ["c"]
    text = found.markdown()
    assert "Numbers that moved (2, 1 beyond their interval)" in text
    assert "- **beyond its interval** c, s: 0.5 [0.4, 0.6] → 0.7" in text


def test_the_first_board_and_an_equal_one_say_so():
    one = board(a=("1", 0.5))
    assert changes(None, one).markdown() == "# Changes\n\nThe first board: 1 runs.\n"
    assert "Nothing changed." in changes(one, board(a=("1", 0.5 + 1e-7))).markdown()


def test_a_folder_of_a_hostile_name_is_only_text():
    text = changes(board(), board(**{"<img src=x>": ("1", 0.5)})).markdown()
    assert "<" not in text


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": [{}]}', '{"rows": 5}'])
def test_a_damaged_board_is_one_line(tmp_path, text):
    assert last_board(tmp_path / "board.json") is None
    (tmp_path / "board.json").write_text(text)
    with pytest.raises(PrerequisiteError, match="cannot read the last board") as caught:
        last_board(tmp_path / "board.json")
    assert "\n" not in str(caught.value)
