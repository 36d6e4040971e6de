"""What the verbs print: results on standard output, one document with --json; the rest on standard error."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prunebench import cli
from prunebench.cli import command as commands
from prunebench.errors import PrerequisiteError


@pytest.fixture
def quick(model, suite, tmp_path) -> list[str]:
    """Arguments of a quick run."""
    return ["run", "--model", model, "--suite", suite, "--blocks", "8", "--length", "32", "--out", str(tmp_path / "o")]


@pytest.fixture
def listing(monkeypatch):
    """Puts something else in place of `prunebench list`."""

    def put(run):
        others = [verb for verb in commands._VERBS if verb[0] != "list"]
        monkeypatch.setattr(commands, "_VERBS", (("list", commands._nothing, run, ""), *others))

    return put


@pytest.fixture
def track(model, suite, tmp_path) -> Path:
    """A track of two arms: dense and reap-keep8-zero-A."""
    file = tmp_path / "t.toml"
    file.write_text(
        f'[track]\nname = "t"\nmodels = ["{model}"]\nkeep = [8]\nmasks = ["reap"]\noperators = ["zero"]\n'
        f'suites = ["{suite}"]\ncalibration = {{ blocks = 8, length = 32 }}\n'
    )
    return file


def document(capsys, *arguments: object):
    """The JSON document on standard output of a command that must succeed."""
    capsys.readouterr()
    assert cli.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_list_names_what_is_shipped(capsys):
    data = document(capsys, "list")
    assert {"reap", "mone", "random", "frequency", "sge"} <= set(data["criteria"])
    assert {"constant", "reroute", "zero"} <= set(data["operators"])
    assert {"arithmetic", "code", "multiple_choice", "perplexity"} <= set(data["suites"])
    assert "demo" in data["tracks"]
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for names in data.values() for name in names)


def test_run_prints_its_record_and_says_when_it_was_there_before(quick, capsys):
    first = document(capsys, *quick)
    assert first["reused"] is False
    assert json.loads((Path(first["folder"]) / "record.json").read_text()) == first["record"]
    assert document(capsys, *quick) == {**first, "reused": True}
    assert cli.main(quick) == 0
    text = capsys.readouterr().out
    assert "already there" in text
    assert text.splitlines()[-1] == first["folder"]


def test_every_verb_prints_one_document(quick, track, tmp_path, capsys):
    out = tmp_path / "o"
    dry = document(capsys, "grid", track, "--out", out, "--dry-run")
    (cost,) = dry.pop("estimates")
    assert dry == {"track": "t", "arms": ["rand/dense", "rand/reap-keep8-zero-A"]}
    assert (cost["model"], cost["arms"], cost["missing"], cost["seconds"]) == ("rand", 2, 2, None)
    assert cost["weights"] > 10_000
    assert not out.exists()
    assert document(capsys, "grid", track, "--out", out)["done"] == ["rand/dense", "rand/reap-keep8-zero-A"]
    folders = [out / "rand" / name for name in ("dense", "reap-keep8-zero-A")]
    (cost,) = document(capsys, "nightly", track, "--out", out, "--dry-run")["estimates"]
    assert (cost["missing"], cost["seconds"]) == (0, 0.0)
    assert document(capsys, "compare", *folders)
    assert document(capsys, "validate", out)["findings"] == []
    assert document(capsys, "pack", out)["changed"] == 2
    assert document(capsys, "validate", out)["findings"] == []
    assert document(capsys, "board", out, "--out", tmp_path / "b")["rows"] == 2
    assert document(capsys, "pack", out, "--unpack")["changed"] == 2
    assert {row["what"] for row in document(capsys, "check-env")} >= {"python", "torch"}
    assert document(capsys, *quick)["reused"] is True


def test_a_run_that_cannot_be_unpacked_is_not_called_done(quick, tmp_path, capsys):
    folder = Path(document(capsys, *quick)["folder"])
    document(capsys, *quick, "--method", "random", "--keep", "8")
    assert document(capsys, "pack", tmp_path / "o")["changed"] == 2
    shutil.rmtree(tmp_path / "o" / "questions")
    assert cli.main(["pack", str(folder), "--unpack"]) == 3
    assert "left out" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["run", "grid"])
def test_a_dry_run_writes_nothing(verb, quick, track, tmp_path, capsys):
    arguments = quick if verb == "run" else ["grid", str(track), "--out", str(tmp_path / "o")]
    before = sorted(tmp_path.rglob("*"))
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert "would run" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_finds_what_a_run_would_find(quick, capsys):
    assert cli.main([*quick, "--dry-run", "--text", "world:cooking"]) == 2
    assert cli.main([*quick, "--dry-run", "--blocks", "900000"]) == 2
    assert capsys.readouterr().out == ""


def test_the_identity_of_a_dry_run_is_that_of_the_run(quick, capsys):
    arguments = [*quick, "--method", "reap", "--ratio", "0.5"]
    planned = document(capsys, *arguments, "--dry-run")
    done = document(capsys, *arguments)
    assert planned["folder"] == done["folder"]
    identity = done["record"]["identity"]
    assert {key: identity[key] for key in planned["identity"]} == planned["identity"]
    assert identity.keys() - planned["identity"].keys() == {"mask"}


def test_a_method_that_prints_does_not_spoil_the_document(quick, material, tmp_path, capsys):
    method = material.write_method(tmp_path, "print('hello'); " + material.LOWEST, above="print('loaded')")
    assert document(capsys, *quick, "--method", method, "--ratio", "0.5")["record"]["arm"]["mask"] == "mine"


def test_a_method_that_cannot_be_loaded_is_one_line(quick, tmp_path, capsys):
    file = tmp_path / "needy.py"
    file.write_text("import a_package_nobody_has\n")
    assert cli.main([*quick, "--method", str(file), "--ratio", "0.5"]) == 2
    shown = capsys.readouterr()
    assert "a_package_nobody_has" in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("name", ["my model", "modèle-ünï", "model.v1", "-dash", "100%"])
def test_model_folders_may_have_any_name(name, quick, model, tmp_path, capsys):
    shutil.copytree(model, tmp_path / name)
    quick[2] = f"{tmp_path / name}/"
    data = document(capsys, *quick)
    assert data["record"]["arm"]["model"] == name
    assert Path(data["folder"]).is_dir()
    board = document(capsys, "board", tmp_path / "o", "--out", tmp_path / "b")
    assert name in Path(board["markdown"]).read_text()


@pytest.mark.parametrize("typed", [".", "./", "../rand", "../link"])
def test_model_folders_may_be_given_relative_to_where_one_is(typed, quick, tmp_path, capsys, monkeypatch):
    shutil.copytree(quick[2], tmp_path / "rand")
    (tmp_path / "link").symlink_to("rand")
    monkeypatch.chdir(tmp_path / "rand")
    quick[2], quick[-1] = typed, "../records"
    data = document(capsys, *quick)
    assert data["folder"] == "../records/rand/dense"
    assert (tmp_path / "records" / "rand" / "dense" / "record.json").is_file()
    assert data["record"]["arm"]["model"] == "rand"


def test_a_terminal_that_cannot_show_our_letters_is_no_reason_to_fail(monkeypatch, listing):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["run", "--help"]) == 0
    listing(lambda _: (0, {"name": "α"}, "α × β"))
    assert cli.main(["list"]) == 0
    out.seek(0)
    assert "\\u03b1" in out.read()


def test_a_missing_package_is_exit_code_3_and_named(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    assert cli.main(["check-env", "--json"]) == PrerequisiteError.exit_code
    shown = capsys.readouterr()
    assert {"what": "lm_eval", "state": "missing", "need": "needed"} in json.loads(shown.out)
    assert shown.err.count("\n") == 1
    assert "missing: lm_eval" in shown.err


def test_an_interrupt_is_one_line_and_exit_code_130(listing, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    listing(interrupted)
    assert cli.main(["list"]) == 130
    assert capsys.readouterr().err == "prunebench list: interrupted; finished runs are kept\n"


def command(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "prunebench.cli", *arguments], capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize("arguments", [["run", "--help"], ["check-env"]], ids=" ".join)
def test_the_reader_of_our_output_may_leave_early(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "prunebench.cli", *arguments], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_standard_output_may_be_closed(monkeypatch, listing):
    monkeypatch.setattr(sys, "stdout", None)
    listing(lambda _: (0, {}, "text"))
    assert cli.main(["list"]) == 0


def test_errors_leave_a_process_with_their_code_and_one_line(tmp_path):
    done = command("board", str(tmp_path / "nowhere"), "--out", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_run_needs_neither_a_home_nor_a_place_and_says_nothing_else(quick, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key not in {"HOME", "HF_HOME"}}
    environment["HOME"] = "/proc/nope"
    done = command(*quick, "--method", "reap", "--ratio", "0.5", "--json", cwd="/", env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["record"]["status"] == "complete"
    assert done.stderr == ""


@pytest.mark.skipif(shutil.which("prunebench") is None, reason="the console script is not installed")
def test_the_console_script_is_the_same_program():
    script = shutil.which("prunebench")
    assert script is not None
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert done.stdout == command("--version").stdout
