"""A model's decoder layers, run a stretch at a time over given hidden states, and the proof that this changes no bit.

A stretch is run by the model's own forward: it embeds the batch and makes every argument that a layer takes (masks by
layer type, positions, token ids, whatever it may be), the layers before the stretch are stood in for by functions that
hand on what they get, the stretch's first layer gets the given hidden states instead, and the forward is left as soon
as its last layer has answered. So no argument is remembered, copied or understood here, and uneven or padded batches
are nothing special. What this cannot do is run a layer that reads what another layer left behind (a shared key-value
store, an attribute): `prove` finds out, and says which layer.

B blocks, L tokens per block, D width. Hidden states are [B, L, D] in most models, but may be any tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from prunebench.errors import IntegrityError, UsageError
from prunebench.moe.layer import MoEModel

__all__ = ["LAST_TOKEN", "DecoderStack", "Proof", "decoder_layers", "prove", "watch_decoder_layers"]

Batch = Mapping[str, Tensor]

# `logits_to_keep` where nobody wants logits. As an index: told the number 1, Gemma-4 drops the other tokens' hidden
# states in the layers that share keys and values.
LAST_TOKEN = torch.tensor([-1])

# What a layer raises that misses something which another layer should have left for it.
_SAYS_NO = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class _Left(BaseException):
    """A forward was left, on purpose, with these hidden states: no error, so that no `except Exception` swallows it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True)
class DecoderStack:
    """The decoder layers that a model's forward calls, in the order in which it calls them: each once.

    Args:
        model: the causal language model.
        layers: position -> layer; positions are the numbers in module paths.
        arities: position -> length of the tuple that the layer returns, hidden states first, or None for a tensor.
    """

    model: Any
    layers: tuple[nn.Module, ...]
    arities: tuple[int | None, ...]

    def run(self, batch: Batch, first: int, last: int, hidden: Tensor | None = None) -> Tensor:
        """The hidden states after layer `last`, from those before layer `first`.

        Args:
            batch: the model's keyword arguments: `input_ids` and whatever goes with them, on the model's device.
            first: position of the first layer that runs.
            last: position of the last one.
            hidden: the hidden states before `first`, anywhere; a copy goes to the layer. None takes the model's own,
                which are right for position 0 only.

        Raises:
            IntegrityError: if the forward ended without calling layer `last`.
        """
        with self._starting(first, hidden) as undo:
            undo.callback(self.layers[last].register_forward_hook(_leave).remove)
            try:
                self.model(**batch, use_cache=False)
            except _Left as left:
                return left.hidden
        raise IntegrityError(
            f"the forward did not call decoder layer {last}",
            where=type(self.layers[last]).__name__,
            expected="every layer to be called in every forward",
        )

    def logits(self, batch: Batch, first: int, hidden: Tensor | None = None) -> Tensor:
        """The model's logits, from the hidden states before layer `first`; arguments as for `run`."""
        with self._starting(first, hidden):
            logits: Tensor = self.model(**batch, use_cache=False).logits
        return logits

    @contextmanager
    def _starting(self, first: int, hidden: Tensor | None) -> Iterator[ExitStack]:
        """While entered, the model's forward begins at layer `first`, with these hidden states."""
        with ExitStack() as undo:
            for layer, arity in zip(self.layers[:first], self.arities, strict=False):
                undo.enter_context(_stood_in(layer, arity))
            if hidden is not None:
                # Before the hooks of others, which then see the layer's true input.
                enter = self.layers[first].register_forward_pre_hook(_given(hidden), prepend=True, with_kwargs=True)
                undo.callback(enter.remove)
            yield undo


def _hidden_of(output: Any) -> Tensor:
    hidden = output[0] if isinstance(output, tuple) else output
    assert isinstance(hidden, Tensor)
    return hidden


def _first_of(kwargs: Mapping[str, Any]) -> str:
    """The name of the hidden states among the arguments of a layer that is called without positional ones."""
    return "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))


def _leave(_layer: nn.Module, _args: Any, output: Any) -> None:
    raise _Left(_hidden_of(output))


