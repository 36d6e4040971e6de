"""A wheel carries the content folders, an editable install none; the loader finds the right ones in both."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from prunebench import loader

ROOT = Path(__file__).parents[2]


def build(source: Path, out: Path, version: str) -> Path:
    """Build one wheel of `source` with hatchling, without network or build isolation."""
    code = (
        "import sys; from hatchling.builders.wheel import WheelBuilder;"
        "print(*WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=[sys.argv[3]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(out), version],
        check=True,
        capture_output=True,
        text=True,
        cwd=source,
    )
    return Path(done.stdout.split()[-1])


@pytest.fixture(scope="module")
def small_checkout(tmp_path_factory):
    """A checkout with the real package, hook and configuration, and small content folders."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "hatch_build.py", "LICENSE"):
        shutil.copy(ROOT / name, root / name)
    (root / "README.md").write_text("# prunebench\n")
    shutil.copytree(ROOT / "harness", root / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "methods/first.py",
        "suites/recall.py",
        "suites/tasks/recall.yaml",
        "suites/data/recall.jsonl",
        "fixtures/zoo/tiny/config.json",
        "fixtures/zoo/tiny/model.safetensors",
        "fixtures/world/world.py",
        "fixtures/.work/checkpoint.pt",
        "fixtures/world/__pycache__/world.cpython-311.pyc",
        "leaderboard/tracks/demo.toml",
        "leaderboard/records/run/record.json",
    ):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    return root


@pytest.fixture(scope="module")
def wheel_names(small_checkout, tmp_path_factory):
    with zipfile.ZipFile(build(small_checkout, tmp_path_factory.mktemp("wheel"), "standard")) as wheel:
        return set(wheel.namelist())


def test_a_wheel_ships_methods_suites_fixtures_and_tracks(wheel_names):
    shipped = {name.removeprefix("prunebench/_shipped/") for name in wheel_names if "/_shipped/" in name}
    assert shipped == {
        "methods/first.py",
        "suites/recall.py",
        "suites/tasks/recall.yaml",
        "suites/data/recall.jsonl",
        "fixtures/zoo/tiny/config.json",
        "fixtures/zoo/tiny/model.safetensors",
        "fixtures/world/world.py",
        "leaderboard/tracks/demo.toml",
    }


def test_a_wheel_has_the_package_its_types_marker_and_its_licence_and_nothing_else(wheel_names):
    assert {"prunebench/__init__.py", "prunebench/py.typed", "prunebench/loader.py"} <= wheel_names
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)
    assert {name.partition("/")[0].partition("-")[0] for name in wheel_names} == {"prunebench"}


def test_an_editable_wheel_carries_no_content(small_checkout, tmp_path):
    with zipfile.ZipFile(build(small_checkout, tmp_path, "editable")) as wheel:
        names = wheel.namelist()
        paths = [wheel.read(name).decode() for name in names if name.endswith(".pth")]
    assert not [name for name in names if "_shipped" in name]
    assert [Path(path.strip()) for path in paths] == [small_checkout / "harness"]


def where_the_loader_looks(package_parent: Path) -> dict[str, object]:
    """Content root and names, as an installation in `package_parent` sees them."""
    code = (
        "import json; from prunebench import loader;"
        "print(json.dumps({'root': str(loader.content_root()),"
        " **{kind: loader.available(kind) for kind in ('methods', 'suites', 'models', 'tracks')}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package_parent)!r}); {code}"],
        check=True,
        capture_output=True,
        text=True,
        cwd=package_parent,
    )
    return json.loads(done.stdout)


def test_an_installed_wheel_uses_what_it_ships(small_checkout, tmp_path):
    with zipfile.ZipFile(build(small_checkout, tmp_path, "standard")) as wheel:
        wheel.extractall(tmp_path / "site")
    assert where_the_loader_looks(tmp_path / "site") == {
        "root": str(tmp_path / "site/prunebench/_shipped"),
        "methods": ["first"],
        "suites": ["recall"],
        "models": ["tiny"],
        "tracks": ["demo"],
    }


def test_a_checkout_uses_its_own_folders_even_beside_shipped_ones(small_checkout, tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(small_checkout, checkout)
    (checkout / "harness/prunebench/_shipped/methods").mkdir(parents=True)
    (checkout / "harness/prunebench/_shipped/suites").mkdir(parents=True)
    (checkout / "methods/second.py").write_text("")
    found = where_the_loader_looks(checkout / "harness")
    assert found["root"] == str(checkout)
    assert found["methods"] == ["first", "second"]


def test_this_checkout_is_its_own_content_root():
    assert loader.content_root() == ROOT


def test_an_installation_without_contents_says_what_is_missing(small_checkout, tmp_path):
    shutil.copytree(small_checkout / "harness", tmp_path / "harness")
    code = "from prunebench import loader; loader.content_root()"
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'harness')!r}); {code}"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert "PrerequisiteError: this installation has no methods and suites" in done.stderr
    assert "fix: install prunebench from a wheel" in done.stderr
