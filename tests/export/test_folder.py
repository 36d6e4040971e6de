"""An export is a folder that is whole or not there: killed, in the way, unwritable, altered; shards; sizes."""

from __future__ import annotations

import json
import resource
import signal
import stat
import subprocess
import sys

import pytest
import torch
from export_material import evaluated, logits, open_base, plan_for, pruned_model

from prunebench.errors import IntegrityError, PrerequisiteError, UsageError
from prunebench.export import load, verify, write_export
from prunebench.export.folder import new_folder
from prunebench.export.shards import parse_size
from prunebench.storage import measured, read_headers
from prunebench.testing import random_ids

IDS = random_ids(2, 16)


@pytest.fixture(scope="module")
def base(bases):
    folder = bases("olmoe")
    return folder, open_base(folder)


def test_shards_hold_the_same_tensors_below_the_size(base, tmp_path):
    folder, moe = base
    plan = plan_for(moe, "reroute", "renorm")
    one = write_export(pruned_model(folder, plan), "hf", tmp_path / "one")
    many = write_export(pruned_model(folder, plan), "hf", tmp_path / "many", limit=8000)
    shards = sorted((tmp_path / "many").glob("model-*.safetensors"))
    assert len(shards) > 5
    assert not (tmp_path / "many" / "model.safetensors").exists()
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == many.stored["total"] == one.stored["total"]
    assert read_headers(tmp_path / "one") == read_headers(tmp_path / "many")
    for shard in shards:
        held = read_headers(shard)
        assert len(held) == 1 or measured(held)["total"] <= 8000
    assert torch.equal(logits(load(tmp_path / "many")), logits(load(tmp_path / "one")))


def test_sizes_as_typed():
    assert [parse_size(text) for text in ("5GB", "1.5 mb", "2GiB", "700")] == [5 * 10**9, 1_500_000, 2**31, 700]
    for wrong in ("", "GB", "5TBs", "-1MB", "0"):
        with pytest.raises(UsageError, match="shard size"):
            parse_size(wrong)


def test_tied_embeddings_stay_tied_and_are_counted_once(bases, tmp_path):
    folder = bases("olmoe", tie_word_embeddings=True)
    moe = open_base(folder)
    for form, operator, scale in (("hf", "reroute", "renorm"), ("vllm-mone", "constant", None)):
        plan = plan_for(moe, operator, scale)
        done = write_export(pruned_model(folder, plan), form, tmp_path / form)
        embedding = moe.model.get_input_embeddings().weight
        assert done.stored["parts"]["embeddings"] == embedding.numel() * 4
        assert not [name for name in read_headers(tmp_path / form) if "lm_head" in name]
        model = load(tmp_path / form)
        assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        torch.testing.assert_close(logits(model), evaluated(moe, plan), rtol=0, atol=1e-5)


def test_nothing_is_overwritten(base, tmp_path):
    folder, moe = base
    pruned = pruned_model(folder, plan_for(moe, "constant"))
    write_export(pruned, "native", tmp_path / "out")
    with pytest.raises(UsageError, match=r"something is there already; in .*out; fix: remove it"):
        write_export(pruned, "native", tmp_path / "out")


def test_a_place_that_cannot_be_written_is_one_line(base, tmp_path):
    folder, moe = base
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write_export(pruned_model(folder, plan_for(moe, "constant")), "native", tmp_path / "file" / "out")


