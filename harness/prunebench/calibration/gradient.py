"""The gradient pass: one backward per sequence of its mean next-token loss, every expert's gradient on its own.

Loss and gradient are those of one sequence at a time, so a statistic is over sequences, and a sequence's part in it
does not depend on the others. Labels are the text's (the empirical Fisher) or drawn from the model's own distribution
(the true one); a statistic says which. Gradients exist for one expert at a time (`moe.gradients`) and the graph for one
sequence. A pass is cached by content, as a score pass is.

L tokens per sequence, E experts, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from prunebench.calibration.base import Statistic
from prunebench.calibration.score import Progress, ScoreResult, started
from prunebench.calibration.statistics import Float64
from prunebench.calibration.text import CalibrationTokens
from prunebench.errors import UsageError
from prunebench.moe import MoELayer, MoEModel, TokenBatch, expert_gradients

__all__ = ["Fisher", "GradientStatistic", "SlopeProducts", "TrueFisher", "gradient_pass", "split_gradient"]

Labels = Callable[[Tensor, Tensor], Tensor]

# Positions whose distributions over the vocabulary are in float64 at a time.
_POSITIONS = 128
# Numbers of a gradient that are in float64 at a time, on CPU.
_PIECE = 2**17


class GradientStatistic(Statistic):
    """A statistic of experts' gradients; `add` sees them one expert and sequence at a time.

    An expert that no token of a sequence was routed to is not shown (its gradient is zero), but the sequence counts.
    """

    measured_in = "gradient"

    @abstractmethod
    def add(self, expert: int, gradients: Mapping[str, Tensor]) -> None:
        """Add one sequence's gradient of one expert, by parameter name; copy what is to be kept of it."""

    def add_slopes(self, expert: int, token_S: Tensor, slope_S: Tensor) -> None:
        """Add one sequence's h·g·f of one expert, by row, with each row's token (`moe.gradients.expert_gradients`)."""
        del expert, token_S, slope_S

    def end_sequence(self, tokens: int) -> None:
        """A sequence of so many tokens is done."""
        del tokens

    def label_seed(self) -> int | None:
        """The seed by which labels are drawn from the model's own distribution; None takes the text's."""
        return None

    def update(self, batch: TokenBatch) -> None:
        """Not of tokens."""
        raise UsageError(
            f"statistic {self.name!r} is of gradients", where="a pass of forwards", fix="measure it by gradient_pass"
        )


class Fisher(GradientStatistic):
    """F_e [E]: ‖∇_e ℓ‖² averaged over ALL sequences; ℓ is a sequence's MEAN next-token loss over its L - 1 predictions.

    ∇_e is the gradient with respect to all of the expert's own tensors (its three matrices, and biases if it has any);
    a sequence that is not routed to e adds zero and counts. Labels are the text's, so this is the empirical Fisher. It
    depends on L: the squared norm of a mean gradient is not the mean of per-token ones.

    Source: Yoon & Choi 2026 (COMPEL), Eq. 5, in the form of 2610.41366 App. H.6.
    """

    name: ClassVar[str] = "fisher"

    def start(self, experts: int, width: int, device: torch.device) -> None:
        """No sequences."""
        del width
        self.state = {
            "sum_E": torch.zeros(experts, dtype=torch.float64, device=device),
            "sequences": torch.zeros((), dtype=torch.int64),
            "length": torch.zeros((), dtype=torch.int64),
        }

    def add(self, expert: int, gradients: Mapping[str, Tensor]) -> None:
        """‖∇‖², accumulated in float64."""
        for gradient in gradients.values():
            self.state["sum_E"][expert] += _squared_norm(gradient)

    def end_sequence(self, tokens: int) -> None:
        """Count it."""
        self._check_length(tokens)
        self.state["sequences"] += 1

    def merge(self, other: Statistic) -> None:
        """Add another stream of sequences of the same length."""
        if int(other.state["sequences"]):
            self._check_length(int(other.state["length"]))
            self.state["sum_E"] = self.state["sum_E"] + other.state["sum_E"].to(self.state["sum_E"].device)
            self.state["sequences"] = self.state["sequences"] + other.state["sequences"]

    def _check_length(self, tokens: int) -> None:
        length = int(self.state["length"])
        if length not in (0, tokens):
            raise UsageError(
                f"a sequence of {tokens} tokens among those of {length}", where=self.name, expected="equal lengths"
            )
        self.state["length"] = torch.tensor(tokens)

    def value(self) -> Float64:
        """F_e."""
        mean_E: Float64 = (self.state["sum_E"] / self.state["sequences"].clamp(min=1)).numpy()
        return mean_E


