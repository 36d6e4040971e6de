"""Predicted bytes equal the bytes of files from which the experts were really removed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import LayerMask, Mask
from prunebench.storage import PARTS, measured, part_of, pruned_bytes, read_headers, stored_bytes

E, D, F = 6, 4, 3


def olmoe(layers=(0, 1), dtype=np.float16):
    """One tensor per expert and projection, untied head."""
    tensors = {"model.embed_tokens.weight": np.zeros((10, D), dtype), "lm_head.weight": np.zeros((10, D), dtype)}
    for n in layers:
        at = f"model.layers.{n}"
        tensors |= {
            f"{at}.mlp.experts.{e}.{p}_proj.weight": np.zeros((F, D), dtype)
            for e in range(E)
            for p in ("gate", "up", "down")
        }
        tensors[f"{at}.mlp.gate.weight"] = np.zeros((E, D), np.float32)
        tensors[f"{at}.self_attn.q_proj.weight"] = np.zeros((D, D), dtype)
        tensors[f"{at}.input_layernorm.weight"] = np.zeros(D, dtype)
    return tensors


def moonlight():
    """A dense first layer, a shared expert, a selection bias, and a head tied to the embeddings (not saved)."""
    tensors = olmoe(layers=(1, 2))
    del tensors["lm_head.weight"]
    for n in (1, 2):
        tensors[f"model.layers.{n}.mlp.gate.e_score_correction_bias"] = np.zeros(E, np.float32)
        tensors[f"model.layers.{n}.mlp.shared_experts.gate_proj.weight"] = np.zeros((F, D), np.float16)
    tensors["model.layers.0.mlp.gate_proj.weight"] = np.zeros((F, D), np.float16)
    return tensors


def granite():
    """Experts stacked on dimension 0."""
    tensors = {"model.embed_tokens.weight": np.zeros((10, D), np.float16)}
    for n in (0, 1):
        at = f"model.layers.{n}.block_sparse_moe"
        tensors[f"{at}.input_linear.weight"] = np.zeros((E, 2 * F, D), np.float16)
        tensors[f"{at}.output_linear.weight"] = np.zeros((E, D, F), np.float16)
        tensors[f"{at}.router.layer.weight"] = np.zeros((E, D), np.float32)
        tensors[f"model.layers.{n}.shared_mlp.input_linear.weight"] = np.zeros((F, D), np.float16)
    return tensors


FAMILIES = {"olmoe": (olmoe, (0, 1)), "moonlight": (moonlight, (1, 2)), "granite": (granite, (0, 1))}


def removed(tensors, mask, *, keep_router_rows):
    """The oracle: tensors without the pruned experts, by slicing."""
    result = {}
    for name, tensor in tensors.items():
        index = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else None
        pruned = list(mask.pruned_of(index))
        if ".mlp.experts." in name and int(name.split(".mlp.experts.")[1].split(".")[0]) in pruned:
            continue
        stacked = "block_sparse_moe" in name and "linear" in name
        router = any(s in name for s in (".gate.weight", ".router.", "e_score"))
        cut = stacked or (router and not keep_router_rows)
        result[name] = np.delete(tensor, pruned, axis=0) if cut else tensor
    return result


def masks(layers):
    sets = st.sets(st.integers(0, E - 1), max_size=E - 2)
    return st.tuples(sets, sets).map(
        lambda two: Mask("x", tuple(LayerMask(n, E, tuple(sorted(s))) for n, s in zip(layers, two, strict=True)))
    )


@settings(max_examples=15, deadline=None)
@given(st.data(), st.sampled_from(sorted(FAMILIES)), st.booleans(), st.integers(0, 999))
def test_predicted_bytes_equal_measured_bytes(tmp_path_factory, data, family, keep_router_rows, fills):
    make, layers = FAMILIES[family]
    mask = data.draw(masks(layers))
    folder = tmp_path_factory.mktemp("weights")
    save_file(make(), folder / "model.safetensors")
    smaller = removed(make(), mask, keep_router_rows=keep_router_rows)
    save_file(smaller, folder / "smaller.safetensors")
    predicted = pruned_bytes(folder, mask, fill_values_bytes=fills, keep_router_rows=keep_router_rows)
    assert predicted == measured(read_headers(folder / "smaller.safetensors"), fills=fills)
    assert predicted["total"] - fills == sum(t.nbytes for t in load_file(folder / "smaller.safetensors").values())


def test_parts_and_layers_add_up(tmp_path):
    save_file(moonlight(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = stored_bytes(tmp_path)
    expert = 3 * F * D * 2
    assert stored["parts"] == {
        "experts": 2 * E * expert,
        "fills": 0,
        "router": 2 * (E * D * 4 + E * 4),
        "shared": 2 * F * D * 2,
        "attention": 2 * D * D * 2,
        "embeddings": 10 * D * 2,
        "other": 2 * D * 2 + F * D * 2,
    }
    assert stored["total"] == sum(stored["parts"].values()) == sum(t.nbytes for t in moonlight().values())
    assert list(stored["layers"]) == ["0", "1", "2"]
    assert stored["layers"]["1"]["experts"] == E * expert
    assert json.loads(json.dumps(stored)) == stored


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.0.mlp.experts.12.gate_proj.weight", "experts"),
        ("model.layers.0.mlp.experts.gate_up_proj", "experts"),
        ("model.layers.0.block_sparse_moe.experts.3.w1.weight", "experts"),
        ("model.layers.0.block_sparse_moe.output_linear.weight", "experts"),
        ("model.layers.0.mlp.experts.3.approx_value", "fills"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate.e_score_correction_bias", "router"),
        ("model.layers.0.block_sparse_moe.router.layer.weight", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "other"),
        ("model.layers.0.mlp.shared_experts.gate_proj.weight", "shared"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "shared"),
        ("model.layers.0.shared_mlp.input_linear.weight", "shared"),
        ("model.layers.0.self_attn.o_proj.weight", "attention"),
        ("model.embed_tokens.weight", "embeddings"),
        ("lm_head.weight", "embeddings"),
        ("model.norm.weight", "other"),
    ],
)
def test_parts_are_told_apart_by_name(name, part):
    assert part_of(name) == part
    assert part in PARTS


def test_shards_are_summed_over_their_index(tmp_path):
    tensors = olmoe()
    save_file(tensors, tmp_path / "whole.safetensors")
    names = sorted(tensors)
    shard_of = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(names)}
    for shard in sorted(set(shard_of.values())):
        save_file({n: tensors[n] for n in names if shard_of[n] == shard}, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    assert stored_bytes(tmp_path) == stored_bytes(tmp_path / "whole.safetensors")
    index.write_text(json.dumps({"weight_map": shard_of | {"ghost": "model-1-of-2.safetensors"}}))
    with pytest.raises(PrerequisiteError, match="does not hold ghost"):
        stored_bytes(tmp_path)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(PrerequisiteError, match="model-2-of-2"):
        stored_bytes(tmp_path)
    index.write_text("{}")
    with pytest.raises(PrerequisiteError, match="cannot read the index"):
        stored_bytes(tmp_path)


def _mask(*, experts=E, index=0):
    return Mask("x", (LayerMask(index, experts, (0,)),))


@pytest.mark.parametrize(
    ("change", "mask", "message"),
    [
        ({"model.layers.0.mlp.experts.2.up_proj.weight": np.zeros((F, D + 1), np.float16)}, _mask(), "unequal size"),
        ({}, _mask(experts=E - 1), "the weights hold expert 5"),
        ({}, _mask(experts=E + 1), "unequal size"),
        ({}, _mask(index=7), "no expert weights"),
        ({"model.layers.0.mlp.experts.gate_up_proj": np.zeros((E + 1, 2), np.float16)}, _mask(), "on dimension 0"),
    ],
)
def test_weights_that_do_not_fit_the_mask_are_refused(tmp_path, change, mask, message):
    save_file(olmoe() | change, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=message):
        pruned_bytes(tmp_path, mask)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:5],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"!" + data[9:],
        lambda data: b"",
    ],
    ids=["length cut", "data cut", "data added", "length huge", "header not JSON", "empty"],
)
def test_damaged_files_are_refused_in_one_line(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    save_file(olmoe(), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PrerequisiteError) as caught:
        stored_bytes(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(PrerequisiteError, match="no safetensors weights"):
        stored_bytes(tmp_path)
