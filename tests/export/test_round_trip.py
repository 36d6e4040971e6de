"""From a run's folder to files and back, in this process and in a fresh one; on a trained model too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch
from export_material import evaluated, logits, open_base, plan_for, pruned_model
from vllm_reader import read_model

import prunebench
from prunebench import cli
from prunebench.cli import export as export_verbs
from prunebench.errors import IntegrityError, PrerequisiteError, UsageError
from prunebench.export import FORMATS, Scheme, Settings, export_run, load, verify, write_export
from prunebench.loader import content_root
from prunebench.record import read_run
from prunebench.run import Session
from prunebench.run.arm import prepare
from prunebench.run.rebuild import rebuild, spec_of
from prunebench.storage import read_headers
from prunebench.testing import random_ids

RECORDS = content_root() / "leaderboard" / "records" / "tiny"

OWN = """
class Bent(Fill):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("slope_D", torch.zeros(width))

    def forward(self, x_SD):
        return x_SD * self.slope_D

    def to_json(self):
        return {"width": self.slope_D.shape[0]}
"""
REPLACE = """
    def replace(self, layer, pruned):
        fills = {}
        for expert in pruned:
            fills[expert] = Bent(layer.width)
            fills[expert].slope_D.copy_(torch.as_tensor(layer.stats["output_moments"].mean_ED[expert]))
        return Replacements(fills)
