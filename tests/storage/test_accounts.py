"""Accounts equal the bytes of files that were really pruned and packed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from prunebench.errors import UsageError
from prunebench.mask import LayerMask, Mask
from prunebench.storage import (
    Bits,
    Tensor,
    account,
    file_bytes,
    is_linear,
    measured,
    part_of,
    pruned_bytes,
    read_headers,
    survey,
)

E, D, F = 5, 40, 24
MAP = "model.layers.{}.mlp.expert_map"


def norms_and_attention(at, dtype):
    return {
        f"{at}.self_attn.q_proj.weight": np.zeros((D, D), dtype),
        f"{at}.self_attn.q_proj.bias": np.zeros(D, dtype),
        f"{at}.self_attn.q_norm.weight": np.zeros(D, dtype),
        f"{at}.input_layernorm.weight": np.zeros(D, dtype),
    }


def single():
    """One tensor per expert, a dense first layer, a shared expert, a selection bias, and a head."""
    dtype = np.float16
    tensors = {"model.embed_tokens.weight": np.zeros((10, D), dtype), "lm_head.weight": np.zeros((10, D), dtype)}
    tensors |= norms_and_attention("model.layers.0", dtype)
    tensors["model.layers.0.mlp.gate_proj.weight"] = np.zeros((3 * F, D), dtype)
    for n in (1, 2):
        at = f"model.layers.{n}"
        tensors |= norms_and_attention(at, dtype)
        for e in range(E):
            for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
                tensors[f"{at}.mlp.experts.{e}.{name}_proj.weight"] = np.zeros(shape, dtype)
        tensors[f"{at}.mlp.shared_experts.up_proj.weight"] = np.zeros((F, D), dtype)
        tensors[f"{at}.mlp.shared_expert_gate.weight"] = np.zeros((1, D), dtype)
        tensors[f"{at}.mlp.gate.weight"] = np.zeros((E, D), np.float32)
        tensors[f"{at}.mlp.gate.e_score_correction_bias"] = np.zeros(E, np.float32)
    return tensors


def stacked():
    """Experts on dimension 0, with biases."""
    dtype = np.float16
    tensors = {"model.embed_tokens.weight": np.zeros((10, D), dtype)}
    for n in (1, 2):
        at = f"model.layers.{n}"
        tensors |= norms_and_attention(at, dtype)
        tensors[f"{at}.mlp.experts.gate_up_proj"] = np.zeros((E, 2 * F, D), dtype)
        tensors[f"{at}.mlp.experts.gate_up_proj_bias"] = np.zeros((E, 2 * F), dtype)
        tensors[f"{at}.mlp.experts.down_proj"] = np.zeros((E, D, F), dtype)
        tensors[f"{at}.mlp.gate.weight"] = np.zeros((E, D), np.float32)
    return tensors


LAYOUTS = {"single": single, "stacked": stacked}
# By hand, apart from `is_linear`.
OTHERS = ("self_attn.q_proj.weight", ".mlp.gate_proj.weight", "shared_experts.up_proj.weight")


def pack(name, matrix, bits, group, zeros):
    """A quantized matrix's arrays: only their sizes matter here, and are made by slicing, not by the formula."""
    rows, columns = matrix.shape
    starts = range(0, columns, group)
    row_words = len(range(0, columns * bits, 32))
    zero = np.zeros((rows, len(starts)), np.float16)
    if zeros == "bits":
        zero = np.zeros((len(range(0, rows * bits, 32)), len(starts)), np.int32)
    return {
        f"{name}_packed": np.zeros((rows, row_words), np.int32),
        f"{name}_scale": np.zeros((rows, len(starts)), np.float16),
        f"{name}_zero_point": zero,
        f"{name}_shape": np.array(matrix.shape, np.int64),
    }


