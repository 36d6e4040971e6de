"""Gradients of a loss with respect to single experts' tensors, in the memory of one expert's.

A fused tensor's own gradient is as large as the tensor, and `eager` would make one per expert. So the experts module
runs without a graph, on its own code and kernel, and is differentiated by hand: a post-hook hands its output on as
that of an autograd function, whose backward runs one expert after the other, on that expert's rows and through a copy
of the module that holds this expert alone, and shows its gradients before it makes the next one's. No parameter of the
model requires a gradient meanwhile, and none is ever given one. Weight layout, biases, clamps and activations stay the
module's business, as everywhere (`moe.experts` says which tensors have a slice per expert).

Before a layer's first gradient is shown, what its single experts add up to is compared with what the module answered
(the self-test of 2610.41366 App. H.6).

T tokens, K slots per token, E experts, D width, S rows of one expert.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from prunebench.errors import IntegrityError, UsageError
from prunebench.moe.hooks import _LayerHooks
from prunebench.moe.layer import MoELayer, MoEModel

__all__ = ["SeeGradients", "SeeSlopes", "expert_gradients"]

SeeGradients = Callable[[MoELayer, int, Mapping[str, Tensor]], None]
SeeSlopes = Callable[[MoELayer, int, Tensor, Tensor], None]

# How torch says that an operation cannot be differentiated.
_NO_BACKWARD = re.compile(
    r"derivative|not implemented|autograd|does not require grad|requires_grad|inference tensor|inplace operation",
    re.IGNORECASE,
)


@contextmanager
def expert_gradients(
    moe: MoEModel, see: SeeGradients, see_slopes: SeeSlopes | None = None
) -> Iterator[Callable[[Tensor], None]]:
    """While entered, forwards of the model can be differentiated down to its experts; grad mode is on.

    Afterwards, also after an error, the model is as it was: its hooks are gone, every `requires_grad` is what it was,
    no gradient was written.

    Args:
        moe: the opened model, with nothing installed on it.
        see: called in the backward of each forward as `see(layer, expert, gradients)`, once for every expert that some
            token was routed to (every expert at all, where gates multiply the experts' input), with the gradient of
            each of its tensors by parameter name, in the weights' dtype. They are let go of afterwards.
        see_slopes: called right after it as `see_slopes(layer, expert, token_S, slope_S)`, with h·g·f of each of the
            expert's rows and the row's token: h is the loss's gradient with respect to the layer's routed output there,
            g·f what this expert adds to that. So a slope is the loss's change, to first order, by which the expert's
            part grows.

    Yields:
        A function that takes the loss of the latest forward and runs its backward.

    Raises:
        UsageError: float16; weights made in inference mode; something installed; an operation without a backward, or a
            layer that no gradient reaches.
        IntegrityError: single experts do not add up to what the module answers.
    """
    _check(moe, slopes=see_slopes is not None)
    with torch.inference_mode(mode=False), torch.enable_grad(), ExitStack() as undo:
        for parameter in moe.model.parameters():
            if parameter.requires_grad:
                undo.callback(parameter.requires_grad_, requires_grad=True)
                parameter.requires_grad_(requires_grad=False)
        layers = [_Differentiated(layer, see, see_slopes) for layer in moe.layers]
        for one in layers:
            undo.callback(one.layer.experts.register_forward_pre_hook(one.before).remove)
            undo.callback(one.layer.experts.register_forward_hook(one.after).remove)

        def backward(loss: Tensor) -> None:
            for one in layers:
                one.reached = False
            torch.autograd.backward(loss)
            for one in layers:
                if not one.reached:
                    raise _refused(moe, "no gradient reaches the experts", where=one.layer.name)

        try:
            yield backward
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not _NO_BACKWARD.search(str(error)):
                raise
            raise _refused(moe, str(error).strip().splitlines()[0], where="its forward or backward") from error


def _refused(moe: MoEModel, why: str, *, where: str) -> UsageError:
    return UsageError(
        f"{type(moe.model).__name__} cannot be differentiated: {why}",
        where=where,
        expected="kernels with a backward",
        fix="load it with others (--experts-implementation eager), or use what needs no gradients",
    )


def _check(moe: MoEModel, *, slopes: bool) -> None:
    """Refuse what could give wrong gradients, before anything is touched."""
    for name, parameter in moe.model.named_parameters():
        if parameter.is_inference():
            raise UsageError(
                "a weight was made in inference mode, so nothing can be differentiated through it",
                where=name,
                fix="load the model outside torch.inference_mode()",
            )
        if parameter.is_meta:
            raise UsageError("a weight is not in memory", where=name, expected="a model that fits on its devices")
    for layer in moe.layers:
        if slopes and layer.layout.takes == "all":
            raise UsageError(
                "the layer has no gate at an expert's output",
                where=layer.name,
                expected="a router whose gates multiply outputs",
                fix="use statistics of gradients of weights, such as Fisher",
            )
        for tensor in (getattr(layer.experts, name) for name in layer.layout.tensors):
            if tensor.dtype == torch.float16:
                raise UsageError(
                    "gradients vanish in float16", where=layer.name, expected="bfloat16 or float32", fix="give --dtype"
                )
        for hook in layer.experts._forward_hooks.values():  # noqa: SLF001  torch has no public list of hooks
            if isinstance(getattr(hook, "__self__", None), _LayerHooks):
                raise UsageError(
                    "something is installed on the layer", where=layer.name, expected="the model as it was opened"
                )


class _Differentiated:
    """One layer's experts, as an autograd function of their arguments.

    Args:
        layer: the layer.
        see: shown each expert's gradients.
        see_slopes: shown each expert's slopes, by row.
    """

    def __init__(self, layer: MoELayer, see: SeeGradients, see_slopes: SeeSlopes | None = None) -> None:
        self.layer, self.see, self.see_slopes = layer, see, see_slopes
        self.reached = False
        self._proven = False
        self._single = _single(layer)
        # Asks for a backward even where no argument does: nothing below the first layer needs one.
        self._anchor = torch.zeros((), requires_grad=True)
        self._args: tuple[Any, ...] = ()
        self.output: Tensor | None = None

    def before(self, _experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Keep the arguments, and let the module see them without their graph."""
        self._args = args
        return tuple(arg.detach() for arg in args)

    def after(self, _experts: nn.Module, _args: Any, output: Tensor) -> Tensor:
        """Hand the output on as the function's."""
        args, self._args, self.output = self._args, (), output.detach()
        answer: Tensor = _Experts.apply(self, self._anchor, *args)  # type: ignore[no-untyped-call]
        return answer

    def take_output(self) -> Tensor:
        """The module's output, once: the function must be the only one to hold it."""
        output, self.output = self.output, None
        assert output is not None
        return output

    @property
    def unproven(self) -> bool:
        """Whether the self-test is still to be done."""
        return not self._proven

    def backward(self, args: Sequence[Tensor], output: Tensor | None, delta: Tensor) -> tuple[Tensor | None, ...]:
        """Show every expert's gradients; returns those of the module's arguments.

        Args:
            args: as the module got them.
            output: what it answered, for the self-test; None once that is done.
            delta: the loss's gradient with respect to the output.
        """
        self.reached = True
        total = None if output is None else torch.zeros_like(output, dtype=_wide(output))
        if self.layer.layout.takes == "all":
            gradients = self._all(args[0], delta, total)
        else:
            gradients = self._slots(args[0], args[1], args[2], delta, total)
        if output is not None and total is not None:
            # Some modules add up in the dtype of the gates.
            eps = max(torch.finfo(part.dtype).eps for part in (output, *args) if part.is_floating_point())
            self._check_sum(output, total, eps)
        return gradients

    def _slots(
        self, x_TD: Tensor, index_TK: Tensor, gates_TK: Tensor, delta_TD: Tensor, total_TD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        dx_TD, dgates_TK = torch.zeros_like(x_TD, dtype=_wide(x_TD)), torch.zeros_like(gates_TK)
        for expert in index_TK.unique().tolist():
            token_S, slot_S = (index_TK == expert).nonzero(as_tuple=True)
            arguments = (x_TD[token_S], gates_TK[token_S, slot_S])
            y_SD, (dx_SD, dgates_S) = self._through(expert, arguments, delta_TD[token_S])
            # A token has an expert once, so rows are distinct and no atomics are needed.
            dx_TD[token_S] += dx_SD
            dgates_TK[token_S, slot_S] = dgates_S
            if self.see_slopes is not None and expert < self.layer.expert_count:
                # The output is Σ g·f, so the gradient of a gate is h·f.
                self.see_slopes(self.layer, expert, token_S, arguments[1] * dgates_S)
            if total_TD is not None:
                total_TD[token_S] += y_SD
        return dx_TD.to(x_TD.dtype), None, dgates_TK

    def _all(self, x_SD: Tensor, delta_SD: Tensor, total_SD: Tensor | None) -> tuple[Tensor | None, ...]:
        count, dx_SD = self.layer.expert_count, torch.empty_like(x_SD)
        for expert, (x_TD, delta_TD) in enumerate(zip(x_SD.chunk(count), delta_SD.chunk(count), strict=True)):
            rows = slice(expert * len(x_TD), (expert + 1) * len(x_TD))
            y_TD, (dx_SD[rows],) = self._through(expert, (x_TD,), delta_TD)
            if total_SD is not None:
                total_SD[rows] = y_TD
        return (dx_SD,)

    def _through(
        self, expert: int, arguments: tuple[Tensor, ...], delta_SD: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What one expert adds to its rows, and the gradients of its arguments; shows those of its tensors."""
        own = expert < self.layer.expert_count
        names = self.layer.layout.tensors if own else ()
        leaves = tuple(argument.detach().requires_grad_() for argument in arguments)
        with torch.enable_grad():
            weights = [getattr(self.layer.experts, n).detach()[expert : expert + 1].requires_grad_() for n in names]
            # An identity expert has nothing but its gate.
            y_SD = self._single_answer(names, weights, leaves) if own else leaves[0] * leaves[1][:, None]
            y_SD = y_SD.to(delta_SD.dtype)
        found = torch.autograd.grad(y_SD, (*leaves, *weights), delta_SD)
        if own:
            self.see(self.layer, expert, {n: g[0] for n, g in zip(names, found[len(leaves) :], strict=True)})
        return y_SD.detach(), found[: len(leaves)]

    def _single_answer(self, names: Sequence[str], weights: Sequence[Tensor], leaves: tuple[Tensor, ...]) -> Tensor:
        self._single._parameters.update(zip(names, weights, strict=True))  # type: ignore[arg-type] # noqa: SLF001
        try:
            answer: Tensor = self._single.forward(*self._single_arguments(*leaves))
        finally:
            self._single._parameters.update(dict.fromkeys(names))  # noqa: SLF001
        return answer

    def _single_arguments(self, x_SD: Tensor, gates_S: Tensor | None = None) -> tuple[Tensor, ...]:
        """The copy's arguments: its one expert in every slot, at these gates."""
        if gates_S is None:
            return (x_SD,)
        gates_SK, index_SK = gates_S[:, None], torch.zeros(len(x_SD), 1, dtype=torch.int64, device=x_SD.device)
        if self.layer.layout.takes == "slots":
            return x_SD, index_SK, gates_SK
        # The second slot weighs nothing: an identity expert, whose ids follow, if there is one.
        other_SK = index_SK + bool(self.layer.convention.identities)
        return x_SD, torch.cat([index_SK, other_SK], 1), torch.cat([gates_SK, torch.zeros_like(gates_SK)], 1)

    def _check_sum(self, output: Tensor, total: Tensor, eps: float) -> None:
        error, size = float((total - output).norm()), float(output.norm())
        if not error <= eps**0.5 * size:
            raise IntegrityError(
                f"single experts add up to something else (relative difference {error / max(size, 1e-300):.2g})",
                where=self.layer.name,
                expected="the experts module's own answer",
                fix="correct the module's row in prunebench/moe/experts.py",
            )
        self._proven = True


class _Experts(torch.autograd.Function):
    """The experts module, differentiated by `_Differentiated.backward`."""

    @staticmethod
    def forward(ctx: Any, runner: _Differentiated, _anchor: Tensor, *args: Tensor) -> Tensor:
        """The module's answer, which it has given already."""
        ctx.runner = runner
        ctx.save_for_backward(*args)
        output = runner.take_output()
        # The model may add to its output in place, so what is compared is a copy.
        ctx.output = output.clone() if runner.unproven else None
        return output

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        """Expert by expert."""
        output, ctx.output = ctx.output, None
        return (None, None, *ctx.runner.backward(ctx.saved_tensors, output, delta))


class _Eager:
    """A config that asks for the readable implementation: every operation of it has a backward.

    Args:
        config: everything else.
    """

    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _single(layer: MoELayer) -> nn.Module:
    """A copy of the experts module with room for one expert, and its tensors still to be put in."""
    experts = copy.copy(layer.experts)
    own = vars(experts)
    own["_parameters"] = {**layer.experts._parameters, **dict.fromkeys(layer.layout.tensors)}  # noqa: SLF001
    # What others (accelerate) put on the instance would call the module that it was put on.
    own.pop("forward", None)
    setattr(experts, layer.layout.count, 1)
    if layer.layout.total is not None:
        setattr(experts, layer.layout.total, 1 + layer.convention.identities)
    if "config" in own:
        own["config"] = _Eager(own["config"])
    return experts


def _wide(tensor: Tensor) -> torch.dtype:
    """What many terms are added up in."""
    return torch.promote_types(tensor.dtype, torch.float32)
