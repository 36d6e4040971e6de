"""`prepare` checks a request whole before any weight is read; what is wrong with it is one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from prunebench.errors import PrerequisiteError, PruneBenchError, UsageError
from prunebench.mask import LayerShape, Mask
from prunebench.run import sources as sources_module
from prunebench.run.arm import prepare

SHAPES = [LayerShape(0, 16, 4), LayerShape(1, 16, 4)]
HALF = {0: range(8), 1: range(8)}


def given_mask(folder: Path, pruned=None, shapes=None) -> str:
    mask = Mask.for_shapes(shapes or SHAPES, HALF if pruned is None else pruned)
    mask.save(folder / "m.json")
    return str(folder / "m.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "reep"}, "unknown method 'reep'.*did you mean reap"),
        ({"method": "constant"}, "constant selects no experts.*--operator"),
        ({"operator": "constand"}, "unknown method 'constand'.*did you mean constant"),
        ({"model": "tiny-nothing"}, "unknown model 'tiny-nothing'"),
        ({"model": "/nowhere"}, "no such model folder.*/nowhere"),
        ({"suites": ("arithmetics",)}, "unknown suite 'arithmetics'.*did you mean arithmetic"),
        ({"suites": ()}, "no suite to run"),
        ({"suites": ("code", "code")}, "suite code is named twice"),
        ({"ratio": "1.5"}, "1.5"),
        ({"ratio": "0"}, "ratio"),
        ({"ratio": "-0.5"}, "-0.5"),
        ({"ratio": "abc"}, "abc"),
        ({"ratio": "nan"}, "ratio NaN"),
        ({"ratio": "0.01"}, "ratio 0.01 prunes nothing.*16 experts"),
        ({"ratio": "0.9"}, "leaves 2 experts"),
        ({"ratio": "0.99"}, "leaves 1 experts.*at least.*4.*prune at most 12"),
        ({"ratio": None}, "nothing says how many experts go.*--ratio"),
        ({"keep": 8}, "both ratio and keep"),
        ({"ratio": None, "keep": 2}, "keep 2 leaves 2 experts.*at least.*4.*prune at most 12 of 16"),
        ({"ratio": None, "keep": 16}, "keep 16 prunes nothing"),
        ({"ratio": None, "keep": 99}, "keep 99"),
        ({"ratio": None, "keep": 0}, "keep"),
        ({"ratio": None, "keep": -1}, "keep"),
        ({"operator": "constant", "scale": "keep"}, "scale keep has no meaning for constant.*reroute"),
        ({"operator": "zero", "scale": "renorm"}, "scale renorm has no meaning for zero"),
        ({"operator": "reroute", "scale": "half"}, "half"),
        ({"operator": "reroute", "scale": "interp:2"}, "interp"),
        ({"operator": "reroute", "scale": "interp:x"}, "interp"),
        ({"operator": "reroute", "scale": "ref:0"}, "ref"),
        ({"operator": "reroute", "scale": ""}, "scale"),
        (
            {"operator": "reroute", "operator_parameters": ("scal=keep",)},
            "unknown parameter 'scal'.*did you mean scale",
        ),
        ({"operator_parameters": ("scale=keep",)}, "operator parameter 'scale=keep' belongs to nothing.*--operator"),
        ({"parameters": ("x=1",)}, "unknown parameter 'x'.*no parameters"),
        ({"parameters": ("x",)}, "no value"),
        ({"method": None, "ratio": None, "parameters": ("x=1",)}, "parameter 'x=1' belongs to nothing"),
        ({"method": None}, "nothing says which experts go"),
        ({"method": None, "ratio": None, "operator": "constant"}, "nothing says which experts go"),
        ({"method": None, "ratio": None, "scale": "keep"}, "nothing says which experts go"),
        ({"limit": 0}, "limit 0"),
        ({"limit": -3}, "limit -3"),
        ({"batch_tokens": 0}, "0 tokens per forward"),
        ({"seed": -1}, "seed -1"),
        ({"dtype": "float8"}, "unknown dtype 'float8'.*float32"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"device": "meta"}, "device 'meta' is not supported"),
        ({"draw": "D"}, "unknown draw 'D'"),
        ({"blocks": 0}, "calibration of 0 blocks"),
        ({"length": 1}, "1 tokens"),
        ({"text": "general"}, "unknown calibration text 'general'.*world:DOMAIN"),
        ({"text": "world:"}, "unknown calibration text"),
        ({"text": "world:cooking"}, "no such calibration text.*one of.*general"),
        ({"text": "file:/nowhere.txt"}, "no such calibration text.*/nowhere.txt"),
        ({"blocks": 10**6, "length": 128}, "the calibration text has [0-9]+ tokens.*use at most [0-9]+ blocks"),
        ({"draw": "C", "blocks": 10**5}, "draw C.*use at most"),
        (
            {"operator": "reroute", "groups": "thawed"},
            "unknown policy 'thawed' for router groups; expected frozen or",
        ),
        ({"operator": "reroute", "groups": "reselect"}, "the router has no groups to choose anew .softmax, no renorm"),
        ({"operator": "constant", "fit_draw": "D"}, "unknown draw 'D'"),
        ({"operator": "constant", "fit_text": "world:cooking"}, "no such calibration text"),
        ({"operator": "constant", "fit_length": 1}, "1 tokens"),
        ({"operator": "reroute", "fit_draw": "B"}, "reroute fits nothing.*leave the fit's calibration out"),
        ({"operator": "zero", "fit_blocks": 4}, "zero fits nothing"),
        ({"method": None, "ratio": None, "fit_draw": "B"}, "the dense model fits nothing"),
    ],
    ids=repr,
)
def test_an_impossible_request_is_one_line_before_any_weight_is_read(changes, says, spec, monkeypatch):
    monkeypatch.setattr(sources_module, "_weights_sha256", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UsageError, match=says) as caught:
        prepare(spec(**changes))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": None, "ratio": None}, "the mask has no operator.*--operator"),
        ({"method": None, "operator": "constant"}, "already says how many.*--ratio"),
        ({"method": None, "ratio": None, "operator": "constant", "scale": "keep"}, "has no meaning"),
        ({"ratio": None, "keep": 8, "operator": "constant"}, "already says how many"),
        (
            {"method": None, "ratio": None, "operator": "constant", "fit_draw": "B"},
            "the mask is given, so .*fit's already",
        ),
    ],
    ids=repr,
)
def test_a_mask_file_goes_with_an_operator_and_without_an_amount(changes, says, spec, tmp_path):
    with pytest.raises(UsageError, match=says):
        prepare(spec(mask=given_mask(tmp_path), **changes))


@pytest.mark.parametrize(
    ("pruned", "shapes", "says"),
    [
        ({0: range(8)}, [LayerShape(0, 32, 4), LayerShape(1, 32, 4)], "another model.*0:32x4 1:32x4.*0:16x4 1:16x4"),
        ({1: range(8)}, [LayerShape(1, 16, 4), LayerShape(2, 16, 4)], "another model"),
        ({0: range(8)}, [LayerShape(0, 16, 2), LayerShape(1, 16, 2)], "another model"),
        ({0: range(13)}, None, "leaves 3 experts.*layer 0"),
        ({}, None, "prunes nothing"),
    ],
    ids=["other E", "other layers", "other k", "fewer than top-k", "empty"],
)
def test_a_mask_must_fit_the_model(pruned, shapes, says, spec, tmp_path):
    with pytest.raises(UsageError, match=says):
        prepare(spec(method=None, ratio=None, operator="zero", mask=given_mask(tmp_path, pruned, shapes)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("nonsense", "not JSON"),
        ("[]", "not a prunebench mask"),
        ('{"schema": 99}', "not a prunebench mask"),
        ('{"schema": 1, "layers": 3, "model_shape": ""}', "not a prunebench mask"),
        (None, "cannot read the mask file"),
    ],
)
def test_a_damaged_mask_file_is_one_line(content, says, spec, tmp_path):
    if content is not None:
        (tmp_path / "m.json").write_text(content)
    with pytest.raises(UsageError, match=says):
        prepare(spec(method=None, ratio=None, operator="zero", mask=str(tmp_path / "m.json")))


def test_a_mask_edited_after_it_was_written_is_refused(spec, tmp_path):
    path = given_mask(tmp_path)
    data = json.loads(Path(path).read_text())
    data["layers"][0]["pruned"] = [1, 2]
    Path(path).write_text(json.dumps(data))
    with pytest.raises(UsageError, match="changed after it was written"):
        prepare(spec(method=None, ratio=None, operator="zero", mask=path))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.txt", b" \n\n ", "empty"),
        ("empty.jsonl", b"", "empty"),
        ("bad.jsonl", b"{}\n", "not a calibration document.*line 1"),
        ("bad.jsonl", b'{"text": "a"}\nnonsense\n', "line 2"),
        ("latin.txt", b"\xff\xfe", "cannot read the calibration text"),
        ("broken.jsonl.gz", b"no gzip", "cannot read the calibration text"),
        ("short.txt", b"Some words only.", "tokens.*expected 256 for 8 blocks"),
    ],
)
def test_a_calibration_file_must_hold_enough_text(name, content, says, spec, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=says):
        prepare(spec(text=f"file:{tmp_path / name}"))


def test_the_blocks_said_to_fit_do_fit(spec, tmp_path):
    (tmp_path / "t.txt").write_text("The cat sat on the mat. " * 40)
    with pytest.raises(UsageError) as caught:
        prepare(spec(text=f"file:{tmp_path / 't.txt'}", blocks=1000, draw="C"))
    fits = int(caught.value.fix.split()[3])
    prepare(spec(text=f"file:{tmp_path / 't.txt'}", blocks=fits, draw="C"))
    with pytest.raises(UsageError):
        prepare(spec(text=f"file:{tmp_path / 't.txt'}", blocks=fits + 1, draw="C"))


def copied(model: str, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder / "copy"))


def damaged(model: str, folder: Path, what: str) -> str:
    copy = copied(model, folder)
    config = copy / "config.json"
    if what == "no weights":
        (copy / "model.safetensors").unlink()
    elif what == "cut weights":
        os.truncate(copy / "model.safetensors", 1000)
    elif what == "no config":
        config.unlink()
    elif what == "no tokenizer":
        for file in copy.glob("tokenizer*"):
            file.unlink()
    elif what == "config not JSON":
        config.write_text("nonsense")
    elif what == "unknown architecture":
        config.write_text(json.dumps({"model_type": "wonderful", "architectures": ["Wonderful"]}))
    elif what == "dense":
        from transformers import LlamaConfig

        LlamaConfig(
            vocab_size=1024, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ).save_pretrained(copy)
    elif what == "unknown router":
        from transformers import Cohere2MoeConfig

        Cohere2MoeConfig(
            vocab_size=1024, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ).save_pretrained(copy)
    return str(copy)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no weights", "no safetensors weights"),
        ("cut weights", "safetensors|bytes"),
        ("no config", "the folder holds no model.*config.json"),
        ("no tokenizer", "the folder has no tokenizer"),
        ("config not JSON", "config cannot be read"),
        ("unknown architecture", "config cannot be read"),
        ("dense", "MoE"),
        ("unknown router", "unknown router Cohere2MoeTopKRouter"),
    ],
)
def test_a_folder_that_is_no_moe_checkpoint_is_one_line(what, says, spec, model, tmp_path):
    with pytest.raises(PruneBenchError, match=says) as caught:
        prepare(spec(model=damaged(model, tmp_path, what)))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_missing_device_is_a_missing_prerequisite(spec):
    with pytest.raises(PrerequisiteError, match="no CUDA device") as caught:
        prepare(spec(device="cuda"))
    assert caught.value.exit_code == 3


def test_what_is_known_changes_with_everything_that_can_change_a_number(spec, model, tmp_path):
    known = prepare(spec()).known
    for changes in (
        {"seed": 1},
        {"draw": "B"},
        {"text": "world:code"},
        {"blocks": 9},
        {"length": 33},
        {"ratio": "0.25"},
        {"method": "reap"},
        {"operator": "zero"},
        {"operator": "constant", "fit_draw": "B"},
        {"operator": "constant", "fit_text": "world:code"},
        {"operator": "constant", "fit_blocks": 9},
        {"operator": "constant", "fit_length": 33},
        {"operator": "reroute", "scale": "keep"},
        {"operator": "reroute", "operator_parameters": ("scale=keep",)},
        {"dtype": "bfloat16"},
        {"batch_tokens": 64},
        {"experts_implementation": "grouped_mm"},
        {"limit": 2},
        {"suites": ("code",)},
        {"method": None, "ratio": None},
    ):
        assert prepare(spec(**changes)).known != known, changes


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_changed_file_of_a_model_is_noticed_in_the_same_process(name, spec, model, tmp_path):
    copy = copied(model, tmp_path)
    before = prepare(spec(model=str(copy))).known["model"]
    file = copy / name
    content = bytearray(file.read_bytes())
    if name == "model.safetensors":
        content[-1] ^= 1
    else:
        content += b"\n"
    file.write_bytes(bytes(content))
    assert prepare(spec(model=str(copy))).known["model"] != before


def test_a_calibration_text_is_known_by_its_tokens_not_by_its_name(spec, tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("The cat sat on the mat. " * 60)
    before = prepare(spec(text=f"file:{file}")).known
    file.write_text("The dog sat on the mat. " * 60)
    assert prepare(spec(text=f"file:{file}")).known != before


def test_ratios_that_are_equal_numbers_are_one_identity(spec):
    assert prepare(spec(ratio="0.5")).known == prepare(spec(ratio="0.50")).known == prepare(spec(ratio=".5")).known


def test_a_method_file_cannot_change_torch_for_other_arms(spec, tmp_path):
    file = tmp_path / "greedy.py"
    file.write_text(
        "import torch\nfrom dataclasses import dataclass\nfrom prunebench import Method, Routing\n"
        "torch.set_num_threads(3)\ntorch.set_default_dtype(torch.float64)\n\n"
        "@dataclass(frozen=True)\nclass Greedy(Method):\n    name = 'greedy'\n\n"
        "    def route(self, layer, pruned):\n        return Routing()\n"
    )
    threads = torch.get_num_threads()
    prepare(spec(operator=str(file)))
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32


def test_calibration_blocks_must_fit_the_context(spec):
    with pytest.raises(UsageError, match="longer than the model's context; expected at most 256 tokens"):
        prepare(spec(length=257, blocks=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_implementation": "foo"}, "unknown experts implementation 'foo'; expected eager"),
        ({"operator": "reroute", "operator_parameters": ("scale=bogus",)}, "unknown scale 'bogus'"),
        ({"text": "hub:foo/bar"}, "expected world:DOMAIN, file:PATH or hub:ID@REVISION:FIELD"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_loaded(changes, message, spec):
    with pytest.raises(UsageError, match=message):
        prepare(spec(**changes))


def test_a_folder_without_a_run_is_no_mask(spec, tmp_path):
    with pytest.raises(UsageError, match="the folder holds no run"):
        prepare(spec(method=None, ratio=None, mask=str(tmp_path), operator="constant"))


def test_a_fit_asked_for_as_the_masks_own_is_the_same_arm(spec):
    plain, said = spec(operator="constant"), spec(operator="constant", fit_draw="A", fit_text="world:general")
    assert said == plain
    assert said.folder == plain.folder
