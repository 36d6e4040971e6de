"""The fit pass: one MoE layer after the other over cached hidden states, in one layer's memory and one forward in all.

`stream_layers` brings the hidden states of the whole text before a layer, hands the layer to `work` as a `LayerVisit`,
and goes on to the next. Within `work` the layer may be visited any number of times; every visit shows the same batches,
bit for bit. What `work` returns is all that remains of the layer, so memory does not grow with depth: two buffers of
hidden states (the layer's inputs, and its outputs, kept at the first visit), and whatever `work` holds. With a
`Checkpoint` each finished layer is saved, and a rerun goes on behind it: hidden states are derived again, by one plain
forward through the finished layers, rather than kept on disk.

The decoder layers are run one at a time by `moe.decoder`, once that was proven on the first blocks of the text to
change no bit. A model that fails the proof gets a forward from the embeddings on for each visit instead; the result
says which it was, and why. Not here: gradients, and what is done with the statistics.

B blocks, L tokens per block, T tokens, E experts, S rows.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from prunebench.calibration.base import Statistic, sum_by_expert
from prunebench.calibration.score import ScoreResult, batches_of, check_slots, identity_slots
from prunebench.calibration.statistics import Count
from prunebench.calibration.text import CalibrationTokens
from prunebench.errors import IntegrityError, UsageError
from prunebench.mask import canonical_json, write_atomically
from prunebench.moe import Instrument, LayerProgram, MoELayer, MoEModel, TokenBatch
from prunebench.moe.decoder import LAST_TOKEN, Batch, Proof, prove

__all__ = [
    "Checkpoint",
    "FitResult",
    "LayerVisit",
    "StreamResult",
    "fit_pass",
    "only_experts",
    "stream_layers",
]

Buffers = Literal["host", "device"] | Path
Kept = Mapping[str, Tensor]
Work = Callable[["LayerVisit"], Kept]
Change = Callable[[MoELayer, Kept], LayerProgram | None]
See = Callable[[TokenBatch], None]
Progress = Callable[[str, int, int], None]

PROOF_BLOCKS = 2


@dataclass(frozen=True)
class Checkpoint:
    """Where a pass saves each finished layer, so that a killed one goes on from there.

    Args:
        folder: one file per layer.
        key: everything that the numbers depend on: weights, text, what is measured. Files of another key are as if
            absent.
    """

    folder: Path
    key: str

    def path(self, index: int) -> Path:
        """The file of a layer."""
        return self.folder / f"layer-{index}.safetensors"

    def write(self, index: int, kept: Kept) -> None:
        """Save a finished layer, atomically."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in kept.items()}
        write_atomically(self.path(index), save(tensors, metadata={"key": self.key}))

    def read(self, index: int) -> dict[str, Tensor] | None:
        """A finished layer; None if there is none of this key, or its file is damaged."""
        try:
            with safe_open(self.path(index), framework="pt") as file:
                if (file.metadata() or {}).get("key") != self.key:
                    return None
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        except (OSError, SafetensorError):
            return None

    def forget(self) -> None:
        """Remove what was saved, once it is of no use any more."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class StreamResult:
    """What remains of a streamed pass.

    Args:
        tokens: T, tokens seen by each visit, padding excluded.
        layers: layer index -> what `work` returned, on the host where it was read back.
        proof: whether the layers were streamed, and why not.
        resumed: layers that an earlier, killed pass had finished.
    """

    tokens: int
    layers: Mapping[int, Kept]
    proof: Proof
    resumed: tuple[int, ...]


@dataclass(frozen=True)
class FitResult:
    """The statistics of a fit pass, and how it went.

    Args:
        scores: as a score pass gives them, of the layers that were asked for.
        proof: whether the layers were streamed, and why not.
        resumed: layers that an earlier, killed pass had finished.
    """

    scores: ScoreResult
    proof: Proof
    resumed: tuple[int, ...]


class LayerVisit:
    """One MoE layer with the whole text before it: the layer may be visited any number of times.

    Args:
        layer: the layer.
        tokens: T, padding excluded.
        blocks: B, over all batches.
        batches: how many there are.
        program: what the layer runs while it is visited, or None if it runs as it is.
        gate_squares_E: Σ g² over each expert's rows that the first visit showed, float64; None before it.
    """

    def __init__(self, engine: _Engine, layer: MoELayer) -> None:
        self.layer = layer
        self.tokens, self.blocks, self.batches = engine.tokens, engine.blocks, len(engine.batches)
        self.program = engine.programs.get(layer.index)
        self.visits = 0
        self.gate_squares_E: Tensor | None = None
        self._engine = engine

    def observe(self, see: See | None, *, experts: Collection[int] | None = None) -> None:
        """Visit once: `see` gets every batch, in order, padding removed, with its block numbers.

        Args:
            see: called in inference mode; None just runs the layer, under hooks of the caller's own.
            experts: show only the rows of these (see `only_experts`).

        Raises:
            IntegrityError: if the layer did not run its router and experts as modules.
        """
        self.visits += 1
        if see is not None and self.visits == 1:
            see = self._weighing(see)
        if see is not None and experts is not None:
            see = _restricted(see, experts, self.layer)
        self._engine.visit(self.layer, see, self.visits)

    def _weighing(self, see: See) -> See:
        """`see`, with every batch's squared gates added up on the way."""

        def both(batch: TokenBatch) -> None:
            squares_E = sum_by_expert(batch.gates_S.double().square(), batch).cpu()
            self.gate_squares_E = squares_E if self.gate_squares_E is None else self.gate_squares_E + squares_E
            see(batch)

        return both

    def measure(
        self, statistics: Sequence[Statistic], *, experts: Collection[int] | None = None
    ) -> dict[str, Statistic]:
        """Visit as often as `after` asks for, and finish statistics, on the host.

        Args:
            statistics: fresh instances; copies of them are accumulated on the layer's device.
            experts: count only the rows of these.

        Raises:
            UsageError: two of one name, or an `after` that is not among them.
        """
        finished: dict[str, Statistic] = {}
        for together in _rounds(statistics):
            running = [copy.deepcopy(statistic) for statistic in together]
            for statistic in running:
                statistic.start(self.layer.expert_count, self.layer.width, self.layer.device)
                if statistic.after:
                    statistic.given({name: finished[name] for name in statistic.after})

            def see(batch: TokenBatch, running: Sequence[Statistic] = running) -> None:
                for statistic in running:
                    statistic.update(batch)

            self.observe(see, experts=experts)
            for statistic in running:
                statistic.to_host()
                finished[statistic.name] = statistic
        return {statistic.name: finished[statistic.name] for statistic in statistics}