def _given(hidden: Tensor) -> Any:
    """A pre-hook that puts `hidden` in the place of the layer's first argument."""

    def enter(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        name = None if args else _first_of(kwargs)
        old = args[0] if name is None else kwargs[name]
        # A copy: a layer may work in place, and the next visit needs what this one got.
        new = hidden.to(old.device, copy=True)
        return ((new, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: new})

    return enter


@contextmanager
def _stood_in(layer: nn.Module, arity: int | None) -> Iterator[None]:
    """While entered, the layer hands on its first argument and computes nothing."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs[_first_of(kwargs)]
        return hidden if arity is None else (hidden, *[None] * (arity - 1))

    # Others (accelerate) put a forward of their own on the instance too.
    before = vars(layer).get("forward")
    setattr(layer, "forward", forward)  # noqa: B010  the type of a module's attribute is Tensor | Module
    try:
        yield
    finally:
        if before is None:
            delattr(layer, "forward")
        else:
            setattr(layer, "forward", before)  # noqa: B010  the same


@dataclass(frozen=True)
class Proof:
    """Whether a model's decoder layers, called one at a time, give the full forward's hidden states bit for bit.

    Args:
        streamed: they do, and were run so; else every layer took a forward of its own, from the embeddings on.
        reason: why they do not; empty where they do.
        layers: decoder layers after which hidden states were compared.
        tokens: tokens that were compared after each.
    """

    streamed: bool
    reason: str
    layers: int
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """As it goes into a record."""
        return asdict(self)


@dataclass
class _Trace:
    """What a full forward showed of the decoder layers: positions called, arities, digests of their outputs."""

    called: list[int]
    arities: list[int | None]
    digests: list[bytes]


@torch.inference_mode()
def prove(moe: MoEModel, batch: Batch) -> tuple[DecoderStack | None, Proof]:
    """Find the decoder layers and run them one at a time on a batch, next to the full forward.

    Hidden states are compared after every layer, by digest, so that the proof takes no memory per layer. The batch goes
    along with a decoy, the same ids in reverse: each layer runs on both before the next one does, as in a real pass,
    so a layer that reads what another one left behind finds the decoy's.

    Args:
        moe: the opened model, with whatever is installed on it.
        batch: the model's keyword arguments, on its device.

    Returns:
        The stack and the proof. The stack is None if the layers are not called once each, in order: then nothing but
        the whole forward can be run.
    """
    decoy = {**batch, "input_ids": batch["input_ids"].flip(1)}
    layers, _, reason = decoder_layers(moe)
    if reason:
        return None, Proof(streamed=False, reason=reason, layers=0, tokens=0)
    traces = [_trace(moe.model, layers, one) for one in (batch, decoy)]
    called = traces[0].called
    if called != list(range(len(called))) or len(called) <= max(layer.index for layer in moe.layers):
        reason = f"the full forward calls the decoder layers in the order {', '.join(map(str, called))}"
        return None, Proof(streamed=False, reason=reason, layers=0, tokens=0)
    stack = DecoderStack(moe.model, layers[: len(called)], tuple(traces[0].arities))
    tokens = int(batch["input_ids"].numel())
    hidden: list[Tensor | None] = [None, None]
    for position, layer in enumerate(stack.layers):
        for number, one in enumerate((batch, decoy)):
            where = f"decoder layer {position} ({type(layer).__name__})"
            try:
                after = stack.run(one, position, position, hidden[number])
            except torch.OutOfMemoryError:
                raise
            except _SAYS_NO as error:
                reason = f"{where} cannot be called alone: {type(error).__name__}: {error}"
                return stack, Proof(streamed=False, reason=reason, layers=position, tokens=tokens)
            if _digest(after) != traces[number].digests[position]:
                reason = f"{where}, called alone, gives other hidden states than in the full forward"
                return stack, Proof(streamed=False, reason=reason, layers=position, tokens=tokens)
            hidden[number] = after
    return stack, Proof(streamed=True, reason="", layers=len(stack.layers), tokens=tokens)


def decoder_layers(moe: MoEModel) -> tuple[tuple[nn.Module, ...], str, str]:
    """The modules of the list that all MoE layers stand in, and the list's path; or why there is none."""
    paths = set()
    for layer in moe.layers:
        match = re.search(r"layers(?=\.\d+(\.|$))", layer.name)
        assert match is not None  # `find_layers` numbered them by it
        paths.add(layer.name[: match.end()])
    if len(paths) > 1:
        return (), "", f"the MoE layers stand in several lists: {', '.join(sorted(paths))}"
    path = paths.pop()
    return tuple(moe.model.get_submodule(path).children()), path, ""


@contextmanager
def watch_decoder_layers(moe: MoEModel, see: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
    """While entered, show `see` every decoder layer's position and the hidden states before and after it.

    Raises:
        UsageError: for a model whose MoE layers stand in several lists.
    """
    layers, _, reason = decoder_layers(moe)
    if reason:
        raise UsageError(reason, expected="one list of decoder layers")

    def watch(position: int) -> Any:
        def after(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            before = args[0] if args else kwargs[_first_of(kwargs)]
            see(position, before, _hidden_of(output))

        return after

    with ExitStack() as undo:
        for position, layer in enumerate(layers):
            undo.callback(layer.register_forward_hook(watch(position), with_kwargs=True).remove)
        yield


def _trace(model: Any, layers: tuple[nn.Module, ...], batch: Batch) -> _Trace:
    """Run the full forward, but for what follows the decoder layers, and take down what they do."""
    trace = _Trace([], [], [])

    def note(position: int) -> Any:
        def after(_layer: nn.Module, _args: Any, output: Any) -> None:
            trace.called.append(position)
            trace.arities.append(len(output) if isinstance(output, tuple) else None)
            trace.digests.append(_digest(_hidden_of(output)))

        return after

    with ExitStack() as undo:
        for position, layer in enumerate(layers):
            undo.callback(layer.register_forward_hook(note(position)).remove)
        model(**batch, use_cache=False, logits_to_keep=LAST_TOKEN)
    return trace


def _digest(hidden: Tensor) -> bytes:
    """sha256 of a tensor's bytes."""
    return sha256(hidden.contiguous().cpu().view(torch.uint8).numpy().data).digest()
