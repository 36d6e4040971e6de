"""The tensors of a checkpoint by its configuration alone, as files hold them: names, shapes, dtypes.

Of the families that the papers use. Checked against transformers' own empty models, and against saved files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, Final, TypeAlias

from prunebench.errors import UsageError
from prunebench.storage.saved import Tensor

__all__ = ["config_tensors", "tied_names"]

Shapes: TypeAlias = Iterator[tuple[str, tuple[int, ...]]]

_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4}
_DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_FROM_0: Final = ("first_k_dense_replace", "n_shared_experts")
# What changes a file's tensors and has no formula here: key -> the values that do not.
_NOT_COUNTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "mlp_bias": (None, False),
    "moe_layer_freq": (None, 1),
    "quantization_config": (None,),
}
_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "model.embed_tokens.weight"


class _Config:
    """A configuration that says what it lacks."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def __getitem__(self, key: str) -> int:
        value, least = self._values.get(key), 0 if key in _FROM_0 else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{key} is {value!r}", where=self._where, expected=f"a whole number from {least}")
        return value

    def number(self, key: str, default: int) -> int:
        """A number that need not be given."""
        return default if self._values.get(key) is None else self[key]

    def says(self, key: str) -> bool:
        """Whether something is switched on."""
        value = self._values.get(key)
        if value not in (None, True, False):
            raise UsageError(f"{key} is {value!r}", where=self._where, expected="true or false")
        return bool(value)


def _linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _mlp(name: str, width: int, neurons: int) -> Shapes:
    yield from _linear(f"{name}.gate_proj", neurons, width)
    yield from _linear(f"{name}.up_proj", neurons, width)
    yield from _linear(f"{name}.down_proj", width, neurons)


def _attention(at: str, config: _Config) -> Shapes:
    """Heads that may share keys and values."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    size, shared = config.number("head_dim", width // heads), config.number("num_key_value_heads", heads)
    bias = config.says("attention_bias")
    yield from _linear(f"{at}.q_proj", heads * size, width, bias=bias)
    yield from _linear(f"{at}.k_proj", shared * size, width, bias=bias)
    yield from _linear(f"{at}.v_proj", shared * size, width, bias=bias)
    yield from _linear(f"{at}.o_proj", width, heads * size, bias=bias)


def _latent_attention(at: str, config: _Config) -> Shapes:
    """DeepSeek's: keys and values through a narrow latent."""
    width, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    bias = config.says("attention_bias")
    if not (rank := config.number("q_lora_rank", 0)):
        yield from _linear(f"{at}.q_proj", heads * (plain + rotary), width)
    else:
        yield from _linear(f"{at}.q_a_proj", rank, width, bias=bias)
        yield f"{at}.q_a_layernorm.weight", (rank,)
        yield from _linear(f"{at}.q_b_proj", heads * (plain + rotary), rank)
    yield from _linear(f"{at}.kv_a_proj_with_mqa", latent + rotary, width, bias=bias)
    yield f"{at}.kv_a_layernorm.weight", (latent,)
    yield from _linear(f"{at}.kv_b_proj", heads * (plain + value), latent)
    yield from _linear(f"{at}.o_proj", width, heads * value, bias=bias)


def _olmoe(at: str, _index: int, config: _Config) -> Shapes:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    yield from _attention(f"{at}.self_attn", config)
    yield f"{at}.self_attn.q_norm.weight", (width,)
    yield f"{at}.self_attn.k_norm.weight", (width // heads * config.number("num_key_value_heads", heads),)
    for expert in range(config["num_experts"]):
        yield from _mlp(f"{at}.mlp.experts.{expert}", width, config["intermediate_size"])
    yield f"{at}.mlp.gate.weight", (config["num_experts"], width)


def _deepseek(at: str, index: int, config: _Config) -> Shapes:
    width, neurons = config["hidden_size"], config["moe_intermediate_size"]
    yield from _latent_attention(f"{at}.self_attn", config)
    if index < config["first_k_dense_replace"]:
        yield from _mlp(f"{at}.mlp", width, config["intermediate_size"])
        return
    for expert in range(config["n_routed_experts"]):
        yield from _mlp(f"{at}.mlp.experts.{expert}", width, neurons)
    yield f"{at}.mlp.gate.weight", (config["n_routed_experts"], width)
    if shared := config.number("n_shared_experts", 0):
        yield from _mlp(f"{at}.mlp.shared_experts", width, shared * neurons)


def _deepseek_v3(at: str, index: int, config: _Config) -> Shapes:
    yield from _deepseek(at, index, config)
    if index >= config["first_k_dense_replace"]:
        yield f"{at}.mlp.gate.e_score_correction_bias", (config["n_routed_experts"],)


def _granite(at: str, _index: int, config: _Config) -> Shapes:
    width, neurons, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield from _attention(f"{at}.self_attn", config)
    yield f"{at}.block_sparse_moe.input_linear.weight", (experts, 2 * neurons, width)
    yield f"{at}.block_sparse_moe.output_linear.weight", (experts, width, neurons)
    yield f"{at}.block_sparse_moe.router.layer.weight", (experts, width)


_FAMILIES: Final[Mapping[str, Callable[[str, int, _Config], Shapes]]] = {
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek_v3,
    "granitemoe": _granite,
}


def config_tensors(
    config: Mapping[str, Any], *, router_dtype: str | None = None, where: str = "config"
) -> dict[str, Tensor]:
    """What a model's files would hold, as `read_headers` would find it.

    Args:
        config: a transformers configuration (`config.json`).
        router_dtype: of the routers' matrices; None is the model's own dtype, as the papers count and hubs hold them.
            transformers writes float32 where it keeps routers in it.
        where: for errors.

    Raises:
        UsageError: a family that is not known here, what has no formula, or a number that is missing or none.
    """
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        raise UsageError(
            f"no formula for model_type {family!r}",
            where=where,
            expected=", ".join(_FAMILIES),
            fix="count saved weights instead",
        )
    for key, fine in _NOT_COUNTED.items():
        if config.get(key) not in fine:
            said = key if isinstance(config[key], Mapping) else f"{key} {config[key]}"
            raise UsageError(f"{said} is not counted here", where=where, fix="count saved weights instead")
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise UsageError(f"unknown dtype {name!r}", where=where, expected=", ".join(_DTYPES))
    dtype, numbers = _DTYPES[name], _Config(config, where)
    return {
        name: Tensor(one, shape, prod(shape) * _BYTES[one])
        for name, shape in _all(_FAMILIES[family], numbers)
        for one in (_dtype_of(name, dtype, router_dtype or dtype),)
    }


def _all(layer: Callable[[str, int, _Config], Shapes], config: _Config) -> Shapes:
    width = config["hidden_size"]
    yield _EMBEDDING, (config["vocab_size"], width)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        yield from layer(at, index, config)
        yield f"{at}.input_layernorm.weight", (width,)
        yield f"{at}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    if not config.says("tie_word_embeddings"):  # all of these families are untied where nothing is said
        yield _HEAD, (config["vocab_size"], width)


def _dtype_of(name: str, dtype: str, router_dtype: str) -> str:
    if name.endswith("e_score_correction_bias"):
        return "F32"  # a float32 buffer, also in the papers' checkpoints
    return router_dtype if name.endswith((".mlp.gate.weight", ".router.layer.weight")) else dtype


def tied_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Tensors that are another one's by the configuration; a file may hold them nevertheless."""
    return (_HEAD,) if config.get("tie_word_embeddings") else ()