def written(tensors, bits, pruned, *, keep_router_rows):
    """The oracle: what a file would hold, experts removed and linears packed, tensor by tensor."""
    result = {}
    for name, tensor in tensors.items():
        layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else None
        gone = pruned.get(layer, ())
        if ".mlp.experts." in name:
            pieces = {}
            after = name.split(".mlp.experts.")[1]
            if after[0].isdigit():
                if int(after.split(".")[0]) not in gone:
                    pieces[name] = tensor
            else:
                pieces = {f"{name}.{e}": tensor[e] for e in range(E) if e not in gone}
            for piece, value in pieces.items():
                quantize = bits.experts is not None and value.ndim == 2
                result |= pack(piece, value, bits.experts, bits.group, bits.zeros) if quantize else {piece: value}
        elif name.endswith(OTHERS) and bits.linears is not None:
            result |= pack(name, tensor, bits.linears, bits.group, bits.zeros)
        elif ".mlp.gate." in name and not keep_router_rows:
            result[name] = np.delete(tensor, list(gone), axis=0)
        else:
            result[name] = tensor
    for layer, gone in pruned.items():
        if gone and keep_router_rows:
            result[MAP.format(layer)] = np.zeros(E, np.int32)
    return result


def parts_of(headers):
    found = {}
    for name, tensor in headers.items():
        metadata = name.endswith(("_shape", "expert_map"))
        part = "metadata" if metadata else part_of(name)
        found[part] = found.get(part, 0) + tensor.bytes
    return found


@st.composite
def bits(draw):
    width = st.sampled_from([None, 2, 3, 4, 8])
    return Bits(draw(width), draw(width), draw(st.integers(1, 50)), draw(st.sampled_from(["fp16", "bits"])))


@settings(max_examples=25, deadline=None)
@given(
    setting=bits(),
    layout=st.sampled_from(sorted(LAYOUTS)),
    first=st.sets(st.integers(0, E - 1), max_size=E - 1),
    second=st.sets(st.integers(0, E - 1), max_size=E - 1),
    keep_router_rows=st.booleans(),
    fills=st.integers(0, 99),
)
def test_accounts_are_the_bytes_of_written_files(  # noqa: PLR0917  drawn, not called
    tmp_path_factory, setting, layout, first, second, keep_router_rows, fills
):
    tensors, pruned = LAYOUTS[layout](), {1: first, 2: second}
    folder = tmp_path_factory.mktemp("weights")
    save_file(tensors, folder / "dense.safetensors")
    save_file(written(tensors, setting, pruned, keep_router_rows=keep_router_rows), folder / "model.safetensors")
    found = account(
        survey(read_headers(folder / "dense.safetensors")),
        setting,
        pruned={layer: len(gone) for layer, gone in pruned.items()},
        fill_bytes=fills,
        keep_router_rows=keep_router_rows,
    )
    wanted = parts_of(read_headers(folder / "model.safetensors")) | ({"fills": fills} if fills else {})
    assert {part: size for part, size in found.on_disk.items() if size} == {k: v for k, v in wanted.items() if v}
    router_row = (D + (layout == "single")) * 4
    gone = len(first) + len(second)
    assert found.pruned_rows == (gone * router_row if keep_router_rows else 0)
    assert found.total <= found.total_on_disk


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unquantized_accounts_are_what_records_state(tmp_path, layout):
    save_file(LAYOUTS[layout](), tmp_path / "model.safetensors")
    headers = read_headers(tmp_path)
    dense = account(survey(headers))
    assert dense.total == dense.total_on_disk == measured(headers)["total"]
    mask = Mask("x", (LayerMask(1, E, (0, 3)), LayerMask(2, E, (4,))))
    for keep in (True, False):
        wanted = pruned_bytes(tmp_path, mask, fill_values_bytes=7, keep_router_rows=keep)
        found = account(survey(headers), pruned={1: 2, 2: 1}, fill_bytes=7, keep_router_rows=keep)
        assert {part: size for part, size in found.ideal.items() if part != "metadata"} == wanted["parts"]