def only_experts(batch: TokenBatch, wanted_E: Tensor) -> TokenBatch:
    """The batch with the rows of some experts only; its tokens, slots and gates stay, other experts' counts are zero.

    Args:
        batch: what a layer computed.
        wanted_E: bool.
    """
    rows_S = wanted_E[batch.expert_S]
    return dataclasses.replace(
        batch,
        outputs_SD=batch.outputs_SD[rows_S],
        expert_S=batch.expert_S[rows_S],
        token_S=batch.token_S[rows_S],
        slot_S=batch.slot_S[rows_S],
        counts_E=batch.counts_E * wanted_E,
    )


def stream_layers(
    moe: MoEModel,
    batches: Sequence[Batch],
    work: Work,
    *,
    layers: Collection[int] | None = None,
    programs: Mapping[int, LayerProgram] | None = None,
    change: Change | None = None,
    buffers: Buffers = "host",
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> StreamResult:
    """Bring the whole text before one MoE layer after the other, in increasing order.

    Args:
        moe: the opened model. What is installed on it stays so; where slots are answered by fills, give `programs`, as
            only one `Instrument` can answer or watch a layer.
        batches: the model's keyword arguments of each forward: `input_ids` [rows, L], and where there is padding
            `attention_mask` and `position_ids`. They are sent to the model's device.
        work: does everything that a layer is visited for, and returns what is kept of it, as tensors.
        layers: indices of the MoE layers to stop at; all if None.
        programs: what layers run from the start.
        change: called with each finished layer and what was kept of it, also on a rerun, before the layer's outputs are
            derived: it may edit weights in place, and may return a program for the layer. Without it, outputs are those
            of the first visit; with it, they take one more pass over the layer.
        buffers: where hidden states wait: the host's memory, the layers' device, or a folder.
        checkpoint: where finished layers are saved.
        progress: called with (what, done, total): blocks within a visit or stretch, and finished layers.

    Raises:
        UsageError: no batches, batches without `input_ids`, or layers that do not exist.
        IntegrityError: a layer whose hooks do not run.
    """
    wanted = _wanted(moe, layers)
    # A rerun finds what is there; only the rest needs hidden states.
    kept: dict[int, Kept] = {}
    if checkpoint is not None:
        found = {layer.index: checkpoint.read(layer.index) for layer in wanted}
        kept = {index: tensors for index, tensors in found.items() if tensors is not None}
    resumed = tuple(kept)
    engine = _Engine(moe, batches, programs or {}, buffers, progress)
    engine.last = max((layer.index for layer in wanted if layer.index not in kept), default=-1)
    engine.keeps_outputs = change is None
    with engine:
        for done, layer in enumerate(wanted):
            if layer.index not in kept:
                engine.advance(layer.index)
                kept[layer.index] = work(LayerVisit(engine, layer))
                if checkpoint is not None:
                    checkpoint.write(layer.index, kept[layer.index])
            if change is not None and (program := change(layer, kept[layer.index])) is not None:
                engine.programs[layer.index] = program
            engine.report("fit pass, layers", done + 1, len(wanted))
    in_order = {layer.index: kept[layer.index] for layer in wanted}
    return StreamResult(engine.tokens, in_order, engine.proof, resumed)


def fit_pass(
    moe: MoEModel,
    tokens: CalibrationTokens,
    statistics: Sequence[Statistic],
    *,
    experts: Mapping[int, Collection[int]] | None = None,
    batch_tokens: int = 8192,
    programs: Mapping[int, LayerProgram] | None = None,
    buffers: Buffers = "host",
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> FitResult:
    """Collect statistics layer by layer: those of a score pass bit for bit, and those that need several visits.

    All states stay in the host's memory. Where one layer's are large (a matrix per expert), let a `work` of your own
    turn `LayerVisit.measure` into what is needed of them, and run it by `stream_layers`.

    Args:
        moe: the opened model.
        tokens: the blocks, all of equal length.
        statistics: fresh instances; `Count` is always among them.
        experts: layer index -> experts whose rows count, and the layers to stop at; None counts all of all.
        batch_tokens: tokens per forward.
        programs: what layers run while they are measured.
        buffers: where hidden states wait.
        checkpoint: where finished layers are saved; what is measured, and of whom, is added to its key.
        progress: called with (what, done, total).

    Raises:
        UsageError: as `stream_layers` and `LayerVisit.measure`.
        IntegrityError: if a layer of which everything counts did not fill exactly k slots per token.
    """
    if Count.name not in {statistic.name for statistic in statistics}:
        statistics = (*statistics, Count())
    if checkpoint is not None:
        checkpoint = dataclasses.replace(checkpoint, key=_fit_key(checkpoint.key, statistics, experts))

    def work(visit: LayerVisit) -> Kept:
        chosen = None if experts is None else experts[visit.layer.index]
        beside = _Beside(visit.layer.convention.identities)
        measured = visit.measure((*statistics, beside), experts=chosen)
        slots = measured.pop(beside.name).value()
        if experts is None:
            check_slots(visit.layer, measured, visit.tokens, slots)
        return {f"{name}/{part}": value for name, one in measured.items() for part, value in one.state.items()}

    result = stream_layers(
        moe,
        [{"input_ids": ids_BL} for ids_BL in batches_of(tokens, batch_tokens)],
        work,
        layers=experts,
        programs=programs,
        buffers=buffers,
        checkpoint=checkpoint,
        progress=progress,
    )
    layers = {index: _restored(statistics, kept) for index, kept in result.layers.items()}
    return FitResult(ScoreResult(result.tokens, layers), result.proof, result.resumed)


class _Beside(Statistic):
    """Slots of identity experts, which are beside the others'.

    Args:
        identities: how many such experts there are.
    """

    name = "slots of identity experts"

    def __init__(self, identities: int) -> None:
        super().__init__()
        self.identities = identities

    def start(self, experts: int, width: int, device: torch.device) -> None:
        """At zero."""
        self.experts = experts
        self.state = {"slots": torch.zeros((), dtype=torch.int64, device=device)}

    def update(self, batch: TokenBatch) -> None:
        """Count."""
        self.state["slots"] += identity_slots(batch, self.experts, self.identities)

    def value(self) -> int:
        """How many."""
        return int(self.state["slots"])


class _Engine:
    """The text on its way through the decoder layers: which layer it stands before, and its hidden states there.

    Args:
        moe: the opened model.
        batches: of the model's keyword arguments.
        programs: layer index -> what that layer runs.
        buffers: where hidden states wait.
        progress: called with (what, done, total).
    """

    def __init__(
        self,
        moe: MoEModel,
        batches: Sequence[Batch],
        programs: Mapping[int, LayerProgram],
        buffers: Buffers,
        progress: Progress | None,
    ) -> None:
        if not batches or any(not isinstance(batch.get("input_ids"), Tensor) for batch in batches):
            raise UsageError(f"{len(batches)} batches", expected="≥ 1 batch, each with input_ids")
        self.moe, self.batches, self.programs = moe, tuple(batches), dict(programs)
        self.blocks = sum(int(batch["input_ids"].shape[0]) for batch in batches)
        self.tokens = sum(_tokens_of(batch) for batch in batches)
        self.last = -1
        self.keeps_outputs = True
        self._buffers, self._progress = buffers, progress
        self._position = 0
        # None: before layer 0 the model's own embeddings are the hidden states.
        self._inputs: _HiddenStates | None = None
        self._outputs: _HiddenStates | None = None
        first = {name: value[:PROOF_BLOCKS] for name, value in batches[0].items()}
        self.stack, self.proof = prove(moe, self._sent(first))

    def __enter__(self) -> None:
        """Nothing: hidden states come with the first layer."""

    def __exit__(self, *_: object) -> None:
        """Let go of all hidden states."""
        for states in (self._inputs, self._outputs):
            if states is not None:
                states.drop()

    def report(self, what: str, done: int, total: int) -> None:
        """Tell how far we are."""
        if self._progress is not None:
            self._progress(what, done, total)

    def advance(self, index: int) -> None:
        """Bring the hidden states of all batches before decoder layer `index`."""
        if not self.proof.streamed:
            return
        if self._outputs is not None:
            self._move(self._outputs)
            self._outputs = None
        if self._position < index:
            states = _HiddenStates(self._buffers, index)
            what = f"hidden states before layer {index}"
            try:
                self._pass(self._position, index - 1, what, store=states.write)
            except BaseException:
                states.drop()
                raise
            self._move(states)
        assert self._position == index

    def _move(self, states: _HiddenStates) -> None:
        """Stand before another layer, with its inputs."""
        if self._inputs is not None:
            self._inputs.drop()
        self._inputs, self._position = states, states.position

    def visit(self, layer: MoELayer, see: See | None, number: int) -> None:
        """Run a layer over all batches; at the first visit its outputs are kept if they will be needed."""
        if layer.index != self._position and self.proof.streamed:
            raise UsageError(
                f"layer {layer.index} is over", where="LayerVisit", expected="visits within the `work` that it came to"
            )
        first = self._position if self.proof.streamed else 0
        what = f"layer {layer.index}, visit {number}"
        keep = self.proof.streamed and self.keeps_outputs and self._outputs is None and layer.index < self.last
        if not keep:
            self._pass(first, layer.index, what, visited=layer, see=see)
            return
        outputs = _HiddenStates(self._buffers, layer.index + 1)
        try:
            self._pass(first, layer.index, what, visited=layer, see=see, store=outputs.write)
        except BaseException:
            outputs.drop()
            raise
        self._outputs = outputs

    def run_layer(self, position: int, layer: MoELayer | None, see: See | None) -> None:
        """Run the decoder layer that the text stands before, MoE or not, over all batches."""
        first = self._position if self.proof.streamed else 0
        self._pass(first, position, f"layer {position}", visited=None if see is None else layer, see=see)

    def _pass(
        self,
        first: int,
        last: int,
        what: str,
        *,
        visited: MoELayer | None = None,
        see: See | None = None,
        store: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        """Run decoder layers `first` to `last` over all batches.

        Args:
            first: the layer that the hidden states stand before.
            last: the last one that runs.
            what: for progress.
            visited: the MoE layer to show to `see`.
            see: called with each of its batches.
            store: called with each batch's number and the hidden states after `last`.
        """
        done = 0
        with torch.inference_mode(), ExitStack() as entered:
            instruments = [entered.enter_context(one) for one in self._instruments(first, last, visited, see)]
            for number, batch in enumerate(self.batches):
                for instrument in instruments:
                    # A forward that is left early does not count its blocks, and a visit starts from block 0.
                    instrument.blocks_seen = done
                hidden = self._run(batch, number, first, last)
                for instrument in instruments:
                    _demand_fired(instrument)
                done += int(batch["input_ids"].shape[0])
                if store is not None:
                    store(number, hidden)
                self.report(what, done, self.blocks)

    def _instruments(self, first: int, last: int, visited: MoELayer | None, see: See | None) -> Iterator[Instrument]:
        """One for the programs of the layers on the way, one for the visited layer; none that would do nothing."""
        on_the_way = tuple(
            layer
            for layer in self.moe.layers
            if layer is not visited
            and layer.index in self.programs
            and (self.stack is None or first <= layer.index <= last)
        )
        if on_the_way:
            programs = {layer.index: self.programs[layer.index] for layer in on_the_way}
            yield Instrument(dataclasses.replace(self.moe, layers=on_the_way), programs)
        if visited is not None and (see is not None or visited.index in self.programs):
            program = {visited.index: self.programs[visited.index]} if visited.index in self.programs else {}

            def observer(_layer: MoELayer, batch: TokenBatch) -> None:
                assert see is not None
                see(batch)

            yield Instrument(
                dataclasses.replace(self.moe, layers=(visited,)), program, observer=None if see is None else observer
            )

    def _run(self, batch: Batch, number: int, first: int, last: int) -> Tensor:
        """Decoder layers `first` to `last` on one batch, or the whole forward if there is no telling layers apart."""
        sent = self._sent(batch)
        if self.stack is None:
            self.moe.model(**sent, use_cache=False, logits_to_keep=LAST_TOKEN)
            return torch.empty(0)
        hidden = None if self._inputs is None else self._inputs.read(number)
        return self.stack.run(sent, first, last, hidden)

    def _sent(self, batch: Batch) -> dict[str, Tensor]:
        return {name: value.to(self.moe.input_device) for name, value in batch.items()}


class _HiddenStates:
    """The hidden states of all batches before one decoder layer, where there is room for them.

    Args:
        place: the host's memory, the device that they were computed on, or a folder.
        position: of the layer.
    """

    def __init__(self, place: Buffers, position: int) -> None:
        self.position = position
        self._place = place
        self._states: dict[int, Tensor | Path] = {}

    def write(self, number: int, hidden: Tensor) -> None:
        """Keep those of one batch."""
        if not isinstance(self._place, Path):
            self._states[number] = hidden.cpu() if self._place == "host" else hidden
            return
        path = self._place / f"hidden-{self.position}-{number}.safetensors"
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            self._states[number] = path
            save_file({"hidden": hidden.cpu().contiguous()}, path)
        except (OSError, SafetensorError) as error:
            raise UsageError(
                "cannot keep hidden states", where=str(path), expected="a writable folder with room", fix=str(error)
            ) from error

    def read(self, number: int) -> Tensor:
        """Those of one batch; the stored tensor itself where they are in memory."""
        state = self._states[number]
        return load_file(state)["hidden"] if isinstance(state, Path) else state

    def drop(self) -> None:
        """Free the room."""
        for state in self._states.values():
            if isinstance(state, Path):
                state.unlink(missing_ok=True)
        self._states.clear()


# --- helpers


def _wanted(moe: MoEModel, layers: Collection[int] | None) -> tuple[MoELayer, ...]:
    known = {layer.index for layer in moe.layers}
    if layers is not None and (unknown := sorted(set(layers) - known)):
        raise UsageError(
            f"layer {unknown[0]} is no MoE layer", expected=", ".join(str(index) for index in sorted(known))
        )
    return tuple(layer for layer in moe.layers if layers is None or layer.index in layers)


def _tokens_of(batch: Batch) -> int:
    """Tokens that are not padding."""
    mask = batch.get("attention_mask")
    return int(batch["input_ids"].numel() if mask is None else mask.bool().sum())


def _demand_fired(instrument: Instrument) -> None:
    """The check that `Instrument` makes at the end of a whole forward, for one that is left early."""
    watched = {
        layer.index
        for layer in instrument.moe.layers
        if instrument.observer is not None or instrument.programs[layer.index].pruned
    }
    if silent := sorted(watched - instrument.fired):
        raise IntegrityError(
            "the hooks of a layer did not run",
            where=instrument.moe.layer(silent[0]).name,
            expected="router and experts to be called as modules",
            fix="load the model without fused or quantised MoE kernels",
        )


def _restricted(see: See, experts: Collection[int], layer: MoELayer) -> See:
    """`see`, shown only these experts' rows."""
    if unknown := sorted(set(experts) - set(range(layer.expert_count))):
        raise UsageError(
            f"expert {unknown[0]} does not exist", where=layer.name, expected=f"0 to {layer.expert_count - 1}"
        )
    wanted_E = torch.zeros(layer.expert_count, dtype=torch.bool)
    wanted_E[sorted(experts)] = True
    wanted_E = wanted_E.to(layer.device)
    return lambda batch: see(only_experts(batch, wanted_E))


def _rounds(statistics: Sequence[Statistic]) -> Iterator[tuple[Statistic, ...]]:
    """The statistics of each visit: those whose `after` are all finished."""
    waiting = {statistic.name: statistic for statistic in statistics}
    if len(waiting) < len(statistics):
        raise UsageError("two statistics of one name", expected="a name each", fix="give one of them another name")
    finished: set[str] = set()
    while waiting:
        together = tuple(one for one in waiting.values() if set(one.after) <= finished)
        if not together:
            name, statistic = next(iter(waiting.items()))
            missing = [other for other in statistic.after if other not in finished]
            raise UsageError(
                f"statistic {name!r} comes after {missing[0]!r}, which is not there before it",
                where=type(statistic).__name__,
                expected="a statistic of this name, which does not come after it in turn",
            )
        yield together
        finished |= {one.name for one in together}
        for one in together:
            del waiting[one.name]


def _fit_key(key: str, statistics: Sequence[Statistic], experts: Mapping[int, Collection[int]] | None) -> str:
    """The key of a fit pass: the caller's, what is measured, and of whom."""
    measured = {
        one.name: [
            type(one).__qualname__,
            one.version,
            {name: repr(value) for name, value in vars(one).items() if name != "state"},
        ]
        for one in statistics
    }
    of_whom = None if experts is None else {str(index): sorted(ids) for index, ids in experts.items()}
    return canonical_json([key, measured, of_whom])


def _restored(statistics: Sequence[Statistic], kept: Kept) -> dict[str, Statistic]:
    """Finished statistics from their states."""
    restored = {statistic.name: copy.deepcopy(statistic) for statistic in statistics}
    for name, tensor in kept.items():
        statistic, _, part = name.partition("/")
        restored[statistic].state[part] = tensor
    return restored
