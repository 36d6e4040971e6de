"""One uniform view over the MoE layers of a transformers model, and the only hooks that touch it."""

from prunebench.moe.batch import Promoted, TokenBatch
from prunebench.moe.gradients import SeeGradients, expert_gradients
from prunebench.moe.hooks import Instrument, LayerCounters, LayerProgram
from prunebench.moe.inspect import ModelReport, inspect_model
from prunebench.moe.layer import MoELayer, MoEModel, open_model
from prunebench.moe.load import (
    LoadedModel,
    check_device,
    context_length,
    experts_implementation_for,
    load_model,
    load_tokenizer,
    peek,
    quiet_libraries,
    weights_sha256,
)

__all__ = [
    "Instrument",
    "LayerCounters",
    "LayerProgram",
    "LoadedModel",
    "MoELayer",
    "MoEModel",
    "ModelReport",
    "Promoted",
    "SeeGradients",
    "TokenBatch",
    "check_device",
    "context_length",
    "expert_gradients",
    "experts_implementation_for",
    "inspect_model",
    "load_model",
    "load_tokenizer",
    "open_model",
    "peek",
    "quiet_libraries",
    "weights_sha256",
]