def test_an_error_while_writing_leaves_nothing(tmp_path):
    def half() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "weights").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match=r"cannot write the export; .*No space left"):
        half()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_is_one_line(base, tmp_path):
    """Weights are written by safetensors, whose error is its own; a limit on files' sizes stands for the disk."""
    folder, moe = base
    pruned = pruned_model(folder, plan_for(moe, "constant"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        with pytest.raises(UsageError, match=r"cannot write the export; in .*out; .*a writable folder with room"):
            write_export(pruned, "vllm-mone", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_files_can_be_read_by_all(base, tmp_path):
    folder, moe = base
    write_export(pruned_model(folder, plan_for(moe, "constant")), "vllm-mone", tmp_path / "out")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == {0o644}


WRITE = """
import sys, time
from pathlib import Path
import torch
from prunebench.export import PrunedModel, shards, write_export
from prunebench.plan import Plan

base, plan, digest, out = sys.argv[1:]
plain = shards.save_file
def slowly(*args, **more):
    plain(*args, **more)
    print("shard", flush=True)
    time.sleep(0.05)
shards.save_file = slowly
write_export(PrunedModel(base, Path(base), digest, Plan.load(Path(plan))), "hf", Path(out), limit=8000)
print("done", flush=True)
"""


@pytest.mark.parametrize("after", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_export_leaves_no_half_checkpoint(after, base, tmp_path):
    folder, moe = base
    pruned = pruned_model(folder, plan_for(moe, "reroute", "renorm"))
    pruned.plan.save(tmp_path / "plan.safetensors")
    place = tmp_path / "exports"
    arguments = [str(folder), str(tmp_path / "plan.safetensors"), pruned.weights_sha256, str(place / "out")]
    command = [sys.executable, "-c", WRITE, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(after):
            assert process.stdout.readline() == "shard\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    left = [path.name for path in place.iterdir()]
    assert left == [f".out.{process.pid}.tmp"]
    # The next one cleans up, and is whole.
    write_export(pruned, "hf", place / "out")
    assert [path.name for path in place.iterdir()] == ["out"]
    assert verify(place / "out", ids_BL=IDS).passed


def test_verify_finds_an_altered_and_a_missing_file(base, tmp_path):
    folder, moe = base
    write_export(pruned_model(folder, plan_for(moe, "constant")), "vllm-mone", tmp_path / "out")
    found = verify(tmp_path / "out", ids_BL=IDS)
    assert (found.exact, found.passed, found.largest, found.same_first) == (True, True, 0.0, 1.0)
    weights = tmp_path / "out" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(IntegrityError, match=r"model\.safetensors is not as it was written"):
        verify(tmp_path / "out", ids_BL=IDS)
    weights.unlink()
    with pytest.raises(IntegrityError, match=r"model\.safetensors is missing"):
        verify(tmp_path / "out", ids_BL=IDS)


def test_verify_fails_where_the_files_are_whole_but_of_another_model(base, tmp_path):
    """What a wrong writer would do: a survivor of another number in the place of one."""
    folder, moe = base
    plan = plan_for(moe, "reroute", "renorm")
    write_export(pruned_model(folder, plan), "hf", tmp_path / "out")
    other = plan_for(moe, "reroute", "renorm", "uniform")
    layers = tuple(
        type(layer)(layer.index, layer.experts, tuple(sorted({*layer.pruned[1:], layer.survivors[0]})))
        for layer in other.mask.layers
    )
    swapped = type(other)(type(other.mask)(other.mask.model_shape, layers), other.layers, {}, {})
    write_export(pruned_model(folder, swapped), "hf", tmp_path / "swapped")
    (tmp_path / "out" / "model.safetensors").write_bytes((tmp_path / "swapped" / "model.safetensors").read_bytes())
    description = tmp_path / "out" / "prunebench" / "export.json"
    data = json.loads(description.read_text())
    data["files"].pop("model.safetensors")
    description.write_text(json.dumps(data))
    found = verify(tmp_path / "out", ids_BL=IDS)
    assert not found.passed
    assert found.divergence > 100 * found.allowed


def test_an_export_is_held_to_its_base_model(base, bases, tmp_path):
    folder, moe = base
    pruned = pruned_model(folder, plan_for(moe, "tilt"))
    write_export(pruned, "native", tmp_path / "out")
    with pytest.raises(PrerequisiteError, match=r"not the export's base model; in .*expected weights sha256"):
        load(tmp_path / "out", base=bases("olmoe", tie_word_embeddings=True))
    description = tmp_path / "out" / "prunebench" / "export.json"
    data = json.loads(description.read_text())
    data["base"]["model"] = "/nowhere/at-all"
    description.write_text(json.dumps(data))
    with pytest.raises(PrerequisiteError, match=r"the base model is not there .*; fix: give its folder as base"):
        load(tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out", base=folder)), evaluated(moe, pruned.plan))


def test_a_folder_without_an_export_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"the folder holds no export; in .*; expected prunebench/export\.json"):
        load(tmp_path)
