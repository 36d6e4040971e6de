"""Which tensors of a checkpoint's files an experts module's parameters are.

transformers fuses gate and up projections, and stacks experts, when it loads; files mostly name each on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prunebench.storage import Tensor, expert_of, layer_of, part_of

__all__ = ["edits_by_name"]

# Parameter of the experts module -> the parts that it is made of on its rows, by the last word of their names.
_PARTS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3"), ("gate_up_proj",), ("input_linear",)),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",), ("output_linear",)),
}


def edits_by_name(
    headers: Mapping[str, Tensor], index: int, experts: int, parameter: str
) -> tuple[dict[int, str], ...] | None:
    """The files' tensors that one parameter of an experts module is made of.

    Args:
        headers: of the checkpoint.
        index: of the layer.
        experts: E.
        parameter: its name in the experts module.

    Returns:
        For each part on its rows, in order: expert -> name of its tensor, the same for all experts if they are stacked.
        None if the files name it in a way that is not known.
    """
    own = [name for name in headers if layer_of(name) == index and part_of(name) == "experts"]
    by_word: dict[str, dict[int, str]] = {}
    for name in own:
        word = name.removesuffix(".weight").rpartition(".")[2]
        expert = expert_of(name)
        for one in range(experts) if expert is None else (expert,):
            by_word.setdefault(word, {})[one] = name
    for words in _PARTS.get(parameter, ()):
        if all(len(by_word.get(word, {})) == experts for word in words):
            return tuple(by_word[word] for word in words)
    return None
