"""Random tiny models of every supported router convention.

Not for benchmarks: nothing here is trained. Router weights, selection biases and scales per expert are drawn large
enough that selection varies from token to token and that the experts matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from prunebench.errors import UsageError

__all__ = ["CORE", "FAMILIES", "Family", "random_ids", "random_model"]

VOCABULARY = 96

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_QUERY_LATENT = {**_LATENT, "q_lora_rank": 24}
_MIXED = {"intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8}
_LINEAR: dict[str, Any] = {
    **_MIXED,
    "num_hidden_layers": 2,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_NEMOTRON: dict[str, Any] = {
    **_MIXED,
    "num_hidden_layers": None,
    "moe_shared_expert_intermediate_size": 24,
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
_V4: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
}

_NUM = ("num_experts", "num_experts_per_tok")
_LOCAL = ("num_local_experts", "num_experts_per_tok")
_ROUTED = ("n_routed_experts", "num_experts_per_tok")


@dataclass(frozen=True)
class Family:
    """One family of random models.

    Args:
        kind: transformers' model type.
        options: its configuration; None leaves an option of the common ones out.
        experts_option: sets E.
        top_k_option: sets k.
        top_k: the only k that its router knows, or None.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    experts_option: str = "num_experts"
    top_k_option: str = "num_experts_per_tok"
    top_k: int | None = None


