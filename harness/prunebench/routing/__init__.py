"""What a router computes, as data (`convention`) and as pure functions of tensors (`gates`). No hooks, no models."""

from prunebench.routing.convention import Convention, Groups, convention_of
from prunebench.routing.gates import (
    RouterCall,
    Scale,
    Selection,
    gates_of,
    log_normaliser,
    mixture_shares,
    native_gates,
    native_index,
    reroute,
    runner_up,
    scores_and_choice,
    select_survivors,
)

__all__ = [
    "Convention",
    "Groups",
    "RouterCall",
    "Scale",
    "Selection",
    "convention_of",
    "gates_of",
    "log_normaliser",
    "mixture_shares",
    "native_gates",
    "native_index",
    "reroute",
    "runner_up",
    "scores_and_choice",
    "select_survivors",
]
