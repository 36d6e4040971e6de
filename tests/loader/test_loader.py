"""Finding contents, running their files, and one clear line for each way in which that can fail."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest

from prunebench import loader
from prunebench.errors import PruneBenchError, UsageError

HEAD = """\
from __future__ import annotations

from dataclasses import dataclass

from prunebench import Method

"""
GOOD = (
    HEAD
    + '''
@dataclass(frozen=True)
class Good(Method):
    """A method with parameters."""

    name = "good"
    version = 3

    power: float = 1.0
    blocks: int = 4
'''
)


@pytest.fixture
def write(tmp_path):
    """Write a content file and return its path as text."""

    def write(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def fake_root(tmp_path, monkeypatch):
    """Contents of our own making in place of the checkout's."""
    root = tmp_path / "root"
    for name in (
        "methods/reap.py",
        "methods/random.py",
        "methods/_shared.py",
        "suites/code.py",
        "suites/tasks/code.yaml",
        "fixtures/zoo/tiny-olmoe/config.json",
        "fixtures/zoo/half-made/train.log",
        "leaderboard/tracks/demo.toml",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    monkeypatch.setattr(loader, "content_root", lambda: root)
    return root


def refused(call, *arguments) -> str:
    """The one line of the error that a call must end with."""
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    line = str(caught.value)
    assert "\n" not in line
    assert caught.value.exit_code == 2
    return line


class TestNames:
    def test_names_are_file_stems_sorted_without_private_files(self, fake_root):
        assert loader.available("methods") == ["random", "reap"]
        assert loader.available("suites") == ["code"]
        assert loader.available("tracks") == ["demo"]

    def test_a_zoo_folder_without_config_is_not_a_model_yet(self, fake_root):
        assert loader.available("models") == ["tiny-olmoe"]

    def test_an_unknown_name_gets_the_closest_and_the_whole_list(self, fake_root):
        line = refused(loader.load_method, "raep")
        assert line.startswith("unknown method 'raep'; expected one of random, reap")
        assert line.endswith("fix: did you mean reap?")

    def test_a_wrong_case_is_close(self, fake_root):
        assert "did you mean reap?" in refused(loader.load_method, "REAP")

    def test_a_name_like_nothing_gets_the_list_only(self, fake_root):
        line = refused(loader.load_suite, "xyzzy")
        assert "expected one of code" in line
        assert "did you mean" not in line

    def test_a_missing_path_is_named(self, fake_root):
        assert (
            refused(loader.load_method, "here/mine.py") == "no such method file; in here/mine.py; expected a .py file"
        )
        assert "no such track file" in refused(loader.resolve_track, "mine.toml")

    def test_a_track_is_found_by_name_and_by_path(self, fake_root):
        track = fake_root / "leaderboard/tracks/demo.toml"
        assert loader.resolve_track("demo") == track
        assert loader.resolve_track(str(track)) == track


class TestModels:
    def test_a_zoo_name_wins_over_a_folder_of_the_same_name(self, fake_root, tmp_path, monkeypatch):
        (tmp_path / "tiny-olmoe").mkdir()
        monkeypatch.chdir(tmp_path)
        found = loader.resolve_model("tiny-olmoe")
        assert (found.kind, found.name) == ("zoo", "tiny-olmoe")
        assert found.location == str(fake_root / "fixtures/zoo/tiny-olmoe")

    @pytest.mark.parametrize("spelling", ["checkpoint", "./checkpoint", "{here}/checkpoint", "checkpoint/"])
    def test_a_folder_is_taken_as_it_is_named(self, spelling, fake_root, tmp_path, monkeypatch):
        (tmp_path / "checkpoint").mkdir()
        (tmp_path / "checkpoint/config.json").write_text("{}")
        monkeypatch.chdir(tmp_path)
        found = loader.resolve_model(spelling.format(here=tmp_path))
        assert (found.kind, found.name) == ("folder", "checkpoint")
        assert Path(found.location).samefile(tmp_path / "checkpoint")

    def test_a_folder_wins_over_a_hub_id(self, fake_root, tmp_path, monkeypatch):
        (tmp_path / "org/name").mkdir(parents=True)
        (tmp_path / "org/name/config.json").write_text("{}")
        monkeypatch.chdir(tmp_path)
        assert loader.resolve_model("org/name").kind == "folder"

    @pytest.mark.parametrize(
        ("name", "revision"),
        [("allenai/OLMoE-1B-7B-0125", None), ("a.b/c_d@main", "main"), ("a/b@refs/pr/3", "refs/pr/3")],
    )
    def test_a_hub_id_may_carry_a_revision(self, name, revision, fake_root):
        found = loader.resolve_model(name)
        assert (found.kind, found.location, found.revision) == ("hub", name.partition("@")[0], revision)

    def test_a_folder_without_a_model_is_refused(self, fake_root, tmp_path):
        assert refused(loader.resolve_model, str(tmp_path)).startswith("the folder holds no model; in ")

    @pytest.mark.parametrize("name", ["./nothing", "/no/such/folder", "~/no-such-folder", "~no-such-user/x", ".."])
    def test_what_looks_like_a_path_is_never_a_hub_id(self, name, fake_root, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        line = refused(loader.resolve_model, name)
        assert "folder" in line
        assert "hub" not in line

    @pytest.mark.parametrize("name", ["tiny-olmo", "Tiny-OLMoE"])
    def test_an_unknown_short_name_gets_the_closest(self, name, fake_root):
        line = refused(loader.resolve_model, name)
        assert line.startswith(f"unknown model {name!r}; expected one of tiny-olmoe, or a folder")
        assert line.endswith("did you mean tiny-olmoe?")

    @pytest.mark.parametrize("name", ["", "a/b/c", "org/", "org/name@", "a b/c"])
    def test_nonsense_is_refused(self, name, fake_root, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        refused(loader.resolve_model, name)


class TestMethodFiles:
    def test_a_method_is_loaded_by_path_with_its_parameters(self, write):
        method = loader.load_method(write(GOOD), {"blocks": 8})
        assert method.name == "good"
        assert method.parameters() == {"power": 1.0, "blocks": 8}

    def test_a_relative_path_works(self, write, tmp_path, monkeypatch):
        write(GOOD)
        monkeypatch.chdir(tmp_path)
        assert loader.load_method("mine.py").name == loader.load_method("./mine.py").name == "good"

    def test_the_same_file_is_the_same_class_and_a_changed_one_another(self, write):
        first = loader.load_method_class(write(GOOD))
        assert loader.load_method_class(write(GOOD)) is first
        changed = loader.load_method_class(write(GOOD.replace("power: float = 1.0", "power: float = 2.0")))
        assert changed is not first
        assert (first().power, changed().power) == (1.0, 2.0)

    def test_an_edit_of_equal_size_and_time_is_seen(self, write):
        path = write(GOOD)
        loader.load_method(path)
        before = Path(path).stat()
        write(GOOD.replace("blocks: int = 4", "blocks: int = 5"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert loader.load_method(path).blocks == 5

    def test_no_bytecode_is_written_beside_the_file(self, write):
        path = Path(write(GOOD))
        loader.load_method(str(path))
        assert [file.name for file in path.parent.iterdir()] == ["mine.py"]

    def test_nothing_is_added_to_sys_path_and_no_plain_module_name_is_taken(self, write):
        before = list(sys.path)
        loader.load_method(write(GOOD, "random.py"))
        assert sys.path == before
        import random

        assert hasattr(random, "Random")

    def test_a_private_base_class_and_an_alias_are_no_second_method(self, write):
        text = HEAD + (
            "from abc import abstractmethod\n"
            "class Base(Method):\n"
            "    @abstractmethod\n"
            "    def score(self): ...\n"
            "@dataclass(frozen=True)\n"
            "class Mine(Base):\n"
            "    name = 'mine'\n"
            "    def score(self): return 1\n"
            "Alias = Mine\n"
        )
        assert type(loader.load_method(write(text))).__name__ == "Mine"

    def test_an_imported_method_class_is_not_the_files_own(self, write):
        assert "defines no method" in refused(loader.load_method, write("from prunebench import Method\n"))

    def test_an_empty_file_defines_no_method(self, write):
        line = refused(loader.load_method, write(""))
        assert line.startswith("the file defines no method; in ")
        assert "mine.py" in line

    def test_two_methods_are_named_with_their_lines(self, write):
        more = "\n\n@dataclass(frozen=True)\nclass Other(Method):\n    name = 'other'\n"
        line = refused(loader.load_method, write(GOOD + more))
        assert "defines 2 methods" in line
        assert f"mine.py:{GOOD.count('@', 0, GOOD.index('class Good')) + 7} Good" in line
        assert "Other" in line

    def test_an_open_abstract_part_is_named(self, write):
        text = HEAD + (
            "from abc import abstractmethod\n"
            "@dataclass(frozen=True)\n"
            "class Open(Method):\n"
            "    name = 'open'\n"
            "    @abstractmethod\n"
            "    def score(self): ...\n"
        )
        line = refused(loader.load_method, write(text))
        assert line.startswith("Open leaves score open; in ")
        assert line.endswith("fix: define score")

    @pytest.mark.parametrize("decorator", ["", "@dataclass", "@dataclass(frozen=False)"])
    def test_a_method_that_is_no_frozen_dataclass_of_its_own_is_refused(self, decorator, write):
        text = f"{HEAD}class Loose(Method):\n    name = 'loose'\n"
        if decorator:
            # A thawed subclass of a frozen dataclass is refused by Python itself, with the line of the decorator.
            text = text.replace("class Loose", f"{decorator}\nclass Loose")
        line = refused(loader.load_method, write(text))
        assert "frozen" in line
        assert "mine.py:" in line

    def test_a_method_without_a_name_is_refused(self, write):
        text = f"{HEAD}@dataclass(frozen=True)\nclass Nameless(Method):\n    pass\n"
        assert 'fix: write name = "mine" in the class' in refused(loader.load_method, write(text))

    @pytest.mark.parametrize(
        ("text", "said", "line"),
        [
            ("x = 1\ndef broken(:\n", "syntax error", 2),
            ("x = 1\n\nimport no_such_module_anywhere\n", "No module named 'no_such_module_anywhere'", 3),
            ("def f():\n    return 1 / 0\n\nf()\n", "ZeroDivisionError", 2),
            ("import sys\nsys.exit(5)\n", "SystemExit: 5", 2),
            ("from prunebench import Nothing\n", "cannot import name 'Nothing'", 1),
        ],
    )
    def test_a_file_that_fails_is_reported_with_its_line(self, text, said, line, write):
        message = refused(loader.load_method, write(text))
        assert said in message
        assert f"mine.py:{line};" in f"{message};"

    def test_a_missing_package_is_named_in_the_fix(self, write):
        line = refused(loader.load_method, write("import no_such_package.part\n"))
        assert "fix: install no_such_package" in line

    def test_a_failed_file_leaves_no_module_behind_and_may_be_mended(self, write):
        before = set(sys.modules)
        refused(loader.load_method, write("1 / 0\n"))
        assert set(sys.modules) == before
        assert loader.load_method(write(GOOD)).name == "good"

    def test_a_file_that_cannot_be_decoded_is_reported(self, tmp_path):
        (tmp_path / "mine.py").write_bytes(b"name = '\xff'\n")
        assert "mine.py" in refused(loader.load_method, str(tmp_path / "mine.py"))


class TestSources:
    def test_the_hash_is_of_the_bytes_that_ran(self, write):
        path = write(GOOD)
        method = loader.load_method(path)
        expected = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        Path(path).write_text("changed later")
        assert loader.source_of(method) == loader.source_of(type(method)) == loader.Source(Path(path), expected)

    def test_equal_files_in_two_places_keep_their_own_paths(self, write):
        paths = [write(GOOD, "one.py"), write(GOOD, "two.py")]
        assert [str(loader.source_of(loader.load_method(path)).path) for path in paths] == paths

    def test_a_class_from_an_ordinary_module_has_its_file(self):
        assert loader.source_of(UsageError("x")).path.name == "errors.py"

    def test_a_class_without_a_file_is_refused(self):
        cls = type("Typed", (), {"__module__": "no_such_module"})
        assert refused(loader.source_of, cls).startswith("Typed has no source file")


SUITE_TEXT = """
from prunebench import Suite

class Mine(Suite):
    name, version, tasks, headline = "mine", 1, (), ()

    def run(self, evaluation):
        return []

SUITE = Mine()
"""


class TestSuiteFiles:
    def test_a_suite_is_the_files_SUITE(self, write):
        path = write(SUITE_TEXT)
        suite = loader.load_suite(path)
        assert suite.name == "mine"
        assert str(suite.file) == str(loader.source_of(suite).path) == path

    def test_a_suite_made_of_a_class_from_elsewhere_still_has_its_own_source(self, write):
        path = write("import sys\nfrom prunebench.errors import UsageError\nSUITE = UsageError('not a suite')\n")
        with pytest.raises(UsageError, match="a SUITE of type UsageError"):
            loader.load_suite(path)
        module = next(m for m in sys.modules.values() if getattr(m, "__file__", None) == path)
        assert str(loader.source_of(module.SUITE).path) == path

    def test_a_file_without_SUITE_is_refused(self, write):
        assert refused(loader.load_suite, write("x = 1\n")).startswith("the file has no SUITE; in ")


@pytest.mark.parametrize("name", loader.available("methods"))
def test_every_method_of_the_checkout_loads_under_its_own_name(name):
    method = loader.load_method(name)
    assert method.name == name
    assert loader.source_of(method).path == loader.content_root() / f"methods/{name}.py"


@pytest.mark.parametrize("name", loader.available("suites"))
def test_every_suite_of_the_checkout_loads_under_its_own_name(name):
    suite = loader.load_suite(name)
    assert suite.name == name
    assert isinstance(suite.version, int)


def test_all_errors_of_the_loader_are_of_the_family():
    assert issubclass(UsageError, PruneBenchError)
