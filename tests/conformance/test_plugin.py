"""A method from another distribution: installed, listed by name, checked and run like a shipped one."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from prunebench import cli, loader
from prunebench.conformance import check_method
from prunebench.errors import UsageError

PLUGIN = Path(__file__).parents[1] / "plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which the plug-in was really installed, from a wheel that its own build backend made."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(folder), str(PLUGIN)], check=True)
    return folder


@pytest.fixture
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "prunebench_dummy"]:
        del sys.modules[name]


def test_an_installed_plugin_is_listed_and_passes_the_checks_by_its_name(installed, capsys):
    assert cli.main(["list"]) == 0
    assert "dummy-share" in capsys.readouterr().out
    report = check_method("dummy-share")
    assert report.file == "share.py"
    assert not report.of("not run")


def test_it_runs_by_its_name_and_the_record_names_its_file(installed, tmp_path, capsys):
    arm = ["run", "--model", "tiny-olmoe", "--method", "dummy-share", "--ratio", "0.5", "--blocks", "4"]
    assert cli.main([*arm, "--dry-run", "--json", "--out", str(tmp_path)]) == 0
    digest = loader.source_of(loader.load_method_class("dummy-share")).sha256
    assert digest in capsys.readouterr().out


def test_without_it_the_name_is_unknown():
    with pytest.raises(UsageError, match="unknown method 'dummy-share'"):
        loader.load_method("dummy-share")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("no_such_module:Thing", "the plug-in cannot be loaded: ModuleNotFoundError"),
        ("pathlib:Path", "the plug-in names no method class"),
        ("prunebench_dummy.share:DummyShare", "the plug-in's method is named 'dummy-share'"),
    ],
)
def test_a_broken_plugin_is_one_line_and_does_not_hide_the_others(installed, monkeypatch, capsys, value, what):
    entries = [EntryPoint("broken", value, "prunebench.methods")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    with pytest.raises(UsageError) as info:
        loader.load_method("broken")
    assert str(info.value).startswith(what)
    assert cli.main(["list"]) == 0
    shown = capsys.readouterr()
    assert "reap" in shown.out
    assert what in shown.err


def test_two_plugins_of_one_name_are_refused_and_a_shipped_name_wins(monkeypatch):
    entries = [EntryPoint("twice", f"{module}:M", "prunebench.methods") for module in ("one", "two")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    with pytest.raises(UsageError, match="two plug-ins are named 'twice'"):
        loader.plugins()
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [EntryPoint("reap", "one:M", "prunebench.methods")]
    )
    assert loader.plugins() == {}
    assert loader.load_method("reap").name == "reap"