"""


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """`runs(**arm)` is the folder of a quick run on the random OLMoE."""
    model, suite = request.getfixturevalue("model"), request.getfixturevalue("suite")
    session = Session(tmp_path_factory.mktemp("records"))

    def run(**changes) -> Path:
        from prunebench.run import ArmSpec

        usual = {"model": model, "method": "frequency", "ratio": "0.5", "suites": (suite,), "blocks": 8, "length": 32}
        return session.execute(prepare(ArmSpec(**{**usual, **changes}))).folder

    return run


def test_a_run_is_made_again_from_its_record(runs, model):
    for changes in (
        {"operator": "constant"},
        {"operator": "reroute", "scale": "interp:0.5"},
        {"operator": "tilt", "operator_parameters": ("rank=2",), "fit_draw": "B"},
        {"operator": "compel", "scale": "renorm"},
        {"operator": "tilt", "operator_parameters": ("rank=2",), "operator_layers": "1"},
    ):
        run = read_run(runs(**changes))
        arm, plan, quantized = rebuild(run, model=model)
        assert quantized is None
        assert plan.manifest() == run.record["tensors"]
        assert plan.mask.digest == run.record["identity"]["mask"]["digest"]
        assert plan.scales == tuple(filter(None, (run.record["arm"]["resolved_scale"] or "").split(", ")))
        assert arm.known["operator"] == run.record["identity"]["operator"]


def test_what_is_not_the_run_is_refused(runs, model, bases, tmp_path):
    folder = runs(operator="constant")
    run = read_run(folder)
    with pytest.raises(UsageError, match="unknown model 'rand'"):
        rebuild(run)
    other = bases("olmoe", vocab_size=1024, experts=16, top_k=4, seed=5)
    for file in Path(model).glob("token*"):
        (other / file.name).write_bytes(file.read_bytes())
    with pytest.raises(PrerequisiteError, match=r"the model is not that of the run \(weights_sha256 is .*--model"):
        rebuild(run, model=str(other))
    altered = json.loads((folder / "record.json").read_text())
    group = altered["tensors"]["0"][0]
    group["sha256"] = "0" * 64
    lying = type(run)(altered, run.items, run.path)
    with pytest.raises(IntegrityError, match="the operator answers with other tensors than the record names"):
        rebuild(lying, model=model)


def edited_bytes(record) -> int:
    """Of edited survivors before they were quantized, which the plan keeps, in float32."""
    groups = [group for layer in record.get("edits", {}).values() for group in layer]
    sizes = [sum(prod(tensor["shape"]) for tensor in group["tensors"].values()) for group in groups]
    return 4 * sum(size * len(group["experts"]) for size, group in zip(sizes, groups, strict=True))


def check_packed_bytes(parts, record, model: str) -> None:
    """What `storage` counts on disk, but for norms, which stay with the base; shapes are metadata there."""
    counted, quantized = record["storage"]["on_disk"]["parts"], record["quantization"]["parts"]
    held = read_headers(Path(model))
    norms = sum(one.bytes for name, one in held.items() if "self_attn" in name and "norm" in name)
    assert parts["attention"] == counted["attention"] - norms + 16 * quantized["attention"]["linears"]
    if "experts" in quantized:  # gate and up are together in the model, and two matrices in files
        shapes, edits = 16 * quantized["experts"]["linears"] * 3 // 2, edited_bytes(record)
        assert parts["experts"] == counted["experts"] + shapes + edits


QUANTIZED = (
    {"operator": "constant", "quantize": "w3(group=16, fewest=1)"},
    {"operator": "compel", "scale": "renorm", "quantize": "e3a4(group=16, zeros=bits)", "quant_text": "world:code"},
    # Edits of experts that stay in 16 bits are beside the integers, not in them.
    {"operator": "compel", "scale": "renorm", "quantize": "e16a4(group=16)"},
    {"operator": "reroute", "scale": "keep", "quantize": "mc3a4(group=24, fewest=1)"},
    {"operator": "tilt", "operator_parameters": ("rank=2",), "fit_draw": "B", "quantize": "w2(groups=dynamic)"},
    {"method": None, "ratio": None, "quantize": "w4(group=16)"},
)


def test_a_quantized_run_is_native_bit_for_bit_and_nothing_else(runs, model, tmp_path, monkeypatch):
    """Logits as the harness evaluates them, seen while it does, and those of a fresh process that reads the files."""
    evaluate, seen, cells = Session._evaluate, [], []

    def watched(self, arm, loaded, deployed, *more):
        seen.append(logits(loaded.moe.model) if deployed is None else evaluated(loaded.moe, deployed))
        return evaluate(self, arm, loaded, deployed, *more)

    monkeypatch.setattr(Session, "_evaluate", watched)
    for number, arm in enumerate(QUANTIZED):
        folder = runs(**arm)
        out = tmp_path / f"out{number}"
        done = export_run(folder, "native", out, model=model)
        assert verify(out).exact
        record = read_run(folder).record
        card = (out / "README.md").read_text()
        assert record["quantization"]["sha256"] in card
        assert f"calibration of the quantizer | {arm.get('quant_text', 'world:general')}" in card
        check_packed_bytes(done.stored["parts"], record, model)
        cells.append(("native", out, "float32"))
        for form in ("hf", "vllm-mone", "ct"):
            with pytest.raises(
                UsageError, match=rf"^{form} cannot hold this model: .* integers of {arm['quantize'][:2]}"
            ):
                export_run(folder, form, tmp_path / "no", model=model)
    for found, wanted in zip(in_fresh_process(cells, tmp_path), seen, strict=True):
        assert torch.equal(found, wanted)
    assert not (tmp_path / "no").exists()


def test_other_integers_than_the_recorded_ones_are_an_error(runs, model):
    run = read_run(runs(operator="constant", quantize="w3(group=16, fewest=1)"))
    record = {**run.record, "quantization": {**run.record["quantization"], "sha256": "0" * 64}}
    with pytest.raises(IntegrityError, match="the quantizer answers with other integers than the record names"):
        rebuild(type(run)(record, run.items, run.path), model=model)


def test_a_dense_run_has_nothing_to_export(runs):
    with pytest.raises(UsageError, match="the run is dense"):
        export_run(runs(method=None, ratio=None), "native")


def test_a_refusal_comes_before_the_fit(runs, model, tmp_path, monkeypatch):
    monkeypatch.setattr(Session, "plan", lambda *_: pytest.fail("the operator was asked"))
    for arm, form, words in (
        ({"operator": "constant"}, "hf", "answered by Constant"),
        ({"operator": "reroute"}, "hf", "scale keep of this router"),
        ({"operator": "reroute"}, "vllm-mone", "refilled by survivors"),
        ({"operator": "conmoe-nearest"}, "vllm-mone", "answered by Survivor"),
    ):
        with pytest.raises(UsageError, match=words):
            export_run(runs(**arm), form, tmp_path / "out", model=model)
    assert not list(tmp_path.iterdir())


def test_fills_of_a_method_file_travel_with_the_export(runs, model, material, tmp_path):
    file = Path(material.write_method(tmp_path / "methods", above=OWN, rest=REPLACE))
    folder = runs(method=str(file))
    with pytest.raises(PrerequisiteError, match=r"operator mine is not shipped with prunebench; .*--operator FILE"):
        spec_of(read_run(folder))
    export_run(folder, "native", tmp_path / "out", model=model, operator=str(file))
    file.unlink()
    assert (tmp_path / "out" / "prunebench" / "methods" / "mine.py").is_file()
    assert verify(tmp_path / "out").exact


def test_the_commands_from_run_to_verified_export(runs, model, tmp_path, capsys, monkeypatch):
    folder = runs(operator="constant")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(folder), "--format", "vllm-mone", "--model", model, "--max-shard-size", "40KB"]) == 0
    out = Path("exports") / "rand" / f"{folder.name}-vllm-mone"
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert len(list(out.glob("model-*.safetensors"))) > 3
    card = (out / "README.md").read_text()
    record = read_run(folder).record
    for words in (record["run_id"], record["mask"]["digest"], "softmax, no renorm", "world:general, 8 blocks of 32"):
        assert words in card
    assert "The record counts the same." in card
    link = re.search(r"its record is \[record\.json\]\((.*?)\)", card)
    assert (out / link[1]).is_file()
    assert json.loads((out / "prunebench" / "record.json").read_text()) == record
    assert cli.main(["verify", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["exact"], found["passed"], found["tokens"]) == (True, True, 512)
    assert cli.main(["export", str(folder), "--format", "hf", "--model", model]) == 2
    assert "hf cannot hold this model" in capsys.readouterr().err
    (out / "README.md").write_text("another")
    assert cli.main(["verify", str(out)]) == 1
    assert "README.md is not as it was written" in capsys.readouterr().err


def test_the_command_line_knows_the_formats():
    assert export_verbs.FORMATS == FORMATS


FRESH = """
import json, sys
import torch