def test_files_are_their_tensors_and_a_header(tmp_path):
    save_file(single(), tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    assert file_bytes(tmp_path) == file_bytes(tmp_path / "model.safetensors") == size
    assert size > account(survey(read_headers(tmp_path))).total


def test_a_tied_head_counts_once_and_lies_on_disk_twice(tmp_path):
    save_file(single(), tmp_path / "model.safetensors")
    headers = read_headers(tmp_path)
    plain, tied = account(survey(headers)), account(survey(headers, tied=("lm_head.weight",)))
    assert plain.total - tied.total == 10 * D * 2
    assert plain.total_on_disk == tied.total_on_disk


def test_experts_of_different_widths_add_up():
    dense = survey({name: Tensor("F16", value.shape, value.nbytes) for name, value in single().items()})
    mixed = account(dense, Bits(3, 4, 8), pruned={1: 2}, allocation={1: (2, 4, None)})
    each = {b: account(dense, Bits(b, 4, 8)).ideal["experts"] // (2 * E) for b in (2, 3, 4, None)}
    assert mixed.ideal["experts"] == each[2] + each[4] + each[None] + E * each[3]


def test_identity_experts_are_counted_and_never_quantized():
    tensors = single()
    tensors |= {f"model.layers.1.mlp.experts.{e}.gate_proj.weight": np.zeros((F, D), np.float16) for e in (E, E + 1)}
    tensors["model.layers.1.mlp.gate.weight"] = np.zeros((E + 2, D), np.float32)
    headers = {name: Tensor("F16", value.shape, value.nbytes) for name, value in tensors.items()}
    found = survey(headers)
    assert [layer.experts for layer in found.layers] == [E, E]
    assert account(found).total == measured(headers)["total"]
    idle = 2 * F * D * 2
    without = survey({name: one for name, one in headers.items() if f"experts.{E}" not in name and "s.6." not in name})
    assert account(found, Bits(4, 4)).ideal["experts"] - account(without, Bits(4, 4)).ideal["experts"] == idle


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (4, 4), True),
        ("model.layers.0.mlp.down_proj.weight", (4, 4), True),
        ("model.layers.0.mlp.experts.3.up_proj.weight", (4, 4), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 4), True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (2, 4), False),
        ("model.layers.0.block_sparse_moe.output_linear.weight", (2, 4, 4), True),
        ("model.layers.0.block_sparse_moe.router.layer.weight", (4, 4), False),
        ("model.layers.0.mlp.gate.weight", (4, 4), False),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 4), False),
        ("model.layers.0.mlp.shared_experts.gate_proj.weight", (4, 4), True),
        ("model.layers.0.self_attn.q_proj.bias", (4,), False),
        ("model.layers.0.self_attn.q_norm.weight", (4,), False),
        ("model.layers.0.linear_attn.conv1d.weight", (4, 1, 4), False),
        ("model.embed_tokens.weight", (4, 4), False),
        ("lm_head.weight", (4, 4), False),
    ],
)
def test_decoder_linears_are_told_by_name(name, shape, wanted):
    assert is_linear(name, shape) is wanted


def headers_of(change):
    tensors = stacked() | change
    return {name: Tensor("F16", value.shape, value.nbytes) for name, value in tensors.items() if value is not None}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: survey({"lm_head.weight": Tensor("F16", (2, 2), 8)}), "no routed experts"),
        (
            lambda: survey({**headers_of({}), "model.layers.1.self_attn.k_proj.weight": Tensor("I32", (2, 2), 16)}),
            "model.layers.1.self_attn.k_proj.weight is I32",
        ),
        (
            lambda: survey(
                headers_of({"model.layers.1.mlp.experts.gate_up_proj": np.zeros((E, D, 2 * F), np.float16)})
            ),
            "inputs on the last axis",
        ),
        (lambda: survey(headers_of({"model.layers.1.mlp.experts.0.up_proj.weight": np.zeros((F, D))})), "one layout"),
        (lambda: account(survey(headers_of({})), pruned={7: 1}), "layer 7 has no routed experts; expected 1, 2"),
        (lambda: account(survey(headers_of({})), pruned={1: E + 1}), f"{E + 1} of {E} experts pruned"),
        (
            lambda: account(survey(headers_of({})), allocation={1: (4,)}),
            f"bits for 1 experts; in layer 1; expected {E}",
        ),
    ],
)
def test_what_cannot_be_counted_is_one_line(make, says):
    with pytest.raises(UsageError) as caught:
        make()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
