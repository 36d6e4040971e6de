"""What must not change mask or answers: the numbering of experts, tiny noise, other layers, how the text is cut."""

from __future__ import annotations

import copy

import torch

from prunebench.calibration import GradientStatistic, Statistic
from prunebench.conformance.cases import RENUMBERED, case, first_batch
from prunebench.conformance.left import same
from prunebench.conformance.registry import check
from prunebench.conformance.result import Fault, NotApplicable
from prunebench.conformance.subject import HALF, Subject, required
from prunebench.errors import UsageError
from prunebench.mask import Mask
from prunebench.method import LayerView
from prunebench.testing import measured, split_batch

__all__: list[str] = []

_FAR = 2e-2  # of the logits' spread: what two roundings may make of a fit


def _drawn(subject: Subject) -> bool:
    """Whether the mask depends on the generator, and so on ids."""
    return any(subject.mask(seed=seed) != subject.mask() for seed in (1, 2))


def _renumbered(mask: Mask) -> Mask:
    new_of_old = {old: new for new, old in enumerate(RENUMBERED)}
    layers = tuple(
        type(one)(one.index, one.experts, tuple(sorted(new_of_old[e] for e in one.pruned))) for one in mask.layers
    )
    return Mask(mask.model_shape, layers)


@check("metamorphic", of="mask", after=("same_seed",))
def check_tiny_noise(subject: Subject) -> None:
    """Weights moved by a millionth give the same mask: nothing is decided by rounding."""
    plain, noisy = subject.mask(), required(lambda: subject.mask("noisy"))
    if plain != noisy:
        raise Fault(
            f"mask {plain.digest}, with noise {noisy.digest}",
            where=case("noisy", subject.home).words,
            expected="the same mask: no scores tie here",
            fix="compare scores as they are, in float64; do not hash, round or take last digits",
        )


@check("metamorphic", of="mask", after=("same_seed", "tiny_noise"))
def check_renumbering(subject: Subject) -> None:
    """With its experts renumbered, a model loses the same experts."""
    if _drawn(subject):
        raise NotApplicable("the mask is drawn at random, by id")
    found, wanted = required(lambda: subject.mask("renumbered")), _renumbered(subject.mask())
    for one, other in zip(found.layers, wanted.layers, strict=True):
        if one != other:
            raise Fault(
                f"experts {one.pruned} go",
                where=f"layer {one.index} of {case('renumbered', subject.home).words}",
                expected=f"{other.pruned}, which are the experts that went before",
                fix="score an expert by what it computes, never by its id",
            )


@check("metamorphic", after=("same_seed", "runs_installed"))
def check_renumbered_answers(subject: Subject) -> None:
    """With its experts renumbered and the same ones gone, the pruned model computes the same."""
    plain, _ = subject.logits()
    found, _ = subject.logits("renumbered", mask=_renumbered(subject.mask()))
    spread = float(plain.std())
    if (far := float((plain - found).abs().max())) > _FAR * spread:
        raise Fault(
            f"logits differ by {far:.2g}, where their spread is {spread:.2g}",
            where=case("renumbered", subject.home).words,
            expected="the same up to rounding",
            fix="let an answer depend on what its expert computes, never on its id",
        )


@check("metamorphic", of="mask", after=("same_seed",))
def check_no_key_on_places(subject: Subject) -> None:
    """Layers of another index and another reported width lose the same experts."""
    mask, found = subject.mask(), subject.mask(change=_disguised)
    for one, other in zip(mask.layers, found.layers, strict=True):
        if one != other:
            raise Fault(
                f"experts {other.pruned} go where the layer is called {one.index + 7}, and its width doubled",
                where=f"layer {one.index}, whose statistics are the same",
                expected=f"{one.pruned}",
                fix="decide by statistics and weights; index and width tell models apart",
            )


class _Disguised(LayerView):
    """The same layer under another index and width."""

    @property
    def width(self) -> int:
        return 2 * super().width


def _disguised(view: LayerView) -> LayerView:
    twin = object.__new__(_Disguised)
    vars(twin).update(vars(view))
    shape = copy.copy(view.shape)
    object.__setattr__(shape, "index", view.index + 7)
    object.__setattr__(twin, "shape", shape)
    return twin


@check("metamorphic", of="mask", after=("same_seed",))
def check_independent_layers(subject: Subject) -> None:
    """Claimed by `independent_layers = True`: a layer loses the same experts when it is asked about alone."""
    if not type(subject.method).independent_layers:
        raise NotApplicable("it does not claim independent_layers = True")
    for layer, alone in zip(subject.mask().layers, subject.alone(), strict=True):
        if layer.pruned != alone.layers[0].pruned:
            raise Fault(
                f"experts {layer.pruned} go among all layers, {alone.layers[0].pruned} if it is the only one",
                where=f"layer {layer.index}, {HALF.to_json()}",
                expected="the same",
                fix="look at one layer at a time",
                instead="drop the claim independent_layers = True",
            )


def _own_statistics(subject: Subject) -> list[Statistic]:
    needs = (*subject.method.select_needs(), *subject.method.replace_needs())
    own = [one for one in needs if subject.is_own(type(one)) and not isinstance(one, GradientStatistic)]
    if not own:
        raise NotApplicable("it defines no statistic of tokens")
    return [copy.deepcopy(one) for one in own if not one.after]


@check("metamorphic", after=("runs",))
def check_statistics_only_look(subject: Subject) -> None:
    """A statistic of one's own leaves the batch as it was: the model goes on computing with it."""
    for statistic in _own_statistics(subject):
        batch = copy.deepcopy(first_batch(subject.home))
        before = copy.deepcopy(batch)
        measured(statistic, batch)
        for name, value in vars(before).items():
            if torch.is_tensor(value) and not same(value, getattr(batch, name)):
                raise Fault(
                    f"{type(statistic).__name__}.update changes {name}",
                    expected="a batch as it was",
                    fix="use operations without a trailing underscore",
                )


@check("metamorphic", after=("statistics_only_look",))
def check_statistics_merge(subject: Subject) -> None:
    """A statistic of one's own is the same in one batch, in three, and merged from two streams."""
    batch = first_batch(subject.home)
    parts = split_batch(batch, 5, 30)
    for statistic in _own_statistics(subject):
        whole, cut = measured(statistic, batch), measured(statistic, *parts)
        merged = measured(statistic, *parts[:2])
        try:
            merged.merge(measured(statistic, parts[2]))
        except UsageError as error:
            raise NotApplicable(str(error)) from error
        for other, how in ((cut, "in three batches"), (merged, "merged from two streams")):
            for name, value in whole.state.items():
                if not torch.allclose(value.double(), other.state[name].double(), rtol=1e-9, atol=1e-12):
                    raise Fault(
                        f"{type(statistic).__name__}'s {name} is another {how}",
                        expected="sums that add up, in float64 or int64",
                        fix="keep sums and counts, and divide in value()",
                        instead="raise a UsageError in merge, if the statistic cannot be merged",
                    )
