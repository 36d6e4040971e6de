"""A pull request may add runs and method files; everything else that it does to records is refused by name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from prunebench.errors import PrerequisiteError
from prunebench.loader import content_root
from prunebench.packing import unpack
from prunebench.record import read_run, run_id, sealed, write_run
from prunebench.run.submission import check_submission

COMMITTED = content_root() / "leaderboard" / "records" / "tiny"
PLACE = "leaderboard/records/tiny/tiny-granite"
NAME = "mone-ratio0.5-constant-A"


def git(root, *words):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)  # noqa: S607


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "x", "--allow-empty")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run as this version writes it: sealed, and holding its questions."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(COMMITTED / "questions", folder / "questions")
    for name in (NAME, "dense"):
        shutil.copytree(COMMITTED / "tiny-granite" / name, folder / "r" / name)
    unpack(folder / "r")
    run = read_run(folder / "r" / NAME)
    write_run(run.path, sealed(run.record, run.items), run.items)
    return folder / "r"


@pytest.fixture
def root(whole, tmp_path):
    """A repository with one run on its main branch, and a branch for the submission."""
    root = tmp_path / "checkout"
    shutil.copytree(whole / "dense", root / PLACE / "dense")
    git(tmp_path, "init", "-q", "-b", "main", str(root))
    commit(root)
    git(root, "checkout", "-q", "-b", "mine")
    return root


def submitted(root):
    commit(root)
    return check_submission(root, "main", root.parent / "again")


def test_a_whole_run_in_its_place_is_fine(root, whole):
    shutil.copytree(whole / NAME, root / PLACE / NAME)
    found = submitted(root)
    assert (found.runs, found.findings) == ((f"{PLACE}/{NAME}",), ())


def test_a_method_file_alone_asks_for_a_run(root):
    (root / "methods").mkdir()
    (root / "methods" / "mine.py").write_text("")
    found = submitted(root)
    assert (found.methods, found.findings) == (("methods/mine.py",), ())


def edit(folder, change):
    run = read_run(folder)
    data = json.loads(json.dumps(run.record))
    change(data)
    data["run_id"] = run_id(data["identity"])
    (folder / "record.json").write_text(json.dumps(sealed(data, run.items)))


def unsealed(folder):
    path = folder / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "seal": None}))


REFUSED = {
    "elsewhere": (
        lambda root, own: own.rename(root / PLACE / ".." / NAME),
        r"not in leaderboard/records/TRACK/MODEL/NAME",
    ),
    "another model": (
        lambda root, own: shutil.move(own, root / PLACE / ".." / "tiny-olmoe" / NAME),
        "its model is tiny-granite",
    ),
    "another name": (lambda root, own: own.rename(root / PLACE / "best"), "says nothing of mone"),
    "another ratio": (lambda root, own: own.rename(root / PLACE / "mone-ratio0.25-A"), "says nothing of ratio0.5"),
    "unsealed": (lambda root, own: unsealed(own), "has no seal"),
    "unknown method": (
        lambda root, own: edit(own, lambda r: r["identity"]["method"].update(name="mine")),
        "the file of method mine is not in methods/",
    ),
    "changed method": (
        lambda root, own: edit(own, lambda r: r["identity"]["method"].update(file_sha256="f" * 64)),
        "method: the file of method mone has changed",
    ),
    "a failed check": (
        lambda root, own: edit(own, lambda r: r["integrity"][0].update(status="fail")),
        "integrity: .* failed",
    ),
    "partial": (
        lambda root, own: edit(own, lambda r: (r["identity"].update(limit=5), r.update(status="partial"))),
        "a run with a limit is no submission",
    ),
    "no sandbox": (
        lambda root, own: edit(own, lambda r: r["identity"].update(executor="unsafe-local")),
        "without a sandbox",
    ),
    "something removed": (lambda root, own: shutil.rmtree(root / PLACE / "dense"), "only added, and this was deleted"),
    "something changed": (
        lambda root, own: edit(root / PLACE / "dense", lambda r: r["volatile"].update(host="x")),
        "only added, and this was modified",
    ),
    "a loose file": (lambda root, own: (own / "notes.txt").write_text("x"), "not a part of an added run"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_not_be_merged_is_named(root, whole, case):
    change, message = REFUSED[case]
    (root / PLACE / ".." / "tiny-olmoe").mkdir()
    own = shutil.copytree(whole / NAME, root / PLACE / NAME)
    change(root, own)
    found = submitted(root)
    assert [one for one in found.findings if re.search(message, one)], found.findings
    assert all("\n" not in one for one in found.findings)


def test_nothing_is_no_submission_and_an_unknown_base_is_one_line(root):
    assert submitted(root).findings == ("nothing is submitted: no run and no method file",)
    with pytest.raises(PrerequisiteError, match="cannot compare with the base"):
        check_submission(root, "no-such-branch", root.parent)