class TrueFisher(Fisher):
    """`Fisher` with each label drawn from the model's own distribution at its position: the true Fisher.

    Args:
        seed: of the draws; each sequence has its own, whatever came before it.
    """

    name: ClassVar[str] = "true_fisher"

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        if seed < 0:
            raise UsageError(f"seed {seed} is impossible", where=self.name, expected="0 or more")
        self.seed = seed

    def label_seed(self) -> int | None:
        """Draws."""
        return self.seed


class SlopeProducts(GradientStatistic):
    """F_ij [E, E]: Σ over the tokens routed to i and j of (h·g_i·f_i)(h·g_j·f_j), averaged over sequences.

    h is the gradient, at the layer's routed output of that token, of the sequence's mean next-token loss. With labels
    drawn from the model, E[hhᵀ] is the Fisher information there, and Σ_{i,j∈P} F_ij the expected squared change of the
    loss, token by token and to first order, by which the outputs of P vanish: `ResidualProducts` of deletion with the
    inner product of the Fisher in the place of the Euclidean one.

    Args:
        seed: of the drawn labels; None takes the text's (the empirical Fisher).

    Source: 2610.41366 App. E.6 in words; the formula is ours.
    """

    name: ClassVar[str] = "slope_products"

    def __init__(self, seed: int | None = 0) -> None:
        super().__init__()
        if seed is not None and seed < 0:
            raise UsageError(f"seed {seed} is impossible", where=self.name, expected="0 or more")
        self.seed = seed
        self._rows: list[tuple[int, Tensor, Tensor]] = []

    def label_seed(self) -> int | None:
        """Draws, or takes the text's."""
        return self.seed

    def start(self, experts: int, width: int, device: torch.device) -> None:
        """No sequences."""
        del width
        self.state = {
            "sum_EE": torch.zeros(experts, experts, dtype=torch.float64, device=device),
            "sequences": torch.zeros((), dtype=torch.int64),
        }

    def add(self, expert: int, gradients: Mapping[str, Tensor]) -> None:
        """Not of weights."""
        del expert, gradients

    def add_slopes(self, expert: int, token_S: Tensor, slope_S: Tensor) -> None:
        """Wait for the sequence's other experts."""
        self._rows.append((expert, token_S, slope_S.detach().double()))

    def end_sequence(self, tokens: int) -> None:
        """Add the products of its tokens."""
        sum_EE = self.state["sum_EE"]
        slope_TE = sum_EE.new_zeros(tokens, len(sum_EE))
        for expert, token_S, slope_S in self._rows:
            slope_TE[token_S, expert] = slope_S
        self._rows = []
        self.state["sum_EE"] = sum_EE + slope_TE.T @ slope_TE
        self.state["sequences"] = self.state["sequences"] + 1

    def value(self) -> Float64:
        """F_ij."""
        mean_EE: Float64 = (self.state["sum_EE"] / self.state["sequences"].clamp(min=1)).numpy()
        return mean_EE


def split_gradient(statistics: Sequence[Statistic]) -> tuple[tuple[Statistic, ...], tuple[GradientStatistic, ...]]:
    """Statistics as those of other passes and those of a gradient pass.

    Raises:
        UsageError: one that says it is measured in gradients and has no `add`, or comes after others.
    """
    gradient: list[GradientStatistic] = []
    for one in statistics:
        if one.measured_in != "gradient":
            continue
        if not isinstance(one, GradientStatistic):
            raise UsageError(
                f"statistic {one.name!r} cannot be shown gradients",
                where=type(one).__name__,
                expected="a subclass of prunebench.GradientStatistic",
            )
        if one.after:
            raise UsageError(
                f"statistic {one.name!r} comes after {', '.join(one.after)}",
                where="a gradient pass, which sees each sequence once",
            )
        gradient.append(one)
    return tuple(one for one in statistics if one.measured_in != "gradient"), tuple(gradient)


