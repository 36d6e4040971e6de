"""Random tiny models of every supported router convention.

Not for benchmarks: nothing here is trained. Router weights and selection biases are drawn large enough that selection
varies from token to token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from prunebench.errors import UsageError

__all__ = ["FAMILIES", "random_ids", "random_model"]

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

# family -> (transformers model type, its options, names of the options that set E and k)
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "olmoe": (
        "olmoe",
        {"intermediate_size": 16, "norm_topk_prob": False, "num_hidden_layers": 2},
        ("num_experts", "num_experts_per_tok"),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 2,
        },
        ("num_experts", "num_experts_per_tok"),
    ),
    "granitemoe": (
        "granitemoe",
        {"intermediate_size": 16, "num_hidden_layers": 2},
        ("num_local_experts", "num_experts_per_tok"),
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {**_LATENT, "topk_method": "greedy", "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None},
        ("n_routed_experts", "num_experts_per_tok"),
    ),
    "deepseek_v2.groups": (
        "deepseek_v2",
        {
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "n_group": 4,
            "topk_group": 2,
        },
        ("n_routed_experts", "num_experts_per_tok"),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**_LATENT, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.446},
        ("n_routed_experts", "num_experts_per_tok"),
    ),
    "deepseek_v3.groups": (
        "deepseek_v3",
        {**_LATENT, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        ("n_routed_experts", "num_experts_per_tok"),
    ),
}


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
    kind, own, (experts_option, top_k_option) = FAMILIES[family]
    values = {**_BASE, **own, experts_option: experts, top_k_option: top_k, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith("e_score_correction_bias"):
                    tensor.normal_(std=0.1)
                elif name.endswith((".gate.weight", ".router.weight")):
                    tensor.normal_(std=0.5)
                elif ".experts." in name and tensor.ndim == 3:
                    tensor.normal_(std=0.15)
    _cast(model, dtype)
    model.set_experts_implementation(experts_implementation)
    return model.requires_grad_(requires_grad=False)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast as `from_pretrained(dtype=…)` does: not the modules that the family keeps in float32, nor buffers."""
    strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if not any(part in name for part in strict):
            parameter.data = parameter.data.to(dtype)


def random_ids(blocks: int = 4, length: int = 24, *, seed: int = 1) -> torch.Tensor:
    """Random token ids for `random_model`, [blocks, length]."""
    return torch.randint(2, VOCABULARY, (blocks, length), generator=torch.Generator().manual_seed(seed))