FAMILIES: dict[str, Family] = {
    "olmoe": Family("olmoe", {"intermediate_size": 16, "norm_topk_prob": False, "num_hidden_layers": 2}, *_NUM),
    "qwen3_moe": Family("qwen3_moe", {**_MIXED, "norm_topk_prob": True, "num_hidden_layers": 2}, *_NUM),
    "granitemoe": Family("granitemoe", {"intermediate_size": 16, "num_hidden_layers": 2}, *_LOCAL),
    "deepseek_v2": Family(
        "deepseek_v2",
        {**_LATENT, "topk_method": "greedy", "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None},
        *_ROUTED,
    ),
    "deepseek_v2.groups": Family(
        "deepseek_v2",
        {
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "n_group": 4,
            "topk_group": 2,
        },
        *_ROUTED,
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {**_LATENT, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.446},
        *_ROUTED,
    ),
    "deepseek_v3.groups": Family(
        "deepseek_v3",
        {**_LATENT, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        *_ROUTED,
    ),
    "flex_olmo": Family("flex_olmo", {"intermediate_size": 16, "num_hidden_layers": 2}, *_NUM),
    "qwen2_moe": Family(
        "qwen2_moe", {**_MIXED, "shared_expert_intermediate_size": 24, "num_hidden_layers": 2, "head_dim": None}, *_NUM
    ),
    "qwen3_next": Family("qwen3_next", _LINEAR, *_NUM),
    "qwen3_5_moe": Family("qwen3_5_moe_text", _LINEAR, *_NUM),
    "granitemoeshared": Family(
        "granitemoeshared",
        {"intermediate_size": 16, "shared_intermediate_size": 24, "num_hidden_layers": 2},
        *_LOCAL,
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {
            "intermediate_size": 16,
            "shared_intermediate_size": 24,
            "num_hidden_layers": 2,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
        },
        *_LOCAL,
    ),
    "mixtral": Family("mixtral", {"intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 2}, *_LOCAL),
    "phimoe": Family("phimoe", {"intermediate_size": 16, "num_hidden_layers": 2}, *_LOCAL, top_k=2),
    "jamba": Family(
        "jamba",
        {
            "intermediate_size": 16,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 0,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        *_NUM,
    ),
    "hunyuan_v1_moe": Family(
        "hunyuan_v1_moe", {"intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 2}, "num_experts", "moe_topk"
    ),
    "gpt_oss": Family("gpt_oss", {"intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 2}, *_LOCAL),
    "gemma4": Family(
        "gemma4_text",
        {
            **_MIXED,
            "enable_moe_block": True,
            "global_head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_hidden_layers": 2,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
        },
        "num_experts",
        "top_k_experts",
    ),
    "deepseek_v32": Family(
        "deepseek_v32",
        {**_QUERY_LATENT, "n_group": 1, "topk_group": 1, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64},
        *_ROUTED,
    ),
    "deepseek_v4": Family("deepseek_v4", {**_V4, "mlp_layer_types": ["moe", "moe", "moe"]}, *_ROUTED),
    "deepseek_v4.hash": Family("deepseek_v4", {**_V4, "mlp_layer_types": ["hash_moe", "moe", "moe"]}, *_ROUTED),
    "glm4_moe": Family("glm4_moe", {**_MIXED, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}, *_ROUTED),
    "glm4_moe_lite": Family(
        "glm4_moe_lite",
        {**_QUERY_LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"], "routed_scaling_factor": 1.8},
        *_ROUTED,
    ),
    "dots1": Family(
        "dots1",
        {
            **_MIXED,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        *_ROUTED,
    ),
    "dots1.no_renorm": Family(
        "dots1", {**_MIXED, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": False}, *_ROUTED
    ),
    "nemotron_h": Family("nemotron_h", _NEMOTRON, *_ROUTED),
    "nemotron_h.latent": Family("nemotron_h", {**_NEMOTRON, "moe_latent_size": 16}, *_ROUTED),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        {
            **_LATENT,
            "num_expert_group": 4,
            "topk_group": 2,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
        "num_experts",
        "num_experts_per_token",
    ),
    "hy_v3": Family("hy_v3", {**_MIXED, "mlp_layer_types": ["dense", "sparse", "sparse"]}, *_NUM),
    "minimax_m2": Family("minimax_m2", {"intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 2}, *_LOCAL),
    "ernie4_5_moe": Family(
        "ernie4_5_moe", {**_MIXED, "head_dim": None, "moe_layer_end_index": 2}, "moe_num_experts", "moe_k"
    ),
    "lfm2_moe": Family(
        "lfm2_moe",
        {**_MIXED, "head_dim": None, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
        *_NUM,
    ),
    "lfm2_moe.no_bias": Family(
        "lfm2_moe",
        {
            **_MIXED,
            "head_dim": None,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
            "use_expert_bias": False,
        },
        *_NUM,
    ),
    "afmoe": Family(
        "afmoe",
        {
            **_MIXED,
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "route_scale": 2.0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        *_NUM,
    ),
    "longcat_flash": Family(
        "longcat_flash",
        {
            **{name: value for name, value in _QUERY_LATENT.items() if "intermediate" not in name},
            "num_hidden_layers": None,
            "num_layers": 2,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "zero_expert_num": 6,
            "head_dim": 8,
        },
        "n_routed_experts",
        "moe_topk",
    ),
    "llama4": Family(
        "llama4_text",
        {"intermediate_size": 16, "intermediate_size_mlp": 48, "head_dim": 8, "interleave_moe_layer_step": 1},
        *_LOCAL,
    ),
}

# One family per way of routing that most models share, for tests that need several but not all.
CORE: tuple[str, ...] = (
    *("olmoe", "qwen3_moe", "granitemoe", "deepseek_v2", "deepseek_v2.groups", "deepseek_v3", "deepseek_v3.groups"),
)

# name pattern -> standard deviation and mean of what is drawn there; the first match counts.
_DRAWS: tuple[tuple[re.Pattern[str], float, float], ...] = tuple(
    (re.compile(pattern), std, mean)
    for pattern, std, mean in (
        (r"(e_score_correction_bias|expert_bias)$", 0.1, 0.0),
        (r"\.per_expert_scale$", 0.2, 1.0),
        (r"\.(gate|router)\.((gate|wg|proj|classifier)\.)?weight$", 0.5, 0.0),
        (r"\.router\.bias$", 0.3, 0.0),
        (r"\.experts\.\w+_bias$", 0.1, 0.0),
        (r"\.experts\.\w+_proj$", 0.15, 0.0),
        (r"\.fc[12]_latent_proj\.weight$", 0.3, 0.0),
    )
)


def random_model(
    family: str = "olmoe",
    *,
    experts: int = 16,
    top_k: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    experts_implementation: str = "eager",
    **options: Any,
) -> Any:
    """A random model of a family, in eval mode, without gradients.

    Args:
        family: a key of `FAMILIES`.
        experts: E.
        top_k: k.
        seed: of all weights.
        dtype: of the weights; routers that their family keeps in float32 stay so, as after `from_pretrained`.
        experts_implementation: eager, grouped_mm or batched_mm.
        options: more configuration values, e.g. `hidden_size=64`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if family not in FAMILIES:
        raise UsageError(f"unknown family {family!r}", expected=", ".join(FAMILIES))
    own = FAMILIES[family]
    values = {**_BASE, **own.options, own.experts_option: experts, own.top_k_option: own.top_k or top_k, **options}
    unset = [name for name, value in own.options.items() if value is None and name in {*_BASE, "head_dim"}]
    for name in unset:
        del values[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(own.kind, **values)).eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                _draw(name, tensor, experts)
    _cast(model, dtype)
    if model._can_set_experts_implementation():  # noqa: SLF001  transformers has no public question for it
        model.set_experts_implementation(experts_implementation)
    return model.requires_grad_(requires_grad=False)


def _draw(name: str, tensor: torch.Tensor, experts: int) -> None:
    """Draw a tensor anew if it is one of the routers' or experts'."""
    if name.endswith(".tid2eid"):
        # A hash router's table: distinct experts for every token id.
        tensor.copy_(torch.rand(tensor.shape[0], experts).argsort(dim=1)[:, : tensor.shape[1]])
        return
    for pattern, std, mean in _DRAWS:
        if pattern.search(name):
            tensor.normal_(mean, std)
            return


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast as `from_pretrained(dtype=…)` does: not what the family keeps in float32, nor buffers."""
    strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if not any(part in name for part in strict):
            parameter.data = parameter.data.to(dtype)


def random_ids(blocks: int = 4, length: int = 24, *, seed: int = 1) -> torch.Tensor:
    """Random token ids for `random_model`, [blocks, length]."""
    return torch.randint(2, VOCABULARY, (blocks, length), generator=torch.Generator().manual_seed(seed))