@torch.inference_mode(mode=False)
def gradient_pass(
    moe: MoEModel,
    tokens: CalibrationTokens,
    statistics: Sequence[GradientStatistic],
    *,
    progress: Progress | None = None,
) -> ScoreResult:
    """Collect statistics of every expert's gradients, sequence by sequence.

    One forward and one backward per block and kind of labels. The model is left as it was, its parameters'
    `requires_grad` included.

    Args:
        moe: the opened model, with nothing installed on it.
        tokens: the blocks, one sequence each.
        statistics: fresh instances; one copy per layer is accumulated on the layer's device.
        progress: called with (blocks done, blocks in total).

    Raises:
        UsageError: a statistic of another pass, a model that cannot be differentiated, logits or gradients that are not
            finite.
        IntegrityError: single experts do not add up to what the experts module answers.
    """
    others, statistics = split_gradient(statistics)
    if others:
        raise UsageError(f"statistic {others[0].name!r} is not of gradients", where="a gradient pass")
    layers = started(moe, statistics)
    kinds = list(dict.fromkeys(one.label_seed() for one in statistics))
    blocks = tokens.ids_BL.shape[0]
    for seed in kinds:
        names = [one.name for one in statistics if one.label_seed() == seed]
        running = {index: [members[name] for name in names] for index, members in layers.items()}

        def see(
            layer: MoELayer,
            expert: int,
            gradients: Mapping[str, Tensor],
            running: Mapping[int, list[GradientStatistic]] = running,
        ) -> None:
            for one in running[layer.index]:
                one.add(expert, gradients)

        def see_slopes(
            layer: MoELayer,
            expert: int,
            token_S: Tensor,
            slope_S: Tensor,
            running: Mapping[int, list[GradientStatistic]] = running,
        ) -> None:
            for one in running[layer.index]:
                one.add_slopes(expert, token_S, slope_S)

        sloped = any(type(o).add_slopes is not GradientStatistic.add_slopes for of in running.values() for o in of)
        with expert_gradients(moe, see, see_slopes if sloped else None) as backward:
            for block in range(blocks):
                # A copy made here: ids made in inference mode cannot be labels.
                ids_L = tokens.ids_BL[block].clone().to(moe.input_device)
                backward(_mean_loss(moe, ids_L, seed))
                for one in (one for members in running.values() for one in members):
                    one.end_sequence(int(ids_L.numel()))
                if progress is not None and seed == kinds[-1]:
                    progress(block + 1, blocks)
    for layer in moe.layers:
        _finish(layer, layers[layer.index])
    return ScoreResult(tokens.ids_BL.numel(), layers)


def _finish(layer: MoELayer, statistics: Mapping[str, GradientStatistic]) -> None:
    """Bring the statistics to the host; refuse what is not finite."""
    for name, one in statistics.items():
        one.to_host()
        if not all(part.isfinite().all() for part in one.state.values()):
            raise UsageError(
                f"gradients are not finite (statistic {name!r})",
                where=layer.name,
                expected="a loss and weights of ordinary size",
                fix="use --dtype float32",
            )


def _mean_loss(moe: MoEModel, ids_L: Tensor, seed: int | None) -> Tensor:
    """Mean next-token loss of one sequence, in float32 or, for a float64 model, float64."""
    logits_LV = moe.model(input_ids=ids_L[None], use_cache=False).logits[0, :-1]
    logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
    if not bool((logits_LV < torch.inf).all()):  # NaN is not either; −∞ is a word that cannot be said
        raise UsageError(
            "the model's logits are not finite", where="a gradient pass", expected="numbers", fix="use --dtype float32"
        )
    labels_L = ids_L[1:].to(logits_LV.device)
    if seed is not None:
        labels_L = _drawn(logits_LV.detach(), np.random.default_rng([seed, *_digest(ids_L)]))
    return functional.cross_entropy(logits_LV, labels_L)


def _squared_norm(gradient: Tensor) -> Tensor:
    """‖g‖², in float64."""
    if gradient.device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        return norm.square()
    # Dot products of pieces: a third of the time of a norm in another dtype, and no float64 copy of the whole.
    pieces = (piece.double() for piece in gradient.reshape(-1).split(_PIECE))
    return torch.stack([piece.dot(piece) for piece in pieces]).sum()


def _digest(ids_L: Tensor) -> list[int]:
    """A sequence's own part of the seed: its labels are the same in any pass."""
    return list(sha256(ids_L.cpu().numpy().tobytes()).digest())


def _drawn(logits_LV: Tensor, rng: np.random.Generator) -> Tensor:
    """One label per position, by inverting the cumulative distribution: numbers do not depend on the device."""
    uniform_L = torch.from_numpy(rng.random(len(logits_LV))).to(logits_LV.device)
    labels = []
    for piece_LV, uniform in zip(logits_LV.split(_POSITIONS), uniform_L.split(_POSITIONS), strict=True):
        cumulative_LV = piece_LV.double().softmax(-1).cumsum(-1)
        # The total is one but for rounding; scaled by it, no label is beyond the last that has a probability.
        labels.append(torch.searchsorted(cumulative_LV, uniform[:, None] * cumulative_LV[:, -1:], right=True)[:, 0])
    return torch.cat(labels)
