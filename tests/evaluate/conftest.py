"""A byte-level tokenizer trained on the spot, and random tiny MoEs of four families."""

from __future__ import annotations

import pytest
import torch

TEXTS = [
    "Question: Mara has 11 stones and finds 3 more. How many stones does Mara have now?\nAnswer: 11+3=14.\n#### 14",
    "def add_10(x):\n    return x + 10\n[DONE]",
    "Noka went to Accra.\nQuestion: Did Noka go to Accra?\nAnswer: yes",
    "Today Saka was very sad. Then Saka took a bath. Größe, naïve, 東京.",
]
SIZES = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "olmoe": {"num_experts": 8, "intermediate_size": 16},
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, "n_group": 1, "topk_group": 1},
    "granitemoe": {"num_local_experts": 8, "intermediate_size": 16, "num_key_value_heads": 2},
}


def make_tokenizer(*, adds_bos: bool):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"],
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS * 20, trainer)
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    special = {"bos_token": "<|end|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=512, **special)


def make_model(family="olmoe", *, seed=0, length=128):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        **{**SIZES, **EXPERTS, **FAMILIES[family]},
        max_position_embeddings=length,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    """Adds nothing itself, as the tiny world's."""
    return make_tokenizer(adds_bos=False)


@pytest.fixture(scope="session")
def tokenizer_adding_bos():
    return make_tokenizer(adds_bos=True)


@pytest.fixture(scope="session")
def model():
    return make_model()


@pytest.fixture(scope="session", params=FAMILIES)
def any_model(request):
    return make_model(request.param, seed=1)


@pytest.fixture(scope="session")
def new_model():
    """The factory of models: family, seed, length."""
    return make_model


@pytest.fixture(params=["batched", "prefix"])
def scorer(request):
    """Each of the scorers."""
    return request.param
