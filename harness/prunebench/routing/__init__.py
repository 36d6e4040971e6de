"""What a router computes, as data (`convention`) and as pure functions of tensors (`gates`). No hooks, no models."""

from prunebench.routing.convention import Convention, Groups, convention_of
from prunebench.routing.gates import RouterCall, Scale, native_gates, native_index, reroute, scores_and_choice

__all__ = [
    "Convention",
    "Groups",
    "RouterCall",
    "Scale",
    "convention_of",
    "native_gates",
    "native_index",
    "reroute",
    "scores_and_choice",
]