cells = json.load(sys.stdin)
for form, folder, dtype, out in cells:
    if form in {"hf", "ct"}:
        from transformers import AutoModelForCausalLM

        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), output_loading_info=True, experts_implementation="eager"
        )
        assert not any(info.values()), info
    else:
        import prunebench

        model = prunebench.load(folder)
    ids = torch.load(out + ".ids")
    with torch.inference_mode():
        torch.save(model(input_ids=ids, use_cache=False).logits, out)
"""


def in_fresh_process(cells, tmp_path) -> list[torch.Tensor]:
    """Logits of exports, each loaded in one new interpreter; (format, folder, dtype) each."""
    jobs = []
    for number, (form, folder, dtype) in enumerate(cells):
        out = str(tmp_path / f"{number}.pt")
        torch.save(random_ids(2, 16), out + ".ids")
        jobs.append((form, str(folder), dtype, out))
    subprocess.run([sys.executable, "-c", FRESH], input=json.dumps(jobs), text=True, check=True, capture_output=True)
    return [torch.load(out) for *_, out in jobs]


def test_every_format_in_a_fresh_process(bases, tmp_path):
    folder = bases("olmoe")
    moe = open_base(folder)
    cells, wanted = [], []
    for form, operator, scale in (
        ("native", "tilt", None),
        ("native", "edited reroute", "keep"),
        ("vllm-mone", "constant", None),
        ("hf", "reroute", "renorm"),
        ("ct", "reroute", "renorm"),
    ):
        plan = plan_for(moe, operator, scale)
        out = tmp_path / f"{form}-{operator}"
        write_export(pruned_model(folder, plan), form, out, scheme=Scheme(group_size=16) if form == "ct" else None)
        cells.append((form, out, "float32"))
        wanted.append(logits(load(out)) if form in {"hf", "ct"} else evaluated(moe, plan))
    for found, one in zip(in_fresh_process(cells, tmp_path), wanted, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_a_model_in_bfloat16(family, bases, tmp_path):
    """Vectors take the dtype that they were added in, so bytes are the storage module's and no bit is lost."""
    folder = bases(family, dtype=torch.bfloat16)
    moe = open_base(folder, "bfloat16")
    plan = plan_for(moe, "constant")
    pruned = pruned_model(folder, plan, settings=Settings("bfloat16"))
    done = write_export(pruned, "vllm-mone", tmp_path / "out")
    assert done.stored["parts"]["fills"] == 2 * plan.values_stored
    assert torch.equal(logits(load(tmp_path / "out")), evaluated(moe, plan))
    write_export(pruned, "native", tmp_path / "native")
    assert torch.equal(logits(load(tmp_path / "native")), evaluated(moe, plan))


