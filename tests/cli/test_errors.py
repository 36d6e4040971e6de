"""Bad input of every kind: the right exit code, one line on standard error, nothing else."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch

from prunebench import cli
from prunebench.integrity import Check
from prunebench.mask import LayerShape, Mask
from prunebench.run import session


@pytest.fixture
def refused(capsys):
    """Runs a command that must fail with this code and returns its one line."""

    def run(code: int, *arguments: object) -> str:
        capsys.readouterr()
        assert cli.main([str(argument) for argument in arguments]) == code
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("\n") == 1, shown.err
        assert shown.err.startswith(f"prunebench {arguments[0]}: ")
        assert "Traceback" not in shown.err
        return shown.err

    return run


@pytest.fixture
def bad_run(refused, model, suite, tmp_path):
    """`prunebench run` of a quick arm with something wrong in it; nothing may be written."""

    def run(code: int, *arguments: object) -> str:
        given = [str(argument) for argument in arguments]
        standard = {"--model": model, "--method": "frequency", "--ratio": "0.5", "--suite": suite}
        standard |= {"--blocks": "8", "--length": "32", "--out": str(tmp_path / "out")}
        if "--mask" in given:
            del standard["--method"], standard["--ratio"]
        if "--keep" in given:
            del standard["--ratio"]
        rest = [part for name, value in standard.items() if name not in given for part in (name, value)]
        line = refused(code, "run", *given, *rest)
        assert not list(tmp_path.rglob("record.json"))
        return line

    return run


@pytest.mark.parametrize(
    ("code", "arguments", "says"),
    [
        (2, ["--method", "reep"], "did you mean reap?"),
        (2, ["--model", "tiny-nothing"], "unknown model 'tiny-nothing'"),
        (2, ["--suite", "arithmetics"], "did you mean arithmetic?"),
        (2, ["--operator", "reroutes"], "did you mean reroute?"),
        (2, ["--method", "no/such.py"], "no such method file; in no/such.py"),
        (2, ["--ratio", "1.5"], "ratio 1.5 is impossible"),
        (2, ["--ratio", "0"], "ratio 0 is impossible"),
        (2, ["--ratio", "abc"], "abc"),
        (2, ["--ratio", "0.01"], "ratio 0.01 prunes nothing; in layer 0 with 16 experts"),
        (2, ["--ratio", "0.9"], "leaves 2 experts"),
        (2, ["--keep", "2"], "keep 2 leaves 2 experts"),
        (2, ["--keep", "16"], "keep 16 prunes nothing"),
        (2, ["--operator", "constant", "--scale", "keep"], "scale keep has no meaning for constant"),
        (2, ["--operator", "reroute", "--scale", "biggest"], "biggest"),
        (2, ["--operator", "reroute", "--scale", "ref:99"], "scale ref:99 needs 99 survivors; in layer 0 with 8"),
        (2, ["--operator", "reroute", "--scale", "ref:9"], "k2 ≤ 8"),
        (2, ["--operator", "reroute", "--scale", "ref:0"], "ref:0"),
        (2, ["--limit", "0"], "limit 0"),
        (2, ["--batch-tokens", "0"], "0 tokens per forward"),
        (2, ["--seed", "-1"], "seed -1"),
        (2, ["--dtype", "int4"], "unknown dtype 'int4'"),
        (2, ["--device", "abacus"], "unknown device 'abacus'"),
        (2, ["--experts-implementation", "magic"], "magic"),
        (2, ["--text", "world:cooking"], "expected one of"),
        (2, ["--text", "file:/no/such.txt"], "no such calibration text; in file:/no/such.txt"),
        (2, ["--text", "hub:org/name"], "hub:ID@REVISION:FIELD"),
        (2, ["--blocks", "900000"], "use at most"),
        (2, ["--draw", "Z"], "unknown draw 'Z'"),
        (2, ["--mask", "/no/mask.json", "--operator", "zero"], "cannot read the mask file"),
        (2, ["--operator-param", "scale=keep"], "belongs to nothing"),
        (3, ["--model", "org/never-downloaded"], "cannot fetch the model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_run_refuses(code, arguments, says, bad_run):
    assert says in bad_run(code, *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_run_on_a_device_that_is_missing_is_exit_code_3(bad_run):
    assert "no CUDA device" in bad_run(3, "--device", "cuda")


def test_run_refuses_masks_that_do_not_fit(bad_run, tmp_path):
    shapes = [LayerShape(0, 16, 4), LayerShape(1, 16, 4)]
    file = tmp_path / "m.json"
    rest = ["--mask", file, "--operator", "constant"]
    Mask.for_shapes([LayerShape(0, 32, 4), LayerShape(1, 32, 4)], {0: range(16)}).save(file)
    assert "another model" in bad_run(2, *rest)
    Mask.for_shapes([LayerShape(3, 16, 4)], {3: range(8)}).save(file)
    assert "another model" in bad_run(2, *rest)
    Mask.for_shapes(shapes, {0: range(13)}).save(file)
    assert "leaves 3 experts" in bad_run(2, *rest)
    Mask.for_shapes(shapes, {}).save(file)
    assert "prunes nothing" in bad_run(2, *rest)
    Mask.for_shapes(shapes, {0: range(8)}).save(file)
    assert "already says how many" in bad_run(2, *rest, "--ratio", "0.5")
    file.write_text(file.read_text().replace("[0,1,", "[0,"))
    assert "changed after it was written" in bad_run(2, *rest)
    file.write_text("{")
    assert "not JSON" in bad_run(2, *rest)


def test_run_refuses_calibration_files_without_text(bad_run, tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("")
    assert "the calibration text is empty" in bad_run(2, "--text", f"file:{file}")
    file.write_text("Few words.")
    assert "use at most 0 blocks" in bad_run(2, "--text", f"file:{file}")


def test_run_refuses_folders_that_hold_no_moe_model(bad_run, model, tmp_path):
    assert "holds no model" in bad_run(2, "--model", tmp_path)
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    (bare / "model.safetensors").unlink()
    assert "no safetensors weights" in bad_run(3, "--model", bare)


def test_run_refuses_an_output_that_cannot_be_written(bad_run, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write there" in bad_run(2, "--out", tmp_path / "file")
    assert "cannot write there" in bad_run(2, "--out", "/proc/nope")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "cannot write the run"), (["--method", "reap", "--ratio", "0.5"], "cannot write")],
    ids=["the run", "the score pass"],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(arguments, says, refused, spec, tmp_path):
    arm = spec()
    standard = ["--model", arm.model, "--suite", *arm.suites, "--blocks", "8", "--length", "32", "--out", tmp_path]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        line = refused(2, "run", *standard, *arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert says in line
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    # But for finished batches, where there were any: the next try goes on from there.
    assert [path for path in left if not path.name.startswith("answers-")] == []


def test_a_disk_that_fills_up_during_an_evaluation_is_one_line(refused, spec, tmp_path):
    arm = spec()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        line = refused(
            2, "run", "--model", arm.model, "--suite", *arm.suites, "--blocks", "8", "--length", "32", "--out", tmp_path
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot write there" in line


def test_grid_refuses_before_anything_runs(refused, model, suite, tmp_path):
    file = tmp_path / "t.toml"
    out = ["--out", tmp_path / "out"]
    assert "did you mean demo?" in refused(2, "grid", "demmo", *out)
    assert "no such track file" in refused(2, "grid", tmp_path / "no.toml", *out)
    file.write_text("[track")
    assert "not TOML" in refused(2, "grid", file, *out)
    text = f'[track]\nname = "t"\nmodels = ["{model}"]\nratios = ["0.5"]\nmasks = ["reap"]\nsuites = ["{suite}"]\n'
    file.write_text(text)
    assert "lacks operators" in refused(2, "grid", file, *out)
    file.write_text(text + 'operators = ["constant@keep"]\n')
    assert "arm rand/reap-ratio0.5-constant-keep-A" in refused(2, "grid", file, *out)
    file.write_text(text + 'operators = ["constant"]\n')
    assert "0 jobs" in refused(2, "grid", file, *out, "--jobs", 0)
    assert "limit 0" in refused(2, "grid", file, *out, "--limit", 0)
    assert "cannot write there" in refused(2, "grid", file, "--out", file)
    assert not (tmp_path / "out").exists()


def test_compare_refuses(refused, model, suite, material, tmp_path):
    run = ["run", "--model", model, "--blocks", "8", "--length", "32"]
    other = material.write_suite(tmp_path / "suites", "other")
    assert cli.main([*run, "--suite", suite, "--out", str(tmp_path / "a")]) == 0
    assert cli.main([*run, "--suite", suite, "--limit", "3", "--out", str(tmp_path / "b")]) == 0
    assert cli.main([*run, "--suite", str(other), "--out", str(tmp_path / "c")]) == 0
    a, b, c = tmp_path / "a/rand/dense", tmp_path / "b/rand/dense-limit3", tmp_path / "c/rand/dense"
    assert "no such run folder" in refused(2, "compare", a, tmp_path / "nowhere")
    assert "quick" in refused(2, "compare", a, b)
    assert "suite" in refused(2, "compare", a, c)
    assert "code" in refused(2, "compare", a, a, "--suite", "code")
    (c / "record.json").unlink()
    assert "half-written run folder" in refused(3, "compare", a, c)


def test_board_refuses_and_says_what_it_left_out(refused, model, suite, tmp_path, capsys):
    records, out = tmp_path / "records", tmp_path / "board"
    assert "no such folder" in refused(2, "board", records, "--out", out)
    records.mkdir()
    assert "no complete run to show" in refused(3, "board", records, "--out", out)
    run = ["run", "--model", model, "--suite", suite, "--blocks", "8", "--length", "32", "--out", str(records)]
    assert cli.main(run) == 0
    record = records / "rand/dense/record.json"
    whole = record.read_text()
    record.write_text(whole[:-50])
    capsys.readouterr()
    assert "half-written run folder" in refused(3, "board", records, "--out", out)
    record.write_text(whole)
    assert cli.main([*run, "--limit", "2"]) == 0
    capsys.readouterr()
    assert cli.main(["board", str(records), "--out", str(out), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["rows"] == 1
    assert "partial" in shown.err
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert cli.main(["board", str(records), "--out", str(tmp_path / "file")]) == 2
    assert "cannot write" in capsys.readouterr().err
    edited = json.loads(whole)
    edited["metrics"]["quick"]["value"] = 0.999
    record.write_text(json.dumps(edited))
    assert "the record says" in refused(1, "board", records, "--out", out)


def test_a_half_written_run_is_resumed_over(model, suite, tmp_path, capsys):
    run = ["run", "--model", model, "--suite", suite, "--blocks", "8", "--length", "32", "--out", str(tmp_path)]
    half = tmp_path / "rand" / "dense"
    half.mkdir(parents=True)
    (half / "items.parquet").write_bytes(b"PAR1")
    assert cli.main(run) == 0
    assert json.loads((half / "record.json").read_text())["status"] == "complete"


def test_an_occupied_run_folder_is_kept(model, suite, tmp_path, capsys):
    run = ["run", "--model", model, "--suite", suite, "--blocks", "8", "--length", "32", "--out", str(tmp_path)]
    assert cli.main(run) == 0
    record = tmp_path / "rand/dense/record.json"
    before = record.read_bytes()
    capsys.readouterr()
    assert cli.main([*run, "--seed", "1"]) == 2
    assert "holds another run" in capsys.readouterr().err
    assert record.read_bytes() == before


def test_a_failing_check_is_exit_code_1(bad_run, monkeypatch):
    monkeypatch.setattr(session, "check_empty_mask", lambda *_: Check("empty mask", "fail", "scale keep"))
    assert "integrity check failed: empty mask; in scale keep" in bad_run(1)