def test_edits_that_the_stored_dtype_cannot_hold_are_not_rounded(bases, tmp_path):
    folder = bases("olmoe", dtype=torch.bfloat16)
    moe = open_base(folder)
    plan = plan_for(moe, "edited reroute", "renorm")
    write_export(pruned_model(folder, plan), "hf", tmp_path / "out")
    torch.testing.assert_close(logits(load(tmp_path / "out")), evaluated(moe, plan), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def made_here(tmp_path_factory):
    """`made_here(model, arm)` is the folder of a run as a committed one; other processors round its fit otherwise."""
    session = Session(tmp_path_factory.mktemp("made"))

    @cache
    def make(model: str, arm: str) -> Path:
        return session.execute(prepare(spec_of(read_run(RECORDS / model / arm)))).folder

    return make


def check_zoo(folder: Path, form: str, out: Path) -> None:
    """A run, exported, read again by who is to read it, and verified."""
    done = export_run(folder, form, out)
    found = verify(out)
    assert found.passed
    record = read_run(folder).record
    if form == "hf":
        assert done.stored == record["storage"]
    if form == "vllm-mone":
        fills = record["storage"]["parts"]["fills"]
        # The zoo's weights are bfloat16, its arms are evaluated in float32, and so are their vectors.
        assert done.stored["parts"] == {**record["storage"]["parts"], "fills": 2 * fills}
        wanted = logits(prunebench.load(out))
        torch.testing.assert_close(logits(read_model(out)), wanted, rtol=0, atol=2e-5)
    if form != "hf":
        assert found.exact


# The scale that a cut router computes is the trained one of granite and moonlight.
CUT = {"tiny-olmoe": "other", "tiny-granite": "trained", "tiny-moonlight": "trained", "tiny-deepseek-v2": "other"}


@pytest.mark.parametrize("model", ["tiny-olmoe", "tiny-granite"])
def test_a_trained_model_cut_to_size(model, tmp_path):
    check_zoo(RECORDS / model / f"mone-ratio0.5-reroute-{CUT[model]}-A", "hf", tmp_path / "out")


def export_zoo(folder: Path, form: str, out: Path) -> tuple[str, Path, str]:
    """A run exported and verified, to be loaded in a fresh process."""
    scheme = Scheme(3, 4, 32) if form == "ct" else None
    export_run(folder, form, out, scheme=scheme)
    found = verify(out)
    assert found.passed
    assert found.exact or form == "hf"
    return form, out, "float32"


@pytest.mark.slow
@pytest.mark.parametrize("model", CUT)
def test_every_trained_model_in_every_format_that_applies_and_in_a_fresh_process(model, made_here, tmp_path):
    rerouted = RECORDS / model / f"mone-ratio0.5-reroute-{CUT[model]}-A"
    constant = made_here(model, "mone-ratio0.5-constant-A")
    cells = []
    for folder, form in ((constant, "native"), (rerouted, "hf"), (constant, "vllm-mone"), (rerouted, "ct")):
        if model == "tiny-granite" and form in {"vllm-mone", "ct"}:
            with pytest.raises(UsageError, match="the files stack the experts"):
                export_run(folder, form, tmp_path / form)
            continue
        if form == "ct":
            cells.append(export_zoo(folder, form, tmp_path / form))
            continue
        check_zoo(folder, form, tmp_path / form)
        cells.append((form, tmp_path / form, "float32"))
    for found, (_, out, _) in zip(in_fresh_process(cells, tmp_path), cells, strict=True):
        assert torch.equal(found, logits(load(out)))


@pytest.mark.slow
@pytest.mark.parametrize("model", CUT)
def test_every_trained_model_with_edited_survivors_cut_to_size(model, made_here, tmp_path):
    """Edits are float32 here, so they take more bytes than the record counts."""
    arm = "mone-ratio0.5-compel" + ("-other" if CUT[model] == "other" else "") + "-A"
    export_zoo(made_here(model, arm), "hf", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["tilt-rank=8", "svd-tilt_rank=8", "neurons-tilt_rank=8", "mora", "conmoe-functional"])
@pytest.mark.parametrize("model", CUT)
def test_every_trained_model_in_the_native_format(model, arm, made_here, tmp_path):
    check_zoo(made_here(model, f"mone-ratio0.5-{arm}-A"), "native", tmp_path / "out")
